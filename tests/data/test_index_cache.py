"""The index cache: the index of a file is stored until the file changes, validated before use, and its progress is
reported."""

import hashlib
import io
import os
import pickle
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy
import pytest

from hasten.cli.main import main
from hasten.core.errors import HastenWarning
from hasten.data import progress, tfrecord, webdataset
from hasten.data.formats import tfrecord as tfrecord_format
from hasten.data.formats import webdataset as webdataset_format
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import frame_records
from hasten.data.io import index_cache, paths, range_reader, remote
from hasten.data.io.paths import file_signature, mapped_bytes
from helpers.assertions import same
from helpers.process import FORK, join_process, start_process
from helpers.tar_files import npy, pack

SIZES = (80_000, 150_000, 110_000, 90_000)  # bytes of the samples, three times; together enough to be worth an index
MAKERS = {"tfrecord": tfrecord, "tar": webdataset}
DATA = {"tfrecord": "data", "tar": "bin"}  # the column of these bytes

_watched, _opened = set(), Counter()


def _record_open(event, arguments):
    if event == "open" and str(arguments[0]) in _watched:
        _opened[str(arguments[0])] += 1


sys.addaudithook(_record_open)  # Python's audit hook, which reports every opened file


def written(path, sizes=SIZES * 3):
    """A file of samples of these sizes; in another order it has the same length with every sample elsewhere."""
    contents = [numpy.random.default_rng(size).bytes(size) for size in sizes]
    if path.suffix == ".tar":
        numbered = [(f"{number:02}", content) for number, content in enumerate(contents)]
        parts = [[(f"{key}.bin", content), (f"{key}.npy", npy(numpy.arange(3.0)))] for key, content in numbered]
        return pack(path, [file for sample in parts for file in sample])
    path.write_bytes(frame_records([encode_example({"data": content, "x": [1.5, 2.5]}) for content in contents]))
    return path


def everything(source):
    return source.read(numpy.arange(len(source)))


def opened(path):
    """Returns (a source, how often opening it opened its file)."""
    paths._mapped.cache_clear()
    _watched.add(str(path))
    before = _opened[str(path)]
    source = MAKERS[path.suffix[1:]](path).source
    return source, _opened[str(path)] - before


def asked(web, path, query=""):
    """Returns (a source, how many requests it made); in a new thread, which has no open connections."""
    before = len(web.asked)
    with ThreadPoolExecutor(1) as another:
        source = another.submit(lambda: MAKERS[path.rpartition(".")[2]](f"{web.address}{path}{query}").source).result()
    return source, sum(method == "GET" and where == path + query for method, where, _ in web.asked[before:])


def cached_files():
    directory = Path(os.environ["HASTEN_CACHE"], "manifests")
    return sorted(directory.iterdir()) if directory.exists() else []


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def settled(monkeypatch):
    """Makes files that were just written count as old."""
    monkeypatch.setattr(index_cache, "TIMESTAMP_GRANULARITY_NS", 0)


@pytest.fixture
def web(tmp_path, monkeypatch):
    pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: fsspec cannot ask web servers")
    from helpers.web import serving

    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.01, 0.02, 0.04))
    with serving({f"/a.{kind}": written(tmp_path / f"far.{kind}").read_bytes() for kind in MAKERS}) as web:
        yield web


@pytest.mark.parametrize("kind", MAKERS)
def test_second_open_does_not_read_the_file(tmp_path, settled, kind):
    path = written(tmp_path / f"a.{kind}")
    first, times = opened(path)
    assert times > 0
    second, times = opened(path)
    assert times == 0
    assert same(everything(second), everything(first)) and second.fingerprint() == first.fingerprint()


@pytest.mark.parametrize("kind", MAKERS)
def test_second_open_of_a_remote_file_requests_no_content(web, kind):
    first, times = asked(web, f"/a.{kind}")
    assert times > 0
    second, times = asked(web, f"/a.{kind}")
    assert times == 0
    assert same(everything(second), everything(first))


