"""Which storage would be faster, and by how much: some rows of the data are stored that way, and read back.

What is told is an estimate for *these* data on this machine; ``convert`` measures again when the whole is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from shutil import rmtree

from hasten.contract.errors import Refusal
from hasten.contract.watch import Watch
from hasten.data.caching.cache_disk import default_folder, held, swept
from hasten.data.source import BadRow
from hasten.data.storing.kinds import KINDS
from hasten.data.storing.parts import Plan, into
from hasten.data.storing.readings import Reading
from hasten.data.storing.stages import pace
from hasten.data.storing.storages import STORAGES

WORTH = 1.2  # times faster; less is not worth the trouble of storing the data again
FEWEST = 64  # rows of a sample
CHUNKS = 4  # of the reading's size, at most, are stored to try
ADVICE = "samples are written there; make room, or name another folder with HASTEN_CACHE"
TRIED = {
    "parquet": ("feather", "rows"),
    "feather": ("feather", "rows"),
    "csv": ("parquet", "feather", "rows"),
    "tfrecord": ("feather", "rows"),
    "images": ("shards", "rows"),
    "shards": ("shards", "rows"),
}


def better_storages(reading: Reading, before: float, total: int, disk: float | None, budget: float, watch: Watch) -> list[dict]:
    """What some other storages would give, the fastest first.

    Args:
        reading: of the data as they are, pictures of one size.
        before: rows a second into batches.
        total: rows of all files.
        disk: bytes a second, where the disk takes part in every pass; None where it does not.
        budget: seconds.

    Returns:
        [{"to", "resize", "rows_per_second" on one core, "gain": times faster, "bytes" of all rows}].
    """
    storages = TRIED.get(reading.kind.name, ())
    ends, found = time.perf_counter() + budget, []
    seconds = budget / (3 * max(1, len(storages)))  # a third for writing, one for reading, one to spare
    sample = replace(reading, most=max(FEWEST, min(int(before * seconds), CHUNKS * reading.chunk)), fill=0)
    with workplace() as folder:
        for to in storages:
            left = ends - time.perf_counter()
            if left < seconds:
                break
            watch(f"trying {to}", 0.3 + 0.7 * (1 - left / budget), left)
            with suppress(Refusal, BadRow):  # what it cannot hold is no advice
                row, paced = _tried(sample, to, folder / to, seconds)
                after = slower_of(paced, row, disk)
                resize = side_of(reading.resize)
                found.append({"to": to, "resize": resize, "rows_per_second": after, "gain": after / before, "bytes": round(row * total)})
    return sorted((each for each in found if each["gain"] >= WORTH), key=lambda each: -each["gain"])


def slower_of(paced: float, row: float, disk: float | None) -> float:
    """Rows a second of a core that makes ``paced`` of them, and a disk that gives so many bytes a second, both at work at once."""
    return paced if disk is None else min(paced, disk / max(row, 1e-9))


def side_of(resize) -> int | None:
    """What ``--resize`` would have to be; pictures that are left as they are need none."""
    return resize if isinstance(resize, int) else None


def _tried(sample: Reading, to: str, folder: Path, seconds: float) -> tuple[float, float]:
    """(bytes of a row, rows a second) of some rows that are stored as ``to``."""
    with into(folder, ADVICE):
        folder.mkdir()
        storage = STORAGES[to](Plan(sample, folder, 1))
        storage.write(0, lambda rows: None)
        storage.keep(0)
        storage.finish()
    files = sorted(str(file) for file in folder.iterdir())
    of_table = {"target": sample.target, "fill": 0} if KINDS[to].is_table else {}
    stored = Reading(KINDS[to], files, files, **of_table, resize=sample.resize if to == "shards" else None)
    return sum(map(os.path.getsize, files)) / sample.rows, pace(stored, seconds)["batches"]


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for samples that is gone afterwards; what killed processes have left is removed, too."""
    base = default_folder() / "samples"
    name = f"{os.getpid()}-{token_hex(4)}"
    lock, folder = base / f"{name}.lock", base / f"{name}.making"
    with into(base, ADVICE):
        base.mkdir(parents=True, exist_ok=True)
        swept(base)
        lock.touch()
    with held(lock, f"waiting for {lock}"):
        folder.mkdir()
        try:
            yield folder
        finally:
            rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
            with suppress(OSError):
                base.rmdir()  # unless others are at work
