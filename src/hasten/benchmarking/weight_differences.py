"""How far two sets of weights or gradients lie apart: as one relative number, or in decibels of the worst gradient."""

import math
from collections.abc import Mapping, Sequence

import torch

from hasten.utils.tree import bitwise_equal

NEGLIGIBLE = 1e-6  # of the root mean square of all gradients: such a gradient is zero in exact arithmetic

Tensors = Mapping[str, torch.Tensor]


def relative_difference(a: Tensors, b: Tensors) -> float:
    """Norm of the difference of all floating-point weights over the norm of ``a``; infinite if their numbers differ.

    ``a`` and ``b`` map the name of a weight to its values; weights are paired in the order of their names. NaN, which
    is below no limit, if there are none to compare.
    """
    one, other = flatten(a), flatten(b)
    if not one.numel():
        return math.nan
    return (one - other).norm().item() / (one.norm().item() or 1.0) if one.shape == other.shape else math.inf


def most_different(a: Tensors, b: Tensors) -> str:
    """``, most in 0.bias``: where the weights lie farthest apart; empty if that is unknown."""
    names = [name for name in a if a[name].is_floating_point() and name in b and a[name].shape == b[name].shape]
    pairs = {name: (a[name], b[name]) for name in names}
    distances = {name: (one.double() - other.double()).norm().item() for name, (one, other) in pairs.items()}
    return f", most in {max(distances, key=lambda name: distances[name])}" if distances else ""


def different_weights(a: Tensors, b: Tensors) -> list[str]:
    """The names of the weights that are not the same to the bit, or that only one of the two sets has."""
    return [name for name in {**a, **b} if name not in a or name not in b or not bitwise_equal(a[name], b[name])]


def flatten(weights: Tensors) -> torch.Tensor:
    """All floating-point weights as one vector: float64, shape (number of values,), in the order of their names.

    A complex value counts as two.
    """
    ordered = [value for _, value in sorted(weights.items())]
    parts = [torch.view_as_real(value.resolve_conj()) if value.is_complex() else value for value in ordered]
    values = [value.double().flatten() for value in parts if value.is_floating_point()]
    return torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)


def worst_gradient(clean: Sequence[Tensors | None], noisy: Sequence[Tensors | None]) -> tuple[str, float]:
    """(parameter, dB) of the lowest signal-to-noise ratio of a gradient over all steps; skips negligible gradients.

    ``clean`` and ``noisy`` hold the gradients of each step by name of the parameter, None where a step has none. A
    gradient that ``noisy`` lacks is zero there. Without any gradient the ratio is -inf.
    """
    pairs = [(reference, noise) for reference, noise in zip(clean, noisy, strict=True) if reference and noise]
    names = [name for name, value in pairs[0][0].items() if value.numel()] if pairs else []
    if not names:
        return "every parameter", -math.inf
    signals = {name: torch.cat([reference[name].double().flatten() for reference, _ in pairs]) for name in names}
    mean = torch.cat(list(signals.values())).square().mean().sqrt()
    ratios = {"no parameter": math.inf}
    for name, signal in signals.items():
        if signal.square().mean().sqrt() < NEGLIGIBLE * mean:
            continue
        values = [gradients.get(name, torch.zeros_like(reference[name])) for reference, gradients in pairs]
        ratios[name] = decibels(signal, signal - torch.cat([value.double().flatten() for value in values]))
    return min(ratios.items(), key=lambda item: item[1])


def decibels(signal: torch.Tensor, noise: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB: inf without noise, -inf without a signal or with values that are not finite."""
    power, error = signal.square().sum().item(), noise.square().sum().item()
    if error == 0.0:
        return math.inf
    return 10 * math.log10(power / error) if 0 < power < math.inf and error < math.inf else -math.inf
