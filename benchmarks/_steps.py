"""A small training whose dataset measures time and switches between engines, so that one clock times all engines.

Each engine trains in a thread of its own, and one thread runs at a time. An engine that requests the first sample of
its next leg passes the baton to the next engine and waits for its turn. A leg takes a few tenths of a second, so other
load on the machine and changes of clock rate affect all engines alike. The first leg of each engine, which contains the
start-up, is dropped, and so are the first steps of each leg, during which the CPU caches still hold data of another
engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter, process_time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES = 1024  # different samples; more would only use more memory
CLASSES = 8
WARM_UP = 0.1  # fraction of a leg, at its start, that is not timed

Train = Callable[[DataLoader], object]


class Baton:
    """Passed around among the engines that are still training."""

    def __init__(self, names: list[str]):
        self.names, self.turn, self.changed = names, names[0] if names else None, threading.Condition()

    def wait(self, name: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == name)

    def pass_on(self, name: str, leaving: bool = False) -> None:
        with self.changed:
            after = self.names[self.names.index(name) + 1 :] + self.names[: self.names.index(name)]
            if leaving:
                self.names.remove(name)
            self.turn = after[0] if after else name
            self.changed.notify_all()


class Clocked(Dataset):
    """Samples of ``width`` numbers with a class; records wall-clock and CPU seconds of the steps of each leg."""

    def __init__(self, name: str, baton: Baton, width: int, batch_size: int, steps: int, legs: int):
        drawn = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, width, generator=drawn)
        self.targets = torch.randint(CLASSES, (SAMPLES,), generator=drawn)
        self.name, self.baton = name, baton
        self.leg, self.warm = steps * batch_size, int(WARM_UP * steps) * batch_size
        self.timed = steps - int(WARM_UP * steps)
        self.length = (legs + 1) * self.leg + 1  # one more leg as warm-up, and the sample that ends the last leg
        self.began, self.legs = (0.0, 0.0), []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        if index % self.leg == 0 and index:
            now = perf_counter(), process_time()
            if index > self.leg:
                self.legs.append(
                    tuple((after - before) / self.timed for before, after in zip(self.began, now, strict=True))
                )
            self.baton.pass_on(self.name)
            self.baton.wait(self.name)
        if index % self.leg == self.warm:
            self.began = perf_counter(), process_time()
        return self.inputs[index % SAMPLES], self.targets[index % SAMPLES]


def relay(
    arms: dict[str, Train], width: int, batch_size: int, steps: int, legs: int
) -> dict[str, list[tuple[float, float]]]:
    """Returns wall-clock and CPU seconds per step, by leg, of trainings that take turns over one epoch of a DataLoader.

    Raises:
        Exception: what an engine raised, after all have ended.
    """
    baton = Baton(list(arms))
    data = {name: Clocked(name, baton, width, batch_size, steps, legs) for name in arms}
    errors: list[Exception] = []

    def run(name: str) -> None:
        baton.wait(name)
        try:
            arms[name](DataLoader(data[name], batch_size=batch_size))
        except Exception as error:
            errors.append(error)
        finally:
            baton.pass_on(name, leaving=True)

    threads = [threading.Thread(target=run, args=(name,)) for name in arms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {name: each.legs for name, each in data.items()}


def by_hand(model: nn.Module, loader: DataLoader) -> None:
    """The textbook training loop."""
    optimizer = sgd(model)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def as_task(model: Callable[[], nn.Module], loader: DataLoader):
    """The same training as a hasten task."""
    from hasten import Task

    return Task(model=model, train_data=loader, loss=nn.functional.cross_entropy, optimizer=sgd, epochs=1)
