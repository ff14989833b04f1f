"""Tasks in float64 for several ranks: 2 epochs of 23 steps, with a last batch that no number of ranks divides."""

import ctypes
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from hasten import Task
from hasten.data import arrays

SAMPLES, BATCH = 227, 10


class Rows(Dataset):
    def __init__(self, samples: int = SAMPLES, seed: int = 0):
        self.inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.labels = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.inputs[index], self.labels[index]


class Stream(IterableDataset):
    def __init__(self, samples: int = SAMPLES, first: int = 0, step: int = 1):
        self.rows, self.indices = Rows(), range(first, samples, step)

    def __iter__(self):
        return (self.rows[index] for index in self.indices)


class Poisoned(Rows):
    """Raises, or holds NaN, at the last row."""

    def __init__(self, raises: bool):
        super().__init__()
        self.raises = raises

    def __getitem__(self, index: int):
        if index == SAMPLES - 1 and self.raises:
            raise OSError("the disk is gone")
        return self.inputs[index] * (float("nan") if index == SAMPLES - 1 else 1.0), self.labels[index]


class Unplugged(Rows):
    def __getitem__(self, index: int):
        if index == SAMPLES - 1:
            raise ConnectionResetError(104, "Connection reset by peer")
        return super().__getitem__(index)


class UnpluggedByALibrary(Rows):
    def __getitem__(self, index: int):
        if index == SAMPLES - 1:
            raise RuntimeError("the store of the pictures: Connection reset by peer")
        return super().__getitem__(index)


class Busy(Rows):
    """After the samples that ranks compare: raises at once on rank 0, and sleeps on the others."""

    reads = 0

    def __getitem__(self, index: int):
        self.reads += 1
        if self.reads > 32 and os.environ.get("RANK") == "0":
            raise OSError("the disk is gone")
        if self.reads > 32:
            time.sleep(8)
        return super().__getitem__(index)


class PoisonedStream(IterableDataset):
    def __iter__(self):
        rows = Poisoned(raises=False)
        return (rows[index] for index in range(SAMPLES))


class Slow(Rows):
    """Each sample takes ``seconds``."""

    def __init__(self, samples: int = SAMPLES, seconds: float = 0.002):
        super().__init__(samples)
        self.seconds = seconds

    def __getitem__(self, index: int):
        time.sleep(self.seconds)
        return super().__getitem__(index)


def network(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    between = nn.BatchNorm1d(8) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 8), between, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)).double()


def task(data=None, **changes) -> Task:
    usual = {
        "name": "shared",
        "model": network,
        "train_data": Rows() if data is None else data,
        "validation_data": Rows(40, seed=1),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        "metric": "accuracy",
        "batch_size": BATCH,
        "epochs": 2,
    }
    return Task(**(usual | changes))


def samples() -> Task:
    return task()


def loader() -> Task:
    return task(DataLoader(Rows(), batch_size=BATCH, shuffle=True))


def raises_on_the_first_while_the_other_is_busy() -> Task:
    return task(Busy(), batch_size=2)


def own_sampler() -> Task:
    """A DataLoader whose sample order is known to its sampler only."""
    order = torch.utils.data.SubsetRandomSampler(range(SAMPLES))
    return task(DataLoader(Rows(), batch_size=BATCH, sampler=order))


def stream() -> Task:
    return task(Stream())


def few_in_the_last_batch() -> Task:
    return task(Rows(SAMPLES - 4))


def few_in_the_last_batch_of_a_stream() -> Task:
    return task(Stream(SAMPLES - 4))


def drawn_with_replacement() -> Task:
    """More samples per epoch than there are rows."""
    rows = Rows()
    return task(DataLoader(rows, batch_size=BATCH, sampler=RandomSampler(rows, replacement=True, num_samples=300)))


def uneven_batches() -> Task:
    return task(DataLoader(Rows(), batch_sampler=Uneven(RandomSampler(Rows()), BATCH, False)))


class Uneven(BatchSampler):
    """Batches of ten and of three in turns."""

    def __iter__(self):
        for indices in super().__iter__():
            yield from (indices, indices[:3])

    def __len__(self) -> int:
        return 2 * super().__len__()


