"""Every option of every method states its range; a value outside it is refused in one line that names the option."""

import dataclasses
import math

import pytest

from hasten import ConfigurationError
from hasten.core.method import BOUNDS
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_method, make_methods, method_class, method_names

FREE = {  # values that torch or the model checks
    ("compile", "backend"),
    ("branch_parallel", "assignment"),
    ("pipeline", "split_sizes"),
}
STATED = [
    (name, field)
    for name in method_names()
    if dataclasses.is_dataclass(method_class(name))
    for field in dataclasses.fields(method_class(name))
    if not isinstance(field.default, bool) and (name, field.name) not in FREE
]
OUT_OF_RANGE = ["-1", "nan", "inf", "-inf", "1e300000", "", "nonsense", "true"]


def name_of(value):
    return value if isinstance(value, str) else value.name


@pytest.mark.parametrize(("name", "field"), STATED, ids=name_of)
def test_option_states_range_and_accepts_default(name, field):
    assert field.metadata["range"]
    assert getattr(make_method(name), field.name) == field.default


@pytest.mark.parametrize(("name", "field"), STATED, ids=name_of)
def test_value_out_of_range_is_refused(name, field):
    for text in OUT_OF_RANGE:
        with pytest.raises(ConfigurationError, match=rf"{name}.*{field.name} must be ") as caught:
            make_methods(Recipe.parse(f"{name}:{field.name}={text}"))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, field in STATED if field.metadata["bounds"]], ids=name_of
)
def test_bounds_are_exact(name, field):
    """A value just inside the range is accepted, a value just outside it is refused."""
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


def test_infinity_is_refused_as_not_finite():
    with pytest.raises(ConfigurationError, match="max_norm must be finite and above 0, not inf"):
        make_method("gradient_clipping", {"max_norm": math.inf})
