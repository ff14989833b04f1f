"""A study with planted measurements, and helpers for tests of the search."""

import random
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from hasten.benchmarking.ratio import Ratio, verdict_of
from hasten.core.recipe import Recipe
from hasten.engine.effects import NO_EFFECT
from hasten.engine.tasks import TaskRef
from hasten.tuning.budget import Budget
from hasten.tuning.study import Study
from hasten.tuning.systems import Candidate, Incumbents, candidate, search_systems
from hasten.tuning.training import Baseline, Outcome, first_outcome, search_training

TARGET, SAMPLES, METRIC, MARGIN = 0.9, 10_000, 0.95, 0.01
TRIAL = 2.0  # seconds that every trial takes
THREADS = replace(candidate("num_threads"), presets=tuple({"count": count} for count in range(1, 9)))
CLIPPING = replace(candidate("gradient_clipping"), presets=tuple({"max_norm": float(norm)} for norm in range(1, 9)))


def frozen(total: float) -> Budget:
    """A budget whose time passes by trials only."""
    return Budget(total, clock=lambda: 0.0)


def threads(count: int) -> str:
    return f"num_threads:count={count}"


def clipping(norm: int) -> str:
    return f"gradient_clipping:max_norm={norm}.0"


@dataclass
class Planted:
    """Stands in for a Study. Each member of a recipe has its effects; every trial is charged once to a real Budget."""

    faster: dict[str, float] = field(default_factory=dict)  # factor of the time per step
    samples: dict[str, float] = field(default_factory=dict)  # factor of the samples to the target
    # factor by which a run's total time is shorter without a cause
    luck: dict[str, float] = field(default_factory=dict)
    better: dict[str, float] = field(default_factory=dict)  # change of the final metric
    start: dict[str, float] = field(default_factory=dict)  # start-up seconds
    restless: bool = False  # short comparisons are inconclusive
    doubt: float = 0.005  # half the width of the intervals of the others, as a fraction
    refuted: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    disturbances: list[float] = field(default_factory=list)  # slow-down of the task in each comparison, by others
    spread: float = 0.0005  # standard deviation of the metric, over recipes and seeds
    budget: Budget = field(default_factory=lambda: frozen(1e6))
    task: TaskRef = TaskRef("planted")  # noqa: RUF009  # it is frozen
    device: str = "cpu"
    processes: int = 1
    seed: int = 0
    higher_is_better: bool = True
    target: float | None = TARGET
    horizon: float = 1.0
    step_seconds: float = 0.0
    asked: list[tuple[str, str]] = field(default_factory=list)
    trials: list[dict] = field(default_factory=list)
    compared: dict[str, dict] = field(default_factory=dict)  # outcomes of comparisons
    complete: dict[tuple[str, int, float], dict] = field(default_factory=dict)  # as of a Study

    def has_run(self, recipe: Recipe, seed: int) -> bool:
        return False

    def run(self, recipe: Recipe, seed: int, time_limit: float | None = None) -> dict:
        key = str(recipe), seed, self.horizon
        if key in self.complete:
            return self.complete[key]
        self._pay("run", f"{recipe}, seed {seed}, give up after {time_limit}")
        metric = (
            METRIC
            + random.Random(f"{recipe} {seed}").gauss(0, self.spread)
            + sum(self.better.get(each, 0.0) for each in _members(recipe))
        )
        samples = round(SAMPLES * self._of(self.samples, recipe))
        seconds = samples / 1000 / self._of(self.faster, recipe) / self._of(self.luck, recipe)
        late = time_limit is not None and seconds > time_limit
        looks = [{"samples": n * samples // 20, "seconds": n * seconds / 20, "metric": metric} for n in range(1, 41)]
        reached = {"seconds_to_target": seconds, "samples_to_target": samples, "first_samples": samples}
        result = {
            "metric": metric,
            "best_metric": metric,
            "samples": 2 * samples,
            "seconds": 2 * seconds,
            "pruned": late,
            "trial_seconds": TRIAL,
        }
        result |= {"evaluations": looks} | (dict.fromkeys(reached) if late else reached)
        if not late:
            self.complete[key] = result
        return result

    known_run = Study.known_run

    def compare_speed(self, a: Recipe, b: Recipe, *, salt: str = "", **_) -> dict:
        """As measured when first asked for, as from the store."""
        key = f"{b} against {a}{salt and f', {salt}'}"
        self._pay("speed", key)
        if key not in self.compared:
            self.compared[key] = self._compare(a, b, salt)
        return self.compared[key]

    def _compare(self, a: Recipe, b: Recipe, salt: str) -> dict:
        if without_effect := set(self.without_effect) & set(_members(b)):
            return {"failed": f"{without_effect.pop().partition(':')[0]} {NO_EFFECT}: planted", "trial_seconds": TRIAL}
        median = self._of(self.faster, b) / self._of(self.faster, a)
        doubt = 0.25 if self.restless and not salt else self.doubt
        ratio = Ratio(median, median / (1 + doubt), median * (1 + doubt))
        return {
            "verdict": verdict_of(ratio),
            "seconds": TRIAL,
            "ratio": ratio.to_json(),
            "why": f"{ratio}",
            "seconds_per_1000_samples": {"a": 1 / self._of(self.faster, a), "b": 1 / self._of(self.faster, b)},
            "start_seconds": {
                name: sum(self.start.get(each, 0.0) for each in _members(recipe))
                for name, recipe in (("a", a), ("b", b))
            },
            "trial_seconds": TRIAL,
            "slowdown": self.disturbances.pop(0) if self.disturbances else 1.0,
            "system_noise": {"others_percent": 40.0},
        }

    def check_exactness(self, base: Recipe, recipe: Recipe, exactness) -> dict:
        self._pay("exactness", f"{recipe} against {base}")
        return {"passed": not set(self.refuted) & set(_members(recipe)), "why": "planted", "trial_seconds": TRIAL}

    def measure_once(self, kind: str, title: str, measure: Any) -> dict:
        self._pay(kind, title)
        return {"advice": []}

    def step_profile(self, recipe: Recipe) -> dict:
        self._pay("step_profile", str(recipe))
        return {}

    def refusal(self, recipe: Recipe) -> str:
        return ""

    def note(self, what: str, stage: str, verdict: str, why: str, *, ratio=None, seconds: float = 0.0) -> None:
        trial = {"what": what, "stage": stage, "verdict": verdict, "why": why, "ratio": ratio}
        self.trials.append(trial | {"seconds": seconds})

    def kinds(self, kind: str) -> list[str]:
        return [what for each, what in self.asked if each == kind]

    def noted(self, stage: str) -> list[str]:
        return [trial["what"] for trial in self.trials if trial["stage"] == stage]

    def _of(self, effects: dict[str, float], recipe: Recipe) -> float:
        return prod(effects.get(each, 1.0) for each in _members(recipe))

    def _pay(self, kind: str, what: str) -> None:
        if (kind, what) not in self.asked:
            self.budget.check()
            self.asked.append((kind, what))
            self.budget.charged += TRIAL


def _members(recipe: Recipe) -> list[str]:
    return [str(Recipe({name: settings})) for name, settings in recipe.methods.items()]


def baseline_of(study: Planted) -> Baseline:
    seeds = [0, 1000, 2000]
    return Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)


def searched_systems(study: Planted, item: Candidate = THREADS) -> Incumbents:
    incumbents = Incumbents()
    search_systems(study, incumbents, [item], SAMPLES, 5.0)
    return incumbents


def searched_training(study: Planted, item: Candidate = CLIPPING) -> Incumbents:
    incumbents, baseline = Incumbents(), baseline_of(study)
    search_training(study, incumbents, [item], baseline, first_outcome(baseline))
    return incumbents


def outcome(
    *seconds: float | None, samples: tuple[int | None, ...] = (), metric: float = METRIC, whole: int = 2 * SAMPLES
) -> Outcome:
    """Returns the outcome of one run per seed, which trains ``whole`` samples in all, in milliseconds."""
    samples = samples or (SAMPLES,) * len(seconds)
    runs = [
        {
            "seconds_to_target": s,
            "samples_to_target": n,
            "metric": metric,
            "samples": whole,
            "seconds": whole / 1000,
            "evaluations": [],
        }
        for s, n in zip(seconds, samples, strict=True)
    ]
    return Outcome("kept", "", tuple(runs))
