"""The measurements of a search: whole runs, comparisons of speed, exactness checks. Each is charged and stored.

A Study knows what has been tried and what it cost. It makes no decisions; the modules that call it do.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from hasten.benchmarking.blocks import evaluation_seconds_per_sample
from hasten.benchmarking.compare import TIMEOUT_S, Comparison, run_interleaved
from hasten.benchmarking.fork_server import DeadlineError
from hasten.benchmarking.worker_group import start_workers
from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_method
from hasten.engine.tasks import TaskRef
from hasten.profiling.ops import lowers_precision, measure_operations
from hasten.profiling.step_profile import profile_steps
from hasten.tuning.budget import Budget, OutOfBudgetError
from hasten.tuning.trial_store import TrialStore
from hasten.utils.targets import first_sustained_target

EXACT_CLASSES = (Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH)  # they change the numbers by rounding at most
SHORT_LOOKS = (6, 9, 14)  # pairs of blocks in a comparison of the search; the confirmation has more
SHORT_COMPARISON_SECONDS = 12.0  # of a comparison of the search, where no others are given
CHECK_SECONDS, CHECK_STEPS = 20.0, 3.6  # of an exactness check: steps where they are long, so that each arm does three
ONE_ROUND = (1, 1)  # pairs of processes in a comparison of the search
LONG_BLOCKS_SHARE = 1 / 8  # of the budget, that a comparison of ranks which communicate seldom may take
PROFILE_SECONDS = 3.0
ARM = "hasten.benchmarking.arm:Arm"
BASE_FAILED = "not measured, because the recipe to compare with failed"


@dataclass
class Study:
    """Measures recipes on one task; each trial is stored, and its seconds are charged to the budget."""

    task: TaskRef
    device: str
    store: TrialStore
    budget: Budget
    on_progress: ProgressCallback
    seed: int = 0
    processes: int = 1  # number of ranks that train together
    timeout: float = TIMEOUT_S  # seconds without progress after which a job counts as hanging
    higher_is_better: bool = True
    target: float | None = None  # of the metric; None until the baseline has been run
    horizon: float = 1.0  # fraction of the training that a run trains; 1: the whole
    step_seconds: float = 0.0  # of a step of the task as it is; 0: unknown
    start_step: int = 0  # at which comparisons of recipes that keep the numbers begin: where the training gets slower
    source_hashes: dict[str, str] = field(default_factory=dict)  # of the file of each method from a file
    # (recipe, first step) -> its fewest seconds per 1000 samples so far
    paces: dict[tuple[str, int], float] = field(default_factory=dict)
    charged: set[str] = field(default_factory=set)  # keys of the trials that are paid for
    complete: dict[tuple[str, int, float], dict] = field(default_factory=dict)  # runs by (recipe, seed, horizon)
    trials: list[Any] = field(default_factory=list)  # notes for the report about every trial, losers too

    def run(self, recipe: Recipe, seed: int, time_limit: float | None = None) -> dict:
        """Trains ``recipe`` to the horizon: the keys of ``Trial.run`` and ``_time_to_target``, or ``failed`` (why).

        With a ``time_limit`` (seconds) the run may be pruned, see ``Trial.run``. One that was not counts for every
        later limit.
        """
        key = (str(recipe), seed, self.horizon)
        outcome = self.complete.get(key)
        if outcome is None:
            known = [run["trial_seconds"] for k, run in self.complete.items() if k[::2] == (str(recipe), self.horizon)]
            what, limits = self._description(recipe, seed), self._horizon
            is_limited = time_limit is not None and not self.has_run(recipe, seed)
            if is_limited:
                limits |= {"target": self.target, "time_limit": time_limit}
            outcome = self._charge(
                "run",
                what | ({"time_limit": time_limit} if is_limited else {}),
                f"training {recipe}, seed {seed}",
                lambda on_progress: self._in_worker(recipe, seed, "run", on_progress, **limits),
                failure_lasts=bool(recipe),
                expected=min(known, default=0.0),
            )
            if is_limited and "failed" not in outcome and not outcome["pruned"]:
                self.store.trial("run", self._hashed(what), lambda: outcome)
        if "failed" in outcome:
            return outcome
        if not outcome["pruned"]:
            self.complete[key] = outcome
        return {**outcome, **self._time_to_target(outcome["evaluations"])}  # not stored: the target may be fixed later

    def has_run(self, recipe: Recipe, seed: int) -> bool:
        """Whether a whole run to the horizon is there already, of this search or of an earlier one in its directory."""
        known = "run", self._hashed(self._description(recipe, seed))
        return (str(recipe), seed, self.horizon) in self.complete or known in self.store

    def known_run(self, recipe: Recipe, seed: int) -> dict:
        """A whole run of ``recipe`` to the horizon on any seed: one that is there already, else on ``seed``."""
        known = (at for name, at, horizon in self.complete if (name, horizon) == (str(recipe), self.horizon))
        return self.run(recipe, next(known, seed))

    @property
    def _horizon(self) -> dict[str, Any]:
        return {"horizon": self.horizon} if self.horizon < 1 else {}

    def _description(self, recipe: Recipe, seed: int) -> dict[str, Any]:
        """What a run without a limit is in the store."""
        return {"recipe": recipe.methods, "seed": seed, "time_limit": None, **self._horizon}

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of every measurement of steps: where and how the arms run, and until when."""
        return {"device": self.device, "seed": self.seed, "timeout": self.timeout, "deadline": self.budget.deadline()}

    def refusal(self, recipe: Recipe) -> str:
        """Why a recipe cannot run where the task's loop is, such as in a script; "" if it can."""
        return self.task.refusal(recipe)

    def compare_speed(
        self,
        a: Recipe,
        b: Recipe,
        *,
        looks: Sequence[int] = SHORT_LOOKS,
        seconds: float = SHORT_COMPARISON_SECONDS,
        salt: str = "",
        single_process: bool = False,
        rounds: tuple[int, int] = ONE_ROUND,
    ) -> dict:
        """Which of two recipes trains the same samples faster: ``run_interleaved`` as plain data, or ``failed``.

        A ratio above 1 means that ``b`` is faster; with ``single_process`` it trains in one process. The comparison
        stops after one of the ``looks`` (pairs of blocks) or the budget of ``seconds``; ``rounds`` are the fewest and
        the most fresh pairs of processes. ``slowdown``: by how much ``a`` took longer than before in this search; None
        if unknown. Another ``salt`` makes a new trial of a comparison that is in the store.
        """
        processes = (self.processes, 1 if single_process else self.processes)
        longest = max(seconds, LONG_BLOCKS_SHARE * self.budget.total)
        keeps_steps = self.start_step and not changes_training(a, b)  # else b may be at another step there
        start_step = self.start_step if keeps_steps else 0

        def measure(on_progress: ProgressCallback) -> Any:
            limits = {"budget": seconds, "looks": looks, "rounds": rounds, "longest": longest, "start_step": start_step}
            how = {"processes": processes, "on_progress": on_progress, **self.where}
            comparison = run_interleaved(self.task, a, b, **limits, **how)
            return comparison.to_json() | {"slowdown": None if a or start_step else self._slowdown(comparison)}

        what = {"a": a.methods, "b": b.methods, "looks": list(looks), "salt": salt, "single_process": single_process}
        what |= {"rounds": list(rounds)} if rounds != ONE_ROUND else {}
        what |= {"start_step": start_step} if start_step else {}
        title = f"{b}{' in one process' if single_process else ''} against {a}"
        outcome = self._charge("speed", what, title, measure)
        return outcome if single_process else self._with_slowdown(outcome, a, b, start_step)

    def _with_slowdown(self, outcome: dict, a: Recipe, b: Recipe, start_step: int) -> dict:
        """The outcome of a comparison, with the slowdown of ``a`` if that is None and ``a`` was measured before."""
        paces: dict[str, float] = outcome.get("seconds_per_1000_samples", {})
        known = self.paces.get((str(a), start_step))
        for recipe, name in ((a, "a"), (b, "b")) if paces else ():
            key = str(recipe), start_step
            self.paces[key] = min(paces[name], self.paces.get(key, math.inf))
        if known is None or not paces or outcome.get("slowdown") is not None:
            return outcome
        return {**outcome, "slowdown": paces["a"] / known}

    def _slowdown(self, comparison: Comparison) -> float | None:
        pace = median_high(comparison.a.seconds_per_sample()) * comparison.a.plan["samples_per_step"]
        return pace / self.step_seconds if self.step_seconds else None

    def measure_once(self, kind: str, title: str, measure: Callable[[ProgressCallback], Any]) -> dict:
        """The result of ``measure``, such as the diagnosis, stored under ``kind`` and charged once per search.

        Raises the ConfigurationError or RunError of ``measure``; OutOfBudgetError if the budget ends.
        """
        outcome = self._charge(kind, {}, title, measure, failure_lasts=False)
        if "failed" in outcome:
            raise (ConfigurationError if outcome["refused"] else RunError)(outcome["failed"])
        return outcome

    def check_exactness(self, base: Recipe, candidate: Recipe, exactness: Exactness) -> dict:
        """Checks the promise of an exactness class on this task: ``{"passed", "why"}``, or ``failed``."""
        what = {"base": base.methods, "candidate": candidate.methods, "exactness": exactness.name}
        seconds = max(CHECK_SECONDS, CHECK_STEPS * self.step_seconds)
        arguments = {"base": base.methods, "exactness": exactness.name, "seconds": seconds}

        def measure(on_progress: ProgressCallback) -> dict:
            return self._in_worker(candidate, self.seed, "check_exactness", on_progress, **arguments)

        return self._charge("exactness", what, f"checking the exactness of {candidate}", measure)

    def step_profile(self, recipe: Recipe) -> dict[str, float]:
        """Seconds of each phase per 1000 training samples; empty if they cannot be measured."""

        def measure(on_progress: ProgressCallback) -> dict:
            how = {"processes": self.processes, "budget": PROFILE_SECONDS, **self.where}
            profile = profile_steps(self.task, recipe, on_progress=on_progress, **how)
            seconds = 1000 * (profile.sample + evaluation_seconds_per_sample(profile.plan, profile.evaluation))
            return {"phases": {phase: share * seconds for phase, share in profile.phases.items()}}

        outcome = self._charge("step_profile", {"recipe": recipe.methods}, f"profiling {recipe}", measure)
        return outcome.get("phases", {})

    def memory_plan(self, recipe: Recipe) -> dict:
        """The ``Arm.build`` plan of ``recipe``, with its ``batch_size`` and ``peak_memory``; or ``failed``."""

        def measure(_: ProgressCallback) -> dict:
            limits = self.timeout, self.budget.deadline()
            arguments = {"methods": recipe.methods, "device": self.device, "seed": self.seed}
            with start_workers(self.processes, ARM, *limits, task=self.task, **arguments) as arm:
                return arm.call("build", with_evaluation=False)

        return self._charge("memory_plan", {"recipe": recipe.methods}, f"the memory of {recipe}", measure)

    def operations(self, recipe: Recipe) -> dict | None:
        """The result of ``measure_operations``: operations of a step and their precision; None if it cannot be had.

        None also with several processes, and for a recipe without lower precision.
        """
        if self.processes > 1 or not lowers_precision(recipe):
            return None

        def measure(on_progress: ProgressCallback) -> Any:
            where = {"device": self.device, "seed": self.seed, "deadline": self.budget.deadline()}
            return measure_operations(self.task, recipe, on_progress=on_progress, **where)

        outcome = self._charge("operations", {"recipe": recipe.methods}, f"the operations of {recipe}", measure)
        return None if "failed" in outcome else outcome

    def note(self, what: str, stage: str, verdict: str, why: str, *, ratio: Any = None, seconds: float = 0.0) -> None:
        trial = {"what": what, "stage": stage, "verdict": verdict, "why": why, "ratio": ratio}
        trial["seconds"] = round(seconds, 2)
        if trial not in self.trials:  # the same may come from the store again
            self.trials.append(trial)

    def _time_to_target(self, evaluations: list[dict]) -> dict:
        """``seconds_to_target`` and ``samples_to_target`` (reached and held), ``first_samples`` (reached); or None."""
        target, known = self.target, [row for row in evaluations if row["metric"] is not None]
        index = first_sustained_target([row["metric"] for row in evaluations], target, self.higher_is_better)
        held = evaluations[index] if index is not None else {}
        sign = 1 if self.higher_is_better else -1
        reached = (row["samples"] for row in known if target is not None and sign * row["metric"] >= sign * target)
        return {
            "seconds_to_target": held.get("seconds"),
            "samples_to_target": held.get("samples"),
            "first_samples": next(reached, None),
        }

    def _in_worker(
        self, recipe: Recipe, seed: int, method: str, on_progress: ProgressCallback, **arguments: Any
    ) -> dict:
        trial = {"task": self.task, "methods": recipe.methods, "device": self.device, "seed": seed}
        timeout = self.timeout if self.processes > 1 else max(TIMEOUT_S, self.budget.total)  # one process cannot hang
        deadline = self.budget.deadline()
        with start_workers(self.processes, "hasten.tuning.trial:Trial", None, deadline, **trial) as worker:
            return worker.call(method, on_progress=on_progress, timeout=timeout, **arguments)

    def _hashed(self, what: dict[str, Any]) -> dict[str, Any]:
        """A trial's description, with the hashes of the files whose methods it names."""
        hashes = {name: code for name, code in self.source_hashes.items() if json.dumps(name)[1:-1] in json.dumps(what)}
        return {**what, "source_hashes": hashes} if hashes else what

    def _charge(
        self,
        kind: str,
        what: dict,
        title: str,
        measure: Callable[[ProgressCallback], Any],
        failure_lasts: bool = True,
        expected: float = 0.0,
    ) -> dict:
        """A trial's outcome, stored or measured now; OutOfBudgetError if the budget ends before or in the middle of it.

        Adds ``trial_seconds`` to what ``measure`` returns; if that raises a RunError or ConfigurationError, the outcome
        has ``failed`` (the message) and ``refused`` (whether the latter) instead. ``expected``: seconds that the trial
        will take; it is not begun if it would reach the deadline.
        """
        what = self._hashed(what)
        is_stored = (kind, what) in self.store
        if not is_stored:
            self.budget.check(expected)

        def show_progress(_: str, done: float, left: float | None = None) -> None:
            spent, total = self.budget.spent, self.budget.total  # infinite until the first steps are timed
            self.on_progress(title, min(1.0, spent / total), None if math.isinf(total) else max(0.0, total - spent))

        def timed() -> dict:
            show_progress("", 0.0)
            began = time.monotonic()
            try:
                outcome = measure(show_progress)
            except DeadlineError:
                raise OutOfBudgetError from None
            except (RunError, ConfigurationError) as error:  # out of memory, a NaN, no effect: a result, not a crash
                outcome = {"failed": str(error), "refused": isinstance(error, ConfigurationError)}
                if getattr(error, "arm", None) == 0:  # the best recipe so far: the candidate is not to blame
                    outcome["failed"] = f"{BASE_FAILED}: {error}"
            return {**outcome, "trial_seconds": time.monotonic() - began}

        key, outcome = self.store.trial(kind, what, timed, failure_lasts)
        if key not in self.charged:
            self.charged.add(key)
            self.budget.charged += outcome["trial_seconds"] if is_stored else 0.0
        return outcome


def is_in(name: str, what: str) -> bool:
    """Whether the recipe ``what``, as the text of a trial, contains the method ``name``."""
    return any(member == name or member.startswith(f"{name}:") for member in what.split(" + "))


def exactness_of(name: str) -> Exactness:
    """The exactness class on the card of the method called ``name``."""
    return make_method(name).card.exactness


def changes_training(*recipes: Recipe) -> bool:
    """Whether any method of the recipes changes the training."""
    return any(exactness_of(name) is Exactness.CHANGES_TRAINING for recipe in recipes for name in recipe.methods)
