"""The quality gate: it passes equal quality, refuses harm, and fails closed."""

import math
import random

import pytest

from hasten.tuning.gate import LOOKS, final_metrics, pairs_needed, quality_gate, resolve_margin

MARGIN = 0.005


def arms(harm: float, spread: float, count: int, seed: int) -> tuple[dict, dict]:
    draw = random.Random(seed)
    before = {n: 0.95 + draw.gauss(0, spread) for n in range(count)}
    return before, {n: 0.95 - harm + draw.gauss(0, spread) for n in range(count)}


def verdicts(harm: float, spread: float, further: int = 0, trials: int = 400) -> float:
    """Returns how often the gate passes if asked after every seed; ``further``: additional seeds of the tuned arm per
    pair."""
    passed = 0
    for seed in range(trials):
        before, after = arms(harm, spread, LOOKS[-1] * (1 + further), seed)
        for look in LOOKS:
            gate = quality_gate(
                {n: before[n] for n in range(look)},
                {n: after[n] for n in range(look * (1 + further))},
                margin=MARGIN,
                higher_is_better=True,
            )
            if gate.settled:
                break
        passed += gate.passed
    return passed / trials


def even(pairs: int, spread: float, harm: float = 0.0) -> tuple[dict, dict]:
    """Arms of an even number of pairs, whose means and spreads do not depend on it."""
    deviation = spread * math.sqrt((pairs - 1) / pairs)
    before = {n: 0.95 + deviation * (-1) ** n for n in range(pairs)}
    return before, {n: metric - harm for n, metric in before.items()}


@pytest.mark.parametrize("harm", [0.0, 0.4 * MARGIN])
@pytest.mark.parametrize("spread", [0.8 * MARGIN, MARGIN, 1.5 * MARGIN])
def test_gate_passes_with_the_pairs_that_were_stated_as_needed(spread, harm):
    options = {"margin": MARGIN, "higher_is_better": True}
    first = quality_gate(*even(4, spread, harm), **options, confidence=0.97)
    assert not first.passed
    needed = int(pairs_needed(first, 0.97, later=0.99))
    assert quality_gate(*even(needed + needed % 2, spread, harm), **options, confidence=0.99).passed
    assert not quality_gate(*even((needed - 2) // 2 * 2, spread, harm), **options, confidence=0.99).passed


def test_no_number_of_pairs_proves_a_harm():
    result = quality_gate(*even(4, 0.1 * MARGIN, 1.1 * MARGIN), margin=MARGIN, higher_is_better=True)
    assert pairs_needed(result, 0.97, later=0.99) == math.inf


def test_gate_passes_harm_of_a_full_margin_in_at_most_one_of_twenty():
    assert verdicts(harm=MARGIN, spread=0.001) <= 0.05
    assert verdicts(harm=MARGIN, spread=0.003) <= 0.05
    assert verdicts(harm=MARGIN, spread=0.003, further=3) <= 0.05


def test_gate_passes_equal_quality():
    assert verdicts(harm=0.0, spread=0.001) >= 0.95
    assert verdicts(harm=0.0, spread=0.003, further=3) > verdicts(harm=0.0, spread=0.003)


def test_gate_decides_large_harm_early():
    gate = quality_gate(*arms(0.05, 0.001, 3, seed=1), margin=MARGIN, higher_is_better=True)
    assert gate.settled
    assert not gate.passed


@pytest.mark.parametrize("higher", [True, False])
def test_gate_follows_the_metric_direction(higher):
    better, worse = {0: 1.0, 1: 1.1, 2: 0.9}, {0: 2.0, 1: 2.1, 2: 1.9}
    gate = quality_gate(better, worse, margin=0.01, higher_is_better=higher)
    assert gate.passed is higher


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_gate_fails_a_nan_metric(bad):
    gate = quality_gate({0: 0.9, 1: 0.91, 2: 0.92}, {0: 0.9, 1: bad, 2: 0.92}, margin=1.0, higher_is_better=True)
    assert not gate.passed
    assert gate.settled


def test_gate_fails_a_constant_metric():
    same = dict.fromkeys(range(3), 0.5)
    gate = quality_gate(same, same, margin=1.0, higher_is_better=True)
    assert not gate.passed
    assert "measures nothing" in gate.why


def test_gate_fails_without_seeds_and_with_one():
    assert not quality_gate({}, {}, margin=1.0, higher_is_better=True).passed
    assert not quality_gate({0: 0.9}, {0: 0.95}, margin=1.0, higher_is_better=True).passed


def test_gate_uses_further_seeds_but_requires_pairs():
    before, after = arms(0.0, 0.003, 12, seed=3)
    paired = {n: after[n] for n in range(3)}
    few = quality_gate({n: before[n] for n in range(3)}, paired, margin=MARGIN, higher_is_better=True)
    more = quality_gate({n: before[n] for n in range(3)}, after, margin=MARGIN, higher_is_better=True)
    assert few.seeds == more.seeds == [0, 1, 2]
    assert more.difference["high"] - more.difference["low"] < few.difference["high"] - few.difference["low"]
    assert "9 more of the recipe alone" in more.why
    without_further = quality_gate({n: before[n] for n in range(2)}, after, margin=1.0, higher_is_better=True)
    assert not without_further.passed


def test_margin_is_the_user_s_or_half_a_per_cent_or_the_spread_of_seeds():
    assert resolve_margin([0.9], 0.02)[0] == 0.02
    assert resolve_margin([-2.0], None)[0] == pytest.approx(0.01)
    margin, why = resolve_margin([0.90, 0.92, 0.94], None)
    assert margin == pytest.approx(0.02) and "one standard deviation" in why


def run_of(*metrics: float | None) -> dict:
    return {"metric": metrics[-1], "evaluations": [{"metric": metric} for metric in metrics]}


def test_final_metric_of_flat_curves_is_the_mean_of_the_last_evaluations():
    flat = {seed: run_of(0.5, 0.9, 0.9 + noise, 0.9 - noise) for seed, noise in ((0, 0.003), (1, -0.003))}
    assert final_metrics(flat, flat, MARGIN, True)[0] == pytest.approx({0: 0.9, 1: 0.9})


@pytest.mark.parametrize("end", [(0.7, 0.8, 0.9), (0.9, 0.9), (None, 0.9, 0.9)])
def test_final_metric_of_both_arms_is_the_last_one_unless_both_are_flat(end):
    flat, other = {0: run_of(0.9, 0.9, 0.901)}, {0: run_of(*end)}
    assert final_metrics(flat, other, MARGIN, True) == [{0: 0.901}, {0: 0.9}]
    assert final_metrics(other, flat, MARGIN, True) == [{0: 0.9}, {0: 0.901}]


@pytest.mark.parametrize(("sign", "higher_is_better"), [(1, True), (-1, False)])
def test_original_that_gets_worse_at_its_end_is_measured_by_the_mean(sign, higher_is_better):
    """Which favors it: one bad last evaluation must not make a recipe look as good."""
    worse, flat = {0: run_of(sign * 0.9, sign * 0.9, sign * 0.87)}, {0: run_of(sign * 0.9, sign * 0.9, sign * 0.9)}
    assert final_metrics(worse, flat, MARGIN, higher_is_better)[0][0] == pytest.approx(sign * 0.89)
    assert final_metrics(flat, worse, MARGIN, higher_is_better) == [{0: sign * 0.9}, {0: sign * 0.87}]
