"""Methods that silently harm training, each with a real speed-up as bait; and the bait alone as an honest method.

The bait caches every sample in memory after its first read. On a dataset that computes its samples at every read this
is really faster and changes no bit. Three harmful variants::

    WrongLabels        one sample of ten gets the label of another
    SmallSteps         the learning rate divided by 30
    FrozenFirstLayer   the first layer detached: it is not trained, and the backward pass is shorter

Each variant exists once for every exactness class that it may claim, such as ``WrongLabels_BIT_EXACT``.
"""

from __future__ import annotations

from hasten import Card, Exactness, Method

ONE_IN = 10  # one sample in this many gets a wrong label
DIVIDED_BY = 30


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


def _claiming(harm: type[Method], exactness: Exactness) -> type[Method]:
    card = Card(summary=f"faster, and {exactness.value}", exactness=exactness, accelerates={"input", "backward"})
    return type(f"{harm.__name__}_{exactness.name}", (harm,), {"card": card, "__module__": __name__})


HARMFUL = {
    cls.__name__: cls
    for harm in (WrongLabels, SmallSteps, FrozenFirstLayer)
    for exactness in Exactness
    if (cls := _claiming(harm, exactness))
}
globals().update(HARMFUL)  # so that each class can be named as ./harmful.py:Class
