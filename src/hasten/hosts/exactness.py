"""Exactness of methods in a script, from its own first steps: the same weights after 30 of them.

A script is reproducible if two runs of it end with the same bits. Then

=================  ====================================================================================================
BIT_EXACT          All weights after 30 steps: the same bits.
EQUIVALENT_MATH    The same run in float64, as for a task: models in float64, floating inputs converted at their calls,
                   no dropout; relative difference of the weights below 1e-10. A script that cannot run in float64 is
                   judged in float32, by the distance that one rounding of all weights grows to in as many steps.
REDUCED_PRECISION  Every gradient of the first step at least 20 dB above its error against float64 (float32 if that
                   is impossible), and in float64 the weights are those without the method.
CHANGES_TRAINING   The weights must differ.
=================  ====================================================================================================

A script that is not reproducible proves nothing by bits. Its methods are judged by the distance between two of its own
runs, and the result says that this is statistics.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hasten.benchmarking.equivalence_runs import STEPS, RunConditions
from hasten.benchmarking.exactness import AMPLIFIED_FACTOR, MAX_DIFFERENCE, MIN_GRADIENT_DB
from hasten.benchmarking.fork_server import DeadlineError
from hasten.benchmarking.repeatability import ALERT
from hasten.benchmarking.weight_differences import (
    different_weights,
    most_different,
    relative_difference,
    worst_gradient,
)
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError, MemoryExhaustedError, RunError
from hasten.core.method import Method
from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.core.types import ContextFactory
from hasten.engine.effects import NO_EFFECT
from hasten.engine.memory import held_bytes
from hasten.engine.resources import available_cpus
from hasten.hosts.process import OUTPUT_BYTES, ScriptProcess
from hasten.hosts.site_map import changed_numbers, device_of, known_sites

if TYPE_CHECKING:
    from hasten.hosts.arm import ScriptWorker

GRADIENT_STEPS = 5
CHECK_RUNS = 3  # of a first check: two of the script as it is and one of the recipe, or both recipes in float64
LATER_RUNS = 2  # of a later one: one of each recipe
TOGETHER = min(CHECK_RUNS, available_cpus())  # runs that start at the same time
GAIN_OF_ANOTHER = 0.6  # starts that one more process at the same time is worth: they share memory, disk and processors
MAX_DOUBLE_S = 60.0  # for the steps of one run in float64, which GPUs for graphics compute 64 times slower than float32
CLOCK_S = 1.1  # between two starts that shall not be in the same second
MEMORY_SHARE = 0.5  # of what is available, that these may take
ROUNDING_FACTOR = 10.0  # times the distance that one rounding of all weights grows to: still the same formula
NOISE_FACTOR = 3.0  # times the distance between two runs of a script that is not reproducible
CONDITIONS = f"{RunConditions.__module__}:{RunConditions.__name__}"  # disables dropout, which float64 draws differently
DOUBLE, SINGLE = {CONDITIONS: {"double": True}}, {CONDITIONS: {"double": False}}

Weights = dict[str, torch.Tensor]
_Key = tuple[str, str, int, int]  # of a run: the script, recipe and steps, the seed, whether it is the second one
_Wanted = tuple[dict[str, Any], int, int]  # methods, steps, whether it is the second one


@dataclass(frozen=True)
class Rounded(Method):
    """Moves every weight up to the next number of its dtype: the smallest change, whose growth is that of rounding."""

    card = Card(
        summary="every weight one rounding larger",
        exactness=Exactness.CHANGES_TRAINING,
        order=WrapOrder.FIRST,
        after=(RunConditions.name,),  # which may make them float64
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, math.inf)))
        return model


@dataclass(frozen=True)
class Deterministic(Method):
    """Asks for deterministic algorithms, without which few trainings on a GPU repeat their bits.

    Torch warns of each operation that has none.
    """

    card = Card(summary="deterministic algorithms", exactness=Exactness.CHANGES_TRAINING, order=WrapOrder.FIRST)

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts, which is later

        @contextmanager
        def deterministic() -> Generator[None]:
            torch.use_deterministic_algorithms(True, warn_only=True)  # the process ends with the check
            for pattern in (ALERT.pattern, "defaults to a non-deterministic"):
                warnings.filterwarnings("default", f".*{pattern}")  # no error, even where the script raises on warnings
            with context():
                run.checkpoint_state[self.name] = torch.backends.cudnn.benchmark  # as the methods want it
                yield

        return deterministic

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        """Restores ``cudnn.benchmark`` as the methods want it: with it on, runs would choose different algorithms."""
        torch.backends.cudnn.benchmark = run.checkpoint_state[self.name]
        return model


ROUNDED = {f"{Rounded.__module__}:{Rounded.__name__}": {}}
DETERMINISTIC = {f"{Deterministic.__module__}:{Deterministic.__name__}": {}}


@dataclass(frozen=True)
class ScriptRun:
    """The first ``steps`` steps of a script. ``weights`` are those after the last one, ``gradients`` those of the first
    one, by name on the CPU. ``arguments``: parsed, by name. ``seeds``: ``site``, ``type`` and ``seed`` of calls that
    set one. ``alerts``: operations that torch warns of as not deterministic.
    """

    steps: int
    arguments: dict[str, Any]
    seeds: list[dict[str, Any]]
    alerts: list[str]
    weights: Weights
    gradients: Weights


def check_exactness(trial: ScriptWorker, base: dict[str, Any], exactness: str) -> dict[str, Any]:
    """Compares the first steps of a script under two recipes, as the exactness class requires.

    Args:
        trial: The script, and the methods of the recipe to check; its device, seed and deadline.
        base: Methods of the recipe to compare with: options by name of the method.
        exactness: Name of the exactness class, such as "BIT_EXACT".

    Returns:
        ``passed``, ``number`` and ``why`` as ``ExactnessCheck`` has them, and ``statistics``: True if the script is not
        reproducible, so that nothing is proven.
    """
    runs, candidate = _Runs(trial), trial.methods
    runs.forget_other_bases(base)
    runs.expect(_first_runs(runs, base, candidate, exactness))
    try:
        if exactness == Exactness.EQUIVALENT_MATH.name:
            # in float64 the last bits, which may not repeat, are far below the limit
            both = runs.in_double(base, candidate, STEPS)
            in_double = _judge_in_double(*both) if both else None
            if in_double and in_double["passed"]:
                return in_double
            if in_double and runs.is_reproducible():
                return _judge_early(runs, base, candidate, in_double)
        if exactness in (Exactness.BIT_EXACT.name, Exactness.EQUIVALENT_MATH.name) and not runs.is_reproducible():
            return _judge_by_noise(runs, base, candidate)
        return _CHECKS[exactness](runs, base, candidate)
    except (DeadlineError, MemoryExhaustedError):  # a later check may succeed
        raise
    except (RunError, ConfigurationError) as error:
        return _result(False, math.nan, str(error))
    finally:
        runs.close()


def seconds_of_check(start: float, step: float, runs: int, sites: dict[str, Any] | None) -> float:
    """Estimated seconds of a check with ``runs`` runs of STEPS steps each.

    ``start`` and ``step``: seconds of a start and of a step; ``sites``: the site map, see ``runs_at_once``.
    """
    starts = runs / (1 + GAIN_OF_ANOTHER * (min(runs_at_once(sites), runs) - 1))
    return starts * start + runs * STEPS * step


def runs_at_once(sites: dict[str, Any] | None) -> int:
    """How many runs of a script the processors and the memory of host and device allow, by its first step."""
    peaks = [peak for name in ("memory", "host_memory") if (peak := (sites or {}).get(name))]
    places = [int(MEMORY_SHARE * peak["available"] / max(1, held_bytes(peak))) for peak in peaks]
    return max(1, min([TOGETHER, *places]))


class _TooSlowError(RunError):
    """A run in float64 would take longer than MAX_DOUBLE_S; the script is then judged in float32."""


class _Runs:
    """Runs a script for its first steps; the runs that several checks need are made once.

    Most of the time goes into the start of the script, its imports and its data. So the runs that are expected start
    together, as far as processors and memory suffice, and then train one after the other.
    """

    made: dict[_Key, ScriptRun] = {}  # of recipes that were a base
    double_fails: dict[str, str] = {}  # script -> why it cannot run in float64

    def __init__(self, trial: ScriptWorker):
        self.script, self.device, self.seed, self.deadline = trial.script, trial.device, trial.seed, trial.deadline
        self.key = self.script.fingerprint()
        self.tested_in_double: dict[str, Any] | None = None  # methods of the run that shows whether float64 is possible
        self.expected = dict[_Key, tuple[dict[str, Any], int]]()  # methods, steps
        self.begun = dict[_Key, ScriptProcess]()

    def forget_other_bases(self, base: dict[str, Any]) -> None:
        """Frees the weights of runs that no later check needs: those of earlier recipes to compare with."""
        needed = {str(Recipe({**one, **how})) for one in ({}, base) for how in ({}, DOUBLE, SINGLE, ROUNDED)}
        for key in [key for key in self.made if key[1].rpartition(" for ")[0] not in needed]:
            del self.made[key]

    def expect(self, wanted: list[_Wanted]) -> None:
        """Takes the runs that will be asked for, in this order: methods, steps, and whether it is the second one."""
        keys = {self._key(*run): run[:2] for run in wanted}
        self.expected = {key: run for key, run in keys.items() if key not in self.made}

    def run(self, methods: dict[str, Any], steps: int = STEPS, again: int = 0, keep: bool = False) -> ScriptRun:
        key = self._key(methods, steps, again)
        if key not in self.made:
            made = self._run(key, methods, steps)
            if not keep:
                return made
            self.made[key] = made
        return self.made[key]

    def on_cpu(self) -> bool:
        """Whether the script trains on the CPU."""
        return device_of(self.device, known_sites(self.script)) == "cpu"

    def close(self) -> None:
        """Ends the runs that have begun and were not asked for."""
        while self.begun:
            self.begun.popitem()[1].close()

    def _key(self, methods: dict[str, Any], steps: int = STEPS, again: int = 0) -> _Key:
        return self.key, f"{Recipe(methods)} for {steps}", self.seed, again

    def is_reproducible(self) -> bool:
        """Whether two runs of the script as it is end with the same bits."""
        return not different_weights(self.run({}, keep=True).weights, self.run({}, again=1, keep=True).weights)

    def in_double(
        self, base: dict[str, Any], candidate: dict[str, Any], steps: int
    ) -> tuple[ScriptRun, ScriptRun] | None:
        """The runs of both recipes in float64; None if the script cannot run in it, which is remembered."""
        if self.key in self.double_fails:
            return None
        self.tested_in_double = {**base, **DOUBLE}
        try:
            first = self.run(self.tested_in_double, steps, keep=True)
        except DeadlineError:
            raise
        except (RunError, ConfigurationError) as error:
            self.double_fails[self.key] = str(error)
            return None
        return first, self.run({**candidate, **DOUBLE}, steps)

    def _run(self, key: _Key, methods: dict[str, Any], steps: int) -> ScriptRun:
        process = self.begun.pop(key, None)
        is_only_run = process is None
        self.expected.pop(key, None)
        with process or self._start(methods, steps) as process:
            self._start_expected()
            try:
                return self._train(process, methods, steps)
            except (DeadlineError, _TooSlowError):
                raise
            except (RunError, ConfigurationError) as error:
                if (is_only_run and not self.begun) or NO_EFFECT in str(error):
                    raise
        self.close()  # it may have lacked memory, or something else that only one process can have
        with self._start(methods, steps) as process:
            return self._train(process, methods, steps)

    def _start_expected(self) -> None:
        """Starts expected runs beside the one that trains now. One that fails to start is started when it is needed."""
        places = runs_at_once(known_sites(self.script))
        while self.expected and 1 + len(self.begun) < places:
            key = next(iter(self.expected))
            methods, steps = self.expected.pop(key)
            if key[-1]:  # the second run of a recipe: a script that is seeded by the clock shows it in another second
                time.sleep(max(0.0, self.last_start + CLOCK_S - time.monotonic()))
            with suppress(RunError, ConfigurationError):
                self.begun[key] = self._start(methods, steps)

    def _start(self, methods: dict[str, Any], steps: int) -> ScriptProcess:
        sites, conditions = known_sites(self.script), {} if self.on_cpu() else DETERMINISTIC
        self.last_start = time.monotonic()
        how = (self.device, self.seed, sites, self.deadline, steps)
        return ScriptProcess(self.script, {**methods, **conditions}, *how)

    def _train(self, process: ScriptProcess, methods: dict[str, Any], steps: int) -> ScriptRun:
        limits = (None, self.deadline)
        answer = process.wait_until_trained(*limits)
        described = process.ask("describe", *limits)
        nothing = [(name, why) for name, why in described["no_effect"] if name not in DETERMINISTIC]
        if nothing and CONDITIONS not in methods:
            raise RunError("; ".join(f"{method} {NO_EFFECT}: {why}" for method, why in nothing))
        directory = process.directory  # which both processes see
        with_gradients = steps == GRADIENT_STEPS
        if with_gradients:
            process.ask("save", *limits, path=f"{directory}/gradients", gradients=True)
        if answer["steps"] < steps and not answer.get("ended"):
            answer = process.ask("train", *limits, count=1)
            seconds = answer["seconds"] * (steps - answer["steps"])
            if methods == self.tested_in_double and seconds > MAX_DOUBLE_S and not self.on_cpu():
                raise _TooSlowError(f"the other steps in float64 would take {seconds:.0f} s")
        if answer["steps"] < steps and not answer.get("ended"):
            process.ask("train", *limits, count=steps - answer["steps"])
        steps = process.ask("save", *limits, path=f"{directory}/weights")["steps"]
        alerts = list(dict.fromkeys(ALERT.findall(process.output(OUTPUT_BYTES))))
        weights = torch.load(directory / "weights", weights_only=True)
        gradients = torch.load(directory / "gradients", weights_only=True) if with_gradients else {}
        if not weights:
            raise RunError(f"{self.script.name} left no weights to compare after {steps} steps")
        if bad := [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]:
            raise RunError(f"{bad[0]} is not finite after {steps} steps of {Recipe(methods)}")
        seeds = described["sites"]["seeds"]
        return ScriptRun(steps, described["arguments"], seeds, alerts, weights, gradients)


def _result(passed: bool, number: float, why: str, *, statistics: bool = False) -> dict[str, Any]:
    finite = number if math.isfinite(number) else None
    return {"passed": passed, "number": finite, "why": why, "statistics": statistics}


def _judge_bit_exact(runs: _Runs, base: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    a, b = runs.run(base, keep=True), runs.run(candidate)
    different = different_weights(a.weights, b.weights)
    if a.steps == b.steps and not different:
        why = f"all {len(a.weights)} weights are identical to the bit after {a.steps} steps, as the script's own are"
        return _result(True, 0, why)
    return _result(False, len(different), f"{len(different)} of {len(a.weights)} weights differ after {b.steps} steps")


def _judge_equivalent(runs: _Runs, base: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    """In float32, where float64 is impossible."""
    a, b, rounded = runs.run(base, keep=True), runs.run(candidate), runs.run({**base, **ROUNDED}, keep=True)
    number, allowed = _difference(a.weights, b.weights), _difference(a.weights, rounded.weights)
    passed = number <= ROUNDING_FACTOR * allowed
    why = (
        f"in float32, since this script fails in float64 or takes too long there, the weights differ by {number:.1e} "
        f"after {b.steps} steps; one rounding of every weight at the start grows to {allowed:.1e}"
    )
    return _result(passed, number, why if passed else f"{why}: it does more than round")


def _judge_in_double(base: ScriptRun, candidate: ScriptRun) -> dict[str, Any]:
    number = _difference(base.weights, candidate.weights)
    why = f"in float64 the weights differ by {number:.1e} after {candidate.steps} steps"
    if number < MAX_DIFFERENCE:
        return _result(True, number, f"{why}, below {MAX_DIFFERENCE:.0e}")
    where = most_different(base.weights, candidate.weights)
    return _result(False, number, f"{why}{where}, not below {MAX_DIFFERENCE:.0e}")


def _judge_early(runs: _Runs, base: dict[str, Any], candidate: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """After a few steps in float64, if rounding explains the difference after all of them; else ``whole``.

    Large steps of an untrained network make one rounding grow beyond the limit. A recipe that changes nothing at first
    is not judged by its first steps.
    """
    both = runs.in_double(base, candidate, GRADIENT_STEPS)
    early = _judge_in_double(*both) if both else whole
    if not early["passed"] or not early["number"]:
        return whole
    rounded = runs.run({**base, **DOUBLE, **ROUNDED})
    growth = _difference(runs.run({**base, **DOUBLE}, keep=True).weights, rounded.weights)
    if not (growth >= MAX_DIFFERENCE and whole["number"] <= AMPLIFIED_FACTOR * growth):
        return whole
    amplified = f"after {rounded.steps} steps by {whole['number']:.1e}, but one rounding grows to {growth:.1e} by then"
    return early | {"why": f"{early['why']}; {amplified}"}


def _judge_precision(runs: _Runs, base: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    both = runs.in_double(base, candidate, GRADIENT_STEPS)
    clean = both[0] if both else runs.run({**base, **SINGLE}, GRADIENT_STEPS, keep=True)
    noisy = runs.run({**candidate, **SINGLE}, GRADIENT_STEPS)
    against = "float64" if both else "float32"
    name, worst = worst_gradient([clean.gradients], [noisy.gradients])
    if not worst >= MIN_GRADIENT_DB:
        why = f"the gradient of {name} is {worst:.1f} dB above its error against {against}, below {MIN_GRADIENT_DB:.0f}"
        return _result(False, worst, why)
    if both is not None and (movement := _difference(both[0].weights, both[1].weights)) >= MAX_DIFFERENCE:
        why = f"it does more than round: in float64 the weights differ by {movement:.1e} after {both[1].steps} steps"
        return _result(False, movement, why)
    why = f"every gradient of the first step is at least {worst:.1f} dB above its error against {against}"
    return _result(True, worst, why)


def _judge_changes(runs: _Runs, base: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    a, b = runs.run(base, keep=True), runs.run(candidate)
    number = _difference(a.weights, b.weights)
    why = f"the weights differ by {number:.1e} after {STEPS} steps"
    if changed := changed_numbers(a.arguments, b.arguments):  # such as its length, which the first steps do not show
        changes = ", ".join(f"{name} {value}" for name, value in changed.items())
        return _result(True, number, f"the script trains with {changes}; {why}")
    return _result(number > 0, number, why if number > 0 else f"it has no effect: {why}")


def _judge_by_noise(runs: _Runs, base: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    """Passes if both recipes differ by at most NOISE_FACTOR times the distance between two runs of the script."""
    first, second = runs.run({}, keep=True), runs.run({}, again=1, keep=True)
    noise = _difference(first.weights, second.weights)
    number = _difference(runs.run(base, keep=True).weights, runs.run(candidate).weights)
    passed = number <= NOISE_FACTOR * noise
    cause = _seed_that_differs(first, second) or _alerts(runs, first)
    why = (
        f"this script is not reproducible{cause}: two runs of it differ by {noise:.1e} after "
        f"{first.steps} steps, so that equal bits cannot be shown; with the recipe they differ by {number:.1e}"
    )
    return _result(passed, number, why, statistics=True)


def _alerts(runs: _Runs, first: ScriptRun) -> str:
    """A remark that names the operations for which torch has no deterministic implementation; "" if none is known."""
    alerts = first.alerts  # on a GPU every run asks for deterministic algorithms
    if runs.on_cpu():
        try:
            alerts = runs.run(DETERMINISTIC, GRADIENT_STEPS, keep=True).alerts
        except DeadlineError:
            raise
        except (RunError, ConfigurationError):
            return ""
    return f" (torch has no deterministic implementation of {', '.join(alerts)})" if alerts else ""


def _seed_that_differs(first: ScriptRun, second: ScriptRun) -> str:
    """A remark on the script's own call that sets no seed, or another one in each run; "" if there is none.

    Hasten sets all other seeds.
    """
    before = {(entry["site"], entry["type"]): entry["seed"] for entry in first.seeds}
    for entry in second.seeds:
        key = entry["site"], entry["type"]
        site = entry["site"].partition("#")[0]
        if os.path.isabs(site):  # a library
            continue
        if entry["seed"] is None:
            return f" ({site} calls {entry['type']} without a seed)"
        if before.get(key, entry["seed"]) != entry["seed"]:
            return f" ({site} calls {entry['type']} with another seed in each run)"
    return ""


def _first_runs(runs: _Runs, base: dict[str, Any], candidate: dict[str, Any], exactness: str) -> list[_Wanted]:
    """The runs that a check of the class starts with, as ``_Runs.expect`` takes them."""
    both, own = (base, candidate), [({}, STEPS, 0), ({}, STEPS, 1)]
    can_double = runs.key not in runs.double_fails
    if exactness == Exactness.REDUCED_PRECISION.name:
        in_double = [({**methods, **DOUBLE}, GRADIENT_STEPS, 0) for methods in both]
        clean = in_double if can_double else [({**base, **SINGLE}, GRADIENT_STEPS, 0)]
        return [*clean, ({**candidate, **SINGLE}, GRADIENT_STEPS, 0)]
    if exactness == Exactness.EQUIVALENT_MATH.name and can_double:
        return [({**methods, **DOUBLE}, STEPS, 0) for methods in both]
    plain = [(methods, STEPS, 0) for methods in both]
    if exactness == Exactness.CHANGES_TRAINING.name:
        return plain
    rounded = [({**base, **ROUNDED}, STEPS, 0)] if exactness == Exactness.EQUIVALENT_MATH.name else []
    return [*own, *plain, *rounded]


_CHECKS = {
    Exactness.BIT_EXACT.name: _judge_bit_exact,
    Exactness.EQUIVALENT_MATH.name: _judge_equivalent,
    Exactness.REDUCED_PRECISION.name: _judge_precision,
    Exactness.CHANGES_TRAINING.name: _judge_changes,
}


def _difference(a: Weights, b: Weights) -> float:
    """Relative difference of all weights together; infinite if they are not the same ones."""
    return relative_difference(a, b) if a.keys() == b.keys() else math.inf
