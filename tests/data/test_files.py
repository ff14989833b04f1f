"""Where files are, what marks their contents, and patience with a network."""

import os

import pytest

from hasten.contract.errors import Failure, Refusal
from hasten.data import remote
from hasten.data.files import found, mapped_bytes, opened, stamp, unchanged

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("a.csv", "b.csv", "c.txt", ".hidden.csv", "deep/d.csv", "deep/er/e.csv", "odd[1].csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Unsteady(MemoryFileSystem):
    """A file system that fails as often as it is told, then works."""

    protocol, store, pseudo_dirs = "unsteady", {}, [""]
    failures, asked = 0, 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("unsteady:/"))

    def _maybe(self):
        type(self).asked += 1
        if type(self).failures > 0:
            type(self).failures -= 1
            raise ConnectionError("the line is dead")

    def info(self, path, **more):
        self._maybe()
        return super().info(path, **more)

    def _open(self, path, **more):
        self._maybe()
        return super()._open(path, **more)


@pytest.fixture
def unsteady(monkeypatch):
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0, 0.0))
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    Unsteady.failures = Unsteady.asked = 0
    system = fsspec.filesystem("unsteady")
    system.pipe_file("/data/one.bin", bytes(range(256)))
    system.pipe_file("/data/two.bin", b"two")
    return Unsteady


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("*.csv", ["a.csv", "b.csv", "odd[1].csv"]),
        ("./*.csv", ["./a.csv", "./b.csv", "./odd[1].csv"]),
        ("**/*.csv", ["a.csv", "b.csv", "deep/d.csv", "deep/er/e.csv", "odd[1].csv"]),
        ("deep", ["deep/d.csv", "deep/er/e.csv"]),
        ("deep/**", ["deep/d.csv", "deep/er/e.csv"]),
        ("*/d.csv", ["deep/d.csv"]),
        ("odd[1].csv", ["odd[1].csv"]),
        (["b.csv", "a.csv", "a.*"], ["a.csv", "b.csv"]),
    ],
)
def test_found(folder, patterns, names):
    assert found(patterns, (".csv",)) == names


def test_a_path_and_a_folder(folder):
    assert found(folder, (".csv",)) == sorted(str(folder / n) for n in ("a.csv", "b.csv", "deep/d.csv", "deep/er/e.csv", "odd[1].csv"))
    assert str(folder / "c.txt") in found(folder)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ("*.parquet", "no file matches *.parquet (there is:"),
        ("aa.csv", "there is no file aa.csv (did you mean a.csv"),
        ("nowhere/x.csv", "there is no folder nowhere"),
        ([], "no file was named"),
        (3, "not by 3"),
        ([b"a.csv"], "not by b'a.csv'"),
        ("what://x/y", "Protocol not known"),
    ],
)
def test_nothing_found(folder, patterns, said):
    with pytest.raises(Refusal) as refused:
        found(patterns, (".csv",))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_without_such_files(folder):
    with pytest.raises(Refusal, match="holds no file that ends in"):
        found("deep", (".parquet",))


def test_opened_and_mapped(folder):
    with opened("a.csv") as file:
        file.seek(2)
        assert file.read() == b"csv"
    assert bytes(mapped_bytes("a.csv")) == b"a.csv"
    assert mapped_bytes("a.csv") is mapped_bytes("a.csv")
    (folder / "empty").touch()
    assert len(mapped_bytes("empty")) == 0
    for read in (opened, mapped_bytes, stamp):
        with pytest.raises(Refusal, match=r"cannot read gone\.csv: No such file"):
            read("gone.csv")


def test_a_file_that_changes_or_goes(folder):
    before = stamp("a.csv")
    unchanged("a.csv", before)
    os.utime("a.csv", ns=(before[2] + 1, before[2] + 1))
    with pytest.raises(Failure, match=r"a\.csv changed while it was being read"):
        unchanged("a.csv", before)
    assert bytes(mapped_bytes("b.csv")) == b"b.csv"
    (folder / "b.new").write_text("other")
    os.replace("b.new", "b.csv")
    assert bytes(mapped_bytes("b.csv")) == b"other"
    os.remove("a.csv")
    with pytest.raises(Failure, match="went away"):
        unchanged("a.csv", before)


def test_remote_files(unsteady):
    one = "unsteady:///data/one.bin"
    assert found("unsteady://data/*.bin") == [one, "unsteady:///data/two.bin"] == found("unsteady://data", (".bin",))
    with opened(one) as file:
        assert file.seek(-3, os.SEEK_END) == 253
        assert file.read() == bytes([253, 254, 255])
        assert file.seek(5) == 5 and file.read(2) == bytes([5, 6]) and file.tell() == 7
    before = stamp(one)
    assert before[:2] == [one, 256] and stamp(one) == before
    unsteady().pipe_file("/data/one.bin", bytes(256))
    with pytest.raises(Failure, match="changed"):
        unchanged(one, before)
    with pytest.raises(Refusal, match=r"cannot read unsteady:///data/none"):
        opened("unsteady:///data/none")


def test_patience(unsteady):
    unsteady.failures = 3
    with opened("unsteady:///data/two.bin") as file:
        assert file.read() == b"two"
    unsteady.failures = 100
    asked = unsteady.asked
    with pytest.raises(Failure, match=r"unsteady:///data/two.bin cannot be reached, asked 4 times: ConnectionError: the line is dead"):
        stamp("unsteady:///data/two.bin")
    assert unsteady.asked == asked + 4
