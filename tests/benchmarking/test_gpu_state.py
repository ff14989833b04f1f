"""The state of a GPU beside a measurement: what the figures of the blocks say."""

import pytest
import torch

from hasten.benchmarking.gpu_state import gpu_state, gpu_summary


def block(clock: float, reasons: int = 0, power: float = 500.0, temperature: float = 60.0, processes: int = 2) -> dict:
    return {
        "seconds": 0.3,
        "gpu_clock_mhz": clock,
        "gpu_power_w": power,
        "gpu_temperature_c": temperature,
        "gpu_throttle_reasons": reasons,
        "gpu_processes": processes,
    }


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        ([0, 0, 0, 0], "none"),
        ([1, 2, 0x10, 0x100], "none"),  # idle, clocks that were chosen, clocks of a display
        ([4, 4, 4, 0], "power limit in 75% of the blocks"),
        ([0, 0x20 | 4, 0x20, 0], "power limit in 25% of the blocks, temperature in 50% of the blocks"),
    ],
)
def test_throttling_is_named_with_its_share_of_the_blocks(reasons, text):
    assert gpu_summary([block(1980, bits) for bits in reasons])["gpu_throttling"] == text


def test_range_of_the_clock_and_highest_of_the_others_are_kept():
    found = gpu_summary([block(1980, power=690.0), block(1755, temperature=71.0, processes=3)])
    assert found == {
        "lowest_gpu_clock_mhz": 1755,
        "highest_gpu_clock_mhz": 1980,
        "highest_gpu_power_w": 690.0,
        "highest_gpu_temperature_c": 71.0,
        "gpu_throttling": "none",
        "gpu_processes": 3,
    }


def test_summary_has_what_every_gpu_tells():
    """A part of a GPU (MIG) has no clock and no power of its own."""
    part = {"seconds": 0.3, "gpu_temperature_c": 60.0, "gpu_processes": 1}
    assert gpu_summary([part, part]) == {"highest_gpu_temperature_c": 60.0, "gpu_processes": 1}


def test_nothing_is_noted_without_a_gpu():
    assert gpu_state(torch.device("cpu")) == {} and gpu_summary([{"seconds": 0.3}]) == {}
