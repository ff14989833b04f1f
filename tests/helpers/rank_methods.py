"""Methods with planted behavior: lost or gained time, a rank that hangs, a rank that raises."""

import time
from contextlib import contextmanager
from unittest.mock import patch

import torch

from hasten import Card, Exactness, Method

AT_STEP, LATE = 5, 0.020


class Dozing(Method):
    """Rank 1 sleeps in every step."""

    card = Card(summary="a straggler", exactness=Exactness.BIT_EXACT, accelerates={"optimizer_step"})

    def optimizer_step(self, optimizer_step, run):
        def late() -> None:
            if run.ranks.rank == 1:
                time.sleep(LATE)
            optimizer_step()

        return late


class Hanging(Method):
    """Rank 1 hangs in a step."""

    card = Card(summary="a rank that hangs", exactness=Exactness.BIT_EXACT, accelerates={"optimizer_step"})

    def optimizer_step(self, optimizer_step, run):
        def never() -> None:
            while run.ranks.rank == 1 and run.progress.step == AT_STEP:
                time.sleep(1)
            optimizer_step()

        return never


class Stuck(Method):
    """Rank 1 hangs before its first step."""

    card = Card(
        summary="a rank that hangs while it is built", exactness=Exactness.BIT_EXACT, accelerates={"optimizer_step"}
    )

    def model(self, model, run):
        while run.ranks.rank == 1:
            time.sleep(1)
        return model


class Raising(Method):
    card = Card(summary="a rank that raises", exactness=Exactness.BIT_EXACT, accelerates={"optimizer_step"})

    def optimizer_step(self, optimizer_step, run):
        def raising() -> None:
            if run.ranks.rank == 1 and run.progress.step == AT_STEP:
                raise RuntimeError("planted")
            optimizer_step()

        return raising


class RaisingFirst(Method):
    card = Card(summary="the first rank raises", exactness=Exactness.BIT_EXACT, accelerates={"optimizer_step"})

    def optimizer_step(self, optimizer_step, run):
        def raising() -> None:
            if run.ranks.is_main_process and run.progress.step == AT_STEP:
                raise RuntimeError("planted")
            optimizer_step()

        return raising


class LighterSleep(Method):
    """Halves every sleep, so that a slow dataset loses less time; two processes still sleep at the same time."""

    card = Card(summary="half the sleep", exactness=Exactness.BIT_EXACT, accelerates={"input"})

    def process_context(self, context, run):
        sleep = time.sleep

        @contextmanager
        def lighter():
            with context(), patch("time.sleep", lambda seconds: sleep(seconds / 2)):
                yield

        return lighter


class Faster(Method):
    """Claims to be exact, and updates twice."""

    card = Card(summary="two updates a step", exactness=Exactness.EQUIVALENT_MATH, accelerates={"optimizer_step"})

    def optimizer_step(self, optimizer_step, run):
        return lambda: (optimizer_step(), optimizer_step())


class Rounding(Method):
    """Rounds gradients: a fifth of those of the last rank is lost."""

    card = Card(
        summary="rounds on the last rank", exactness=Exactness.REDUCED_PRECISION, accelerates={"optimizer_step"}
    )

    def grad_transform(self, grad_transform, run):
        def rounded() -> None:
            grad_transform()
            for weight in run.model.parameters():
                if weight.grad is not None and run.ranks.rank == run.ranks.world_size - 1:
                    weight.grad.mul_(0.8)

        return rounded


class Descending(Method):
    """Replaces the optimizer by one with an attribute that torch's copies omit."""

    card = Card(summary="gradient descent", exactness=Exactness.CHANGES_TRAINING, accelerates={"optimizer_step"})

    def optimizer(self, make, run):
        def descending(model):
            _, schedule = made if isinstance(made := make(model), tuple) else (made, None)
            if schedule is None:
                return Descent(model.parameters(), lr=0.1)
            return (optimizer := Descent(model.parameters(), lr=0.1)), torch.optim.lr_scheduler.LinearLR(
                optimizer, total_iters=20
            )

        return descending


class Descent(torch.optim.SGD):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.shard = 0.5

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.mul_(self.shard)
        super().step(closure)


class Unlike(Method):
    """Claims to be exact, and trains rank 1 differently."""

    card = Card(summary="another rate on rank 1", exactness=Exactness.EQUIVALENT_MATH, accelerates={"optimizer_step"})

    def backward(self, backward, run):
        return lambda loss: backward(loss * (2.0 if run.ranks.rank == 1 else 1.0))
