"""TFRecord files of ``tf.train.Example`` messages, read without TensorFlow: framing, record index and checksums.

A record is framed as (https://www.tensorflow.org/tutorials/load_data/tfrecord)

    uint64 length    uint32 masked CRC-32C of the length    bytes data[length]    uint32 masked CRC-32C of the data

so the positions of the records are known only after one pass through the file, which builds an index. It reads twelve
bytes per record, and skips over records of equal length many at a time. Then any record is read directly.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from hasten.core.errors import ConfigurationError, suggest
from hasten.data.formats.tf_example import infer_features, summarize_example
from hasten.data.formats.tf_example_vectorized import MalformedExampleError, parse_examples
from hasten.data.io.index_cache import IndexedFiles, ReportBytes, load_or_build_index, load_or_compute
from hasten.data.io.metadata_cache import CacheEntry
from hasten.data.io.paths import check_unchanged, is_remote, mapped_bytes, resolve_paths
from hasten.data.io.range_reader import read_ranges
from hasten.data.pipeline import Pipeline
from hasten.data.source import BadRow, Source, refuse_bad, split_target
from hasten.data.validation import check_name, check_names

SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
HEAD, TAIL = 12, 4  # bytes of framing before and after the data
PROBED_RECORDS = 64  # records that are inspected to learn which features there are
CHUNK = 1 << 14  # records that are checked, or skipped because they have equal length, at a time
EQUAL_BEFORE_SKIP = 8  # consecutive records of equal length after which the index tries to skip
RECORDS_PER_REPORT = 1 << 10  # records of unequal length after which the index reports its progress
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x9c": "zlib", b"\x78\x01": "zlib", b"\x78\xda": "zlib"}


def tfrecord(
    paths: str | Path | Iterable[str | Path],
    features: Sequence[str] | Mapping | None = None,
    target: str | None = None,
    verify: bool = True,
) -> Pipeline:
    """Samples from TFRecord files of ``tf.train.Example`` messages.

    A batch is a dict of columns. Floats are float32, integers int64, of shape (rows, *shape); byte strings are a list.
    A file that is damaged, truncated or unreadable counts as one bad row after the records before the damage. Without
    ``verify`` the records before the damage cannot be trusted either, and the file is a single bad row.
    Messages: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto

    Args:
        paths: Files, directories or patterns, local or remote. A remote file is read once to find its records; the
            index is cached.
        features: The names to read, or a dict from name to the shape of a sample: ``()`` for one number, ``(28, 28)``,
            None for lists of unequal length (a list of tensors), or ``(torch.uint8, (28, 28))`` for a byte string that
            holds little-endian numbers. Default: all features, in the shapes found in a sample of the records.
        target: The feature to predict; a batch is then the tuple (other features in their order, target).
        verify: Compares every record with its checksum when it is first read.

    Raises:
        ConfigurationError: No file holds a complete record, or a feature does not exist.
    """
    check_name("target=", target)
    if features is not None:
        names = check_names("features=", list(features) if isinstance(features, Mapping) else features)
        features = features if isinstance(features, Mapping) else names
    return Pipeline(Examples(resolve_paths(paths, SUFFIXES), features, target, verify))


class Records(IndexedFiles):
    """The framed records of some TFRecord files, read by index."""

    def __init__(self, paths: list[str], verify: bool = True) -> None:
        indices = load_or_build_index(paths, ["records", verify], partial(_index_file, verify=verify))
        super().__init__(paths, indices, [len(begins) for _, (_, (begins, _)), _ in indices], "record")
        self.verify = verify
        # first byte of the data of each record in its file, and the byte after them, shape (records,); 0 of a bad row
        self.begins, self.ends = numpy.zeros((2, len(self)), numpy.int64)
        for first, (_, (_, positions), _) in zip(self.offsets.tolist(), indices, strict=False):
            count = len(positions[0])
            self.begins[first : first + count], self.ends[first : first + count] = positions
        # whether the checksum of each record is still to be compared, shape (records,)
        self.unverified = numpy.full(len(self.begins), verify)

    def raw(self, rows: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Returns the data of some records: (uint8 array, start of each record in it, end of each).

        The array is what was read, or the whole local file: rows of one local file are served from its memory map,
        because reading small records one by one takes twice as long. A process that truncates the file right after the
        check that it is unchanged kills this one with SIGBUS. BadRow if a checksum is wrong, or a record stands for the
        damaged part of a file.
        """
        refuse_bad(rows, self.bad)
        starts, ends = self.begins[rows], self.ends[rows]
        files = self.file_of(rows)
        if len(rows) and (files == files[0]).all() and not is_remote(path := self.signatures[files[0]][0]):
            check_unchanged(path, self.signatures[files[0]])
            content = mapped_bytes(path)
        else:
            content = b"".join(read_ranges(self.signatures, files, starts, ends + TAIL))
            lengths = ends - starts
            starts = numpy.cumsum(lengths + TAIL) - lengths - TAIL
            ends = starts + lengths
        if self.unverified[rows].any():
            self._verify(rows, content, starts, ends)
        return numpy.frombuffer(content, numpy.uint8), starts, ends

    def where(self, row: int) -> str:
        """Describes a row for error messages: file, number of the record in it, first byte."""
        file = int(self.file_of(row))
        return f"{self.signatures[file][0]}, record {row - self.offsets[file]}, byte {self.begins[row] - HEAD}"

    def _verify(
        self, rows: numpy.ndarray, content: bytes | memoryview, starts: numpy.ndarray, ends: numpy.ndarray
    ) -> None:
        """Compares records with their stored checksums: ``BadRow`` if one differs, else marks them as verified."""
        stored = numpy.frombuffer(content, numpy.uint8)[ends[:, None] + numpy.arange(TAIL)].view("<u4")[:, 0]
        cut = getattr(content, "obj", content).__getitem__  # an mmap returns bytes, a memoryview of it would not
        wrong = masked_crc32c([*map(cut, map(slice, starts.tolist(), ends.tolist()))]) != stored
        self.unverified[rows[~wrong]] = False
        if wrong.any():
            row = int(rows[wrong.argmax()])
            raise BadRow(row, self.where(row), "its checksum is wrong: the file was damaged after it was written")


