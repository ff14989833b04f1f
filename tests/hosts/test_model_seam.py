"""The model seam tells evaluations from training, also where a model is trained, or only asked, in eval mode."""

import copy
import gc
import os
import time
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from hasten import Card, Exactness, ForwardFn, Method, RunContext
from hasten._torch_compat import get_set_module_call
from hasten.hosts.inside import models as seam_of_models
from hasten.hosts.inside.composition import Composition
from hasten.hosts.inside.models import ModelSeam
from hasten.hosts.inside.sites import Sites
from hasten.utils.phase_timer import PhaseTimer

X = torch.ones(2, 3)


@pytest.fixture
def seam(tmp_path, monkeypatch):
    """A seam whose script prints to the file of descriptor ``seam.output``."""
    output = os.open(tmp_path / "output", os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr(seam_of_models, "STDOUT", output)
    steps = SimpleNamespace(count=0, last_ended=None)
    made = ModelSeam(Sites(str(tmp_path)), PhaseTimer(torch.device("cpu")), steps)  # pyright: ignore[reportArgumentType]
    made.output = output  # pyright: ignore[reportAttributeAccessIssue]
    yield made
    made.stop_searching()
    os.close(output)


def backward(seam: ModelSeam, loss: torch.Tensor) -> None:
    """A training step, as ``Session._after_backward`` reports it."""
    loss.backward()
    if seam.began is not None:
        seam.on_backward()
    seam.steps.count += 1


def evaluate(seam: ModelSeam, model: nn.Module) -> None:
    """An evaluation that prints its metric, up to the next step."""
    model.eval()
    with torch.no_grad():
        model(X)
    os.write(seam.output, b"test acc 0.9\n")  # pyright: ignore[reportAttributeAccessIssue]
    model.train()
    backward(seam, model(X).sum())


@pytest.mark.parametrize("records", [False, True], ids=["no_grad", "detach"])
def test_teacher_that_is_asked_after_the_student_is_an_evaluation_that_ends_with_the_step(seam, records):
    student, teacher = nn.Linear(3, 2), nn.Linear(3, 2).eval()
    for _ in range(3):
        own = student(X)
        with torch.set_grad_enabled(records):
            wanted = teacher(X).detach()
        backward(seam, (own - wanted).square().sum())
        assert seam.began is None and not seam.trains_in_eval_mode
    os.write(seam.output, b"epoch 3 acc 0.87\n")
    assert [mark[3] for mark in seam.marks] == [True, False], "steps without output leave no marks"
    assert seam.marks[-1][2] == 0, "what was printed after the step is no result of an evaluation"
    evaluate(seam, student)
    assert [step for step, _ in seam.evaluations] == [0, 1, 2, 3]
    assert [mark[2:] for mark in seam.marks[-2:]] == [(17, True), (30, False)]


def test_model_that_is_trained_in_eval_mode_has_no_evaluations(seam):
    model = nn.Linear(3, 2).eval()
    for _ in range(2):
        backward(seam, model(X).sum())
    assert seam.trains_in_eval_mode and seam.marks == [] and seam.began is None


def test_marks_of_evaluations_without_output_do_not_pile_up(seam):
    model = nn.Linear(3, 2)
    evaluate(seam, model)
    for _ in range(5):
        with torch.no_grad():
            model.eval()(X)
        backward(seam, model.train()(X).sum())
    evaluate(seam, model)
    assert len(seam.evaluations) == 7
    assert [mark[2] for mark in seam.marks] == [0, 13, 13, 26]


class KerasLike(nn.Linear):
    """Gets as an argument whether a call trains, as Keras's ``train_on_batch`` does in eval mode."""

    def forward(self, x, training=None):
        return super().forward(x)


def test_model_that_an_argument_says_to_train_is_not_evaluated(seam):
    model = KerasLike(3, 2)
    for _ in range(2):
        backward(seam, model(X, training=True).sum())
        with torch.no_grad():
            model.eval()(X, training=False)
    backward(seam, model(X, training=True).sum())
    assert [step for step, _ in seam.evaluations] == [1, 2] and not seam.trains_in_eval_mode


def test_each_line_that_evaluates_is_a_site(seam):
    """A look at the shape of the output, without gradients, hides no validation that records them."""
    line, model = ["train.py:3"], nn.Linear(3, 2)
    seam.sites.line = lambda: line[0]
    evaluate(seam, model)
    line[0] = "train.py:9"
    for _ in range(2):
        backward(seam, model(X).sum())
        model.eval()(X)
        backward(seam, model.train()(X).sum())
    found = [(site["site"], site["no_grad"]) for site in seam.sites.records["evaluations"]]
    assert found == [("train.py:3#1", True), ("train.py:9#1", False)]


def test_marks_of_evaluations_stay_where_their_metric_was_logged(seam):
    """To a tracker, by a script that prints nothing."""
    model = nn.Linear(3, 2)
    for _ in range(3):
        with torch.no_grad():
            model.eval()(X)
        seam.has_logged = True
        backward(seam, model.train()(X).sum())
    assert [mark[1] for mark in seam.marks] == [0, 0, 1, 1, 2, 2]


def test_teacher_that_every_step_asks_is_part_of_the_step(seam):
    student, teacher = nn.Linear(3, 2), nn.Linear(3, 2).eval()
    for _ in range(2):
        with torch.no_grad():
            wanted = teacher(X)
        backward(seam, (student(X) - wanted).square().sum())
    seam.forget_teachers()
    with torch.no_grad():
        teacher(X)
    assert seam.began is None and not seam.evaluations and "evaluations" not in seam.sites.records
    evaluate(seam, student)
    assert [step for step, _ in seam.evaluations] == [2], "the evaluations of the model are seen"


def test_model_that_every_step_evaluates_is_no_teacher(seam):
    model = nn.Linear(3, 2)
    for _ in range(2):
        evaluate(seam, model)
    seam.forget_teachers()
    assert len(seam.evaluations) == 2


@pytest.mark.parametrize("wrapped", [False, True], ids=["copy", "AveragedModel"])
def test_evaluation_of_a_copy_that_no_step_has_called_is_seen(seam, wrapped):
    """As of a moving average of the weights."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    average = torch.optim.swa_utils.AveragedModel(model) if wrapped else copy.deepcopy(model).requires_grad_(False)
    for _ in range(2):
        backward(seam, model(X).sum())
    seam.stop_searching()
    seam.watch_copies()
    with torch.no_grad():
        average.eval()(X)
    assert seam.began is not None
    backward(seam, model(X).sum())
    assert [step for step, _ in seam.evaluations] == [2]
    assert len(seam.roots) == 1, "methods act on what is trained"


def test_model_of_a_later_fold_is_found_though_it_looked_like_a_copy(seam):
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    for _ in range(2):
        backward(seam, first(X).sum())
    seam.stop_searching()
    seam.watch_copies()
    seam.search_again({id(parameter) for parameter in second.parameters()})
    backward(seam, second(X).sum())
    assert len(seam.roots) == 1 and seam.roots[0] is second
    assert not hasattr(get_set_module_call(second).before, "of_copy"), "its calls are wrapped once"


def test_evaluations_between_two_steps_are_counted_once(seam):
    backward(seam, nn.Linear(3, 2)(X).sum())
    seam.steps.last_ended = began = time.perf_counter()
    for _ in range(3):
        seam.begin_evaluation()
        time.sleep(0.01)
        seam.end_evaluation(now=True)
    assert 0.03 <= seam.evaluated_seconds <= time.perf_counter() - began


class PerceptualLoss(nn.Linear):
    """A network in eval mode that the loss asks; its weights have gradients, though none updates them."""


def test_network_of_a_loss_in_eval_mode_leaves_the_evaluations_of_the_model(seam):
    model, judge = nn.Linear(3, 2), PerceptualLoss(2, 1).eval()
    for _ in range(3):
        backward(seam, judge(model(X)).sum())
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            judge(model(X))
        assert seam.began is not None, "the loss of a batch does not end the evaluation"
    backward(seam, judge(model.train()(X)).sum())
    assert [step for step, _ in seam.evaluations] == [3] and not seam.trains_in_eval_mode


def test_model_that_contains_one_of_an_earlier_call_takes_its_place(seam):
    backbone = nn.Linear(3, 2)
    with torch.no_grad():
        backbone(X)
    model = nn.Sequential(backbone, nn.Linear(2, 1))
    backward(seam, model(X).sum())
    assert seam.roots == [model] and [entry["type"] for entry in seam.sites.records["models"]] == ["Sequential"]
    assert get_set_module_call(backbone) is None and get_set_module_call(model) is not None


def test_module_that_was_trained_before_its_framework_adopts_it_is_under_methods(seam):
    class LightningLike(nn.Linear):
        def training_step(self, batch):
            return self(batch).sum()

    module = LightningLike(3, 2)
    module.forward(X).sum().backward()  # a search for a learning rate, in which the callback has no part
    seam.find_uncalled()

    def doubled(root, call_of_root):
        call = call_of_root()
        return lambda batch: 2 * call(batch)

    seam.wrap = doubled
    plain = module.training_step(X)
    seam.adopt(module, "training_step")
    assert torch.equal(module.training_step(X), 2 * plain)
    record = seam.sites.of(module)
    assert sum(root is module for root in seam.roots) == 1 and record is not None and record["called"]


@dataclass(frozen=True)
class NotesDevice(Method):
    """Notes the devices for which its hooks are asked."""

    card = Card(summary="note devices", exactness=Exactness.BIT_EXACT, source="", gain_when="never")
    devices: ClassVar[list[tuple[str, str]]] = []

    def model(self, model: nn.Module, run: RunContext) -> nn.Module:
        self.devices.append(("model", run.device.type))
        return model

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        self.devices.append(("forward", run.device.type))
        return forward


def test_methods_act_on_the_device_to_which_the_script_moves_its_model_after_a_first_call(seam):
    composition = Composition([NotesDevice()], "cpu", 0, True, "train.py")
    seam.wrap = composition.wrap_call
    model = nn.Linear(3, 2)
    model(X)
    model.to("meta")
    for _ in range(2):
        model(X.to("meta"))
    assert NotesDevice.devices == [("model", "cpu"), ("forward", "cpu"), ("forward", "meta")]


def test_module_of_an_earlier_fold_that_a_framework_trains_is_freed(seam):
    class Module(nn.Linear):
        def training_step(self):
            return self(X).sum()

    def fold() -> weakref.ref:
        module = Module(3, 2)
        seam.adopt(module, "training_step")
        module.training_step().backward()
        seam.steps.count += 1
        vars(module).pop("training_step")  # as at the end of a fit
        return weakref.ref(module)

    first, second = fold(), fold()
    gc.collect()
    assert first() is None and second() is not None


def test_module_that_is_fitted_again_after_another_one_is_changed_by_methods_once(seam):
    class Module(nn.Linear):
        def training_step(self):
            return self(X).sum()

    composition = Composition([NotesDevice()], "cpu", 0, True, "train.py")
    composition.has_trained, seam.wrap = True, composition.wrap_call
    NotesDevice.devices.clear()
    for module in [Module(3, 2), Module(3, 2)] * 2:
        seam.adopt(module, "training_step")
        vars(module).pop("training_step")  # as at the end of a fit
        seam.steps.count += 1
    hooks = [hook for hook, _ in NotesDevice.devices]
    NotesDevice.devices.clear()
    assert hooks.count("model") == 2


def test_weighted_loss_that_stays_in_training_mode_takes_part_in_the_evaluation(seam):
    model, loss = nn.Linear(3, 2), nn.Linear(2, 1)
    backward(seam, loss(model(X)).sum())
    seam.steps.last_ended = began = time.perf_counter()
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            time.sleep(0.01)
            loss(model(X))
    backward(seam, loss(model.train()(X)).sum())
    assert len(seam.evaluations) == 1 and 0.04 <= seam.evaluated_seconds <= time.perf_counter() - began
