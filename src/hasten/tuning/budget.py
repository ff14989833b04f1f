"""The time that a search may take: a wall clock, shares for its parts, and a deadline for every trial."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class OutOfBudgetError(Exception):
    """Raised where the budget of the search, or of a part of it, is spent or too short for the next trial.

    What is known by then is the answer.
    """


@dataclass
class Budget:
    """The seconds that a search may take, and those that are reserved for its later parts.

    Time passes by the wall clock. Trials that an interrupted search has stored count with the seconds that they took,
    so that a search that continues makes the same decisions.
    """

    total: float
    reserved: float = 0.0  # for later parts: a trial is ended where they begin
    withheld: float = 0.0  # for later parts: no trial begins there, but one that runs may finish
    charged: float = 0.0  # of trials from the store
    withheld_wall: float = 0.0  # the same, of the seconds of this process
    wall: float = math.inf  # seconds that this process may take; less than the total where it continues a search
    exhausted: bool = False  # a part of the search ended before all its candidates were tried
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def spent(self) -> float:
        """Seconds since the search began, in this process and in those that were interrupted."""
        return self.clock() - self.began + self.charged

    def left(self) -> float:
        """Seconds within which a new trial may begin."""
        return self.total - self.spent - self.reserved - self.withheld

    def left_for_new(self) -> float:
        """The same, for trials that an interrupted search has not stored: those take time in this process."""
        return min(self.left(), self._wall_left() - self.reserved - self.withheld_wall)

    def deadline(self) -> float | None:
        """Reading of ``time.monotonic`` at which a trial that began now is ended; None while the budget is infinite.

        It has all seconds left except those reserved, and may run into those withheld.
        """
        if math.isinf(self.total):
            return None
        return self.clock() + max(0.0, min(self.total - self.spent, self._wall_left()) - self.reserved)

    def check(self, expected: float = 0.0) -> None:
        """Raises OutOfBudgetError if a trial may not begin, or one of ``expected`` seconds would reach its deadline."""
        wall = self._wall_left() - self.reserved
        if min(self.left(), wall - self.withheld_wall) <= 0 or expected > min(self.left() + self.withheld, wall):
            raise OutOfBudgetError

    def _wall_left(self) -> float:
        return self.wall - (self.clock() - self.began)

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Context manager: trials may begin inside for at most ``share`` (0 to 1) of the seconds left.

        An OutOfBudgetError ends the block, sets ``exhausted`` and is not passed on.
        """
        withheld = (1 - share) * max(0.0, self.left()) if share < 1 else 0.0
        wall = (1 - share) * max(0.0, self._wall_left()) if share < 1 else 0.0
        self.withheld, self.withheld_wall = self.withheld + withheld, self.withheld_wall + wall
        try:
            yield
        except OutOfBudgetError:
            self.exhausted = True
        finally:
            self.withheld, self.withheld_wall = self.withheld - withheld, self.withheld_wall - wall

    @contextmanager
    def reserve(self, seconds: float) -> Iterator[None]:
        """Context manager: ``seconds``, at most half of those left, are reserved for the code after it."""
        reserved = min(max(0.0, seconds), max(0.0, min(self.left(), self._wall_left() - self.withheld_wall)) / 2)
        self.reserved += reserved
        try:
            yield
        finally:
            self.reserved -= reserved
