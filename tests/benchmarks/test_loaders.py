"""Shared functions of the data-loading benchmarks: rates, and reasons for loaders that cannot run."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def loaders(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _loaders

    yield _loaders
    for name in ("_loaders", "_common"):
        sys.modules.pop(name, None)


def batches_of_ten(pause=0.0, start=0.0, nap=time.sleep):
    def passes():
        nap(start)
        for _ in range(5):
            nap(pause)
            yield {"x": (torch.zeros(10, 2), None)}

    return passes


def test_rate_counts_rows_of_many_epochs(loaders, monkeypatch):
    napped = []
    monkeypatch.setattr(loaders, "time", SimpleNamespace(perf_counter=lambda: sum(napped)))
    rate = loaders.rate(loaders.Passes(batches_of_ten(pause=0.002, nap=napped.append)), 0.1)
    assert rate == pytest.approx(5000), "ten rows every two milliseconds"


def test_first_epoch_includes_start_up(loaders):
    assert loaders.seconds_of_a_pass(batches_of_ten(start=0.05)) >= 0.05


def test_set_up_reports_loaders_that_cannot_run_but_requires_ours(loaders):
    def broken():
        raise RuntimeError("no FFmpeg\nand more")

    fine = loaders.Loader(lambda: loaders.Passes(batches_of_ten()))
    arms = {"fine": fine, "peer": loaders.Loader(broken, "json"), "absent": loaders.Loader(broken, "no_such_peer")}
    ready, missing = loaders.set_up(arms, lambda batch: True)
    assert list(ready) == ["fine"]
    assert missing == {"peer": "does not run: RuntimeError: no FFmpeg", "absent": "not installed"}
    unlike = loaders.set_up({"peer": loaders.Loader(fine.make, "json")}, lambda batch: False)[1]["peer"]
    assert "wrong shape or dtype" in unlike
    with pytest.raises(RuntimeError):
        loaders.set_up({"ours": loaders.Loader(broken)}, lambda batch: True)


def test_best_of_ignores_loaders_that_did_not_run(loaders):
    taken = {"ours": [4.0, 6.0], "slow": [1.0, 2.0], "fast": [2.0, 3.0]}
    assert loaders.best_of(taken, ["slow", "fast", "absent"]) == "fast" and loaders.best_of(taken, ["absent"]) is None
    assert loaders.over(taken, "ours", "fast").median == 2.0 and loaders.over(taken, "ours", "absent") is None


def test_table_shows_spread_and_start_up(loaders, capsys):
    _, missing = loaders.set_up(
        {"fine": loaders.Loader(lambda: loaders.Passes(batches_of_ten(start=0.05)))}, lambda batch: True
    )
    for start_up in (True, False):
        loaders.table(
            {"fine": [1000.0, 3000.0, 2000.0]}, missing | {"absent": "not installed"}, "fine", "rows/s", start_up
        )
        fine, absent = capsys.readouterr().out.splitlines()[2:]
        assert "2,000 (1,000 to 3,000)" in fine and "not installed" in absent
        assert ("." in fine.split()[-1] and float(fine.split()[-1]) >= 0.05) is start_up
