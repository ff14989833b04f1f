"""Evaluation by several ranks: they share the batches, each sample is evaluated once, the metric is that of one."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from hasten.core.data import BatchSource, LoaderSpec
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.distributed.batch_sharding import EvaluationShards, share_evaluation
from hasten.distributed.process_group import init_process_group
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.engine.train import with_strategy
from helpers import rank_tasks
from helpers.ranks import run_ranks

ROWS = 47  # five batches of 10, the last of 7: no number of ranks divides them


class Numbered(rank_tasks.Rows):
    """Rows whose first input is their number, 1 for the first."""

    def __init__(self):
        super().__init__(ROWS, seed=1)
        self.inputs[:, 0] = torch.arange(1.0, ROWS + 1, dtype=torch.float64)


class NumberedStream(torch.utils.data.IterableDataset):
    """The same rows in an order that only the dataset knows, without a length."""

    def __iter__(self):
        return map(Numbered().__getitem__, range(ROWS))


class Squares:
    """A metric that no mean over the samples gives: the batches' mean outputs, squared."""

    __name__ = "squares"

    def __call__(self, output, target):
        return output.double().mean() ** 2


def by_name(metric: str, data=None):
    return lambda: rank_tasks.task(validation_data=data or Numbered(), metric=metric)


def by_function():
    return rank_tasks.task(validation_data=Numbered(), metric=Squares(), higher_is_better=True)


def by_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics")
    return rank_tasks.task(
        validation_data=Numbered(), metric=torchmetrics.classification.MulticlassF1Score(2), higher_is_better=True
    )


def by_loader():
    return rank_tasks.task(validation_data=DataLoader(Numbered(), batch_size=10), metric="loss")


def shuffled():
    return rank_tasks.task(validation_data=DataLoader(Numbered(), batch_size=10, shuffle=True), metric="loss")


def shuffled_by_batches():
    data = DataLoader(Numbered(), batch_sampler=BatchSampler(RandomSampler(range(ROWS)), 10, drop_last=False))
    return rank_tasks.task(validation_data=data, metric="loss")


def streamed():
    return rank_tasks.task(validation_data=NumberedStream(), metric="loss")


def with_batch_norm():
    """Each rank updates statistics of its own samples; those of rank 0 are evaluated and saved."""
    return replace(by_name("loss")(), model=lambda: rank_tasks.network(norm=True))


def by_composition_of_torchmetrics():
    """Data that the ranks do not share, so that rank 0 evaluates alone."""
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = 1 - torchmetrics.classification.MulticlassF1Score(2)
    return rank_tasks.task(validation_data=NumberedStream(), metric=metric, higher_is_better=False)


def evaluated(rank: int, make, recipe: str = "") -> tuple[tuple[float, float], list[int]]:
    """((metric, loss) after three steps, numbers of the samples that this rank evaluated)."""
    with init_process_group("cpu") as ranks:
        return evaluated_by(ranks, make(), recipe)


def evaluated_by(ranks: ProcessGroupInfo, task, recipe: str = "") -> tuple[tuple[float, float], list[int]]:
    program = build(task, with_strategy(make_methods(Recipe.coerce(recipe or "baseline")), ranks), ranks=ranks)
    for _ in islice(train_steps(program), 3):
        pass
    seen: list[int] = []
    model = program.run.unwrapped_model
    hook = model.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0][:, 0].int().tolist()))
    buffers = [buffer.clone() for buffer in model.buffers()]
    result = evaluate(program)
    hook.remove()
    assert all(map(torch.equal, buffers, model.buffers())), "the evaluation changed the run"
    return (result.metric, result.loss), seen


MAKES = {
    "accuracy": by_name("accuracy"),
    "loss": by_name("loss"),
    "perplexity": by_name("perplexity"),
    "function": by_function,
    "torchmetrics": by_torchmetrics,
    "loader": by_loader,
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_ranks_evaluate_each_sample_once_and_the_metric_is_that_of_one_process(make, world):
    single, seen = evaluated_by(SINGLE_PROCESS, make())
    answers = run_ranks(world, evaluated, make)
    assert sorted(seen) == list(range(1, ROWS + 1))
    assert sorted(number for _, numbers in answers for number in numbers) == sorted(seen)
    assert all(numbers for _, numbers in answers), "a rank evaluated nothing"
    for result, _ in answers:
        assert result == pytest.approx(single, rel=1e-12, abs=0)


def test_statistics_of_batch_norms_are_those_of_the_main_process_on_all_ranks():
    shared = run_ranks(2, evaluated, with_batch_norm)
    alone = run_ranks(
        2, evaluated, lambda: replace(with_batch_norm(), validation_data=rank_tasks.task().validation_data)
    )
    assert shared[0][0] == shared[1][0] and shared[0][1] and shared[1][1]
    assert alone[0][0] == alone[1][0]


@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (shuffled, ""),
        (shuffled_by_batches, ""),
        (streamed, ""),
        (by_composition_of_torchmetrics, ""),
        (by_name("loss"), "local_sgd"),
        (by_name("loss"), "zero"),
    ],
)
def test_evaluation_that_cannot_be_shared_is_done_as_a_whole(make, recipe):
    answers = run_ranks(2, evaluated, make, recipe)
    assert answers[0][0] == answers[1][0]
    if recipe != "zero":  # there all ranks evaluate
        assert len(answers[0][1]) == ROWS and not answers[1][1]


def test_torchmetrics_metric_that_is_not_shared_does_not_wait_for_other_ranks():
    answers = run_ranks(2, evaluated, lambda: replace(shuffled(), metric=by_torchmetrics().metric), "")
    assert answers[0][0] == answers[1][0]


def order(spec_length: int = 5, loader=None) -> BatchSource:
    def build(spec: LoaderSpec) -> BatchSource:
        return BatchSource(epoch=lambda epoch, start: iter(()), spec=spec)

    spec = LoaderSpec(range(50), batch_sampler=lambda epoch: [], length=spec_length, loader=loader, build=build)
    return build(spec)


@pytest.mark.parametrize(
    ("batches", "world_size", "expected"),
    [
        (order(), 2, True),
        (order(), 1, False),
        (order(), 6, False),  # a rank would have no batch
        (replace(order(), spec=None), 2, False),
        (order(loader=DataLoader(range(50), shuffle=True)), 2, False),
        (order(loader=DataLoader(range(50))), 2, True),
    ],
)
def test_shared_evaluation_needs_a_known_order_and_a_batch_for_each_rank(batches, world_size, expected):
    shards = EvaluationShards(ProcessGroupInfo(world_size=world_size))
    assert (share_evaluation(batches, shards) is not None) is expected
