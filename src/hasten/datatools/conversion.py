"""``hasten data convert``: stores the same samples in another format, part by part, and reads each part back.

The output directory contains the data and ``conversion.json``: the settings, the number of rows and the hash of each
complete part, and the skipped rows. A killed conversion resumes with the first part that is not listed there.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter

import numpy

from hasten.core.errors import ConfigurationError, RunError, suggest
from hasten.core.progress import ProgressCallback, no_progress
from hasten.data.io.conversion_manifest import MANIFEST, load_manifest
from hasten.data.io.paths import plain
from hasten.data.source import BadRow, BadRowPolicy
from hasten.data.validation import at_least
from hasten.datatools.format_detection import (
    SKIPPED,
    StorageFormat,
    class_names,
    count_by_title,
    formats_at,
    select_openable,
)
from hasten.datatools.row_reader import RowReader
from hasten.datatools.writers import OWN_PART, WRITERS, ReportRows, ShardPlan, Writer
from hasten.engine.error_messages import translate_disk_errors, writable
from hasten.engine.run_dir import TEMPORARY, atomic_write

FORMAT = 3  # version of the output: increase it with every change that changes the files
PART_BYTES = 256_000_000  # of the original in one part, by default
RESUME_ADVICE = "complete parts stay there; free some space, and start the same command again to resume"
MANIFEST_TYPES = {"settings": dict, "parts done": list, "skipped_rows": list}
TARGET_FORMATS = {  # of each format
    **dict.fromkeys(("parquet", "feather", "csv"), ("parquet", "feather", "tfrecord", "rows")),
    "tfrecord": ("parquet", "feather", "rows"),
    "rows": ("parquet", "feather", "tfrecord"),
    "images": ("webdataset", "rows"),
    "webdataset": ("webdataset", "rows"),
    "tokens": (),
}


def convert(
    path: str | Path,
    out: str | Path,
    *,
    to: str,
    target: str | None = None,
    fill: float | None = None,
    resize: int | None = None,
    shards: int | None = None,
    max_bad_rows: int | None = None,
    on_progress: ProgressCallback = no_progress,
) -> dict:
    """Stores samples in another format. Called again after it was killed, it resumes.

    Args:
        path: A directory, a file or a pattern; of several formats, the one with the most files is converted.
        out: The output directory; a new one, or one where this conversion was begun.
        to: "parquet" or "feather", without compression; "tfrecord" of ``tf.train.Example``, where fractions are
            float32; "rows", a ``.npy`` matrix for each column; "webdataset", tar shards for images.
        target: With "rows", the column of a table that is stored separately from the others, which become one float32
            matrix if they are numeric. Strings become class indices.
        fill: Replaces missing numbers, which "tfrecord" and "rows" cannot express.
        resize: Images become squares of this side in pixels, stored as JPEG (quality 90) in "webdataset"; two images of
            a sample whose names differ only in ``.jpg`` and ``.png`` are refused.
        shards: Number of files to write; None means one for every 256 MB of the original. The matrices of "rows" are
            never split.
        max_bad_rows: Skip up to this many unreadable rows and list them in ``skipped.jsonl``; None fails at the first.
            A file that cannot be opened counts as one, and all its rows are skipped.
        on_progress: Progress callback.

    Returns:
        "path", "out", "from" and "to" (formats), "resize", "rows", "skipped_rows" (number), "skipped_files" (number),
        "files" (names), "bytes" and "bytes_before" (of the output and of the original), "digest" (of the content that
        was read back), "verified" (True), "classes" (class names in the order of their indices, also in
        ``conversion.json``; None if there are none), "others" (number of files of other formats at the path, by
        format), "seconds", "written" (rows of this call), and "open" (code that opens the output).

    Raises:
        ConfigurationError: An unknown format, another conversion in the directory, a directory that cannot be written
            to, or values that the format cannot express.
        RunError: The disk is full, a row cannot be read, or a part differs from what was written.
    """
    start = perf_counter()
    fill = fill.item() if isinstance(fill, numpy.generic) else fill  # the manifest holds it as JSON
    (kind, files), *others = formats_at(path)
    _check_request(kind, to, target, fill, {"resize": resize, "shards": shards, "max_bad_rows": max_bad_rows})
    directory, is_directory = Path(plain(out)), Path(plain(path)).is_dir()
    if is_directory and Path(os.path.realpath(directory)).is_relative_to(os.path.realpath(plain(path))):
        problem = "where it would be read as a part of the original"
        raise ConfigurationError(f"{out} is inside {path}, {problem}; choose another --out")
    files, skipped_files = select_openable(kind, files, max_bad_rows or 0)
    where = plain(path) if kind.name == "images" and is_directory else files
    faults = BadRowPolicy((max_bad_rows or 0) - len(skipped_files))
    reader = RowReader(kind, where, files, target, fill, resize, faults=faults, every_member=to == "webdataset")
    size = sum(size for _, size, _ in reader.signatures())
    plan = ShardPlan(reader, directory, _num_parts(reader, shards, size))
    reader.check_members(to)
    settings = {"format": FORMAT, "to": to, "parts": plan.parts, "max_bad_rows": max_bad_rows, **_settings(reader)}
    with _lock_output(plan.directory, settings) as manifest:
        plan.done, manifest["skipped files"] = manifest["parts done"], skipped_files
        faults.restore(manifest["skipped_rows"])
        written = 0 if "finished" in manifest else _write_missing(to, plan, manifest, on_progress)
    output_files = [plan.directory / name for name in manifest["files"]]
    if missing := [file for file in output_files if not file.exists()]:
        raise RunError(f"{missing[0]} was removed after it was written; remove {plan.directory} and start again")
    return {
        "path": str(path),
        "out": str(directory),
        "from": kind.name,
        "to": to,
        "resize": resize,
        "rows": plan.rows_before(plan.parts),
        "skipped_rows": len(manifest["skipped_rows"]),
        "skipped_files": len(skipped_files),
        "files": [file.name for file in output_files],
        "bytes_before": size,
        "bytes": sum(file.stat().st_size for file in output_files),
        "digest": _hash("".join(digest for _, digest in plan.done)),
        "verified": True,
        "classes": manifest["classes"],
        "others": count_by_title(others),
        "written": written,
        "open": _opening_code(to, manifest, plan.directory, resize),
        "seconds": perf_counter() - start,
    }


def _num_parts(reader: RowReader, shards: int | None, size: int) -> int:
    if not reader.rows:
        files = reader.files
        raise ConfigurationError(f"the {len(files)} files hold no rows" if files[1:] else f"{files[0]} holds no rows")
    if shards is not None and shards > reader.rows:
        advice = f"use --shards {reader.rows} or fewer"
        raise ConfigurationError(f"cannot write {reader.rows} rows to {shards} files; {advice}")
    return shards or min(max(1, round(size / PART_BYTES)), reader.rows)


def _write_missing(to: str, plan: ShardPlan, manifest: dict, on_progress: ProgressCallback) -> int:
    """Writes the parts that are not in the manifest yet; returns the rows written. RunError if a row cannot be read."""
    try:
        with translate_disk_errors(plan.directory, RESUME_ADVICE):
            writer = WRITERS[to](plan)
            return _write_parts(writer, plan, manifest, on_progress)
    except (ConfigurationError, BadRow) as error:
        if not plan.done:
            _remove_output(plan.directory)
            with suppress(OSError):
                plan.directory.rmdir()
        if isinstance(error, ConfigurationError):
            raise
        # parts that exist are those of the original as it was, without skipped rows
        start = "with another --out" if plan.done else "again"
        advice = f"repair it, or remove it, and start {start}, or skip some bad rows: --max-bad-rows 10"
        raise RunError(f"{error}; {advice}") from None


def _write_parts(writer: Writer, plan: ShardPlan, manifest: dict, on_progress: ProgressCallback) -> int:
    """Writes missing parts, finishes the output, returns the rows written. RunError if the original changed."""
    first, rows, start, written = plan.range(len(plan.done))[0], plan.reader.rows, perf_counter(), 0

    def report(more: int) -> None:
        nonlocal written
        written += more
        rate = written / max(perf_counter() - start, 1e-9)
        done = first + written
        on_progress(f"converting, {rate:,.0f} rows/s", done / rows, (rows - done) / max(rate, 1e-9))

    try:
        for part in range(len(plan.done), plan.parts):
            _write_part(part, writer, plan, manifest, report)
    finally:
        if skipped := manifest["skipped files"] + plan.reader.faults.listed():  # also if the conversion failed
            _write(plan.directory / SKIPPED, "".join(f"{json.dumps(row)}\n" for row in skipped))
    if _settings(plan.reader)["original"] != manifest["settings"]["original"]:
        advice = "choose another --out, and start again when no process writes to the original"
        raise RunError(f"the original changed while it was converted; {advice}")
    is_plain_table = plan.reader.kind.is_table and plan.reader.target is None
    classes = None if is_plain_table else class_names(plan.reader.source, plan.reader.files)
    manifest |= writer.finish() | {"classes": classes, "finished": True}
    _save_manifest(plan.directory, manifest)
    return written


def _write_part(part: int, writer: Writer, plan: ShardPlan, manifest: dict, report: ReportRows) -> None:
    expected = writer.write(part, report)
    skipped = plan.reader.faults.listed()
    if not expected.rows:
        advice = "repair it, or use fewer --shards"
        raise RunError(f"no row of part {part} can be read, the first is {skipped[0]['where']}; {advice}")
    actual = writer.read_back(part)
    if (expected.rows, expected.hexdigest()) != (actual.rows, actual.hexdigest()):
        remedy = "check the disk, and start the same command again"
        raise RunError(f"part {part} of {plan.directory} differs from what was written; {remedy}")
    plan.done.append((actual.rows, actual.hexdigest()))
    manifest["skipped_rows"] = skipped
    _save_manifest(plan.directory, manifest)


def _settings(reader: RowReader) -> dict:
    settings = reader.fingerprint()
    original = _hash(json.dumps(settings.pop("files")))
    return {**settings, "original": original}


def _check_request(
    kind: StorageFormat, to: str, target: str | None, fill: float | None, counts: dict[str, int | None]
) -> None:
    if to not in WRITERS:
        raise ConfigurationError(f"unknown target format {to!r}{suggest(to, WRITERS)}")
    targets = TARGET_FORMATS[kind.name]
    if to not in targets:
        advice = f"possible are {' and '.join(targets)}" if targets else "this is the fastest format already"
        raise ConfigurationError(f"{kind.title} cannot be stored as {to}; {advice}")
    if (target is not None or fill is not None) and not (kind.is_table and to in ("rows", "tfrecord")):
        raise ConfigurationError("--target and --fill apply to a table that is converted to rows or tfrecord")
    if target is not None and to != "rows":
        raise ConfigurationError("--target applies to --to rows; other formats store the target like other columns")
    if counts["resize"] is not None and kind.name not in ("images", "webdataset"):
        raise ConfigurationError(f"--resize applies to images; {kind.title} contain none")
    if kind.name == to == "webdataset" and counts["resize"] is None:
        raise ConfigurationError("the data are tar shards already; use --resize 256 to make the images smaller")
    for name, value in counts.items():
        at_least(name, value, 1, optional=True)
    if to == "rows" and counts["shards"] not in (None, 1):
        raise ConfigurationError("--to rows writes one file per column, which is never split; remove --shards")


def _opening_code(to: str, manifest: dict, directory: Path, resize: int | None) -> str:
    """The Python expression that opens the output, such as ``parquet("out/*.parquet")``, for the user."""
    if to != "rows":
        option = f", resize={resize}" if to == "webdataset" and resize else ""
        return f'{to}("{directory}"{option})'
    if manifest["is_tuple"] or len(manifest["files"]) == 1:
        return f"arrays({', '.join(repr(str(directory / file)) for file in manifest['files'])})"
    name, file = next(iter(manifest["columns"].items()))
    return f"arrays({{{name!r}: {str(directory / file)!r}, ...}})"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ---- output directory


@contextmanager
def _lock_output(directory: Path, settings: dict) -> Iterator[dict]:
    """Locks the output directory and yields its manifest. The lock is ``flock`` on the directory itself: a lock file
    would stay among the files. ConfigurationError if another process holds it, the directory cannot be written to, or
    it contains anything but this conversion.
    """
    with writable(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    try:
        with writable(directory):
            manifest = _lock_and_load(handle, directory, settings)
        yield manifest
    finally:
        os.close(handle)


def _lock_and_load(handle: int, directory: Path, settings: dict) -> dict:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"another process converts into {directory}; wait for it, or choose another --out"
        raise ConfigurationError(message) from None
    manifest = load_manifest(str(directory))
    if not all(isinstance(manifest.get(name), kind) for name, kind in MANIFEST_TYPES.items()):  # none, or damaged
        # all that a conversion leaves if it is killed before its first manifest is complete
        if set(os.listdir(directory)) - {f"{MANIFEST}{TEMPORARY}"}:
            raise ConfigurationError(f"{directory} is not empty and contains no conversion; choose another --out")
        manifest = {"settings": settings, "parts done": [], "skipped_rows": []}
    else:
        _check_same_settings(directory, manifest["settings"], settings)
    if "finished" not in manifest:
        _save_manifest(directory, manifest)
    return manifest


def _check_same_settings(directory: Path, old: dict, new: dict) -> None:
    for name, value in new.items():
        before = old.get(name)
        if before != value and not (before != before and value != value):  # NaN equals NaN here
            difference = f"{name.replace('_', ' ')} {before}, not {value}"
            if name == "original":
                difference = "the original has changed since"
            raise ConfigurationError(f"{directory} contains another conversion ({difference}); choose another --out")


def _save_manifest(directory: Path, manifest: dict) -> None:
    """Writes conversion.json into the output directory."""
    _write(directory / MANIFEST, json.dumps(manifest, indent=1))


def _remove_output(directory: Path) -> None:
    """Removes the files that a conversion wrote to ``directory``, because it cannot be resumed."""
    parts = (path for path in directory.iterdir() if OWN_PART.fullmatch(path.name))
    for path in (*parts, directory / MANIFEST, directory / SKIPPED):
        path.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    atomic_write(path, lambda file: file.write(text.encode()), RESUME_ADVICE)
