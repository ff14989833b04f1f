"""The files of a script: read once when a search begins; a change of one ends it, and what else lies there does not."""

import json
import os
import sys
import threading
import time

import pytest

import hasten
from hasten.cli.main import _code_and_message
from hasten.hosts import script_files, site_map
from hasten.hosts.arm import ScriptArm
from hasten.hosts.process import ScriptProcess
from hasten.hosts.script_files import MAX_OF_CODE, ScriptChangedError, code_files
from hasten.hosts.script_ref import ScriptRef


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    (tmp_path / "config.yaml").write_text("epochs: 3")
    return ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))


@pytest.mark.parametrize("name", ["train.py", "config.yaml"])
def test_edit_during_a_search_ends_it_in_one_line_and_keeps_what_is_known(script, tmp_path, name):
    script.begin("search")
    site_map.remember(script, {"sites": {}, "evaluation_seconds": 2.0})
    site_map.hide_checkpoints(script, ["best.pt"])
    (tmp_path / name).write_text("import torch  # edited")
    with pytest.raises(ScriptChangedError) as changed:
        ScriptProcess(script, {})
    line = f"{name} has changed since the search began; start it again"
    assert _code_and_message(changed.value) == (2, line)
    known = site_map.known_sites(script)
    assert known is not None and known["evaluation_seconds"] == 2.0
    assert site_map.hidden_checkpoints(script) == ["best.pt"]


def test_change_is_no_result_of_a_trial():
    """A search notes the errors of these kinds, and continues."""
    assert not issubclass(ScriptChangedError, (hasten.RunError, hasten.ConfigurationError))


def test_file_that_is_saved_without_a_change_is_the_same(script, tmp_path):
    before = script.fingerprint()
    os.utime(tmp_path / "train.py", ns=(1, 1))
    (tmp_path / "notes.py").touch()
    script.check_unchanged()
    assert script.fingerprint() == before


def test_file_that_is_gone_has_changed(script, tmp_path):
    script.begin("command")
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ScriptChangedError, match=r"^config.yaml has changed since the command began; start it again$"):
        script.check_unchanged()


def test_log_that_the_command_names_may_change(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "train.log").touch()
    argv = [sys.executable, "train.py", "--log", "train.log"]
    script = ScriptRef.of_command(argv, directory=str(tmp_path))
    script.begin("search")
    (tmp_path / "train.log").write_text("epoch 1")
    script.check_unchanged()


def test_next_command_of_the_same_reference_takes_the_files_as_they_are_then(script, tmp_path):
    """As in a notebook: tune, edit, compare, edit, diagnose."""
    script.begin("search")
    before = script.fingerprint()
    (tmp_path / "train.py").write_text("import torch  # faster")
    script.begin("command")
    assert script.fingerprint() == before, "a diagnosis in a search is a part of it"
    with pytest.raises(ScriptChangedError):
        script.check_unchanged()
    script.end()
    script.begin("command")
    script.check_unchanged()
    between = script.fingerprint()
    (tmp_path / "train.py").write_text("import torch  # fastest")
    script.begin("command")
    script.check_unchanged()
    assert len({before, between, script.fingerprint()}) == 3


def test_directories_of_data_hold_no_code(tmp_path):
    for name in ("data", "model", "data/classes"):
        (tmp_path / name).mkdir()
    for i in range(MAX_OF_CODE + 1):
        (tmp_path / "data" / "classes" / f"{i}.jpg").touch()
    for name in ("train.py", "model/net.py", "data/classes/0.py", "data/load.py"):
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in code_files(tmp_path)]
    assert found == ["train.py", "data/load.py", "model/net.py"]


def test_walk_ends_after_so_many_names(tmp_path, monkeypatch):
    monkeypatch.setattr(script_files, "MAX_ENTRIES", 30)
    for i in range(20):
        (tmp_path / f"class-{i}" / "images").mkdir(parents=True)
        (tmp_path / f"class-{i}" / "images" / "late.py").touch()
    (tmp_path / "train.py").touch()
    seen = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda directory: seen.append(directory) or scan(directory))
    assert code_files(tmp_path) == [tmp_path / "train.py"] and len(seen) <= 11


def test_recipe_of_a_search_in_the_directory_of_the_script_is_no_code(script, tmp_path):
    for name in ("trials.jsonl", "lock", "recipe.toml"):
        (tmp_path / name).touch()
    assert [path.name for path in code_files(tmp_path)] == ["config.yaml", "train.py"]


TRAINING = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6000, 4)), batch_size=2)
for epoch in range(20):
    for (x,) in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_arm_of_an_edited_script_is_not_started_again(script, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    with ScriptArm(script) as arm:
        arm.build()
        (tmp_path / "train.py").write_text(TRAINING.replace("0.1", "0.2"))
        with pytest.raises(ScriptChangedError):
            arm._restart()


@pytest.mark.slow
def test_search_whose_script_is_edited_keeps_its_result(script, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    out = tmp_path / "out"

    def edit() -> None:
        while not (out / "result.json").exists():
            time.sleep(0.05)
        (tmp_path / "train.py").write_text(TRAINING.replace("0.1", "0.2"))

    editor = threading.Thread(target=edit, daemon=True)
    editor.start()
    with pytest.raises(ScriptChangedError, match=r"^train\.py has changed since the search began; start it again$"):
        hasten.tune(script, budget=60, out=out, device="cpu", evidence="exact")
    editor.join()
    assert json.loads((out / "result.json").read_text())["verdict"] == "no improvement"
    assert json.loads((out / "sites.json").read_text())["optimizers"]
