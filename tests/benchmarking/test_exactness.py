"""Exactness checks: exact methods pass, and each kind of inexact method fails with its number."""

import dataclasses
import math
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch

from hasten.benchmarking import equivalence_runs
from hasten.benchmarking.exactness import check_exactness
from hasten.benchmarking.process_state import differences, process_state
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.engine.registry import import_file
from hasten.testing import tasks

METHODS = '''
"""Methods for the exactness checks; each test chooses the class that they claim."""
from dataclasses import dataclass, replace

import torch

from hasten import Card, Exactness, MemoryExhaustedError, Method, RunError
from hasten.benchmarking import equivalence_runs

class Plain(Method):
    card = Card(summary="a method to check", exactness=Exactness.BIT_EXACT)

class DoesNothing(Plain):
    def forward(self, forward, run):
        return lambda batch: forward(batch)

class DropsLabels(Plain):
    """A tenth of the samples get the wrong label."""
    def batch_transform(self, to_device, run):
        def lossy(batch):
            x, y = to_device(batch)
            y = y.clone()
            y[: max(1, len(y) // 10)] = 0
            return x, y
        return lossy

class DividesTheRate(Plain):
    def optimizer(self, make, run):
        def slower(model):
            optimizer = make(model)
            for group in optimizer.param_groups:
                group["lr"] /= 30
            return optimizer
        return slower

class DetachesTheFirstLayer(Plain):
    def model(self, model, run):
        model[0].register_forward_hook(lambda module, inputs, output: output.detach())
        return model

class EasierValidation(Plain):
    def data(self, batches, run):
        if batches.training:
            return batches
        return batches.map_iterator(lambda passing: ([x, torch.zeros_like(y)] for x, y in passing))

class Rounds(Plain):
    """Gradients rounded to bfloat16, as a lower precision would."""
    def grad_transform(self, grad_transform, run):
        def rounded():
            grad_transform()
            for p in run.model.parameters():
                p.grad.copy_(p.grad.to(torch.bfloat16) if p.dtype == torch.float32 else p.grad)
        return rounded

class RoundsTooMuch(Plain):
    def grad_transform(self, grad_transform, run):
        def rounded():
            grad_transform()
            for p in run.model.parameters():
                p.grad.copy_(p.grad.sign() * p.grad.abs().mean())
        return rounded

class SpoilsAGradient(Plain):
    """In float32 the first gradient is NaN, and the optimizer step uses it."""
    def grad_transform(self, grad_transform, run):
        def spoilt():
            grad_transform()
            first = next(run.model.parameters())
            if first.dtype == torch.float32:
                first.grad.fill_(float("nan"))
        return spoilt

class NeedsMemory(Plain):
    """Raises hasten's own error for memory in float64 and for more than 8 rows, as the capture of a CUDA graph may."""
    def forward(self, forward, run):
        def hungry(batch):
            if next(run.model.parameters()).dtype == torch.float64 and len(batch[0]) > 8:
                raise MemoryExhaustedError("out of memory: the step does not fit as a CUDA graph")
            return forward(batch)
        return hungry

class HalfTheSteps(Plain):
    def plan(self, plan, run):
        return replace(plan, epochs=plan.epochs / 2)

class StopsLater(Plain):
    def plan(self, plan, run):
        return replace(plan, stop=lambda evaluations: len(evaluations) > 1)

class Explodes(Plain):
    def optimizer_step(self, optimizer_step, run):
        def exploding():
            optimizer_step()
            with torch.no_grad():
                next(run.model.parameters()).fill_(float("nan"))
        return exploding

class Raises(Plain):
    def batch_transform(self, to_device, run):
        def raising(batch):
            raise KeyError("lost")
        return raising

class Idle(Plain):
    def model(self, model, run):
        run.report_no_effect(self, "no such layer")
        return model

class ChangesTheProcess(Plain):
    def model(self, model, run):
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.backends.mkldnn.enabled = False
        return model

class IsSlow(Plain):
    """Slow by the clock that the test patches."""
    def optimizer_step(self, optimizer_step, run):
        return lambda: (equivalence_runs.time.sleep(0.2), optimizer_step())
'''


