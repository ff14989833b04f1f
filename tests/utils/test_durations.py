"""Durations in messages, and as the options that a message recommends."""

import pytest

from hasten.utils.durations import duration_option, parse_duration


@pytest.mark.parametrize(
    ("seconds", "option"),
    [(0.2, "1s"), (119.0, "119s"), (119.5, "120s"), (121.0, "3m"), (7199.0, "120m"), (7201.0, "3h"), (8e5, "223h")],
)
def test_recommended_duration_is_short_and_no_less_than_needed(seconds, option):
    assert duration_option(seconds) == option
    assert parse_duration(option) >= seconds
