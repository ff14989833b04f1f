"""Metrics by name against their definition; torchmetrics and functions; directions."""

import math
from functools import partial

import numpy
import pytest
import torch
from torch.nn import functional as F

from hasten import ConfigurationError, RunError, Task
from hasten.engine.metrics import METRICS, MetricAccumulator, higher_is_better, own_result


def task(metric, **changes):
    options = {"model": torch.nn.Identity, "train_data": [1], "loss": None, "optimizer": lambda model: None}
    return Task(metric=metric, **(options | changes))


def measured(metric, batches, **changes):
    accumulator = MetricAccumulator(task(metric, **changes))
    for output, target, loss in batches:
        accumulator.update(output, target, torch.tensor(loss), len(target))
    return accumulator.result()


SCORES = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
RIGHT = torch.tensor([1, 0, 0])
LINES = SCORES[:2, :, None].repeat(1, 1, 3), RIGHT[:2, None].repeat(1, 3)  # scores of 2 classes, 3 tokens in a sample
LONG = torch.tensor([[[0.0] * 10, [1.0] * 5 + [-1.0] * 5]] * 2)  # 10 tokens in a sample, half of them of class 0
PREDICTED, WANTED = torch.tensor([[1.0], [3.0]]), torch.tensor([2.0, 1.0])


@pytest.mark.parametrize(
    ("metric", "batches", "value"),
    [
        ("accuracy", [(SCORES, RIGHT, 0.5)], 2 / 3),
        ("accuracy", [(SCORES[:2], RIGHT[:2], 0.5), (SCORES[2:], RIGHT[2:], 0.5)], 2 / 3),
        ("error", [(SCORES, RIGHT, 0.5)], 1 / 3),
        ("accuracy", [(torch.tensor([[-1.0], [2.0]]), torch.tensor([0, 1]), 0.1)], 1.0),
        ("accuracy", [({"logits": SCORES}, RIGHT, 0.5)], 2 / 3),
        ("accuracy", [(SCORES, torch.tensor([1, -100, 1]), 0.5)], 1.0),  # what the loss ignores does not count
        ("accuracy", [(SCORES, torch.tensor([0, -100, -100]), 0.5), (SCORES, torch.tensor([1, 0, 1]), 0.5)], 3 / 4),
        ("accuracy", [(SCORES, torch.full((3,), -100), 0.5), (SCORES, RIGHT, 0.5)], 2 / 3),
        ("accuracy", [(*LINES, 0.5), (LONG, torch.zeros(2, 10).long(), 0.5)], 16 / 26),
        ("loss", [(SCORES, RIGHT, 0.5), (SCORES[:1], RIGHT[:1], 0.9)], 0.6),
        ("perplexity", [(SCORES, RIGHT, 2.0)], math.exp(2)),
        ("bits per character", [(SCORES, RIGHT, math.log(2))], 1.0),
        ("mse", [(PREDICTED, WANTED, 0.0)], 2.5),
        ("rmse", [(PREDICTED, WANTED, 0.0)], math.sqrt(2.5)),
        ("mae", [(PREDICTED, WANTED, 0.0)], 1.5),
    ],
)
def test_metric_by_name_equals_its_definition(metric, batches, value):
    assert measured(metric, batches).metric == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("size", [1, 3, 7, 32])
def test_accuracy_of_nine_tenths_reaches_its_target(size):
    """Sums of means in single precision are slightly too small."""
    target = torch.zeros(540, dtype=torch.long)
    scores = torch.tensor([[0.0, 1.0]] * 54 + [[1.0, 0.0]] * 486)
    pieces = [(scores[i : i + size], target[i : i + size], 0.1) for i in range(0, 540, size)]
    assert measured("accuracy", pieces).metric == 0.9


@pytest.mark.slow
def test_torchmetrics_are_reset_each_time():
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.MulticlassAccuracy(num_classes=2, average="micro")
    metric.update(torch.tensor([0, 0]), torch.tensor([1, 1]))
    assert measured(metric, [(SCORES, RIGHT, 0.5)]).metric == pytest.approx(2 / 3, rel=1e-6)
    assert higher_is_better(task(metric)) is True


def test_direction_is_that_of_the_task_else_of_the_metric_else_refused():
    assert higher_is_better(task("accuracy")) is True
    assert higher_is_better(task("perplexity")) is False
    assert higher_is_better(task("accuracy", higher_is_better=False)) is False
    with pytest.raises(ConfigurationError, match="it is unknown whether"):
        higher_is_better(task(lambda output, target: 1.0))


@pytest.mark.parametrize("value", [numpy.float32(0.25), numpy.int64(1), True])
def test_metric_may_be_any_number(value):
    assert measured(lambda output, target: value, [(SCORES, RIGHT, 0.5)] * 2).metric == float(value)
    assert own_result(value).metric == float(value)


@pytest.mark.parametrize("value", ["good", None, torch.zeros(3)])
def test_metric_that_is_not_a_number_is_refused(value):
    with pytest.raises(ConfigurationError, match="must return one number"):
        measured(lambda output, target: value, [(SCORES, RIGHT, 0.5)])


