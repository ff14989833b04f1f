"""The model seam tells evaluations from training, also where a model is trained, or only asked, in eval mode."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hasten.hosts.inside import models as seam_of_models
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
