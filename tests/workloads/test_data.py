"""Data directories and downloads: found, fetched from a real server, verified; messages for invalid data."""

import gzip
import hashlib
import http.server
import io
import tarfile
import threading
from functools import partial

import numpy
import pytest

from hasten import ConfigurationError, RunError
from hasten.workloads import cifar10, imdb
from hasten.workloads._data import File, download, find_file, members

CONTENT = b"forty-two\n" * 5000


@pytest.fixture
def directories(tmp_path, monkeypatch):
    """An empty data directory and an empty home."""
    monkeypatch.setenv("HASTEN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    return tmp_path


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def server(directories):
    """The address of a real server with one file on it."""
    (directories / "served").mkdir()
    (directories / "served" / "numbers.txt").write_bytes(CONTENT)
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(directories / "served"))
    ) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}/"
        http_server.shutdown()


def numbers_at(address: str, content: bytes = CONTENT) -> File:
    return File("numbers/numbers.txt", address, hashlib.sha256(content).hexdigest())


def everything_in(directory) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file()) if directory.exists() else []


def test_fetch_downloads_a_file_once(server, directories, capfd):
    path = download(numbers_at(server + "numbers.txt"))
    assert path == directories / "home/.cache/hasten/numbers/numbers.txt" and path.read_bytes() == CONTENT
    assert download(numbers_at("http://127.0.0.1:1/unreachable")) == path
    assert everything_in(directories / "home") == ["numbers.txt"] and capfd.readouterr().out == ""


def test_data_directory_has_precedence(server, directories):
    download(numbers_at(server + "numbers.txt"))
    own = directories / "data/numbers/numbers.txt"
    own.parent.mkdir()
    own.write_bytes(CONTENT)
    assert download(numbers_at("")) == find_file("numbers/numbers.txt") == own


def test_download_with_a_wrong_checksum_is_not_kept(server, directories):
    with pytest.raises(
        RunError, match=r"numbers\.txt sent is not the expected file.*put the right one at .*/numbers/numbers\.txt$"
    ):
        download(numbers_at(server + "numbers.txt", content=b"something else"))
    assert everything_in(directories / "home") == []


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/numbers.txt", "{server}missing.txt"])
def test_download_failure_names_the_address_and_the_path(server, directories, address):
    address = address.format(server=server)
    with pytest.raises(RunError) as failed:
        download(numbers_at(address))
    message = str(failed.value)
    assert (
        address in message
        and str(directories / "home/.cache/hasten/numbers/numbers.txt") in message
        and "\n" not in message
    )
    assert everything_in(directories / "home") == []


def test_another_file_in_its_place_is_refused(directories):
    wrong = directories / "data/numbers/numbers.txt"
    wrong.parent.mkdir()
    wrong.write_bytes(CONTENT[:-1])
    with pytest.raises(ConfigurationError, match=r"numbers\.txt is not the expected file \(sha256 .*remove it"):
        download(numbers_at("http://127.0.0.1:1/"))
    assert wrong.read_bytes() == CONTENT[:-1]


def test_read_only_directory_is_reported(server, directories):
    (directories / "home").write_text("a file, where a directory should be")
    with pytest.raises(RunError, match=r"cannot write .*set HASTEN_DATA"):
        download(numbers_at(server + "numbers.txt"))


def archive(path, files: dict[str, bytes]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_archive_is_read_by_name_without_extraction(directories, monkeypatch):
    files = {"a/one.txt": b"1", "../outside.txt": b"x" * 600, "/etc/absolute": b"", "a/two.txt": b"22"}
    path = archive(directories / "some.tar.gz", files)
    monkeypatch.chdir(directories)
    before = everything_in(directories)
    assert dict(members(path)) == files
    assert everything_in(directories) == before


DAMAGE = {
    "cut in half": lambda content: content[: len(content) // 2],
    "something else": lambda content: b"not an archive",
    "some bytes changed": lambda content: content[:200] + b"\xff" * 40 + content[240:],
    "zipped, but no archive": lambda content: gzip.compress(b"x" * 5000),
    "an archive without its end": lambda content: gzip.compress(gzip.decompress(content)[:3000]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_archive_is_refused(directories, damage):
    path = archive(
        directories / "some.tar.gz", {f"a/{n}.txt": hashlib.sha256(b"%d" % n).digest() * 40 for n in range(50)}
    )
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(ConfigurationError, match=r"some\.tar\.gz cannot be read"):
        list(members(path))


def official(directories, workload, monkeypatch, files: dict[str, bytes]):
    """A small archive in the official format, at the path where the workload expects the official one."""
    path = archive(directories / "data" / workload.OFFICIAL.path, files)
    monkeypatch.setattr(
        workload, "OFFICIAL", File(workload.OFFICIAL.path, "", hashlib.sha256(path.read_bytes()).hexdigest())
    )


def test_cifar10_is_converted_from_the_official_archive_once(directories, monkeypatch):
    red, blue = numpy.zeros((3, 32, 32), numpy.uint8), numpy.zeros((3, 32, 32), numpy.uint8)
    red[0], blue[2] = 200, 100
    rows = bytes([9]) + red.tobytes() + bytes([0]) + blue.tobytes()
    official(
        directories,
        cifar10,
        monkeypatch,
        {"cifar-10-batches-bin/test_batch.bin": rows, "cifar-10-batches-bin/readme.html": b"?"},
    )
    monkeypatch.setattr(cifar10, "IMAGES", {"test": 2})
    dataset = cifar10.Photographs("test")
    assert dataset.labels == [9, 0]
    for index, pixels in enumerate((red, blue)):
        seen = (dataset[index][0] * cifar10.STD + cifar10.MEAN) * 255
        assert abs(seen.numpy() - pixels).max() < 6  # tolerance for JPEG
    assert everything_in(directories / "home") == ["test.tar.gz"]
    (directories / "data" / cifar10.OFFICIAL.path).unlink()
    assert cifar10.Photographs("test").files == dataset.files


def test_imdb_reads_its_part_of_the_official_archive(directories, monkeypatch):
    names = [
        "train/pos/0_9.txt",
        "train/neg/1_2.txt",
        "train/pos/2_8.txt",
        "train/unsup/0_0.txt",
        "test/pos/0_10.txt",
        "test/neg/0_1.txt",
        "test/neg/1_1.txt",
    ]
    official(directories, imdb, monkeypatch, {f"aclImdb/{name}": name.encode() for name in names})
    monkeypatch.setattr(imdb, "LIMITS", {"train": 1, "test": 1})
    with pytest.raises(ConfigurationError, match="holds 1 and 2 reviews"):
        imdb._reviews()
    monkeypatch.setattr(imdb, "LIMITS", {"train": 2, "test": 1})
    imdb_part = directories / "home/.cache/hasten" / imdb.SUBSET
    imdb_part.unlink()
    with pytest.raises(ConfigurationError, match="holds 2 and 2 reviews"):  # train/pos has no second review
        imdb._reviews()


def test_archive_with_too_few_images_is_refused(directories):
    archive(directories / "data/cifar10-jpeg/test.tar.gz", {"test/cat/0000.jpg": b"?"})
    with pytest.raises(ConfigurationError, match=r"holds 1 images test/CLASS/NUMBER\.jpg, expected 10000"):
        cifar10.Photographs("test")
