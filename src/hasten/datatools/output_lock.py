"""The output directory of a conversion: its manifest, and a lock that admits one writing process.

The lock is ``flock`` on the directory itself; a lock file, as the package filelock uses, would stay among the files.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hasten.core.errors import ConfigurationError
from hasten.datatools.format_detection import MANIFEST, SKIPPED, load_manifest
from hasten.datatools.shard_plan import PART, fsync
from hasten.engine.error_messages import writable

MANIFEST_TYPES = {"settings": dict, "parts done": list, "skipped_rows": list}


@contextmanager
def lock_output(directory: Path, settings: dict) -> Iterator[dict]:
    """Locks the output directory and yields its manifest. ConfigurationError if the directory cannot be written to,
    contains other files or another conversion, or another process writes to it.
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
        if any(not name.endswith(PART) for name in os.listdir(directory)):
            raise ConfigurationError(f"{directory} is not empty and contains no conversion; choose another --out")
        remove_output(directory)
        manifest = {"settings": settings, "parts done": [], "skipped_rows": []}
    else:
        _check_same_settings(directory, manifest["settings"], settings)
    if "finished" not in manifest:
        save_manifest(directory, manifest)
    return manifest


def _check_same_settings(directory: Path, old: dict, new: dict) -> None:
    for name, value in new.items():
        before = old.get(name)
        if before != value and not (before != before and value != value):  # NaN equals NaN here
            difference = f"{name.replace('_', ' ')} {before}, not {value}"
            if name == "original":
                difference = "the original has changed since"
            raise ConfigurationError(f"{directory} contains another conversion ({difference}); choose another --out")


def save_manifest(directory: Path, manifest: dict) -> None:
    """Writes conversion.json into the output directory."""
    write_atomically(directory / MANIFEST, json.dumps(manifest, indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Writes a temporary file and renames it to ``path``: a reader finds the old or the new text, never a part."""
    temporary = path.with_name(f"{path.name}{PART}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            fsync(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_output(directory: Path) -> None:
    """Removes the files that a conversion wrote to ``directory``, because it cannot be resumed."""
    for path in (*directory.glob(f"*{PART}"), directory / MANIFEST, directory / SKIPPED):
        path.unlink(missing_ok=True)