@pytest.fixture(scope="module", name="check")
def check_fixture(tmp_path_factory):
    """``(class name, exactness, **more) -> ExactnessCheck`` on the perceptron."""
    path = tmp_path_factory.mktemp("methods") / "methods.py"
    path.write_text(METHODS)

    def check(name: str, exactness: Exactness, base: str = "baseline", task=None, **more):
        base = Recipe.coerce(base)
        return check_exactness(
            task or tasks.perceptron(), base, base.with_method(f"{path}:{name}"), exactness, device="cpu", **more
        )

    return check


@pytest.mark.parametrize("exactness", [Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH, Exactness.REDUCED_PRECISION])
def test_method_without_effect_passes_every_class(exactness, check):
    result = check("DoesNothing", exactness)
    assert result.passed and ("12 steps" in result.why or "3 batches" in result.why)


@pytest.mark.parametrize(
    "name", ["DropsLabels", "DividesTheRate", "DetachesTheFirstLayer", "EasierValidation", "HalfTheSteps"]
)
@pytest.mark.parametrize("claim", [Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH, Exactness.REDUCED_PRECISION])
def test_inexact_method_fails(name, claim, check):
    result = check(name, claim)
    assert not result.passed, result.why
    if name == "EasierValidation":
        assert result.why == "the validation data differ"
    if name == "HalfTheSteps":
        assert "the plan differs: epochs: 1.0 instead of 2" in result.why


def test_rounding_passes_as_reduced_precision_only(check):
    fewer = check("Rounds", Exactness.REDUCED_PRECISION)
    assert fewer.passed and 40 < fewer.number < 80, fewer.why
    assert not check("Rounds", Exactness.BIT_EXACT).passed


def test_coarse_rounding_fails(check):
    result = check("RoundsTooMuch", Exactness.REDUCED_PRECISION)
    assert not result.passed and result.number < 20 and "above its error against float64" in result.why


def test_nan_gradient_is_the_worst(check):
    result = check("SpoilsAGradient", Exactness.REDUCED_PRECISION)
    assert not result.passed and result.number == -math.inf, result.why


def test_changes_training_needs_an_effect(check):
    no_effect, labels = (
        check("DoesNothing", Exactness.CHANGES_TRAINING),
        check("DropsLabels", Exactness.CHANGES_TRAINING),
    )
    assert not no_effect.passed and no_effect.number == 0 and "no effect" in no_effect.why
    assert labels.passed and labels.number > 1e-3


def test_changed_plan_is_an_effect(check):
    result = check("StopsLater", Exactness.CHANGES_TRAINING)
    assert result.passed and "stops early: True instead of False" in result.why


@pytest.mark.parametrize("exactness", Exactness)
@pytest.mark.parametrize(
    ("name", "why"),
    [("Explodes", "finite"), ("Raises", "KeyError: 'lost'"), ("Idle", "has no effect: no such layer")],
)
def test_check_that_cannot_run_fails(name, why, exactness, check):
    result = check(name, exactness)
    assert not result.passed and why in result.why
    assert math.isnan(result.number)


def test_method_without_effect_in_both_arms_is_ignored(check):
    assert check("DoesNothing", Exactness.BIT_EXACT, base="channels_last").passed


def test_global_state_is_restored(check):
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    before = process_state()
    assert check("ChangesTheProcess", Exactness.EQUIVALENT_MATH).passed
    assert differences(before, process_state()) == []