@pytest.mark.parametrize(
    ("metric", "output", "target", "kind", "message"),
    [
        (
            "accuracy",
            SCORES,
            RIGHT[:, None],
            RunError,
            r"shape \(3, 2\) cannot be compared with targets of shape \(3, 1\)",
        ),
        ("accuracy", torch.zeros(3, 4, 2), RIGHT, RunError, r"shape \(3, 4\) .* shape \(3,\)"),
        ("mse", torch.zeros(3, 2), torch.zeros(3), RunError, r"shape \(3, 2\) .* shape \(3,\)"),
        ("accuracy", SCORES, None, ConfigurationError, "the metric accuracy needs a target"),
        ("accuracy", {"scores": SCORES}, RIGHT, ConfigurationError, "holds scores but no logits"),
    ],
)
def test_metric_of_incompatible_shapes_is_refused(metric, output, target, kind, message):
    with pytest.raises(kind, match=message):
        MetricAccumulator(task(metric)).update(output, target, torch.tensor(0.5), 3)


def test_unknown_metric_suggests_the_nearest():
    with pytest.raises(ConfigurationError, match="did you mean accuracy"):
        MetricAccumulator(task("acuracy"))


def test_accuracy_of_square_scores_is_refused_as_ambiguous():
    """256 tokens of 256 classes: the classes may be the second or the last dimension."""
    with pytest.raises(RunError, match=r"ambiguous for scores of shape \(2, 4, 4\)"):
        measured("accuracy", [(torch.rand(2, 4, 4), torch.zeros(2, 4, dtype=torch.long), 0.5)])
    assert measured("accuracy", [(torch.eye(4).repeat(2, 1, 1)[:, :3], torch.arange(3).repeat(2, 1), 0.5)]).metric == 1


PROBABILITIES, TRUE = torch.tensor([[0.2], [0.4], [0.3], [0.9]]), torch.tensor([0.0, 0.0, 1.0, 1.0])
ONE_HOT = torch.eye(3)[[0, 1, 1]]
OF_CLASSES = torch.tensor([[2.0, 1.0, 0.5], [0.1, -1.0, -2.0], [-3.0, -1.0, -2.0]])  # right, wrong, right


@pytest.mark.parametrize("loss", [torch.nn.BCELoss(), F.binary_cross_entropy, partial(F.binary_cross_entropy)])
def test_accuracy_of_probabilities_is_that_of_the_threshold_one_half(loss):
    """A sigmoid is always above 0."""
    assert measured("accuracy", [(PROBABILITIES, TRUE, 0.1)], loss=loss).metric == 0.75
    assert measured("error", [(PROBABILITIES, TRUE, 0.1)], loss=loss).metric == 0.25


@pytest.mark.parametrize(("of", "accuracy"), [("probabilities", 0.75), ("logits", 0.5), ("neither", 0.5)])
def test_loss_shows_whether_scores_are_probabilities(of, accuracy):
    """Task(loss=) is a function of the user's; the same scores may also be logits."""
    losses = {
        "probabilities": F.binary_cross_entropy(PROBABILITIES[:, 0], TRUE).item(),
        "logits": F.binary_cross_entropy_with_logits(PROBABILITIES[:, 0], TRUE).item(),
        "neither": math.nan,
    }
    batch = PROBABILITIES, TRUE.long(), losses[of]
    assert measured("accuracy", [batch], loss=lambda output, target: None).metric == accuracy


def test_accuracy_of_scores_that_are_not_finite_is_a_number():
    scores = torch.tensor([math.nan, math.inf, -math.inf, 2.0])
    assert measured("accuracy", [(scores, TRUE, math.nan)]).metric == 0.5


@pytest.mark.parametrize("target", [ONE_HOT, ONE_HOT * 0.9 + 0.1 / 3, ONE_HOT.long()])
@pytest.mark.parametrize("loss", [None, torch.nn.CrossEntropyLoss()])
def test_accuracy_of_one_hot_targets_is_that_of_the_classes(target, loss):
    assert measured("accuracy", [(OF_CLASSES, target, 0.1)], loss=loss).metric == pytest.approx(2 / 3)


def test_accuracy_of_several_labels_is_that_of_each_score():
    scores, labels = torch.tensor([[1.0, 1.0, -1.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    assert measured("accuracy", [(scores, labels, 0.1)]).metric == pytest.approx(2 / 3)
    loss = torch.nn.BCEWithLogitsLoss()  # a batch in which each sample happens to have one label
    assert measured("accuracy", [(OF_CLASSES, ONE_HOT, 0.1)], loss=loss).metric == pytest.approx(4 / 9)


def test_targets_of_a_hinge_loss_are_signs():
    scores, target = torch.tensor([2.0, -1.0, 0.3]), torch.tensor([1.0, -1.0, -1.0])
    loss = torch.nn.functional.soft_margin_loss(scores, target)
    assert float(METRICS["accuracy"].per_batch(scores, target, loss)) == pytest.approx(2 / 3)


def test_several_labels_of_which_each_sample_happens_to_have_one_are_counted_one_by_one():
    scores, target = torch.tensor([[2.0, 1.0, -3.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, target)
    assert float(METRICS["accuracy"].per_batch(scores, target, loss)) == pytest.approx(2 / 3)
    of_classes = torch.nn.functional.cross_entropy(scores, target)
    assert float(METRICS["accuracy"].per_batch(scores, target, of_classes)) == 1.0


@pytest.mark.parametrize(
    "loss", [torch.nn.CrossEntropyLoss(ignore_index=255), partial(F.cross_entropy, ignore_index=255)]
)
def test_label_that_the_loss_ignores_does_not_count(loss):
    assert measured("accuracy", [(SCORES, torch.tensor([1, 255, 1]), 0.5)], loss=loss).metric == 1.0
