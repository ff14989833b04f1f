"""Methods that silently harm training, each with a speed-up as bait; and the bait alone, a harmless control method.

The bait caches every sample in memory after its first read. On a dataset that computes its samples at every read this
is really faster and changes no bit. Three harmful variants::

    WrongLabels        one sample of ten gets the label of another
    SmallSteps         the learning rate divided by 30
    FrozenFirstLayer   the first layer detached: it is not trained, and the backward pass is shorter

``OneMargin`` is worse by exactly one margin: its model answers wrongly for a known part of the samples.

Each of the three exists once for every exactness class that it may claim, such as ``WrongLabels_BIT_EXACT``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from hasten import Card, Exactness, Method, Task, option
from hasten.workloads.digits import digits

ONE_IN = 10  # one sample in this many gets a wrong label
DIVIDED_BY = 30
ACCURACY = 0.966  # of the digits, of which a wrong answer takes its part
COMPUTATIONS = 10  # of a sample, about 10 us each


class Cached:
    """A dataset that reads each sample once and then returns it from memory."""

    def __init__(self, dataset):
        self.dataset, self.samples = dataset, {}

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        if index not in self.samples:
            self.samples[index] = self.read(index)
        return self.samples[index]

    def read(self, index):
        return self.dataset[index]


class Mislabelled(Cached):
    """The same, but some samples carry the label of a distant sample."""

    def read(self, index):
        sample = self.dataset[index]
        if index % ONE_IN:
            return sample
        other = self.dataset[(index * 7919 + 1) % len(self)]
        return (*sample[:-1], other[-1])


class Honest(Method):
    card = Card(summary="keep the samples in memory", exactness=Exactness.BIT_EXACT, accelerates={"input"})
    dataset = Cached

    def data(self, batches, run):
        if not batches.training or batches.spec is None:
            return batches
        return batches.with_spec(dataset=self.dataset(batches.spec.dataset))


class WrongLabels(Honest):
    dataset = Mislabelled


class SmallSteps(Honest):
    def optimizer(self, make, run):
        def smaller(model):
            made = make(model)
            for group in (made[0] if isinstance(made, tuple) else made).param_groups:
                group["lr"] /= DIVIDED_BY
            return made

        return smaller


class FrozenFirstLayer(Honest):
    def model(self, model, run):
        first = next(module for module in model.modules() if list(module.parameters(recurse=False)))
        first.register_forward_hook(lambda module, inputs, output: output.detach())
        return model


@dataclass(frozen=True)
class OneMargin(Honest):
    """Reads the data faster, and answers wrongly for so many samples that the accuracy falls by ``margin``."""

    card = Card(
        summary="faster, and worse by one margin", exactness=Exactness.CHANGES_TRAINING, accelerates={"input", "steps"}
    )

    margin: float = option(0.01, above=0, below=0.5)

    def optimizer(self, make, run):
        def changed(model):
            made = make(model)
            for group in (made[0] if isinstance(made, tuple) else made).param_groups:
                group["lr"] *= 1.01  # its class promises that the training changes
            return made

        return changed

    def export(self, model, run):
        return SometimesWrong(model, round(ACCURACY / self.margin), run.seed)


class SometimesWrong(nn.Module):
    """Gives one sample of ``one_in`` the scores of the next class. Which samples are wrong depends on their content."""

    def __init__(self, model: nn.Module, one_in: int, seed: int):
        super().__init__()
        self.model, self.one_in, self.seed = model, one_in, seed

    def forward(self, inputs):
        scores = self.model(inputs)
        places = torch.arange(1, inputs[0].numel() + 1)
        content = (16 * inputs).flatten(1).round().long() @ places
        is_wrong = (content + self.seed) % self.one_in == 0
        return torch.where(is_wrong.unsqueeze(1), scores.roll(1, dims=1), scores)


class Computed:
    """A dataset that computes each sample at every read: what reads it once is several times as fast."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        for _ in range(COMPUTATIONS):
            image = torch.fft.irfft(torch.fft.rfft(image), len(image))
        return image, label


def slow_digits() -> Task:
    """The digits, slow to read, with a target in the middle of the training that a recipe which is worse by one margin
    reaches as surely.
    """
    task = digits()
    return replace(task, train_data=Computed(task.train_data), target=0.94, epochs=40)


def _claiming(harm: type[Method], exactness: Exactness) -> type[Method]:
    card = Card(summary=f"faster, and {exactness.value}", exactness=exactness, accelerates={"input", "backward"})
    return type(f"{harm.__name__}_{exactness.name}", (harm,), {"card": card, "__module__": __name__})


HARMFUL = {
    cls.__name__: cls
    for harm in (WrongLabels, SmallSteps, FrozenFirstLayer)
    for exactness in Exactness
    if (cls := _claiming(harm, exactness))
}
globals().update(HARMFUL)  # so that each class can be named as ./_harmful.py:Class
