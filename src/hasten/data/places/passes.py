"""First passes: where a file does not tell at which places its records lie, it is walked through once, and what was found is kept.

That holds as long as the file's length and version do, and nothing of the file is read then. Not kept is what was found in a file that
is damaged, that changed just now, or of which nobody tells a version; and in small ones, which are walked through in no time. A pass
that takes long tells how far it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from hasten.contract.errors import Refusal
from hasten.data.caching.filling import noticing
from hasten.data.places.files import is_lost, is_remote, stamp
from hasten.data.places.kept import SETTLED, Found, keep, recalled
from hasten.data.places.remote import AT_ONCE

WORTH = 1_000_000  # bytes of the files

Tell = Callable[[int], None]  # hears how many bytes of a file are done
Walk = Callable[[list, Tell], tuple[Found, str | None]]


def walked_through(paths: list[str], of: list, walk: Walk) -> list[tuple[list, Found, str | None]]:
    """(what marks a file, what a walk through it finds, why there is no more of it where it is damaged) of each file.

    Args:
        of: what is looked for, in words that are told while it takes long, and all that it depends on besides the file.
        walk: ``(what marks the file, tell) -> (what it finds, why there is no more)``.
    """
    with ThreadPoolExecutor(min(len(paths), AT_ONCE)) as pool:  # to ask a server takes as long as the way there and back
        marks = list(pool.map(_marked, paths) if any(map(is_remote, paths)) else map(_marked, paths))
    known = [_recalled(of, [mark]) for mark in marks]
    ahead = [mark for mark, found in zip(marks, known, strict=True) if found is None]
    where = ahead[0][0] if len(ahead) == 1 else f"{len(ahead)} files"
    tell, passed, walks = _telling(f"finding the {of[0]} of {where}", sum(size or 0 for _, size, _ in ahead)), 0, []
    for mark, found in zip(marks, known, strict=True):
        why = None
        if found is None:
            begun = time.time_ns()
            found, why = walk(mark, lambda place, passed=passed: tell(passed + place))
            passed += mark[1] or 0
            tell(passed)
            if why is None:
                _keep(of, [mark], found, begun)
        walks.append((mark, found, why))
    return walks


def once(of: list, marks: list[list], find: Callable[[], Found]) -> Found:
    """What is found in some files, or was found when they were the same."""
    if (found := _recalled(of, marks)) is None:
        begun = time.time_ns()
        found = find()
        _keep(of, marks, found, begun)
    return found


def _marked(path: str) -> list:
    """What marks a file; one that cannot be had is told when it is walked through."""
    try:
        return stamp(path)
    except Refusal as refused:
        if not is_lost(path, refused):
            raise
        return [path, 0, None]


# ---- kept, as long as the files are the same


def _recalled(of: list, marks: list[list]) -> Found | None:
    kept = recalled(_about(of, marks)) if _is_worth_it(marks) else None
    if kept is None or kept[0]["files"] != _versions(marks):
        return None
    return kept[0]["found"], kept[1]


def _keep(of: list, marks: list[list], found: Found, begun: int) -> None:
    """Keeps what was found, where no file can have changed since it was begun without a new time."""
    newest = max((max(version) for _, _, version in marks if isinstance(version, list)), default=0)  # of local ones; others' clocks differ
    if _is_worth_it(marks) and newest < begun - SETTLED:
        keep(_about(of, marks), {"files": _versions(marks), "found": found[0]}, found[1])


def _about(of: list, marks: list[list]) -> list:
    return [*of, [path for path, _, _ in marks]]


def _versions(marks: list[list]) -> list[list]:
    """What of the marks changes when a file does, and nothing of an address, which may hold a password."""
    return [mark[1:] for mark in marks]


def _is_worth_it(marks: list[list]) -> bool:
    return all(version is not None for _, _, version in marks) and sum(size or 0 for _, size, _ in marks) >= WORTH


# ---- told


def _telling(what: str, total: int) -> Tell:
    """``tell(bytes that are behind us)`` gives a Notice now and then, if there is long to wait."""
    watch, began, behind = noticing(), perf_counter(), 0

    def tell(passed: int) -> None:
        nonlocal behind
        behind = min(max(behind, passed), total)  # what was downloaded is walked through after that
        if behind:
            spent = max(perf_counter() - began, 1e-9)
            watch(f"{what}, {behind / spent / 1e6:,.0f} MB/s", behind / total, spent * (total - behind) / behind)

    return tell
