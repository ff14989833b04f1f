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
handles data only, the weights differ by at most NOISE_FACTOR times as much as those of two runs (``statistics``). So is
an EQUIVALENT_MATH recipe, in float64, by its weights alone.

In all classes the validation data must be the same. The check fails closed: a run that raises, gives a NaN or has
nothing to act on does not pass. Call it in a process of its own: it restores the global state that it knows of, but a
method may change anything. Float64 runs compare the formula, so both arms disable dropout: microbatches or a compiler
rightly draw other random numbers.

A model that cannot run in float64 (no memory for it, or kernels for lower precisions only) is run with smaller batches
and, if that does not help, in float32. There the limit is what the rounding alone changes: the difference between two
runs of the base, one of them with the rows of each batch in reverse order. The result says which it was.
"""

import gc
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from hasten._torch_compat import is_out_of_memory
from hasten.benchmarking.equivalence_runs import (
    EquivalenceCase,
    EquivalenceRun,
    RunConditions,
    both_arms,
    first_gradients,
    plan_differences,
    plan_mismatch,
    run_arm,
    validation_mismatch,
)
from hasten.benchmarking.process_state import restored
from hasten.benchmarking.repeatability import Control, run_control
from hasten.benchmarking.weight_differences import (
    decibels,
    different_weights,
    flatten,
    most_different,
    relative_difference,
    worst_gradient,
)
from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError, MemoryExhaustedError, RunError, format_error
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.devices import pick_device

Gradients: TypeAlias = dict[str, torch.Tensor]  # by parameter name

MAX_DIFFERENCE = 1e-10  # relative, of all weights together
MIN_GRADIENT_DB, MIN_MOVEMENT_DB = 20.0, 40.0  # signal-to-noise ratios
SMALL_BATCH = 8  # rows, where a float64 run with whole batches fails
ROUNDING_STEPS = 5  # of float32 runs: rounding grows with every step
MOVEMENT_STEPS = 5  # whose weights show that lower precision does nothing but round
AMPLIFIED_FACTOR = 100.0  # a difference up to so many times what rounding grows to may be rounding
EARLY_STEPS = 5  # after which recipes are compared whose training makes rounding grow beyond the limit later
MAX_ROUNDING = 1e-3  # relative change by rounding, above which float32 runs show nothing
TIMES_ROUNDING, LEAST_ROUNDING = 4.0, 1e-6  # a difference up to so many times the rounding is rounding
LEAST_MOVEMENT = 10.0  # times that, which the weights must move in float32 for a difference to show
MIN_ROUNDED_MOVEMENT_DB = 10.0  # of the weights in float32, where the method rounds them
MAX_BATCHES = 25  # a dynamic loss scale may need 16 overflows to settle
NONDETERMINISTIC = (
    r"(?s).*(does not have a deterministic implementation|defaults to a non-deterministic)"  # warnings of torch
)
NOISE_FACTOR = 10.0  # times the distance of two runs of a model that does not repeat itself


@dataclass(frozen=True)
class ExactnessCheck:
    """Result of an exactness check.

    Attributes:
        passed: whether the recipe is as exact as it claims; False also if the check could not be run.
        number: BIT_EXACT: number of tensors that differ. EQUIVALENT_MATH and CHANGES_TRAINING: relative difference in
            float64 (in float32 where the model does not run in float64; BIT_EXACT: of the weights, where the base does
            not repeat itself). REDUCED_PRECISION: signal-to-noise ratio of the worst gradient in dB. NaN without a
            measurement.
        why: one sentence that contains the number.
        statistics: whether the result rests on the size of differences that are not reproducible: nothing is proven.
    """

    passed: bool
    number: float
    why: str
    statistics: bool = False


def check_exactness(
    task: Task,
    base: Recipe,
    candidate: Recipe,
    exactness: Exactness,
    *,
    device: str | None = None,
    seed: int = 0,
    seconds: float = 60.0,
    ranks: ProcessGroupInfo = SINGLE_PROCESS,
) -> ExactnessCheck:
    """Runs ``base`` and ``candidate`` and checks what ``exactness``, the class that the candidate claims, requires.

    Each arm trains at most 30 optimizer steps; after about ``seconds`` they are compared where they are. All
    ``ranks``, the process group of both arms, must call this; the result of rank 0 counts.

    Raises:
        RunError: with several ranks only: the check failed to run on this rank, so the job must end.
    """
    case = EquivalenceCase(task, base, candidate, exactness, pick_device(device), seed, seconds, ranks)
    try:
        with restored(), warnings.catch_warnings():
            if case.device != "cpu":
                torch.use_deterministic_algorithms(True, warn_only=True)  # or two runs of one recipe could differ
                warnings.filterwarnings("ignore", NONDETERMINISTIC)  # the base is compared with itself
            return _check(case)
    except Exception as error:
        known = isinstance(error, (RunError, ConfigurationError))
        failed = "does not fit into memory" if is_out_of_memory(error) else "could not be run"
        why = str(error) if known else f"the check {failed}: {format_error(error)}"
        if not ranks.is_single_process:
            raise RunError(why) from error
        return _not_passed(why)


def _check(case: EquivalenceCase) -> ExactnessCheck:
    try:
        return _measure_and_judge(case)
    except Exception as error:
        if isinstance(error, (RunError, ConfigurationError)) and not isinstance(error, MemoryExhaustedError):
            raise
        if case.exactness is Exactness.BIT_EXACT or not case.ranks.is_single_process:
            raise
        failure, why = error.with_traceback(None), format_error(error, 120)
    _free_memory()  # outside of the exception, which held the memory of the run
    if not is_out_of_memory(failure) and _base_runs_in_float64(case):
        raise failure
    return _check_without_float64(case, why)


def _base_runs_in_float64(case: EquivalenceCase) -> bool:
    """Whether the model is not the reason for a failure: a candidate that raises does not pass."""
    with suppress(Exception):
        run_arm(case, case.base, (RunConditions(double=True),), steps=1)
        return True
    return False


def _measure_and_judge(case: EquivalenceCase) -> ExactnessCheck:
    measure, judge = _CHECKS[case.exactness]
    evidence = measure(case)
    if case.ranks.is_main_process:
        return judge(*evidence)
    return _not_passed("rank 0, which has all weights, decides")


def _check_without_float64(case: EquivalenceCase, why: str) -> ExactnessCheck:
    """The check of a model that fails in float64, ``why``: with smaller batches, or else in float32."""
    size = case.task.batch_size
    if size and size > SMALL_BATCH:
        _free_memory()
        with suppress(Exception):  # then in float32
            check = _measure_and_judge(replace(case, task=replace(case.task, batch_size=SMALL_BATCH)))
            return replace(check, why=f"{check.why}; with batches of {SMALL_BATCH}, since larger ones fail ({why})")
    _free_memory()
    check = _CHECKS_IN_FLOAT32[case.exactness](case)
    return replace(check, why=f"{check.why}; in float32, since the model does not run in float64 ({why})")


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _float32_runs(case: EquivalenceCase) -> tuple[EquivalenceRun, EquivalenceRun, float, float]:
    """Both arms in float32, their relative difference, and the difference that rounding alone explains."""
    a, b = both_arms(case, RunConditions(double=False), steps=ROUNDING_STEPS)
    reordered = run_arm(case, case.base, (RunConditions(double=False, reverse=True),), a.steps)
    rounding = relative_difference(a.weights, reordered.weights)
    if not rounding <= MAX_ROUNDING:
        raise RunError(f"in float32 the order of the rows of a batch changes the weights by {rounding:.1e}")
    number = relative_difference(a.weights, b.weights) if a.weights.keys() == b.weights.keys() else math.inf
    return a, b, number, max(LEAST_ROUNDING, TIMES_ROUNDING * rounding)


def _equivalent_math_in_float32(case: EquivalenceCase) -> ExactnessCheck:
    a, b, number, limit = _float32_runs(case)
    if why := plan_mismatch(a, b):
        return _not_passed(why)
    moved = _movement(a).norm().item() / (flatten(a.weights).norm().item() or 1.0)
    if not moved >= LEAST_MOVEMENT * limit:
        return _not_passed(f"the weights move by {moved:.1e} only, of which rounding explains {limit:.1e}")
    relation = "within" if number <= limit else "beyond"
    why = f"the weights differ by {number:.1e} after {a.steps} steps, {relation} the {limit:.1e} that rounding explains"
    return ExactnessCheck(number <= limit, number, why, statistics=True)


def _reduced_precision_in_float32(case: EquivalenceCase) -> ExactnessCheck:
    return _judge_reduced_precision(*_gradients_and_movement(case, double=False), double=False)


def _changes_training_in_float32(case: EquivalenceCase) -> ExactnessCheck:
    a, b, number, limit = _float32_runs(case)
    if why := validation_mismatch(a, b):
        return _not_passed(why)
    change = "" if a.plan == b.plan else f", and the plan differs: {plan_differences(b.plan, a.plan)}"
    why = f"the weights differ by {number:.1e} after {b.steps} steps, of which rounding explains {limit:.1e}{change}"
    has_effect = number > limit or bool(change)
    return ExactnessCheck(has_effect, number, why if has_effect else f"it has no effect: {why}")


def _not_passed(why: str, number: float = math.nan) -> ExactnessCheck:
    return ExactnessCheck(False, number, why)


def _both_in_double(case: EquivalenceCase) -> tuple[EquivalenceRun, EquivalenceRun]:
    return both_arms(case, RunConditions(double=True))


def _equivalent_math(
    case: EquivalenceCase,
) -> tuple[EquivalenceRun, EquivalenceRun, EquivalenceRun | None, tuple[EquivalenceRun, ...]]:
    """Both arms; if they differ another run of the base; and if they do not differ early: both arms early, and the base
    with other rounding, to the end and early.
    """
    a, b = _both_in_double(case)
    comparable = not case.ranks.any(plan_mismatch(a, b) is not None)
    differ = case.ranks.any(comparable and not relative_difference(a.weights, b.weights) < MAX_DIFFERENCE)
    if not differ:
        return a, b, None, ()
    again = run_arm(case, case.base, (RunConditions(double=True),), a.steps)
    early = both_arms(case, RunConditions(double=True), steps=EARLY_STEPS)
    if case.ranks.any(not relative_difference(early[0].weights, early[1].weights) < MAX_DIFFERENCE):
        return a, b, again, ()
    reordered = (RunConditions(double=True, reverse=True),)
    return a, b, again, (*early, *(run_arm(case, case.base, reordered, steps) for steps in (a.steps, early[0].steps)))


def _gradients_and_movement(
    case: EquivalenceCase, double: bool = True
) -> tuple[list[Gradients | None], list[Gradients | None], int, EquivalenceRun, EquivalenceRun]:
    noisy = first_gradients(case, case.candidate, RunConditions(double=False), [True] * MAX_BATCHES)
    clean = first_gradients(case, case.base, RunConditions(double), [gradients is not None for gradients in noisy])
    noisy = noisy[: len(clean)]  # float64 may be slower
    batches = sum(a is not None and b is not None for a, b in zip(clean, noisy, strict=True))
    return clean, noisy, batches, *both_arms(case, RunConditions(double), steps=MOVEMENT_STEPS)


def _bit_exact(case: EquivalenceCase) -> tuple[EquivalenceRun, EquivalenceRun, Control | None]:
    a, b = both_arms(case)
    comparable = not case.ranks.any(plan_mismatch(a, b) is not None)
    differ = case.ranks.any(comparable and bool(different_weights(a.weights, b.weights)))
    return a, b, run_control(case, a) if differ else None


def _judge_bit_exact(a: EquivalenceRun, b: EquivalenceRun, control: Control | None) -> ExactnessCheck:
    if why := plan_mismatch(a, b):
        return _not_passed(why)
    total, different = len(a.weights), different_weights(a.weights, b.weights)
    if not different:
        return ExactnessCheck(True, 0, f"all {total} weights are identical to the bit after {a.steps} steps")
    why = f"{len(different)} of {total} weights differ after {a.steps} steps, e.g. {different[0]}"
    if control is not None and control.base.steps < a.steps:
        return _not_passed(f"{why}; another run of the base reached only step {control.base.steps} in time")
    if control is not None and different_weights(a.weights, control.base.weights):
        return _judge_by_what_repeats(a, b, control)
    return _not_passed(why, len(different))


def _judge_by_what_repeats(a: EquivalenceRun, b: EquivalenceRun, control: Control) -> ExactnessCheck:
    noise, number = (relative_difference(a.weights, other.weights) for other in (control.base, b))
    alerts = ", ".join(control.alerts)
    cause = f" (torch has no deterministic implementation of {alerts})" if alerts else ""
    count = len(different_weights(a.weights, control.base.weights))
    own = (
        f"this model does not repeat itself: {count} of {len(a.weights)} weights of two runs without the recipe differ "
        f"after {a.steps} steps{cause}"
    )
    if not control.same_batches:
        return _not_passed(f"{own}; and with the recipe the batches differ", number)
    why = f"{own}; all {a.steps} batches are identical to the bit"
    if control.data_only:
        return ExactnessCheck(True, number, f"{why}, and the recipe handles data only")
    passed = number <= NOISE_FACTOR * noise
    limit = f"{'no more' if passed else 'more'} than {NOISE_FACTOR:.0f} times the {noise:.1e} between the two runs"
    why += f"; with the recipe the weights differ by {number:.1e}, {limit}"
    return ExactnessCheck(passed, number, why, statistics=True)


def _judge_equivalent_math(
    a: EquivalenceRun, b: EquivalenceRun, again: EquivalenceRun | None, early: tuple[EquivalenceRun, ...] = ()
) -> ExactnessCheck:
    if why := plan_mismatch(a, b):
        return _not_passed(why)
    number = relative_difference(a.weights, b.weights)
    noise = relative_difference(a.weights, again.weights) if again is not None and again.steps == a.steps else 0.0
    if noise >= MAX_DIFFERENCE:
        passed = number <= NOISE_FACTOR * noise
        limit = f"{'no more' if passed else 'more'} than {NOISE_FACTOR:.0f} times as much"
        why = (
            f"this model does not repeat itself: in float64 the weights of two runs without the recipe differ by "
            f"{noise:.1e} after {a.steps} steps; with the recipe they differ by {number:.1e}, {limit}"
        )
        return ExactnessCheck(passed, number, why, statistics=True)
    passed = number < MAX_DIFFERENCE
    relation = ", below" if passed else f"{most_different(a.weights, b.weights)}, not below"
    why = f"in float64 the weights differ by {number:.1e} after {a.steps} steps{relation} {MAX_DIFFERENCE:.0e}"
    judged_early = _judge_early(a, number, *early) if early else None
    return judged_early or ExactnessCheck(passed, number, why)


def _judge_early(
    a: EquivalenceRun,
    number: float,
    first: EquivalenceRun,
    second: EquivalenceRun,
    rounded: EquivalenceRun,
    rounded_early: EquivalenceRun,
) -> ExactnessCheck | None:
    """The check after EARLY_STEPS, passed if rounding explains the ``number`` after all steps; else None.

    Large steps of an untrained network make rounding grow beyond the limit. A recipe that changes nothing at first is
    not judged by its first steps, and neither is a training for which another order of the rows is more than rounding.
    """
    growth, early = relative_difference(a.weights, rounded.weights), relative_difference(first.weights, second.weights)
    is_rounding = relative_difference(first.weights, rounded_early.weights) < MAX_DIFFERENCE <= growth
    if rounded.steps < a.steps or not is_rounding or not early > 0.0 or number > AMPLIFIED_FACTOR * growth:
        return None
    why = (
        f"in float64 the weights differ by {early:.1e} after {first.steps} steps, below {MAX_DIFFERENCE:.0e}; after "
        f"{a.steps} steps by {number:.1e}, but the rounding by another order of the rows grows to {growth:.1e} by then"
    )
    return ExactnessCheck(True, early, why)


def _judge_reduced_precision(
    clean: list[Gradients | None],
    noisy: list[Gradients | None],
    batches: int,
    a: EquivalenceRun,
    b: EquivalenceRun,
    double: bool = True,
) -> ExactnessCheck:
    name, worst = worst_gradient(clean, noisy)
    error = f"{worst:.1f} dB above its error against {'float64' if double else 'float32'}"
    if not worst >= MIN_GRADIENT_DB:
        return _not_passed(f"the gradient of {name} is {error}, below {MIN_GRADIENT_DB:.0f}", worst)
    if why := plan_mismatch(a, b):
        return _not_passed(why)
    movement = decibels(_movement(a), _movement(a).sub(_movement(b)))
    if not movement >= (MIN_MOVEMENT_DB if double else MIN_ROUNDED_MOVEMENT_DB):
        where = "in float64 the" if double else "the"
        why = f"it does more than round: {where} weights move differently ({movement:.1f} dB, {a.steps} steps)"
        return _not_passed(why, movement)
    return ExactnessCheck(True, worst, f"every gradient is at least {error}, over {batches} batches")


def _judge_changes_training(a: EquivalenceRun, b: EquivalenceRun) -> ExactnessCheck:
    if why := validation_mismatch(a, b):
        return _not_passed(why)
    same_names = a.weights.keys() == b.weights.keys()
    number = relative_difference(a.weights, b.weights) if same_names else math.inf
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
    Exactness.EQUIVALENT_MATH: (_equivalent_math, _judge_equivalent_math),
    Exactness.REDUCED_PRECISION: (_gradients_and_movement, _judge_reduced_precision),
    Exactness.CHANGES_TRAINING: (_both_in_double, _judge_changes_training),
}


_CHECKS_IN_FLOAT32: dict[Exactness, Callable[[EquivalenceCase], ExactnessCheck]] = {
    Exactness.EQUIVALENT_MATH: _equivalent_math_in_float32,
    Exactness.REDUCED_PRECISION: _reduced_precision_in_float32,
    Exactness.CHANGES_TRAINING: _changes_training_in_float32,
}


def _movement(run: EquivalenceRun) -> torch.Tensor:
    return flatten(run.weights) - flatten(run.start)
