"""Trials are stored at once, found again, and never confused."""

import gc
import json

import psutil
import pytest

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.tuning.trial_store import FILE, LOCK, TrialStore


def counted(calls: list, value: float = 1.5):
    def measure() -> dict:
        calls.append(1)
        return {"seconds": value}

    return measure


def test_trial_is_measured_once(tmp_path):
    calls = []
    for _ in range(2):
        store = TrialStore(tmp_path, {"task": "a"})
        for _ in range(2):
            assert store.trial("run", {"seed": 1}, counted(calls))[1] == {"seconds": 1.5}
    assert len(calls) == 1
    assert store.reused == 1, "however often it was asked for"


@pytest.mark.parametrize(
    "other",
    [("run", {"seed": 2}, {"task": "a"}), ("pace", {"seed": 1}, {"task": "a"}), ("run", {"seed": 1}, {"task": "b"})],
)
def test_trial_of_another_seed_kind_or_task_is_another_trial(tmp_path, other):
    calls, (kind, what, setting) = [], other
    TrialStore(tmp_path, {"task": "a"}).trial("run", {"seed": 1}, counted(calls))
    TrialStore(tmp_path, setting).trial(kind, what, counted(calls))
    assert len(calls) == 2


def test_trial_with_a_transient_failure_is_repeated_by_the_next_search(tmp_path):
    """A failure of the task may be caused by its data, which can be fixed; a failure of a recipe remains."""
    calls = []

    def failing() -> dict:
        calls.append(1)
        return {"failed": "sample 7: a file is gone"}

    for failure_lasts, measured in ((True, 1), (False, 2)):
        calls.clear()
        for _ in range(2):
            store = TrialStore(tmp_path, {"lasts": failure_lasts})
            for _ in range(2):
                assert "failed" in store.trial("run", {"seed": 1}, failing, failure_lasts)[1]
        assert len(calls) == measured


@pytest.mark.parametrize("is_check", [False, True], ids=["run", "check of exactness"])
@pytest.mark.parametrize(
    "moment",
    [
        "OSError: [Errno 5] Input/output error: 'a.npy'",
        "ConnectionError: reset",
        "memory ran out in step 3",
        "cannot write /c: the disk is full; free space",
        "train: RuntimeError: PytorchStreamWriter failed writing file",
        "the check does not fit into memory: 3 GB",
    ],
)
def test_trial_without_machine_resources_is_no_verdict_on_the_recipe(tmp_path, moment, is_check):
    lost = {"passed": False, "why": moment} if is_check else {"failed": moment}
    assert TrialStore(tmp_path, {}).trial("run", {}, lambda: lost)[1] == lost
    assert TrialStore(tmp_path, {}).trial("run", {}, counted([]))[1] == {"seconds": 1.5}


def test_file_with_foreign_bytes_loses_only_them(tmp_path):
    TrialStore(tmp_path, {}).trial("run", {}, counted([]))
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"\xff\xfe not text\n")
    calls = []
    with pytest.warns(HastenWarning, match="1 of 2 lines of .* cannot be read; these trials are measured again"):
        again = TrialStore(tmp_path, {})
    again.trial("run", {}, counted(calls))
    assert not calls


def test_line_truncated_by_a_kill_loses_only_that_trial(tmp_path):
    calls = []
    store = TrialStore(tmp_path, {})
    for seed in (1, 2):
        store.trial("run", {"seed": seed}, counted(calls))
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-20])
    again = TrialStore(tmp_path, {})
    for seed in (1, 2):
        again.trial("run", {"seed": seed}, counted(calls))
    assert len(calls) == 3
    intact = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert {entry["what"]["seed"] for entry in intact if "outcome" in entry} == {1, 2}


def test_file_in_place_of_the_directory_is_one_error_line(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigurationError, match="cannot use"):
        TrialStore(tmp_path / "taken", {})


def test_trial_store_dropped_in_a_reference_cycle_closes_its_lock(tmp_path):
    """Otherwise the garbage collector would raise a ResourceWarning later."""
    store = TrialStore(tmp_path, {})
    store.cycle = store
    lock = str((tmp_path / LOCK).resolve())
    assert lock in open_files()
    del store
    gc.collect()
    assert lock not in open_files()


def open_files() -> list[str]:
    return [file.path for file in psutil.Process().open_files()]
