"""The instruments of a search: whole runs, paces and proofs of one task, each paid for and written down.

A Study knows what has been tried and what it cost. It decides nothing; ``search`` and ``confirm`` do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hasten.benchmarking.compare import TIMEOUT_S, evaluation_seconds_per_sample, run_interleaved
from hasten.benchmarking.worker_group import start_workers
from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_method
from hasten.engine.summary import first_sustained_target
from hasten.engine.tasks import TaskRef
from hasten.profiling.step_profile import profile_steps
from hasten.tuning.trial_store import TrialStore

SHORT_LOOKS = (6, 9, 14)  # pairs; the search screens, the confirmation measures
PROOF_SECONDS = 20.0
SHARE_OF_LONG_BLOCKS = 1 / 8  # of the budget, for a comparison of processes that talk seldom
ANATOMY_SECONDS = 3.0


class OutOfBudget(Exception):
    """The search has to end; what is proven by now is the answer."""


@dataclass
class Budget:
    """Seconds a search may take. Remembered trials count what they took when they were measured."""

    total: float
    spent: float = 0.0
    reserved: float = 0.0  # kept back for the confirmation
    cut: bool = False  # a part ended before all was done that it was for

    def left(self) -> float:
        return self.total - self.spent - self.reserved

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Inside, only a share of what is left may be spent; reaching its end ends the part, not the search."""
        kept = (1 - share) * max(0.0, self.left())
        self.reserved += kept
        try:
            yield
        except OutOfBudget:
            self.cut = True
        finally:
            self.reserved -= kept

    def ask(self) -> None:
        """Before each trial: one that has begun is finished, none is begun when nothing is left."""
        if self.left() <= 0:
            raise OutOfBudget


