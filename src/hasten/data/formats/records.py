"""TFRecord files, without TensorFlow: the framing, an index of the records, and their checksums.

A record is framed as (https://www.tensorflow.org/tutorials/load_data/tfrecord)

    uint64 length    uint32 masked CRC-32C of the length    bytes data[length]    uint32 masked CRC-32C of the data

so a file has to be walked through once to know where its records are; after that any of them is read at once. The
walk touches twelve bytes a record, and jumps over records of equal length many at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy

from hasten.contract.errors import Refusal, nearest
from hasten.data.formats import settings
from hasten.data.formats.checksums import crc32c, crc32c_of_rows, masked
from hasten.data.formats.example_messages import Message, parsed
from hasten.data.formats.examples import Malformed, columns_of, schema
from hasten.data.pipeline import Pipeline
from hasten.data.places.files import Lost, found, is_lost, is_remote, mapped_bytes, unchanged
from hasten.data.places.kept import Found
from hasten.data.places.passes import Tell, once, walked_through
from hasten.data.places.ranges import LONGEST, read_ranges, whole
from hasten.data.source import BadRow, Source, refuse_bad

SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
HEAD, TAIL = 12, 4  # bytes of framing before and after the data
SAMPLED = 64  # records that are looked at to learn what features there are
AT_ONCE = 1 << 14  # records of equal length that the walk jumps over at a time
WORTH = 8  # as many of them in a row, and it is tried
TOLD = 1 << 10  # records of unequal length, after which the walk tells how far it is
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x9c": "zlib", b"\x78\x01": "zlib", b"\x78\xda": "zlib"}


def tfrecord(
    paths: str | Path | Iterable[str | Path],
    features: Sequence[str] | Mapping | None = None,
    target: str | None = None,
    verify: bool = True,
) -> Pipeline:
    """Samples from TFRecord files of ``tf.train.Example`` messages.

    A batch is a dict of columns. Floats are float32, whole numbers int64, shape (rows, *shape); byte strings are a list.

    Args:
        paths: files, folders or patterns, local or remote. A remote file is read once to find its records; where they are is kept.
        features: the names that are wanted, or a dict from name to the shape of a sample: ``()`` for one number, ``(28, 28)``,
            None for lists of unequal length (a list of tensors), or ``(torch.uint8, (28, 28))`` for a byte string that holds
            little-endian numbers. Without it: all, as the first and some later records have them.
        target: the feature to predict; a batch is then the tuple (other features in their order, target).
        verify: compares every record with its checksum when it is first read.

    A file that is damaged, cut off, or cannot be read is one bad row after the records before the damage; without ``verify`` these are
    not sure either, and it is one bad row alone.

    Raises:
        Refusal: no file with a whole record, a feature that is not there.

    Source: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto
    """
    settings.name("target=", target)
    if features is not None:
        shaped = isinstance(features, Mapping)
        named = settings.names("features=", list(features) if shaped else features)
        features = features if shaped else named
    return Pipeline(Examples(Records(found(paths, SUFFIXES), verify), features, target))


class Examples(Source):
    """Records that are ``tf.train.Example`` messages.

    Attributes:
        lost: {file: why} of those that are damaged.
    """

    def __init__(self, records: Records, features=None, target: str | None = None):
        self.records, self.target, self.lost = records, target, dict(records.bad.values())
        self.features = schema(self._some(), features, target)
        names = [feature.name for feature in self.features]
        if target is not None and target not in names:
            raise Refusal(f"there is no feature {target!r} to be the target{nearest(target, names)}")
        if target is not None and len(names) == 1:
            raise Refusal(f"{target!r} is the only feature; without a target there is nothing to predict it from")

    def __len__(self) -> int:
        return len(self.records)

    def read(self, rows: numpy.ndarray):
        data, begins, ends = self.raw(rows)
        try:
            columns = columns_of(data, begins, ends, self.features)
        except Malformed as error:
            row = int(rows[error.place])
            raise BadRow(row, self.records.where(row), error.why) from None
        if self.target is None:
            return columns
        target = columns.pop(self.target)
        return *columns.values(), target

    def raw(self, rows: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """The messages of these rows, as ``data_of`` gives them."""
        return self.records.data_of(rows)

    def identity(self) -> dict:
        features = [[f.name, f.kind, f.shape and list(f.shape), f.raw and str(f.raw)] for f in self.features]
        return {"tfrecord": self.records.stamps, "features": features, "target": self.target, "verify": self.records.verify}

    def edges(self) -> numpy.ndarray:
        return self.records.edges

    def known_bad(self) -> list[BadRow]:
        return [BadRow(row, *bad) for row, bad in self.records.bad.items()]

    def _some(self) -> list[Message]:
        """What some messages from everywhere hold; of values it is enough how many there are."""
        (held, _) = once(["kinds of values of records", self.records.verify], self.records.stamps, self._seen)
        return [{name: (kind, range(count)) for name, (kind, count) in message.items()} for message in held]

    def _seen(self) -> Found:
        """{name: (kind, how many values)} of some messages; bad ones are told when they are read."""
        rows = numpy.unique(numpy.linspace(0, len(self) - 1, min(SAMPLED, len(self))).astype(numpy.int64))
        messages, faults = [], []
        for row in rows.tolist():
            try:
                data, (begin,), (end,) = self.records.data_of(numpy.array([row]))
                messages.append(parsed(data[begin:end].tobytes()))
            except BadRow as fault:
                faults.append(str(fault))
            except ValueError as error:
                faults.append(f"{self.records.where(row)} is no tf.train.Example: {error}")
        if not messages:
            raise Refusal(faults[0])
        return [{name: (kind, len(values)) for name, (kind, values) in message.items()} for message in messages], []


class Records:
    """The records of some files, by number.

    Attributes:
        stamps: of the files, as they were when they were walked through.
        edges: the number of each file's first record, and the end.
        bad: {record: (file, why)} of what is damaged: each stands for the rest of its file.
    """

    def __init__(self, paths: list[str], verify: bool = True):
        walks = walked_through(paths, ["records", verify], partial(_walked, verify=verify))
        self.stamps, self.verify = [mark for mark, _, _ in walks], verify
        faults = [why for _, _, why in walks]
        begins, ends = ([_with_bad(arrays[which], why) for _, (_, arrays), why in walks] for which in (0, 1))
        self.edges = numpy.cumsum([0, *map(len, begins)])
        self.begins, self.ends = numpy.concatenate(begins), numpy.concatenate(ends)
        self.unproven = numpy.full(len(self.begins), verify)
        last = (self.edges[1:] - 1).tolist()
        self.bad = {row: (path, why) for path, row, why in zip(paths, last, faults, strict=True) if why is not None}
        if len(self.begins) == len(self.bad):
            raise Lost(next(iter(self.bad.values()))[1]) if self.bad else Refusal(f"there is no record in {', '.join(paths[:3])}")

    def __len__(self) -> int:
        return len(self.begins)

    def data_of(self, rows: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """(uint8 array, where each record begins in it, where each ends): what was read of the files, or a local file as it is.

        To read small records one by one takes twice as long as to look at the file where it is mapped into memory. Who cuts it off
        within the moment after it was found unchanged kills the process.

        Raises:
            BadRow: a checksum is wrong, or it stands for what is damaged.
        """
        refuse_bad(rows, self.bad)
        begins, ends, files = self.begins[rows], self.ends[rows], numpy.searchsorted(self.edges, rows, "right") - 1
        if len(rows) and (files == files[0]).all() and not is_remote(path := self.stamps[files[0]][0]):
            unchanged(path, self.stamps[files[0]])
            content = mapped_bytes(path)
        else:
            first, last = _runs(files, begins, ends)
            content = b"".join(read_ranges(self.stamps, files[first], begins[first], ends[last] + TAIL))
            lengths = ends[last] + TAIL - begins[first]
            moved = numpy.repeat(numpy.cumsum(lengths) - lengths - begins[first], last - first + 1)
            begins, ends = begins + moved, ends + moved
        if self.unproven[rows].any():
            self._prove(rows, content, begins, ends)
        return numpy.frombuffer(content, numpy.uint8), begins, ends

    def where(self, row: int) -> str:
        """The place of a record, for people."""
        file = int(numpy.searchsorted(self.edges, row, "right")) - 1
        return f"{self.stamps[file][0]}, record {row - self.edges[file]}, byte {self.begins[row] - HEAD}"

    def _prove(self, rows: numpy.ndarray, content: bytes | memoryview, begins: numpy.ndarray, ends: numpy.ndarray) -> None:
        """Compares records with the checksums behind them, once."""
        told = numpy.frombuffer(content, numpy.uint8)[ends[:, None] + numpy.arange(TAIL)].view("<u4")[:, 0]
        cut = getattr(content, "obj", content).__getitem__  # what is mapped gives bytes, where a view of it would give views
        wrong = masked(crc32c([*map(cut, map(slice, begins.tolist(), ends.tolist()))])) != told
        self.unproven[rows[~wrong]] = False
        if wrong.any():
            row = int(rows[wrong.argmax()])
            raise BadRow(row, self.where(row), "its checksum is wrong: the file was damaged after it was written")


def framed(records: Iterable[bytes]) -> bytes:
    """Records as they stand in a TFRecord file."""
    records = list(records)
    heads = [struct.pack("<Q", len(record)) for record in records]
    marks = [[mark.tobytes() for mark in masked(crc32c(pieces)).astype("<u4")] for pieces in (heads, records)]
    return b"".join(part for framing in zip(heads, marks[0], records, marks[1], strict=True) for part in framing)


def _runs(files: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The first and the last of each run of records that stand one right after the other in a file, and so are read at once; but no
    longer ones than go well through one connection."""
    new, parts = numpy.ones(len(files), bool), begins // LONGEST
    new[1:] = (files[1:] != files[:-1]) | (begins[1:] != ends[:-1] + TAIL + HEAD) | (parts[1:] != parts[:-1])
    return numpy.flatnonzero(new), numpy.flatnonzero(numpy.roll(new, -1))