@pytest.mark.parametrize("kind", MAKERS)
def test_changed_file_is_indexed_again(tmp_path, settled, kind):
    path = written(tmp_path / f"a.{kind}")
    before, size, entries = everything(opened(path)[0]), path.stat().st_size, cached_files()
    written(path, SIZES[::-1] * 3)
    assert path.stat().st_size == size
    for expected in (True, False):  # the same content is stored again
        source, times = opened(path)
        assert (times > 0) is expected
        assert not same(everything(source), before) and {*map(len, everything(source)[DATA[kind]])} == {*SIZES}
    assert cached_files() == entries, "the new index replaces the old one"


@pytest.mark.parametrize("kind", MAKERS)
def test_changed_remote_file_is_indexed_again(web, tmp_path, kind):
    before = everything(asked(web, f"/a.{kind}")[0])
    web.content[f"/a.{kind}"] = written(tmp_path / f"far.{kind}", SIZES[::-1] * 3).read_bytes()
    source, times = asked(web, f"/a.{kind}")
    assert times > 0 and not same(everything(source), before)


def test_index_of_recent_small_or_truncated_file_is_not_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "TIMESTAMP_GRANULARITY_NS", 3600 * 10**9)  # however long the machine takes
    opened(written(tmp_path / "now.tar"))
    assert not cached_files(), "a change within the clock's resolution keeps the time"
    monkeypatch.setattr(index_cache, "TIMESTAMP_GRANULARITY_NS", 0)
    opened(written(tmp_path / "small.tar", [1000] * 3))
    assert not cached_files(), "indexing it is faster than reading a cache"
    cut = written(tmp_path / "cut.tfrecord")
    cut.write_bytes(cut.read_bytes()[:-1])
    for _ in range(2):
        source, times = opened(cut)
        (bad,) = source.known_bad_rows()
        assert times > 0 and "is cut off" in bad.why and bad.row == 11


def test_server_without_versions_is_indexed_every_time(web):
    web.marked = False
    with warnings.catch_warnings(action="ignore", category=HastenWarning):
        assert all(asked(web, "/a.tar")[1] > 0 for _ in range(2)) and not cached_files()


def test_cache_contains_no_url(web):
    web.content["/b.tar?key=secret"] = web.content["/a.tar"]
    assert asked(web, "/b.tar", "?key=secret")[1] > 0 and asked(web, "/b.tar", "?key=secret")[1] == 0
    assert cached_files() and not any(
        word in path.read_bytes() for path in cached_files() for word in (b"secret", b"127.0.0.1")
    )


class Bad:
    def __reduce__(self):
        return os.mkdir, (os.environ["HASTEN_CACHE"] + "/executed",)


def pickled(_, save=numpy.save):
    file = io.BytesIO()
    save(file, numpy.array([Bad()], object), allow_pickle=True)
    return file.getvalue()


