"""Estimates which storage format would be faster: stores some of the rows that way and reads them back.

The estimate is for these data on this machine.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.core.progress import ProgressCallback
from hasten.data.io.metadata_cache import default_directory
from hasten.data.source import BadRow
from hasten.datatools.format_detection import FORMATS
from hasten.datatools.row_reader import RowReader
from hasten.datatools.stage_throughput import repeated_stage_rates
from hasten.datatools.writers import WRITERS, ShardPlan
from hasten.engine.error_messages import translate_disk_errors

MIN_GAIN = 1.2  # speedup; less does not justify a conversion
MIN_ROWS = 64  # stored to try a format
MAX_CHUNKS = 4  # chunks of rows stored to try a format
DISK_ADVICE = "samples are written there; free some space, or choose another directory with HASTEN_CACHE"
CANDIDATES = {  # target formats that may be faster
    "parquet": ("feather", "rows"),
    "feather": ("feather", "rows"),
    "csv": ("parquet", "feather", "rows"),
    "tfrecord": ("feather", "rows"),
    "images": ("webdataset", "rows"),
    "webdataset": ("webdataset", "rows"),
}


def better_storages(
    reader: RowReader,
    before: Sequence[float],
    total: int,
    disk: float | None,
    budget: float,
    on_progress: ProgressCallback,
) -> list[dict]:
    """Returns the formats that would be faster, the fastest first.

    ``reader`` reads the data as they are, images of one size; ``before`` are measurements of rows/s into batches;
    ``total`` is the rows of all files; ``disk`` bytes/s, None if the data stay in memory; ``budget`` seconds. A format
    is ``{"to", "resize", "fill" (value for --fill if numbers are missing), "rows_per_second" on one core, "gain"
    (speedup, from the medians), "low" and "high" (from the most distant measurements; None with a single one), "bytes"
    of all rows}``.
    """
    kind, resize = reader.kind.name, side_of(reader.resize)
    candidates = [to for to in CANDIDATES.get(kind, ()) if resize or (kind, to) != ("webdataset", "webdataset")]
    deadline, results = time.perf_counter() + budget, []
    seconds = budget / (3 * max(1, len(candidates)))  # a third each for writing, for reading and in reserve
    sample = replace(_sample(reader, median(before), seconds), fill=0)  # as --fill 0 does
    with temporary_directory() as directory:
        for to in candidates:
            left = deadline - time.perf_counter()
            if left < seconds:
                break
            on_progress(f"trying {to}", 0.3 + 0.7 * (1 - left / budget), left)
            with suppress(ConfigurationError, BadRow):  # a format that cannot express the data is not advised
                row_bytes, rates = _try_format(sample, to, directory / to, seconds, reader.fill)
                after = [limit_by_disk(rate, row_bytes, disk) for rate in rates]
                fill = 0 if to == "rows" and _has_missing_values(sample) else None
                several = len(before) > 1 or len(after) > 1
                results.append(
                    {
                        "to": to,
                        "resize": resize,
                        "fill": fill,
                        "rows_per_second": median(after),
                        "gain": median(after) / median(before),
                        "low": min(after) / max(before) if several else None,
                        "high": max(after) / min(before) if several else None,
                        "bytes": round(row_bytes * total),
                    }
                )
    return sorted((result for result in results if result["gain"] >= MIN_GAIN), key=lambda result: -result["gain"])


def limit_by_disk(rate: float, row_bytes: float, disk: float | None) -> float:
    """Returns the lower of ``rate``, in rows/s, and the rows/s that ``disk`` bytes/s allow; None: no limit."""
    return rate if disk is None else min(rate, disk / max(row_bytes, 1e-9))


def side_of(resize: int | tuple[int, int] | None) -> int | None:
    """Returns the side in pixels for ``--resize``; None for no resizing, and for the images' own (height, width)."""
    return resize if isinstance(resize, int) else None


def _sample(reader: RowReader, rate: float, seconds: float) -> RowReader:
    """A reader of the first rows only: as many as can be read in ``seconds`` at ``rate`` rows/s."""
    return replace(reader, max_rows=max(MIN_ROWS, min(int(rate * seconds), MAX_CHUNKS * reader.chunk)))


def _has_missing_values(sample: RowReader) -> bool:
    """Whether a table has missing values, which the formats "rows" and "tfrecord" cannot express."""
    tables = sample.tables(0, sample.rows) if sample.kind.is_table else ()
    return any(table.column(name).null_count for table in tables for name in table.column_names)


def _try_format(sample: RowReader, to: str, directory: Path, seconds: float, fill: Any) -> tuple[float, list[float]]:
    """Stores the sample in ``directory`` as format ``to``: (bytes per row, measurements of rows/s when read back).

    ``fill`` replaces the values that are missing in what was stored.
    """
    with translate_disk_errors(directory, DISK_ADVICE):
        directory.mkdir()
        plan = ShardPlan(sample, directory, 1)
        writer = WRITERS[to](plan)
        plan.done.append((writer.write(0, lambda rows: None).rows, ""))
        writer.finish()
    files = sorted(str(file) for file in directory.iterdir())
    table_options: dict[str, Any] = {"target": sample.target, "fill": fill} if FORMATS[to].is_table else {}
    resize = sample.resize if to == "webdataset" else None
    stored = RowReader(FORMATS[to], files, files, **table_options, resize=resize)
    rates = repeated_stage_rates(stored, seconds)["batches"]
    return sum(map(os.path.getsize, files)) / sample.rows, rates or []


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Context manager: a directory for samples, removed at its end."""
    base = default_directory() / "samples"
    with translate_disk_errors(base, DISK_ADVICE):
        base.mkdir(parents=True, exist_ok=True)
        directory = TemporaryDirectory(dir=base, ignore_cleanup_errors=True)
    with directory as path:
        yield Path(path)
