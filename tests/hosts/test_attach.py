"""``hasten.attach``: nothing without hasten; under it model, optimizer, loader and metric are those that it names."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hasten
from hasten.core.recipe import Recipe
from hasten.hosts.arm import ScriptArm
from hasten.hosts.inside.attach import SESSION
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import watch_script

SCRIPTS = Path(__file__).with_name("scripts")
WITHOUT_TORCH = """
import sys, hasten
run = hasten.attach(None, None, [1, 2])
run.metric("val_loss", object())
assert run.batches == [1, 2] and "torch" not in sys.modules
"""


def script(*argv: str, directory: Path = SCRIPTS) -> ScriptRef:
    return ScriptRef.of_command([sys.executable, *argv], directory=str(directory))


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
    assert loader["site"].startswith("attached.py:19#")
    assert [model["type"] for model in described["models"]] == ["Sequential", "Linear"]
    assert described["samples_per_step"] == 8
    assert described["metric"] == {"name": "skill", "direction": "max"}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_attached_script_is_trained_in_blocks_with_the_time_of_its_batches():
    with ScriptArm(script("attached.py"), methods={}, device="cpu", seed=0, timeout=120.0) as arm:
        plan = arm.call("build")
        block = arm.call("train", count=20, timed=True)
    assert plan["samples_per_step"] == 8 and block["count"] == 20
    assert block["phases"]["input"] > 0 and block["phases"]["forward"] > 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_attaching_changes_nothing_but_what_hasten_knows(tmp_path):
    """The output of the script, which depends on all its bits, is that of the script alone."""
    argv = [sys.executable, "attached.py", "3"]
    alone = subprocess.run(argv, cwd=SCRIPTS, capture_output=True, text=True, check=True).stdout
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(Recipe.coerce("fused_optimizer").to_toml())
    command = [sys.executable, "-m", "hasten", "train", "--recipe", str(recipe), "--", *argv]
    under = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True)
    assert under.returncode == 0, under.stderr
    assert [line for line in under.stdout.splitlines() if "interest" in line][-1][:30] == alone.splitlines()[-1][:30]
