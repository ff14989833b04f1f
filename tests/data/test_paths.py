"""Resolving paths, file signatures, and retries of network requests."""

import os
import shutil
import time

import pytest

from hasten.core.errors import ConfigurationError, RunError
from hasten.data.io import remote
from hasten.data.io.paths import check_unchanged, file_signature, mapped_bytes, open_file, resolve_paths

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


@pytest.fixture
def directory(tmp_path, monkeypatch):
    for name in ("a.csv", "b.csv", "c.txt", ".hidden.csv", "deep/d.csv", "deep/er/e.csv", "odd[1].csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Unsteady(MemoryFileSystem):
    """A file system that fails as often as configured, then works."""

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
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))
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
def test_resolve_paths_finds_files(directory, patterns, names):
    assert resolve_paths(patterns, (".csv",)) == names


def test_resolve_paths_of_a_path_and_a_directory(directory):
    assert resolve_paths(directory, (".csv",)) == sorted(
        str(directory / n) for n in ("a.csv", "b.csv", "deep/d.csv", "deep/er/e.csv", "odd[1].csv")
    )
    assert str(directory / "c.txt") in resolve_paths(directory)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("*.parquet", "no file matches *.parquet (there is:"),
        ("aa.csv", "there is no file aa.csv (did you mean a.csv"),
        ("nowhere/x.csv", "there is no directory nowhere"),
        ([], "no file was given"),
        (3, "not by 3"),
        ([b"a.csv"], "not by b'a.csv'"),
        ("what://x/y", "Protocol not known"),
    ],
)
def test_resolve_paths_without_a_match_raises(directory, patterns, message):
    with pytest.raises(ConfigurationError) as refused:
        resolve_paths(patterns, (".csv",))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_resolve_paths_of_a_directory_without_such_files_raises(directory):
    with pytest.raises(ConfigurationError, match="holds no file that ends in"):
        resolve_paths("deep", (".parquet",))


def test_open_file_reads_and_maps(directory):
    with open_file("a.csv") as file:
        file.seek(2)
        assert file.read() == b"csv"
    assert bytes(mapped_bytes("a.csv")) == b"a.csv"
    assert mapped_bytes("a.csv") is mapped_bytes("a.csv")
    (directory / "empty").touch()
    assert len(mapped_bytes("empty")) == 0
    for read in (open_file, mapped_bytes, file_signature):
        with pytest.raises(ConfigurationError, match=r"cannot read gone\.csv: No such file"):
            read("gone.csv")


def test_open_file_of_a_changed_or_deleted_file_raises(directory):
    before = file_signature("a.csv")
    check_unchanged("a.csv", before)
    os.link("a.csv", "a.backup")
    check_unchanged("a.csv", before)  # a link does not change the content
    os.utime("a.csv", ns=(before[2][0] + 1,) * 2)
    with pytest.raises(RunError, match=r"a\.csv changed while it was being read"):
        check_unchanged("a.csv", before)
    assert bytes(mapped_bytes("b.csv")) == b"b.csv"
    (directory / "b.new").write_text("other")
    os.replace("b.new", "b.csv")
    assert bytes(mapped_bytes("b.csv")) == b"other"
    os.remove("a.csv")
    with pytest.raises(RunError, match="became unreadable"):
        check_unchanged("a.csv", before)


def test_signature_detects_a_change_with_restored_time(directory):
    before = file_signature("a.csv")
    time.sleep(0.02)  # the clock of a file system has a coarse resolution
    (directory / "a.csv").write_text("A.CSV")
    os.utime("a.csv", ns=(before[2][0], before[2][0]))
    assert (
        file_signature("a.csv")[:2] == before[:2] == [str(directory / "a.csv"), 5] and file_signature("a.csv") != before
    )


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("shards", ["2023/0.tar", "2024/0.tar", "2024/1.tar"]),
        ("shards/*", ["2023/0.tar", "2024/0.tar", "2024/1.tar"]),
        ("shards/*/*.tar", ["2023/0.tar", "2024/0.tar", "2024/1.tar"]),
        ("shards/**", ["2023/0.tar", "2024/0.tar", "2024/1.tar"]),
        ("shards/**/0.tar", ["2023/0.tar", "2024/0.tar"]),
        ("shards/**/a_link", ["a_link/0.tar", "a_link/1.tar"]),
        ("./shards/**/2024", ["2024/0.tar", "2024/1.tar"]),
        ("shards/a_link/*.tar", ["a_link/0.tar", "a_link/1.tar"]),
    ],
)
def test_walk_visits_a_linked_directory_once(directory, pattern, names):
    for name in ("2023/0.tar", "2024/0.tar", "2024/1.tar"):
        (directory / "shards" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "shards" / name).touch()
    (directory / "shards" / "a_link").symlink_to("2024")
    (directory / "shards" / "back").symlink_to(".")
    (directory / "shards" / "2023" / "back").symlink_to("..")  # two cyclic links make ever more paths
    assert [os.path.normpath(each) for each in resolve_paths(pattern, (".tar",))] == [
        f"shards/{name}" for name in names
    ]


