"""Markers of generated cases."""

from typing import Any

import pytest


def slow(*values: Any, **more: Any):
    """A case of ``parametrize`` that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


def soak(*values: Any):
    """A case of ``parametrize`` that only `make soak` runs: a rare combination that takes half a minute."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.soak])


def first_quick(values: list, quick: int = 1) -> list:
    """The cases of which `make test` runs the first ``quick``: the others check the same with other settings."""
    return [*values[:quick], *map(_slow_case, values[quick:])]


def _slow_case(value: Any) -> Any:
    if hasattr(value, "marks"):  # marked already
        return value
    return slow(*value) if isinstance(value, tuple) else slow(value)
