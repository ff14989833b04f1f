"""``hasten data convert``: stores the same samples in another format, part by part, and reads each part back.

The output folder contains the data and ``conversion.json``: the settings, the number of rows and the hash of each
complete part, and the skipped rows. A killed conversion resumes with the first part that is not among them.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from hasten.core.errors import ConfigurationError, RunError, suggest
from hasten.core.progress import ProgressCallback, no_progress
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.source import BadRow
from hasten.datatools.advice import estimated_gain, measured_gain
from hasten.datatools.format_detection import SKIPPED, StorageFormat, classes_of, counted, kinds_at, openable
from hasten.datatools.output_lock import keep, lock_output, put, swept
from hasten.datatools.row_reader import RowReader
from hasten.datatools.shard_plan import ShardPlan, Storage, Tell, translate_write_errors
from hasten.datatools.writers import STORAGES

FORMAT = 1  # version of the output: increase it with every change that changes the files
PART_BYTES = 256_000_000  # of the original in one part, by default
GAIN_SECONDS = 2.0  # for each side of the final comparison
ESTIMATE_SECONDS = 1.0  # for each side of the comparison before the conversion
GO_ON = "what is whole stays there; make room, and start the same command again"
FORMS = {
    **dict.fromkeys(("parquet", "feather", "csv"), ("parquet", "feather", "tfrecord", "rows")),
    "tfrecord": ("parquet", "feather", "rows"),
    "rows": ("parquet", "feather", "tfrecord"),
    "images": ("shards", "rows"),
    "shards": ("shards", "rows"),
    "tokens": (),
}  # the target formats of each format


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
    watch: ProgressCallback = no_progress,
) -> dict:
    """Stores samples in another format. Called again after it was killed, it resumes.

    Args:
        path: a folder, a file or a pattern; of several formats, the one with the most files is converted.
        out: the output folder; a new one, or one where this conversion was begun.
        to: "parquet" or "feather", without compression; "tfrecord" of ``tf.train.Example``, whose fractions are
            float32; "rows", a ``.npy`` matrix for each column; "shards", tar files in WebDataset's layout, for images.
        target: with "rows", this column of a table is stored apart from the others, which are one float32 matrix if
            they are numbers. Text becomes class numbers.
        fill: replaces missing numbers, which "tfrecord" and "rows" cannot express.
        resize: images become squares of this side in pixels, stored as JPEG (quality 90) in "shards".
        shards: number of files to write; None: one for every 256 MB of the original. The matrices of "rows" are never
        split.
        skip_bad: skip up to this many unreadable rows and list them in ``skipped.jsonl``; None: the first one ends the
            conversion. A file that cannot be opened counts as one, and all its rows are skipped.
        watch: progress.

    Returns:
        "out", "to", "rows", "skipped_rows" (rows that were left out), "skipped_files" (left out as a whole), "files",
        "bytes", "bytes_before", "digest" (of the content, as it was read back), "classes" (their words in the order of
        their numbers, which ``conversion.json`` keeps, too; None where there are none), "others" (files of other forms
        at the path, by form), "seconds", "written" (rows of this call), "open" (how it is read), and "gain": what
        ``gain_of`` tells of rows a second on one core, and the ratio that was "estimated".

    Raises:
        Refusal: no such form, another conversion in the folder, a folder that cannot be written to, values that the
        form cannot hold.
        Failure: the disk is full, a row that cannot be read, or a part that is not what was written.
    """
    began = perf_counter()
    (kind, files), *others = kinds_at(path)
    _refuse_what_cannot_be(kind, to, target, fill, {"resize": resize, "shards": shards, "max_bad_rows": max_bad_rows})
    if os.path.isdir(path) and os.path.join(os.path.realpath(out), "").startswith(
        os.path.join(os.path.realpath(path), "")
    ):
        raise ConfigurationError(
            f"{out} lies in {path}, where it would be read as a part of the original; choose another --out"
        )
    files, lost = openable(kind, files, max_bad_rows or 0)
    where = str(path) if kind.name == "images" else files
    reading = RowReader(kind, where, files, target, fill, resize, faults=BadRowPolicy((max_bad_rows or 0) - len(lost)))
    size = sum(size for _, size, _ in reading.stamps())
    plan = ShardPlan(reading, Path(out), _parts(reading, shards, size))
    with lock_output(
        plan.folder,
        {"format": FORMAT, "to": to, "parts": plan.parts, "max_bad_rows": max_bad_rows, **_settings(reading)},
    ) as note:
        plan.done, note["skipped files"] = note["parts done"], lost
        reading.faults.restore(note["skipped_rows"])
        written = 0 if "finished" in note else _written(to, plan, note, watch)
    watch("measuring what it gives", 1.0, None)
    found = [plan.folder / name for name in note["files"]]
    if gone := [file for file in found if not file.exists()]:
        raise RunError(f"{gone[0]} is gone since it was written; remove {plan.folder} and start again")
    return {
        "path": str(path),
        "out": str(out),
        "from": kind.name,
        "to": to,
        "resize": resize,
        "rows": plan.rows_before(plan.parts),
        "skipped_rows": len(note["skipped_rows"]),
        "skipped_files": len(lost),
        "files": [file.name for file in found],
        "bytes_before": size,
        "bytes": sum(file.stat().st_size for file in found),
        "digest": _joined([digest for _, digest in plan.done]),
        "verified": True,
        "classes": note["classes"],
        "others": counted(others),
        "written": written,
        "open": _reader(to, note, plan.folder, resize),
        "seconds": perf_counter() - began,
        "gain": {"estimated": note["estimated"], **measured_gain(reading, to, [*map(str, found)], GAIN_SECONDS)},
    }


def _parts(reading: RowReader, shards: int | None, size: int) -> int:
    """The number of parts that the rows are split into."""
    if not reading.rows:
        raise ConfigurationError(
            f"{reading.files[0]} holds no rows"
            if len(reading.files) == 1
            else f"the {len(reading.files)} files hold no rows"
        )
    if shards is not None and shards > reading.rows:
        raise ConfigurationError(
            f"{reading.rows} rows do not make {shards} files; say --shards {reading.rows} or fewer"
        )
    return shards or min(max(1, round(size / PART_BYTES)), reading.rows)


def _written(to: str, plan: ShardPlan, note: dict, watch: ProgressCallback) -> int:
    """Writes the missing parts; returns their number of rows."""
    try:
        with translate_write_errors(plan.folder, GO_ON):
            storage = STORAGES[to](plan)
            if "estimated" not in note:
                note["estimated"] = estimated_gain(plan.reading, to, ESTIMATE_SECONDS)
            return _write(storage, plan, note, watch)
    except ConfigurationError:
        if not plan.done:
            swept(plan.folder)  # nothing was written
            with suppress(OSError):
                plan.folder.rmdir()
        raise
    except BadRow as fault:
        raise RunError(
            f"{fault}; mend it or take it away and start again, or let some be left out: --max-bad-rows 10"
        ) from None


def _write(storage: Storage, plan: ShardPlan, note: dict, watch: ProgressCallback) -> int:
    """Writes the missing parts with progress, then finishes the output; returns their number of rows."""
    first, rows, began, written = plan.range(len(plan.done))[0], plan.reading.rows, perf_counter(), 0

    def tell(more: int) -> None:
        nonlocal written
        written += more
        rate = written / max(perf_counter() - began, 1e-9)
        watch(f"converting, {rate:,.0f} rows/s", (first + written) / rows, (rows - first - written) / max(rate, 1e-9))

    try:
        for number in range(len(plan.done), plan.parts):
            _write_part(number, storage, plan, note, tell)
    finally:
        if skipped := note["skipped files"] + plan.reading.faults.listed():  # also if the conversion failed
            put(plan.folder / SKIPPED, "".join(f"{json.dumps(row)}\n" for row in skipped))
    if _settings(plan.reading)["original"] != note["settings"]["original"]:
        raise RunError(
            "the original changed while it was converted; choose another --out, "
            "and start again when nobody writes to it"
        )
    note |= storage.finish() | {"classes": _classes(plan.reading), "finished": True}
    keep(plan.folder, note)
    return written


def _write_part(number: int, storage: Storage, plan: ShardPlan, note: dict, tell: Tell) -> None:
    given = storage.write(number, tell)
    skipped = plan.reading.faults.listed()
    if not given.rows:
        raise RunError(
            f"no row of part {number} can be read, the first is {skipped[0]['where']}; mend it, or take fewer --shards"
        )
    read = storage.read_back(number)
    if (given.rows, given.hexdigest()) != (read.rows, read.hexdigest()):
        raise RunError(
            f"part {number} of {plan.folder} is not what was written; "
            "look at the disk, and start the same command again"
        )
    plan.done.append([read.rows, read.hexdigest()])
    note["skipped_rows"] = skipped
    keep(plan.folder, note)


def _classes(reading: RowReader) -> list[str] | None:
    """The class names whose text becomes numbers; None if there are none."""
    return None if reading.kind.is_table and reading.target is None else classes_of(reading.source, reading.files)


def _settings(reading: RowReader) -> dict:
    made_of = reading.fingerprint()
    files = hashlib.blake2b(json.dumps(made_of.pop("files")).encode(), digest_size=16).hexdigest()
    return {**made_of, "original": files}


# ---- what is refused, and what is told


def _refuse_what_cannot_be(kind: StorageFormat, to: str, target, fill, counts: dict) -> None:
    if to not in STORAGES:
        raise ConfigurationError(f"nothing can be stored as {to!r}{suggest(to, STORAGES)}")
    if to not in FORMS[kind.name]:
        better = (
            f"they can become {' or '.join(FORMS[kind.name])}"
            if FORMS[kind.name]
            else "they are in their fastest form already"
        )
        raise ConfigurationError(f"{kind.title} cannot be stored as {to}; {better}")
    if (target is not None or fill is not None) and not (kind.is_table and to in ("rows", "tfrecord")):
        raise ConfigurationError("--target and --fill are for a table that becomes rows or tfrecord")
    if target is not None and to != "rows":
        raise ConfigurationError(
            "--target is for --to rows; in every other form the target stays a column like the others"
        )
    if counts["resize"] is not None and kind.name not in ("images", "shards"):
        raise ConfigurationError(f"--resize is for pictures; {kind.title} hold none")
    if kind.name == to == "shards" and counts["resize"] is None:
        raise ConfigurationError("tar shards are tar shards already; say --resize 256 to make their pictures smaller")
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigurationError(f"{name} must be a whole number of at least 1, not {value!r}")
    if to == "rows" and counts["shards"] not in (None, 1):
        raise ConfigurationError(
            "rows are one file a column, which is mapped into memory as a whole; leave --shards out"
        )


def _reader(to: str, note: dict, folder: Path, resize: int | None) -> str:
    """The call that opens the output, as Python code."""
    if to == "shards" and resize:
        return f'webdataset("{folder}", resize={resize})'
    if to != "rows":
        return f'{to}("{folder}")'
    if note["is_tuple"] or len(note["files"]) == 1:
        return f"arrays({', '.join(repr(str(folder / file)) for file in note['files'])})"
    name, file = next(iter(note["columns"].items()))
    return f"arrays({{{name!r}: {str(folder / file)!r}, ...}})"


def _joined(digests: list[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
