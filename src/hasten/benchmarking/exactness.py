"""Checks, by running it, that a recipe changes the training no more than the exactness class on its cards allows.

=================  ====================================================================================================
BIT_EXACT          Both runs from one seed: every exported weight is identical to the bit.
EQUIVALENT_MATH    Both runs in float64: the weights agree within a relative difference of 1e-10.
REDUCED_PRECISION  The gradient of every parameter is at least 20 dB above its error against float64. Because a method
                   that only rounds does nothing else, the weights must move in float64 as they do without it.
CHANGES_TRAINING   In float64 the weights or the plan must differ, or the method has no effect.
=================  ====================================================================================================

If the weights of a BIT_EXACT recipe differ, the base is run once more. A model that does not repeat itself is no fault
of the recipe, which is then judged by what repeats: every batch is the same to the bit, and unless all that was added
handles data only, the weights differ by no more than those of two runs of the base (``statistics``).

In all classes the validation data must be the same. The check fails closed: a run that raises, gives a NaN or has
nothing to act on does not pass. Call it in a process of its own: it restores the global state that it knows of, but a
method may change anything. Float64 runs compare the formula, so both arms disable dropout: microbatches or a compiler
rightly draw other random numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hasten.benchmarking.equivalence_runs import (
    EquivalenceCase,
    EquivalenceRun,
    RunConditions,
    both_arms,
    first_gradients,
    plan_differences,
    plan_mismatch,
    validation_mismatch,
)
from hasten.benchmarking.process_state import restored
from hasten.benchmarking.repeatability import WATCHED_STEPS, Control, run_control
from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.devices import pick_device

Gradients: TypeAlias = dict[str, torch.Tensor]  # by parameter name

MAX_DIFFERENCE = 1e-10  # relative, of all weights together
MIN_GRADIENT_DB, MIN_MOVEMENT_DB = 20.0, 40.0  # signal-to-noise ratios
MAX_BATCHES = 25  # a dynamic loss scale may need 16 overflows to settle
NOISE_FACTOR = 10.0  # times the distance of two runs of a model that does not repeat itself
NEGLIGIBLE = 1e-6  # of the mean: such a gradient is zero in exact arithmetic, e.g. that of a bias before batch norm


@dataclass(frozen=True)
class ExactnessCheck:
    """Result of an exactness check.

    Attributes:
        passed: whether the recipe is as exact as it claims; False also if the check could not be run.
        number: BIT_EXACT: number of tensors that differ. EQUIVALENT_MATH and CHANGES_TRAINING: relative difference in
            float64. REDUCED_PRECISION: signal-to-noise ratio of the worst gradient in dB. NaN without a measurement.
        why: one sentence that contains the number.
        reproducible: whether the base repeats itself to the bit, as far as it was looked at.
        statistics: whether the result rests on the size of differences that are not reproducible: nothing is proven.
    """

    passed: bool
    number: float
    why: str
    reproducible: bool = True
    statistics: bool = False


def check_exactness(
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
) -> ExactnessCheck:
    """Compares ``candidate`` with ``base`` as the exactness class requires.

    Args:
        task: the task to train.
        base: the recipe whose result is correct by definition.
        candidate: the recipe to check.
        exactness: the class that the candidate claims.
        device: "cpu" or "cuda"; by default a GPU if there is one.
        seed: seed of both runs.
        steps: maximum optimizer steps of each arm.
        seconds: after about this time the arms are compared where they are.
        ranks: the process group of both arms. All ranks must call this; the result of rank 0 counts.

    Raises:
        RunError: with several ranks only: the check failed to run on this rank, so the job must end.
    """
    case = EquivalenceCase(task, base, candidate, exactness, pick_device(device), seed, steps, seconds, ranks)
    try:
        with restored():
            if case.device != "cpu":
                torch.use_deterministic_algorithms(True, warn_only=True)  # or two runs of one recipe could differ
            measure, judge = _CHECKS[exactness]
            evidence = measure(case)
            if ranks.is_main_process:
                return judge(*evidence)
            return _not_passed("rank 0, which has all weights, decides")
    except Exception as error:
        known = isinstance(error, (RunError, ConfigurationError))
        why = str(error) if known else f"the check could not be run: {format_error(error)}"
        if not ranks.is_single_process:
            raise RunError(why) from error
        return _not_passed(why)


def _not_passed(why: str, number: float = math.nan) -> ExactnessCheck:
    return ExactnessCheck(False, number, why)


def _both_in_double(case: EquivalenceCase) -> tuple[EquivalenceRun, EquivalenceRun]:
    return both_arms(case, RunConditions(double=True))


def _gradients_and_movement(
    case: EquivalenceCase,
) -> tuple[list[Gradients | None], list[Gradients | None], int, EquivalenceRun, EquivalenceRun]:
    noisy, batches = first_gradients(case, case.candidate, RunConditions(double=False), MAX_BATCHES)
    clean, _ = first_gradients(case, case.base, RunConditions(double=True), len(noisy))
    return clean, noisy, batches, *both_arms(case, RunConditions(double=True), steps=5)


def _bit_exact(case: EquivalenceCase) -> tuple[EquivalenceRun, EquivalenceRun, Control | None]:
    a, b = both_arms(case)
    comparable = not case.ranks.any(plan_mismatch(a, b) is not None)
    differ = case.ranks.any(comparable and bool(_different(a, b)))
    return a, b, run_control(case, a) if differ else None


def _judge_bit_exact(a: EquivalenceRun, b: EquivalenceRun, control: Control | None) -> ExactnessCheck:
    if why := plan_mismatch(a, b):
        return _not_passed(why)
    total, different = len(a.weights), _different(a, b)
    if not different:
        return ExactnessCheck(True, 0, f"all {total} weights are identical to the bit after {a.steps} steps")
    if control is not None and _different(a, control.base):
        return _judge_by_what_repeats(a, b, control)
    why = f"{len(different)} of {total} weights differ after {a.steps} steps, e.g. {different[0]}"
    return _not_passed(why, len(different))


def _judge_by_what_repeats(a: EquivalenceRun, b: EquivalenceRun, control: Control) -> ExactnessCheck:
    noise, number = (_relative_difference(a.weights, other.weights) for other in (control.base, b))
    blame = control.nondeterministic_op or f"none of PyTorch's operations in the first {WATCHED_STEPS} steps"
    own = (
        f"this model does not repeat itself: {len(_different(a, control.base))} of {len(a.weights)} weights of two "
        f"runs without the recipe differ after {a.steps} steps (the operation: {blame})"
    )
    if not control.same_batches:
        return ExactnessCheck(False, number, f"{own}; and with the recipe the batches differ", reproducible=False)
    why = f"{own}; all {a.steps} batches are identical to the bit"
    if control.data_only:
        return ExactnessCheck(True, number, f"{why}, and the recipe handles data only", reproducible=False)
    passed = number <= NOISE_FACTOR * noise
    limit = f"{'no more' if passed else 'more'} than {NOISE_FACTOR:.0f} times the {noise:.1e} between the two runs"
    why += f"; with the recipe the weights differ by {number:.1e}, {limit}"
    return ExactnessCheck(passed, number, why, reproducible=False, statistics=True)


def _different(a: EquivalenceRun, b: EquivalenceRun) -> list[str]:
    return [name for name in a.weights if not torch.equal(a.weights[name], b.weights[name])]


def _judge_equivalent_math(a: EquivalenceRun, b: EquivalenceRun) -> ExactnessCheck:
    if why := plan_mismatch(a, b):
        return _not_passed(why)
    number = _relative_difference(a.weights, b.weights)
    passed = number < MAX_DIFFERENCE
    relation = "below" if passed else "not below"
    why = f"in float64 the weights differ by {number:.1e} after {a.steps} steps, {relation} {MAX_DIFFERENCE:.0e}"
    return ExactnessCheck(passed, number, why)


def _judge_reduced_precision(
    clean: list[Gradients | None], noisy: list[Gradients | None], batches: int, a: EquivalenceRun, b: EquivalenceRun
) -> ExactnessCheck:
    name, worst = _worst_gradient(clean, noisy)
    if not worst >= MIN_GRADIENT_DB:
        why = f"the gradient of {name} is {worst:.1f} dB above its error against float64, below {MIN_GRADIENT_DB:.0f}"
        return _not_passed(why, worst)
    if why := plan_mismatch(a, b):
        return _not_passed(why)
    movement = _decibels(_movement(a), _movement(a).sub(_movement(b)))
    if not movement >= MIN_MOVEMENT_DB:
        why = f"it does more than round: in float64 the weights move differently ({movement:.1f} dB, {a.steps} steps)"
        return _not_passed(why, movement)
    why = f"every gradient is at least {worst:.1f} dB above its error against float64, over {batches} batches"
    return ExactnessCheck(True, worst, why)


def _judge_changes_training(a: EquivalenceRun, b: EquivalenceRun) -> ExactnessCheck:
    if why := validation_mismatch(a, b):
        return _not_passed(why)
    same_names = a.weights.keys() == b.weights.keys()
    number = _relative_difference(a.weights, b.weights) if same_names else math.inf
    difference = f"in float64 the weights differ by {number:.1e} after {b.steps} steps"
    if number >= MAX_DIFFERENCE:
        return ExactnessCheck(True, number, difference)
    if a.plan != b.plan:
        change = plan_differences(b.plan, a.plan)
        why = f"the weights are the same after {b.steps} steps, but the plan differs: {change}"
        return ExactnessCheck(True, number, why)
    return _not_passed(f"it has no effect: {difference}", number)


# (what all ranks run, how rank 0 decides)
_CHECKS: dict[Exactness, tuple[Callable[[EquivalenceCase], tuple[Any, ...]], Callable[..., ExactnessCheck]]] = {
    Exactness.BIT_EXACT: (_bit_exact, _judge_bit_exact),
    Exactness.EQUIVALENT_MATH: (_both_in_double, _judge_equivalent_math),
    Exactness.REDUCED_PRECISION: (_gradients_and_movement, _judge_reduced_precision),
    Exactness.CHANGES_TRAINING: (_both_in_double, _judge_changes_training),
}


def _relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    one, other = _flatten(a), _flatten(b)
    return (one - other).norm().item() / (one.norm().item() or 1.0) if one.shape == other.shape else math.inf


def _flatten(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.double().flatten() for _, value in sorted(weights.items()) if value.is_floating_point()])


def _movement(run: EquivalenceRun) -> torch.Tensor:
    return _flatten(run.weights) - _flatten(run.start)


def _worst_gradient(clean: list[Gradients | None], noisy: list[Gradients | None]) -> tuple[str, float]:
    """(parameter, dB) of the lowest signal-to-noise ratio of a gradient in all used batches; skips negligible ones."""
    pairs = [(reference, noise) for reference, noise in zip(clean, noisy, strict=True) if reference and noise]
    signals = {name: torch.cat([reference[name].flatten() for reference, _ in pairs]) for name in pairs[0][0]}
    mean = torch.cat(list(signals.values())).square().mean().sqrt()
    ratios = {"no parameter": math.inf}
    for name, signal in signals.items():
        if signal.square().mean().sqrt() < NEGLIGIBLE * mean:
            continue
        values = [gradients.get(name, torch.zeros_like(reference[name])) for reference, gradients in pairs]
        ratios[name] = _decibels(signal, signal - torch.cat([value.flatten() for value in values]))
    return min(ratios.items(), key=lambda item: item[1])


def _decibels(signal: torch.Tensor, noise: torch.Tensor) -> float:
    power, error = signal.square().sum().item(), noise.square().sum().item()
    if error == 0.0:
        return math.inf
    return 10 * math.log10(power / error) if 0 < power < math.inf and error < math.inf else -math.inf  # -inf for a NaN