# ---- the walk


def _walked(mark: list, tell: Tell, verify: bool) -> tuple[Found, str | None]:
    """Where the data of each record begin and where they end; and why there are no more of them."""
    begins = ends = numpy.empty(0, numpy.int64)
    try:
        begins, ends, why = _undamaged(whole(mark, tell), mark[0], verify, tell)
    except Refusal as refused:
        if not is_lost(mark[0], refused):
            raise
        why = str(refused)
    return (None, [begins, ends]), why


def _with_bad(places: numpy.ndarray, why: str | None) -> numpy.ndarray:
    """One more record for what is damaged."""
    return places if why is None else numpy.append(places, 0)


def _undamaged(content: memoryview, path: str, verify: bool, tell: Tell) -> tuple[numpy.ndarray, numpy.ndarray, str | None]:
    """Where the data of each record begin and end, int64; and why there are no more of them, where the file is damaged."""
    begins, lengths = _chain(content, tell)
    ends = begins + lengths
    wrong = _wrong_length(content, begins) if verify else None
    if wrong is not None and begins[wrong] <= len(content):
        return begins[:wrong], ends[:wrong], f"{path} {_damage(content, wrong, begins[wrong] - HEAD)}"
    if len(ends) and ends[-1] + TAIL != len(content):
        there, begin = len(begins) - 1 if verify else 0, begins[-1] - HEAD
        why = f"is cut off: record {len(begins) - 1}, at byte {begin}, goes on after the end of the file; write the file again"
        return begins[:there], ends[:there], f"{path} {why}"
    return begins, ends, None


