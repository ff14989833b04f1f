"""Scattered remote rows are requested concurrently, and only those; each failed request is repeated by itself."""

import threading
import time

import numpy
import pytest

from hasten.data.formats.tfrecord import Records, frame_records
from hasten.data.io import remote

pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
pytest.importorskip("aiohttp", reason="aiohttp is not installed: fsspec cannot ask web servers")
from helpers.web import Answer, serving

ROWS, BYTES = 200, 100_000
TIMEOUT_S = 20.0  # seconds, for a busy machine; mostly unused
SCATTERED = numpy.arange(7, ROWS, 9)


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.01, 0.02, 0.04))
    shards = {f"/shards/{number:02}.tfrecord": frame_records([bytes([number])]) for number in range(24)}
    with serving({"/long.tfrecord": frame_records([bytes([row]) * BYTES for row in range(ROWS)])} | shards) as web:
        yield web


@pytest.fixture
def loads(monkeypatch):
    """The server's concurrent requests and total bytes. It responds once ``together`` requests have arrived."""
    given, changed, seen = (
        Answer.given,
        threading.Condition(),
        {"now": 0, "most": 0, "bytes": 0, "together": 0, "read": True},
    )

    def watched(answer, content, kind):
        begin, _, end = answer.headers.get("Range", "").removeprefix("bytes=").partition("-")
        size = int(end) + 1 - int(begin) if end and answer.server.ranges else len(content)
        with changed:
            seen["now"] += 1
            seen["most"] = max(seen["most"], seen["now"])
            changed.notify_all()
            if (
                (answer.command == "GET") == seen["read"]
                and size > 1
                and not changed.wait_for(lambda: seen["most"] >= seen["together"], TIMEOUT_S)
            ):
                seen["together"] = 0  # the other requests need not wait for it in vain
        time.sleep(0.05)
        if answer.command == "GET":
            seen["bytes"] += size
        given(answer, content, kind)
        with changed:
            seen["now"] -= 1

    monkeypatch.setattr(Answer, "given", watched)
    return seen


@pytest.fixture
def records(web):
    return Records([f"{web.address}/long.tfrecord"])


def read(records, rows):
    data, begins, ends = records.raw(rows)
    return [data[begin:end].tobytes() for begin, end in zip(begins, ends, strict=True)]


def wanted(rows):
    return [bytes([row]) * BYTES for row in rows.tolist()]


def test_scattered_rows_are_requested_concurrently_and_exactly(records, loads):
    loads["bytes"], loads["together"] = 0, len(SCATTERED) / 2
    assert read(records, SCATTERED) == wanted(SCATTERED)
    assert loads["most"] >= len(SCATTERED) / 2
    assert loads["bytes"] < 1.01 * len(SCATTERED) * BYTES + 1000, "no more than was wanted"


def test_contiguous_rows_are_read_as_a_stream_with_read_ahead(records, loads):
    read(records, numpy.arange(4))
    loads["most"], before = 0, loads["bytes"]
    assert read(records, numpy.arange(4, 8)) == wanted(numpy.arange(4, 8))
    assert loads["most"] <= 1 and loads["bytes"] - before < BYTES


@pytest.mark.slow
def test_versions_of_many_files_are_requested_concurrently(web, loads):
    loads |= {"together": 8, "read": False}
    assert len(Records([f"{web.address}/shards/{number:02}.tfrecord" for number in range(24)])) == 24
    assert loads["most"] >= 8 and loads["together"] == 8


def test_failed_request_is_repeated_by_itself(records, web):
    remote._supports_ranges.clear()
    read(records, SCATTERED)
    web.failing, before = 3, len(web.asked)
    assert read(records, SCATTERED) == wanted(SCATTERED)
    assert len(web.asked) - before <= len(SCATTERED) + 3 + 3


def test_truncated_response_is_not_used(records, web):
    read(records, SCATTERED)
    web.breaking = 4
    assert read(records, SCATTERED) == wanted(SCATTERED)


def test_server_without_ranges_is_asked_once_per_file(records, web, loads):
    remote._supports_ranges.clear()
    web.ranges, loads["bytes"] = False, 0
    size = len(web.content["/long.tfrecord"])
    with pytest.raises(Exception, match="range requests") as error:
        read(records, SCATTERED)
    assert "\n" not in str(error.value)
    assert loads["bytes"] <= 3 * size


def test_repeated_and_reversed_rows_are_read(records):
    rows = numpy.array([150, 3, 3, 90, 4, 2, 150])
    assert read(records, rows) == wanted(rows)
