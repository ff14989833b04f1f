"""The statistics of a comparison: coverage, verdicts, robustness."""

import random

import pytest

from hasten.benchmarking.ratio import FASTER, LOOKS, SAME, SLOWER, UNSURE, Ratio, ratio_of, verdict_of


def blocks(count: int, ratio: float, noise: float, seed: int) -> tuple[list[float], list[float]]:
    draw = random.Random(seed)
    return (
        [ratio * draw.lognormvariate(0, noise) for _ in range(count)],
        [draw.lognormvariate(0, noise) for _ in range(count)],
    )


@pytest.mark.parametrize("true_ratio", [0.8, 1.0, 1.5, 10.0])
@pytest.mark.parametrize("count", [6, 14, 48])
def test_interval_contains_the_true_ratio_at_the_stated_rate(true_ratio, count):
    inside = 0
    for seed in range(400):
        ratio = ratio_of(*blocks(count, true_ratio, 0.05, seed), error=0.05)
        inside += ratio.low <= true_ratio <= ratio.high
    assert inside >= 0.93 * 400


def test_verdict_at_every_stopping_point_is_wrong_in_at_most_one_of_twenty():
    wrong = 0
    for seed in range(400):
        a, b = blocks(LOOKS[-1], 1.0, 0.05, seed)
        wrong += any(verdict_of(ratio_of(a[:look], b[:look])) in (FASTER, SLOWER) for look in LOOKS)
    assert wrong <= 0.05 * 400


def test_verdict_with_one_burst_of_load_is_unchanged():
    a, b = blocks(20, 1.0, 0.01, seed=3)
    a[7] *= 10
    ratio = ratio_of(a, b)
    assert 0.97 < ratio.median < 1.03


def test_ratio_with_swapped_arms_is_inverted():
    a, b = blocks(14, 1.3, 0.03, seed=1)
    one, other = ratio_of(a, b), ratio_of(b, a)
    assert one.median == pytest.approx(1 / other.median)
    assert one.low == pytest.approx(1 / other.high)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.02, 1.3, FASTER),
        (0.7, 0.98, SLOWER),
        (0.985, 1.015, SAME),
        (0.9, 1.1, UNSURE),
        (1.0, 1.05, UNSURE),
        (1.005, 1.019, SAME),
    ],
)
def test_verdict_of_intervals(low, high, verdict):
    assert verdict_of(Ratio((low * high) ** 0.5, low, high)) == verdict
