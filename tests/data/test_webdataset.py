"""Tar shards in all formats of Python's tarfile, read by hasten, and what is refused."""

import gzip
import io
import pickle
import tarfile

import numpy
import pytest
import torch
from PIL import Image

from hasten.core.errors import ConfigurationError, RunError
from hasten.data import webdataset
from hasten.data.formats.tar_headers import members
from hasten.data.source import BadRow
from helpers.tar_files import FORMS, npy, pack, png, sample


def test_samples_of_several_shards_in_any_order(tmp_path):
    pack(tmp_path / "a.tar", [file for number in range(7) for file in sample(number)])
    pack(tmp_path / "b.tar", [file for number in range(7, 10) for file in sample(number)])
    source = webdataset(tmp_path).source
    assert len(source) == 10 and source.chunk_offsets().tolist() == [0, 7, 10]
    rows = numpy.array([9, 0, 3, 7])
    columns = source.read(rows)
    assert list(columns) == ["cls", "json", "txt", "npy", "bin"]
    assert columns["cls"].tolist() == [9, 0, 3, 7] and columns["cls"].dtype == torch.int64
    assert columns["json"] == [{"number": row} for row in rows] and columns["txt"] == [f"text {row} é" for row in rows]
    assert torch.equal(columns["npy"], torch.tensor(rows, dtype=torch.float32)[:, None, None].expand(4, 2, 3))
    assert columns["bin"] == [bytes([row]) for row in rows]
    text, number = webdataset(tmp_path, columns=["txt", "cls"], target="cls").source.read(rows)
    assert text == columns["txt"] and number.tolist() == rows.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_every_header_format_is_read(tmp_path, form):
    deep = "/".join(["a_directory_with_a_long_name"] * 5)
    names = ["a.txt", f"{deep}/{'x' * 90}.txt", "./here/b.txt"] + (
        [] if form == "ustar" else [f"{'y' * 300}.txt", "ümläut.txt"]
    )
    pack(tmp_path / "a.tar", [(name, name.encode()) for name in names], FORMS[form])
    content = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        expected = [(info.name, info.offset_data, info.offset_data + info.size) for info in tar]
    assert list(members(memoryview(content))) == expected
    assert webdataset(tmp_path).source.read(numpy.arange(len(names)))["txt"] == names


def test_directories_links_and_other_members_are_skipped(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in [
            ("set", tarfile.DIRTYPE),
            ("set/link.txt", tarfile.SYMTYPE),
            ("set/hard.txt", tarfile.LNKTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("README", "__index__.txt", ".hidden.txt", "a.txt"):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"hi"))
    source = webdataset(tmp_path).source
    assert source.keys == ["a"] and source.read(numpy.array([0])) == {"txt": ["hi"]}


def test_images_keep_their_size_unless_resized(tmp_path):
    files = {f"{number}.png": png(number) for number in range(4)}
    pack(tmp_path / "a.tar", [(name, content) for name, (content, _) in files.items()])
    pictures = webdataset(tmp_path).source.read(numpy.array([2, 1]))["png"]
    assert numpy.array_equal(pictures[0], files["2.png"][1]) and numpy.array_equal(pictures[1], files["1.png"][1])
    assert webdataset(tmp_path, resize=16).source.read(numpy.arange(4))["png"].shape == (4, 3, 16, 16)


def test_arrays_of_unequal_shapes_are_a_list(tmp_path):
    pack(tmp_path / "a.tar", [(f"{n}.npy", npy(numpy.arange(n, dtype=">i2"))) for n in range(5)])
    arrays = webdataset(tmp_path).source.read(numpy.array([3, 0]))["npy"]
    assert [array.tolist() for array in arrays] == [[0, 1, 2], []]


@pytest.mark.parametrize("name", ["/etc/a.txt", "../a.txt", "set/../../a.txt", "..\\a.txt"])
def test_member_path_outside_the_shard_is_refused(tmp_path, name):
    pack(tmp_path / "a.tar", [("good.txt", b"x"), (name, b"x")])
    with pytest.raises(ConfigurationError, match=r"a\.tar has a member .* leaves the archive"):
        webdataset(tmp_path)


class Bad:
    def __reduce__(self):
        return eval, ("1 / 0",)  # code that no reader may run


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("npy", npy(numpy.array([1.0]))[:-2]),
        (
            "npy",
            b"\x93NUMPY\x01\x00"
            + b"v\x00"
            + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117)
            + b"\n"
            + pickle.dumps(Bad()),
        ),
        ("npy", pickle.dumps(Bad())),
        ("cls", b"seven"),
        ("json", b"{"),
        ("txt", b"\xff\xfe\xff"),
        ("png", b"no picture"),
    ],
)
def test_bad_member_is_named_and_pickles_are_never_loaded(tmp_path, ending, content):
    good = {"npy": npy(numpy.array([1.0])), "cls": b"7", "json": b"{}", "txt": b"x", "png": png(0)[0]}[ending]
    pack(tmp_path / "a.tar", [(f"set/{n}.{ending}", content if n == 3 else good) for n in range(6)])
    source = webdataset(tmp_path).source
    with pytest.raises(BadRow, match=rf"a\.tar, set/3\.{ending}") as caught:
        source.read(numpy.arange(6))
    assert caught.value.row == 3
    assert len(source.read(numpy.array([0, 5]))[ending]) == 2