def ready_batches() -> Task:
    """Batches whose size neither the task nor the loader states."""
    rows, unseen = Rows(), Rows(40, seed=1)
    data = DataLoader(rows, batch_sampler=Uneven(RandomSampler(rows), BATCH, False))
    validation = DataLoader(unseen, batch_sampler=BatchSampler(range(40), BATCH, False))
    return task(data, validation_data=validation, batch_size=None)


def one_sample_a_rank_in_the_last_batch() -> Task:
    """For two ranks. Batch normalization cannot normalize one sample."""
    return task(Rows(SAMPLES - 5), model=lambda: network(norm=True))


def one_sample_a_rank() -> Task:
    """For two ranks: the last batch is the only one."""
    return task(Rows(2), model=lambda: network(norm=True))


def with_classes_of_a_set() -> Task:
    """Writes the numbers of the classes that this rank has in mind."""
    Path(f"classes-{os.environ['RANK']}").write_text(" ".join({f"class {number}" for number in range(20)}))
    return task(epochs=1)


def pictures() -> Task:
    def model():
        layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        )
        return layers.double()

    images = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(images, (images.sum((1, 2, 3)) > 0).long())
    return task(data, validation_data=data, model=model, epochs=1)


def rates_by_name() -> Task:
    """The first layer has ten times the learning rate."""

    def optimizer(model):
        first = [p for name, p in model.named_parameters() if name.startswith("0.")]
        return torch.optim.Adam([{"params": first, "lr": 1e-1}, {"params": list(model[4].parameters())}], lr=1e-2)

    return task(optimizer=optimizer)


def blocks() -> Task:
    """Three equal blocks, each above zero's minimum size for sharding, between layers of odd sizes."""

    def model():
        like = [nn.Sequential(nn.Linear(9, 801), nn.Tanh(), nn.Linear(801, 9)) for _ in range(3)]
        return nn.Sequential(nn.Linear(6, 9), *like, nn.Linear(9, 2)).double()

    return task(model=model, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), epochs=1.5)


def rates_by_name_and_schedule() -> Task:
    """The first layer has ten times the learning rate, one scalar weight is trained, and the rates fall."""
    return task(model=Scaled, optimizer=rates_that_fall)


def scalar() -> Task:
    """The same with a scalar weight without a dimension."""
    return task(model=lambda: Scaled(()), optimizer=rates_that_fall)


def rates_that_fall(model):
    groups = [
        {"params": list(model.first.parameters()), "lr": 1e-1},
        {"params": [model.scale, *model.last.parameters()]},
    ]
    made = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
    return made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 46)


class Scaled(nn.Module):
    """One trained scale for all outputs, and a buffer."""

    def __init__(self, shape: tuple = (1,)):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5, dtype=torch.float64), nn.Linear(5, 2, dtype=torch.float64)
        self.scale = nn.Parameter(torch.full(shape, 0.7, dtype=torch.float64))
        self.register_buffer("shift", torch.randn(5, dtype=torch.float64))

    def forward(self, inputs):
        return self.scale * self.last(torch.tanh(self.first(inputs) + self.shift))


def viewing() -> Task:
    """Layers whose inputs are views of the outputs of the former layers."""

    def model():
        layers = nn.Sequential(
            nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 4), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 2)
        )
        return layers.double()

    return task(model=model, epochs=1)


def norming() -> Task:
    """The layers before the norm have no biases, whose gradients would be rounding errors."""

    def model():
        layers = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
        )
        return layers.double()

    return task(model=model, epochs=1)


def tied() -> Task:
    """The first and the last layer share one weight."""

    def model():
        layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        layers[2].weight = layers[0].weight
        return layers.double()

    return task(model=model)


def tied_by_a_view() -> Task:
    """The last layer is the first one transposed: another parameter in the same memory."""

    def model():
        layers = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6)).double()
        layers[2].weight.data = layers[0].weight.data.t()
        return layers

    return task(model=model)


def own_loss() -> Task:
    return task(loss=None)


def stream_that_divides_itself(rank: int) -> Task:
    return task(Stream(first=rank, step=2))


def shorter_on_the_second(rank: int) -> Task:
    return task(Rows(SAMPLES if rank == 0 else SAMPLES - 30))


