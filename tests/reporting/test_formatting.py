"""Formatting of numbers for people."""

# ruff: noqa: RUF001 (true multiplication signs and dashes are what is tested)

import pytest

from hasten.reporting import formatting


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "–"),
        (0, "0 s"),
        (3.2e-6, "3.2 µs"),
        (0.00042, "420 µs"),
        (0.0042, "4.2 ms"),
        (0.732, "732 ms"),
        (1.6, "1.6 s"),
        (59.9, "60 s"),
        (61, "1 min 1 s"),
        (151.2, "2 min 31 s"),
        (1620, "27 min"),
        (3599.7, "1 h"),
        (5000, "1 h 23 min"),
    ],
)
def test_format_seconds(value, message):
    assert formatting.seconds(value) == message


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "–"), (1.004, "1.00×"), (1.31, "1.31×"), (5.12, "5.1×"), (23.4, "23×"), (1234, "1,234×")],
)
def test_format_ratios(value, message):
    assert formatting.ratio(value) == message


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (4.63, 5.71, "4.6 to 5.7×"),
        (1.969, 2.417, "1.97 to 2.42×"),
        (0.97, 25, "0.97 to 25×"),
        (None, None, "–"),
    ],
)
def test_format_intervals(low, high, message):
    assert formatting.between({"low": low, "high": high}) == message


def test_format_metrics_keeps_four_digits_and_the_sign():
    assert formatting.metric(0.97521) == "0.9752" and formatting.metric(1234.5678) == "1235"
    assert (
        formatting.metric(-0.0021, signed=True) == "−0.0021"
        and formatting.metric(0.0021, "bits", signed=True) == "+0.0021 bits"
    )


def test_format_long_names_keeps_both_ends():
    short = formatting.shorten("./methods_of_mine/file.py:TheClass", 20)
    assert len(short) == 20 and short.startswith("./method") and short.endswith("TheClass")
    assert formatting.shorten("short", 20) == "short"


def test_format_counts():
    assert (
        formatting.count(1, "run", "runs"),
        formatting.count(23.2, "run", "runs"),
        formatting.count(None, "run", "runs"),
    ) == ("1 run", "23 runs", "–")


def test_format_command_names_external_code():
    assert formatting.train_command("digits", {}, "r.toml") == "hasten train digits"
    script = formatting.train_command("train", {"ema": {}}, "r.toml", command="python 'my train.py' --epochs 3")
    assert script == "hasten train --recipe r.toml -- python 'my train.py' --epochs 3"
    command = formatting.train_command("my task.py:task", {"ema": {}, "./mine.py:Faster": {}}, "r.toml")
    assert command == "hasten train 'my task.py:task' --recipe r.toml --with ./mine.py:Faster"


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "–"), (0, "0.00"), (0.0123, "0.012"), (0.1, "0.10"), (12.063, "12.06"), (1234.5, "1,234.50")],
)
def test_format_money(value, message):
    assert formatting.money(value) == message


def test_sentence_case_keeps_capitals():
    assert [formatting.sentence_case(text) for text in ("mAP", "a CPU", "")] == ["MAP", "A CPU", ""]


def test_format_differences():
    assert formatting.differences_between(-0.0011, 0.0053) == "−0.0011 to +0.0053"
    assert formatting.differences_between(None, 1.0) == ""


def test_large_numbers_have_no_exponent():
    shown = [formatting.plain(67e3), formatting.plain(126.6, "", 2), formatting.metric(25312.4)]
    assert shown == ["67,000", "127", "25,312"]
    assert formatting.metric(1e30) == formatting.plain(1e30) == "1e+30"
    assert formatting.metric(25312.4, signed=True) == "+25,312" and formatting.file_size(999.7e6) == "1,000 MB"
