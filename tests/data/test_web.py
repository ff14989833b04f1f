"""Data behind a real web server: read like local files, with retries for faults, and errors for changed files."""

import json
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from rich.console import Console

from hasten.cli.main import main
from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.data import convert, csv, feather, images, parquet, tfrecord, webdataset
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import frame_records
from hasten.data.io import range_reader, remote
from hasten.data.io.paths import check_unchanged, file_signature, open_file, resolve_paths
from hasten.reporting.terminal_data import inspect_answer
from helpers.assertions import same
from helpers.tar_files import pack, png, sample

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
pytest.importorskip("aiohttp", reason="aiohttp is not installed: fsspec cannot ask web servers")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
import pyarrow.csv as arrow_csv  # noqa: E402
import pyarrow.feather as arrow_feather  # noqa: E402
import pyarrow.parquet as arrow_parquet  # noqa: E402

from helpers.web import Answer, serving  # noqa: E402

ROWS = 60
MAKERS = {
    "parquet": (parquet, {"target": "label"}),
    "feather": (feather, {}),
    "csv": (csv, {}),
    "tfrecord": (tfrecord, {}),
    "shards": (webdataset, {"target": "cls"}),
    "images": (images, {"resize": 16}),
}


def table(first=0):
    count = numpy.arange(first, first + ROWS)
    return pa.table({"n": count, "x": count / 2, "label": count % 3})


def source_files(directory):
    """Creates files of every kind under ``directory/KIND/``."""
    for kind in MAKERS:
        (directory / kind).mkdir(parents=True)
    arrow_parquet.write_table(table(), directory / "parquet" / "a.parquet", row_group_size=20)
    arrow_parquet.write_table(table(ROWS), directory / "parquet" / "b.parquet", row_group_size=20)
    arrow_feather.write_feather(table(), directory / "feather" / "a.feather", chunksize=20)
    arrow_csv.write_csv(table(), directory / "csv" / "a.csv")
    messages = [encode_example({"n": row, "text": f"row {row}"}) for row in range(ROWS)]
    (directory / "tfrecord" / "a.tfrecord").write_bytes(frame_records(messages))
    pack(directory / "shards" / "a.tar", [file for row in range(ROWS) for file in sample(row)])
    for row in range(6):
        path = directory / "images" / "cd"[row % 2] / f"{row}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(row)[0])
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return source_files(tmp_path_factory.mktemp("served") / "data")