class Examples(Records, Source):
    """A data source over TFRecord files of ``tf.train.Example`` messages; its arguments are those of ``tfrecord``."""

    def __init__(self, paths: list[str], features: Any = None, target: str | None = None, verify: bool = True) -> None:
        super().__init__(paths, verify)
        self.target = target
        key = ["kinds of values of records", verify]
        summaries, _ = load_or_compute(key, self.signatures, self._summarize_sample)
        self.features = infer_features(summaries, features, target)
        names = [feature.name for feature in self.features]
        if target is not None and target not in names:
            raise ConfigurationError(f"target= names a feature {target!r} that does not exist{suggest(target, names)}")
        if target is not None and len(names) == 1:
            raise ConfigurationError(f"the target {target!r} is the only feature to read; an input feature is needed")

    def read(self, rows: numpy.ndarray) -> Any:
        data, starts, ends = self.raw(rows)
        try:
            columns = parse_examples(data, starts, ends, self.features)
        except MalformedExampleError as error:
            row = int(rows[error.index])
            raise BadRow(row, self.where(row), error.reason) from None
        return split_target(columns, self.target)

    def fingerprint(self) -> dict:
        features = [[f.name, f.kind, f.shape and list(f.shape), f.raw and str(f.raw)] for f in self.features]
        files = {"tfrecord": self.signatures, "verify": self.verify}
        return {**files, "features": features, "target": self.target}

    def _summarize_sample(self) -> CacheEntry:
        """Returns (Summary of each of up to 64 records of all files, no arrays); ConfigurationError if all are bad."""
        rows = numpy.unique(numpy.linspace(0, len(self) - 1, min(PROBED_RECORDS, len(self))).astype(numpy.int64))
        summaries, faults = [], []
        for row in rows.tolist():
            try:
                data, (start,), (end,) = self.raw(numpy.array([row]))
                summaries.append(summarize_example(data[start:end].tobytes()))
            except BadRow as fault:
                faults.append(str(fault))
            except ValueError as error:
                faults.append(f"{self.where(row)} is not a tf.train.Example: {error}")
        if not summaries:
            raise ConfigurationError(faults[0])
        return summaries, []


def masked_crc32c(pieces: Sequence[bytes]) -> numpy.ndarray:
    """Returns the CRC-32C of every piece as files store it (rotated right by 15 bits, plus a constant): uint32, shape
    (pieces,). ConfigurationError without ``google-crc32c``.
    """
    try:
        from google_crc32c import value
    except ImportError:
        raise ConfigurationError("checksums of TFRecord files need google-crc32c: pip install 'hasten[data]'") from None
    checksums = numpy.fromiter(map(value, pieces), numpy.uint32, len(pieces))
    return ((checksums >> numpy.uint32(15)) | (checksums << numpy.uint32(17))) + numpy.uint32(0xA282EAD8)


