"""Metadata cache: what took long to find out about files, stored in the user's cache directory for the next start.

An entry is JSON followed by plain arrays, under a hash of its key and its content. An entry that is damaged, truncated
or stored under another key is ignored as if it did not exist. Loading executes no code. joblib and diskcache would
pickle.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy

from hasten.data.cache.cache_disk import default_folder

FORM = 2  # version of the format, and of the code that computes the content
SETTLED = (
    2_000_000_000  # nanoseconds: a file that changed more recently may change again without a new modification time
)
HASH = 16  # bytes
TROUBLE = (OSError, ValueError, EOFError, RuntimeError)  # RuntimeError: the user has no home directory

Found = tuple[Any, list[numpy.ndarray]]  # (JSON-serializable data, arrays)


def load(about: list) -> Found | None:
    """The entry under a key; None if there is none, or a damaged one."""
    key = _key(about)
    with suppress(*TROUBLE):
        content = _place(key).read_bytes()
        if content[:HASH] == _hash(key, memoryview(content)[HASH:]):
            file = io.BytesIO(content)
            file.seek(HASH)
            arrays = []
            while file.tell() < len(content):
                arrays.append(numpy.load(file, allow_pickle=False))
            return json.loads(arrays[0].tobytes()), arrays[1:]
    return None


def store(about: list, words, arrays: list[numpy.ndarray]) -> None:
    """Stores an entry, written to a temporary file and renamed. If that fails, nothing is stored and nothing is raised.

    Args:
        about: the key, JSON-serializable.
        words: JSON-serializable data.
        arrays: of any shape and number type.
    """
    key, content = _key(about), io.BytesIO()
    for array in (numpy.frombuffer(json.dumps(words).encode(), numpy.uint8), *arrays):
        numpy.save(content, array, allow_pickle=False)
    with suppress(*TROUBLE):
        path = _place(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{uuid4().hex}")
        try:
            temporary.write_bytes(_hash(key, content.getbuffer()) + content.getbuffer())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _key(about: list) -> bytes:
    return json.dumps([FORM, *about]).encode()


def _place(key: bytes) -> Path:
    return default_folder() / "manifests" / f"{_hash(key, b'').hex()}.manifest"


def _hash(key: bytes, content) -> bytes:
    digest = hashlib.blake2b(key, digest_size=HASH)
    digest.update(content)
    return digest.digest()
