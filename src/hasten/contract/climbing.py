"""Finds out, while a run goes on, who should compute its batches: how many threads or processes, how far ahead.

A batch is a function of its number, so between any two batches one crew can hand over to another, and nothing but the time changes.
The climber watches real batches and real steps: how long a step waits for its batch, and how long both take together. As soon as no
step waits it settles. As long as one does, it tries the neighbours of the crew (more of them, the other kind, further ahead, fewer)
within the cores and the memory that it may use, and keeps one if the whole goes clearly faster. Once it has settled, the bare iterator
is handed over, which costs nothing; it looks again at the start of the next pass, and climbs on if the waiting is back.

Source: the hill climbing within budgets of tf.data's AUTOTUNE (Murray et al. 2021, https://arxiv.org/abs/2101.12127). That one makes
the input as fast as it can be; this one measures the step as well, and stops when it is fast enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from hasten.contract.data import Crew
from hasten.contract.looking import Look, Watch, mark, still_at_work

NO_WAIT = 0.01  # of the time: who waits no more than that does not wait
CLEARLY = 1.03  # times faster, in every look, or it stays as it was
LOOKS = 2  # at a crew, before it is kept
IN_VAIN = 0.1  # of the time: who waits so much and has found nobody better climbs once more, in the next pass: it may have been the machine
AHEAD, FURTHEST = 2, 16  # batches that may wait: at first, and at most
SHARE_OF_FREE = 0.25  # of the memory, where nobody says how much may be taken

Enter = Callable[[Crew, int], Iterator]
_END = object()


@dataclass(frozen=True)
class Choices:
    """What a climber may choose among.

    Attributes:
        kinds: "threads", "processes": what a crew may be of, the kind to be tried first at the front.
        cores: as many workers at most.
        room: ``() -> bytes`` that batches on their way may take.
    """

    kinds: tuple[str, ...]
    cores: int
    room: Callable[[], float]

    def neighbours(self, crew: Crew, seen: Look) -> list[Crew]:
        """The crews to be tried next in its place, the most promising first."""
        count, ahead = crew.workers, crew.ahead or AHEAD
        own = ("threads" if crew.threads else "processes",) if count else ()
        kinds = [*own, *(kind for kind in self.kinds if kind not in own)]
        work = seen.pace * count if count else seen.waited  # of one worker, for one batch
        wanted = math.ceil(min(work / seen.step, self.cores)) if seen.step else self.cores  # with as many, no step would wait
        sizes = dict.fromkeys((max(count + 1, wanted), (count + max(count + 1, wanted) + 1) // 2, count + 1))
        larger = [_crew(kind, size, ahead) for size in sizes for kind in kinds if size <= max(1, self.cores)]
        others = [_crew(kind, count, ahead) for kind in kinds[1:]] if count else []
        short_of_workers = seen.waited > seen.step  # then batches come too slowly, not too unevenly
        further = [replace(crew, ahead=2 * ahead)] if count and not short_of_workers and 2 * ahead <= FURTHEST else []
        fewer = [_crew(own[0], count // 2, ahead) if count > 1 else Crew()] if count else []
        room = self.room()
        return [other for other in (*larger, *others, *further, *fewer) if _bytes(other, seen.size) <= room]


class Climber:
    """Watches passes over some batches, and finds the crew that computes them.

    Args:
        crew: to begin with.
        cores: workers that there may be at most.
        room: ``() -> bytes`` that batches on their way, and samples that are kept, may take.
        cache: where the samples are kept: "memory" or "disk"; "no": nowhere; None: in either, once that turns out to be faster. It is up
            to whoever makes the batches whether they can be, and where they fit.
        passes: how many there will be, where that is known.
        told: called with itself when it has settled, and again when it settles at something else.
        of: the kind of data that it was made for, kept for whoever made it.

    Attributes:
        crew: the best so far.
        waits: the share of its time that a step waited for its batch when this settled; None as long as it has not.
        waited_first: the same, of the crew that it began with.
        pace: seconds a batch, its step included, when it settled.
    """

    def __init__(
        self,
        crew: Crew | None = None,
        *,
        cores: int,
        room: Callable[[], float],
        cache: str | None = None,
        passes: float | None = None,
        told: Callable[[Climber], Any] | None = None,
        of: type | None = None,
    ):
        self.crew, self.cores, self.room, self.cache, self.passes = crew or Crew(), cores, room, cache, passes
        self.told, self.of = told, of
        self.waits = self.waited_first = self.pace = None
        self._without: tuple | None = None  # how it was without a cache that is being tried
        self._once_more, self._said = True, None
        self._search: Generator[Crew, Look | None, Look | None] | None = None
        self._watched: Crew | None = None  # the crew to be looked at now; None: nobody looks
        self._watch: Watch | None = None
        self._busy = False

    @property
    def settled(self) -> bool:
        return self.waits is not None

    @property
    def chosen(self) -> dict:
        """What it found, as settings for the next run."""
        kind = "threads" if self.crew.threads else "processes"
        crew = {kind: self.crew.workers} | ({"ahead": self.crew.ahead} if self.crew.workers else {})
        return crew | ({} if self.cache is None else {"cache": self.cache})

    def over(self, enter: Enter, choices: Choices) -> Iterator:
        """The batches of a pass.

        Args:
            enter: ``(crew, done) -> iterator``: the batches after the first ``done`` of these, as that crew computes them.
        """
        if self._busy:  # two passes at a time: who waits for whom?
            yield from enter(Crew(), 0)
            return
        self._busy, done, crew, inner, queued = True, 0, None, None, None
        try:
            self._begin(choices)
            while self._watched is not None:
                if crew != self._watched:
                    _close(inner)
                    crew, inner, queued = self._watched, None, None
                    self._watch = self._watch if self._watch and self._watch.crew == crew else Watch(crew)
                    self._watch.entered()
                asked = perf_counter()
                try:
                    inner = iter(enter(crew, done)) if inner is None else inner
                    batch = next(inner, _END)
                except Exception:
                    if crew == self.crew:
                        raise
                    self._learn(None)  # if it is not this crew's fault, the one before it will tell
                    continue
                if batch is _END:
                    return
                given, done = perf_counter(), done + 1
                self._watch.given(0.0 if still_at_work(queued) else given - asked, batch)
                yield batch
                del batch  # or its memory could not be used again for the next one
                queued = mark()
                if self._watch.stepped(perf_counter() - given):
                    self._learn(self._watch.seen())
            if crew != self.crew:
                _close(inner)
                inner = iter(enter(self.crew, done))
            yield from inner
        finally:
            _close(inner)
            self._busy = False

    def search(self, choices: Choices, seen: Look | None = None) -> Generator[Crew, Look | None, Look]:
        """Yields the crew to look at next, and is sent what was seen, None where it failed; at the end ``self.crew`` is the best.

        Args:
            seen: a look at the present crew.

        Returns:
            The last look at the best.
        """
        looks, had, tried = [seen or (yield self.crew)], {self.crew}, set()
        self.waited_first = looks[0].share if self.waited_first is None else self.waited_first
        while looks[-1].share > NO_WAIT:
            for other in choices.neighbours(self.crew, looks[-1]):
                if other in had | tried:
                    continue
                tried.add(other)
                found = []
                while len(found) < LOOKS and _better(look := (yield other), looks):
                    found.append(look)
                if len(found) == LOOKS:
                    self.crew, looks, self._once_more = other, found, False
                    had.add(other)
                    tried.clear()  # who was no better than the one before may be better than this one
                    break
                if found:  # better once, and then not: the machine may be another by now
                    looks = [looks[-1], (yield self.crew)]
                    if looks[-1].share <= NO_WAIT:
                        break
            else:
                break
        return looks[-1]

    def try_cache(self, where: str) -> None:
        """From the next pass on the samples are kept: climbs anew, from nobody, and gives it up if that is not clearly faster."""
        self._without = self.crew, self.waits, self.pace
        self.crew, self.cache = Crew(), where
        self._forget()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_search": None, "_watched": None, "_watch": None, "_busy": False}  # another process looks for itself

    def state_dict(self) -> dict:
        crew = {"threads": self.crew.threads, "processes": self.crew.processes, "ahead": self.crew.ahead}
        return {**crew, "waits": self.waits, "pace": self.pace, "cache": self.cache}

    def load_state_dict(self, state: dict) -> None:
        self._forget()
        self.crew = Crew(min(state["threads"], self.cores), min(state["processes"], self.cores), state["ahead"])
        self.waits, self.pace, self.cache = state["waits"], state["pace"], state["cache"]

    def _forget(self) -> None:
        self.waits = self._search = self._watched = self._watch = None

    def _begin(self, choices: Choices) -> None:
        """A pass begins: a search goes on, or starts; what it settled at is doubted."""
        if self._search is None:
            in_vain = self.settled and self.waits > IN_VAIN and self._once_more
            self._once_more = self._once_more and not in_vain
            self._search, self._watch = (self._doubt if self.settled and not in_vain else self.search)(choices), None
            self._watched = next(self._search)

    def _doubt(self, choices: Choices) -> Generator[Crew, Look | None, Look | None]:
        """Searches again, if the steps wait far more than they did when this settled."""
        for _ in range(LOOKS):
            seen = yield self.crew
            if seen.share <= NO_WAIT + 2 * self.waits:
                return None
        return (yield from self.search(choices, seen))

    def _learn(self, look: Look | None) -> None:
        looked_at = self._watched
        try:
            self._watched = self._search.send(look)
            self._watch = Watch(looked_at) if self._watched == looked_at else None
        except StopIteration as end:
            self._search = self._watched = self._watch = None
            if end.value is not None:
                self._settle(end.value)

    def _settle(self, look: Look) -> None:
        self.waits, self.pace = look.share, look.pace
        if self._without is not None and self.pace * CLEARLY >= self._without[-1]:
            self.crew, self.waits, self.pace = self._without
            self.cache = "no"
        self._without = None
        if self.told is not None and self._said != self.chosen:
            self._said = self.chosen
            self.told(self)


def usual_room(gigabytes: float | None, free_memory: Callable[[], int]) -> Callable[[], float]:
    """As ``Climber(room=)``: the bytes that somebody allows, or a part of what is free."""
    return partial(_room, gigabytes, free_memory)


def _room(gigabytes: float | None, free_memory: Callable[[], int]) -> float:
    return SHARE_OF_FREE * free_memory() if gigabytes is None else gigabytes * 1e9


def _better(look: Look | None, than: list[Look]) -> bool:
    """Whether it is clearly faster, or needs no more time and no longer waits."""
    if look is None:
        return False
    least = min(each.pace for each in than)
    return look.pace * CLEARLY < least or (look.share <= NO_WAIT and look.pace <= least)


def _crew(kind: str, count: int, ahead: int) -> Crew:
    return Crew(**{kind: count}, ahead=ahead)


def _bytes(crew: Crew, size: int) -> int:
    """That its batches take on their way; a process has them in shared memory as well."""
    return (crew.workers + crew.ahead + 1) * size * (2 if crew.processes else 1) if crew.workers else 0


def _close(iterator: Iterator | None) -> None:
    if hasattr(iterator, "close"):
        iterator.close()