def with_flipped_bit(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "one bit of its words": lambda content: with_flipped_bit(content, 150),
    "one bit of its numbers": lambda content: with_flipped_bit(content, len(content) // 2),
    "a pickle": lambda content: pickle.dumps(Bad()),
    "an array with a pickle": pickled,
    "an archive with a pickle": lambda content: pickled(content, numpy.savez),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_index_is_ignored(tmp_path, settled, kind, how):
    path = written(tmp_path / f"a.{kind}")
    expected = everything(opened(path)[0])
    assert cached_files()
    for each in cached_files():
        each.write_bytes(DAMAGE[how](each.read_bytes()))
    source, times = opened(path)
    assert (
        times > 0 and same(everything(source), expected) and not Path(os.environ["HASTEN_CACHE"], "executed").exists()
    )
    assert opened(path)[1] == 0, "it is cached_files again"


def test_index_of_another_file_is_ignored(tmp_path, settled):
    one, other = written(tmp_path / "a.tar"), written(tmp_path / "b.tar", SIZES[::-1] * 3)
    opened(one)
    of_one = {path.name: path for path in cached_files()}
    expected = everything(opened(other)[0])
    of_other = [path for path in cached_files() if path.name not in of_one]
    for path, foreign in zip(of_other, of_one.values(), strict=True):
        path.write_bytes(foreign.read_bytes())
    source, times = opened(other)
    assert times > 0 and same(everything(source), expected)


def reader(paths, begin, results):
    begin.wait(60)
    rows = [MAKERS[path.suffix[1:]](path).source.read(numpy.arange(12))[DATA[path.suffix[1:]]] for path in paths]
    results.put([hashlib.blake2b(b"".join(column)).hexdigest() for column in rows])


def test_two_processes_index_a_file_concurrently(tmp_path, settled):
    paths = [written(tmp_path / f"a.{kind}") for kind in MAKERS]
    begin, results = FORK.Barrier(2), FORK.SimpleQueue()
    children = [start_process(reader, paths, begin, results) for _ in range(2)]
    assert [join_process(child) for child in children] == [0, 0]
    digests = [results.get() for _ in children]
    assert len(digests[0]) == 2 and digests[0] == digests[1]
    assert {path.suffix for path in cached_files()} == {".manifest"}
    assert [opened(path)[1] for path in paths] == [0, 0]


@pytest.mark.parametrize("why", ["read-only", "a file is in the way"])
def test_read_only_cache_directory_is_no_error(tmp_path, settled, why):
    cache = Path(os.environ["HASTEN_CACHE"])
    if why == "a file is in the way":
        cache.touch()
    else:
        cache.mkdir(mode=0o500)
        if os.access(cache, os.W_OK):
            pytest.skip("this user may write everywhere")
    path = written(tmp_path / "a.tar")
    first, second = opened(path), opened(path)
    assert second[1] > 0 and same(everything(first[0]), everything(second[0]))


# ---- progress and warnings


def test_indexing_many_files_reports_rate_and_remaining(web, monkeypatch):
    from helpers.web import Answer

    message = frame_records([encode_example({"x": 1.5})])
    web.content |= {f"/many/{number}.tfrecord": message for number in range(5)}
    paths = [f"{web.address}/many/{number}.tfrecord" for number in range(5)]
    with warnings.catch_warnings(action="error", category=HastenWarning):
        tfrecord_format.Records(paths)
    given = Answer.given

    def slowly(answer, *arguments):
        if answer.command == "GET":
            index_cache.time.sleep(1)
        given(answer, *arguments)

    monkeypatch.setattr(Answer, "given", slowly)
    with (
        ThreadPoolExecutor(1) as another,
        pytest.warns(HastenWarning, match=r"finding the records of 5 files, \d+ MB/s: [2468]0% done, \d s left"),
    ):
        another.submit(tfrecord_format.Records, paths).result()


@pytest.mark.parametrize("kind", MAKERS)
def test_indexing_one_file_reports_the_position(tmp_path, kind):
    path, reports = written(tmp_path / f"a.{kind}", [*range(1000, 5000)]), []
    if kind == "tfrecord":
        tfrecord_format._index_file(mapped_bytes(str(path)), str(path), reports.append, verify=True)
    else:
        webdataset_format._index_shard(mapped_bytes(str(path)), str(path), reports.append)
    assert len(reports) > 2 and reports == sorted(reports) and reports[-1] <= path.stat().st_size


def test_download_reports_received_bytes(web):
    web.content["/long"] = bytes(9 << 20)
    reports = []
    assert len(range_reader.read_file(file_signature(f"{web.address}/long"), reports.append)) == 9 << 20
    assert reports == [4 << 20, 8 << 20, 9 << 20]


@pytest.mark.parametrize("options", [[], ["--quiet"]])
def test_quiet_hides_index_progress(options, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(progress, "perf_counter", count(0.0, 100.0).__next__)  # a long time passes
    monkeypatch.setattr(tfrecord_format, "RECORDS_PER_REPORT", 1)
    assert main(["data", "inspect", str(written(tmp_path / "a.tfrecord")), "--budget", "0.5", *options]) == 0
    assert ("finding the records of" in capfd.readouterr().err) is (not options)
