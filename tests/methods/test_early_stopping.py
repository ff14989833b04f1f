"""early_stopping: stops for the right reason at the right look, and is a function of the history alone."""

import pytest

from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.core.run_context import Evaluation, ParallelContext
from hasten.engine.plan import build
from hasten.engine.registry import make_methods


def stops_at(task, metrics, agree=None, **settings) -> int | None:
    """After how many looks the run would stop."""
    program = build(task, make_methods(Recipe().with_method("early_stopping", **settings)))
    if agree:
        program.run.parallel = ParallelContext(ProcessGroupInfo(all_reduce_max=lambda numbers: [agree(*numbers)]))
    history = [Evaluation(step, step * 16, metric) for step, metric in enumerate(metrics, 1)]
    return next((looks for looks in range(len(history) + 1) if program.plan.stop(history[:looks])), None)


@pytest.mark.parametrize(
    ("metrics", "hold", "looks"),
    [
        ([0.5, 0.9, 0.91], 2, 3),
        ([0.9, 0.8, 0.9, 0.9], 2, 4),  # reached, lost, reached and held
        ([0.9, 0.8, 0.9, 0.8], 2, None),
        ([0.5, 0.9], 1, 2),
        ([0.9, 0.9], 3, None),
        ([], 1, None),
    ],
)
def test_the_target_must_be_held(perceptron, metrics, hold, looks):
    assert stops_at(perceptron(target=0.9), metrics, hold=hold) == looks


def test_a_metric_that_should_fall(perceptron):
    task = perceptron(metric="loss", target=0.3)
    assert stops_at(task, [0.9, 0.3, 0.2, 0.1]) == 3
    assert stops_at(task, [0.9, 0.8, 0.85, 0.81, 0.7], patience=2) == 4


@pytest.mark.parametrize(
    ("metrics", "patience", "min_delta", "looks"),
    [
        ([0.1, 0.2, 0.3, 0.3, 0.3], 2, 0.0, 5),
        ([0.1, 0.2, 0.15, 0.21, 0.2, 0.2], 2, 0.0, 6),
        ([0.1, 0.2, 0.21, 0.22, 0.23], 2, 0.05, 4),
        ([0.1, 0.2, 0.3, 0.4], 1, 0.0, None),
    ],
)
def test_patience_ends(perceptron, metrics, patience, min_delta, looks):
    assert stops_at(perceptron(target=0.99), metrics, patience=patience, min_delta=min_delta) == looks


def test_without_a_target_there_is_only_patience(perceptron):
    assert stops_at(perceptron(target=None), [1.0, 1.0, 1.0], patience=2) == 3


def test_ranks_agree(perceptron):
    asked = []
    assert stops_at(perceptron(target=0.9), [0.1, 0.2], agree=lambda mine: asked.append(mine) or len(asked) == 2) == 1
    assert asked == [False, False]


def test_what_wanted_to_stop_before_still_may(perceptron):
    from hasten.engine.data_adapters import initial_plan

    task = perceptron(target=0.9)
    method, run = make_methods(Recipe.coerce("early_stopping"))[0], build(task).run
    plan = initial_plan(task)
    plan.stop = lambda history: len(history) == 1
    assert method.plan(plan, run).stop([Evaluation(1, 16, 0.1)])
    assert not plan.stop([Evaluation(1, 16, 0.1), Evaluation(2, 32, 0.2)])


def test_without_validation_data_nothing_tells(perceptron, trained):
    assert "no validation data" in trained(perceptron(validation_data=None), "early_stopping").run.no_effect[0][1]


@pytest.mark.parametrize("settings", ["hold=0", "patience=0", "min_delta=-1.0"])
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=settings.partition("=")[0]):
        make_methods(Recipe.coerce(f"early_stopping:{settings}"))