def test_sample_without_a_required_file_is_a_bad_row(tmp_path):
    pack(tmp_path / "a.tar", [("0.txt", b"x"), ("0.cls", b"1"), ("1.txt", b"y"), ("2.txt", b"z"), ("2.cls", b"2")])
    source = webdataset(tmp_path).source
    with pytest.raises(BadRow, match=r"no file that ends in \.cls") as caught:
        source.read(numpy.arange(3))
    assert caught.value.row == 1


def test_broken_and_other_files_are_refused(tmp_path):
    pack(tmp_path / "a.tar", [file for number in range(3) for file in sample(number)])
    valid = (tmp_path / "a.tar").read_bytes()
    for name, content, message in [
        ("cut.tar", valid[:3000], "cut off"),
        ("zipped.tar", gzip.compress(valid), "compressed with gzip"),
        ("text.tar", b"not a tar file at all " * 100, "not a tar file"),
        ("empty.tar", b"", "not a tar file"),
        ("damaged.tar", valid[:1024] + b"\x01" + valid[1025:], "damaged: the header at byte 1024"),
        ("twice.tar", pack(tmp_path / "b", [("a.txt", b"1"), ("a.txt", b"2")]).read_bytes(), "two files a.txt"),
        ("none.tar", pack(tmp_path / "c", [("README", b"1")]).read_bytes(), "no sample in"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigurationError, match=rf"{name}.*{message}|{message}.*{name}"):
            webdataset(tmp_path / name)


@pytest.mark.parametrize(
    ("damage", "intact", "why"),
    [
        ("its end", 4, "is cut off"),
        ("a header", 2, r"is damaged: the header at byte \d+"),
        ("gone", 0, "No such file"),
        ("zipped", 0, "is compressed with gzip"),
    ],
)
def test_damage_is_one_bad_row_after_the_intact_samples(tmp_path, damage, intact, why):
    """It is unknown whether the sample in which the file is truncated is complete."""
    pack(tmp_path / "a.tar", [file for number in range(5) for file in sample(number)], tarfile.USTAR_FORMAT)
    pack(tmp_path / "b.tar", [file for number in range(5, 10) for file in sample(number)])
    file = tmp_path / "a.tar"
    content = bytearray(file.read_bytes())
    with tarfile.open(file) as tar:
        members = [member.offset for member in tar]
    if damage == "a header":
        content[members[13]] ^= 1  # of the fourth file of the third sample
    left = {"its end": content[: members[-1] + 520], "zipped": gzip.compress(content)}.get(damage, content)
    file.write_bytes(left)
    if damage == "gone":
        file.unlink()
        file.symlink_to("nowhere")
    with pytest.raises(
        RunError, match=rf"row {intact} \(.*a\.tar\): .*{why}.*; repair it, or allow bad rows to be skipped: "
    ):
        next(iter(webdataset(tmp_path).batch(50)))
    with pytest.raises(RunError, match=why):
        webdataset(tmp_path, target="cls").batches(50, seed=0, training=True)
    for way in ({"batches": 0}, {"threads": 2}, {"processes": 2}):
        pipeline = webdataset(tmp_path, target="cls").skip_bad_rows(1).shuffle(seed=1).batch(4).prefetch(**way)
        assert sorted(label for *_, labels in pipeline for label in labels.tolist()) == [*range(intact), *range(5, 10)]
        assert list(pipeline.faults.found) == [intact]


def test_image_field_matches_any_image_suffix(tmp_path):
    """As if a directory of JPEG and PNG was written to shards. If a sample has both, they are different fields."""
    jpeg = io.BytesIO()
    Image.fromarray(numpy.full((20, 30, 3), 7, numpy.uint8)).save(jpeg, "JPEG")
    files = [
        ("a.jpg", jpeg.getvalue()),
        ("a.cls", b"0"),
        ("b.png", png(1)[0]),
        ("b.cls", b"1"),
        ("c.jpg", jpeg.getvalue()),
        ("c.png", png(2)[0]),
        ("c.cls", b"2"),
    ]
    either, both = pack(tmp_path / "either.tar", files[:4]), pack(tmp_path / "both.tar", files)
    read = webdataset(either).source.read(numpy.arange(2))
    assert (read["jpg"][0] == 7).all() and numpy.array_equal(read["jpg"][1], png(1)[1])
    assert numpy.array_equal(webdataset(both, columns=["png"]).source.read(numpy.array([2]))["png"][0], png(2)[1])
    for columns, row in ((["jpg"], 1), (["png"], 0), (["jpg", "png"], 0)):
        with pytest.raises(BadRow, match=r"it has no file that ends in "):
            webdataset(both, columns=columns).source.read(numpy.array([row]))


def test_missing_field_error_names_the_present_ones(tmp_path):
    pack(tmp_path / "a.tar", sample(1))
    with pytest.raises(ConfigurationError, match=r"ends in \.jsn \(did you mean json\?\)"):
        webdataset(tmp_path, columns=["jsn"])
    with pytest.raises(ConfigurationError, match="no column to read"):
        webdataset(tmp_path, columns=["cls"], target="cls")
