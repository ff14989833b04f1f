"""The output folder of a conversion: its manifest, and a lock that admits one writing process.

The lock is ``flock`` on the folder itself: a lock file, as filelock needs it, would be left among the converted files.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hasten.core.errors import ConfigurationError
from hasten.datatools.format_detection import MANIFEST, SKIPPED
from hasten.datatools.shard_plan import PART, fsync
from hasten.engine.error_messages import writable


@contextmanager
def lock_output(folder: Path, settings: dict) -> Iterator[dict]:
    """Locks the output folder and yields its manifest.

    Raises:
        Refusal: the folder cannot be written to, contains other files or another conversion, or another process writes
        to it.
    """
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        with writable(folder):
            note = _opened(handle, folder, settings)
        yield note
    finally:
        os.close(handle)


def _opened(handle: int, folder: Path, settings: dict) -> dict:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(
            f"another process converts into {folder}; wait for it, or choose another --out"
        ) from None
    note = _note(folder)
    if note is None and any(not name.endswith(PART) for name in os.listdir(folder)):
        raise ConfigurationError(f"{folder} is not empty and holds no conversion; choose another --out")
    for name, value in settings.items() if note else ():
        then = note["settings"].get(name)
        if then != value and not (then != then and value != value):  # NaN equals NaN here
            difference = _difference(name, then, value)
            raise ConfigurationError(f"{folder} holds another conversion ({difference}); choose another --out")
    if note is None:
        swept(folder)
        note = {"settings": settings, "parts done": [], "skipped_rows": []}
    if "finished" not in note:
        keep(folder, note)
    return note


def _note(folder: Path) -> dict | None:
    try:
        note = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = (
            isinstance(note["settings"], dict)
            and isinstance(note["parts done"], list)
            and isinstance(note["skipped_rows"], list)
        )
        return note if whole else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep(folder: Path, note: dict) -> None:
    put(folder / MANIFEST, json.dumps(note, indent=1))


def put(path: Path, text: str) -> None:
    """Writes a small file completely or not at all."""
    beside = path.with_name(f"{path.name}{PART}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            fsync(file)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def swept(folder: Path) -> None:
    """Removes the files of a conversion that cannot be resumed."""
    for path in (*folder.glob(f"*{PART}"), folder / MANIFEST, folder / SKIPPED):
        path.unlink(missing_ok=True)


def _difference(name: str, then, now) -> str:
    return "the original has changed since" if name == "original" else f"{name.replace('_', ' ')} {then}, not {now}"
