"""Advice is a function of cards, phase fractions, ceilings and facts."""

import pytest

from hasten.core.card import Card, Exactness
from hasten.profiling.advise import advise, amdahl

PHASES = {
    "input": 0.5,
    "copy": 0.0,
    "forward": 0.1,
    "backward": 0.2,
    "grad_transform": 0.0,
    "optimizer_step": 0.19,
    "evaluation": 0.005,
    "logging": 0.005,
}
FACTS = frozenset({"cpu", "indexed_samples"})


def card(*speeds, applies_to=(), gain=None) -> Card:
    return Card(
        summary="a card", exactness=Exactness.BIT_EXACT, accelerates=set(speeds), applies_to=set(applies_to), gain=gain
    )


def ask(ceilings=None, **cards):
    advice, against = advise(PHASES, ceilings or {}, FACTS, cards)
    return {entry["method"]: entry["bound"] for entry in advice}, {entry["method"]: entry["why"] for entry in against}


def test_advice_is_sorted_by_amdahl_bound():
    advice, against = ask(optimizer_step=card("optimizer_step"), both=card("forward", "backward"), input=card("input"))
    assert list(advice) == ["input", "both", "optimizer_step"]
    assert advice == {
        "input": pytest.approx(2.0),
        "both": pytest.approx(1 / 0.7),
        "optimizer_step": pytest.approx(1 / 0.81),
    }
    assert not against


def test_advice_prefers_a_measured_ceiling_to_a_fraction():
    advice, _ = ask({"input": 4.0}, fast=card("input"), all=card("input", "optimizer_step"))
    assert advice == {"fast": pytest.approx(4.0), "all": pytest.approx(1 / (0.25 - 0.19))}


def test_advice_has_no_bound_if_the_phases_exceed_all_of_the_time():
    advice, _ = ask({"input": 6.0}, all=card("input", "backward"))
    assert advice == {"all": None}, "0.83 by ablation and 0.2 by the timer"


def test_advice_uses_a_ceiling_of_the_method_itself():
    advice, against = ask({"pool": 1.3, "no_effect": 1.0}, pool=card("forward", "backward"), no_effect=card("forward"))
    assert advice == {"pool": 1.3}
    assert "1.00x" in against["no_effect"]


def test_advice_claims_nothing_of_a_ceiling_that_was_not_measured():
    flush = Card(summary="a card", exactness=Exactness.BIT_EXACT, accelerates={"forward"}, ceiling="denormals")
    assert ask({"denormals": 1.0}, flush=flush)[0] == {}
    assert ask(flush=flush)[0] == {"flush": None}


def test_advice_without_bound_comes_last():
    advice, _ = ask(fewer=card("steps"), tiny=card("optimizer_step"))
    assert list(advice.items())[-1] == ("fewer", None)


def test_advice_against_a_method_states_its_bound():
    advice, against = ask(rare=card("evaluation"))
    assert not advice
    assert "1.01x" in against["rare"]


def test_advice_names_missing_facts():
    advice, against = ask(gpu=card("input", applies_to={"cuda", "indexed_samples"}))
    assert not advice
    assert "NVIDIA GPU" in against["gpu"] and "index" not in against["gpu"]


def test_advice_ignores_descriptive_words():
    advice, against = ask(
        deep=card("input", applies_to={"skip connections", "indexed_samples"}),
        gpu=card("input", applies_to={"cuda", "x"}),
    )
    assert list(advice) == ["deep"]
    assert against == {"gpu": "it needs what does not hold here: the run is on an NVIDIA GPU"}


def test_advice_with_equal_bounds_is_sorted_by_claimed_gain():
    advice, _ = ask(a=card("input"), b=card("input", gain=(1.0, 20.0)))
    assert list(advice) == ["b", "a"]


def test_advice_bounds_are_finite():
    assert amdahl(1.0) < 1e4
    assert amdahl(0.5) == 2.0


@pytest.mark.parametrize(
    ("facts", "ceilings", "expected"),
    [
        ({"cuda"}, {}, {"prefetch": None}),  # not measured: the copy waits for the queue, and the share is no bound
        ({"cuda"}, {"copy": 1.2, "input": 1.0}, {"prefetch": pytest.approx(1.2)}),
        ({"cuda"}, {"copy": 1.0, "input": 1.0}, {}),
        ({"cpu"}, {}, {}),
    ],
)
def test_advice_bounds_the_copy_to_a_gpu_by_its_ablation_only(facts, ceilings, expected):
    phases = PHASES | {"input": 0.0, "copy": 0.005}
    advice, _ = advise(phases, ceilings, frozenset(facts), {"prefetch": card("copy", "input")})
    assert {entry["method"]: entry["bound"] for entry in advice} == expected
