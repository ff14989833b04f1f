"""``kill -9`` at any time, also during a checkpoint: the resumed run ends with the same bits."""

from pathlib import Path

import pytest

import hasten
from helpers.killing import METHOD, TASK, kill_and_resume


def compare_with_undisturbed(directory: Path, kills: int, seed: int) -> None:
    hasten.train(TASK, METHOD, out=directory / "undisturbed", device="cpu")
    kill_and_resume(directory, kills, seed)
    for name in ("model.safetensors", "log.jsonl"):
        assert (directory / "killed" / name).read_bytes() == (directory / "undisturbed" / name).read_bytes(), name


@pytest.mark.slow
def test_run_killed_twice_is_bit_identical(tmp_path):
    compare_with_undisturbed(tmp_path, 2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(4))
def test_run_killed_twenty_times_is_bit_identical(round_, tmp_path):
    compare_with_undisturbed(tmp_path, 5, seed=round_)
