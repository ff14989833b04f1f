"""The statistics of a comparison: coverage, verdicts, robustness."""

import random

import pytest

from hasten.benchmarking.ratio import (
    ALPHA,
    FASTER,
    LOOKS,
    PROCESS_SPREAD,
    ROUND_LOOKS,
    SAME,
    SLOWER,
    UNSURE,
    Ratio,
    ratio_of,
    ratio_of_rounds,
    verdict_of,
)


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
        ratio = ratio_of(*blocks(count, true_ratio, 0.05, seed), alpha=0.05)
        inside += ratio.low <= true_ratio <= ratio.high
    assert inside >= 0.93 * 400


def test_verdict_at_every_stopping_point_is_wrong_in_at_most_one_of_twenty():
    wrong = 0
    for seed in range(400):
        a, b = blocks(LOOKS[-1], 1.0, 0.05, seed)
        wrong += any(verdict_of(ratio_of(a[:look], b[:look])) in (FASTER, SLOWER) for look in LOOKS)
    assert wrong <= 0.05 * 400


def rounds(count: int, ratio: float, between: float, seed: int) -> list[tuple[list[float], list[float]]]:
    """Rounds of 6 pairs of blocks that differ by 4 %; the log ratio of a round's processes differs by ``between``."""
    draw = random.Random(seed)
    return [blocks(6, ratio * draw.lognormvariate(0, between), 0.04, draw.randrange(10**9)) for _ in range(count)]


def verdict_at_looks(drawn: list) -> str:
    """The first verdict at the looks of a comparison of at least three rounds, without its rule for great ratios."""
    error = ALPHA / len(ROUND_LOOKS)
    found = (verdict_of(ratio_of_rounds(drawn[:look], error)) for look in ROUND_LOOKS if look >= 3)
    return next((verdict for verdict in found if verdict != UNSURE), UNSURE)


@pytest.mark.parametrize("between", [0.0, 0.015, 0.03, 0.045, 0.08])
def test_self_comparison_with_processes_that_differ_is_wrong_in_at_most_one_of_twenty(between):
    verdicts = [verdict_at_looks(rounds(ROUND_LOOKS[-1], 1.0, between, seed)) for seed in range(200)]
    assert sum(verdict in (FASTER, SLOWER) for verdict in verdicts) <= 0.05 * 200


@pytest.mark.parametrize(("between", "found"), [(0.01, 0.9), (0.03, 0.75)])
def test_true_ratio_of_five_per_cent_is_found(between, found):
    verdicts = [verdict_at_looks(rounds(ROUND_LOOKS[-1], 1.05, between, seed)) for seed in range(100)]
    assert sum(verdict == FASTER for verdict in verdicts) >= found * 100


@pytest.mark.parametrize("count", [1, 3, 8])
def test_interval_of_rounds_contains_the_true_ratio_at_the_stated_rate(count):
    drawn = [ratio_of_rounds(rounds(count, 1.2, PROCESS_SPREAD, seed), ALPHA) for seed in range(400)]
    assert sum(ratio.low <= 1.2 <= ratio.high for ratio in drawn) >= 0.94 * 400


def test_interval_of_one_round_knows_that_processes_differ():
    """Blocks that agree to the last digit leave the borrowed spread of processes."""
    ratio = ratio_of_rounds([([1.0] * 6, [1.0] * 6)], ALPHA)
    assert ratio.high > 1 + 2 * PROCESS_SPREAD and ratio.low < 1 / ratio.high + 1e-9


def test_interval_of_rounds_with_one_burst_of_load_is_hardly_wider():
    a, b = zip(*rounds(6, 1.0, 0.01, seed=3), strict=True)
    calm = ratio_of_rounds(list(zip(a, b, strict=True)), ALPHA)
    a[2][4] *= 10
    disturbed = ratio_of_rounds(list(zip(a, b, strict=True)), ALPHA)
    assert disturbed.high / disturbed.low < 1.02 * calm.high / calm.low


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
