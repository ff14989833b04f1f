"""What tests share: processes, ranks, namespaces, comparisons, tasks and data. ``tests/conftest.py`` makes it
importable for subprocesses."""

from pathlib import Path

HELPERS = Path(__file__).parent  # tasks are also given to commands as files: f"{HELPERS}/rank_tasks.py:samples"
