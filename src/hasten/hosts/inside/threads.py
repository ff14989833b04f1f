"""The threads inside torch's operations, where the script sets their number itself: noted, and left to the recipe."""

from collections.abc import Callable
from typing import Any

import torch

from hasten.hosts.inside.sites import Sites

KIND = "threads"  # of the sites


def threads_of(known: dict[str, Any] | None) -> int | None:
    """The number of threads that the script sets, by its site map; None if it sets none."""
    entries = (known or {}).get(KIND)
    return entries[-1]["count"] if entries else None


def watch_threads(sites: Sites, is_set_by_recipe: bool) -> None:
    """Notes each call of ``torch.set_num_threads``. Where a method sets the number, the script's call does nothing."""
    original: Callable[[int], None] = torch.set_num_threads

    def set_num_threads(count: int, /) -> None:
        line = sites.line()
        if line is not None:  # hasten's own call otherwise
            entry = {"site": f"{line}#1", "type": "torch.set_num_threads", "count": count}
            entries = sites.records.setdefault(KIND, [])
            if entry not in entries:
                entries.append(entry)
        if line is None or not is_set_by_recipe:
            original(count)

    torch.set_num_threads = set_num_threads