@pytest.fixture
def web(directory, monkeypatch):
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.01, 0.02, 0.04))
    with serving(
        {f"/data/{path.relative_to(directory)}": path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    ) as web:
        yield web


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def batches(kind, paths, **prefetch):
    make, settings = MAKERS[kind]
    return list(make(paths, **settings).shuffle(seed=4).batch(7).prefetch(**prefetch))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("way", [{"batches": 0}, {"threads": 2}, {"processes": 2}], ids=str)
def test_remote_files_equal_local_files(directory, web, kind, way):
    here = batches(kind, directory / kind)
    assert same(batches(kind, f"{web.address}/data/{kind}", **way), here)


@pytest.mark.parametrize("kind", ["parquet", "tfrecord", "shards", "images"])
def test_remote_patterns_and_single_files(directory, web, kind):
    pattern = "*/*.png" if kind == "images" else "*"
    assert same(batches(kind, f"{web.address}/data/{kind}/{pattern}"), batches(kind, directory / kind))
    assert resolve_paths([f"{web.address}/data/parquet/b.parquet", f"{web.address}/data/parquet/a.*"]) == [
        f"{web.address}/data/parquet/{name}.parquet" for name in "ab"
    ]


@pytest.mark.parametrize("query", ["?signed=yes", "?file=t.parquet"])
def test_url_with_a_query_is_neither_pattern_nor_directory(web, query):
    web.content[f"/data/t.parquet{query}"] = web.content["/data/parquet/a.parquet"]
    assert resolve_paths(f"{web.address}/data/t.parquet{query}", (".parquet",)) == [
        f"{web.address}/data/t.parquet{query}"
    ]
    assert [method for method, _, _ in web.asked] == ["HEAD"], "a file is not read as if it were a page of links"
    assert len(parquet(f"{web.address}/data/t.parquet{query}").source) == ROWS


def test_input_bottleneck_read_from_network_is_named(web, monkeypatch, capfd):
    """A server with latency, whatever else six small images cost."""
    given = Answer.given
    monkeypatch.setattr(Answer, "given", lambda *arguments: (time.sleep(0.03), given(*arguments)))
    assert main(["data", "inspect", f"{web.address}/data/images", "--budget", "1", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["limit"] == "network" and not result["in_memory"]
    assert result["speed"]["network"] > 0 and result["speed"]["disk"] is result["speed"]["page_cache"] is None
    Console(width=120).print(inspect_answer(result))
    page = capfd.readouterr().out
    assert (
        "The network limits reading" in page
        and "from the network" in page
        and "disk" not in page.replace('.cache("disk")', "")
    )


def test_remote_table_beyond_memory_is_read_by_row_group(directory, web):
    near, far = (
        parquet(where, target="label", gigabytes=0).source
        for where in (directory / "parquet", f"{web.address}/data/parquet")
    )
    rows = numpy.array([100, 3, 59, 60])
    assert same(far.read(rows), near.read(rows))


# ---- faults


@pytest.mark.parametrize("kind", MAKERS)
def test_server_failing_twice_is_retried(directory, web, kind):
    web.failing = 2
    assert same(batches(kind, f"{web.address}/data/{kind}"), batches(kind, directory / kind))
    assert web.failing == 0


def test_server_failing_repeatedly_raises(directory, web):
    here = batches("parquet", directory / "parquet")
    far = parquet(f"{web.address}/data/parquet", target="label")
    web.failing = 5
    assert same(list(far.shuffle(seed=4).batch(7)), here) and web.failing == 0


def test_truncated_response_is_requested_again(web):
    content = web.content["/data/tfrecord/a.tfrecord"]
    web.breaking = 2
    with open_file(f"{web.address}/data/tfrecord/a.tfrecord") as file:
        assert file.read() == content
    assert web.breaking == 0


@pytest.mark.parametrize("pattern", ["", "/*/*.png", "/**/*.png"])
def test_unavailable_subdirectory_listing_raises(directory, web, pattern):
    address = f"{web.address}/data/images{pattern}"
    web.closing["/data/images/d"] = 1 << 30
    with pytest.raises(RunError, match="images/d after 4 attempts"):
        images(address, resize=8)
    web.closing["/data/images/d"] = 3
    source = images(address, resize=8).source
    assert source.classes == ["c", "d"] and len(source) == 6 and web.closing["/data/images/d"] == 0


def test_retry_delays_grow(web, monkeypatch):
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.1, 0.2, 0.4))
    web.failing = 100
    with pytest.raises(RunError, match=r"a\.tfrecord after 4 attempts: .*503") as error:
        file_signature(f"{web.address}/data/tfrecord/a.tfrecord")
    assert "\n" not in str(error.value)
    times = [when for method, _, when in web.asked if method == "HEAD"]
    pauses = numpy.diff(times)
    assert len(times) == 4 and (pauses >= [0.1, 0.2, 0.4]).all()


@pytest.fixture
def closed_address(monkeypatch):
    """Returns an address on which no server listens."""
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.01, 0.02, 0.04))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("path", ["", "/*", "/a.parquet"])
def test_unreachable_server_raises(closed_address, kind, path):
    make, settings = MAKERS[kind]
    with pytest.raises(RunError, match="after 4 attempts: ClientConnect") as error:
        make(f"{closed_address}/data/{kind}{path}", **settings)
    assert "\n" not in str(error.value)


def test_server_that_disappears_while_reading_raises(web, monkeypatch):
    monkeypatch.setattr(range_reader, "REMOTE_CHECK_INTERVAL_S", 0.0)  # the first read fetched all of a small file
    source = tfrecord(f"{web.address}/data/tfrecord").source
    web.shutdown()
    web.server_close()
    web.failing = 1 << 30  # for connections that are still open
    with pytest.raises(RunError, match="after 4 attempts"):
        source.read(numpy.array([3]))


@pytest.mark.parametrize(("status", "asked"), [(404, 1), (403, 1), (401, 1), (410, 1), (429, 4), (500, 4), (503, 4)])
def test_only_transient_errors_are_retried(web, status, asked):
    web.failing, web.status = 1000, status
    with pytest.raises(ConfigurationError if asked == 1 else RunError, match=str(status)):
        file_signature(f"{web.address}/data/csv/a.csv")
    assert sum(method == "HEAD" for method, _, _ in web.asked) == asked


