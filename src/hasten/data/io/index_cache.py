"""Index cache: a file that does not state where its records are is read once, and the positions are cached.

An index is valid as long as the file's size and version are; the file is then not read. Not cached is the index of a
file that is damaged, that changed just now, or whose server states no version, and of small files. Building one that
takes long reports progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from hasten.core.errors import ConfigurationError
from hasten.data.cache.populate import noticing
from hasten.data.io.metadata_cache import SETTLED, Found, load, store
from hasten.data.io.paths import file_signature, is_lost, is_remote
from hasten.data.io.remote import AT_ONCE

WORTH = 1_000_000  # bytes of the files; the index of smaller ones is not cached

Tell = Callable[[int], None]  # called with the number of bytes of a file that have been read
Walk = Callable[[list, Tell], tuple[Found, str | None]]


def load_or_build_index(paths: list[str], of: list, walk: Walk) -> list[tuple[list, Found, str | None]]:
    """The index of each file, from the cache or from reading it.

    Args:
        of: what the index is of, as progress names it, and whatever else it depends on besides the file;
        JSON-serializable.
        walk: ``(stamp, tell) -> (index, why it is incomplete)``; the second is None for a file that is not damaged.

    Returns:
        (stamp, index, why it is incomplete or None) of each file.
    """
    with ThreadPoolExecutor(min(len(paths), AT_ONCE)) as pool:  # a remote stamp takes a round trip
        marks = list(pool.map(_marked, paths) if any(map(is_remote, paths)) else map(_marked, paths))
    known = [_recalled(of, [mark]) for mark in marks]
    ahead = [mark for mark, found in zip(marks, known, strict=True) if found is None]
    where = ahead[0][0] if len(ahead) == 1 else f"{len(ahead)} files"
    tell, passed, walks = _telling(f"finding the {of[0]} of {where}", sum(size or 0 for _, size, _ in ahead)), 0, []
    for mark, found in zip(marks, known, strict=True):
        why = None
        if found is None:
            began = time.time_ns()
            found, why = walk(mark, lambda position, passed=passed: tell(passed + position))
            passed += mark[1] or 0
            tell(passed)
            if why is None:
                _keep(of, [mark], found, began)
        walks.append((mark, found, why))
    return walks


def once(of: list, marks: list[list], find: Callable[[], Found]) -> Found:
    """``find()``, or its cached result if the files with these stamps have not changed since."""
    if (found := _recalled(of, marks)) is None:
        began = time.time_ns()
        found = find()
        _keep(of, marks, found, began)
    return found


def _marked(path: str) -> list:
    """The stamp of a file. A missing file gets an empty one: reading it raises the reason."""
    try:
        return file_signature(path)
    except ConfigurationError as refused:
        if not is_lost(path, refused):
            raise
        return [path, 0, None]


# ---- cached, as long as the files are the same


def _recalled(of: list, marks: list[list]) -> Found | None:
    entry = load(_key(of, marks)) if _is_worth_it(marks) else None
    if entry is None or entry[0]["files"] != _versions(marks):
        return None
    return entry[0]["found"], entry[1]


def _keep(of: list, marks: list[list], found: Found, began: int) -> None:
    """Caches what was found, unless a local file can have changed since ``began`` without a new modification time."""
    newest = max(
        (max(version) for _, _, version in marks if isinstance(version, list)), default=0
    )  # servers' clocks may differ
    if _is_worth_it(marks) and newest < began - SETTLED:
        store(_key(of, marks), {"files": _versions(marks), "found": found[0]}, found[1])


def _key(of: list, marks: list[list]) -> list:
    return [*of, [path for path, _, _ in marks]]


def _versions(marks: list[list]) -> list[list]:
    """Sizes and versions, without the addresses, which may contain passwords."""
    return [mark[1:] for mark in marks]


def _is_worth_it(marks: list[list]) -> bool:
    return all(version is not None for _, _, version in marks) and sum(size or 0 for _, size, _ in marks) >= WORTH


# ---- progress


def _telling(what: str, total: int) -> Tell:
    """``tell(bytes read so far)`` gives a Notice with pace and time left now and then, if there is long to wait."""
    watch, began, behind = noticing(), perf_counter(), 0

    def tell(passed: int) -> None:
        nonlocal behind
        behind = min(max(behind, passed), total)  # downloading and then reading the same bytes reports them twice
        if behind:
            spent = max(perf_counter() - began, 1e-9)
            watch(f"{what}, {behind / spent / 1e6:,.0f} MB/s", behind / total, spent * (total - behind) / behind)

    return tell
