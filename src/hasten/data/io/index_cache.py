"""Index cache: a file without an index of its records is read once, and the positions of the records are cached.

A cached index is valid while the size and the version of the file are the same; the file is then not read. Not cached
are the indexes of small files, of damaged files, of files that changed within the last two seconds, and of remote
files without a version. Progress is reported while a large file is read.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy

from hasten.core.errors import ConfigurationError
from hasten.data.io.metadata_cache import TIMESTAMP_GRANULARITY_NS, CacheEntry, load, store
from hasten.data.io.paths import FileMissingError, file_signature, is_file_error, is_remote
from hasten.data.io.range_reader import read_file
from hasten.data.io.remote import MAX_REQUESTS
from hasten.data.progress import rate_reporter
from hasten.data.source import BadRow

MIN_BYTES = 1_000_000  # of the files; the index of smaller ones is not cached

ReportBytes = Callable[[int], None]  # called with the number of bytes of the file that have been read
BuildIndex = Callable[[memoryview, str, ReportBytes], tuple[CacheEntry, str | None]]


def load_or_build_index(paths: list[str], key: list, build: BuildIndex) -> list[tuple[list, CacheEntry, str | None]]:
    """Returns (file signature, index, reason why the index is incomplete or None) of each file, from the cache or from
    reading the file. An index is (JSON data, arrays).

    ``key`` is a JSON list: what the index contains ("records", for the progress message), then whatever it depends on
    besides the file. ``build`` is ``(content, path, report) -> (index, reason why it is incomplete, or None)``; the
    content of a file that cannot be read is empty.
    """
    with ThreadPoolExecutor(min(len(paths), MAX_REQUESTS)) as pool:  # a remote signature takes a round trip
        signatures = list(pool.map(_signature, paths) if any(map(is_remote, paths)) else map(_signature, paths))
    cached = [_load(key, [signature]) for signature in signatures]
    missing = [signature for signature, index in zip(signatures, cached, strict=True) if index is None]
    files = missing[0][0] if len(missing) == 1 else f"{len(missing)} files"
    report = _progress_reporter(f"finding the {key[0]} of {files}", sum(size or 0 for _, size, _ in missing))
    done, results = 0, []
    for signature, index in zip(signatures, cached, strict=True):
        damage = None
        if index is None:
            start_ns = time.time_ns()
            content, unread = _read(signature, tell := lambda position, done=done: report(done + position))
            index, damage = build(content, signature[0], tell)
            damage = unread or damage
            done += signature[1] or 0
            report(done)
            if damage is None:
                _store(key, [signature], index, start_ns)
        results.append((signature, index, damage))
    return results


class IndexedFiles:
    """The rows of indexed files. Of a damaged file the last row is bad, and stands for what could not be indexed.

    ``indices`` is the result of ``load_or_build_index(paths, ...)``, ``counts`` the number of good rows of each file,
    ``what`` the word for a row in errors. ConfigurationError if there are no good rows.
    """

    def __init__(self, paths: list[str], indices: list[tuple], counts: Iterable[int], what: str) -> None:
        self.signatures: list[list] = [signature for signature, _, _ in indices]
        reasons = [why for _, _, why in indices]
        rows = [count + (why is not None) for count, why in zip(counts, reasons, strict=True)]
        self.offsets = numpy.cumsum([0, *rows])  # first row of each file, and the end
        damaged = zip((self.offsets[1:] - 1).tolist(), paths, reasons, strict=True)
        self.bad = {row: (file, why) for row, file, why in damaged if why is not None}
        self.lost = dict(self.bad.values())  # {file: why}
        if self.bad and len(self.bad) == len(self):
            raise FileMissingError(next(iter(self.bad.values()))[1])
        if not len(self):
            raise ConfigurationError(f"there is no {what} in {', '.join(paths[:3])}")

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def chunk_offsets(self) -> numpy.ndarray:
        return self.offsets

    def known_bad_rows(self) -> list[BadRow]:
        return [BadRow(row, *bad) for row, bad in self.bad.items()]

    def file_of(self, rows: Any) -> Any:
        """Returns the index of the file of each row."""
        return numpy.searchsorted(self.offsets, rows, "right") - 1


def load_or_compute(key: list, signatures: list[list], compute: Callable[[], CacheEntry]) -> CacheEntry:
    """Returns ``compute()``, or its cached result if the files with these signatures have not changed since."""
    entry = _load(key, signatures)
    if entry is None:
        start_ns = time.time_ns()
        entry = compute()
        _store(key, signatures, entry, start_ns)
    return entry


def _read(signature: list, report: ReportBytes) -> tuple[memoryview, str | None]:
    """Returns (content of a file, None), or (no bytes, the reason why this file cannot be read)."""
    try:
        return read_file(signature, report), None
    except ConfigurationError as error:
        if not is_file_error(signature[0], error):
            raise
        return memoryview(b""), str(error)


def _signature(path: str) -> list:
    """Returns [path, size, version] of a file; of a missing file an empty version: reading it raises later."""
    try:
        return file_signature(path)
    except ConfigurationError as error:
        if not is_file_error(path, error):
            raise
        return [path, 0, None]


# ---- cache entries


def _load(key: list, signatures: list[list]) -> CacheEntry | None:
    entry = load(_entry_key(key, signatures)) if _is_cacheable(signatures) else None
    if entry is None or entry[0]["files"] != _versions(signatures):
        return None
    return entry[0]["found"], entry[1]


def _store(key: list, signatures: list[list], entry: CacheEntry, start_ns: int) -> None:
    """Caches an entry, unless a local file can have changed since ``start_ns`` without a new modification time."""
    times = (max(version) for _, _, version in signatures if isinstance(version, list))  # a server's clock may differ
    if _is_cacheable(signatures) and max(times, default=0) < start_ns - TIMESTAMP_GRANULARITY_NS:
        store(_entry_key(key, signatures), {"files": _versions(signatures), "found": entry[0]}, entry[1])


def _entry_key(key: list, signatures: list[list]) -> list:
    """Returns the key of an entry, without the versions of the files: a changed file replaces its index."""
    return [*key, [path for path, _, _ in signatures]]


def _versions(signatures: list[list]) -> list[list]:
    """Returns the signatures without the paths: remote addresses may contain passwords."""
    return [signature[1:] for signature in signatures]


def _is_cacheable(signatures: list[list]) -> bool:
    size = sum(size or 0 for _, size, _ in signatures)
    return size >= MIN_BYTES and all(version is not None for _, _, version in signatures)


# ---- progress


def _progress_reporter(message: str, total: int) -> ReportBytes:
    """Returns ``report(bytes read so far)``, which warns now and then with the rate and the time left."""
    report, position = rate_reporter(message, total, "MB/s", 1e6), 0

    def report_furthest(done: int) -> None:
        nonlocal position
        position = min(max(position, done), total)  # downloading and then reading the same bytes reports them twice
        report(position)

    return report_furthest
