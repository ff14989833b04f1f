"""One ``tf.train.Example`` message at a time: parsed whatever way it was written, and written in the usual way.

Wire format: https://protobuf.dev/programming-guides/encoding. A map is a list of (key = 1, value = 2) messages, and of two
entries with one key the last holds; unknown fields are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import numpy
import torch

from hasten.contract.errors import Refusal

KINDS = {1: "bytes", 2: "float", 3: "int64"}  # by the number of the field in Feature
NUMBERS = {kind: number for number, kind in KINDS.items()}
VARINT, EIGHT, TEXT, FOUR = 0, 1, 2, 5  # wire types
Message = dict[str, tuple[str | None, list]]  # name: (kind, values)


def parsed(message: bytes) -> Message:
    """The features of a message.

    Raises:
        ValueError: it is no such message, or damaged.
    """
    features: Message = {}
    for number, inside in _texts(message):
        for _, entry in _texts(inside) if number == 1 else ():
            parts = dict(_texts(entry))
            features[parts.get(1, b"").decode()] = _feature(parts.get(2, b""))
    return features


def encoded(features: Mapping) -> bytes:
    """A message from values: byte strings, texts, numbers, lists of them, arrays or tensors.

    Raises:
        Refusal: a value is none of these.
    """
    return written({name: _listed(name, value) for name, value in features.items()})


def written(features: Message) -> bytes:
    """A message in the usual way: numbers packed, nothing else in it."""
    entries = [
        _text(1, name.encode()) + _text(2, _text(NUMBERS[kind], LISTS[kind](values)) if kind else b"")
        for name, (kind, values) in features.items()
    ]
    return _text(1, b"".join(_text(1, entry) for entry in entries))


# ---- parsing


def _feature(message: bytes) -> tuple[str | None, list]:
    kind, values = None, []
    for number, inside in _texts(message):
        if number in KINDS:
            values = values if KINDS[number] == kind else []  # of a oneof the last holds
            kind = KINDS[number]
            values += VALUES[kind](inside)
    return kind, values


def _strings(message: bytes) -> list[bytes]:
    return [text for number, text in _texts(message) if number == 1]


def _floats(message: bytes) -> list[float]:
    values: list[float] = []
    for number, kind, value in _fields(message):
        if number == 1 and kind == TEXT and len(value) % 4:
            raise ValueError("a list of floats is cut off")
        if number == 1 and kind in (TEXT, FOUR):
            values += struct.unpack(f"<{len(value) // 4}f", value)
    return values


def _integers(message: bytes) -> list[int]:
    values: list[int] = []
    for number, kind, value in _fields(message):
        if number == 1 and kind == VARINT:
            values.append(value)
        elif number == 1 and kind == TEXT:
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                values.append(one)
    return [value - (1 << 64) if value >> 63 else value for value in values]


VALUES = {"bytes": _strings, "float": _floats, "int64": _integers}


def _texts(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields that have a length."""
    return ((number, value) for number, kind, value in _fields(message) if kind == TEXT)


def _fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(number, wire type, value) of each field."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if not number or kind not in (VARINT, EIGHT, TEXT, FOUR):
            raise ValueError(f"it has a field of an unknown form (number {number}, type {kind})")
        if kind == VARINT:
            value, at = _varint(message, at)
            yield number, kind, value
            continue
        size = {EIGHT: 8, FOUR: 4}.get(kind)
        if size is None:
            size, at = _varint(message, at)
        if at + size > len(message):
            raise ValueError("a field goes on after the end")
        yield number, kind, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("a number has no end")
        byte, at = message[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError("a number is longer than 64 bits")


# ---- writing


def _listed(name: str, value) -> tuple[str, list]:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, (bytes, str)) or (isinstance(value, (list, tuple)) and value and isinstance(value[0], (bytes, str))):
        texts = [value] if isinstance(value, (bytes, str)) else value
        return "bytes", [text.encode() if isinstance(text, str) else text for text in texts]
    numbers = numpy.asarray(value)
    if numbers.dtype.kind not in "fiub":
        raise Refusal(f"feature {name!r} is a {type(value).__name__}; an Example holds byte strings, floats and whole numbers")
    return "float" if numbers.dtype.kind == "f" else "int64", numbers.ravel().tolist()


LISTS = {
    "bytes": lambda values: b"".join(_text(1, value) for value in values),
    "float": lambda values: _text(1, struct.pack(f"<{len(values)}f", *values)) if values else b"",
    "int64": lambda values: _text(1, b"".join(_number(value & 0xFFFFFFFFFFFFFFFF) for value in values)) if values else b"",
}


def _text(number: int, content: bytes) -> bytes:
    return _number(number << 3 | TEXT) + _number(len(content)) + content


def _number(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
