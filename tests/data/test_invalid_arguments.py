"""Invalid arguments and files without data: one clear line at the call, from every function that makes a source."""

import gzip
import json
import pickle
import zipfile

import numpy
import pytest
import torch

from hasten.core.errors import ConfigurationError
from hasten.data import arrays, csv, feather, images, parquet, tfrecord, tokens, webdataset
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import frame_records
from helpers.tar_files import pack, png, sample

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
import pyarrow.feather as arrow_feather  # noqa: E402
import pyarrow.parquet as arrow_parquet  # noqa: E402

MAKERS = {
    "parquet": parquet,
    "feather": feather,
    "csv": csv,
    "tfrecord": tfrecord,
    "webdataset": webdataset,
    "images": images,
}
FILES = {
    "parquet": "t.parquet",
    "feather": "t.feather",
    "csv": "t.csv",
    "tfrecord": "t.tfrecord",
    "webdataset": "t.tar",
    "images": "a/t.png",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A valid file of every kind."""
    directory = tmp_path_factory.mktemp("data")
    table = pa.table({"a": [1.0, 2.0], "b": [1, 2], "label": [0, 1]})
    arrow_parquet.write_table(table, directory / "t.parquet")
    arrow_feather.write_feather(table, directory / "t.feather")
    (directory / "t.csv").write_text("a,b,label\n1,2,0\n")
    (directory / "t.tfrecord").write_bytes(
        frame_records([encode_example({"a": [1.0, 2.0], "raw": b"1234", "label": 1})] * 3)
    )
    pack(directory / "t.tar", [*sample(1), *sample(2)])
    (directory / "a").mkdir()
    (directory / "a" / "t.png").write_bytes(png(0)[0])
    numpy.arange(100, dtype=numpy.uint16).tofile(directory / "t.bin")
    numpy.save(directory / "t.npy", numpy.arange(100))
    return directory


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def refused(make, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 900


def test_valid_files_are_accepted(directory):
    for name, make in MAKERS.items():
        assert len(make(directory / FILES[name]).source) >= 1
    assert len(tokens(directory / "t.bin", 8).source) == 12


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (None, "a file is given by a str or a Path, not by None"),
        (3, "not by 3"),
        ([], "no file was given"),
        ([None], "not by None"),
        ("", "an empty str"),
        (b"t", "not by 116"),
        ("no*where", "no file matches"),
        ("nowhere/at/all", "there is no"),
        ("a\0b", "there is no file"),
        ("s5://bucket/x", "Protocol not known"),
        ({"t": 1}, "there is no file t"),
    ],
    ids=repr,
)
def test_source_invalid_paths_are_refused(name, paths, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if isinstance(paths, str) and "://" in paths:
        pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
    refused(lambda: MAKERS[name](paths), message)


TABLES = [
    ({"columns": "a"}, r"columns=\['a'\]"),
    ({"columns": 3}, "columns= must be a list of names, not 3"),
    ({"columns": [["a"]]}, r"columns= must be a list of names; \['a'\] is not a name"),
    ({"columns": [1]}, "; 1 is not a name"),
    ({"columns": []}, "columns= is empty"),
    ({"columns": ["a", "a"]}, "columns= contains 'a' twice"),
    ({"columns": {"a"}}, "must be a list of names, not {"),
    ({"columns": b"a"}, "not b'a'"),
    ({"target": ["label"]}, r"target= must be a string, .*, not \['label'\]"),
    ({"target": 2}, "target= must be a string, .*, not 2"),
    ({"target": ""}, "no column ''"),
    ({"fill": "0"}, "fill= must be a number"),
    ({"fill": {"lable": 0}}, r"'lable' that does not exist \(did you mean label\?\)"),
    ({"target": "label", "classes": ["0"]}, "classes= are the values of a text target"),
]
RECORDS = [
    ({"features": "a"}, r"features=\['a'\]"),
    ({"features": 3}, "not 3"),
    ({"features": []}, "features= is empty"),
    ({"features": {}}, "features= is empty"),
    ({"features": {3: ()}}, "; 3 is not a name"),
    ({"features": {"a": 2}}, r"features={'a': \.\.\.} must be a shape, as in \(28, 28\), not 2"),
    ({"features": {"a": "x"}}, "must be a shape"),
    ({"features": {"a": (-1,)}}, r"not \(-1,\)"),
    ({"features": {"a": (True,)}}, r"not \(True,\)"),
    ({"features": {"raw": ("uint8", (4,))}}, "must be a shape"),
    ({"features": {"raw": (torch.uint8, 4)}}, "not 4"),
    (
        {"features": {"a": (torch.uint8, (2,))}},
        "feature 'a' holds float values, not byte strings that contain torch.uint8",
    ),
    ({"features": ["b"]}, "there is no feature 'b'"),
    ({"target": ["a"]}, r"target= must be a string, .*, not \['a'\]"),
    ({"target": "lable"}, "did you mean label"),
]
TARS = [
    ({"columns": "cls"}, r"columns=\['cls'\]"),
    ({"columns": [5]}, "; 5 is not a name"),
    ({"columns": []}, "columns= is empty"),
    ({"target": ["cls"]}, "target= must be a string"),
    ({"target": "clz"}, r"ends in \.clz \(did you mean cls"),
    ({"resize": 10**6}, "makes images of 1000000000000 pixels, and"),
    ({"pixels": "a"}, "pixels= must be an integer of at least 1, not 'a'"),
]
IMAGES = [
    ({"pixels": "a"}, "pixels= must be an integer of at least 1, not 'a'"),
    ({"pixels": 0}, "pixels="),
    ({"pixels": True}, "pixels="),
    ({"pixels": 1.5}, "pixels="),
    ({"pixels": 99, "resize": 10}, r"resize=10 makes images of 100 pixels, and 99 are allowed"),
    ({"resize": 10**6}, "makes images of 1000000000000 pixels"),
    ({"resize": (1, 10**12)}, "makes images of"),
    ({"resize": True}, "resize must be the side of a square"),
    ({"resize": 2.5}, "not 2.5"),
    ({"resize": (4, True)}, "resize must be"),
    ({"resize": {4, 5}}, "resize must be"),
    ({"labels": "directories"}, 'labels= must be "directory", a dict'),
    ({"labels": [0]}, 'labels= must be "directory", a dict'),
    ({"labels": {}}, "has no label"),
    ({"labels": {"t.png": "cat"}}, "the label of .*t.png is not a number: 'cat'"),
    ({"labels": {"t.png": 10**30}}, "a tensor cannot hold the labels"),
]
SETTINGS = [
    *((name, *case) for name in ("parquet", "feather", "csv") for case in TABLES),
    *(
        ("parquet", {"gigabytes": each}, "gigabytes= must be a number of at least 0")
        for each in ("1", -1, float("nan"))
    ),
    *(("tfrecord", *case) for case in RECORDS),
    *(("webdataset", *case) for case in TARS),
    *(("images", *case) for case in IMAGES),
]


@pytest.mark.parametrize(
    ("name", "settings", "message"), SETTINGS, ids=[f"{name} {settings}" for name, settings, _ in SETTINGS]
)
def test_source_invalid_arguments_are_refused(directory, name, settings, message):
    refused(lambda: MAKERS[name](directory / FILES[name], **settings), message)


def test_webdataset_target_may_start_with_a_dot(directory):
    text, number = webdataset(directory / "t.tar", columns=[".txt"], target=".CLS").source.read(numpy.array([0]))
    assert number.tolist() == [1] and text == ["text 1 é"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"where": "tape"}, "'memory' or 'disk'"),
        ({"where": None}, "'memory' or 'disk'"),
        ({"gigabytes": "1"}, "must be a number above 0, not '1'"),
        ({"gigabytes": float("nan")}, "not nan"),
        ({"gigabytes": [1]}, r"not \[1\]"),
        ({"where": "disk", "directory": 5}, "is the path of a directory, not 5"),
        ({"where": "disk", "directory": ""}, "is the path of a directory, not ''"),
    ],
    ids=str,
)
def test_cache_invalid_arguments_are_refused(settings, message):
    refused(lambda: arrays(torch.arange(4)).cache(**settings), message)


# ---- tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 0}, r"tokens\(length=\) must be an integer of at least 1, not 0"),
        ({"length": "8"}, "not '8'"),
        ({"length": True}, "not True"),
        ({"length": 8, "stride": 0}, r"tokens\(stride=\) must be an integer of at least 1, not 0"),
        ({"length": 8, "stride": False}, "not False"),
        ({"length": 8, "stride": 1.5}, "not 1.5"),
        ({"length": 10**30}, r"tokens\(length=\) must be at most"),
        ({"length": 10**15}, "shorter than a window"),
        ({"length": 8, "stride": 10**30}, r"tokens\(stride=\) must be at most"),
        ({"length": 8, "dtype": "float32"}, "is no integer type"),
        ({"length": 8, "dtype": "bool"}, "is no integer type"),
        ({"length": 8, "dtype": object}, "is no integer type"),
        ({"length": 8, "dtype": "V0"}, "is no integer type"),
        ({"length": 8, "dtype": "uint15"}, "'uint15'.: unknown"),
        ({"length": 8, "dtype": torch.uint16}, "torch.uint16.: unknown"),
        ({"length": 8, "dtype": ">u2"}, "torch cannot hold"),
    ],
    ids=str,
)
def test_tokens_invalid_arguments_are_refused(directory, settings, message):
    refused(lambda: tokens(directory / "t.bin", **settings), message)


def test_tokens_huge_stride_gives_one_window(directory):
    (batch,) = tokens(directory / "t.bin", 8, stride=2**62).batch(4)
    assert batch[0].tolist() == [list(range(8))]


def test_tokens_dtype_that_contradicts_the_file_is_refused(directory, tmp_path):
    refused(
        lambda: tokens(directory / "t.npy", 8, dtype="uint16"),
        r"t\.npy holds int64, not dtype=uint16; omit dtype=",
    )
    assert len(tokens(directory / "t.npy", 8, dtype="int64").source) == 12
    header = numpy.zeros(256, numpy.int32)
    header[0] = 20240520
    (tmp_path / "t.bin").write_bytes(header.tobytes() + bytes(200))
    refused(lambda: tokens(tmp_path / "t.bin", 8, dtype="uint32"), r"t\.bin holds uint16, not dtype=uint32")


def zipped(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", b"weights")
    return path.read_bytes()


FOREIGN = {
    "t.bin": (lambda directory: (directory / "t.parquet").read_bytes(), "is a Parquet file"),
    "u.bin": (lambda directory: (directory / "t.feather").read_bytes(), "is an Arrow file"),
    "v.bin": (lambda directory: (directory / "t.npy").read_bytes(), r"is a NumPy array, which must be named \.npy"),
    "w.bin": (lambda directory: (directory / "a" / "t.png").read_bytes(), "is a PNG image"),
    "photo.jpg": (lambda directory: b"\xff\xd8\xff\xe0" + bytes(200), "is a JPEG image"),
    "x.bin": (lambda directory: gzip.compress(bytes(range(256)) * 9), "is compressed with gzip"),
    "pytorch_model.bin": (
        lambda directory: zipped(directory / "zip"),
        "is a zip archive, such as a PyTorch checkpoint",
    ),
    "notes.txt": (lambda directory: b"some words that are no numbers", r"ends in neither \.bin nor \.npy"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_tokens_of_another_format_is_refused(directory, tmp_path, name):
    content, kind = FOREIGN[name]
    content = content(directory)
    content += bytes(len(content) % 2)
    (tmp_path / name).write_bytes(content)
    refused(lambda: tokens(tmp_path / name, 4), f"{name}.*{kind}.*dtype=")
    assert len(tokens(tmp_path / name, 4, dtype="uint16").source), "unless its type was named"


def test_tokens_of_remote_path_is_refused():
    pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
    import fsspec

    fsspec.filesystem("memory").pipe_file("/text/a.bin", bytes(100))
    refused(
        lambda: tokens("memory://text/a.bin", 4),
        r"maps local files into memory; copy memory://.*a\.bin to this machine first",
    )


# ---- files of another format


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "csv"])  # nearly any bytes are text of some kind
def test_source_file_of_another_format_is_refused(directory, tmp_path, name):
    """Each function gets the files of all others under its own suffix, and some invalid ones: always one line."""
    others = {other: (directory / file).read_bytes() for other, file in FILES.items() if other != name}
    others |= {
        "empty": b"",
        "zeros": bytes(5000),
        "a pickle": pickle.dumps({"a": [1] * 1000}),
        "json": json.dumps([{}] * 99).encode(),
    }
    for other, content in others.items():
        path = tmp_path / other / "class" / FILES[name].split("/")[-1]
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        with pytest.raises(Exception) as caught:
            made = MAKERS[name](path, **({"labels": None} if name == "images" else {}))
            made.source.read(numpy.array([0]))
        kind = type(caught.value).__name__
        assert kind in (("BadRow",) if name == "images" else ("ConfigurationError", "FileMissingError")), (
            f"{name} of {other}: {caught.value!r}"
        )
        assert "\n" not in str(caught.value) and path.name in str(caught.value)


@pytest.mark.parametrize("name", ["parquet", "feather", "tfrecord", "images", "webdataset", "arrays"])
def test_arrays_pickled_content_is_never_loaded(tmp_path, name):
    """The file would leave another file behind if it were unpickled."""
    proof = tmp_path / "executed"

    class RunsWhenUnpickled:
        def __reduce__(self):
            return open, (str(proof), "w")

    content = pickle.dumps([RunsWhenUnpickled()] * 3)
    numpy.save(tmp_path / "t.npy", numpy.array([RunsWhenUnpickled()]), allow_pickle=True)
    as_array = (tmp_path / "t.npy").read_bytes()
    pack(tmp_path / "t.tar", [("0.npy", as_array), ("0.json", content), ("0.cls", content)])
    makers = [lambda: arrays(tmp_path / "t.npy"), lambda: tokens(tmp_path / "t.npy", 1)]
    if name not in ("arrays", "webdataset"):
        path = tmp_path / "c" / FILES[name].split("/")[-1]
        path.parent.mkdir()
        path.write_bytes(content)
        makers = [lambda: MAKERS[name](path).source.read(numpy.array([0]))]
    elif name == "webdataset":
        makers = [
            lambda each=each: webdataset(tmp_path / "t.tar", columns=[each]).source.read(numpy.array([0]))
            for each in ("npy", "json", "cls")
        ]
    for make in makers:
        with pytest.raises(Exception) as caught:
            make()
        assert type(caught.value).__name__ in ("ConfigurationError", "FileMissingError", "BadRow")
    assert not proof.exists()
