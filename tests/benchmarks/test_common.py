"""Shared functions of the benchmarks: coverage of the interval, fair turns, verdicts that fail closed."""

import argparse
import json
import math
import random
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _common

    yield _common
    sys.modules.pop("_common", None)


@pytest.mark.parametrize("count", [6, 10, 25])
def test_interval_covers_the_median(common, count):
    """In at least 95 of 100 samples of a skewed distribution with outliers."""
    chance, truth = random.Random(0), math.log(2)  # the median of the exponential distribution
    found = [common.interval(chance.expovariate(1) for _ in range(count)) for _ in range(2000)]
    assert sum(each.low <= truth <= each.high for each in found) / len(found) > 0.94


def test_interval_excludes_at_most_the_allowed_values(common):
    assert common.interval(range(1, 11)) == common.Interval(5.5, 2, 9)  # the sign test's interval of ten values
    assert common.interval([3.0]) == common.Interval(3.0, 3.0, 3.0)
    assert common.interval([1, 2, 3, 4, 5]) == common.Interval(3, 1, 5)
    # more values than a float can represent
    assert abs(common.interval(range(3000)).low - (1500 - 1.96 * 3000**0.5 / 2)) < 2


def test_in_turns_alternates_the_order(common):
    order = []
    arms = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    assert common.in_turns(arms, 2) == {"a": [1, 6], "b": [2, 5], "c": [3, 4]}
    assert order == list("abccba")


def test_missing_package_is_reported(common):
    assert common.installed("json") is None
    assert common.installed("no_such_peer") == "not installed"


def test_package_that_fails_to_import_is_reported(common, tmp_path, monkeypatch):
    (tmp_path / "broken_peer.py").write_text("raise RuntimeError('operator does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert common.installed("broken_peer") == "does not import: RuntimeError: operator does not exist"


@pytest.mark.parametrize(
    ("reached", "code", "message"), [(True, 0, "reached"), (False, 1, "NOT reached"), (None, 1, "not measured")]
)
def test_finish_gives_exit_code_and_record(common, tmp_path, capsys, reached, code, message):
    options = argparse.Namespace(json=tmp_path / "deep" / "record.json")
    assert common.finish(options, "1 us", reached, {"extra": common.Interval(1, 0, 2), "pair": (1, 2)}) == code
    assert f"Figure: 1 us: {message}." in capsys.readouterr().out
    record = json.loads(options.json.read_text())
    assert (
        record["reached"] is reached
        and record["extra"] == {"median": 1, "low": 0, "high": 2}
        and record["pair"] == [1, 2]
    )
    assert record["environment"]["torch"] and record["date"] and record["command"]


def test_slug_keeps_letters_and_digits_of_a_task(common):
    assert common.slug("tiny_shakespeare") == "tiny-shakespeare"
    assert common.slug("./some/mine.py:task") == "mine-py-task"


def test_record_is_a_new_directory(common, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/data_tokens.py", "--json", "records"])
    common.show(("loader", "tokens/s"), [("hasten", 5)])
    for rounds in ([1, 2], [3, 4]):
        common.finish(argparse.Namespace(json=tmp_path), "10x; it is {12}x", True, {"rates": rounds})
    first, second = sorted(tmp_path.iterdir())
    assert "_data-tokens_" in first.name and second.name.replace("b_", "_", 1) == first.name
    readme = (first / "README.md").read_text()
    assert (
        readme.startswith("# Data tokens: reached\n\n10x; it is {12}x.\n")
        and "hasten  5\n" in readme
        and "`benchmarks/data_tokens.py`" in readme
    )
    assert [json.loads((place / "result.json").read_text())["rates"] for place in (first, second)] == [[1, 2], [3, 4]]
