"""``hasten data convert``: the same samples in another form, part by part, each read back before it counts.

A folder of a conversion is what was written and ``conversion.json``: the settings, the rows and the hash of each part that is
whole. A killed conversion goes on with the first part that is not among them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from hasten.contract.errors import Failure, Refusal, nearest
from hasten.contract.watch import Watch, silent
from hasten.data.places.files import stamp
from hasten.data.source import BadRow
from hasten.data.storing.kinds import KINDS, MANIFEST, Kind, kind_of
from hasten.data.storing.parts import PART, Plan, Storage, into
from hasten.data.storing.readings import Reading
from hasten.data.storing.stages import pace
from hasten.data.storing.storages import STORAGES

FORMAT = 1  # of what is written; a change below that changes the files is a change of this number
PART_BYTES = 256_000_000  # of the original that become one part, where nobody says how many parts there are
GAIN_SECONDS = 2.0  # for each side of the comparison at the end
GO_ON = "what is whole stays there; make room, and start the same command again"
FORMS = {
    **dict.fromkeys(("parquet", "feather", "csv"), ("parquet", "feather", "tfrecord", "rows")),
    "tfrecord": ("parquet", "feather", "rows"),
    "rows": ("parquet", "feather", "tfrecord"),
    "images": ("shards", "rows"),
    "shards": ("shards", "rows"),
    "tokens": (),
}  # what each kind can be stored as


def convert(
    path: str | Path,
    out: str | Path,
    *,
    to: str,
    target: str | None = None,
    fill: float | None = None,
    resize: int | None = None,
    shards: int | None = None,
    watch: Watch = silent,
) -> dict:
    """Stores samples in another form; called again after it was killed, it goes on.

    Args:
        path: a folder, a file or a pattern.
        out: the folder of what is written; a new one, or one that this conversion has begun.
        to: "parquet" or "feather", without compression; "tfrecord" of ``tf.train.Example``, whose fractions are float32; "rows", a
            ``.npy`` matrix for each column; "shards", tar files in WebDataset's layout, for pictures.
        target: with "rows", this column of a table apart from the others, which are one float32 matrix if they are numbers.
        fill: what stands for missing numbers, as "tfrecord" and "rows" cannot say that one is missing.
        resize: pictures are made squares of so many pixels a side, and stored as JPEG (quality 90) in "shards".
        shards: files that are written; None: one for every 256 MB of the original. The matrices of "rows" are never cut.

    Returns:
        "out", "to", "rows", "files", "bytes", "bytes_before", "digest" (of the content, as it was read back), "seconds", "written"
        (rows of this call), "open" (how it is read), and "gain": rows a second, on one core, "before" and "after", and their "ratio".

    Raises:
        Refusal: no such form, another conversion in the folder, values that the form cannot hold.
        Failure: the disk is full or may not be written to, a row that cannot be read, or a part that is not what was written.
    """
    began = perf_counter()
    kind, files = kind_of(path)
    _refuse_what_cannot_be(kind, to, target, fill, resize, shards)
    reading = Reading(kind, str(path) if kind.name == "images" else files, files, target, fill, resize)
    if not reading.rows:
        raise Refusal(f"{path} holds no rows")
    size = sum(stamp(file)[1] for file in files)
    parts = min(shards or max(1, round(size / PART_BYTES)), reading.rows)
    plan = Plan(reading, Path(out), parts)
    with _claimed(plan.folder, {"format": FORMAT, "to": to, "parts": parts, **_settings(reading)}) as note:
        written = 0
        if "finished" not in note:
            try:
                with into(plan.folder, GO_ON):
                    written = _write(STORAGES[to](plan), plan, note, watch)
            except Refusal:
                if not note["parts done"]:
                    _swept(plan.folder)  # nothing was begun
                    with suppress(OSError):
                        plan.folder.rmdir()
                raise
            except BadRow as fault:
                raise Failure(f"{fault}; mend it or take it away, and start again") from None
    watch("measuring what it gives", 1.0, None)
    found = [plan.folder / name for name in note["files"]]
    if gone := [file for file in found if not file.exists()]:
        raise Failure(f"{gone[0]} is gone since it was written; remove {plan.folder} and start again")
    return {
        "path": str(path), "out": str(out), "from": kind.name, "to": to, "resize": resize, "rows": reading.rows,
        "files": [file.name for file in found], "bytes_before": size, "bytes": sum(file.stat().st_size for file in found),
        "digest": _joined([digest for _, digest in note["parts done"]]), "verified": True, "written": written,
        "open": _reader(to, note, plan.folder, resize), "seconds": perf_counter() - began, "gain": _gain(reading, to, [*map(str, found)]),
    }  # fmt: skip


def _write(storage: Storage, plan: Plan, note: dict, watch: Watch) -> int:
    """Writes the parts that are not there; returns how many rows they have."""
    done = note["parts done"]
    first, rows, began, written = plan.range(len(done))[0], plan.reading.rows, perf_counter(), 0
    _keep(plan.folder, note)

    def tell(more: int) -> None:
        nonlocal written
        written += more
        rate = written / max(perf_counter() - began, 1e-9)
        watch(f"converting, {rate:,.0f} rows/s", (first + written) / rows, (rows - first - written) / rate)

    for number in range(len(done), plan.parts):
        given = storage.write(number, tell)
        read = storage.read_back(number)
        if (given.rows, given.hexdigest()) != (read.rows, read.hexdigest()):
            raise Failure(f"part {number} of {plan.folder} is not what was written; look at the disk, and start the same command again")
        storage.keep(number)
        done.append([read.rows, read.hexdigest()])
        _keep(plan.folder, note)
    note |= storage.finish() | {"finished": True}
    _keep(plan.folder, note)
    return written


# ---- the folder


@contextmanager
def _claimed(folder: Path, settings: dict) -> Iterator[dict]:
    """The note about what is in the folder, which no other process may touch meanwhile.

    Raises:
        Refusal: it holds something else, another conversion, or somebody writes to it.
    """
    with into(folder, "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(f"another process converts into {folder}; wait for it, or choose another --out") from None
        note = _note(folder)
        if note is None and any(not name.endswith(PART) for name in os.listdir(folder)):
            raise Refusal(f"{folder} is not empty and holds no conversion; choose another --out")
        for name, value in settings.items() if note else ():
            if note["settings"].get(name) != value:
                raise Refusal(
                    f"{folder} holds another conversion ({_difference(name, note['settings'].get(name), value)}); choose another --out"
                )
        if note is None:
            _swept(folder)
        yield note or {"settings": settings, "parts done": []}
    finally:
        os.close(handle)


def _note(folder: Path) -> dict | None:
    try:
        note = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return note if {"settings", "parts done"} <= note.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _keep(folder: Path, note: dict) -> None:
    beside = folder / f"{MANIFEST}{PART}"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(note, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / MANIFEST)


def _swept(folder: Path) -> None:
    """Removes what nobody would go on with."""
    for path in (*folder.glob(f"*{PART}"), folder / MANIFEST):
        path.unlink(missing_ok=True)


def _settings(reading: Reading) -> dict:
    made_of = reading.identity()
    files = hashlib.blake2b(json.dumps(made_of.pop("files")).encode(), digest_size=16).hexdigest()
    return {**made_of, "original": files}


def _difference(name: str, then, now) -> str:
    return "the original has changed since" if name == "original" else f"{name} {then}, not {now}"


# ---- what is refused, and what is told


def _refuse_what_cannot_be(kind: Kind, to: str, target, fill, resize, shards) -> None:
    if to not in STORAGES:
        raise Refusal(f"nothing can be stored as {to!r}{nearest(to, STORAGES)}")
    if to not in FORMS[kind.name]:
        better = f"they can become {' or '.join(FORMS[kind.name])}" if FORMS[kind.name] else "they are in their fastest form already"
        raise Refusal(f"{kind.title} cannot be stored as {to}; {better}")
    if (target is not None or fill is not None) and not (kind.is_table and to in ("rows", "tfrecord")):
        raise Refusal("--target and --fill are for a table that becomes rows or tfrecord")
    if target is not None and to != "rows":
        raise Refusal("--target is for --to rows; in every other form the target stays a column like the others")
    if resize is not None and kind.name not in ("images", "shards"):
        raise Refusal(f"--resize is for pictures; {kind.title} hold none")
    if kind.name == to == "shards" and resize is None:
        raise Refusal("tar shards are tar shards already; say --resize 256 to make their pictures smaller")
    for name, value in {"resize": resize, "shards": shards}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise Refusal(f"{name} must be a whole number of at least 1, not {value!r}")
    if to == "rows" and shards not in (None, 1):
        raise Refusal("rows are one file a column, which is mapped into memory as a whole; leave --shards out")


def _reader(to: str, note: dict, folder: Path, resize: int | None) -> str:
    """The call that opens what was written."""
    if to == "shards" and resize:
        return f'shards("{folder}", resize={resize})'
    if to != "rows":
        return f'{to}("{folder}")'
    if note["is_tuple"] or len(note["files"]) == 1:
        return f"arrays({', '.join(repr(str(folder / file)) for file in note['files'])})"
    name, file = next(iter(note["columns"].items()))
    return f"arrays({{{name!r}: {str(folder / file)!r}, ...}})"


def _gain(reading: Reading, to: str, files: list[str]) -> dict:
    """Rows a second into batches, on one core, of the original and of what was written."""
    written = Reading(KINDS[to], files, files, resize=reading.resize if to == "shards" else None)
    try:
        before, after = (
            pace(replace(each, fill=0 if each.kind.is_table else None), GAIN_SECONDS)["batches"] for each in (reading, written)
        )
    except (Refusal, BadRow):  # missing text, which batches could not hold either
        return {"before": None, "after": None, "ratio": None}
    return {"before": before, "after": after, "ratio": after / before}


def _joined(digests: list[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
