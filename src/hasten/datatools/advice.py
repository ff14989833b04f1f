"""Estimates which storage format would be faster: stores some of the rows that way and reads them back.

The estimate is for these data on this machine; ``convert`` measures again when all rows are stored.
"""

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
from typing import Any

from scipy.special import stdtrit

from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.cache.cache_disk import file_lock, remove_partial
from hasten.data.io.metadata_cache import default_folder
from hasten.data.source import BadRow
from hasten.datatools.file_sampling import sample_files
from hasten.datatools.format_detection import FORMATS
from hasten.datatools.row_reader import RowReader
from hasten.datatools.shard_plan import ShardPlan
from hasten.datatools.stage_throughput import repeated_stage_rates, stage_rates
from hasten.datatools.writers import WRITERS
from hasten.engine.error_messages import translate_disk_errors

MIN_GAIN = 1.2  # speedup; less does not justify a conversion
MIN_ROWS = 64  # stored to try a format
MAX_TURNS, MIN_TURNS = 6, 2  # measurements of each side
SIGNIFICANCE = 0.05  # probability of calling equal sides different: Student's t over the turns
OVERTIME = 3  # times the planned time, after which MIN_TURNS turns suffice
MIN_DIFFERENCE = 1.01  # speedup; less counts as no difference
MAX_CHUNKS = 4  # chunks of rows stored to try a format
DISK_ADVICE = "samples are written there; free some space, or choose another folder with HASTEN_CACHE"
CANDIDATES = {  # target formats that may be faster
    "parquet": ("feather", "rows"),
    "feather": ("feather", "rows"),
    "csv": ("parquet", "feather", "rows"),
    "tfrecord": ("feather", "rows"),
    "images": ("webdataset", "rows"),
    "webdataset": ("webdataset", "rows"),
}


def better_storages(
    reader: RowReader, before: Sequence[float], total: int, disk: float | None, budget: float, watch: ProgressCallback
) -> list[dict]:
    """Returns the formats that would be faster, the fastest first.

    Args:
        reader: Reads the data as they are, images of one size.
        before: Measurements of rows/s into batches.
        total: Rows of all files.
        disk: Bytes/s, if every epoch reads from the disk; None if the data stay in memory.
        budget: Seconds.
        watch: Progress callback.

    Returns:
        For each format ``{"to", "resize", "fill" (value for --fill if numbers are missing), "rows_per_second" on one
        core, "gain" (speedup, from the medians), "low" and "high" (from the most distant measurements; None with a
        single one), "bytes" of all rows}``.
    """
    kind, resize = reader.kind.name, side_of(reader.resize)
    candidates = [to for to in CANDIDATES.get(kind, ()) if resize or (kind, to) != ("webdataset", "webdataset")]
    deadline, results = time.perf_counter() + budget, []
    seconds = budget / (3 * max(1, len(candidates)))  # a third each for writing, for reading and in reserve
    sample = _sample(replace(reader, fill=0), median(before), seconds)
    with temporary_folder() as folder:
        for to in candidates:
            left = deadline - time.perf_counter()
            if left < seconds:
                break
            watch(f"trying {to}", 0.3 + 0.7 * (1 - left / budget), left)
            with suppress(ConfigurationError, BadRow):  # a format that cannot express the data is not advised
                row_bytes, rates = _try_format(sample, to, folder / to, seconds)
                after = [limit_by_disk(rate, row_bytes, disk) for rate in rates]
                fill = 0 if to == "rows" and _has_missing_values(sample) else None
                gain = {"rows_per_second": median(after), **_unpaired_gain(before, after)}
                results.append({"to": to, "resize": resize, "fill": fill, **gain, "bytes": round(row_bytes * total)})
    return sorted((result for result in results if result["gain"] >= MIN_GAIN), key=lambda result: -result["gain"])


def measured_gain(reader: RowReader, to: str, files: list[str], seconds: float) -> dict:
    """Measures the gain of having stored the rows of ``reader`` as ``to`` in ``files``, for ``seconds`` a side. The
    result is that of ``gain_of``, with None for every value if no batches can be built from the rows.
    """
    resize = reader.resize if to == "webdataset" else None
    stored = RowReader(FORMATS[to], files, files, resize=resize, faults=reader.faults)
    try:
        with temporary_folder() as folder:
            sides = [_on_some_files(side, folder) for side in (reader, stored)]
            before, after = zip(*_interleaved_rates(sides, seconds), strict=True)
    except (ConfigurationError, BadRow, RunError):  # such as missing text, which no batch can contain
        return dict.fromkeys(("before", "after", "ratio", "low", "high", "verdict"))
    return gain_of(before, after)


