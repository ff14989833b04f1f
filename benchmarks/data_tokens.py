"""Windows of 1024 tokens from a memory-mapped file of uint16, 32 per batch, as int64 (input, target), on one core.

"random windows" is the loop of nanoGPT's ``get_batch``, which many have copied: a new memory map in every step, a copy
and a conversion for each window, twice. Beside it the same with a Dataset and a DataLoader, and by index arithmetic.
hasten returns every token once per epoch, in random order, and with ``stride=1`` any window, as the loop does. The file
is in the page cache.

Figure: at least 10 times the random windows, both with any window and with each token once per epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from _loaders import Loader, Passes, on_one_core, over, quiet, rates, scratch, set_up, table, versions, words

on_one_core()
quiet()

import numpy
import torch
from _common import finish, interval, parser
from torch.utils.data import DataLoader, Dataset

TIMES = 10
BATCH, LENGTH, WORDS = 32, 1024, 50_257
OURS, ANY, USUAL, BOUND = "hasten", "hasten, any window", "random windows (nanoGPT)", "bound: convert twice"


def hasten(path, stride=None):
    from hasten.data import tokens

    return tokens(path, LENGTH, stride=stride).shuffle(seed=0).batch(BATCH, drop_last=True)


def random_windows(path):
    def passes():
        while True:
            data = numpy.memmap(path, dtype=numpy.uint16, mode="r")
            places = torch.randint(len(data) - LENGTH, (BATCH,))
            x = torch.stack([torch.from_numpy(data[place : place + LENGTH].astype(numpy.int64)) for place in places])
            y = torch.stack(
                [torch.from_numpy(data[place + 1 : place + 1 + LENGTH].astype(numpy.int64)) for place in places]
            )
            yield x, y

    return Passes(passes)


def by_arithmetic(path):
    data, steps = numpy.memmap(path, dtype=numpy.uint16, mode="r"), numpy.arange(LENGTH + 1)

    def passes():
        while True:
            places = numpy.random.randint(0, len(data) - LENGTH, BATCH)
            windows = torch.from_numpy(data[places[:, None] + steps].astype(numpy.int64))
            yield windows[:, :-1], windows[:, 1:]

    return Passes(passes)


class Windows(Dataset):
    def __init__(self, path):
        self.data = numpy.memmap(path, dtype=numpy.uint16, mode="r")

    def __len__(self):
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, row):
        window = torch.from_numpy(self.data[row * LENGTH : row * LENGTH + LENGTH + 1].astype(numpy.int64))
        return window[:-1], window[1:]


def loader(path, kind=DataLoader):
    return kind(Windows(path), batch_size=BATCH, shuffle=True, drop_last=True)


def stateful(path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return loader(path, StatefulDataLoader)


def litdata(path):
    """Litdata's loader for tokens, on its own chunks."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    place = str(path.parent / "litdata")
    with discard_output():
        optimize(pieces, [str(path)], place, chunk_bytes="64MB", num_workers=1, item_loader=TokensLoader())
    dataset = StreamingDataset(place, item_loader=TokensLoader(block_size=LENGTH + 1), shuffle=True, drop_last=True)

    def passes():
        for windows in StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, drop_last=True):
            windows = windows.long()
            yield windows[:, :-1], windows[:, 1:]

    return Passes(passes)


@contextmanager
def discard_output() -> Iterator[None]:
    """Discards the output of this process and of those that it starts."""
    sys.stdout.flush()
    saved = [os.dup(place) for place in (1, 2)]
    try:
        with open(os.devnull, "wb") as nowhere:
            for place in (1, 2):
                os.dup2(nowhere.fileno(), place)
        yield
    finally:
        sys.stdout.flush()
        for place, before in enumerate(saved, 1):
            os.dup2(before, place)
            os.close(before)


def pieces(path):
    for piece in numpy.array_split(numpy.fromfile(path, numpy.uint16), 64):
        yield torch.from_numpy(piece.astype(numpy.int32))


class Bound:
    """The bound: contiguous tokens, converted into memory that is already mapped."""

    def __init__(self, path):
        self.data = torch.from_numpy(numpy.fromfile(path, numpy.uint16)).view(torch.int16)
        self.into = torch.empty((BATCH, LENGTH), dtype=torch.int64), torch.empty((BATCH, LENGTH), dtype=torch.int64)

    def __iter__(self):
        for part in self.data.split(BATCH * LENGTH)[:-1]:
            yield tuple(each.copy_(part.view(BATCH, LENGTH)) for each in self.into)


def fits(batch) -> bool:
    x, y = batch
    one_on = torch.equal(x[:, 1:], y[:, :-1]) or torch.equal(x, y)  # the bound converts the same tokens twice
    return x.shape == y.shape == (BATCH, LENGTH) and x.dtype == torch.int64 and one_on


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=1.5, help="of each loader in a round")
    options.add_argument("--tokens", type=int, default=1 << 25)
    options.add_argument("--quick", action="store_true", help="fewer tokens, three short rounds")
    options = options.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.tokens = 3, 0.5, 1 << 22
    torch.set_num_threads(1)
    with scratch() as directory:
        path = directory / "tokens.bin"
        numpy.random.default_rng(0).integers(0, WORDS, options.tokens, numpy.uint16).tofile(path)
        loaders = {
            OURS: Loader(lambda: hasten(path)),
            ANY: Loader(lambda: hasten(path, stride=1)),
            BOUND: Loader(lambda: Bound(path)),
            USUAL: Loader(lambda: random_windows(path)),
            "index arithmetic": Loader(lambda: by_arithmetic(path)),
            "DataLoader, window by window": Loader(lambda: loader(path)),
            "StatefulDataLoader, window by window": Loader(lambda: stateful(path), "torchdata.stateful_dataloader"),
            "litdata, TokensLoader": Loader(lambda: litdata(path), "litdata"),
        }
        ready, missing = set_up(loaders, fits)
        taken = {
            name: [LENGTH * each for each in values]
            for name, values in rates(ready, options.rounds, options.seconds).items()
        }
    table(taken, missing, OURS, "tokens/s")
    once, random = over(taken, OURS, USUAL), over(taken, ANY, USUAL)
    print()
    return finish(
        options,
        f"{TIMES}x the usual random windows; it is {words(once)} once a pass, {words(random)} as any window "
        f"(bound: {interval(taken[BOUND]).median:,.0f} tokens/s)",
        min(once.median, random.median) >= TIMES,
        {"rates": taken, "missing": missing, "versions": versions()},
    )


if __name__ == "__main__":
    sys.exit(main())