def shorter_stream_on_the_second(rank: int) -> Task:
    return task(Stream(SAMPLES if rank == 0 else SAMPLES - 30))


def stream_that_ends_early_on_the_second(rank: int) -> Task:
    return task(Stream(SAMPLES if rank == 0 else SAMPLES - 27))


class Noisy(Rows):
    def __getitem__(self, index: int):
        return torch.rand(6, dtype=torch.float64), self.labels[index]


def pipeline() -> Task:
    rows = Rows()
    return task(arrays((rows.inputs, rows.labels)).shuffle(seed=3).batch(BATCH))


def dropping() -> Task:
    return task(model=lambda: network(dropout=0.3))


def dropping_loader() -> Task:
    return task(DataLoader(Rows(), batch_size=BATCH, shuffle=True), model=lambda: network(dropout=0.3))


def raising() -> Task:
    return task(Poisoned(raises=True))


def not_a_number() -> Task:
    return task(Poisoned(raises=False))


def no_data_on_the_second() -> Task:
    if os.environ.get("RANK") == "1":
        raise FileNotFoundError(2, "No such file or directory", "data/train.npy")
    return task()


class WaitsForever(nn.Module):
    """Rank 1 is killed in its third step. Rank 0 waits in C for ever, as in an NCCL kernel: no signal handler runs."""

    def __init__(self):
        super().__init__()
        self.network, self.calls, self.mutex = network(), 0, ctypes.create_string_buffer(64)

    def forward(self, rows):
        self.calls += 1
        if self.calls == 3 and os.environ.get("RANK") == "1":
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.calls == 3:
            for _ in range(2):  # the second call waits for the first one to unlock
                ctypes.CDLL(None).pthread_mutex_lock(self.mutex)
        return self.network(rows)


def waits_in_c_for_a_lost_rank() -> Task:
    return task(model=WaitsForever)


def slow() -> Task:
    return task(Slow(), epochs=20)


class Numbered(Slow):
    """Samples that contain their index."""

    def __getitem__(self, index: int):
        inputs, label = super().__getitem__(index)
        return torch.cat([inputs, torch.tensor([index], dtype=torch.float64)]), label


class Counting(nn.Module):
    """A network whose weights count how often each sample was used: a step adds one for each sample of its batch."""

    def __init__(self, samples: int):
        super().__init__()
        self.network, self.seen = network(dropout=0.2), nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, rows):
        counts = self.seen[rows[:, -1].long()] - 1e9  # never the greatest output
        return torch.cat([self.network(rows[:, :-1]), counts[:, None]], dim=1)


def counting(epochs: int = 10) -> Task:
    """Epochs of 22 full batches, two per second on two ranks. Finally each weight of ``seen`` must be the number of
    epochs."""
    samples = 22 * BATCH
    return task(
        Numbered(samples),
        validation_data=Numbered(40),
        model=lambda: Counting(samples),
        loss=lambda output, labels: nn.functional.cross_entropy(output[:, :-1], labels) - output[:, -1].mean(),
        optimizer=lambda model: torch.optim.SGD(
            [{"params": model.network.parameters(), "momentum": 0.9}, {"params": [model.seen], "lr": float(BATCH)}],
            lr=1e-2,
        ),
        epochs=epochs,
    )


def counting_for_long() -> Task:
    return counting(60)


class InFloat32(Rows):
    def __getitem__(self, index: int):
        return self.inputs[index].float(), self.labels[index]


def in_float32() -> Task:
    return task(InFloat32(), validation_data=InFloat32(40, seed=1), model=lambda: network().float())


def sluggish() -> Task:
    """An epoch of two processes takes more than a second, far more than the start-up; the target is reached in one
    epoch."""
    return task(Slow(seconds=0.01), epochs=3, target=0.8)


def with_a_spare():
    """Weight decay would change an unused weight with a gradient of zeros."""

    class Spare(nn.Sequential):
        def __init__(self):
            super().__init__(*network())
            self.spare = nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, inputs):
            for part in list(self)[:-1]:
                inputs = part(inputs)
            return inputs

    return task(model=Spare, optimizer=lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.1))


def sparse():
    return task(model=lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)))
