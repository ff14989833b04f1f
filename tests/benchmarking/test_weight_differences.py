"""Distances of weights and gradients, with numbers that can be checked by hand."""

import math

import pytest
import torch

from hasten.benchmarking.weight_differences import relative_difference, worst_gradient


def test_relative_difference_is_of_all_floating_point_weights_together():
    a = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "steps": torch.tensor(1)}
    b = {"w": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0]), "steps": torch.tensor(2)}
    assert relative_difference(a, b) == pytest.approx(0.1)
    assert relative_difference(a, {"w": torch.zeros(1)}) == math.inf


def test_relative_difference_sees_complex_weights_and_is_below_no_limit_without_weights():
    assert relative_difference({"w": torch.tensor([3 + 4j])}, {"w": torch.tensor([3 + 4.5j])}) == pytest.approx(0.1)
    assert not relative_difference({"steps": torch.tensor(1)}, {"steps": torch.tensor(2)}) < 1e9


def test_worst_gradient_names_the_parameter_with_the_lowest_ratio_and_skips_negligible_ones():
    clean = {"w": torch.tensor([10.0]), "b": torch.tensor([1.0]), "zero": torch.tensor([1e-9]), "none": torch.zeros(0)}
    noisy = {"w": torch.tensor([10.1]), "b": torch.tensor([1.1]), "zero": torch.tensor([1e-3])}
    name, ratio = worst_gradient([clean, None], [noisy, None])
    assert name == "b" and ratio == pytest.approx(20.0, abs=1e-3)
    assert worst_gradient([clean], [clean | {"w": torch.tensor([math.nan])}]) == ("w", -math.inf)
    assert worst_gradient([{}], [{}]) == ("every parameter", -math.inf)
    assert worst_gradient([clean], [{"b": clean["b"]}]) == ("w", pytest.approx(0.0))
