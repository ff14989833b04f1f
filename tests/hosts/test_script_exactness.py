"""Checks of exactness of scripts: the same bits, float64, gradients, and scripts that do not repeat."""

from pathlib import Path

import pytest

from hasten.core.recipe import Recipe
from hasten.hosts import exactness
from hasten.hosts.services import ScriptTrial
from helpers.host_scripts import SCRIPTS, script, written

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.mark.parametrize(
    ("argv", "recipe"),
    [
        (("tensors.py",), "in_memory_batches"),
        (("tensors.py",), "loader_workers:num_workers=2"),
        (("mnist.py",), "cache_dataset"),
        (("gpt.py",), "activation_checkpointing"),
    ],
)
def test_exact_method_gives_the_same_bits(argv, recipe):
    methods = Recipe.parse(recipe).methods
    check = ScriptTrial(script(*argv), methods=methods).check_exactness({}, "BIT_EXACT", 60.0)
    assert check["passed"] and "identical to the bit after 30 steps" in check["why"]


@pytest.mark.parametrize(("argv", "recipe"), [(("gpt.py",), "fused_optimizer"), (("mnist.py",), "channels_last")])
def test_equivalent_method_is_checked_in_float64(argv, recipe):
    check = ScriptTrial(script(*argv), methods=Recipe.parse(recipe).methods).check_exactness(
        {}, "EQUIVALENT_MATH", 60.0
    )
    assert check["passed"] and "in float64" in check["why"] and check["number"] < 1e-10


def test_method_that_changes_the_training_is_not_exact():
    methods = Recipe.parse("gradient_centralization").methods
    for promised in ("BIT_EXACT", "EQUIVALENT_MATH"):
        check = ScriptTrial(script("mnist.py"), methods=methods).check_exactness({}, promised, 60.0)
        assert not check["passed"] and "differ" in check["why"]


def test_lower_precision_is_judged_by_gradients():
    check = ScriptTrial(script("words.py"), methods={"bfloat16": {}}).check_exactness({}, "REDUCED_PRECISION", 60.0)
    assert check["number"] is not None and "gradient" in check["why"]


@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        ("torch.seed()", "calls torch.seed without a seed"),
        (
            "torch.manual_seed(__import__('time').time_ns() % 10**9)",
            "calls torch.manual_seed with another seed in each",
        ),
    ],
)
def test_script_that_is_not_reproducible_gets_statistics_and_the_cause(tmp_path, seed, cause):
    text = (SCRIPTS / "tensors.py").read_text()
    line = text[: text.index("torch.manual_seed(1)")].count("\n") + 1
    ref = written(tmp_path, text.replace("torch.manual_seed(1)", seed))
    check = ScriptTrial(ref, methods={"in_memory_batches": {}}).check_exactness({}, "BIT_EXACT", 60.0)
    assert check["statistics"] and f"not reproducible (train.py:{line} {cause}" in check["why"]


def test_runs_of_a_check_start_together_and_end_with_it(monkeypatch):
    monkeypatch.setattr(exactness, "TOGETHER", 3)
    ref = script("tensors.py", "4")
    runs = exactness._Runs(ScriptTrial(ref))
    runs.expect([({}, 30, 0), ({}, 30, 1), ({"in_memory_batches": {}}, 30, 0), ({"fused_optimizer": {}}, 30, 0)])
    first = runs.run({}, keep=True)
    began = [process.directory for process in runs.begun.values()]
    assert len(began) == 2 and len(runs.expected) == 1
    assert runs.is_reproducible() and len(runs.begun) == 2, "one of them was used, another one has begun"
    assert runs.run({"in_memory_batches": {}}).steps == first.steps == 30
    began += [process.directory for process in runs.begun.values()]
    runs.close()
    assert not runs.begun and not any(map(Path.exists, began))


def test_script_that_two_processes_cannot_run_at_once_is_checked_run_by_run(tmp_path, monkeypatch):
    monkeypatch.setattr(exactness, "TOGETHER", 2)
    exclusive = "import socket\nlock = socket.socket(socket.AF_UNIX)\n"
    exclusive += f"lock.bind(chr(0) + {f'hasten-test-{tmp_path}'!r})\n"
    ref = written(tmp_path, exclusive + (SCRIPTS / "tensors.py").read_text())
    check = ScriptTrial(ref, methods={"in_memory_batches": {}}).check_exactness({}, "BIT_EXACT", 60.0)
    assert check["passed"] and not check["statistics"], check


def test_operation_that_is_not_deterministic_is_named(tmp_path):
    text = (SCRIPTS / "tensors.py").read_text()
    noise = "torch.zeros(3).put_(torch.tensor([0, 1]), torch.ones(2))\ntorch.manual_seed(1)\n"
    noise += "torch.rand(int.from_bytes(__import__('os').urandom(2), 'big'))"
    ref = written(tmp_path, text.replace("torch.manual_seed(1)", noise))
    check = ScriptTrial(ref, methods={"in_memory_batches": {}}).check_exactness({}, "BIT_EXACT", 60.0)
    assert "not reproducible (torch has no deterministic implementation of put_): two runs" in check["why"]


def test_formula_is_compared_in_float64_where_only_the_last_bits_do_not_repeat(tmp_path):
    """As on a GPU, where some operations add in another order in every run."""
    noisy = "noisy = lambda out: out * (1 + torch.finfo(out.dtype).eps * int.from_bytes(os.urandom(1)) / 64)\n"
    text = (SCRIPTS / "tensors.py").read_text().replace("import sys\n", "import os, sys\n")
    text = text.replace("torch.manual_seed(1)\n", f"torch.manual_seed(1)\n{noisy}")
    text = text.replace("(model(data), target)", "(noisy(model(data)), target)")
    ref = written(tmp_path, text)
    exact = ScriptTrial(ref, methods={"fused_optimizer": {}}).check_exactness({}, "EQUIVALENT_MATH", 60.0)
    assert exact["passed"] and not exact["statistics"] and "in float64" in exact["why"], exact
    assert ScriptTrial(ref, methods={"in_memory_batches": {}}).check_exactness({}, "BIT_EXACT", 60.0)["statistics"]


NORMALIZED = """
import torch
from torch import nn
torch.manual_seed(0)
conv = lambda n: [nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*conv(1), *conv(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for step in range(60):
    images, labels = torch.randn(32, 1, 16, 16), torch.randint(4, (32,))
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_bias_before_batch_normalization_does_not_hide_that_a_method_is_exact(tmp_path):
    methods = Recipe.parse("channels_last + fused_optimizer").methods
    check = ScriptTrial(written(tmp_path, NORMALIZED), methods=methods).check_exactness({}, "EQUIVALENT_MATH", 60.0)
    assert check["passed"] and "after 30 steps, below" in check["why"], check["why"]