def _damage(content: memoryview, record: int, begin: int) -> str:
    """What it means that the length of a record does not fit its checksum."""
    if kind := COMPRESSED.get(bytes(content[:2])):
        return f"is compressed with {kind}, so that no record can be found by number; unpack it first"
    if record == 0:
        return "is no TFRecord file, or its first bytes are damaged: the first length does not fit its checksum"
    return f"is damaged: the length of record {record}, at byte {begin}, does not fit its checksum; write the file again"


def _chain(content: memoryview, tell: Tell) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(begins, lengths) of the records; the last may go on after the end of the file."""
    length_at = struct.Struct("<Q").unpack_from
    data, size = numpy.frombuffer(content, numpy.uint8), len(content)
    places: list[numpy.ndarray] = []  # where the framing of each record begins
    at, some = 0, WORTH
    while at < size:
        single = []
        for _ in range(some):
            if at + HEAD > size:
                break
            single.append(at)
            (length,) = length_at(content, at)
            at += length + HEAD + TAIL
        places.append(numpy.array(single, numpy.int64))
        last, some = places[-1][-WORTH:], TOLD
        if len(last) == WORTH and at <= size and (numpy.diff(last) == (stride := at - single[-1])).all():
            places.append(at + stride * numpy.arange(_alike(data, single[-1], stride) - 1))
            at, some = at + stride * len(places[-1]), WORTH
        if size - HEAD < at < size:  # not even its length is whole
            places.append(numpy.array([at]))
            at = 2 * size
        tell(min(at, size))
    edges = numpy.concatenate([*places, [min(at, 2 * size)]])
    return edges[:-1] + HEAD, numpy.diff(edges) - HEAD - TAIL


def _alike(data: numpy.ndarray, at: int, stride: int) -> int:
    """How many whole records from here on have the same length."""
    count = min((len(data) - at) // stride, AT_ONCE)
    if count < 2:
        return 1
    heads = numpy.lib.stride_tricks.as_strided(data[at:], (count, 8), (stride, 1), writeable=False)
    same = (heads == heads[0]).all(axis=1)
    return count if same.all() else int(same.argmin())


def _wrong_length(content: memoryview, begins: numpy.ndarray) -> int | None:
    """The first record whose length does not fit its checksum."""
    data = numpy.frombuffer(content, numpy.uint8)
    for first in range(0, len(begins), AT_ONCE):
        heads = data.take(begins[first : first + AT_ONCE, None] + numpy.arange(-HEAD, 0), mode="clip")
        wrong = masked(crc32c_of_rows(heads[:, :8])) != heads[:, 8:].copy().view("<u4")[:, 0]
        if wrong.any():
            return first + int(wrong.argmax())
    return None
