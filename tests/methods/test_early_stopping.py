"""early_stopping: stops after the right evaluation for the right reason, as a function of the history only."""

import pytest

from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.core.run_context import Evaluation, ParallelContext
from hasten.engine.plan import build
from hasten.engine.registry import make_methods


def stops_at(task, metrics, agree=None, **settings) -> int | None:
    """Returns the number of evaluations after which the run stops."""
    program = build(task, make_methods(Recipe().with_method("early_stopping", **settings)))
    if agree:
        program.run.parallel = ParallelContext(ProcessGroupInfo(all_reduce_max=lambda numbers: [agree(*numbers)]))
    history = [Evaluation(step, step * 16, metric) for step, metric in enumerate(metrics, 1)]
    return next((count for count in range(len(history) + 1) if program.plan.stop(history[:count])), None)


@pytest.mark.parametrize(
    ("metrics", "target_patience", "evaluations"),
    [
        ([0.5, 0.9, 0.91], 2, 3),
        ([0.9, 0.8, 0.9, 0.9], 2, 4),  # reached, lost, reached and held
        ([0.9, 0.8, 0.9, 0.8], 2, None),
        ([0.5, 0.9], 1, 2),
        ([0.9, 0.9], 3, None),
        ([], 1, None),
    ],
)
def test_target_must_be_held(perceptron, metrics, target_patience, evaluations):
    assert stops_at(perceptron(target=0.9), metrics, target_patience=target_patience) == evaluations


def test_metric_that_falls_is_supported(perceptron):
    task = perceptron(metric="loss", target=0.3)
    assert stops_at(task, [0.9, 0.3, 0.2, 0.1]) == 3
    assert stops_at(task, [0.9, 0.8, 0.85, 0.81, 0.7], patience=2) == 4


@pytest.mark.parametrize(
    ("metrics", "patience", "min_delta", "evaluations"),
    [
        ([0.1, 0.2, 0.3, 0.3, 0.3], 2, 0.0, 5),
        ([0.1, 0.2, 0.15, 0.21, 0.2, 0.2], 2, 0.0, 6),
        ([0.1, 0.2, 0.21, 0.22, 0.23], 2, 0.05, 4),
        ([0.1, 0.2, 0.3, 0.4], 1, 0.0, None),
    ],
)
def test_patience_stops_the_run(perceptron, metrics, patience, min_delta, evaluations):
    assert stops_at(perceptron(target=0.99), metrics, patience=patience, min_delta=min_delta) == evaluations


def test_task_without_target_stops_by_patience_only(perceptron):
    assert stops_at(perceptron(target=None), [1.0, 1.0, 1.0], patience=2) == 3


def test_one_rank_stops_all_ranks(perceptron):
    asked = []
    assert stops_at(perceptron(target=0.9), [0.1, 0.2], agree=lambda mine: asked.append(mine) or len(asked) == 2) == 1
    assert asked == [False, False]


def test_stop_of_an_inner_method_is_respected(perceptron):
    from hasten.engine.data_adapters import initial_plan

    task = perceptron(target=0.9)
    method, run = make_methods(Recipe.coerce("early_stopping"))[0], build(task).run
    plan = initial_plan(task)
    plan.stop = lambda history: len(history) == 1
    assert method.plan(plan, run).stop([Evaluation(1, 16, 0.1)])
    assert not plan.stop([Evaluation(1, 16, 0.1), Evaluation(2, 32, 0.2)])


def test_without_validation_data_no_effect(perceptron, trained):
    assert "no validation data" in trained(perceptron(validation_data=None), "early_stopping").run.no_effect[0][1]
