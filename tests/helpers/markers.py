"""Markers of generated cases."""

from typing import Any

import pytest


def slow(*values: Any, **more: Any):
    """A case of ``parametrize`` that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


def first_quick(values: list, quick: int = 1) -> list:
    """The cases of which `make test` runs the first ``quick``: the others check the same with other settings."""
    return [*values[:quick], *(slow(*value) if isinstance(value, tuple) else slow(value) for value in values[quick:])]