def gain_of(before: Sequence[float], after: Sequence[float]) -> dict:
    """Returns the gain that paired measurements of rows/s support.

    "before" and "after" are medians; "ratio", "low" and "high" the median, minimum and maximum of after / before over
    the pairs. "verdict" is "faster" or "slower" if all pairs agree and Student's t rejects chance, else "no
    difference".
    """
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    low, high = min(ratios), max(ratios)
    logs = list(map(math.log, ratios))
    critical_t = stdtrit(len(logs) - 1, 1 - SIGNIFICANCE / 2)
    is_significant = abs(fmean(logs)) >= critical_t * stdev(logs) / math.sqrt(len(logs))
    verdict = "no difference"
    if is_significant and low > MIN_DIFFERENCE:
        verdict = "faster"
    elif is_significant and high < 1 / MIN_DIFFERENCE:
        verdict = "slower"
    medians = {"before": median(before), "after": median(after), "ratio": median(ratios)}
    return {**medians, "low": low, "high": high, "verdict": verdict}


def limit_by_disk(rate: float, row_bytes: float, disk: float | None) -> float:
    """Returns the lower of ``rate`` (rows/s of a core) and what ``disk`` bytes/s allow; None: no limit."""
    return rate if disk is None else min(rate, disk / max(row_bytes, 1e-9))


def side_of(resize: int | tuple[int, int] | None) -> int | None:
    """Returns the side in pixels for ``--resize``, from a side or (height, width); None: no resizing."""
    return resize if isinstance(resize, int) else None


def _unpaired_gain(before: Sequence[float], after: Sequence[float]) -> dict:
    several = len(before) > 1 or len(after) > 1
    low, high = (min(after) / max(before), max(after) / min(before)) if several else (None, None)
    return {"gain": median(after) / median(before), "low": low, "high": high}


def _sample(reader: RowReader, rate: float, seconds: float) -> RowReader:
    """A reader of the first rows only: as many as can be read in ``seconds`` at ``rate`` rows/s."""
    return replace(reader, max_rows=max(MIN_ROWS, min(int(rate * seconds), MAX_CHUNKS * reader.chunk)))


def _interleaved_rates(readers: list[RowReader], seconds: float) -> list[list[float]]:
    """Rows/s of all readers, measured in turns: one list per turn. The first turn, a warm-up, is dropped."""
    turns, deadline = [], time.perf_counter() + OVERTIME * seconds
    while len(turns) <= MIN_TURNS or (len(turns) <= MAX_TURNS and time.perf_counter() < deadline):
        turns.append([stage_rates(reader, seconds / MAX_TURNS)["batches"] for reader in readers])
    return turns[1:]


def _on_some_files(reader: RowReader, folder: Path) -> RowReader:
    """The reader, limited to some files if the format has no index; with its own count of bad rows. Missing numbers of
    a table are filled with 0, which does not change the speed.
    """
    files, _ = sample_files(reader.kind, reader.files, folder)
    where, fill = reader.where if files == reader.files else files, 0 if reader.kind.is_table else None
    return replace(reader, where=where, files=files, fill=fill, faults=BadRowPolicy(reader.faults.max_rows))


def _has_missing_values(sample: RowReader) -> bool:
    """Whether a table has missing values, which the formats "rows" and "tfrecord" cannot express."""
    tables = sample.tables(0, sample.rows) if sample.kind.is_table else ()
    return any(table.column(name).null_count for table in tables for name in table.column_names)


def _try_format(sample: RowReader, to: str, folder: Path, seconds: float) -> tuple[float, list[float]]:
    """Stores the sample in ``folder`` as format ``to``: (bytes per row, measurements of rows/s when read back)."""
    with translate_disk_errors(folder, DISK_ADVICE):
        folder.mkdir()
        plan = ShardPlan(sample, folder, 1)
        writer = WRITERS[to](plan)
        plan.done.append((writer.write(0, lambda rows: None).rows, ""))
        writer.finish()
    files = sorted(str(file) for file in folder.iterdir())
    table_options: dict[str, Any] = {"target": sample.target, "fill": 0} if FORMATS[to].is_table else {}
    resize = sample.resize if to == "webdataset" else None
    stored = RowReader(FORMATS[to], files, files, **table_options, resize=resize)
    rates = repeated_stage_rates(stored, seconds)["batches"]
    return sum(map(os.path.getsize, files)) / sample.rows, rates or []


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A temporary folder for samples; also removes those that killed processes have left."""
    base = default_folder() / "samples"
    name = f"{os.getpid()}-{token_hex(4)}"
    lock, folder = base / f"{name}.lock", base / f"{name}.making"
    with translate_disk_errors(base, DISK_ADVICE):
        base.mkdir(parents=True, exist_ok=True)
        remove_partial(base)
        lock.touch()
    with file_lock(lock, f"waiting for {lock}"):
        with translate_disk_errors(base, DISK_ADVICE):
            folder.mkdir()
        try:
            yield folder
        finally:
            rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
            with suppress(OSError):
                base.rmdir()  # another process may use it