@dataclass
class Study:
    """One task under examination."""

    task: TaskRef
    device: str
    ledger: TrialStore
    budget: Budget
    watch: ProgressCallback
    seed: int = 0
    processes: int = 1  # that train together
    timeout: float = TIMEOUT_S  # seconds of silence after which a job counts as hanging
    higher_is_better: bool = True
    target: float | None = None
    source_hashes: dict[str, str] = field(default_factory=dict)  # outside methods and the fingerprint of their files
    charged: set[str] = field(default_factory=set)  # keys of the trials that are paid for
    whole: dict[tuple[str, int], dict] = field(
        default_factory=dict
    )  # runs that came to their end, whoever would have given them up
    trials: list[dict] = field(default_factory=list)  # for the report: every trial, losers too

    def run(self, recipe: Recipe, seed: int, give_up_after: float | None = None) -> dict:
        """A whole run: evaluations, metric, and when the target was reached; ``failed`` says why there is none."""
        if (outcome := self.whole.get((str(recipe), seed))) is None:
            what = {"recipe": recipe.methods, "seed": seed, "give_up_after": give_up_after}
            limits = {"target": self.target, "give_up_after": give_up_after} if give_up_after is not None else {}
            outcome = self._paid(
                "run",
                what,
                f"training {recipe}, seed {seed}",
                lambda watch: self._in_worker(recipe, seed, "run", watch, **limits),
                failure_lasts=bool(recipe),
            )
        if "failed" in outcome:
            return outcome
        if not outcome["gave_up"]:
            self.whole[str(recipe), seed] = outcome
        return {**outcome, **self._reached(outcome["evaluations"])}  # anew: the target may have been fixed since

    def _reached(self, evaluations: list[dict]) -> dict:
        at = first_sustained_target([look["metric"] for look in evaluations], self.target, self.higher_is_better)
        look = evaluations[at] if at is not None else {}
        crossed = [e["samples"] for e in evaluations if self._there(e["metric"])]
        first = crossed[0] if crossed else None
        return {
            "seconds_to_target": look.get("seconds"),
            "samples_to_target": look.get("samples"),
            "first_samples": first,
        }

    def _there(self, metric: float | None) -> bool:
        if metric is None or self.target is None:
            return False
        return metric >= self.target if self.higher_is_better else metric <= self.target

    def compare_speed(
        self, a: Recipe, b: Recipe, *, looks=SHORT_LOOKS, seconds: float = 12.0, salt: str = "", alone: bool = False
    ) -> dict:
        """Which of two recipes trains the same samples faster: ``measure.compare`` as a dict, or ``failed``. ``alone``: the second, in one process."""
        among = (self.processes, 1 if alone else self.processes)

        def measure(watch: ProgressCallback) -> dict:
            where = {"device": self.device, "processes": among, "seed": self.seed, "timeout": self.timeout}
            longest = max(seconds, SHARE_OF_LONG_BLOCKS * self.budget.total)
            return run_interleaved(
                self.task, a, b, budget=seconds, looks=looks, longest=longest, watch=watch, **where
            ).to_json()

        what = {"a": a.methods, "b": b.methods, "looks": list(looks), "salt": salt} | ({"alone": True} if alone else {})
        return self._paid("pace", what, f"{b}{' in one process' if alone else ''} against {a}", measure)

    def measure_once(self, kind: str, words: str, measure: Callable[[ProgressCallback], dict]) -> dict:
        """Anything else that is measured once a search: the probe, the diagnosis."""
        outcome = self._paid(kind, {}, words, measure, failure_lasts=False)
        if "failed" in outcome:
            raise (ConfigurationError if outcome["refused"] else RunError)(outcome["failed"])
        return outcome

    def proof(self, base: Recipe, candidate: Recipe, exactness: Exactness) -> dict:
        """{"passed", "why"}: does the candidate keep the promise of its exactness class on this very task?"""
        what = {"base": base.methods, "candidate": candidate.methods, "exactness": exactness.name}

        def measure(watch: ProgressCallback) -> dict:
            return self._in_worker(
                candidate, self.seed, "prove", watch, base=base.methods, exactness=exactness.name, seconds=PROOF_SECONDS
            )

        return self._paid("proof", what, f"proving {candidate}", measure)

    def anatomy(self, recipe: Recipe) -> dict[str, float]:
        """Seconds of each phase per 1000 training samples; empty where they cannot be told."""

        def measure(watch: ProgressCallback) -> dict:
            where = {"device": self.device, "processes": self.processes, "timeout": self.timeout, "seed": self.seed}
            seen = profile_steps(self.task, recipe, budget=ANATOMY_SECONDS, watch=watch, **where)
            seconds = 1000 * (seen.sample + evaluation_seconds_per_sample(seen.plan, seen.evaluation))
            return {"phases": {phase: share * seconds for phase, share in seen.phases.items()}}

        return self._paid("anatomy", {"recipe": recipe.methods}, f"the anatomy of {recipe}", measure).get("phases", {})

    def note(
        self, what: str, stage: str, verdict: str, why: str, *, ratio: dict | None = None, seconds: float = 0.0
    ) -> None:
        """Puts a trial into the story that the report tells."""
        self.trials.append(
            {"what": what, "stage": stage, "verdict": verdict, "why": why, "ratio": ratio, "seconds": round(seconds, 2)}
        )

    def _in_worker(self, recipe: Recipe, seed: int, method: str, watch: ProgressCallback, **arguments) -> dict:
        about = {"task": self.task.to_json(), "methods": recipe.methods, "device": self.device, "seed": seed}
        timeout = (
            self.timeout if self.processes > 1 else max(TIMEOUT_S, self.budget.total)
        )  # one process waits for nobody
        with start_workers(self.processes, "hasten.tuning.trial:Trial", **about) as worker:
            return worker.call(method, watch=watch, timeout=timeout, **arguments)

    def _paid(
        self, kind: str, what: dict, words: str, measure: Callable[[ProgressCallback], dict], failure_lasts: bool = True
    ) -> dict:
        codes = {name: code for name, code in self.source_hashes.items() if json.dumps(name)[1:-1] in json.dumps(what)}
        what = {**what, "codes": codes} if codes else what  # another code is another trial
        if not self.ledger.knows(kind, what):
            self.budget.ask()

        def told(_: str, done: float, left: float | None = None) -> None:
            share = min(1.0, self.budget.spent / self.budget.total)
            self.watch(words, share, max(0.0, self.budget.total - self.budget.spent))

        def timed() -> dict:
            told("", 0.0)
            began = time.monotonic()
            try:
                outcome = measure(told)
            except (
                RunError,
                ConfigurationError,
            ) as error:  # out of memory, a NaN, nothing to act on: a result, not a crash
                outcome = {"failed": str(error), "refused": isinstance(error, ConfigurationError)}
            return {**outcome, "trial_seconds": time.monotonic() - began}

        key, outcome = self.ledger.trial(kind, what, timed, failure_lasts)
        if key not in self.charged:  # a trial is paid for once, however often it is asked for
            self.charged.add(key)
            self.budget.spent += outcome["trial_seconds"]
        return outcome


def exactness_of(name: str) -> Exactness:
    return make_method(name).card.exactness
