"""``tune``: from a task to a recipe with evidence, or to an honest "no improvement".

    probe -> diagnosis -> baseline -> search -> shares -> confirmation -> result

The margin and the target are fixed before the first candidate is tried. Everything measured is written
down at once; a search that was killed goes on where it stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from hasten.benchmarking.arm import estimate
from hasten.benchmarking.fork_server import mark_warnings_shown, reset_shown_warnings
from hasten.benchmarking.ratio import SLOWER, Ratio
from hasten.core.errors import ConfigurationError, HastenWarning, ProgressWarning, RunError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.data_adapters import check_process_count
from hasten.engine.devices import pick_device
from hasten.engine.environment import cores, own_code
from hasten.engine.metrics import higher_is_better, name_of
from hasten.engine.registry import drop_distributed
from hasten.engine.resources import warn_oversubscribed
from hasten.engine.tasks import TaskRef
from hasten.profiling.diagnose import diagnose
from hasten.tuning.ablation import contributions, leave_one_out
from hasten.tuning.candidates import MethodSelection, candidates_for, strong_baselines
from hasten.tuning.confirm import SEED_STEP, against_competent, confirm
from hasten.tuning.gate import FEWEST_SEEDS, resolve_margin
from hasten.tuning.result import Found, result_of, surroundings, write
from hasten.tuning.search import NOTHING_TO_DO, Baseline, gain_of_a_run, search_systems, search_training
from hasten.tuning.study import ANATOMY_SECONDS, Budget, OutOfBudget, Study
from hasten.tuning.trial_store import TrialStore
from hasten.utils.durations import parse_budget

BASELINE_SEEDS = 3
RUNS_IN_A_BUDGET = 18  # textbook runs that the default budget is worth
FEWEST_RUNS = 10  # below this, little more than the baselines gets measured
SMALLEST_BUDGET = 160.0  # seconds; below this the processes themselves are the cost
SYSTEMS_PART, TRAINING_PART = 0.4, 0.75  # of what is left when each begins
FEWEST_SECONDS, SCREENING_SECONDS = 5.0, 8.0  # for a comparison of the search
ONE_PROCESS, ONE_PROCESS_PART = "one process", 0.2
MIN_TIMEOUT_S, TIMEOUT_FRACTION, SILENT_RUNS = (
    30.0,
    1 / 8,
    2.0,
)  # of a job: seconds, of the budget, and textbook runs of silence; the most counts
RESERVED_RUNS = (
    5.0  # textbook runs kept back for the confirmation: three seeds of both arms, and further ones of the recipe
)


def tune(
    task,
    *,
    budget: float | str | None = None,
    margin: float | None = None,
    methods: Iterable[str] | None = None,
    extra: Iterable[str] = (),
    out: str | Path | None = None,
    runs: int = 10,
    processes: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    seed: int = 0,
    watch: ProgressCallback = no_progress,
) -> dict:
    """Finds a faster recipe for a task and proves that it is as good, or says "no improvement" with the evidence.

    Args:
        task: a workload's name, ``file.py:function`` or a Task with validation data.
        budget: seconds to search, or a text such as "10m"; the default is a small multiple of one textbook run, told before it starts.
        margin: how much worse the metric may be, in its own unit; 0.5 % of the baseline's where nobody says.
        consider: the only methods to try, as ``--with`` text.
        extra: methods to try besides the installed ones, as ``./file.py:Class[:key=value]``.
        out: the folder of the search; a search that was stopped there goes on. ``runs/tune-TASK`` by default.
        runs: trainings that the user expects to do with the result; tells whether the search pays.
        processes: that train together. What has to be beaten is then the task's own training by so many (data parallel); whether one process alone
            would be faster is measured, too.
        patience: seconds of silence after which a job of several processes counts as hanging; a part of the budget unless said.

    Returns:
        The content of ``result.json``: verdict, recipe, speedup, quality, trials, and what they cost.

    Raises:
        Refusal: a wrong request. Failure: the task's own training does not run.
    """
    reset_shown_warnings()
    budget = None if budget is None else parse_budget(budget)
    ref, device = TaskRef.of(task), pick_device(device)
    with mark_warnings_shown():  # here and not by a trial: in a search that goes on, all of them may be remembered
        loaded = ref.load()
        check_process_count(loaded, processes)
        warn_oversubscribed(processes)
    if loaded.validation_data is None:
        raise ConfigurationError(
            "tune needs validation_data and a metric: without them nobody can say that quality did not suffer"
        )
    higher, wanted = (
        higher_is_better(loaded),
        MethodSelection.of(methods, extra),
    )  # names and settings are checked before anything runs
    folder = Path(out) if out is not None else Path("runs") / f"tune-{_file_name(str(ref))}"
    setting = {
        "task": ref.fingerprint(),
        "target": loaded.target,
        "device": device,
        "seed": seed,
        "processes": processes,
        "code": own_code(),
    }
    ledger = TrialStore(folder, setting | surroundings(device))
    study = Study(
        ref,
        device,
        ledger,
        Budget(float("inf")),
        watch,
        seed=seed,
        processes=processes,
        higher_is_better=higher,
        target=loaded.target,
        source_hashes=wanted.codes(),
    )

    textbook = _set_budget(study, budget, timeout)
    found = Found()
    try:
        _examine(study, found, wanted, margin)
        _search(study, found)
        _confirm(study, found)
    except OutOfBudget:
        enough = f"{max(RUNS_IN_A_BUDGET * textbook, 2 * study.budget.total):.0f}s"
        raise RunError(
            f"the budget of {_words(study.budget.total)} ended before the task's own training was measured; give --budget {enough} or more"
        ) from None
    result = result_of(study, found, metric=name_of(loaded), offered=wanted.offered) | {
        "textbook_seconds": textbook,
        "runs_expected": runs,
        "out": str(folder),
    }
    write(folder, result)
    return result


def _set_budget(study: Study, budget: float | None, timeout: float | None) -> float:
    """Fixes what the search may take, and how long a job may be silent, and says so before it begins; seconds of one textbook run."""
    words = f"timing a few steps of {study.task}"
    probe = study.measure_once(
        "probe",
        words,
        lambda _: estimate(study.task, study.device, study.seed, study.processes, timeout or DEFAULT_TIMEOUT_S),
    )
    study.budget.total = budget if budget is not None else max(SMALLEST_BUDGET, RUNS_IN_A_BUDGET * probe["seconds"])
    study.timeout = timeout or max(MIN_TIMEOUT_S, study.budget.total * TIMEOUT_FRACTION, SILENT_RUNS * probe["seconds"])
    words = f"one textbook run takes about {_words(probe['seconds'])}; the search may take {_words(study.budget.total)}"
    warnings.warn(words, ProgressWarning, stacklevel=3)
    if (worth := study.budget.total / probe["seconds"]) < FEWEST_RUNS:
        told = f"the budget is worth {worth:.1f} textbook runs, and below {FEWEST_RUNS} little more than the baselines gets measured"
        warnings.warn(
            f"{told}; --budget {RUNS_IN_A_BUDGET * probe['seconds']:.0f}s would do", HastenWarning, stacklevel=3
        )
    return probe["seconds"]


def _examine(study: Study, found: Found, wanted: MethodSelection, margin: float | None) -> None:
    """Diagnosis and baseline: where the time goes, what is worth trying, what has to be beaten."""
    seconds = min(40.0, study.budget.total / 8)

    def measure(watch: ProgressCallback) -> dict:
        where = {"device": study.device, "processes": study.processes, "timeout": study.timeout, "seed": study.seed}
        return diagnose(study.task, budget=seconds, watch=watch, **where)

    found.story = study.measure_once("diagnosis", f"diagnosing {study.task}", measure)
    found.candidates = candidates_for(found.story, wanted)
    for name, why in found.candidates.not_tried:
        study.note(name, "diagnosis", "not tried", why)
    found.baseline = _baseline(study, margin)
    found.anatomy["baseline"] = study.anatomy(Recipe())
    found.pace_seconds = min(30.0, max(FEWEST_SECONDS, study.budget.total / 18))
    textbook = fmean(run["trial_seconds"] for run in found.baseline.runs)
    study.budget.reserved = min(study.budget.total / 2, RESERVED_RUNS * textbook + 2 * found.pace_seconds)
    if study.processes > 1:
        with study.budget.part(ONE_PROCESS_PART):
            found.one_process = _one_process(study, found, Recipe(), found.baseline.samples_to_target())


def _search(study: Study, found: Found) -> None:
    """The ladder of recipes, and what each member of the topmost gives; ends where its part of the budget does."""
    screening = min(SCREENING_SECONDS, max(FEWEST_SECONDS, found.pace_seconds / 2))
    budget, ladder, candidates = study.budget, found.ladder, found.candidates
    with budget.part(1.0):
        found.competent = _competent(study, screening)
        if candidates.communication:
            with budget.part(SYSTEMS_PART):
                search_training(study, ladder, candidates.communication, found.baseline)
        with budget.part(SYSTEMS_PART):
            search_systems(study, ladder, candidates.systems, found.baseline.samples_to_target(), screening)
        _reserve_for_what_was_found(study, found)
        with budget.part(TRAINING_PART):
            search_training(study, ladder, candidates.training, found.baseline)
        found.shares = leave_one_out(study, ladder)
    found.top = ladder.best
    if budget.cut:
        _note_what_was_not_reached(study, found)
        study.note(
            "search",
            "search",
            "stopped",
            "the search's part of the budget is spent; what was found by then is confirmed",
        )


def _note_what_was_not_reached(study: Study, found: Found) -> None:
    """Puts the candidates that the budget left no time for into the story."""
    told = [trial["what"] for trial in study.trials]
    candidates = found.candidates
    for stage, these in (
        ("systems", candidates.systems),
        ("training", [*candidates.communication, *candidates.training]),
    ):
        for name in (each.name for each in these):
            if not any(name in what for what in told):
                study.note(name, stage, "not tried", "the search's part of the budget ended before it")


def _reserve_for_what_was_found(study: Study, found: Found) -> None:
    """Keeps back what it takes to confirm what was found by now, in case nothing faster can be proven; half of what is left at most."""
    if recipe := found.ladder.best:
        seconds = study.run(recipe, found.baseline.seeds[0])["trial_seconds"]
        study.budget.reserved += min(max(0.0, study.budget.left()) / 2, FEWEST_SEEDS * seconds + found.pace_seconds)


def _confirm(study: Study, found: Found) -> None:
    """The proof; then, of a winner, what it is against one process and the competent run, its anatomy, and what its members give."""
    budget = study.budget
    comparisons = bool(found.competent) + (study.processes > 1)
    budget.reserved = 0.0
    budget.reserved = min(max(0.0, budget.left()) / 2, ANATOMY_SECONDS + comparisons * found.pace_seconds)
    confirmed = found.confirmed = confirm(study, found.ladder, found.baseline, found.pace_seconds)
    budget.reserved = 0.0
    if not found.won:
        return
    if study.processes > 1 and drop_distributed(confirmed.recipe):
        with budget.part(1.0):
            found.winner_alone = _one_process(
                study, found, confirmed.recipe, fmean(tuned for _, tuned, *_ in confirmed.samples)
            )
    with budget.part(1.0):
        against_competent(study, confirmed, found.competent, found.pace_seconds)
        found.anatomy["tuned"] = study.anatomy(confirmed.recipe)
    if confirmed.recipe != found.top or len(found.shares) < len(confirmed.recipe.methods):
        found.top, found.shares = confirmed.recipe, contributions(study, confirmed.recipe)


def _baseline(study: Study, margin: float | None) -> Baseline:
    """The task's own training over the search's seeds; fixes target and margin."""
    seeds = [study.seed + SEED_STEP * number for number in range(BASELINE_SEEDS)]
    runs = [study.run(Recipe(), seed) for seed in seeds]
    for run in runs:
        if "failed" in run:
            raise RunError(f"the task's own training does not run: {run['failed']}")
    metrics = [run["metric"] for run in runs]
    if study.target is None:  # what every seed reaches
        best = [run["best_metric"] for run in runs]
        study.target = min(best) if study.higher_is_better else max(best)
        runs = [study.run(Recipe(), seed) for seed in seeds]
    if all(run["seconds_to_target"] is None for run in runs):
        best = max(metrics) if study.higher_is_better else min(metrics)
        raise RunError(
            f"the task's own training never held its target {study.target:g} (it ended at {best:.4g}); lower the target or train longer"
        )
    baseline = Baseline(
        seeds, runs, study.target, resolve_margin(sum(metrics) / len(metrics), margin), study.higher_is_better
    )
    study.note(
        "baseline",
        "baseline",
        "measured",
        f"{len(runs)} seeds end at {', '.join(f'{m:.4g}' for m in metrics)}; margin {baseline.margin:.3g}",
        seconds=sum(run["trial_seconds"] for run in runs),
    )
    return baseline


def _one_process(study: Study, found: Found, recipe: Recipe, samples: float) -> Ratio | None:
    """How many times as fast one process with all cores is as the job, so many samples long: nobody should pay for several in vain."""
    outcome = study.compare_speed(recipe, drop_distributed(recipe), seconds=found.pace_seconds, alone=True)
    what = f"{drop_distributed(recipe)}, {ONE_PROCESS}" if recipe else ONE_PROCESS
    if why := outcome.get("failed"):
        study.note(what, "baseline", "failed", why, seconds=outcome["trial_seconds"])
        return None
    ratio = outcome["ratio"]
    scale = gain_of_a_run(outcome, samples) / ratio["median"]
    study.note(what, "baseline", outcome["verdict"], outcome["why"], ratio=ratio, seconds=outcome["trial_seconds"])
    return Ratio(*(scale * ratio[key] for key in ("median", "low", "high")))


def _competent(study: Study, seconds: float) -> Recipe:
    """The second baseline: what a competent user sets by hand. Each of the usual forms is compared with the best before it."""
    best, idle = Recipe(), set()
    for form in strong_baselines(study.device, max(1, cores() // study.processes)):
        while other := form.drop(*idle):
            outcome = {} if other == best else study.compare_speed(best, other, seconds=seconds)
            if not (
                in_vain := {name for name in other.methods if f"{name} {NOTHING_TO_DO}" in outcome.get("failed", "")}
            ):
                break
            idle |= in_vain
        if not other or other == best:
            continue
        verdict, ratio = outcome.get("verdict", "failed"), outcome.get("ratio")
        why = f"as the competent baseline, against {best}"
        study.note(str(other), "baseline", verdict, why, ratio=ratio, seconds=outcome["trial_seconds"])
        if verdict not in (SLOWER, "failed") and ratio["median"] > 1:
            best = other
    return best


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text)


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
