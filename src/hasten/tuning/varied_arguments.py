"""The arguments of the user's script that ``--vary`` names, as candidates: which values of them are worth a trial.

All values are multiples of the user's own. What an argument means is not known; its name decides only how far the
values reach. Whole trainings with them are judged as those of any method that changes the training.
"""

from collections.abc import Mapping
from dataclasses import replace

from hasten.engine.registry import method_class, takes_any_option
from hasten.tuning.systems import Candidate
from hasten.utils.parsed_arguments import scales_with_length
from hasten.utils.search_range import SearchRange

SHORTEST, LONGEST = 0.16, 0.64  # of the user's own length
FACTORS = (2.0, 4.0, 0.5)  # of the user's value, tried one after the other where the length stays


def with_varied(items: list[Candidate], varied: Mapping[str, float]) -> list[Candidate]:
    """``items``, where the method that sets arguments gets ranges for the ``varied`` (argument -> the user's value)."""
    return [item for one in items for item in (_candidates(one, varied) if sets_arguments(one.name) else [one])]


def sets_arguments(name: str) -> bool:
    """Whether a method sets arguments of the user's script."""
    return takes_any_option(method_class(name))


def _candidates(item: Candidate, varied: Mapping[str, float]) -> list[Candidate]:
    """One candidate with a search space if the length is varied; else one for each argument."""
    ranges = {name: _range(name, value) for name, value in varied.items()}
    if any(one.is_length for one in ranges.values()):
        return [replace(item, card=replace(item.card, search_space=ranges))]
    presets = {name: tuple({name: one.times(factor)} for factor in FACTORS) for name, one in ranges.items()}
    return [replace(item, presets=options) for options in presets.values()]


def _range(name: str, value: float) -> SearchRange:
    is_integer = isinstance(value, int)
    if scales_with_length(name):
        return SearchRange(SHORTEST, LONGEST, of=value, is_integer=is_integer, is_length=True)
    if is_integer:
        return SearchRange(1, 8, powers_of_two=True, of=value, is_integer=True)
    return SearchRange(0.5, 8.0, of=value)
