"""Which values of a script's own arguments a search tries."""

import pytest

from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.tuning.candidates import MethodSelection, candidates_for
from hasten.tuning.joint_search import Space, split_joint
from hasten.tuning.systems import add_or_replace, candidate

DIAGNOSIS = {"advice": [{"method": "script_arguments", "bound": None}], "facts": []}


def candidates(varied: dict, methods=None) -> list:
    return candidates_for(DIAGNOSIS, MethodSelection.of(methods, ()), varied=varied).training


def test_length_is_searched_jointly_with_the_other_arguments():
    (item,) = candidates({"epochs": 50, "lr": 0.01, "batch_size": 32})
    joint, others = split_joint([item])
    assert joint == [item] and not others
    space = Space(joint)
    point = dict.fromkeys(space.axes(), 1.0)
    assert space.add_to(Recipe(), point, 0.16) == Recipe(
        {"script_arguments": {"epochs": 8, "lr": 0.08, "batch_size": 256}}
    )
    options = space.add_to(Recipe(), dict.fromkeys(point, 0.0), 0.32).methods["script_arguments"]
    assert options == {"epochs": 16, "lr": 0.005, "batch_size": 32}
    assert [type(options[name]) for name in ("epochs", "lr", "batch_size")] == [int, float, int]


def test_length_by_itself_is_one_point():
    (item,) = candidates({"num_train_epochs": 3.0})
    assert Space([item]).sample(5, 0) == [{}]
    assert Space([item]).add_to(Recipe(), {}, 0.32) == Recipe({"script_arguments": {"num_train_epochs": 0.96}})


def test_arguments_without_a_length_are_candidates_of_their_own_that_add_up():
    lr, batch = candidates({"lr": 0.1, "warmup_steps": 100})
    assert lr.presets == ({"lr": 0.2}, {"lr": 0.4}, {"lr": 0.05}) and not lr.card.search_space
    assert batch.presets == ({"warmup_steps": 200}, {"warmup_steps": 400}, {"warmup_steps": 50})
    first = add_or_replace(Recipe(), lr.name, lr.presets[0])
    assert add_or_replace(first, batch.name, batch.presets[2]).methods["script_arguments"] == {
        "lr": 0.2,
        "warmup_steps": 50,
    }


def test_named_arguments_are_varied_whatever_methods_are_named():
    assert [item.name for item in candidates({"lr": 0.1}, ["ema"])] == ["ema", "script_arguments"]


@pytest.mark.parametrize("options", [{}, {"lr": 0.5, "batch-size": 3}])
def test_recipe_file_keeps_the_arguments(options):
    recipe = Recipe({"script_arguments": options})
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert candidate("script_arguments").card.exactness is Exactness.CHANGES_TRAINING
