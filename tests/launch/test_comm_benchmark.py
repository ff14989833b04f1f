"""``hasten bench-comm``: every collective is measured, and latency and bandwidth describe the times."""

import pytest

from hasten.core.errors import ConfigurationError
from hasten.launch.comm_benchmark import bench_comm, fit_alpha_beta
from helpers.ranks import run_ranks


def test_all_collectives_are_measured():
    first, second = run_ranks(2, lambda rank: bench_comm("cpu", sizes=(1000, 1_000_000)))
    sizes = [[found["sizes"] for found in each["collectives"].values()] for each in (first, second)]
    assert sizes[0] == sizes[1], "all ranks tell the times of the slowest"
    assert first["processes"] == 2 and first["nodes"] == 1 and first["backend"] == "gloo"
    assert list(first["collectives"]) == [
        "all-reduce",
        "all-reduce by tree",
        "reduce-scatter",
        "all-gather",
        "all-to-all",
    ]
    for name, found in first["collectives"].items():
        assert [row["bytes"] for row in found["sizes"]] == [1000, 1_000_000]
        assert all(
            0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"] for row in found["sizes"]
        )
        assert found["latency"] >= 0 and found["bandwidth"] > 0, name


def test_fit_finds_a_known_line():
    latency, bandwidth = fit_alpha_beta([(size, 3e-4 + size / 1.5e9) for size in (1000, 100_000, 64_000_000)])
    assert (latency, bandwidth) == (pytest.approx(3e-4), pytest.approx(1.5e9))


def test_single_process_is_refused():
    with pytest.raises(ConfigurationError, match="bench-comm needs 2 processes or more"):
        bench_comm("cpu")
