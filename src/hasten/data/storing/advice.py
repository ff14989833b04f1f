"""Which storage would be faster, and by how much: some rows of the data are stored that way, and read back.

What is told is an estimate for *these* data on this machine; ``convert`` measures again when the whole is there.
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

from hasten.contract.errors import Failure, Refusal
from hasten.contract.watch import Watch
from hasten.data.caching.cache_disk import default_folder, held, swept
from hasten.data.faults import Faults
from hasten.data.source import BadRow
from hasten.data.storing.kinds import KINDS
from hasten.data.storing.parts import Plan, into
from hasten.data.storing.readings import Reading
from hasten.data.storing.sampling import some_of
from hasten.data.storing.stages import pace, paces
from hasten.data.storing.storages import STORAGES

WORTH = 1.2  # times faster; less is not worth the trouble of storing the data again
FEWEST = 64  # rows of a sample
TURNS, LEAST = 6, 2  # readings of each side that count
ERROR = 0.05  # chance that two sides that are equal do not look so, by Student's t over the turns, few or many
PATIENCE = 3  # times what they should take; then fewer have to do
CLEAR = 1.01  # times as fast; less is no difference
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


def better_storages(reading: Reading, before: Sequence[float], total: int, disk: float | None, budget: float, watch: Watch) -> list[dict]:
    """What some other storages would give, the fastest first.

    Args:
        reading: of the data as they are, pictures of one size.
        before: readings of rows a second into batches.
        total: rows of all files.
        disk: bytes a second, where the disk takes part in every pass; None where it does not.
        budget: seconds.

    Returns:
        [{"to", "resize", "fill" (what --fill has to say, as numbers are missing), "rows_per_second" on one core, "gain": times faster, by
        the medians of the readings, "low" and "high", by those that are farthest apart (None of one alone), "bytes" of all rows}].
    """
    resize = side_of(reading.resize)
    storages = [to for to in TRIED.get(reading.kind.name, ()) if resize or (reading.kind.name, to) != ("shards", "shards")]
    ends, found = time.perf_counter() + budget, []
    seconds = budget / (3 * max(1, len(storages)))  # a third for writing, one for reading, one to spare
    sample = _sample(replace(reading, fill=0), median(before), seconds)
    with workplace() as folder:
        for to in storages:
            left = ends - time.perf_counter()
            if left < seconds:
                break
            watch(f"trying {to}", 0.3 + 0.7 * (1 - left / budget), left)
            with suppress(Refusal, BadRow):  # what it cannot hold is no advice
                row, paced = _tried(sample, to, folder / to, seconds)
                after = [slower_of(each, row, disk) for each in paced]
                fill = 0 if to == "rows" and _lacks_numbers(sample) else None
                gained = {"rows_per_second": median(after), **_gain(before, after), "bytes": round(row * total)}
                found.append({"to": to, "resize": resize, "fill": fill, **gained})
    return sorted((each for each in found if each["gain"] >= WORTH), key=lambda each: -each["gain"])


def estimated_gain(reading: Reading, to: str, seconds: float) -> float | None:
    """How many times as fast rows will be read when they are stored as ``to``, told by some of them; None where it cannot be told.

    Args:
        seconds: for each side of the comparison, about.
    """
    try:
        with workplace() as folder:
            reading = _some(reading, folder)
            before = pace(_filled(reading), seconds)["batches"]
            _, after = _tried(_sample(reading, before, seconds), to, folder / to, seconds)
    except (Refusal, BadRow, Failure):
        return None
    return median(after) / before


def measured_gain(reading: Reading, to: str, files: list[str], seconds: float) -> dict:
    """What was gained by storing rows as ``to`` in these files, as ``gain_of`` tells it; None for all of it where they make no batches.

    Args:
        seconds: for each side of the comparison, about.
    """
    stored = Reading(KINDS[to], files, files, resize=reading.resize if to == "shards" else None, faults=reading.faults)
    try:
        with workplace() as folder:
            paces = _in_turns([_filled(_some(each, folder)) for each in (reading, stored)], seconds)
    except (Refusal, BadRow, Failure):  # missing text, which batches could not hold either
        return dict.fromkeys(("before", "after", "ratio", "low", "high", "verdict"))
    return gain_of(*zip(*paces, strict=True))


def gain_of(before: Sequence[float], after: Sequence[float]) -> dict:
    """From rows a second, read in turns, to a gain that their spread supports.

    Returns:
        "before" and "after", the medians; "ratio", the median of how many times as fast neighbours are, between "low" and "high", the
        least and the most; "verdict": "faster" or "slower" where all of them are and so few could not be by chance, else "no difference".
    """
    ratios = [late / early for early, late in zip(before, after, strict=True)]
    low, high = min(ratios), max(ratios)
    logs = list(map(math.log, ratios))
    by_chance = abs(fmean(logs)) < stdtrit(len(logs) - 1, 1 - ERROR / 2) * stdev(logs) / math.sqrt(len(logs))
    verdict = "no difference" if by_chance else "faster" if low > CLEAR else "slower" if high < 1 / CLEAR else "no difference"
    return {"before": median(before), "after": median(after), "ratio": median(ratios), "low": low, "high": high, "verdict": verdict}


def slower_of(paced: float, row: float, disk: float | None) -> float:
    """Rows a second of a core that makes ``paced`` of them, and a disk that gives so many bytes a second, both at work at once."""
    return paced if disk is None else min(paced, disk / max(row, 1e-9))


def side_of(resize) -> int | None:
    """What ``--resize`` would have to be; pictures that are left as they are need none."""
    return resize if isinstance(resize, int) else None


def _gain(before: Sequence[float], after: Sequence[float]) -> dict:
    """From readings that are no neighbours."""
    several = len(before) > 1 or len(after) > 1
    low, high = (min(after) / max(before), max(after) / min(before)) if several else (None, None)
    return {"gain": median(after) / median(before), "low": low, "high": high}


def _sample(reading: Reading, rate: float, seconds: float) -> Reading:
    """As many of the first rows as are read in so many seconds."""
    return replace(reading, most=max(FEWEST, min(int(rate * seconds), CHUNKS * reading.chunk)))


def _in_turns(readings: list[Reading], seconds: float) -> list[list[float]]:
    """Rows a second of each, again and again. The first time, in which more is loaded than rows, does not count."""
    paces, ends = [], time.perf_counter() + PATIENCE * seconds
    while len(paces) <= LEAST or (len(paces) <= TURNS and time.perf_counter() < ends):
        paces.append([pace(each, seconds / TURNS)["batches"] for each in readings])
    return paces[1:]


def _some(reading: Reading, folder: Path) -> Reading:
    """Of files that have to be walked through, a few. What cannot be read is not counted once more."""
    some, _ = some_of(reading.kind, reading.files, folder)
    where = reading.where if some == reading.files else some
    return replace(reading, where=where, files=some, faults=Faults(reading.faults.at_most))


def _filled(reading: Reading) -> Reading:
    """How fast numbers are read does not depend on which are missing."""
    return replace(reading, fill=0 if reading.kind.is_table else None)


def _lacks_numbers(sample: Reading) -> bool:
    """Whether some are missing, which a matrix cannot say."""
    tables = sample.tables(0, sample.rows) if sample.kind.is_table else ()
    return any(table.column(name).null_count for table in tables for name in table.column_names)


def _tried(sample: Reading, to: str, folder: Path, seconds: float) -> tuple[float, list[float]]:
    """(bytes of a row, readings of rows a second) of some rows that are stored as ``to``."""
    with into(folder, ADVICE):
        folder.mkdir()
        plan = Plan(sample, folder, 1)
        storage = STORAGES[to](plan)
        plan.done.append((storage.write(0, lambda rows: None).rows, ""))
        storage.finish()
    files = sorted(str(file) for file in folder.iterdir())
    of_table = {"target": sample.target, "fill": 0} if KINDS[to].is_table else {}
    stored = Reading(KINDS[to], files, files, **of_table, resize=sample.resize if to == "shards" else None)
    return sum(map(os.path.getsize, files)) / sample.rows, paces(stored, seconds)["batches"]


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
        with into(base, ADVICE):
            folder.mkdir()
        try:
            yield folder
        finally:
            rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
            with suppress(OSError):
                base.rmdir()  # unless others are at work
