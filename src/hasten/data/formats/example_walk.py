"""Batches of ``tf.train.Example`` messages, walked through in step: where the values of each feature lie.

One NumPy operation reads the same part of all messages, each at its own position, so that unequal lengths and any order
of the features cost nothing. A message that is written in another way than usual is told apart, and left to others.
Wire format: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy

from hasten.data.formats.example_messages import NUMBERS

TAGS = {kind: number << 3 | 2 for kind, number in NUMBERS.items()}
FIRST, SECOND = 0x0A, 0x12  # the tags of fields 1 and 2 with a length


def lists_of(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray, names: Sequence[str], kinds: Sequence[str]):
    """Where the values of each feature of each message begin and end, and whether it is written as usual; shapes (features, messages)."""
    at, stop, usual = _located(data, begins, ends, [name.encode() for name in names])
    filled = stop > at
    first, last, fits = field_at(data, at, numpy.array([[TAGS[kind]] for kind in kinds]))
    fits &= last == stop
    number = numpy.array([[kind != "bytes"] for kind in kinds])
    some = filled & (last > first) & number
    if some.any():
        packed, packed_end, alone = field_at(data, first, FIRST)
        fits &= ~some | (alone & (packed_end == last))
        first, last = numpy.where(some, packed, first), numpy.where(some, packed_end, last)
    return numpy.where(filled, first, 0), numpy.where(filled, last, 0), (fits | ~filled) & usual


def _located(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray, names: list[bytes]):
    """Where the Feature messages begin and end, zeros where there is none, shapes (names, messages); and which messages are usual."""
    found = numpy.zeros((2, len(names), len(begins)), numpy.int64)
    number = {name: place for place, name in enumerate(names)}
    at, stop, usual = field_at(data, begins, FIRST)
    usual = (usual & (stop == ends)) | (begins == ends)
    rows = numpy.flatnonzero(usual & (begins < ends) & (at < stop))
    at, stop = at[rows], stop[rows]
    while len(rows):
        if (entry := _short_entry(data, at, stop)) is not None:
            name, value, at = entry
            if name in number:
                found[0, number[name], rows], found[1, number[name], rows] = value, at
            if not (going := at < stop).all():
                rows, at, stop = rows[going], at[going], stop[going]
            continue
        entry, entry_end, fits = field_at(data, at, FIRST)
        key, key_end, keyed = field_at(data, entry, FIRST)
        value, value_end, valued = field_at(data, key_end, SECOND)
        fits &= keyed & valued & (value_end == entry_end) & (entry_end <= stop)
        for name, which in _named(data, key, key_end, numpy.flatnonzero(fits)):
            if name in number:
                found[0, number[name], rows[which]] = value[which]
                found[1, number[name], rows[which]] = value_end[which]
        usual[rows[~fits]] = False
        going = fits & (entry_end < stop)
        at = entry_end
        if not going.all():
            rows, at, stop = rows[going], at[going], stop[going]
    return *found, usual


def _short_entry(data: numpy.ndarray, at: numpy.ndarray, stop: numpy.ndarray) -> tuple[bytes, numpy.ndarray, numpy.ndarray] | None:
    """(key, where the value begins, where it ends) where the next entries of all messages have one key and less than 128 bytes.

    Nearly all do, and then their first bytes are the same but for two lengths: one comparison reads them.
    """
    first = data[at[0] : at[0] + 4]
    length = 6 + int(first[-1])  # tag, length, tag, length, key, tag, length
    if length > 0x7F or int(at.max()) + length > len(data):
        return None
    heads = windows(data, length)[at]
    like = heads[0].copy()
    like[[0, 2, -2]] = FIRST, FIRST, SECOND
    same = heads == like
    same[:, 1] = heads[:, 1] == heads[:, -1] + (length - 2)  # the value ends where the entry does
    same[:, -1] = heads[:, -1] < 0x80 - (length - 2)
    value = at + length
    end = value + heads[:, -1]
    return (like[4:-2].tobytes(), value, end) if same.all() and (end <= stop).all() else None


def _named(data: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray, left: numpy.ndarray) -> Iterator[tuple[bytes, numpy.ndarray]]:
    """The keys that there are, and who has each; nearly always one that all share."""
    while len(left):
        name = data[begins[left[0]] : ends[left[0]]]
        same = ends[left] - begins[left] == len(name)
        letters = data.take(begins[left][:, None] + numpy.arange(len(name)), mode="clip")
        same &= (letters == name).all(axis=1)
        yield name.tobytes(), left[same]
        left = left[~same]


def windows(data: numpy.ndarray, width: int) -> numpy.ndarray:
    """The bytes from every place on, shape (places, width): a view, from which NumPy copies many pieces at once."""
    return numpy.ndarray((len(data) - width + 1, width), numpy.uint8, data, strides=(1, 1))


def field_at(data: numpy.ndarray, at: numpy.ndarray, tag: int):
    """(where the contents begin, where they end, whether it is that field) for a field with a length at each position."""
    fits = data.take(at, mode="clip") == tag
    length, begin = _varint(data, at + 1)
    return begin, begin + length, fits


def _varint(data: numpy.ndarray, at: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The small whole number at each position, and where the next thing is. What is too long is no length that fits."""
    byte = data.take(at, mode="clip")
    value, at, more = (byte & 0x7F).astype(numpy.int64), at + 1, byte > 0x7F
    for shift in range(7, 35, 7):
        if not more.any():
            break
        byte = data.take(at, mode="clip")
        value += ((byte & 0x7F) * more).astype(numpy.int64) << shift
        at, more = at + more, more & (byte > 0x7F)
    return value, at