def test_arms_are_compared_after_the_steps_of_the_slower_one(check, monkeypatch):
    slept = []
    monkeypatch.setattr(equivalence_runs, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    result = check("IsSlow", Exactness.BIT_EXACT, seconds=1.0)
    # 0.5 s after the first, an arm's half of the time is over
    assert result.passed and "after 4 steps" in result.why, result.why


def test_generator_of_a_data_loader_is_reset_for_each_arm():
    task = tasks.perceptron()
    loader = torch.utils.data.DataLoader(
        task.train_data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    task = tasks.perceptron(train_data=loader, batch_size=None)
    result = check_exactness(
        task, Recipe(), Recipe.coerce("gradient_accumulation"), Exactness.EQUIVALENT_MATH, device="cpu"
    )
    assert result.passed, result.why


def test_dropout_is_disabled_for_equivalent_math():
    result = check_exactness(
        tasks.transformer(dropout=0.5),
        Recipe(),
        Recipe.coerce("gradient_accumulation"),
        Exactness.EQUIVALENT_MATH,
        device="cpu",
    )
    assert result.passed and 0 < result.number < 1e-10, result.why


@pytest.mark.parametrize("task", [tasks.perceptron, tasks.convolutional, tasks.transformer])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_keeps_gradients_20_db_above_their_error(name, task):
    result = check_exactness(task(), Recipe(), Recipe.coerce(name), Exactness.REDUCED_PRECISION, device="cpu")
    assert result.passed and 20 <= result.number < 90, result.why


class HalfPrecisionKernel(torch.autograd.Function):
    """An operation whose kernel knows no float64, as those of flash attention and of many Triton libraries."""

    @staticmethod
    def forward(ctx, x):
        if x.dtype == torch.float64:
            raise NotImplementedError("the kernel has no float64")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class HungryKernel(HalfPrecisionKernel):
    """An operation that needs more memory than there is for a float64 batch of more than 8 rows."""

    @staticmethod
    def forward(ctx, x):
        if x.dtype == torch.float64 and len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * 2


class Scaled(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x):
        return self.kernel.apply(x)


@pytest.fixture(scope="module", name="check_without_float64")
def check_without_float64_fixture(tmp_path_factory):
    """``(class name, exactness, kernel) -> ExactnessCheck`` on a perceptron that cannot run in float64."""
    path = tmp_path_factory.mktemp("methods") / "methods.py"
    path.write_text(METHODS)

    def check(name: str, exactness: Exactness, kernel=HalfPrecisionKernel):
        usual = tasks.perceptron()
        task = dataclasses.replace(usual, model=lambda: torch.nn.Sequential(*usual.model(), Scaled(kernel)))
        candidate = Recipe().with_method(f"{path}:{name}" if name[0].isupper() else name)
        return check_exactness(task, Recipe(), candidate, exactness, device="cpu")

    return check


@pytest.mark.parametrize(
    ("name", "exactness"),
    [
        ("fused_optimizer", Exactness.EQUIVALENT_MATH),
        ("Rounds", Exactness.REDUCED_PRECISION),
        ("DropsLabels", Exactness.CHANGES_TRAINING),
    ],
)
def test_model_without_float64_is_checked_in_float32(name, exactness, check_without_float64):
    result = check_without_float64(name, exactness)
    assert result.passed, result.why
    assert result.why.endswith("the model does not run in float64 (NotImplementedError: the kernel has no float64)")


def test_method_that_needs_too_much_memory_in_float64_is_checked_with_smaller_batches(check):
    result = check("NeedsMemory", Exactness.EQUIVALENT_MATH)
    assert result.passed and "with batches of 8" in result.why, result.why


@pytest.mark.parametrize("exactness", [Exactness.EQUIVALENT_MATH, Exactness.REDUCED_PRECISION])
@pytest.mark.parametrize("name", ["DropsLabels", "DividesTheRate", "DetachesTheFirstLayer", "HalfTheSteps"])
def test_inexact_method_on_model_without_float64_fails(name, exactness, check_without_float64):
    result = check_without_float64(name, exactness)
    assert not result.passed, result.why


def test_method_without_effect_on_model_without_float64_has_none(check_without_float64):
    result = check_without_float64("DoesNothing", Exactness.CHANGES_TRAINING)
    assert not result.passed and "no effect" in result.why


def test_model_that_does_not_fit_in_float64_is_checked_with_small_batches(check_without_float64):
    result = check_without_float64("fused_optimizer", Exactness.EQUIVALENT_MATH, HungryKernel)
    assert result.passed and "in float64" in result.why and "with batches of 8, since larger ones fail" in result.why
    assert not check_without_float64("DropsLabels", Exactness.EQUIVALENT_MATH, HungryKernel).passed


TF32_TASK = """
import torch
from hasten.benchmarking.exactness import check_exactness
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.testing import tasks
{setting}
check = check_exactness(
    tasks.perceptron(), Recipe(), Recipe().with_method("fused_optimizer"), Exactness.EQUIVALENT_MATH, device="cpu"
)
print(check.passed, check.why)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.set_float32_matmul_precision('high')",
        "torch.set_float32_matmul_precision('high'); torch.backends.cudnn.conv.fp32_precision = 'tf32'",
    ],
)
def test_task_with_tf32_by_either_interface_is_checked(setting):
    """In a process of its own: once the newer settings are used, torch refuses to read the older ones."""
    done = subprocess.run([sys.executable, "-c", TF32_TASK.format(setting=setting)], capture_output=True, text=True)
    assert done.stdout.startswith("True in float64 the weights differ by "), done.stdout + done.stderr


NOISY_TASK = '''
import os
from dataclasses import replace

import torch

from hasten.testing import tasks


@torch.library.custom_op("planted::add_noise", mutates_args=())
def add_noise(x: torch.Tensor) -> torch.Tensor:
    """The last bits of the result change from run to run, as those of an atomic addition on a GPU do."""
    return x * (1 + 1e-6 * int.from_bytes(os.urandom(2)) / 2**16)


add_noise.register_autograd(lambda ctx, gradient: gradient)


class Noisy(torch.nn.Module):
    def forward(self, x):
        torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))  # torch has no deterministic implementation of it
        return torch.ops.planted.add_noise(x)


def task():
    plain = tasks.perceptron()
    return replace(plain, model=lambda: torch.nn.Sequential(*plain.model(), Noisy()))
'''


@pytest.fixture(scope="module", name="check_noisy")
def check_noisy_fixture(tmp_path_factory):
    """``(method) -> ExactnessCheck`` of a method that claims BIT_EXACT, or the given class, on a model with an
    operation that does not repeat itself.
    """
    directory = tmp_path_factory.mktemp("noisy")
    (directory / "methods.py").write_text(METHODS)
    (directory / "noisy_task.py").write_text(NOISY_TASK)
    task = import_file(directory / "noisy_task.py").task

    def check(name: str, exactness: Exactness = Exactness.BIT_EXACT):
        candidate = name if name.islower() else f"{directory}/methods.py:{name}"
        return check_exactness(task(), Recipe(), Recipe.coerce(candidate), exactness, device="cpu")

    return check


@pytest.mark.parametrize("name", ["in_memory_batches", "DoesNothing"])
def test_bit_exact_method_on_a_model_that_does_not_repeat_itself_passes_and_the_operation_is_named(name, check_noisy):
    result = check_noisy(name)
    assert result.passed, result.why
    assert "does not repeat itself" in result.why and "deterministic implementation of put_" in result.why
    assert "batches are identical to the bit" in result.why
    assert result.statistics is (name == "DoesNothing"), "a method that handles data only is proven by the batches"


@pytest.mark.parametrize(("name", "passes"), [("fused_optimizer", True), ("DividesTheRate", False)])
def test_method_of_the_same_formula_on_a_model_that_does_not_repeat_itself_is_judged_by_its_noise(
    name, passes, check_noisy
):
    result = check_noisy(name, exactness=Exactness.EQUIVALENT_MATH)
    assert result.passed is passes and result.statistics, result.why
    assert "this model does not repeat itself: in float64" in result.why


@pytest.mark.parametrize("name", ["DropsLabels", "DividesTheRate", "Rounds"])
def test_wrong_bit_exact_method_on_a_model_that_does_not_repeat_itself_fails(name, check_noisy):
    result = check_noisy(name)
    assert not result.passed, result.why
    assert ("the batches differ" in result.why) is (name == "DropsLabels")


def test_bit_exact_method_that_differs_on_a_model_that_repeats_itself_fails(check):
    result = check("Rounds", Exactness.BIT_EXACT)
    assert not result.passed and "does not repeat itself" not in result.why


class CountedReads(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data, self.reads = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.reads.append(index)
        return self.data[index]


def test_validation_data_are_read_once_under_each_recipe(check):
    usual = tasks.perceptron()
    data = CountedReads(usual.validation_data)
    result = check("DividesTheRate", Exactness.EQUIVALENT_MATH, task=dataclasses.replace(usual, validation_data=data))
    assert not result.passed and "differ by" in result.why
    assert len(data.reads) == 2 * len(data)
