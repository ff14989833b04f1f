"""Proves, by running it, that a recipe changes the numbers no more than its cards say.

=============  ============================================================================================
BIT_EXACT      both runs from one seed, every exported weight the same to the bit
EQUIVALENT_MATH     both runs in float64, the weights within a relative difference of 1e-10
REDUCED_PRECISION     every parameter's gradient at least 20 dB above its error against float64; and since a method that
               only rounds does nothing else, in float64 the weights must move as they do without it
CHANGES_TRAINING    in float64 the weights or the plan of steps must differ, or the method has no effect
=============  ============================================================================================

For all of them the validation data must be the same, too. A proof that cannot be run has failed: whatever
raises, gives a NaN or has nothing to act on is not passed. Methods from outside run here, so call this in a process
of its own; it restores all it knows of, but a method may do anything.

What is compared in float64 is the formula: dropout is switched off in both arms, because pieces of a batch or a
compiler draw other random numbers, rightly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hasten.contract.card import Exactness
from hasten.contract.errors import Failure, Refusal, one_line
from hasten.contract.ranks import SINGLE_PROCESS, ProcessGroupInfo
from hasten.contract.recipe import Recipe
from hasten.contract.task import Task
from hasten.engine.devices import pick_device
from hasten.measure.laboratory import Arm, Case, Laboratory, both_arms, first_gradients, other_run, other_validation, told
from hasten.measure.process_state import restored

SAME = 1e-10  # relative difference of all weights together
CLEAN_GRADIENT, SAME_MOVEMENT = 20.0, 40.0  # decibels
TRIED_BATCHES = 25  # a loss scale may need 16 overflows to find its level
NEGLIGIBLE = 1e-6  # a gradient this much smaller than the rest is zero in exact arithmetic, such as a bias before batch norm


@dataclass(frozen=True)
class Proof:
    """Whether it holds, and by what number.

    Attributes:
        passed: False also where nothing could be measured.
        number: BIT_EXACT: weights (tensors) that differ; EQUIVALENT_MATH and CHANGES_TRAINING: relative difference in float64;
            REDUCED_PRECISION: signal-to-noise of the worst gradient in dB. NaN where nothing could be measured.
        why: one sentence with the number in it.
    """

    passed: bool
    number: float
    why: str


ELSEWHERE = Proof(False, math.nan, "the first rank judges, who has all weights")


def prove(
    task: Task,
    base: Recipe,
    candidate: Recipe,
    exactness: Exactness,
    *,
    device: str | None = None,
    seed: int = 0,
    steps: int = 30,
    seconds: float = 60.0,
    ranks: ProcessGroupInfo = SINGLE_PROCESS,
) -> Proof:
    """Holds ``candidate`` against ``base`` as its exactness demands.

    Args:
        steps: optimizer steps that each arm does at most.
        seconds: after about this long the arms are compared where they are; a step once begun is finished.
        ranks: that train together, in both arms. All of them have to ask; the first one's answer counts.

    Raises:
        Failure: the proof could not be run on this rank, and the others would wait for it.
    """
    case = Case(task, base, candidate, exactness, pick_device(device), seed, steps, seconds, ranks)
    try:
        with restored():
            if case.device != "cpu":
                torch.use_deterministic_algorithms(True, warn_only=True)  # so that a run can repeat itself at all
            seen, judged = _PROOFS[exactness]
            evidence = seen(case)
            return judged(*evidence) if ranks.is_main_process else ELSEWHERE
    except Exception as error:
        told = str(error) if isinstance(error, (Failure, Refusal)) else f"the proof could not be run: {one_line(error)}"
        if not ranks.is_single_process:
            raise Failure(told) from error
        return Proof(False, math.nan, told)


def _in_double(case: Case) -> tuple[Arm, Arm]:
    return both_arms(case, Laboratory(double=True))


def _gradients_and_movement(case: Case) -> tuple[list[dict], list[dict | None], int, Arm, Arm]:
    noisy, share = first_gradients(case, case.candidate, Laboratory(double=False), TRIED_BATCHES)
    clean, _ = first_gradients(case, case.base, Laboratory(double=True), len(noisy))
    return clean, noisy, share, *both_arms(case, Laboratory(double=True), steps=5)


def _bit_exact(a: Arm, b: Arm) -> Proof:
    if why := other_run(a, b):
        return Proof(False, math.nan, why)
    different = [name for name in a.weights if not torch.equal(a.weights[name], b.weights[name])]
    if different:
        return Proof(
            False, len(different), f"{len(different)} of {len(a.weights)} weights differ after {a.steps} steps, first {different[0]}"
        )
    return Proof(True, 0, f"all {len(a.weights)} weights are the same to the bit after {a.steps} steps")


def _same_maths(a: Arm, b: Arm) -> Proof:
    if why := other_run(a, b):
        return Proof(False, math.nan, why)
    number = _relative_difference(a.weights, b.weights)
    verdict = "below" if number < SAME else "not below"
    return Proof(number < SAME, number, f"in float64 the weights differ by {number:.1e} after {a.steps} steps, {verdict} {SAME:.0e}")


def _fewer_bits(clean: list[dict], noisy: list[dict | None], share: int, a: Arm, b: Arm) -> Proof:
    name, worst = _worst_gradient(clean, noisy)
    if not worst >= CLEAN_GRADIENT:
        return Proof(
            False, worst, f"the gradient of {name} stands only {worst:.1f} dB above its error against float64, not {CLEAN_GRADIENT:.0f}"
        )
    if why := other_run(a, b):
        return Proof(False, math.nan, why)
    movement = _decibels(_moved(a), _moved(a).sub(_moved(b)))
    if not movement >= SAME_MOVEMENT:
        return Proof(
            False, movement, f"it does more than round: in float64 the weights move otherwise ({movement:.1f} dB after {a.steps} steps)"
        )
    return Proof(True, worst, f"every gradient stands at least {worst:.1f} dB above its error against float64, over {share} batches")


def _other_maths(a: Arm, b: Arm) -> Proof:
    if why := other_validation(a, b):
        return Proof(False, math.nan, why)
    same_names = a.weights.keys() == b.weights.keys()
    number = _relative_difference(a.weights, b.weights) if same_names else math.inf
    if number >= SAME:
        return Proof(True, number, f"in float64 the weights differ by {number:.1e} after {b.steps} steps")
    if a.plan != b.plan:
        return Proof(True, number, f"the weights are the same after {b.steps} steps, but the plan is another: {told(b.plan, a.plan)}")
    return Proof(False, number, f"it has no effect: in float64 the weights differ by {number:.1e} after {b.steps} steps")


_PROOFS: dict[Exactness, tuple[Callable[[Case], tuple], Callable[..., Proof]]] = {  # what all ranks do, and what the first makes of it
    Exactness.BIT_EXACT: (both_arms, _bit_exact),
    Exactness.EQUIVALENT_MATH: (_in_double, _same_maths),
    Exactness.REDUCED_PRECISION: (_gradients_and_movement, _fewer_bits),
    Exactness.CHANGES_TRAINING: (_in_double, _other_maths),
}


def _relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    one, other = _flat(a), _flat(b)
    return (one - other).norm().item() / (one.norm().item() or 1.0) if one.shape == other.shape else math.inf


def _flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.double().flatten() for name, value in sorted(weights.items()) if value.is_floating_point()])


def _moved(arm: Arm) -> torch.Tensor:
    return _flat(arm.weights) - _flat(arm.start)


def _worst_gradient(clean: list[dict], noisy: list[dict | None]) -> tuple[str, float]:
    """(parameter, dB) of the gradient with the least signal-to-noise over all the batches that count."""
    pairs = [(reference, gradients) for reference, gradients in zip(clean, noisy, strict=True) if gradients is not None]
    signal = {name: torch.cat([reference[name].flatten() for reference, _ in pairs]) for name in pairs[0][0]}
    usual = torch.cat(list(signal.values())).square().mean().sqrt()
    worst = ("nothing", math.inf)
    for name, value in signal.items():
        if value.square().mean().sqrt() < NEGLIGIBLE * usual:
            continue
        got = torch.cat([gradients.get(name, torch.zeros_like(reference[name])).flatten() for reference, gradients in pairs])
        decibels = _decibels(value, value - got)
        if decibels < worst[1]:
            worst = (name, decibels)
    return worst


def _decibels(signal: torch.Tensor, noise: torch.Tensor) -> float:
    power, error = signal.square().sum().item(), noise.square().sum().item()
    if error == 0.0:
        return math.inf
    return 10 * math.log10(power / error) if 0 < power < math.inf and error < math.inf else -math.inf  # also for a NaN
