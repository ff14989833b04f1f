"""Recipes as text: separators between methods, and invalid TOML."""

import pytest

from hasten import ConfigurationError
from hasten.core.recipe import Recipe


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("ema+bfloat16", ["ema", "bfloat16"]),
        ("ema:decay=0.9 + mine.fast:Faster", ["ema", "mine.fast:Faster"]),
        ("float16:scale=1e+5+ema", ["float16", "ema"]),
        ("./c++/a+b/mine.py:Faster", ["./c++/a+b/mine.py:Faster"]),
        ("./a+b/mine.py:Faster:rate=2 + ema", ["./a+b/mine.py:Faster", "ema"]),
    ],
)
def test_recipe_plus_separates_methods_but_not_path_parts(text, names):
    recipe = Recipe.parse(text)
    assert list(recipe.methods) == names
    assert Recipe.parse(str(recipe)) == Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize("text", ["[methods.ema]\ndecay = " + "9" * 5000, "a = " + "[" * 5000, "[methods"])
def test_recipe_load_invalid_toml_is_refused(text):
    with pytest.raises(ConfigurationError, match="the recipe is not valid TOML"):
        Recipe.from_toml(text)


def test_recipe_of_a_dict_has_its_options():
    assert Recipe.coerce({"batch_size": {"factor": 8}, "ema": {}}) == Recipe({"batch_size": {"factor": 8}, "ema": {}})
    assert Recipe.coerce({}) == Recipe()
    with pytest.raises(ConfigurationError, match="the recipe: every method is a table"):
        Recipe.coerce({"ema": None})