def test_walk_dangling_link_is_an_unreadable_file(directory):
    for name, to in {"gone.csv": "nowhere", "deep/circle.csv": "circle.csv"}.items():
        (directory / name).symlink_to(to)
    assert {str(directory / "gone.csv"), str(directory / "deep/circle.csv")} < set(resolve_paths(directory, (".csv",)))
    assert resolve_paths("*/circle.*") == ["deep/circle.csv"]
    for name in ("gone.csv", "deep/circle.csv"):
        with pytest.raises(ConfigurationError, match=f"^{name} is a link to a missing file$"):
            resolve_paths(name)
        with pytest.raises(ConfigurationError, match=f"^cannot read {name}: "):
            open_file(name)


def test_walk_directory_removed_meanwhile_is_refused(directory, monkeypatch):
    stat = os.stat

    def remove_first(path, *args, **kwargs):
        if str(path).endswith("deep"):
            shutil.rmtree(path, ignore_errors=True)
        return stat(path, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(ConfigurationError, match=r"cannot read the directory .*deep"):
        patched.setattr(os, "stat", remove_first)
        resolve_paths(directory)


def test_resolve_paths_expands_numbers_in_braces(directory):
    for number in range(12):
        (directory / f"s-{number:03}-of-012.tar").touch()
    assert resolve_paths("s-{003..010}-of-012.tar") == [f"s-{number:03}-of-012.tar" for number in range(3, 11)]
    assert resolve_paths("s-0{0..1}{0..1}-of-012.tar") == [f"s-{number:03}-of-012.tar" for number in (0, 1, 10, 11)]
    assert len(resolve_paths("s-{000..001}*.tar")) == 2
    with pytest.raises(ConfigurationError, match=r"there is no file s-012-of-012\.tar"):
        resolve_paths("s-{003..999999999}-of-012.tar")
    with pytest.raises(ConfigurationError, match=r"\{5\.\.3\} in s-\{5\.\.3\}\.tar counts backwards; write \{3\.\.5\}"):
        resolve_paths("s-{5..3}.tar")


def test_resolve_paths_of_remote_files(unsteady):
    one = "unsteady:///data/one.bin"
    assert (
        resolve_paths("unsteady://data/*.bin")
        == [one, "unsteady:///data/two.bin"]
        == resolve_paths("unsteady://data", (".bin",))
    )
    with open_file(one) as file:
        assert file.seek(-3, os.SEEK_END) == 253
        assert file.read() == bytes([253, 254, 255])
        assert file.seek(5) == 5 and file.read(2) == bytes([5, 6]) and file.tell() == 7
    before = file_signature(one)
    assert before[:2] == [one, 256] and file_signature(one) == before
    unsteady().pipe_file("/data/one.bin", bytes(256))
    with pytest.raises(RunError, match="changed"):
        check_unchanged(one, before)
    with pytest.raises(ConfigurationError, match=r"cannot read unsteady:///data/none"):
        open_file("unsteady:///data/none")


def test_resolve_paths_of_a_remote_directory_equals_local(unsteady, directory):
    names = ("b.csv", "a.csv", "c.txt", ".hidden.csv", "deep/D.CSV", "deep/.d/x.csv", "deep/er/e.csv")
    for name in names:
        (directory / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "tree" / name).touch()
        unsteady().pipe_file(f"/tree/{name}", b"")
    for suffixes in ((".csv",), ()):
        here = [path.removeprefix("tree/") for path in resolve_paths("tree", suffixes)]
        assert [path.removeprefix("unsteady:///tree/") for path in resolve_paths("unsteady://tree/", suffixes)] == here
        assert here == sorted(here) and len(here) == 5 - len(suffixes)


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "*.csv",
        "**",
        "**/*.csv",
        "**/*",
        "d*",
        "d*/*",
        "deep/**",
        "*/er",
        "**/er",
        "**/er/*",
        "*/*/*.csv",
        "?.csv",
        "[ab].csv",
        ".*",
        ".*/*",
        "**/.*",
        "**/.d/*",
        ".h*.csv",
        "*/D.CSV",
        "**/e*/**",
        "deep/**/*.csv",
        "**/deep/**/e.*",
        "nothing*",
    ],
)
@pytest.mark.parametrize("suffixes", [(".csv",), ()], ids=["csv", "all"])
def test_resolve_paths_of_a_remote_pattern_equals_local(unsteady, directory, pattern, suffixes):
    """Matching directories are descended into; hidden names are skipped unless the pattern names them."""
    names = (
        "b.csv",
        "a.csv",
        "c.txt",
        ".hidden.csv",
        "deep/D.CSV",
        "deep/.d/x.csv",
        "deep/er/e.csv",
        "deep/er/.e.csv",
        "dir.csv/in.csv",
    )
    for name in (*names, "dir.csv/in.txt", ".d/y.csv", ".d/.z.csv", "deep/er/deep/e.csv"):
        (directory / "forest" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "forest" / name).touch()
        unsteady().pipe_file(f"/forest/{name}", b"")

    def meant(root):
        try:
            return [path.partition("forest/")[2] for path in resolve_paths(f"{root}/{pattern}", suffixes)]
        except ConfigurationError as refused:
            assert "no file matches" in str(refused)
            return []

    assert meant("unsteady://forest") == meant("forest")
    assert bool(meant("forest")) == (pattern not in ("nothing*",))


