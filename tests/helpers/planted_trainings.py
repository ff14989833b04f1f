"""Whole trainings with planted outcomes, for tests of the confirmation."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

from hasten.core.recipe import Recipe
from hasten.tuning.budget import Budget, OutOfBudgetError
from hasten.tuning.confirm import confirm
from hasten.tuning.training import Baseline
from helpers.planted_study import frozen

MARGIN, TARGET, SAMPLES, LOOK = 0.01, 0.8, 1000, 50
FAST, FASTER = Recipe({"ema": {"decay": 0.5}}), Recipe({"ema": {"decay": 0.9}})


@dataclass
class PlantedTrainings:
    """Stands in for a Study: each recipe has a metric, a spread over the seeds, a speed, and a cost per run."""

    metric: dict[str, float]
    spread: float = 0.001
    unseen: dict[str, float] = field(default_factory=dict)  # seconds of a run that no block measures
    uneven: float = 0.0  # added or subtracted seconds
    cost: dict[str, float] = field(default_factory=lambda: {"baseline": 10.0, str(FAST): 5.0, str(FASTER): 2.0})
    # per seed, in turns: evaluations by which the target is reached later
    looks: dict[str, list[int]] = field(default_factory=dict)
    budget_runs: int = 1000
    seed: int = 0
    device: str = "cpu"
    budget: Budget = field(default_factory=lambda: frozen(1e9))
    ran: list[tuple[str, int]] = field(default_factory=list)
    notes: dict[str, tuple[str, str]] = field(default_factory=dict)
    horizon: float = 1.0
    task: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(command=""))  # not of a script
    stored: tuple[tuple[str, int], ...] = ()  # runs of an earlier search

    def has_run(self, recipe: Recipe, seed: int) -> bool:
        return (str(recipe), seed) in self.stored

    def run(self, recipe: Recipe, seed: int) -> dict:
        name = str(recipe)
        if (name, seed) not in self.ran:
            if len(self.ran) >= self.budget_runs:
                raise OutOfBudgetError
            self.ran.append((name, seed))
        metric = self.metric[name] + self.spread * random.Random(f"{name} {seed}").gauss(0, 1)
        cost, reached = self.cost[name], metric >= TARGET
        late = self.unseen[name] + self.uneven * (-1) ** (seed // 1000) if name in self.unseen else 0.0
        further = self.looks.get(name, [0])
        samples = SAMPLES + LOOK * further[seed // 1000 % len(further)]
        return {
            "metric": metric,
            "trial_seconds": 2 * cost,
            "seconds_to_target": samples / SAMPLES * cost + late if reached else None,
            "samples_to_target": samples if reached else None,
            "first_samples": samples if reached else None,
            "evaluations": [
                {"samples": n * LOOK, "seconds": n * LOOK / SAMPLES * cost + late, "metric": metric}
                for n in range(1, 41)
            ],
        }

    def compare_speed(self, a: Recipe, b: Recipe, **_) -> dict:
        ratio = self.cost[str(a)] / self.cost[str(b)]
        return {
            "ratio": {"median": ratio, "low": 0.99 * ratio, "high": 1.01 * ratio},
            "seconds_per_1000_samples": {"a": self.cost[str(a)], "b": self.cost[str(b)]},
            "start_seconds": {"a": 0.0, "b": 0.0},
            "trial_seconds": 1.0,
        }

    def check_exactness(self, base: Recipe, candidate: Recipe, exactness) -> dict:
        return {"passed": True, "why": "planted"}

    def note(self, what: str, stage: str, verdict: str, why: str, **_) -> None:
        self.notes[what] = verdict, why

    def seeds_of(self, recipe: Recipe) -> list[int]:
        return [seed for name, seed in self.ran if name == str(recipe)]


def confirmed(study: PlantedTrainings, rungs: tuple[Recipe, ...] = (FAST, FASTER)):
    return next(iter(confirm(study, [Recipe(), *rungs], baseline_of(), 5.0)), None)


def baseline_of() -> Baseline:
    runs = [{"metric": 0.9 + 0.001 * n, "trial_seconds": 20.0} for n in (-1, 0, 1)]
    return Baseline([0, 1, 2], runs, TARGET, MARGIN, True, [7, 8, 9])