@pytest.mark.parametrize("path", ["parquet", "parquet/a.parquet", "parquet/*.parquet"])
@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_refused_access_is_not_reported_as_missing(web, path, status):
    web.failing, web.status = 1000, status
    message = "^no file matches http" if status in (404, 410) else f"^cannot read http.*{status}"
    with pytest.raises(ConfigurationError, match=message):
        resolve_paths(f"{web.address}/data/{path}", (".parquet",))


@pytest.mark.parametrize("path", ["a", "a.parquet", "*.parquet"])
def test_invalid_url_is_refused(path):
    with pytest.raises(ConfigurationError, match=r"cannot read http://127\.0\.0\.1:99999/.*[Pp]ort"):
        resolve_paths(f"http://127.0.0.1:99999/{path}", (".parquet",))


def test_expired_login_ends_the_run(web):
    web.content["/data/long.tfrecord"] = frame_records([bytes(1000)] * 12_000)  # longer than one read-ahead of fsspec
    pipeline = images(f"{web.address}/data/images", resize=8).skip_bad_rows(6).batch(2)
    table = parquet(f"{web.address}/data/parquet", gigabytes=0).source
    with open_file(f"{web.address}/data/long.tfrecord") as file:
        file.read(10)
        web.failing, web.status = 1 << 30, 403
        file.seek(11_000_000)
        with pytest.raises(RunError, match=r"cannot read .*long\.tfrecord.*403"):
            file.read(10)
    with ThreadPoolExecutor(1) as another, pytest.raises(RunError, match=r"^http.*\.parquet became unreadable .*403"):
        another.submit(table.read, numpy.array([ROWS - 1])).result()  # this thread still has the file open
    with pytest.raises(RunError, match=r"^cannot read .*\.png.*403"):
        list(pipeline)
    assert not pipeline.faults.found, "no picture is to blame"


def test_fsspec_configuration_of_the_user_applies(directory, web, monkeypatch):
    web.login = "Bearer of a token"
    with pytest.raises(ConfigurationError, match="401"):
        resolve_paths(f"{web.address}/data/csv/a.csv")
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"headers": {"Authorization": web.login}}})
    assert same(batches("csv", f"{web.address}/data/csv"), batches("csv", directory / "csv"))
    assert remote._system(web.address)[0].client_kwargs["timeout"].sock_read == remote.READ_TIMEOUT_S
    monkeypatch.setitem(fsspec.config.conf, "https", {"client_kwargs": {"timeout": 7}})
    assert remote._system(web.address)[0].client_kwargs["timeout"] == 7


def test_missing_remote_file_is_one_line(web):
    for path in ("none.parquet", "none", "none/*.parquet", "parquet/*.tar"):
        with pytest.raises(ConfigurationError, match="no file matches http") as error:
            resolve_paths(f"{web.address}/data/{path}", (".parquet",))
        assert "\n" not in str(error.value)


def test_server_without_ranges_is_refused(web):
    web.ranges = False
    web.content["/data/long.tfrecord"] = frame_records([bytes(1000)] * 12_000)  # longer than one read-ahead of fsspec
    with (
        open_file(f"{web.address}/data/long.tfrecord") as file,
        pytest.raises(RunError, match="range requests") as error,
    ):
        file.seek(11_000_000)
        file.read(10)
    assert "\n" not in str(error.value)


# ---- changes


def test_signature_follows_the_content(web):
    path = f"{web.address}/data/csv/a.csv"
    before = file_signature(path)
    check_unchanged(path, before)
    web.content["/data/csv/a.csv"] = web.content["/data/csv/a.csv"].replace(b"0", b"1")
    with pytest.raises(RunError, match=r"a\.csv changed while it was being read"):
        check_unchanged(path, before)
    del web.content["/data/csv/a.csv"]
    with pytest.raises(RunError, match=r"a\.csv became unreadable while it was being read"):
        check_unchanged(path, before)


