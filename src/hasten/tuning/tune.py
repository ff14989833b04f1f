"""``tune``: from a task to a recipe with evidence, or to an honest "leave it".

    probe -> diagnosis -> baseline -> search -> shares -> confirmation -> result

The margin and the target are fixed before the first candidate is tried. Everything measured is written
down at once; a search that was killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from hasten.contract.errors import Failure, Refusal
from hasten.contract.recipe import Recipe
from hasten.contract.watch import Watch, silent
from hasten.diagnosis.diagnose import diagnose
from hasten.engine.devices import pick_device
from hasten.engine.environment import environment
from hasten.engine.metrics import higher_is_better, name_of
from hasten.engine.tasks import TaskRef
from hasten.measure.arm import estimate
from hasten.tuning.candidates import Wanted, candidates_for, competent_recipes
from hasten.tuning.confirm import SEED_STEP, Confirmed, confirm
from hasten.tuning.gate import stated_margin
from hasten.tuning.ledger import Ledger
from hasten.tuning.search import Baseline, Ladder, systems, training
from hasten.tuning.shares import leave_one_out
from hasten.tuning.study import Budget, OutOfBudget, Study

BASELINE_SEEDS = 3
RUNS_IN_A_BUDGET = 18  # textbook runs that the default budget is worth
SMALLEST_BUDGET = 160.0  # seconds; below this the processes themselves are the cost
SYSTEMS_PART, TRAINING_PART = 0.4, 0.85  # of what is left when each begins
FEWEST_SECONDS, SCREENING_SECONDS = 5.0, 8.0  # for a comparison of the search
RESERVED_RUNS = 4.2  # textbook runs kept back for the confirmation: three seeds of both arms


def tune(
    task,
    *,
    budget: float | None = None,
    margin: float | None = None,
    consider: Iterable[str] | None = None,
    extra: Iterable[str] = (),
    out: str | Path | None = None,
    runs: int = 10,
    device: str | None = None,
    seed: int = 0,
    watch: Watch = silent,
) -> dict:
    """Finds a faster recipe for a task and proves that it is as good, or says "leave it" with the evidence.

    Args:
        task: a workload's name, ``file.py:function`` or a Task with validation data.
        budget: seconds to search; the default is a small multiple of one textbook run, told before it starts.
        margin: how much worse the metric may be, in its own unit; 0.5 % of the baseline's where nobody says.
        consider: the only methods to try, as ``--with`` text.
        extra: methods to try besides the installed ones, as ``./file.py:Class[:key=value]``.
        out: the folder of the search; a search that was stopped there goes on. ``runs/tune-TASK`` by default.
        runs: trainings that the user expects to do with the result; tells whether the search pays.

    Returns:
        The content of ``result.json``: verdict, recipe, speedup, quality, trials, and what they cost.

    Raises:
        Refusal: a wrong request. Failure: the task's own training does not run.
    """
    ref, device = TaskRef.of(task), pick_device(device)
    loaded = ref.load()
    if loaded.validation_data is None:
        raise Refusal("tune needs validation_data and a metric: without them nobody can say that quality did not suffer")
    direction, offered = higher_is_better(loaded), list(extra)
    wanted = Wanted.of(consider, offered)
    folder = Path(out) if out is not None else Path("runs") / f"tune-{_file_name(str(ref))}"

    here = _here(device)
    setting = {
        "task": ref.fingerprint(),
        "target": loaded.target,
        "device": device,
        "seed": seed,
        "machine": here["machine"],
        "versions": here["versions"],
        "offered": {name: _code_of(name) for name in sorted({*wanted.offered.methods, *(wanted.only.methods if wanted.only else ())})},
    }
    ledger = Ledger(folder, setting)
    study = Study(ref, device, ledger, Budget(float("inf")), watch, higher_is_better=direction, target=loaded.target, seed=seed)

    textbook = study.once("probe", f"timing a few steps of {ref}", lambda _: estimate(ref, device, seed))
    study.budget.total = budget if budget is not None else max(SMALLEST_BUDGET, RUNS_IN_A_BUDGET * textbook["seconds"])
    watch(
        f"one textbook run takes about {_words(textbook['seconds'])}; the search may take {_words(study.budget.total)}",
        0.0,
        study.budget.total,
    )

    ladder, story = Ladder(), {}
    confirmed = None
    try:
        story = study.once(
            "diagnosis",
            f"diagnosing {ref}",
            lambda inner: diagnose(ref, budget=min(40.0, study.budget.total / 8), device=device, seed=seed, watch=inner),
        )
        candidates = candidates_for(story, wanted)
        for name, why in candidates.not_tried:
            study.note(name, "diagnosis", "not tried", why)
        baseline = _baseline(study, margin)
        anatomy = {"baseline": study.anatomy(Recipe())}
        pace_seconds = min(30.0, max(FEWEST_SECONDS, study.budget.total / 18))
        study.budget.reserved = min(study.budget.total / 2, RESERVED_RUNS * baseline.runs[0]["seconds"] + 2 * pace_seconds)
        screening_seconds = min(SCREENING_SECONDS, max(FEWEST_SECONDS, pace_seconds / 2))
        competent = _competent(study, screening_seconds)
        shares = []
        with study.budget.part(1.0):
            with study.budget.part(SYSTEMS_PART):
                systems(study, ladder, candidates.systems, baseline.samples_to_target(), screening_seconds)
            with study.budget.part(TRAINING_PART):
                training(study, ladder, candidates.training, baseline)
            shares = leave_one_out(study, ladder)
        top = ladder.best
        if study.budget.left() <= 0:
            study.note("search", "search", "stopped", "the search's part of the budget is spent; what was found by then is confirmed")
        study.budget.reserved = 0.0
        confirmed = confirm(study, ladder, competent, baseline, pace_seconds) if ladder.best else None
        if confirmed and confirmed.held:
            with study.budget.part(1.0):
                anatomy["tuned"] = study.anatomy(confirmed.recipe)
    except OutOfBudget:
        raise Failure(
            f"the budget of {_words(study.budget.total)} ended before the task's own training was measured; give --budget {_words(2 * RESERVED_RUNS * textbook['seconds'])} or more"
        ) from None

    result = {
        "kind": "tune",
        "task": str(ref),
        **_answer(study, confirmed, baseline, offered),
        "metric": {"name": name_of(loaded), "higher_is_better": direction, "target": baseline.target},
        "competent_recipe": competent.methods,
        "shares": shares if confirmed and confirmed.held and confirmed.recipe == top else [],
        "anatomy": anatomy,
        "trials": study.trials,
        "phases": story.get("phases"),
        "headroom": story.get("headroom"),
        "facts": story.get("facts"),
        **here,
        "noise": (confirmed.pace.get("noise") if confirmed else None) or story.get("noise"),
        "textbook_seconds": textbook["seconds"],
        "budget_seconds": study.budget.total,
        "search_seconds": study.budget.spent,
        "remembered_trials": ledger.found,
        "runs_expected": runs,
        "seed": seed,
        "out": str(folder),
    }
    result["pays_after_runs"] = _pays_after(result)
    _write(folder, result)
    return result


def _baseline(study: Study, margin: float | None) -> Baseline:
    """The task's own training over the search's seeds; fixes target and margin."""
    seeds = [study.seed + SEED_STEP * number for number in range(BASELINE_SEEDS)]
    runs = [study.run(Recipe(), seed) for seed in seeds]
    for run in runs:
        if "failed" in run:
            raise Failure(f"the task's own training does not run: {run['failed']}")
    metrics = [run["metric"] for run in runs]
    if study.target is None:  # what every seed reaches
        best = [run["best_metric"] for run in runs]
        study.target = min(best) if study.higher_is_better else max(best)
        runs = [study.run(Recipe(), seed) for seed in seeds]
    if all(run["seconds_to_target"] is None for run in runs):
        best = max(metrics) if study.higher_is_better else min(metrics)
        raise Failure(
            f"the task's own training never held its target {study.target:g} (it ended at {best:.4g}); lower the target or train longer"
        )
    baseline = Baseline(seeds, runs, study.target, stated_margin(sum(metrics) / len(metrics), margin), study.higher_is_better)
    study.note(
        "baseline",
        "baseline",
        "measured",
        f"{len(runs)} seeds end at {', '.join(f'{m:.4g}' for m in metrics)}; margin {baseline.margin:.3g}",
        seconds=sum(run["trial_seconds"] for run in runs),
    )
    return baseline


def _competent(study: Study, seconds: float) -> Recipe:
    """The second baseline: what a competent user sets by hand, the faster of its usual forms."""
    best, *others = competent_recipes(study.device, os.cpu_count() or 1)
    if study.budget.left() <= 0:
        return best
    for other in others:
        outcome = study.pace(best, other, seconds=seconds)
        verdict = outcome.get("verdict", "failed")
        study.note(
            str(other),
            "baseline",
            verdict,
            f"as the competent baseline, against {best}",
            ratio=outcome.get("ratio"),
            seconds=outcome["trial_seconds"],
        )
        if outcome.get("ratio", {}).get("median", 0) > 1:
            best = other
    return best


def _answer(study: Study, confirmed: Confirmed | None, baseline: Baseline, offered: list[str]) -> dict:
    won = confirmed is not None and confirmed.held
    if won:
        why = f"{confirmed.speedup.median:.1f} times faster to the target; {confirmed.why}"
    elif confirmed is None:
        why = "no method that was tried is surely faster; see the trials"
    else:
        why = confirmed.why if confirmed.speedup is None else f"the gain did not hold on fresh seeds: {confirmed.speedup}"
    recipe = confirmed.recipe if won else Recipe()
    runs = (
        {"baseline": confirmed.baseline_runs, "tuned": confirmed.tuned_runs}
        if confirmed
        else {"baseline": dict(zip(baseline.seeds, baseline.runs, strict=True)), "tuned": {}}
    )
    return {
        "verdict": "faster" if won else "leave it",
        "why": why,
        "recipe": recipe.methods,
        "speedup": confirmed.speedup.to_json() if won else None,
        "speedup_over_competent": confirmed.over_competent.to_json() if won and confirmed.over_competent else None,
        "stopwatch": confirmed.stopwatch.to_json() if won and confirmed.stopwatch else None,
        "time_to_target": confirmed.seconds if won else None,
        "samples_to_target": {arm: [run.get("samples_to_target") for run in of.values()] for arm, of in runs.items()},
        "stopwatch_to_target": {arm: [run.get("seconds_to_target") for run in of.values()] for arm, of in runs.items()},
        "quality": confirmed.gate.to_json()
        if confirmed
        else {"baseline": baseline.metric, "tuned": None, "margin": baseline.margin, "passed": False},
        "curves": {arm: [_curve(seed, run) for seed, run in of.items() if "evaluations" in run] for arm, of in runs.items()},
        "offered": [_fate(name, study.trials, recipe) for name in offered],
    }


def _here(device: str) -> dict:
    """The machine and the versions, as the report shows them."""
    facts = environment(device)
    machine = {key: facts.get(key) for key in ("cpu", "cores", "threads", "device", "gpu")}
    machine |= {"os": facts["system"], "memory_gb": round(psutil.virtual_memory().total / 2**30, 1)}
    return {"machine": machine, "versions": {key: facts[key] for key in ("hasten", "python", "torch", "numpy")}}


def _curve(seed: int, run: dict) -> dict:
    return {"seed": seed, "points": [{key: look[key] for key in ("seconds", "samples", "metric")} for look in run["evaluations"]]}


def _fate(text: str, trials: list[dict], recipe: Recipe) -> dict:
    """What became of a method that the user offered."""
    name = next(iter(Recipe.parse(text).methods))
    told = [trial for trial in trials if trial["what"].startswith(name) or name in trial["what"]]
    why = told[-1]["why"] if told else "the budget ended before it was tried"
    return {"method": name, "accepted": name in recipe.methods, "why": why}


def _pays_after(result: dict) -> float | None:
    """Runs after which the seconds saved have paid for the search."""
    times = result["time_to_target"]
    saved = times["baseline"] - times["tuned"] if times else 0.0
    return result["search_seconds"] / saved if saved > 0 else None


def _write(folder: Path, result: dict) -> None:
    """recipe.toml and result.json, each written beside and renamed into place."""
    result["recipe_file"] = str(folder / "recipe.toml")
    for name, text in (("recipe.toml", Recipe(result["recipe"]).to_toml()), ("result.json", json.dumps(result, indent=1, allow_nan=False))):
        try:
            (folder / f"{name}.part").write_text(text, encoding="utf-8")
            os.replace(folder / f"{name}.part", folder / name)
        except OSError as error:
            raise Failure(f"cannot write {folder / name}: {error.strerror}") from None


def _code_of(name: str) -> str | None:
    """Fingerprint of an outside method's file: another code is another trial."""
    file = name.rpartition(":")[0]
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file.endswith(".py") else None


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text)


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
