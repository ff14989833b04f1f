"""TFRecord files: the framing against its document, the checksum against published values, and every kind of damage."""

import gzip
import struct
import sys

import numpy
import pytest
import torch

from hasten.core.errors import ConfigurationError, RunError
from hasten.data import tfrecord
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import HEAD, Records, frame_records, masked_crc32c
from hasten.data.source import BadRow

PUBLISHED = {  # RFC 3720, appendix B.4, and the usual check value
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
    b"": 0,
    b"a": 0xC1D04330,
}


def bit_by_bit(data: bytes) -> int:
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def mask(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_masked_crc32c_equals_published_values():
    assert masked_crc32c(list(PUBLISHED)).tolist() == [mask(value) for value in PUBLISHED.values()]


def test_crc32c_without_google_crc32c_raises_and_verify_false_reads(tmp_path, monkeypatch):
    written(tmp_path / "a.tfrecord")
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    for use in (lambda: tfrecord(tmp_path), lambda: frame_records([b"x"])):
        with pytest.raises(
            ConfigurationError, match=r"^checksums of TFRecord files need google-crc32c: pip install 'hasten\[data\]'$"
        ):
            use()
    assert len(tfrecord(tmp_path, verify=False).source) == 100


def test_framing_equals_the_documented_one():
    # the first record that TensorFlow's own tests of the format write: length 3, "foo"
    length, data = struct.pack("<Q", 3), b"foo"
    assert frame_records([data]) == length + struct.pack("<I", mask(bit_by_bit(length))) + data + struct.pack(
        "<I", mask(bit_by_bit(data))
    )


def written(path, count=100, first=0):
    records = [
        encode_example({"x": [i + 0.5, -i], "label": i * i, "id": f"row{i}"}) for i in range(first, first + count)
    ]
    path.write_bytes(frame_records(records))
    return records


def test_rows_of_several_files_in_any_order(tmp_path):
    written(tmp_path / "a.tfrecord", 70)
    written(tmp_path / "b.tfrecord", 30, first=70)
    source = tfrecord(tmp_path, target="label").source
    assert len(source) == 100 and source.chunk_offsets().tolist() == [0, 70, 100]
    rows = numpy.random.default_rng(0).permutation(100)
    identity, x, label = source.read(rows)
    assert identity == [b"row%d" % row for row in rows]
    assert torch.equal(x, torch.from_numpy(numpy.stack([rows + 0.5, -rows], axis=1)).float())
    assert label.tolist() == (rows * rows).tolist()
    assert source.read(rows[:0])[2].shape == (0,)


@pytest.mark.parametrize("verify", [True, False])
def test_rows_contiguous_scattered_or_repeated(tmp_path, verify):
    """Contiguous, scattered, repeated, across two files, or none: contiguous records are read at once, each with its
    own bytes."""
    messages = written(tmp_path / "a.tfrecord", 70) + written(tmp_path / "b.tfrecord", 30, first=70)
    paths = [str(tmp_path / "a.tfrecord"), str(tmp_path / "b.tfrecord")]
    for rows in ([*range(5, 20)], [68, 69, 70, 71], [3, 4, 9, 10, 11, 99], [7, 6, 5], [8, 8, 9], [99, 0], []):
        rows = numpy.array(rows, numpy.int64)
        data, begins, ends = Records(paths, verify).raw(rows)
        assert [data[first:last].tobytes() for first, last in zip(begins, ends, strict=True)] == [
            messages[row] for row in rows
        ]


@pytest.mark.parametrize(
    "lengths", [[5] * 3000, [5] * 100 + [6] * 2 + [5] * 50 + [0] * 40, list(range(200)), [0], [100_000, 1]]
)
def test_index_finds_every_record(tmp_path, lengths):
    rng = numpy.random.default_rng(0)
    records = [rng.bytes(length) for length in lengths]
    (tmp_path / "a.tfrecord").write_bytes(frame_records(records))
    found = Records([str(tmp_path / "a.tfrecord")])
    data, begins, ends = found.raw(numpy.arange(len(records)))
    assert [data[b:e].tobytes() for b, e in zip(begins, ends, strict=True)] == records


def test_wrong_checksum_is_a_bad_row_of_that_record_only(tmp_path):
    records = written(tmp_path / "a.tfrecord")
    broken = bytearray((tmp_path / "a.tfrecord").read_bytes())
    at = sum(len(record) + 16 for record in records[:42])
    broken[at + HEAD + len(records[42]) - 1] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(broken)
    source = tfrecord(tmp_path / "a.tfrecord").source
    with pytest.raises(BadRow, match=rf"a\.tfrecord, record 42, byte {at}.*checksum") as caught:
        source.read(numpy.arange(30, 60))
    assert caught.value.row == 42
    with pytest.raises(BadRow):  # again, when the row is read again
        source.read(numpy.array([42]))
    assert len(source.read(numpy.delete(numpy.arange(100), 42))["label"]) == 99


def test_verify_false_ignores_checksums(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(frame_records([encode_example({"a": 1})])[:-4] + bytes(4))
    assert tfrecord(tmp_path, verify=False).source.read(numpy.array([0]))["a"].tolist() == [1]


@pytest.mark.parametrize("left", [5, 11, 12, 40])
def test_file_truncated_in_its_first_record_is_refused(tmp_path, left):
    written(tmp_path / "a.tfrecord")
    content = (tmp_path / "a.tfrecord").read_bytes()
    (tmp_path / "a.tfrecord").write_bytes(content[:left])
    with pytest.raises(ConfigurationError, match=r"a\.tfrecord is cut off: record 0, at byte"):
        tfrecord(tmp_path)


@pytest.mark.parametrize(
    ("damage", "intact", "why"),
    [
        ("its end", 69, r"is cut off: record 69, at byte \d+, continues after the end"),
        ("its last byte", 69, r"is cut off: record 69, at byte \d+, continues after the end"),
        ("a length", 7, r"is damaged: the length of record 7, at byte \d+"),
        ("gone", 0, "No such file"),
        ("zipped", 0, "is compressed with gzip"),
    ],
)
def test_damage_is_one_bad_row_after_the_earlier_records(tmp_path, damage, intact, why):
    records, file = written(tmp_path / "a.tfrecord", 70), tmp_path / "a.tfrecord"
    written(tmp_path / "b.tfrecord", 30, first=70)
    content = bytearray(file.read_bytes())
    if damage == "a length":
        content[sum(len(record) + 16 for record in records[:7]) + 1] ^= 0x40
    left = {"its end": content[:-9], "its last byte": content[:-1], "zipped": gzip.compress(content)}.get(
        damage, content
    )
    file.write_bytes(left)
    if damage == "gone":
        file.unlink()
        file.symlink_to("nowhere")
    with pytest.raises(
        RunError, match=rf"row {intact} \(.*a\.tfrecord\): .*{why}.*; repair it, or allow bad rows to be skipped: "
    ):
        next(iter(tfrecord(tmp_path).batch(50)))
    with pytest.raises(RunError, match=why):
        tfrecord(tmp_path, target="label").batches(50, seed=0, training=True)
    for way in ({"batches": 0}, {"threads": 2}, {"processes": 2}):
        pipeline = tfrecord(tmp_path, target="label").skip_bad_rows(1).shuffle(seed=1).batch(16).prefetch(**way)
        read = [label for *_, labels in pipeline for label in labels.tolist()]
        assert sorted(read) == [row * row for row in (*range(intact), *range(70, 100))]
        assert list(pipeline.faults.found) == [intact]


def test_damage_without_checksums_may_be_undetected(tmp_path):
    written(tmp_path / "a.tfrecord", 70)
    written(tmp_path / "b.tfrecord", 30, first=70)
    (tmp_path / "a.tfrecord").write_bytes((tmp_path / "a.tfrecord").read_bytes()[:-9])
    (bad,) = tfrecord(tmp_path, verify=False).source.known_bad_rows()
    assert bad.row == 0 and len(tfrecord(tmp_path, verify=False).source) == 31


def test_file_of_another_format_is_refused(tmp_path):
    written(tmp_path / "a.tfrecord")
    (tmp_path / "zipped.tfrecord").write_bytes(gzip.compress((tmp_path / "a.tfrecord").read_bytes()))
    with pytest.raises(ConfigurationError, match=r"compressed with gzip.*unpack"):
        tfrecord(tmp_path / "zipped.tfrecord")
    (tmp_path / "text.tfrecord").write_text("this is plain text, not records")
    with pytest.raises(ConfigurationError, match="not a TFRecord file"):
        tfrecord(tmp_path / "text.tfrecord")
    (tmp_path / "empty.tfrecord").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="no record in"):
        tfrecord(tmp_path / "empty.tfrecord")
    (tmp_path / "raw.tfrecord").write_bytes(frame_records([b"\xff\xff raw bytes"]))
    with pytest.raises(ConfigurationError, match=r"raw\.tfrecord, record 0, byte 0 is not a tf\.train\.Example"):
        tfrecord(tmp_path / "raw.tfrecord")


def test_invalid_request_is_refused(tmp_path):
    written(tmp_path / "a.tfrecord")
    with pytest.raises(ConfigurationError, match="did you mean label"):
        tfrecord(tmp_path, target="labl")
    with pytest.raises(ConfigurationError, match="an input feature is needed"):
        tfrecord(tmp_path, features=["label"], target="label")


def test_fingerprint_follows_file_and_options(tmp_path):
    written(tmp_path / "a.tfrecord")
    all_features, part = (
        tfrecord(tmp_path).source.fingerprint(),
        tfrecord(tmp_path, features=["x"]).source.fingerprint(),
    )
    assert all_features != part and all_features == tfrecord(tmp_path).source.fingerprint()
    written(tmp_path / "a.tfrecord", 101)
    assert all_features != tfrecord(tmp_path).source.fingerprint()


def test_sequence_example_is_refused(tmp_path):
    """Its context would be read as an Example, and its sequences lost."""
    sequences = b"\x12\x05\x0a\x03\x0a\x01a"  # field 2: a feature list named "a"
    (tmp_path / "a.tfrecord").write_bytes(frame_records([encode_example({"id": 1}) + sequences] * 4))
    with pytest.raises(ConfigurationError, match="it is a SequenceExample"):
        tfrecord(tmp_path)
