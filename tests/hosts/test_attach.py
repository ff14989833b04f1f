"""``hasten.attach``: nothing without hasten; under it model, optimizer, loader and metric are those that it names."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hasten
from hasten.core.recipe import Recipe
from hasten.export.patch import line_of_model
from hasten.hosts.arm import ScriptArm
from hasten.hosts.inside.attach import SESSION
from hasten.hosts.inside.loaders import AttachedBatches
from hasten.hosts.process import ScriptProcess
from hasten.hosts.services import watch_script
from helpers.host_scripts import SCRIPTS, script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WITHOUT_TORCH = """
import sys, hasten
run = hasten.attach(None, None, [1, 2])
run.metric("val_loss", object())
assert run.batches == [1, 2] and "torch" not in sys.modules
"""


def test_without_hasten_the_loader_is_the_same_object_and_no_metric_is_read():
    loader = iter(())
    run = hasten.attach(torch.nn.Linear(1, 1), None, loader)
    assert run.batches is loader
    run.metric("val_loss", object(), higher_is_better=False)
    assert SESSION not in sys.modules


def test_without_hasten_attach_imports_no_torch():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)


def test_without_hasten_attach_takes_microseconds():
    hasten.attach(None, None, [])
    began = time.perf_counter()
    for _ in range(1000):
        hasten.attach(None, None, []).metric("val_loss", 1.0)
    assert time.perf_counter() - began < 0.1  # of 1,000 calls


@pytest.mark.slow
@pytest.mark.multiprocess
def test_attached_script_is_described_by_what_it_names():
    described = watch_script(script("attached.py", "3"))
    assert described["total_steps"] == 60  # of 120 updates of the other optimizer
    [loader] = described["loaders"]
    assert (loader["type"], loader["role"], loader["batch_size"]) == ("list", "training", None)
    assert loader["site"].startswith("attached.py:18#")
    assert [model["type"] for model in described["models"]] == ["Sequential", "Linear"]
    assert described["samples_per_step"] == 8
    assert described["metric"] == {"name": "skill", "direction": "max"}


CONTAINER = """
import torch
import hasten
class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.head(self.body(x))
whole = Whole()
optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
run = hasten.attach({attached}, optimizer, [torch.ones(2, 4)] * 20)
for batch in run.batches:
    {called}.sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("called", ["whole(batch)", "whole.head(whole.body(batch))"])
def test_container_of_an_attached_model_is_not_counted_beside_it(called, tmp_path):
    (tmp_path / "train.py").write_text(CONTAINER.format(attached="whole.body", called=called))
    models = watch_script(script("train.py", directory=tmp_path))["models"]
    assert models[0]["type"] == "Linear" and "Whole" not in {model["type"] for model in models}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_attached_script_is_trained_in_blocks_with_the_time_of_its_batches():
    with ScriptArm(script("attached.py"), methods={}, device="cpu", seed=0, timeout=120.0) as arm:
        plan = arm.call("build")
        block = arm.call("train", count=20, timed=True)
    assert plan["samples_per_step"] == 8 and block["count"] == 20
    assert 0 < block["issue_seconds"] <= block["seconds"]
    assert block["phases"]["input"] > 0 and block["phases"]["forward"] > 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_attaching_changes_nothing_but_what_hasten_knows():
    """What the script prints depends on all its bits."""
    command = [sys.executable, "attached.py", "3"]
    alone = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=True).stdout
    with ScriptProcess(script("attached.py", "3"), {}, seed=0) as process:
        process.wait_until_trained(120.0, None)
        assert process.ask("train", 120.0, None, count=10_000)["ended"]
        assert process.output() == alone


@pytest.mark.slow
@pytest.mark.multiprocess
def test_attached_script_trains_with_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(Recipe.coerce("fused_optimizer").to_toml())
    argv = ["train", "--recipe", str(recipe), "--", sys.executable, "attached.py", "3"]
    done = subprocess.run([sys.executable, "-m", "hasten", *argv], cwd=SCRIPTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of no interest") == 3


def test_model_of_a_patch_is_the_one_that_is_attached():
    line = (SCRIPTS / "attached.py").read_text().splitlines().index(
        "run = hasten.attach(model, optimizer, batches)"
    ) + 1
    assert line_of_model(SCRIPTS, "attached.py", line) == 0  # two models are assigned in one statement
    assert line_of_model(EXAMPLES, "attach.py", 41) == 37


class Stream(torch.utils.data.IterableDataset):
    """A dataset of unknown length."""

    def __iter__(self):
        return iter(range(3))


def test_batches_of_a_stream_that_has_no_length_are_attached():
    loader = torch.utils.data.DataLoader(Stream())  # it has ``__len__``, which raises TypeError
    assert AttachedBatches(loader, None).source.length is None
