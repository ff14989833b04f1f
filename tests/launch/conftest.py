"""Fixtures of the tests that start ranks with a launcher."""

import shutil
from pathlib import Path

import pytest

from helpers import HELPERS


@pytest.fixture
def directory(tmp_path) -> Path:
    """A directory that contains ``rank_tasks.py``, for commands that run there."""
    shutil.copy(HELPERS / "rank_tasks.py", tmp_path)
    return tmp_path
