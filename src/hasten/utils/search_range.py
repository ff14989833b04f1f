"""A range of an option, which a card states for the joint search of the tuner."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchRange:
    """Values of a numeric option that are worth trying; the tuner spaces them evenly in the logarithm."""

    low: float  # smallest value, before it is multiplied by ``of``
    high: float  # largest value, before it is multiplied by ``of``
    powers_of_two: bool = False  # whether only these are tried, as integers
    of: float = 1  # what all values are multiplied by, such as the user's own value
    is_integer: bool = False  # whether the values are integers, at least 1
    no_effect: float | None = None  # value at which the recipe leaves the method out; None: there is none
    is_length: bool = False  # whether the option is the length of the training relative to that of the task

    @staticmethod
    def switch(value: float) -> "SearchRange":
        """The value in one half of the range; in the other half the recipe leaves the method out."""
        return SearchRange(0.5, 1, powers_of_two=True, of=value, no_effect=value / 2)

    def at(self, position: float) -> float:
        """The value at a position from 0 (low) to 1 (high) on a logarithmic scale, rounded as by ``times``."""
        return self.times(self.low * (self.high / self.low) ** position)

    def times(self, factor: float) -> float:
        """``factor * of`` as a value of the option: two significant digits, or ``factor`` rounded to a power of two;
        an integer if required.
        """
        value = 2 ** round(math.log2(factor)) * self.of if self.powers_of_two else float(f"{factor * self.of:.2g}")
        return max(1, round(value)) if self.is_integer else value
