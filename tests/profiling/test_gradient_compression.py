"""When gradient compression pays: the time of the bytes saved against the time of the codec, on a measured network."""

import pytest

from hasten.profiling.gradient_compression import break_even_bandwidth, cast_speedup, net_saving_s

USUAL = {"size": 84e6, "saved_share": 0.5, "codec_seconds": 0.073, "latency": 1e-3}


@pytest.mark.parametrize("bandwidth", [25e6, 0.3e9, 0.5e9])
def test_saving_on_a_slow_exposed_network_is_positive(bandwidth):
    exposed = 1e-3 + 84e6 / bandwidth
    assert net_saving_s(**USUAL, bandwidth=bandwidth, exposed_seconds=exposed) == pytest.approx(
        42e6 / bandwidth - 0.073
    ) and bandwidth < break_even_bandwidth(84e6, 0.5, 0.073)


def test_saving_on_a_fast_network_is_negative():
    assert (
        net_saving_s(**USUAL, bandwidth=10e9, exposed_seconds=1e-3 + 84e6 / 10e9) < 0
        and break_even_bandwidth(84e6, 0.5, 0.073) < 10e9
    )


def test_saving_at_the_break_even_bandwidth_is_zero():
    bandwidth = break_even_bandwidth(84e6, 0.5, 0.073)
    assert bandwidth == pytest.approx(0.575e9, rel=0.01)
    assert net_saving_s(**USUAL, bandwidth=bandwidth, exposed_seconds=10.0) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("exposed", "won"), [(0.0, -0.073), (0.1, 0.1 - 0.073), (2.0, 2.0 - 0.073), (3.361, 1.68 - 0.073)]
)
def test_saving_is_limited_to_exposed_communication(exposed, won):
    """Half of 3.36 s could be saved, but no more than is exposed."""
    assert net_saving_s(**USUAL, bandwidth=25e6, exposed_seconds=exposed) == pytest.approx(min(won, 1.68 - 0.073))


def test_saving_does_not_include_latency():
    much = USUAL | {"latency": 5.0, "codec_seconds": 0.0, "size": 4e3}
    assert net_saving_s(**much, bandwidth=25e6, exposed_seconds=5.1) == pytest.approx(2e3 / 25e6)


@pytest.mark.parametrize("wrong", [{"saved_share": 1.2}, {"bandwidth": 0}, {"size": -1}, {"exposed_seconds": -1}])
def test_saving_of_invalid_arguments_is_refused(wrong):
    with pytest.raises(ValueError):
        net_saving_s(**USUAL | {"bandwidth": 1e9, "exposed_seconds": 1.0} | wrong)


@pytest.mark.parametrize(("seconds", "gain"), [(0.100, 100 / 60), (0.004, 100 / 108)])
def test_rounding_is_advised_if_the_bytes_saved_take_longer_than_rounding(seconds, gain):
    """A step of 100 ms with all communication exposed; rounding takes 10 ms."""
    exchange = {"bytes": 40_000_000, "seconds": seconds, "exposed": seconds}
    found, why = cast_speedup(exchange, 0.010, 0.100)
    assert found == pytest.approx(gain)
    assert ("at most" in why) is (gain > 1) and "rounding 40 MB takes 10 ms" in why