def frame_records(records: Iterable[bytes]) -> bytes:
    """Returns records with their framing, as the content of a TFRecord file."""
    records = list(records)
    lengths = [struct.pack("<Q", len(record)) for record in records]
    checksums = [[value.tobytes() for value in masked_crc32c(items).astype("<u4")] for items in (lengths, records)]
    frames = zip(lengths, checksums[0], records, checksums[1], strict=True)
    return b"".join(part for frame in frames for part in frame)


# ---- index of a file


def _index_file(content: memoryview, path: str, tell: ReportBytes, verify: bool) -> tuple[CacheEntry, str | None]:
    """Returns ((None, [first byte and end of the data of each record before any damage]), the damage or None).
    ``verify`` compares the lengths of records with their checksums.
    """
    starts, lengths = _find_records(content, tell)
    ends = starts + lengths
    wrong = _first_wrong_length(content, starts) if verify else None
    if wrong is not None and starts[wrong] <= len(content):
        reason = _describe_damage(content, wrong, starts[wrong] - HEAD)
        return (None, [starts[:wrong], ends[:wrong]]), f"{path} {reason}"
    if len(ends) and ends[-1] + TAIL != len(content):
        intact = len(starts) - 1 if verify else 0
        where = f"record {len(starts) - 1}, at byte {starts[-1] - HEAD}"
        reason = f"is cut off: {where}, continues after the end of the file; write the file again"
        return (None, [starts[:intact], ends[:intact]]), f"{path} {reason}"
    return (None, [starts, ends]), None


def _describe_damage(content: memoryview, record: int, position: int) -> str:
    """Explains why the length of a record does not match its checksum."""
    if kind := COMPRESSED.get(bytes(content[:2])):
        return f"is compressed with {kind}, so that no record can be found by number; unpack it first"
    if record == 0:
        return "is not a TFRecord file, or its first bytes are damaged: the first length does not match its checksum"
    where = f"the length of record {record}, at byte {position}"
    return f"is damaged: {where}, does not match its checksum; write the file again"


def _find_records(content: memoryview, tell: ReportBytes) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns (starts, lengths) of the data of the records; the last record may extend beyond the end of the file."""
    length_at = struct.Struct("<Q").unpack_from
    data, size = numpy.frombuffer(content, numpy.uint8), len(content)
    positions: list[numpy.ndarray] = []  # of the framing of each record
    at, count = 0, EQUAL_BEFORE_SKIP
    while at < size:
        single = []
        for _ in range(count):
            if at + HEAD > size:
                break
            single.append(at)
            (length,) = length_at(content, at)
            at += length + HEAD + TAIL
        positions.append(numpy.array(single, numpy.int64))
        last, count = positions[-1][-EQUAL_BEFORE_SKIP:], RECORDS_PER_REPORT
        if len(last) == EQUAL_BEFORE_SKIP and at <= size and (numpy.diff(last) == (stride := at - single[-1])).all():
            positions.append(at + stride * numpy.arange(_count_equal(data, single[-1], stride) - 1))
            at, count = at + stride * len(positions[-1]), EQUAL_BEFORE_SKIP
        if size - HEAD < at < size:  # the last framing is incomplete
            positions.append(numpy.array([at]))
            at = 2 * size
        tell(min(at, size))
    edges = numpy.concatenate([*positions, [min(at, 2 * size)]])
    return edges[:-1] + HEAD, numpy.diff(edges) - HEAD - TAIL


def _count_equal(data: numpy.ndarray, at: int, stride: int) -> int:
    """Counts consecutive complete records of ``stride`` bytes from ``at`` on, at most ``CHUNK``."""
    count = min((len(data) - at) // stride, CHUNK)
    if count < 2:
        return 1
    lengths = numpy.lib.stride_tricks.as_strided(data[at:], (count, 8), (stride, 1), writeable=False)
    equal = (lengths == lengths[0]).all(axis=1)
    return count if equal.all() else int(equal.argmin())


def _first_wrong_length(content: memoryview, starts: numpy.ndarray) -> int | None:
    """Returns the index of the first record whose length does not match its checksum; None if all do."""
    data = numpy.frombuffer(content, numpy.uint8)
    for first in range(0, len(starts), CHUNK):
        heads = data.take(starts[first : first + CHUNK, None] + numpy.arange(-HEAD, 0), mode="clip")
        lengths, which = numpy.unique(heads[:, :8].copy().view("<u8")[:, 0], return_inverse=True)  # few differ
        wrong = masked_crc32c([length.tobytes() for length in lengths])[which] != heads[:, 8:].copy().view("<u4")[:, 0]
        if wrong.any():
            return first + int(wrong.argmax())
    return None
