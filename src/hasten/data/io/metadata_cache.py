"""Metadata cache: stores file lists and indexes in the user's cache directory for later processes.

An entry is an ``.npz`` file: its name and data (JSON as bytes), then arrays. The name is a hash of the key, which may
contain an address. A damaged or truncated entry counts as missing. Loading executes no code; joblib and diskcache would
use pickle.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy
from platformdirs import user_cache_path

FORMAT = 5  # version of the file format, and of the code that computes the content
TIMESTAMP_GRANULARITY_NS = 2_000_000_000  # a file changed within this time may change again with an equal timestamp

CacheEntry = tuple[Any, list[numpy.ndarray]]  # (JSON-serializable data, arrays)


def default_directory() -> Path:
    """Returns the environment variable HASTEN_CACHE, or hasten's directory in the user's cache directory. RuntimeError
    if the user has no home directory.
    """
    if os.environ.get("HASTEN_CACHE"):
        return Path(os.path.expanduser(os.environ["HASTEN_CACHE"]))
    return user_cache_path("hasten", appauthor=False).expanduser()


def load(key: list) -> CacheEntry | None:
    """Returns the entry under a key, or None if it is missing, damaged or of another key."""
    with suppress(Exception), open(path := _path(key), "rb") as file:
        stored = numpy.load(file, allow_pickle=False)  # zipfile compares checksums
        content, *arrays = (stored[name] for name in stored.files)
        name, data = json.loads(content.tobytes())
        return (data, arrays) if name == path.name else None
    return None


def store(key: list, data: Any, arrays: list[numpy.ndarray]) -> None:
    """Stores JSON data and numeric arrays, written to a temporary file and renamed; if that fails, stores and raises
    nothing.
    """
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home directory
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{uuid4().hex}.npz")
        try:
            numpy.savez(temporary, numpy.frombuffer(json.dumps([path.name, data]).encode(), numpy.uint8), *arrays)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _path(key: list) -> Path:
    name = hashlib.blake2b(json.dumps([FORMAT, *key]).encode(), digest_size=16).hexdigest()
    return default_directory() / "manifests" / f"{name}.manifest"
