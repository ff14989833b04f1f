"""The threads inside torch's operations, where the script sets their number itself: noted, and left to the recipe."""

import inspect
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
    """Replaces ``torch.set_num_threads``: records the script's calls, which do nothing if a method sets the number."""
    original: Callable[[int], None] = torch.set_num_threads

    def set_num_threads(count: int, /) -> None:
        frame = inspect.currentframe()
        caller = (frame and frame.f_back and frame.f_back.f_globals.get("__name__")) or ""
        if caller.partition(".")[0] in ("torch", "hasten"):  # for loader workers and the thread that pins memory
            return original(count)
        entry = {"site": f"{sites.line()}#1", "type": "torch.set_num_threads", "count": count}
        entries = sites.records.setdefault(KIND, [])
        if entry not in entries:
            entries.append(entry)
        return None if is_set_by_recipe else original(count)

    torch.set_num_threads = set_num_threads
