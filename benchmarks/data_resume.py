"""Taking up an epoch of a million samples at a random batch: seconds from nothing but the data and the saved place to the first batch.

Everything is made anew: the pipeline or loader, its workers, its order. What comes must be what an undisturbed pass gives at that
place, bit for bit, the three batches after it too. StatefulDataLoader and Grain are saved and taken up at the same places.
``Bound`` makes a random order of all samples and gathers one batch, and does nothing else.

Figure: below 0.2 s, exact every time.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from itertools import islice

from _loaders import quiet, versions

quiet()

import torch
from _common import finish, in_turns, installed, interval, parser, show, tell
from torch.utils.data import Dataset

FIGURE = 0.2  # seconds
BATCH, WIDTH, AFTER = 512, 16, 4  # AFTER: batches that are compared
BOUND = "bound: an order, a batch"


def digests(batches) -> list[str]:
    return [hashlib.blake2b(b"".join(torch.as_tensor(part).numpy().tobytes() for part in batch)).hexdigest() for batch in batches]


class Ours:
    """hasten, with random numbers drawn for every row; ``ahead``: as in ``prefetch``."""

    def __init__(self, x, y, **ahead):
        self.x, self.y, self.ahead = x, y, ahead
        self.undisturbed = digests(self.made())

    def made(self):
        from hasten.data import arrays

        pipeline = arrays(self.x, self.y).shuffle(seed=3).batch(BATCH).map(noisy)
        return pipeline.prefetch(2, **self.ahead) if self.ahead else pipeline

    def __call__(self, number: int) -> tuple[float, bool]:
        began = time.perf_counter()
        pipeline = self.made()
        pipeline.load_state_dict({"seed": 3, "epoch": 0, "position": number * BATCH})
        batches = iter(pipeline)
        first = next(batches)
        took = time.perf_counter() - began
        some = digests([first, *islice(batches, AFTER - 1)])
        batches.close()
        return took, some == self.undisturbed[number : number + AFTER]


def noisy(batch, chance):
    x, y = batch
    return x + chance.uniform(WIDTH), y


class Bound:
    """What cannot be left out."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __call__(self, number: int) -> tuple[float, bool]:
        began = time.perf_counter()
        rows = torch.randperm(len(self.y), dtype=torch.int32)[number * BATCH : (number + 1) * BATCH]
        batch = self.x[rows], self.y[rows]
        return time.perf_counter() - began, len(batch[1]) == BATCH


class Taken:
    """A peer: brought to the place, saved there, made anew, taken up."""

    def __init__(self, make, save, load):
        self.make, self.save, self.load = make, save, load

    def __call__(self, number: int) -> tuple[float, bool]:
        loader = self.make()
        batches = iter(loader)
        for _ in islice(batches, number):
            pass
        state = self.save(loader, batches)
        expected = digests(islice(batches, AFTER))
        del loader, batches
        began = time.perf_counter()
        batches = self.load(self.make(), state)
        first = next(batches)
        took = time.perf_counter() - began
        return took, digests([first, *islice(batches, AFTER - 1)]) == expected


class Batched(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitems__(self, rows):
        index = torch.tensor(rows)
        return self.x[index], self.y[index]


def as_it_is(samples):
    return samples


def stateful(x, y, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make():
        return StatefulDataLoader(Batched(x, y), batch_size=BATCH, shuffle=True, collate_fn=as_it_is, num_workers=workers)

    def load(loader, state):
        loader.load_state_dict(state)
        return iter(loader)

    return Taken(make, lambda loader, batches: loader.state_dict(), load)


def grain(x, y):
    import grain

    batched = Batched(x, y)

    def make():
        rows = grain.MapDataset.range(len(y)).seed(0).shuffle().batch(BATCH)
        return rows.map(lambda index: batched.__getitems__(index.tolist())).to_iter_dataset()

    def load(dataset, state):
        batches = iter(dataset)
        batches.set_state(state)
        return batches

    return Taken(make, lambda dataset, batches: batches.get_state(), load)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10, help="places that are taken up")
    options.add_argument("--samples", type=int, default=1_000_000)
    options.add_argument("--quick", action="store_true", help="a look at it: three places")
    options = options.parse_args()
    if options.quick:
        options.rounds = 3
    torch.manual_seed(0)
    x, y = torch.randn(options.samples, WIDTH), torch.randint(0, 10, (options.samples,))
    tell("the undisturbed passes")
    ours = {"hasten": Ours(x, y), "hasten, 2 threads": Ours(x, y, threads=2), "hasten, 2 processes": Ours(x, y, processes=2)}
    peers = {
        "StatefulDataLoader": (lambda: stateful(x, y, 0), "torchdata.stateful_dataloader"),
        "StatefulDataLoader, 2 workers": (lambda: stateful(x, y, 2), "torchdata.stateful_dataloader"),
        "grain": (lambda: grain(x, y), "grain"),
    }
    arms, missing = {**ours, BOUND: Bound(x, y)}, {}
    for name, (make, module) in peers.items():
        if why := installed(module):
            missing[name] = why
            continue
        try:
            arms[name] = make()
            arms[name](1)
        except Exception as error:
            arms.pop(name, None)
            missing[name] = f"does not run: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
    places = random.Random(0).choices(range(1, options.samples // BATCH - AFTER), k=options.rounds)
    taken = in_turns({name: _at_places(arm, places) for name, arm in arms.items()}, options.rounds)
    rows = [
        (name, f"{interval(seconds):.4f}", f"{max(seconds):.4f}", "" if name == BOUND else f"{sum(exact)} of {len(exact)}")
        for name, each in taken.items()
        for seconds, exact in [zip(*each, strict=True)]
    ]
    show(("loader", "seconds to the first batch", "slowest", "exact"), rows + [(name, why, "", "") for name, why in missing.items()])
    slowest = max(seconds for name in ours for seconds, _ in taken[name])
    exact = all(exact for name in ours for _, exact in taken[name])
    bound = interval(seconds for seconds, _ in taken[BOUND]).median
    return finish(
        options,
        f"below {FIGURE} s to a batch of {options.samples:,} samples, exact; the slowest took {slowest:.3f} s, all exact: {exact} (bound: {bound:.3f})",
        exact and slowest < FIGURE,
        {"taken": taken, "places": places, "missing": missing, "versions": versions()},
    )


def _at_places(arm, places: list[int]):
    """The arm at one place after the other: the same ones for all."""
    coming = iter(places)
    return lambda: arm(next(coming))


if __name__ == "__main__":
    sys.exit(main())
