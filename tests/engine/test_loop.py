"""The engine without methods equals a hand-written loop, to the bit."""

import dataclasses
from itertools import islice
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

from hasten import Task
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.utils.rng import get_rng_state, set_seeds
from helpers import engine_tasks

x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
y = torch.arange(24) % 3
PLAIN = TensorDataset(x, y)


def by_hand(batches_of, task, epochs=2):
    """Returns weights and losses of the hand-written loop."""
    set_seeds(3)
    model = task.model()
    optimizer, schedule = task.optimizer(model)
    losses = []
    for epoch in range(epochs):
        for batch in batches_of(epoch):
            optimizer.zero_grad()
            output = model(**batch) if task.loss is None else model(batch[0])
            loss = output["loss"] if task.loss is None else task.loss(output, batch[1])
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    return model.state_dict(), losses


def by_engine(task):
    program = build(task, seed=3)
    losses = list(train_steps(program))
    return program.run.model.state_dict(), losses


def assert_same(one, other):
    assert len(one[1]) == len(other[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])


def test_map_style_data_use_the_order_of_distributed_sampler():
    task = engine_tasks.task(PLAIN)
    sampler = DistributedSampler(PLAIN, num_replicas=1, rank=0, seed=3, shuffle=True)
    apart = torch.Generator()  # so that draws of the loader do not disturb the dropout

    def batches_of(epoch):
        sampler.set_epoch(epoch)
        return DataLoader(PLAIN, batch_size=4, sampler=sampler, generator=apart)

    assert_same(by_engine(task), by_hand(batches_of, task))


def test_ready_loader_draws_from_the_global_generator():
    loader = DataLoader(engine_tasks.Augmented(), batch_size=5, shuffle=True)
    task = engine_tasks.task(loader)
    assert_same(by_engine(task), by_hand(lambda epoch: loader, task))


class OwnLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = engine_tasks.model()

    def forward(self, inputs, labels):
        logits = self.inner(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_dict_batches_with_the_loss_of_the_model():
    samples = [{"inputs": a, "labels": b} for a, b in zip(x, y, strict=True)]
    loader = DataLoader(samples, batch_size=4, shuffle=True)
    task = Task(
        model=OwnLoss,
        train_data=loader,
        validation_data=samples,
        loss=None,
        optimizer=engine_tasks.optimizer,
        metric="accuracy",
        epochs=2,
    )
    assert_same(by_engine(task), by_hand(lambda epoch: loader, task))
    assert 0 <= evaluate(build(task)).metric <= 1


class Pair(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor


@dataclasses.dataclass
class Record:
    inputs: torch.Tensor
    labels: torch.Tensor


def nested(inputs, labels):
    return {"deep": [{"halves": (inputs[:, :3], inputs[:, 3:])}]}, labels


class Halves(torch.nn.Linear):
    def forward(self, inputs):
        return super().forward(torch.cat(inputs["deep"][0]["halves"], 1) if isinstance(inputs, dict) else inputs)


class OwnLossOfARecord(torch.nn.Linear):
    def forward(self, batch):
        logits = super().forward(batch.inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, batch.labels), "logits": logits}


def named(inputs, labels):
    return {"input": inputs, "labels": labels}


@pytest.mark.parametrize(
    ("form", "model", "changes"),
    [
        (Pair, Halves, {}),
        (nested, Halves, {}),
        (named, torch.nn.Linear, {}),
        (Record, OwnLossOfARecord, {"loss": None}),
    ],
    ids=["namedtuple", "nested", "dict", "dataclass"],
)
def test_batches_of_any_type_train_as_plain_ones(form, model, changes):
    def task(form, model, **changes):
        data = DataLoader(PLAIN, batch_size=4, collate_fn=lambda samples: form(*default_collate(samples)))
        return dataclasses.replace(engine_tasks.task(data, validation_data=data), model=lambda: model(6, 3), **changes)

    plain = task(lambda inputs, labels: (inputs, labels), torch.nn.Linear)
    assert_same(by_engine(task(form, model, **changes)), by_engine(plain))
    assert evaluate(build(task(form, model, **changes))) == evaluate(build(plain))


def test_dataclass_fields_are_model_arguments():
    class Named(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs)

    data = DataLoader(PLAIN, batch_size=4, collate_fn=lambda samples: Record(*default_collate(samples)))
    plain = dataclasses.replace(engine_tasks.task(DataLoader(PLAIN, batch_size=4)), model=lambda: torch.nn.Linear(6, 3))
    assert_same(by_engine(dataclasses.replace(plain, train_data=data, model=lambda: Named(6, 3))), by_engine(plain))


def test_metric_is_computed_without_gradients():
    seen = []

    class Watching(torch.nn.Linear):
        def forward(self, inputs):
            seen.append((torch.is_grad_enabled(), self.training))
            return super().forward(inputs)

    program = build(dataclasses.replace(engine_tasks.task(PLAIN, validation_data=PLAIN), model=lambda: Watching(6, 3)))
    training = train_steps(program)
    list(islice(training, 2))
    assert seen == [(True, True)] * 2
    evaluate(program)
    assert seen[2:] == [(False, False)] * 6
    next(training)
    assert seen[8:] == [(True, True)]


def test_model_that_differentiates_and_caches_in_its_forward_pass_is_evaluated():
    class Energy(torch.nn.Linear):
        cached = None

        def forward(self, inputs):
            with torch.enable_grad():
                position = inputs.detach().requires_grad_()
                (force,) = torch.autograd.grad(super().forward(position).square().sum(), position)
            if self.cached is None:
                self.cached = torch.ones(3) * 2
            return super().forward(inputs + force) * self.cached

    program = build(dataclasses.replace(engine_tasks.task(PLAIN, validation_data=PLAIN), model=lambda: Energy(6, 3)))
    evaluate(program)  # caches
    assert len(list(islice(train_steps(program), 2))) == 2


STATES = (
    engine_tasks.map_style,
    engine_tasks.ready_loader,
    engine_tasks.stream,
    engine_tasks.loaders_that_share_a_generator,
)


@pytest.mark.parametrize("make", STATES)
def test_evaluation_changes_no_state(make):
    def run(looking: bool):
        program = build(make(), seed=3)
        losses = []
        for loss in train_steps(program):
            losses.append(loss)
            if looking:
                before = get_rng_state()
                evaluate(program)
                assert torch.equal(before["torch"], get_rng_state()["torch"])
                assert before["python"] == get_rng_state()["python"]
        return program.run.model.state_dict(), losses

    assert_same(run(looking=True), run(looking=False))


def test_evaluation_keeps_frozen_modules_in_eval_mode():
    def partly_frozen():
        model = engine_tasks.model()
        model[1].eval()
        return model

    task = Task(
        model=partly_frozen,
        train_data=PLAIN,
        validation_data=PLAIN,
        loss=torch.nn.functional.cross_entropy,
        optimizer=engine_tasks.optimizer,
        metric="accuracy",
        batch_size=4,
    )
    program = build(task)
    evaluate(program)
    assert not program.run.model[1].training
    assert program.run.model[3].training


def test_loop_stops_in_the_middle_of_an_epoch():
    program = build(engine_tasks.task(PLAIN, epochs=1.5))
    assert len(list(train_steps(program))) == 9
    assert (program.run.progress.epoch, program.run.progress.batch, program.run.progress.samples) == (1, 3, 36)
