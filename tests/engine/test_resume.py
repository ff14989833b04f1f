"""A run resumed from any of its steps ends with the same bits."""

import dataclasses
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import Subset

import hasten
from hasten import ConfigurationError
from hasten.core.errors import HastenWarning
from helpers import engine_tasks

METHODS = f"{engine_tasks.__file__}:Averaging + {engine_tasks.__file__}:Mixing"
ENDS = ("model.safetensors", "log.jsonl")


def copied_at_every_step(task, recipe, directory: Path) -> list[Path]:
    """Trains in ``directory/whole`` and copies the directory at every step, as a kill would leave it."""
    copies = []

    def copy(records):
        copies.append(directory / f"copy{len(copies)}")
        shutil.copytree(directory / "whole", copies[-1])

    hasten.train(task, recipe, out=directory / "whole", checkpoint_seconds=0, observers=[copy], device="cpu")
    return copies


def same_ends(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in ENDS)


@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (engine_tasks.map_style, None),
        (engine_tasks.map_style, METHODS),
        (engine_tasks.map_style, f"{METHODS} + loader_workers:num_workers=2"),
        (engine_tasks.ready_loader, METHODS),
        (engine_tasks.loader_with_its_own_generator, None),
        (engine_tasks.loader_with_a_generator_in_its_batch_sampler, None),
        (engine_tasks.loss_with_a_state, None),
        (engine_tasks.loader_with_workers, METHODS),
        (engine_tasks.loader_with_persistent_workers, METHODS),
        (engine_tasks.stream, METHODS),
        (engine_tasks.evaluated_often, METHODS),
        (engine_tasks.schedule_of_numpy, None),
        (engine_tasks.map_style, "ema"),
        (engine_tasks.map_style, "in_memory_batches"),
        (engine_tasks.map_style, "gradient_accumulation"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value).replace(METHODS, "methods").replace(" ", ""),
)
def test_resume_from_every_step_is_bit_identical(make, recipe, tmp_path):
    copies = copied_at_every_step(make(), recipe, tmp_path)
    assert len(copies) >= 12
    worker_runs = "workers" in f"{make.__name__}{recipe}"
    for copy in copies[:: 4 if worker_runs else 1]:  # starting workers is slow
        result = hasten.train(make(), recipe, out=copy, resume=True, device="cpu")
        assert result["steps"] == 12
        assert same_ends(copy, tmp_path / "whole"), copy.name


def test_resume_with_other_data_length_is_refused(tmp_path):
    """A position in them would mean other samples."""
    copy = copied_at_every_step(engine_tasks.map_style(), None, tmp_path)[5]
    fewer = engine_tasks.map_style()
    fewer = dataclasses.replace(fewer, train_data=Subset(fewer.train_data, range(len(fewer.train_data) - 1)))
    with pytest.raises(
        ConfigurationError,
        match=r"the data have \d+ samples, the run in .* had \d+; .* another --out$",
    ):
        hasten.train(fewer, out=copy, resume=True, device="cpu")
    assert hasten.train(engine_tasks.map_style(), out=copy, resume=True, device="cpu")["steps"] == 12


def test_resume_with_an_edited_task_warns(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from helpers.engine_tasks import map_style as task\n")
    hasten.train(f"{file}:task", out=tmp_path / "r", device="cpu")
    (tmp_path / "r" / "result.json").unlink()  # as if it had been stopped just before its end
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has been edited")
        hasten.train(f"{file}:task", out=tmp_path / "r", resume=True, device="cpu")
    file.write_text("# the learning rate is another\nfrom helpers.engine_tasks import map_style as task\n")
    (tmp_path / "r" / "result.json").unlink()
    with pytest.warns(HastenWarning, match=r"mine.py:task has been edited"):
        hasten.train(f"{file}:task", out=tmp_path / "r", resume=True, device="cpu")


def test_resume_of_a_finished_run_returns_its_result(tmp_path):
    first = hasten.train(engine_tasks.map_style(), out=tmp_path / "r", device="cpu")
    with pytest.warns(
        HastenWarning, match=r"r had finished, with baseline: this is its result, and nothing was trained$"
    ):
        assert hasten.train(engine_tasks.map_style(), out=tmp_path / "r", resume=True, device="cpu") == first


def test_resume_of_a_missing_run_starts(tmp_path):
    assert hasten.train(engine_tasks.map_style(), out=tmp_path / "new", resume=True, device="cpu")["steps"] == 12


@pytest.mark.parametrize(
    ("again", "message"),
    [
        ({}, "--resume"),
        ({"resume": True, "seed": 4}, "another seed: 0 there, 4 here"),
        ({"resume": True, "recipe": "gradient_clipping"}, "another recipe: baseline there, gradient_clipping here"),
        ({"resume": True, "task": "other"}, "another task: task there, other here"),
        ({"resume": True, "epochs": 3}, "another epochs: 2 there, 3 here"),
    ],
)
def test_resume_of_another_run_is_refused_with_the_difference(again, message, tmp_path):
    hasten.train(engine_tasks.map_style(), out=tmp_path, device="cpu")
    log = (tmp_path / "log.jsonl").read_bytes()
    changes = {"epochs": again.pop("epochs")} if "epochs" in again else {}
    task = engine_tasks.task(engine_tasks.Augmented(), name=again.pop("task", "task"), **changes)
    with pytest.raises(ConfigurationError, match=message):
        hasten.train(task, again.pop("recipe", None), out=tmp_path, device="cpu", **again)
    assert (tmp_path / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", ["checkpoints/step-0000000004.pt", "result.json", "log.jsonl", "model.safetensors"])
def test_directory_with_leftover_files_is_no_run(left, resume, tmp_path):
    path = tmp_path / left
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match="holds no run; choose another --out"):
        hasten.train(engine_tasks.map_style(), out=tmp_path, device="cpu", resume=resume)
    assert path.read_text() == "{}"


def test_resume_of_a_run_killed_before_its_start_starts(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("log.jsonl", "times.jsonl", "recipe.toml", "environment.json.part"):
        (tmp_path / name).write_text("")
    assert hasten.train(engine_tasks.map_style(), out=tmp_path, device="cpu")["steps"]


def test_foreign_directory_is_not_changed(tmp_path):
    (tmp_path / "thesis.txt").write_text("do not touch")
    for resume in (False, True):
        with pytest.raises(ConfigurationError, match="holds no run"):
            hasten.train(engine_tasks.map_style(), out=tmp_path, resume=resume, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_parameters_of_the_loss_are_resumed(tmp_path):
    weights = []

    def task():
        weights.append(torch.nn.Parameter(torch.ones(())))
        weight = weights[-1]
        return dataclasses.replace(
            engine_tasks.map_style(),
            optimizer=lambda model: torch.optim.SGD([*model.parameters(), weight], lr=0.1),
            loss=lambda output, target: weight * torch.nn.functional.cross_entropy(output, target) + weight**2,
        )

    copies = copied_at_every_step(task(), None, tmp_path)
    hasten.train(task(), out=copies[len(copies) // 2], resume=True, device="cpu")
    assert weights[0].item() == weights[1].item() != 1
    assert same_ends(tmp_path / "whole", copies[len(copies) // 2])
