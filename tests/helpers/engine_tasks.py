"""Small tasks whose every part draws random numbers, so that a resume that loses one generator's state is detected."""

import random

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from hasten import Card, Exactness, Method, Task

SAMPLES = 24


class Augmented(Dataset):
    """Samples with noise from all three generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(6) + random.random() + numpy.random.rand()
        return torch.linspace(-1, 1, 6) * (index % 5 - 2) + 0.1 * noise.float(), index % 3


class Stream(IterableDataset):
    """The same samples as a stream, in the order of a shuffle buffer."""

    def __iter__(self):
        buffer = []
        for index in range(SAMPLES):
            buffer.append(Augmented()[index])
            if len(buffer) > 5:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        yield from buffer


def model():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
    )


def optimizer(model):
    made = torch.optim.Adam(model.parameters(), lr=0.02)
    return made, torch.optim.lr_scheduler.StepLR(made, 5, gamma=0.7)


def task(train_data, **changes) -> Task:
    plan = {"batch_size": 4, "epochs": 2, "metric": "accuracy", "target": 0.5, "validation_data": Augmented()}
    parts = {"model": model, "loss": torch.nn.functional.cross_entropy, "optimizer": optimizer}
    return Task(train_data=train_data, **(parts | plan | changes))


def map_style():
    return task(Augmented())


def schedule_of_numpy():
    """Its learning rates are NumPy's numbers."""

    def optimizer(model):
        made = torch.optim.Adam(model.parameters(), lr=0.02)
        return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9 + 0.1 * numpy.cos(step))

    return task(Augmented(), optimizer=optimizer)


def ready_loader():
    return task(DataLoader(Augmented(), batch_size=4, shuffle=True))


def loader_with_its_own_generator():
    return task(DataLoader(Augmented(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)))


def loader_with_a_generator_in_its_batch_sampler():
    data = Augmented()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    return task(DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False)))


def loaders_that_share_a_generator():
    shared = torch.Generator().manual_seed(5)
    loaders = [DataLoader(Augmented(), batch_size=4, shuffle=shuffle, generator=shared) for shuffle in (True, False)]
    return task(loaders[0], validation_data=loaders[1])


class Centred(torch.nn.Module):
    """A loss with a running mean of the outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output, target):
        if output.requires_grad:
            self.centre.lerp_(output.detach().mean(0), 0.5)
        return torch.nn.functional.cross_entropy(output - self.centre.clone(), target)


def loss_with_a_state():
    return task(Augmented(), loss=Centred())


def loader_with_workers():
    return task(DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2))


def loader_with_persistent_workers():
    """With persistent workers; their generators cannot be resumed, so the samples draw nothing."""
    samples = [(torch.linspace(-1, 1, 6) * (index % 5 - 2), index % 3) for index in range(SAMPLES)]
    return task(DataLoader(samples, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True))


def stream():
    return task(Stream())


def evaluated_often():
    return task(Augmented(), evaluate_every=7)


def longer():
    return task(Augmented(), epochs=12, evaluate_every=40)


class Averaging(Method):
    """A method with state: the running average of the weights is exported."""

    card = Card(summary="averages", exactness=Exactness.CHANGES_TRAINING)

    def optimizer_step(self, optimizer_step, run):
        average = run.checkpoint_state["average"] = torch.optim.swa_utils.AveragedModel(run.model)

        def averaging():
            optimizer_step()
            average.update_parameters(run.model)

        return averaging

    def export(self, model, run):
        return run.checkpoint_state["average"].module


class Mixing(Method):
    """A method that draws from NumPy's generator during the step."""

    card = Card(summary="mixes", exactness=Exactness.CHANGES_TRAINING)

    def batch_transform(self, to_device, run):
        def mixing(batch):
            x, y = to_device(batch)
            return x + float(numpy.random.rand()) * 0.1, y

        return mixing
