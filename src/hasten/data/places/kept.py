"""What took long to find out, kept in the user's cache folder for the next start: words as JSON, numbers as plain arrays.

A kept file is named by what it is about, and begins with a hash of that and of all its bytes. So one that is damaged, cut off or about
something else is passed over as if it were not there, and found out anew. Nothing of it is ever executed.
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

from hasten.data.caching.cache_disk import default_folder

FORM = 2  # of what is kept; a change of what is written here, or of how it is found out, is a change of this number
SETTLED = 2_000_000_000  # nanoseconds; what changed just now may change again without a new time
HASH = 16  # bytes
TROUBLE = (OSError, ValueError, EOFError, RuntimeError)  # the last: of a user without a home

Found = tuple[Any, list[numpy.ndarray]]  # what JSON can say, and arrays


def recalled(about: list) -> Found | None:
    """What was kept; None where nothing was, or nothing whole."""
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


def keep(about: list, words, arrays: list[numpy.ndarray]) -> None:
    """Writes beside and renames, so that nobody reads half of it. Where that is not possible, it is found out again the next time."""
    key, content = _key(about), io.BytesIO()
    for array in (numpy.frombuffer(json.dumps(words).encode(), numpy.uint8), *arrays):
        numpy.save(content, array, allow_pickle=False)
    with suppress(*TROUBLE):
        kept = _place(key)
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(f".{uuid4().hex}")
        try:
            with open(beside, "wb") as file:
                file.write(_hash(key, content.getbuffer()))
                file.write(content.getbuffer())
            os.replace(beside, kept)
        finally:
            beside.unlink(missing_ok=True)


def _key(about: list) -> bytes:
    return json.dumps([FORM, *about]).encode()


def _place(key: bytes) -> Path:
    return default_folder() / "manifests" / f"{_hash(key, b'').hex()}.manifest"


def _hash(key: bytes, content) -> bytes:
    digest = hashlib.blake2b(key, digest_size=HASH)
    digest.update(content)
    return digest.digest()
