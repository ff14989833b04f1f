"""Shared by the tests: processes, ranks, network namespaces, comparisons, tasks and data.

``tests/conftest.py`` makes the package importable for subprocesses.
"""

from pathlib import Path

HELPERS = Path(__file__).parent  # tasks are also passed to commands as files: f"{HELPERS}/rank_tasks.py:samples"
SLACK_S = 15.0  # how late something may end on a busy machine; what a test keeps from happening takes twice as long
