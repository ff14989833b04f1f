"""Methods that act are not reported as without effect, whatever the observed step, the third, is like."""

import time
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from hasten.benchmarking.arm import Arm
from hasten.benchmarking.process_state import restored
from hasten.core.errors import NoEffectError
from hasten.data import arrays
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.engine.tasks import TaskRef
from hasten.methods.distributed.data_parallel import _observe as data_parallel_effect
from hasten.methods.malloc_tuning import _describe as describe
from hasten.methods.tf32 import _describe as tf32_effect
from hasten.testing import tasks
from hasten.utils.op_recorder import NOT_CHECKED, OpRecorder


def evidence_of(trained, task, recipe):
    program = trained(task, recipe).program
    assert program.run.no_effect == []
    return program.effects.evidence


def sgd(rate):
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate)


def overflowing_loss(output, target):
    return cross_entropy(output, target) * 1e6


def test_fused_optimizer_in_a_step_that_float16_skips(perceptron, trained):
    evidence = evidence_of(trained, perceptron(loss=overflowing_loss), ("float16", "fused_optimizer"))
    assert evidence["fused_optimizer"] == "the step called 1 fused kernel of the optimizer"  # which skips the update


def test_fused_optimizer_that_another_one_replaced_has_no_effect(perceptron, trained):
    def unfused(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(fused=False))
        return optimizer

    run = trained(perceptron(optimizer=unfused), ("fused_optimizer", "ema")).run
    assert run.no_effect == [("fused_optimizer", "the optimizer updated the parameters without a fused kernel")]


def test_gradient_accumulation_with_one_sample_left(perceptron, trained):
    task = perceptron(train_data=tasks.Labeled((12,), length=65), batch_size=32, epochs=1)
    assert evidence_of(trained, task, "gradient_accumulation")["gradient_accumulation"].startswith(NOT_CHECKED)


class Stream(IterableDataset):
    """144 samples without a length."""

    def __iter__(self):
        return islice(iter(tasks.Labeled((12,), length=144)), 144)


def test_batch_size_of_the_last_batch_of_a_stream(perceptron, trained):
    task = perceptron(train_data=Stream(), batch_size=32, epochs=1)
    assert "of 16 samples" in evidence_of(trained, task, "batch_size:warmup=0")["batch_size"]


@pytest.mark.parametrize(
    ("recipe", "factor"),
    [("znorm:eps=0.1", 1.0), ("znorm", 1e-8)],
)
def test_znorm_of_gradients_that_are_not_much_larger_than_eps(recipe, factor, perceptron, trained):
    task = perceptron(loss=lambda output, target: cross_entropy(output, target) * factor)
    assert "eps" in evidence_of(trained, task, recipe)["znorm"]


