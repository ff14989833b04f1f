"""What a part of a run is replaced by to see what the run would be without it: methods of a few lines.

Input and update can be switched off and on in the middle of a run, so that one process gives the time with
the part and without it, seconds apart. None of these methods trains anything useful.
"""

from __future__ import annotations

import dataclasses

from hasten.contract.batch import size
from hasten.contract.card import Card, Exactness, Order
from hasten.contract.method import Method
from hasten.engine.find import method_names

BATCH_FACTOR = 8
BATCH_SIZE = "batch_size"  # the ceiling that a larger batch gives, under the name of the method


def taken_away(run) -> set[str]:
    """What of a run is switched off at the moment: "input" and "update" here, "logging" by the probe."""
    return run.kept.setdefault("taken away", set())


def _card(summary: str) -> Card:
    """Outermost, so that what the recipe's own methods do in that phase is taken away too."""
    return Card(summary=summary, exactness=Exactness.OTHER_MATHS, order=Order.LAST, after=tuple(method_names()))


class ReplayedBatch(Method):
    card = _card("gives the same batch again and again: input costs nothing")

    def data(self, batches, run):
        if not batches.training:
            return batches
        away, clock = taken_away(run), run.clock

        def epoch(number, start):
            kept = None
            for batch in batches.epoch(number, start):
                if kept is None or size(batch) > size(kept):  # the last of a pass may be short
                    kept, counts = batch, (clock.whole, clock.weight)
                yield batch
                while "input" in away:
                    clock.whole, clock.weight = counts
                    yield kept

        return dataclasses.replace(batches, epoch=epoch)


class NoUpdate(Method):
    card = _card("leaves the weights as they are: the update costs nothing")

    def update(self, update, run):
        away = taken_away(run)
        return lambda: None if "update" in away else update()


class LargerBatch(Method):
    card = _card(f"{BATCH_FACTOR} times the batch: what every step costs whatever its size is paid {BATCH_FACTOR} times less often")

    def loop(self, loop, run):
        return dataclasses.replace(loop, batch_size=BATCH_FACTOR * loop.batch_size)


def outside_name(method: type[Method]) -> str:
    """The name under which a recipe finds a method of this room."""
    return f"{method.__module__}:{method.__name__}"
