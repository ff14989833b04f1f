"""zero_init_residual: only normalizations that end a residual branch start with a scale of zero."""

from functools import partial

import pytest
import torch
from torch import nn

from hasten.core.recipe import Recipe
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.testing import check_method, tasks


class Residual(nn.Module):
    def __init__(self, in_place: bool = False, around: bool = False, decides: bool = False):
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.around = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) if around else nn.Identity()
        self.in_place, self.decides = in_place, decides

    def forward(self, x):
        if self.decides and x.sum() > 1e9:
            return x
        out = self.last(self.second(self.norm(self.first(x)).relu()))
        if self.in_place:
            out += self.around(x)
            return out.relu()
        return (self.around(x) + out).relu()


class Plain(Residual):
    """Adds a tensor, but not its input."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (self.last(self.second(x)) + self.shift).relu() + 1


def task(*blocks):
    """A task with a network of the blocks that these functions build."""

    def model():
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)]
        return nn.Sequential(nn.Conv2d(1, 4, 1), nn.Sequential(*(block() for block in blocks)), *head)

    return tasks.convolutional(model=model, batch_size=32)


def zeros(task) -> list[str]:
    """Returns the names of the normalizations that start with zeros."""
    modules = build(task, make_methods(Recipe.coerce("zero_init_residual"))).run.model.named_modules()
    return [name for name, part in modules if isinstance(part, nn.BatchNorm2d) and not part.weight.any()]


@pytest.mark.parametrize("how", [{}, {"in_place": True}, {"around": True}, {"in_place": True, "around": True}])
def test_last_normalization_of_each_block_starts_with_zero(how):
    assert zeros(task(partial(Residual, **how), partial(Residual, **how))) == ["1.0.last", "1.1.last"]


def test_untraceable_block_does_not_hide_the_others():
    assert zeros(task(partial(Residual, decides=True), Residual)) == ["1.1.last"]


@pytest.mark.parametrize("make", [lambda: task(Plain, Plain), tasks.convolutional, tasks.transformer])
def test_model_without_shortcut_has_no_effect(make):
    program = build(make(), make_methods(Recipe.coerce("zero_init_residual")))
    assert program.run.no_effect and not zeros(make())


@pytest.mark.parametrize(("scale", "why"), [(0.7, "the scales are trained already"), (0.0, "start with zeros already")])
def test_scales_that_are_not_initial_are_unchanged(scale, why):
    def residual():
        block = Residual()
        nn.init.constant_(block.last.weight, scale)
        return block

    run = build(task(residual, residual), make_methods(Recipe.coerce("zero_init_residual"))).run
    assert why in run.no_effect[0][1]
    scales = [part.weight for name, part in run.model.named_modules() if name.endswith(".last")]
    assert len(scales) == 2 and all((each == scale).all() for each in scales)


def test_method_passes_the_contract_suite():
    results = check_method("zero_init_residual", task(Residual, Residual))
    assert set(results.values()) - {"passed"} == {"skipped: zero_init_residual has an effect on every task"}, results
