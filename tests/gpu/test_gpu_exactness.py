"""Exactness checks on an NVIDIA GPU; docs/gpu.md lists the steps that these tests are."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hasten.benchmarking.exactness import check_exactness
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods, method_class
from hasten.testing import tasks

pytestmark = pytest.mark.gpu

BIT_EXACT = ("in_memory_batches", "in_memory_batches:place=device", "loader_workers", "prefetch_to_device")
BIT_EXACT += ("activation_checkpointing", "expandable_segments")
OTHERS = ("cuda_graph", "compile", "channels_last", "fused_optimizer", "tf32", "bfloat16", "float16", "cudnn_benchmark")
TASKS = {"perceptron": tasks.perceptron, "convolutional": tasks.convolutional, "transformer": tasks.transformer}
NEW_SWITCH = """
import torch
torch.backends.cuda.matmul.fp32_precision = "tf32"
from hasten.benchmarking.exactness import check_exactness
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.testing import tasks
recipe = Recipe.coerce("in_memory_batches")
print(check_exactness(tasks.perceptron(), Recipe(), recipe, Exactness.BIT_EXACT, device="cuda"))
"""


def check(task: Task, recipe: str):
    exactness = max(
        (method_class(name).card.exactness for name in Recipe.coerce(recipe).methods), key=list(Exactness).index
    )
    return check_exactness(task, Recipe(), Recipe.coerce(recipe), exactness, device="cuda")


def segmentation() -> Task:
    """Cross-entropy over pixels, of which torch has no deterministic CUDA kernel."""
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 3, 32, 32, generator=chance)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = lambda: nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 2, 1))  # noqa: E731
    return replace(
        tasks.convolutional(), model=model, train_data=data, validation_data=data, loss=nn.functional.cross_entropy
    )


@pytest.mark.parametrize("recipe", BIT_EXACT)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_bit_exact_method_on_a_model_that_repeats_itself_is_proven_by_its_bits(task, recipe):
    """Step 13."""
    result = check(task(), recipe)
    if "no effect" not in result.why:
        assert result.passed and "does not repeat itself" not in result.why, result.why


@pytest.mark.parametrize("recipe", ["in_memory_batches", "loader_workers", "prefetch_to_device"])
def test_bit_exact_method_on_a_segmentation_model_is_judged_by_its_batches(recipe):
    """Step 13: the loss over pixels adds atomically. Where a later PyTorch repeats it, the bits are equal."""
    result = check(segmentation(), recipe)
    assert result.passed, result.why
    assert "does not repeat itself" not in result.why or "nll_loss" in result.why, result.why


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OTHERS)
@pytest.mark.parametrize("task", [tasks.convolutional, lambda: tasks.transformer(dropout=0.1)], ids=["images", "text"])
def test_method_is_as_exact_as_its_card_says(task, recipe):
    """Step 14."""
    result = check(task(), recipe)
    assert result.passed or "no effect" in result.why, result.why


def test_check_of_a_task_that_uses_the_new_tf32_switch_runs():
    """Step 12. In a process of its own: the switch cannot be taken back."""
    done = subprocess.run([sys.executable, "-c", NEW_SWITCH], capture_output=True, text=True)
    assert "passed=True" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_samples_on_the_gpu_give_the_same_weights_with_prefetching():
    """Step 11: the ring of batches was overwritten on a side stream while the main stream still read it."""
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(64 * 100, 256, generator=chance, dtype=torch.float32).cuda()
    task = Task(
        model=lambda: nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(256, 256), nn.ReLU()))),
        train_data=TensorDataset(inputs, inputs.roll(1, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
        metric="loss",
        batch_size=64,
        epochs=20,
    )

    def weights(recipe: str) -> list[torch.Tensor]:
        program = build(task, make_methods(Recipe.coerce(recipe)), device="cuda")
        with program.process_context():
            for _ in train_steps(program):
                pass
        return [value.cpu() for value in program.run.model.parameters()]

    assert all(map(torch.equal, weights("in_memory_batches"), weights("in_memory_batches + prefetch_to_device")))
