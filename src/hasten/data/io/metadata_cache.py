"""Metadata cache: stores file lists and indexes in the user's cache directory for later processes.

An entry is JSON followed by NumPy arrays, preceded by a hash of its key and content. A damaged or truncated entry, or
one stored under another key, counts as missing. Loading executes no code; joblib and diskcache would use pickle.
"""

import hashlib
import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy
from platformdirs import user_cache_path

FORMAT = 2  # version of the file format, and of the code that computes the content
TIMESTAMP_GRANULARITY_NS = 2_000_000_000  # a file changed within this time may change again with an equal timestamp
HASH_BYTES = 16
ERRORS = (OSError, ValueError, EOFError, RuntimeError)  # RuntimeError: the user has no home directory

CacheEntry = tuple[Any, list[numpy.ndarray]]  # (JSON-serializable data, arrays)


def default_folder() -> Path:
    """Returns the environment variable HASTEN_CACHE, or hasten's folder in the user's cache directory. RuntimeError if
    the user has no home directory.
    """
    if os.environ.get("HASTEN_CACHE"):
        return Path(os.environ["HASTEN_CACHE"])
    return user_cache_path("hasten", appauthor=False).expanduser()


def load(key: list) -> CacheEntry | None:
    """Returns the entry under a key, or None if it is missing or damaged."""
    key_bytes = _key_bytes(key)
    with suppress(*ERRORS):
        content = _path(key_bytes).read_bytes()
        if content[:HASH_BYTES] == _hash(key_bytes, memoryview(content)[HASH_BYTES:]):
            file = io.BytesIO(content)
            file.seek(HASH_BYTES)
            arrays = []
            while file.tell() < len(content):
                arrays.append(numpy.load(file, allow_pickle=False))
            return json.loads(arrays[0].tobytes()), arrays[1:]
    return None


def store(key: list, data: Any, arrays: list[numpy.ndarray]) -> None:
    """Stores JSON data and numeric arrays, written to a temporary file and renamed; if that fails, stores and raises
    nothing.
    """
    key_bytes, content = _key_bytes(key), io.BytesIO()
    for array in (numpy.frombuffer(json.dumps(data).encode(), numpy.uint8), *arrays):
        numpy.save(content, array, allow_pickle=False)
    with suppress(*ERRORS):
        path = _path(key_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{uuid4().hex}")
        try:
            temporary.write_bytes(_hash(key_bytes, content.getbuffer()) + content.getbuffer())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _key_bytes(key: list) -> bytes:
    return json.dumps([FORMAT, *key]).encode()


def _path(key: bytes) -> Path:
    return default_folder() / "manifests" / f"{_hash(key, b'').hex()}.manifest"


def _hash(key: bytes, content: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(key, digest_size=HASH_BYTES)
    digest.update(content)
    return digest.digest()
