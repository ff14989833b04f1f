"""Estimates which storage format would be faster: stores some of the rows that way and reads them back.

The estimate holds for *these* data on this machine; ``convert`` measures again when all rows are stored.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from statistics import fmean, median, stdev

from scipy.special import stdtrit

from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.cache.cache_disk import default_folder, file_lock, remove_partial
from hasten.data.source import BadRow
from hasten.datatools.file_sampling import some_of
from hasten.datatools.format_detection import KINDS
from hasten.datatools.row_reader import RowReader
from hasten.datatools.shard_plan import ShardPlan, translate_write_errors
from hasten.datatools.stage_throughput import pace, paces
from hasten.datatools.writers import STORAGES

WORTH = 1.2  # times as fast; less does not justify a conversion
FEWEST = 64  # rows stored to try a format, at least
TURNS, LEAST = 6, 2  # measurements of each side: at most, at least
ERROR = 0.05  # probability of calling equal sides different: Student's t over the turns
PATIENCE = 3  # times the planned time, after which LEAST turns suffice
CLEAR = 1.01  # times as fast; less counts as no difference
CHUNKS = 4  # chunks of rows stored to try a format, at most
ADVICE = "samples are written there; make room, or name another folder with HASTEN_CACHE"
TRIED = {
    "parquet": ("feather", "rows"),
    "feather": ("feather", "rows"),
    "csv": ("parquet", "feather", "rows"),
    "tfrecord": ("feather", "rows"),
    "images": ("shards", "rows"),
    "shards": ("shards", "rows"),
}


def better_storages(
    reading: RowReader, before: Sequence[float], total: int, disk: float | None, budget: float, watch: ProgressCallback
) -> list[dict]:
    """The formats that would be faster, the fastest first.

    Args:
        reading: the data as they are, images of one size.
        before: measurements of rows/s into batches.
        total: rows of all files.
        disk: bytes/s, if every epoch reads from the disk; None if the data stay in memory.
        budget: seconds.
        watch: progress.

    Returns:
        For each format ``{"to", "resize", "fill" (value for --fill if numbers are missing), "rows_per_second" on one
        core, "gain" (times as fast, from the medians), "low" and "high" (from the most distant measurements; None of a
        single one), "bytes" of all rows}``.
    """
    resize = side_of(reading.resize)
    storages = [
        to for to in TRIED.get(reading.kind.name, ()) if resize or (reading.kind.name, to) != ("shards", "shards")
    ]
    ends, found = time.perf_counter() + budget, []
    seconds = budget / (3 * max(1, len(storages)))  # a third each for writing, for reading and in reserve
    sample = _sample(replace(reading, fill=0), median(before), seconds)
    with workplace() as folder:
        for to in storages:
            left = ends - time.perf_counter()
            if left < seconds:
                break
            watch(f"trying {to}", 0.3 + 0.7 * (1 - left / budget), left)
            with suppress(ConfigurationError, BadRow):  # a format that cannot hold the data is not advised
                row, paced = _tried(sample, to, folder / to, seconds)
                after = [slower_of(each, row, disk) for each in paced]
                fill = 0 if to == "rows" and _lacks_numbers(sample) else None
                gained = {"rows_per_second": median(after), **_gain(before, after), "bytes": round(row * total)}
                found.append({"to": to, "resize": resize, "fill": fill, **gained})
    return sorted((each for each in found if each["gain"] >= WORTH), key=lambda each: -each["gain"])


def estimated_gain(reading: RowReader, to: str, seconds: float) -> float | None:
    """How many times as fast rows will be read when stored as ``to``, estimated from some of them; None if that fails.

    Args:
        seconds: for each side of the comparison, about.
    """
    try:
        with workplace() as folder:
            reading = _some(reading, folder)
            before = pace(_filled(reading), seconds)["batches"]
            _, after = _tried(_sample(reading, before, seconds), to, folder / to, seconds)
    except (ConfigurationError, BadRow, RunError):
        return None
    return median(after) / before


def measured_gain(reading: RowReader, to: str, files: list[str], seconds: float) -> dict:
    """The gain of storing rows as ``to`` in these files, as of ``gain_of``; all None if the rows make no batches.

    Args:
        seconds: for each side of the comparison, about.
    """
    stored = RowReader(
        KINDS[to], files, files, resize=reading.resize if to == "shards" else None, faults=reading.faults
    )
    try:
        with workplace() as folder:
            paces = _in_turns([_filled(_some(each, folder)) for each in (reading, stored)], seconds)
    except (ConfigurationError, BadRow, RunError):  # such as missing text, which no batch can hold
        return dict.fromkeys(("before", "after", "ratio", "low", "high", "verdict"))
    return gain_of(*zip(*paces, strict=True))


def gain_of(before: Sequence[float], after: Sequence[float]) -> dict:
    """The gain that paired measurements support.

    Args:
        before: rows/s, measured in turns with ``after``.
        after: rows/s.

    Returns:
        "before" and "after": medians. "ratio", "low", "high": median, minimum and maximum of after / before over the
        pairs. "verdict": "faster" or "slower" if all pairs agree and Student's t rejects chance, else "no difference".
    """
    ratios = [late / early for early, late in zip(before, after, strict=True)]
    low, high = min(ratios), max(ratios)
    logs = list(map(math.log, ratios))
    by_chance = abs(fmean(logs)) < stdtrit(len(logs) - 1, 1 - ERROR / 2) * stdev(logs) / math.sqrt(len(logs))
    verdict = (
        "no difference" if by_chance else "faster" if low > CLEAR else "slower" if high < 1 / CLEAR else "no difference"
    )
    return {
        "before": median(before),
        "after": median(after),
        "ratio": median(ratios),
        "low": low,
        "high": high,
        "verdict": verdict,
    }


def slower_of(paced: float, row: float, disk: float | None) -> float:
    """Rows/s of a core at ``paced`` rows/s and a disk at ``disk`` bytes/s, for rows of ``row`` bytes, concurrently."""
    return paced if disk is None else min(paced, disk / max(row, 1e-9))


def side_of(resize) -> int | None:
    """The value for ``--resize``; None for images that are left as they are."""
    return resize if isinstance(resize, int) else None


def _gain(before: Sequence[float], after: Sequence[float]) -> dict:
    """Gain from measurements that are not paired."""
    several = len(before) > 1 or len(after) > 1
    low, high = (min(after) / max(before), max(after) / min(before)) if several else (None, None)
    return {"gain": median(after) / median(before), "low": low, "high": high}


def _sample(reading: RowReader, rate: float, seconds: float) -> RowReader:
    """As many rows from the beginning as are read in ``seconds``."""
    return replace(reading, most=max(FEWEST, min(int(rate * seconds), CHUNKS * reading.chunk)))


def _in_turns(readings: list[RowReader], seconds: float) -> list[list[float]]:
    """Rows/s of each reading in turns. The first turn, which also loads libraries, does not count."""
    paces, ends = [], time.perf_counter() + PATIENCE * seconds
    while len(paces) <= LEAST or (len(paces) <= TURNS and time.perf_counter() < ends):
        paces.append([pace(each, seconds / TURNS)["batches"] for each in readings])
    return paces[1:]


def _some(reading: RowReader, folder: Path) -> RowReader:
    """The same rows, or some of the files of a format without an index. Bad rows are counted separately."""
    some, _ = some_of(reading.kind, reading.files, folder)
    where = reading.where if some == reading.files else some
    return replace(reading, where=where, files=some, faults=BadRowPolicy(reading.faults.max_rows))


def _filled(reading: RowReader) -> RowReader:
    """The same rows with missing numbers filled: which are missing does not change the speed."""
    return replace(reading, fill=0 if reading.kind.is_table else None)


def _lacks_numbers(sample: RowReader) -> bool:
    """Whether values are missing, which a matrix cannot express."""
    tables = sample.tables(0, sample.rows) if sample.kind.is_table else ()
    return any(table.column(name).null_count for table in tables for name in table.column_names)


def _tried(sample: RowReader, to: str, folder: Path, seconds: float) -> tuple[float, list[float]]:
    """(bytes of a row, measurements of rows/s) of the sample, stored as ``to``."""
    with translate_write_errors(folder, ADVICE):
        folder.mkdir()
        plan = ShardPlan(sample, folder, 1)
        storage = STORAGES[to](plan)
        plan.done.append((storage.write(0, lambda rows: None).rows, ""))
        storage.finish()
    files = sorted(str(file) for file in folder.iterdir())
    of_table = {"target": sample.target, "fill": 0} if KINDS[to].is_table else {}
    stored = RowReader(KINDS[to], files, files, **of_table, resize=sample.resize if to == "shards" else None)
    return sum(map(os.path.getsize, files)) / sample.rows, paces(stored, seconds)["batches"]


@contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder for samples; also removes those that killed processes have left."""
    base = default_folder() / "samples"
    name = f"{os.getpid()}-{token_hex(4)}"
    lock, folder = base / f"{name}.lock", base / f"{name}.making"
    with translate_write_errors(base, ADVICE):
        base.mkdir(parents=True, exist_ok=True)
        remove_partial(base)
        lock.touch()
    with file_lock(lock, f"waiting for {lock}"):
        with translate_write_errors(base, ADVICE):
            folder.mkdir()
        try:
            yield folder
        finally:
            rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
            with suppress(OSError):
                base.rmdir()  # another process may use it
