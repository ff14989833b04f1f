"""Every pair of methods either trains two steps, the same to the bit in whichever order they are typed, or is refused
with both names and a reason. What the cards do not know, this finds."""

import math
import warnings
from itertools import combinations, islice

import pytest
import torch

from hasten.benchmarking.process_state import restored
from hasten.core.card import TRAITS
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.engine.composition import check_conflicts
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_method, make_methods, method_names
from helpers.small_tasks import ELSEWHERE, SETTINGS, names_with_effect, tasks_with_effect


def common_task(pair: tuple[str, str]):
    """The first small task on which both methods have an effect."""
    return next((task for task in tasks_with_effect(pair[0]) if task in tasks_with_effect(pair[1])), None)


@pytest.mark.parametrize(
    "pair", [pair for pair in combinations(names_with_effect(), 2) if common_task(pair)], ids=" and ".join
)
def test_a_pair_trains_together_in_any_order_or_is_refused(pair):
    task = common_task(pair)
    try:
        weights = _two_steps(task, pair)
    except ConfigurationError as reason:
        assert all(name in str(reason) for name in pair), f"the refusal of {pair} names not both: {reason}"
        with pytest.raises(ConfigurationError) as again:
            _two_steps(task, pair[::-1])
        assert str(again.value) == str(reason)
        return
    reversed_weights = _two_steps(task, pair[::-1])
    assert all(math.isfinite(value.sum()) for value in weights.values()), (
        f"{pair} together give weights that are not finite"
    )
    assert weights.keys() == reversed_weights.keys()
    different = [name for name in weights if not torch.equal(weights[name], reversed_weights[name])]
    assert not different, f"the order in which {pair} are typed matters for {different}"


@pytest.mark.parametrize("name", method_names())
def test_a_method_with_itself_is_refused(name):
    with pytest.raises(ConfigurationError, match="named twice"):
        Recipe.parse([name, name])
    assert make_method(name).name == name


def test_pairs_are_generated_of_most_methods():
    """An error that made methods seem to have no effect would leave their pairs out."""
    elsewhere = [name for name in method_names() if make_method(name).card.applies_to & ELSEWHERE]
    assert sorted(names_with_effect() + elsewhere) == sorted(method_names())


def _two_steps(task, names) -> dict:
    """Exported weights after two steps with the methods in this order."""
    with restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        program = build(task(), make_methods(Recipe({name: SETTINGS.get(name, {}) for name in names})))
        with program.process_context():
            for _ in islice(train_steps(program), 2):
                pass
            return {name: value.detach().clone() for name, value in program.export().state_dict().items()}


@pytest.mark.parametrize(
    ("pair", "trait"),
    [
        (("bfloat16", "float16"), "uniform_precision"),
        (("gradient_clipping", "znorm"), "gradient_norm"),
        (("activation_checkpointing", "cuda_graph"), "python_between_kernels"),
    ],
)
def test_what_one_needs_and_the_other_takes_away(pair, trait):
    for order in (pair, pair[::-1]):
        with pytest.raises(ConfigurationError, match=f"requires {trait}, which"):
            check_conflicts([make_method(name) for name in order])


@pytest.mark.parametrize("trait", TRAITS)
def test_a_trait_is_needed_by_one_and_broken_by_another(trait):
    cards = {name: make_method(name).card for name in method_names()}
    needy = {name for name, card in cards.items() if trait in card.requires}
    breakers = {name for name, card in cards.items() if trait in card.invalidates}
    assert any(one != other for one in needy for other in breakers), f"nobody opposes anybody over {trait!r}"
