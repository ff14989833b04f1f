"""Tasks for the measurements on a GPU: launch-bound, compute-bound, copy-bound, of known length, and large."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import Card, Exactness, Method, Task
from hasten.workloads.tiny_shakespeare import TransformerBlock

KNOWN_STEP_MS = 20.0  # of the task known_step, long compared with the rest of its step
TRIAL_CYCLES = 50_000_000


class Random(Dataset):
    """Random samples of one shape, with labels from 0 to 9; drawn by index."""

    def __init__(self, shape: tuple[int, ...], length: int):
        self.shape, self.length = shape, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(index)), index % 10


class Letters(Dataset):
    """Windows of random letters; the target is the next letter."""

    def __init__(self, context: int, length: int, alphabet: int):
        self.context, self.length, self.alphabet = context, length, alphabet

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        chance = torch.Generator().manual_seed(index)
        window = torch.randint(0, self.alphabet, (self.context + 1,), generator=chance)
        return window[:-1], window[1:]


class Transformer(nn.Module):
    """Letters, shape (batch, context), to logits, shape (batch, alphabet, context)."""

    def __init__(self, alphabet: int, context: int, width: int, blocks: int, heads: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(alphabet, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.head = nn.Linear(width, alphabet)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.tokens(text) + self.positions(places))).transpose(1, 2)


def gpt(width: int = 1024, blocks: int = 24, heads: int = 16, context: int = 1024, batch: int = 32) -> Task:
    """350 million weights (24 blocks of width 1024 and an alphabet of 32,768) at batches of 32 times 1024."""
    alphabet = 32_768
    return _task(
        partial(Transformer, alphabet, context, width, blocks, heads), Letters(context, 64 * batch, alphabet), batch
    )


def small_batches() -> Task:
    """The same GPT at batches of 4, of which many fit."""
    return gpt(batch=4)


def launch_bound() -> Task:
    """24 small layers at a batch of 8: every operation takes less time than its launch."""
    layers = [layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return _task(lambda: nn.Sequential(*layers, nn.Linear(64, 10)), Random((64,), 8 * 512), 8)


def copy_bound() -> Task:
    """Images of 3 x 224 x 224 at a batch of 64, from a loader that does not pin, through little arithmetic."""
    model = partial(_convolutions, 16)
    return _task(model, Random((3, 224, 224), 64 * 32), 64)


def images_with_short_batch() -> Task:
    """10.5 batches of small images."""
    return _task(partial(_convolutions, 64), Random((3, 64, 64), 672), 64)


def text_with_short_batch() -> Task:
    """10.5 batches of 256 letters."""
    return _task(partial(Transformer, 256, 256, 384, 6, 6), Letters(256, 336, 256), 32)


@cache
def cycles_per_ms() -> float:
    """Cycles of ``torch.cuda._sleep`` in a millisecond."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(TRIAL_CYCLES)
    end.record()
    end.synchronize()
    return TRIAL_CYCLES / begin.elapsed_time(end)


def keep_busy(milliseconds: float, device: torch.device) -> None:
    """Occupies the device for a time: queued on a GPU, at once on the CPU."""
    if device.type == "cuda":
        return torch.cuda._sleep(round(milliseconds * cycles_per_ms()))
    until = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < until:
        pass


class KnownStep(nn.Module):
    """A layer, after KNOWN_STEP_MS in which the device is busy."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        keep_busy(KNOWN_STEP_MS, x.device)
        return self.layer(x)


def known_step() -> Task:
    """A training whose step takes KNOWN_STEP_MS on the device and little else."""
    return _task(KnownStep, Random((64,), 8 * 512), 8)


@dataclass(frozen=True)
class Longer(Method):
    """Every step takes longer by ``milliseconds``, of the device or of the host."""

    card = Card(summary="longer steps", exactness=Exactness.BIT_EXACT, accelerates={"forward"})

    milliseconds: float = 1.0
    on_host: bool = False

    def forward(self, forward, run):
        def later(batch):
            if self.on_host:
                time.sleep(self.milliseconds / 1000)
            else:
                keep_busy(self.milliseconds, run.device)
            return forward(batch)

        return later


def large() -> Task:
    """A training that takes about 80 GB: two of them do not fit one GPU together."""
    width = 24_576  # 12 matrices of 2.4 GB; weights, gradients and momentum
    layers = [layer for _ in range(11) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
    task = _task(lambda: nn.Sequential(*layers, nn.Linear(width, 10)), Random((width,), 4096), 16)
    return replace(task, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))


def _convolutions(width: int) -> nn.Module:
    body = [layer for _ in range(4) for layer in (nn.LazyConv2d(width, 3, stride=2), nn.LazyBatchNorm2d(), nn.ReLU())]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    model(torch.zeros(2, 3, 64, 64))
    return model


def _task(model, data: Dataset, batch: int) -> Task:
    return Task(
        model=model,
        train_data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        metric="loss",
        batch_size=batch,
        epochs=1000,
    )
