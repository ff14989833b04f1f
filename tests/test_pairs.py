"""Every pair of methods trains two steps, with the same bits in either order, or is refused with both names and a reason.

This finds conflicts that the cards do not state.
"""

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
from helpers.small_tasks import UNAVAILABLE, SETTINGS, names_with_effect, tasks_with_effect


def common_task(pair: tuple[str, str]):
    """The first small task on which both methods have an effect."""
    return next((task for task in tasks_with_effect(pair[0]) if task in tasks_with_effect(pair[1])), None)


@pytest.mark.parametrize(
    "pair", [pair for pair in combinations(names_with_effect(), 2) if common_task(pair)], ids=" and ".join
)
def test_pair_trains_in_any_order_or_is_refused(pair):
    task = common_task(pair)
    try:
        weights = _two_steps(task, pair)
    except ConfigurationError as reason:
        assert all(name in str(reason) for name in pair), f"the message for {pair} does not name both: {reason}"
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
    assert not different, f"the order of {pair} in the recipe matters for {different}"


@pytest.mark.parametrize("name", method_names())
def test_method_named_twice_is_refused(name):
    with pytest.raises(ConfigurationError, match="named twice"):
        Recipe.parse([name, name])
    assert make_method(name).name == name


def test_pairs_are_generated_for_all_local_methods():
    """An error that makes methods seem to have no effect would omit their pairs."""
    unavailable = [name for name in method_names() if make_method(name).card.applies_to & UNAVAILABLE]
    assert sorted(names_with_effect() + unavailable) == sorted(method_names())


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
def test_required_and_invalidated_trait_is_refused(pair, trait):
    for order in (pair, pair[::-1]):
        with pytest.raises(ConfigurationError, match=f"requires {trait}, which"):
            check_conflicts([make_method(name) for name in order])


@pytest.mark.parametrize("trait", TRAITS)
def test_trait_is_required_and_invalidated_by_different_methods(trait):
    cards = {name: make_method(name).card for name in method_names()}
    requiring = {name for name, card in cards.items() if trait in card.requires}
    invalidating = {name for name, card in cards.items() if trait in card.invalidates}
    assert any(one != other for one in requiring for other in invalidating), f"no pair conflicts over {trait!r}"
