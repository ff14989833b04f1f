"""``hasten.script``: a command, or a function that trains, as a task from Python."""

import sys
from types import SimpleNamespace

import pytest
import torch

import hasten
from hasten.core.errors import ConfigurationError
from hasten.engine.tasks import TaskRef
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import ScriptDescription, ScriptTrial

MODULE = """import torch


class Job:
    def train(self):
        pass


def train():
    torch.manual_seed(0)
    inputs = torch.randn(200, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(6):
        model.train()
        for rows in torch.randperm(200).split(20):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[rows]), inputs[rows].sum(1, keepdim=True)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print("val loss", torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).item())
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's package, imported from a directory that is not the current one."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "training.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import own.training  # pyright: ignore[reportMissingImports]

    yield own.training
    for name in ("own.training", "own"):
        sys.modules.pop(name, None)


def test_command_is_a_task(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    ref = hasten.script(f"{sys.executable} train.py --lr 0.1", metric="val loss", vary=["--lr"])
    assert ref == hasten.script([sys.executable, "train.py", "--lr", "0.1"], metric="val loss", vary=["lr"])
    assert isinstance(ref, ScriptRef) and ref.name == "train" and ref.vary == ("lr",)
    assert TaskRef.of(ref) is ref


def test_function_is_called_by_its_module(module, tmp_path):
    ref = hasten.script(module.train)
    assert ref.argv[1:] == ("-c", "from importlib import import_module; import_module('own.training').train()")
    assert (ref.name, ref.file) == ("train", str(tmp_path / "own" / "training.py"))
    assert ref.environment["PYTHONPATH"].split(":")[0] == str(tmp_path)


def test_function_that_cannot_be_imported_is_refused(module, monkeypatch):
    def inner():
        pass

    for function, message in (
        (inner, "stands inside of another function or class"),
        (module.Job.train, "Job.train stands inside of another function or class"),
        (lambda: None, "stands inside of another function"),
        (torch.nn.Linear(1, 1), "a function that makes and trains everything, not Linear"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            hasten.script(function)
    monkeypatch.delattr(module, "__file__")
    with pytest.raises(ConfigurationError, match="train stands in a notebook or a shell; write it at the top"):
        hasten.script(module.train)
    monkeypatch.setenv("HASTEN_HOST", "of a trial")
    with pytest.raises(ConfigurationError, match="call it under if __name__"):
        hasten.script(module.train)


@pytest.mark.parametrize("thing", [torch.nn.Linear(1, 1), SimpleNamespace(fit=print), SimpleNamespace(train=print)])
def test_object_that_trains_is_no_task(thing):
    with pytest.raises(ConfigurationError, match=r"write a function that makes it and trains it, .* hasten\.script"):
        hasten.tune(thing)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_function_is_watched_and_trained(module):
    ref = hasten.script(module.train)
    facts = ScriptDescription(ref).facts(processes=1)
    assert facts["metric"] == "val loss"
    run = ScriptTrial(ref, methods={"fused_optimizer": {}}, device="cpu", seed=0).run()
    assert run["steps"] == 60 and len(run["evaluations"]) == 6
