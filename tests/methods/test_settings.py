"""Every setting of every method states what it may be; what lies outside is refused in one line that names it."""

import dataclasses
import math

import pytest

from hasten import ConfigurationError
from hasten.core.method import BOUNDS
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_method, make_methods, method_class, method_names

FREE = {  # who knows what they may be says so: torch the names of its backends, the model where it can be cut
    ("compile", "backend"),
    ("branch_parallel", "assignment"),
    ("pipeline", "cuts"),
}
STATED = [
    (name, field)
    for name in method_names()
    if dataclasses.is_dataclass(method_class(name))
    for field in dataclasses.fields(method_class(name))
    if not isinstance(field.default, bool) and (name, field.name) not in FREE
]
NONSENSE = ["-1", "nan", "inf", "-inf", "1e300000", "", "nonsense", "true"]


def name_of(value):
    return value if isinstance(value, str) else value.name


@pytest.mark.parametrize(("name", "field"), STATED, ids=name_of)
def test_a_range_is_stated_and_the_default_lies_in_it(name, field):
    assert field.metadata["range"]
    assert getattr(make_method(name), field.name) == field.default


@pytest.mark.parametrize(("name", "field"), STATED, ids=name_of)
@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused(name, field, text):
    with pytest.raises(ConfigurationError, match=rf"{name}.*{field.name} must be ") as caught:
        make_methods(Recipe.parse(f"{name}:{field.name}={text}"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, field in STATED if field.metadata["bounds"]], ids=name_of
)
def test_every_bound_is_where_it_says(name, field):
    """Just inside is taken, just outside is not."""
    step, kind = (1, int) if "int" in str(field.type) else (1e-9, float)
    for bound, edge in field.metadata["bounds"].items():
        for value in (edge - step, edge, edge + step):
            if BOUNDS[bound](value, edge):
                assert getattr(make_method(name, {field.name: kind(value)}), field.name) == value
            else:
                with pytest.raises(
                    ConfigurationError, match=f"{field.name} must be .*{bound.replace('_', ' ')} {edge}"
                ):
                    make_method(name, {field.name: kind(value)})


def test_a_number_that_is_none_is_told_to_be_finite():
    with pytest.raises(ConfigurationError, match="max_norm must be finite and above 0, not inf"):
        make_method("gradient_clipping", {"max_norm": math.inf})