@pytest.mark.parametrize("kind", ["parquet", "feather", "tfrecord", "shards"])
@pytest.mark.parametrize("change", ["other", "shorter", "gone"])
def test_remote_file_that_changes_between_reads_raises(web, kind, change, monkeypatch):
    monkeypatch.setattr(range_reader, "REMOTE_CHECK_INTERVAL_S", 0.0)
    make, settings = MAKERS[kind]
    settings = settings | ({"gigabytes": 0} if kind in ("parquet", "feather") else {})
    path = (
        f"/data/{kind}/"
        + {"parquet": "a.parquet", "feather": "a.feather", "tfrecord": "a.tfrecord", "shards": "a.tar"}[kind]
    )
    source = make(web.address + path, **settings).source
    source.read(numpy.array([0]))
    content = web.content.pop(path)
    if change != "gone":
        web.content[path] = content[:-100] if change == "shorter" else content[:100] + bytes(100) + content[200:]
    with pytest.raises(
        RunError,
        match=r"changed while it was being read|became unreadable while it was being read|is shorter than it was",
    ):
        source.read(numpy.array([ROWS - 1]))


def test_remote_file_is_checked_for_changes_at_intervals(web, monkeypatch):
    """Not at each read, as the request takes as long as reading."""
    shown = [0.0]
    monkeypatch.setattr(range_reader, "time", SimpleNamespace(monotonic=lambda: shown[0]))
    source = webdataset(f"{web.address}/data/shards").source
    source.read(numpy.array([0]))
    asked = len(web.asked)
    for row in range(20):
        source.read(numpy.array([row]))
    assert len(web.asked) == asked
    shown[0] += range_reader.REMOTE_CHECK_INTERVAL_S
    source.read(numpy.array([1]))
    assert len(web.asked) == asked + 1


def test_server_without_versions_warns_once(web):
    web.marked = False
    with pytest.warns(
        HastenWarning, match=rf"^{web.address} reports neither a version nor a modification time .*\.cache\('disk'\)"
    ) as caught:
        pipeline = webdataset(f"{web.address}/data/shards", target="cls")
        assert file_signature(f"{web.address}/data/csv/a.csv")[2] is None
        list(pipeline.batch(7))
    assert sum("reports neither" in str(each.message) for each in caught) == 1


def test_new_source_of_a_changed_file_reads_the_new_one(web):
    """Nothing that this thread has cached of the old file is used for the new one."""
    path = f"{web.address}/data/new.tar"
    for number in (1, 2):
        web.content["/data/new.tar"] = packed(f"text {number}")
        assert webdataset(path).source.read(numpy.array([0, 1]))["txt"] == [f"text {number}"] * 2


def packed(text):
    """Returns a tar of two samples."""
    with tempfile.TemporaryDirectory() as directory:
        return pack(Path(directory) / "a.tar", [(f"{row}.txt", text.encode()) for row in range(2)]).read_bytes()


def test_open_files_are_limited(web):
    content = {f"/many/{number:02}.tar": packed(f"text {number}") for number in range(3 * range_reader.MAX_OPEN_FILES)}
    web.content |= content
    source = webdataset(f"{web.address}/many").source
    for file in numpy.random.default_rng(0).permutation(len(content)).tolist():
        assert source.read(numpy.array([2 * file]))["txt"] == [f"text {file}"]
    assert len(range_reader._thread.files) == range_reader.MAX_OPEN_FILES


def test_versions_of_remote_images_are_requested_concurrently(web, monkeypatch):
    """A cache compares them before every epoch."""
    source, running, most, given = images(f"{web.address}/data/images", resize=8).source, [], [], Answer.given

    def slow(*arguments):
        running.append(None)
        most.append(len(running))
        time.sleep(0.1)
        running.pop()
        return given(*arguments)

    monkeypatch.setattr(Answer, "given", slow)
    fingerprint = source.fingerprint()
    assert max(most) > 1
    monkeypatch.setattr(Answer, "given", given)
    assert source.fingerprint() == fingerprint


def test_remote_csv_with_another_delimiter_is_not_a_bad_file(web, tmp_path):
    for name, separator in {"a": ",", "b": ";"}.items():
        web.content[f"/data/mixed/{name}.csv"] = b"n,half\n" + f"1{separator}0\n".encode() * 40
    with pytest.raises(ConfigurationError, match=r"b\.csv has no more good lines than bad ones: (?!.*may be skipped)"):
        convert(f"{web.address}/data/mixed/*", tmp_path / "out", to="feather", max_bad_rows=1)


def test_deleted_remote_images_are_bad_rows(web):
    pipeline = images(f"{web.address}/data/images", resize=8).skip_bad_rows(1).batch(6)
    del web.content["/data/images/d/3.png"]
    (batch,) = pipeline
    assert len(batch[1]) == 5 and "3.png" in next(iter(pipeline.faults.found.values())).where
    assert batch[0].dtype == torch.uint8
