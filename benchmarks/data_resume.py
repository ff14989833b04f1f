"""Resuming an epoch of a million samples at a random batch: seconds from the data and the saved position to the batch.

Everything is built again: the pipeline or loader, its workers, its order. The batch and the three after it must equal
those of an uninterrupted epoch bit for bit. StatefulDataLoader and Grain are saved and resumed at the same positions,
and compared with their own uninterrupted epoch. hasten also draws random numbers for every row, which the others do
not. ``Bound`` builds a random order of all samples and gathers one batch only.

Figure: below 0.2 s, exact every time.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import time
from contextlib import suppress
from itertools import islice

from _loaders import quiet, versions

quiet()

import torch
from _common import finish, in_turns, installed, interval, parser, print_progress, show
from torch.utils.data import Dataset

FIGURE = 0.2  # seconds
BATCH, WIDTH, AFTER = 512, 16, 4  # AFTER: batches that are compared
BOUND = "bound: an order, a batch"


def digests(batches) -> list[str]:
    return [
        hashlib.blake2b(b"".join(torch.as_tensor(part).numpy().tobytes() for part in batch)).hexdigest()
        for batch in batches
    ]


class Ours:
    """hasten, with random numbers drawn for every row; ``ahead`` is the number of prefetched batches."""

    def __init__(self, x, y, **ahead):
        self.x, self.y, self.ahead = x, y, ahead

    def made(self):
        from hasten.data import arrays

        pipeline = arrays(self.x, self.y).shuffle(seed=3).batch(BATCH).map(noisy)
        return pipeline.prefetch(2, **self.ahead) if self.ahead else pipeline

    def resume(self, number: int):
        pipeline = self.made()
        pipeline.load_state_dict({"seed": 3, "epoch": 0, "position": number * BATCH})
        return iter(pipeline)


def noisy(batch, rng):
    x, y = batch
    return x + rng.uniform(WIDTH), y


class Bound:
    """The bound: a random order of all samples, and one batch."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def resume(self, number: int):
        rows = torch.randperm(len(self.y), dtype=torch.int32)[number * BATCH : (number + 1) * BATCH]
        yield self.x[rows], self.y[rows]


class Peer:
    """Another loader. Its states at all positions are saved during one epoch, because reaching each position takes
    long.
    """

    def __init__(self, make, save, load, places: list[int]):
        self.make, self.load, self.saved, self.expected = make, load, {}, {}
        loader = make()
        batches = iter(loader)
        for number in range(max(places) + AFTER):
            if number in places:
                self.saved[number] = copy.deepcopy(save(loader, batches))
                self.expected[number] = []
            batch = next(batches)
            for place in self.expected:
                if number < place + AFTER:
                    self.expected[place] += digests([batch])

    def resume(self, number: int):
        return self.load(self.make(), self.saved[number])


def resume(arm, number: int, expected: list[str] | None) -> tuple[float, bool]:
    """Returns (seconds to the first batch, whether this batch and those after it equal the expected ones)."""
    began = time.perf_counter()
    batches = arm.resume(number)
    first = next(batches)
    took = time.perf_counter() - began
    exact = expected is None or digests([first, *islice(batches, AFTER - 1)]) == expected
    with suppress(AttributeError):
        batches.close()
    return took, exact


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


def stateful(x, y, places, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make():
        return StatefulDataLoader(
            Batched(x, y), batch_size=BATCH, shuffle=True, collate_fn=as_it_is, num_workers=workers
        )

    def load(loader, state):
        loader.load_state_dict(state)
        return iter(loader)

    return Peer(make, lambda loader, batches: loader.state_dict(), load, places)


def grain(x, y, places):
    import grain

    batched = Batched(x, y)

    def make():
        rows = grain.MapDataset.range(len(y)).seed(0).shuffle().batch(BATCH)
        return rows.map(lambda index: batched.__getitems__(index.tolist())).to_iter_dataset()

    def load(dataset, state):
        batches = iter(dataset)
        batches.set_state(state)
        return batches

    return Peer(make, lambda dataset, batches: batches.get_state(), load, places)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10, help="positions that are resumed")
    options.add_argument("--samples", type=int, default=1_000_000)
    options.add_argument("--quick", action="store_true", help="three places")
    options = options.parse_args()
    if options.quick:
        options.rounds = 3
    torch.manual_seed(0)
    x, y = torch.randn(options.samples, WIDTH), torch.randint(0, 10, (options.samples,))
    places = random.Random(0).sample(range(1, options.samples // BATCH - AFTER), options.rounds)
    ours = {
        "hasten": Ours(x, y),
        "hasten, 2 threads": Ours(x, y, threads=2),
        "hasten, 2 processes": Ours(x, y, processes=2),
    }
    peers = {
        "StatefulDataLoader": (lambda: stateful(x, y, places, 0), "torchdata.stateful_dataloader"),
        "StatefulDataLoader, 2 workers": (lambda: stateful(x, y, places, 2), "torchdata.stateful_dataloader"),
        "grain": (lambda: grain(x, y, places), "grain"),
    }
    print_progress("an undisturbed pass: hasten")
    undisturbed = digests(ours["hasten"].made())
    at_places = {number: undisturbed[number : number + AFTER] for number in places}
    expected = dict.fromkeys(ours, at_places) | {BOUND: {}}  # prefetching must not change the batches
    arms, missing = {**ours, BOUND: Bound(x, y)}, {}
    for name, (make, module) in peers.items():
        if why := installed(module):
            missing[name] = why
            continue
        print_progress(f"an undisturbed pass: {name}")
        try:
            arms[name] = make()
            expected[name] = arms[name].expected
            resume(arms[name], places[0], None)
        except Exception as error:
            arms.pop(name, None)
            missing[name] = f"does not run: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
    taken = in_turns({name: _at_places(arm, places, expected[name]) for name, arm in arms.items()}, options.rounds)
    rows = [
        (
            name,
            f"{interval(seconds):.4f}",
            f"{max(seconds):.4f}",
            "" if name == BOUND else f"{sum(exact)} of {len(exact)}",
        )
        for name, each in taken.items()
        for seconds, exact in [zip(*each, strict=True)]
    ]
    show(
        ("loader", "seconds to the first batch", "slowest", "exact"),
        rows + [(name, why, "", "") for name, why in missing.items()],
    )
    slowest = max(seconds for name in ours for seconds, _ in taken[name])
    exact = all(exact for name in ours for _, exact in taken[name])
    bound = interval(seconds for seconds, _ in taken[BOUND]).median
    return finish(
        options,
        f"below {FIGURE} s to a batch of {options.samples:,} samples, exact; "
        f"the slowest took {slowest:.3f} s, all exact: {exact} (bound: {bound:.3f})",
        exact and slowest < FIGURE,
        {"taken": taken, "places": places, "missing": missing, "versions": versions()},
    )


def _at_places(arm, places: list[int], expected: dict[int, list[str]]):
    """Runs the arm at the given positions, which are the same for all arms."""
    coming = iter(places)

    def at_the_next() -> tuple[float, bool]:
        number = next(coming)
        return resume(arm, number, expected.get(number))

    return at_the_next


if __name__ == "__main__":
    sys.exit(main())