def test_resolve_paths_of_a_remote_non_directory_is_a_file(unsteady, monkeypatch):
    """Such as a link, which sftp reports as a type of its own."""
    ls = Unsteady.ls

    def linked(system, path, detail=True, **more):
        entries = ls(system, path, detail=True, **more)
        return [each | {"type": "link"} if each["name"].endswith("one.bin") else each for each in entries]

    monkeypatch.setattr(Unsteady, "ls", linked)
    assert resolve_paths("unsteady://data/*.bin") == ["unsteady:///data/one.bin", "unsteady:///data/two.bin"]


@pytest.mark.parametrize("pattern", ["shrinking", "shrinking/**"])
def test_resolve_paths_of_a_remote_directory_deleted_meanwhile(unsteady, monkeypatch, pattern):
    for name in ("a/1.bin", "gone/2.bin"):
        unsteady().pipe_file(f"/shrinking/{name}", b"")
    ls = Unsteady.ls

    def without_gone(system, path, *more, **named):
        if path.endswith("/gone"):
            raise FileNotFoundError(path)
        return ls(system, path, *more, **named)

    monkeypatch.setattr(Unsteady, "ls", without_gone)
    monkeypatch.setattr(Unsteady, "find", fsspec.AbstractFileSystem.find)
    assert resolve_paths(f"unsteady://{pattern}") == ["unsteady:///shrinking/a/1.bin"]


def test_resolve_paths_of_a_remote_pattern_lists_few_directories(unsteady, monkeypatch):
    for name in ("a/1.bin", "b/2.bin", "b/deep/3.bin"):
        unsteady().pipe_file(f"/many/{name}", b"")
    asked, ls = [], Unsteady.ls
    monkeypatch.setattr(
        Unsteady, "ls", lambda system, path, *more, **named: asked.append(path) or ls(system, path, *more, **named)
    )
    assert resolve_paths("unsteady://many/a/*") == ["unsteady:///many/a/1.bin"]
    assert {path.strip("/") for path in asked} == {"many/a"}
    asked.clear()
    assert len(resolve_paths("unsteady://many/**/*.bin")) == len(resolve_paths("unsteady://many")) == 3
    assert not asked, "one recursive listing instead of one request per directory"


def test_remote_requests_are_retried(unsteady):
    unsteady.failures = 3
    with open_file("unsteady:///data/two.bin") as file:
        assert file.read() == b"two"
    unsteady.failures = 100
    asked = unsteady.asked
    with pytest.raises(
        RunError, match=r"cannot reach unsteady:///data/two.bin after 4 attempts: ConnectionError: the line is dead"
    ):
        file_signature("unsteady:///data/two.bin")
    assert unsteady.asked == asked + 4


class Hosted(MemoryFileSystem):
    """Addresses as those of fsspec's SFTPFileSystem."""

    protocol, store, pseudo_dirs = "hosted", {}, [""]

    def __init__(self, host, **more):
        super().__init__(**more)

    @classmethod
    def _strip_protocol(cls, path):
        return fsspec.utils.infer_storage_options(path)["path"]

    @staticmethod
    def _get_kwargs_from_urls(path):
        found = fsspec.utils.infer_storage_options(path)
        return {key: value for key, value in found.items() if key not in ("path", "protocol")}


def test_resolve_paths_keeps_the_server_of_an_address():
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    fsspec.filesystem("hosted", host="server").pipe_file("/data/one.bin", b"1")
    assert resolve_paths("hosted://me@server/data/*.bin") == ["hosted://me@server/data/one.bin"]


class Listing(MemoryFileSystem):
    """Keeps listings, as s3fs does."""

    protocol, store, pseudo_dirs = "listing", {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("listing:/"))

    def ls(self, path, detail=True, **more):
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        return self.dircache[path]

    def invalidate_cache(self, path=None):
        self.dircache.clear()


def test_resolve_paths_lists_a_remote_directory_every_time():
    fsspec.register_implementation("listing", Listing, clobber=True)
    for count in (1, 2):
        fsspec.filesystem("listing").pipe_file(f"/grows/{count}.bin", b"")
        assert len(resolve_paths("listing://grows/*.bin")) == count