class MostlyDead(nn.Module):
    """Most of its hidden units are negative for all samples; the last layer is frozen."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(12, 64), nn.Linear(64, 4).requires_grad_(False)
        nn.init.constant_(self.hidden.bias[16:].detach(), -100.0)

    def forward(self, x):
        return self.head(self.hidden(x).relu())


def test_znorm_of_rows_without_gradient(perceptron, trained):
    evidence = evidence_of(trained, perceptron(model=MostlyDead), "znorm:granularity=row")
    assert evidence["znorm"] == "1 of 2 gradients were z-scored"


def test_gradient_clipping_of_a_model_whose_loss_has_parameters(perceptron, trained):
    scale = nn.Parameter(torch.full((4,), 100.0))
    task = perceptron(
        optimizer=lambda model: torch.optim.SGD([*model.parameters(), scale], lr=1e-3),
        loss=lambda output, target: cross_entropy(output, target) + (scale**2).sum(),
    )
    assert "4 gradients" in evidence_of(trained, task, "gradient_clipping")["gradient_clipping"]


def test_gradients_under_an_optimizer_without_hooks(perceptron, trained):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
            self.defaults = inner.defaults

        def step(self):
            self.inner.step()

    task = perceptron(optimizer=lambda model: Wrapper(sgd(0.1)(model)))
    assert "Wrapper is no torch optimizer" in evidence_of(trained, task, "gradient_clipping")["gradient_clipping"]


class WithEmptyWeight(nn.Linear):
    """A linear layer with a parameter of no elements."""

    def __init__(self):
        super().__init__(12, 4)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return super().forward(x) + self.empty.sum()


def test_gradient_centralization_with_a_gradient_without_elements(perceptron, trained):
    evidence = evidence_of(trained, perceptron(model=WithEmptyWeight), "gradient_centralization")
    assert evidence["gradient_centralization"] == "1 of 3 gradients were centralized"


def test_fewer_workers_than_asked_for_in_a_short_epoch(perceptron, trained):
    data = tasks.Labeled((12,))
    task = perceptron(train_data=arrays(data.inputs.numpy(), data.labels.numpy()), batch_size=32, epochs=1)
    assert "worker process" in evidence_of(trained, task, "loader_workers:num_workers=4")["loader_workers"]


class Conditional(nn.Linear):
    """A linear layer with an operation of higher order."""

    def forward(self, x):
        y = super().forward(x)
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.cond
def test_recorder_passes_operations_of_higher_order_on():
    model, x = Conditional(4, 4), torch.ones(2, 4)
    expected = model(x)
    with OpRecorder() as recorder:
        assert torch.equal(model(x), expected)
    assert recorder.count("addmm") == 1
    torch.compiler.reset()


@pytest.mark.parametrize("recipe", [("ema", "fused_optimizer"), ("ema", "bfloat16"), ("ema", "float16")])
def test_ema_while_another_check_records_operations(recipe, perceptron, trained):
    evidence = evidence_of(trained, perceptron(loss=overflowing_loss), recipe)
    assert evidence["ema"] == "the step changed the averages of 4 parameters"


def test_recorder_keeps_the_versions_of_tensors_that_change_in_lists():
    tensors = [torch.zeros(2), torch.zeros(3)]
    with torch.no_grad(), OpRecorder(), OpRecorder():
        torch._foreach_add_(tensors, 1.0)
        tensors[0].add_(1.0)
    assert [tensor._version for tensor in tensors] == [2, 1]


def test_recorder_survives_a_formula_that_raises(monkeypatch):
    def unknown_shape(*args, **kwargs):
        raise AssertionError("unknown shape")

    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.mm, unknown_shape)
    with OpRecorder() as recorder:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert recorder.count("mm") == 1 and recorder.flops() == 0


@pytest.mark.slow
def test_graph_that_the_observed_step_compiles_contains_no_hook_of_a_check(transformer):
    graphs = []
    for observed in (True, False):
        methods = [make_method("compile", {"backend": "eager"}), make_method("activation_checkpointing")]
        program = build(transformer(batch_size=96, epochs=1), methods)  # one step
        recorder = program.effects.checks["compile"].__self__
        if not observed:
            del program.effects.checks["activation_checkpointing"]
        for _ in program.effects.observed(train_steps(program)):
            graphs.append(recorder.graphs)
        torch.compiler.reset()
    assert graphs == [1, 1]


def test_malloc_tuning_while_another_thread_allocates_and_frees_memory():
    before = SimpleNamespace(hblkhd=0, uordblks=10 << 20)
    after = SimpleNamespace(hblkhd=1 << 20, uordblks=73 << 20)  # 1 MiB mapped elsewhere, 1 MiB freed
    readings = iter([before, after])

    def mallinfo2():
        return next(readings)

    libc = SimpleNamespace(malloc=lambda size: 1, free=lambda block: None, mallinfo2=mallinfo2)
    assert "from the heap" in describe(libc)


def test_observed_step_comes_before_the_steady_steps_of_an_arm(monkeypatch):
    steps, enter = [], OpRecorder.__enter__

    def note(recorder):
        steps.append(arm.program.run.progress.step)
        return enter(recorder)

    monkeypatch.setattr(OpRecorder, "__enter__", note)
    arm = Arm(TaskRef.of(tasks.perceptron), {"bfloat16": {}}, "cpu", 0)
    arm.build()
    assert steps in ([2], [3])  # before the steady steps; the second one if the first took more than a second


def test_seconds_of_a_check_count_neither_as_start_nor_as_step_of_an_arm(monkeypatch):
    monkeypatch.setattr("hasten.engine.effects.SLOW_CHECK_S", 0.4)
    monkeypatch.setattr("hasten.methods.batch_size._observe", lambda *_: time.sleep(0.5) or "larger")
    arm = Arm(TaskRef.of(tasks.perceptron), {"batch_size": {}}, "cpu", 0)
    plan = arm.build()
    assert plan["effects"] == {"batch_size": "larger; the check took 0.5 s"}
    assert plan["start"] < 0.4 and plan["step"] < 0.1


@pytest.mark.parametrize(("devices", "acts"), [((0, 1), True), ((0, 0), False)])
def test_data_parallel_acts_if_its_copies_are_called_on_several_gpus(devices, acts, monkeypatch):
    model, indices = nn.DataParallel(nn.Linear(2, 2)), iter(devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: next(indices))
    with nullcontext() if acts else pytest.raises(NoEffectError, match="on 1 GPU"):
        check = data_parallel_effect(model)
        next(check)
        for _ in devices:  # as threads do with the copies
            model.module(torch.ones(1, 2))
        with pytest.raises(StopIteration, match="over 2 GPUs"):
            next(check)


@pytest.mark.parametrize(("precision", "acts"), [("medium", True), ("high", True), ("highest", False)])
def test_tf32_of_a_task_that_sets_the_precision_itself(precision, acts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with restored():
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = True
        with nullcontext() if acts else pytest.raises(NoEffectError, match="switched TF32 off"):
            tf32_effect(torch.device("cuda"))
