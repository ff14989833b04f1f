"""When 16-bit gradients pay: the time of the bytes saved against the time of the rounding."""

import pytest

from hasten.profiling.communication import cast_speedup

CODEC = 0.073  # seconds of rounding 84 MB


@pytest.mark.parametrize(
    ("exposed", "saved"), [(0.0, 0.0), (0.1, 0.1), (1.6, 1.6), (2.0, 1.68), (3.36, 1.68), (5.0, 1.68)]
)
def test_saving_is_limited_to_exposed_communication(exposed, saved):
    """Half of 3.36 s could be saved, but no more than is exposed."""
    speedup, _ = cast_speedup({"bytes": 84e6, "seconds": 3.36, "exposed": exposed}, CODEC, 10.0)
    assert speedup == pytest.approx(10.0 / (10.0 - saved + CODEC))


@pytest.mark.parametrize(("seconds", "gain"), [(0.100, 100 / 60), (0.004, 100 / 108)])
def test_rounding_is_advised_if_the_bytes_saved_take_longer_than_rounding(seconds, gain):
    """A step of 100 ms with all communication exposed; rounding takes 10 ms."""
    exchange = {"bytes": 40_000_000, "seconds": seconds, "exposed": seconds}
    found, why = cast_speedup(exchange, 0.010, 0.100)
    assert found == pytest.approx(gain)
    assert ("at most" in why) is (gain > 1) and "rounding 40 MB takes 10 ms" in why
