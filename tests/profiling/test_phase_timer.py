"""The phase timer records every phase and changes nothing."""

import dataclasses
import json
import time
import weakref
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from hasten.benchmarking.fork_server import Worker
from hasten.core.recipe import Recipe
from hasten.engine.composition import sort_methods
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods, method_names
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import NoUpdate, ReplayedBatch, disabled_phases, import_path
from hasten.profiling.ceilings import measure_ceilings
from hasten.profiling.flops import flops_per_sample, peak_flops
from hasten.profiling.probe import Probe, facts_of
from hasten.profiling.time_phases import TimePhases
from hasten.testing.tasks import convolutional, perceptron, transformer
from hasten.utils import phase_timer
from helpers import public_loops

OUTERMOST = Recipe({import_path(method): {} for method in (TimePhases, ReplayedBatch, NoUpdate)})


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(12), 0


def with_schedule(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def with_two_schedules(model):
    optimizers = public_loops.two_adams(model)
    return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]


def timed_program(task):
    program = build(task, make_methods(OUTERMOST))
    program.run.checkpoint_state["phase_timer"].start()
    return program


@pytest.mark.parametrize(
    "task",
    [
        perceptron(optimizer=with_schedule),
        transformer(dropout=0.1),
        dataclasses.replace(public_loops.gan(), optimizer=with_two_schedules),
    ],
    ids=lambda task: task.name,
)
def test_timed_run_has_the_same_bits(task):
    ended = []
    for recipe in (Recipe(), OUTERMOST):
        program = build(task, make_methods(recipe))
        if recipe:
            program.run.checkpoint_state["phase_timer"].start()
        for _ in train_steps(program):
            pass
        evaluate(program)
        ended.append(program.run)
    plain, timed = ended
    assert plain.progress == timed.progress
    for a, b in zip(plain.model.parameters(), timed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_phase_of_the_step_is_recorded(monkeypatch):
    # other load on the machine belongs to no phase
    monkeypatch.setattr(phase_timer, "time", SimpleNamespace(perf_counter=time.thread_time))
    program = timed_program(perceptron())
    list(islice(train_steps(program), 8))
    seconds = program.run.checkpoint_state["phase_timer"].stop()
    assert seconds.keys() == {"input", "copy", "forward", "backward", "grad_transform", "optimizer_step"}
    assert all(value > 0 for value in seconds.values())
    assert (
        min(seconds["forward"], seconds["backward"], seconds["optimizer_step"], seconds["input"])
        > 10 * seconds["grad_transform"]
    )


def test_stopped_timer_records_nothing():
    program = timed_program(perceptron())
    program.run.checkpoint_state["phase_timer"].stop()
    before = len(program.run.checkpoint_state["phase_timer"].intervals)
    list(islice(train_steps(program), 3))
    assert len(program.run.checkpoint_state["phase_timer"].intervals) == before


def test_timer_is_outermost_of_all_methods():
    recipe = Recipe({name: {} for name in (*method_names(), import_path(TimePhases))})
    assert sort_methods(make_methods(recipe))[-1].name == import_path(TimePhases)


def test_disabled_phases_are_restored():
    program = build(perceptron(), make_methods(OUTERMOST))
    run, training = program.run, train_steps(program)
    list(islice(training, 2))

    def weights():
        return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])

    before = weights()
    disabled_phases(run).update({"optimizer_step", "input"})
    losses = torch.stack(list(islice(training, 4)))
    assert torch.equal(weights(), before)
    assert torch.equal(losses, losses[:1].expand(4)), "the same batch with the same weights gives the same loss"
    disabled_phases(run).clear()
    list(islice(training, 2))
    assert not torch.equal(weights(), before)


@pytest.mark.timing
@pytest.mark.slow
def test_disabled_log_writes_nothing():
    task = TaskRef.of(perceptron())
    with Worker(f"{__name__}:Watched", task=task.to_json(), methods=OUTERMOST.methods, device="cpu", seed=0) as probe:
        probe.call("build")
        before = probe.call("logged")
        probe.call("block", count=3, disabled="logging")
        assert probe.call("logged") == before
        probe.call("block", count=3)
        after = [json.loads(line) for line in probe.call("logged")[len(before) :]]
    first = len(before) + 3 + 1
    assert [record["step"] for record in after] == [first, first + 1, first + 2]
    assert all(record["loss"] > 0 for record in after)


class Watched(Probe):
    def logged(self) -> list[str]:
        self.log.seek(0)
        return self.log.read().decode().splitlines()


@pytest.mark.timing
@pytest.mark.slow
def test_ceiling_of_the_log_is_measured_and_low():
    task = TaskRef.of(perceptron())
    with Worker(
        "hasten.profiling.probe:Probe", task=task.to_json(), methods=OUTERMOST.methods, device="cpu", seed=0
    ) as probe:
        plan = probe.call("build")
        found = measure_ceilings(probe, {"logging": 0.5}, count=300, step=plan["step"], extra=0.0, budget=5.0)
    ceiling = found.ratios["logging"]
    assert 0 < ceiling.low <= ceiling.median <= ceiling.high and ceiling.low < 1.5  # inconclusive on a busy machine


def test_operation_count_of_a_perceptron():
    inputs, hidden, classes = 12, 24, 4
    first, second = 2 * inputs * hidden, 2 * hidden * classes
    # the inputs of the first layer need no gradient
    assert flops_per_sample(build(perceptron())) == 2 * first + 3 * second


def test_peak_is_a_rate_of_this_machine():
    assert 1e8 < peak_flops("cpu", torch.float32) < 1e16
    assert peak_flops("cpu", torch.float32) == peak_flops("cpu", torch.float32), "measured once a process"


def adadelta(model):
    """An optimizer without a fused step."""
    return torch.optim.Adadelta(model.parameters())


def test_facts_describe_the_run():
    facts = facts_of(build(convolutional()))
    assert {"cpu", "convolutions", "indexed_samples", "multiple_epochs", "evaluations", "matrix_weights"} <= facts
    assert not {"cuda", "tf32_hardware"} & facts
    assert "unfused_optimizer" in facts and "unfused_optimizer" not in facts_of(build(perceptron(optimizer=adadelta)))
    assert "repeated_blocks" not in facts_of(build(perceptron()))
    facts = facts_of(build(transformer(epochs=1)))
    assert "repeated_blocks" in facts
    assert not {"convolutions", "multiple_epochs", "evaluations"} & facts
    assert "evaluations" in facts_of(build(transformer(epochs=1, evaluate_every=32)))
    assert "indexed_samples" not in facts_of(build(perceptron(train_data=Stream())))


def test_model_of_the_larger_batch_is_released_before_another_one_is_built():
    probe = Probe(TaskRef.of(perceptron()), OUTERMOST.methods, "cpu", 0)
    probe.build()
    probe.block(2, disabled="larger_batch")
    model = weakref.ref(probe.larger.program.run.model)
    probe.operations(1)
    probe.steps.close()
    probe.log.close()
    assert model() is None
