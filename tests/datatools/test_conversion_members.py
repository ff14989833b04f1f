"""Conversions of tar shards whose samples have different members: none is lost silently."""

import tarfile

import numpy
import pytest

from hasten import ConfigurationError, HastenWarning, RunError
from hasten.data import convert, inspect, webdataset
from helpers.storages import read_all
from helpers.tar_files import pack, png

pytestmark = pytest.mark.usefixtures("brief_measurements")


def shards(path, members, samples=3):
    """Writes samples; ``members``: {extension of an image or a text: numbers of the samples that have it}."""
    files = []
    for sample in range(samples):
        files.append((f"{sample:04}.cls", str(sample).encode()))
        for ending, numbers in members.items():
            if sample in numbers:
                files.append((f"{sample:04}.{ending}", png(sample)[0] if "txt" not in ending else b"text"))
    return pack(path, files)


def names_in(directory):
    with tarfile.open(directory / "00000-of-00001.tar") as tar:
        return tar.getnames()


def test_convert_keeps_members_that_the_first_sample_lacks(tmp_path):
    data = shards(tmp_path / "in.tar", {"png": range(3), "txt": [1], "mask.png": [2]})
    convert(data, tmp_path / "out", to="webdataset", resize=8)
    assert names_in(tmp_path / "out") == [
        *("0000.cls", "0000.jpg"),
        *("0001.cls", "0001.jpg", "0001.txt"),
        *("0002.cls", "0002.jpg", "0002.mask.jpg"),
    ]
    read = read_all(webdataset(tmp_path / "out", columns=["jpg", "cls"]))
    assert [tuple(image.shape) for image in read["jpg"]] == [(3, 8, 8)] * 3 and read["cls"].tolist() == [0, 1, 2]


def test_convert_shards_of_which_one_ends_with_the_first_key_of_the_next(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.tar", "b.tar"):
        shards(tmp_path / "in" / name, {"png": [0]}, samples=1)
    with pytest.raises(ConfigurationError, match="two samples in succession have the key '0000' and would become one"):
        convert(tmp_path / "in", tmp_path / "out", to="webdataset", resize=8)
    assert not (tmp_path / "out").exists()
    assert convert(tmp_path / "in", tmp_path / "out", to="webdataset", resize=8, shards=2)["rows"] == 2


def test_convert_uses_an_image_of_another_type_if_no_sample_has_both(tmp_path):
    data = shards(tmp_path / "in.tar", {"png": [0], "jpeg": [1, 2]})
    convert(data, tmp_path / "out", to="webdataset", resize=8)
    assert names_in(tmp_path / "out") == [f"000{number}.{ending}" for number in range(3) for ending in ("cls", "jpg")]
    convert(data, tmp_path / "rows", to="rows", resize=8)
    assert numpy.load(tmp_path / "rows" / "png.npy").shape == (3, 3, 8, 8)


@pytest.mark.parametrize("members", [{"jpg": range(3), "png": range(3)}, {"jpg": range(3), "png": [2]}], ids=str)
def test_convert_images_that_would_become_one_are_refused(tmp_path, members):
    data = shards(tmp_path / "in.tar", members)
    with pytest.raises(ConfigurationError, match=r"images \.jpg and \.png, which with --resize both become \.jpg; "):
        convert(data, tmp_path / "out", to="webdataset", resize=8)
    assert not (tmp_path / "out").exists()


def test_convert_to_rows_names_a_column_that_samples_lack(tmp_path):
    data = shards(tmp_path / "in.tar", {"mask.png": [0, 1], "png": range(3)})
    problem = r"1 of 3 samples, the first is 0002, have no file \.mask\.png, and the matrix of column 'mask.png'"
    with pytest.raises(ConfigurationError, match=rf"{problem}.*; .*--max-bad-rows 1"):
        convert(data, tmp_path / "out", to="rows", resize=8)
    assert not (tmp_path / "out").exists()
    result = convert(data, tmp_path / "out", to="rows", resize=8, max_bad_rows=1)
    assert (result["rows"], result["skipped_rows"]) == (2, 1)
    assert numpy.load(tmp_path / "out" / "mask.png.npy").shape == (2, 3, 8, 8)
    with pytest.raises(RunError, match=r"it has no file that ends in \.mask\.png; it is bad row number 2"):
        rare = shards(tmp_path / "rare.tar", {"png": range(3), "mask.png": [0]})
        convert(rare, tmp_path / "none", to="rows", resize=8, max_bad_rows=1)


def test_convert_to_rows_says_which_members_are_no_column(tmp_path):
    data = shards(tmp_path / "in.tar", {"png": range(3), "txt": [1], "mask.png": [2]})
    with pytest.warns(HastenWarning, match=r"the first sample has no \.mask\.png, \.txt: .* so these are left out"):
        result = convert(data, tmp_path / "out", to="rows", resize=8)
    assert result["rows"] == 3 and sorted(result["files"]) == ["cls.npy", "png.npy"]


def test_inspect_measures_what_the_first_sample_has(tmp_path):
    data = shards(tmp_path / "in.tar", {"png": range(3), "txt": [1]})
    result = inspect(data, budget=0.1)
    assert result["trouble"] is None and set(result["columns"]) == {"cls", "png"}


def test_member_whose_name_is_not_utf8_is_converted(tmp_path):
    data = pack(tmp_path / "in.tar", [("caf\udce9.cls", b"0"), ("caf\udce9.png", png(0)[0])])
    assert convert(data, tmp_path / "out", to="webdataset", resize=8)["rows"] == 1
