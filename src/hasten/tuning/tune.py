"""``tune``: from a task to a recipe with evidence, or to the verdict "no improvement", within any budget.

    estimate -> diagnosis -> exact methods -> lower precision -> methods that change the training -> result

The first three stages need steps only, so they answer for trainings of any length. Each stage ends with a confirmation
by fresh processes; its findings are written at once, and the last result.json is the best answer so far. Margin and
target are fixed before the first method that changes the training is tried.
"""

import json
import math
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from itertools import count, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from hasten.benchmarking.arm import estimate
from hasten.benchmarking.fork_server import DeadlineError, reset_shown_warnings
from hasten.benchmarking.system_noise import SystemNoise
from hasten.benchmarking.worker_group import start_workers
from hasten.core.errors import ConfigurationError, ProgressWarning, RunError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.devices import pick_device
from hasten.engine.environment import machine_and_versions, source_hash
from hasten.engine.registry import method_class, method_names
from hasten.engine.resources import warn_oversubscribed
from hasten.engine.run_dir import atomic_write
from hasten.engine.tasks import TaskLike, TaskRef
from hasten.profiling.advise import advise_without_profile
from hasten.profiling.diagnose import diagnose
from hasten.reporting.result_schema import TuneResult
from hasten.tuning.budget import Budget, OutOfBudgetError
from hasten.tuning.candidates import MethodSelection, candidates_for
from hasten.tuning.continuation import earlier_findings, finish_earlier, keep_measured
from hasten.tuning.finding import DEFAULT_LEVEL, ESTIMATED, EXACT, LEVELS, PRECISION
from hasten.tuning.result import SearchState, result_of, write
from hasten.tuning.study import Study
from hasten.tuning.systems_stage import COMPARISON_S, SPARE, comparison_seconds, find_systems, settle_open
from hasten.tuning.training_stage import find_training
from hasten.tuning.trial import FirstSteps
from hasten.tuning.trial_store import FREE_THE_DISK, TrialStore
from hasten.utils.durations import duration_option, format_duration, parse_budget

BUDGET_RUNS, MIN_BUDGET_S, MAX_BUDGET_S = 12, 60.0, 2400.0  # runs of the task that the default budget is worth; limits
DIAGNOSIS_SHARE, MAX_DIAGNOSIS_S = 1 / 10, 40.0
CHANGED_ESTIMATE = 1.2  # ratio of two estimates of a run, from which on the later one counts
DIAGNOSIS_STEPS, MIN_DIAGNOSIS_S = 10, 6.0  # steps of a diagnosis at least, and seconds that they may always take
EARLY_SHARE = 1 / 20  # of a training: what begins so early is nearly all of it, and comparisons begin there, too, ...
REACH_SHARE = 1 / 100  # ... if training both recipes to it takes at most this part of the budget
# the timeout is the largest of: seconds, share of the budget, runs of the task
MIN_TIMEOUT_S, TIMEOUT_FRACTION, TIMEOUT_RUNS = 30.0, 1 / 8, 2.0


class SearchInterrupted(KeyboardInterrupt):
    """Raised by ``tune`` at Ctrl-C; ``result`` is the best answer so far, as in result.json."""

    def __init__(self, result: TuneResult):
        self.result = result


def tune(
    task: TaskLike,
    *,
    budget: float | str | None = None,
    margin: float | None = None,
    evidence: str | None = None,
    methods: Iterable[str] | None = None,
    extra: Iterable[str] = (),
    out: str | Path | None = None,
    runs: int = 10,
    processes: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    seed: int = 0,
    price_per_hour: float | None = None,
    spent: float = 0.0,
    on_progress: ProgressCallback = no_progress,
) -> TuneResult:
    """Finds a faster recipe for a task, with evidence, or returns "no improvement".

    Args:
        task: A workload's name, ``file.py:function``, a Task, a function that returns one, or ``hasten.script(...)``.
        budget: Seconds of the search, or a text such as "10m"; "+10m" continues a search for so long. The default is a
            small multiple of one run of the task; a ProgressWarning states it before the search starts.
        margin: How much worse the metric may be, in its own unit; by default the larger of 0.5 % of the baseline's
            metric and its standard deviation between seeds.
        evidence: Weakest evidence of the recipe to recommend: "exact", "precision", "proven" (the default) or
            "estimated". The first two need no validation data, and no method that changes the training is tried.
        methods: The only methods to try, as ``--with`` text; None: all.
        extra: Methods to try besides, as ``./file.py:Class[:key=value]``.
        out: Directory of the search, by default ``runs/tune-TASK``; for a Task or a function, or another command of the
            same name, with the next number where that holds a finished search. A search that was stopped continues
            there, and a finished one of the same task is not measured again.
        runs: Trainings that the user expects to do with the result; decides whether the report says that the search
            pays.
        processes: Number of ranks that train together. The baseline is then the task's own data-parallel training;
            whether one process would be faster is measured, too.
        timeout: Seconds without progress after which a job of several processes counts as hanging; by default a part of
            the budget.
        device: "cpu" or "cuda"; None picks one.
        seed: Seed of the search.
        price_per_hour: Price of an hour of this machine; the result then states the price of a training.
        spent: Seconds of the budget that have passed already, such as the start of the program.
        on_progress: Called with the progress.

    Returns:
        The content of ``result.json``: verdict, recipe, evidence, speedup, quality, frontier, trials, and their cost.

    Raises:
        ConfigurationError: A wrong request, or a budget that ended before the first steps.
        RunError: The task's own training does not run.
        SearchInterrupted: Ctrl-C, once there is an answer.
    """
    reset_shown_warnings()
    noise = SystemNoise()
    if evidence is not None and evidence not in LEVELS:
        raise ConfigurationError(f"evidence must be one of {', '.join(LEVELS)}, not {evidence!r}")
    continues = isinstance(budget, str) and budget.startswith("+")
    seconds = None if budget is None else parse_budget(budget[1:] if isinstance(budget, str) and continues else budget)
    selection = MethodSelection.of(methods, extra)  # checked before anything runs
    task, asked = TaskRef.of(task), pick_device(device)
    needs_whole_run = evidence not in ("exact", "precision")
    if getattr(task, "vary", ()) and not needs_whole_run:
        nothing = f"with --evidence {evidence} no method that changes the training is tried"
        raise ConfigurationError(f"{nothing}; leave out --vary, or choose proven or estimated")
    directory = search_directory(task, out, continues)
    store = TrialStore(directory, {})  # locks the directory before the task is loaded
    clock = Budget(float("inf") if seconds is None else seconds)
    clock.began -= spent
    before: Any = {}
    try:
        if continues:  # a search that cannot be continued runs nothing
            before = _earlier_result(directory, {"margin": margin})
        run_seconds = before.get("baseline_seconds") if needs_whole_run else None
        facts = _describe(task, processes, clock, on_progress, run_seconds=run_seconds, needs_metric=needs_whole_run)
        used: str = task.device(asked)
        if not facts["has_validation"] and evidence in ("proven", "estimated"):
            why = facts.get("no_whole_run") or "the task has none; add it, or choose exact or precision"
            where = "that the script prints or logs" if task.command else "(validation_data)"
            raise ConfigurationError(f"evidence={evidence} needs a metric on held-out data {where}; {why}")
        settings = store.settings = _settings(facts, used, seed, processes, margin)
        asked_for = settings | {"methods": selection.source_hashes()}
        earlier = _earlier_result(directory, asked_for) if continues else {}
    except BaseException as error:
        store.leave()
        if isinstance(error, KeyboardInterrupt) and before:
            raise SearchInterrupted(before) from None
        raise
    if seconds is None and facts.get("default_budget"):
        seconds = clock.total = facts["default_budget"]
    if continues:
        clock.wall, clock.total = clock.total, clock.total + earlier["budget_seconds"]
    study = Study(
        task,
        used,
        store,
        clock,
        on_progress,
        seed=seed,
        processes=processes,
        higher_is_better=facts["higher_is_better"],
        target=facts["target"],
        source_hashes=selection.source_hashes(),
    )
    text = json.dumps({**asked_for, "command": task.command}, indent=1, default=str)
    level = LEVELS[evidence] if evidence else DEFAULT_LEVEL
    state = SearchState(margin=margin, level=level, start_seconds=clock.spent)
    state.length_arguments = facts.get("length_arguments", [])
    known: Any = earlier  # a finished or stopped search of the same settings, whose answer must not get lost
    if not continues and not selection.only:
        with suppress(ConfigurationError):
            known = _earlier_result(directory, asked_for)

    def save(is_partial: bool = True) -> TuneResult:
        about: Any = {"metric": facts["metric"], "offered": selection.offered, "price_per_hour": price_per_hour}
        result: Any = result_of(study, state, is_partial=is_partial, **about)
        keep_measured(result, known)
        result |= {"expected_runs": runs, "out": str(directory)}
        of_search = {"others_percent": noise.summary(0.0, 0.0)["others_percent"]}
        result["system_noise"] = {**result["system_noise"], **of_search}
        write(directory, result)
        # written last: it marks the result as one of this search
        atomic_write(directory / "search.json", lambda file: file.write(text.encode()), FREE_THE_DISK)
        task.write_sites(directory, Recipe(result["recipe"] or {}))
        return result

    if facts.get("no_whole_run"):
        study.note("methods that change the training", "training", "not tried", facts["no_whole_run"])
    state.save = save
    _estimate(study, state, seconds, timeout)
    answer = Recipe(known.get("recipe") or {}) if level == ESTIMATED else Recipe()  # it was confirmed
    of_answer = [one for one in earlier_findings(known) if one.evidence != ESTIMATED or one.recipe == answer]
    state.findings += earlier_findings(known) if continues else of_answer
    state.tested = [Recipe(methods) for methods in earlier.get("confirmed_recipes", ())]
    try:
        save()
        _diagnose(study, state, selection, facts.get("varied", {}))
        _correct_estimate(study, state, seconds, timeout)
        _run_stages(study, state, earlier, facts["has_validation"])
    except OutOfBudgetError:
        study.note("search", "search", "stopped", "the budget is spent")
    except KeyboardInterrupt:
        raise SearchInterrupted(save()) from None
    except BaseException:
        save()
        raise
    finally:
        task.end()
    return save(is_partial=False)


def _settings(facts: dict[str, Any], device: str, seed: int, processes: int, margin: float | None) -> dict[str, Any]:
    """What must be equal for stored trials to count and for a search to be continued."""
    return {
        "task": facts["fingerprint"],
        "target": facts["target"],
        "device": device,
        "seed": seed,
        "processes": processes,
        "margin": margin,
        "code": source_hash(),
        **machine_and_versions(device),
    }


def _run_stages(study: Study, state: SearchState, earlier: dict[str, Any], has_validation: bool) -> None:
    """Tries methods stage by stage, after what an ``earlier`` search left unproven; OutOfBudgetError at any point."""
    has_training_stage = has_validation and state.level not in (EXACT, PRECISION)
    if earlier:
        finish_earlier(study, state, earlier, has_training_stage)
        state.save()
    find_systems(study, state, has_training_stage)
    if has_training_stage:
        find_training(study, state)
    if not state.chosen:
        settle_open(study, state)
    if state.chosen:
        with study.budget.part(1.0):
            state.operations = study.operations(state.chosen.recipe)


def search_directory(task: TaskLike, out: str | Path | None = None, continues: bool = False) -> Path:
    """The directory of a search: ``out``, or ``runs/tune-TASK``. No result is replaced: it is ``runs/tune-TASK-2`` and
    so on for a script where another command, or the same with another ``--metric`` or ``--vary``, has its search in
    the first, and for a Task or function from Python, whose name may be that of any other, where a search has ended
    there. Where a search ``continues``, that of the last one; for a script the first one of the command.
    """
    if out is not None:
        return Path(out)
    ref = TaskRef.of(task)
    name = _name_of(ref)

    def numbered(number: int) -> Path:
        return Path("runs", f"{name}-{number}" if number > 1 else name)

    if ref.obj is not None:
        free = next(number for number in count(1) if not _has_ended(numbered(number)))
        return numbered(free - 1 if continues and free > 1 and not numbered(free).exists() else free)
    if not ref.command:
        return numbered(1)
    asked = [ref.command, getattr(ref, "metric", None), list(getattr(ref, "vary", ()))]
    numbers = ((path, _asked_of(path)) for path in map(numbered, count(1)))
    taken = [(path, found) for path, found in takewhile(itemgetter(1), numbers) if found]
    same = [path for path, found in taken if found == asked]
    of_command = [path for path, found in taken if continues and found[0] == ref.command]
    return [*same, *of_command, numbered(len(taken) + 1)][0]


def _name_of(ref: TaskRef) -> str:
    return "tune-" + re.sub(r"[^\w-]+", "-", ref.argument)


def latest_search(task: TaskLike) -> Path:
    """The directory of the latest search of a command, whatever ``--metric`` and ``--vary`` it had."""
    ref = TaskRef.of(task)
    first = search_directory(ref, continues=True)
    files = first.parent.glob(f"{_name_of(ref)}*/search.json")
    own = [file for file in files if (_asked_of(file.parent) or [""])[0] == ref.command]
    return max(own, key=lambda file: file.stat().st_mtime).parent if own else first


def _has_ended(directory: Path) -> bool:
    """Whether a search in a directory has come to its end."""
    with suppress(OSError, ValueError, AttributeError):
        return not json.loads((directory / "result.json").read_text(encoding="utf-8")).get("is_partial")
    return False


def _asked_of(directory: Path) -> list[Any] | None:
    """[command, metric, arguments to vary] of the search in a directory; None if there is none, or it is not known."""
    for name in ("search.json", "result.json"):
        with suppress(OSError, ValueError, AttributeError):
            search = json.loads((directory / name).read_text(encoding="utf-8"))
            if command := search.get("command"):  # search.json also has [fingerprint, metric, arguments]
                task = search.get("task")
                return [command, *(task[1:] if isinstance(task, list) else (None, []))]
    return None


def _describe(
    task: TaskRef, processes: int, budget: Budget, on_progress: ProgressCallback, **known: Any
) -> dict[str, Any]:
    """The result of ``Description.facts``, in a process that ends at the deadline; ConfigurationError if that is too
    soon. ``known``: its further arguments.
    """
    if processes > 1:
        warn_oversubscribed(processes)
    try:
        with start_workers(1, "hasten.tuning.trial:Description", None, budget.deadline(), task=task) as worker:
            return worker.call("facts", on_progress=on_progress, processes=processes, **known)
    except DeadlineError:
        what = f"for the first steps of {task}" if task.command else "to prepare the data and the model of the task"
        raise _too_small(budget, what) from None


def _too_small(budget: Budget, what: str) -> ConfigurationError:
    seconds, enough = format_duration(budget.total), duration_option(4 * budget.total)
    return ConfigurationError(f"the budget of {seconds} was not enough {what}; give at least --budget {enough}")


def _earlier_result(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The result.json of the search in ``directory`` that is continued.

    ConfigurationError if it is missing or cannot be read, or if any of the ``settings`` differs.
    """
    try:
        before = json.loads((directory / "search.json").read_text(encoding="utf-8"))
        result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
        used = {name for row in (result, *result.get("frontier", ())) for name in row.get("recipe") or ()}
        files = {name: code for name, code in before.get("methods", {}).items() if name in used}
        before["methods"] = settings.get("methods", {}) | files  # a method that the result does not use may be another
        result["budget_seconds"] = float(result["budget_seconds"])
    except FileNotFoundError:
        raise ConfigurationError(f"there is no search in {directory} to continue; give --budget without +") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        remedy = "give --budget without +, which uses the trials that are stored there again"
        raise ConfigurationError(f"the result of the search in {directory} cannot be read; {remedy}") from None
    now = json.loads(json.dumps(settings, default=str))
    changed = [name for name in now if now[name] != before.get(name)]
    if changed:
        words = {"task": "the task or script, or what it was asked for", "code": "hasten itself"}  # not fingerprints
        names = ", ".join(words.get(name) or _differences(name, before.get(name), now[name]) for name in changed)
        what = f"the search in {directory} cannot be continued, since these changed: {names}"
        raise ConfigurationError(f"{what}; give --budget without + for a new search")
    return result


def _differences(name: str, before: Any, now: Any) -> str:
    """``name (2 before, 1 now)``; of dictionaries only the entries that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return ", ".join(_differences(key, before.get(key), now.get(key)) for key in changed)
    return f"{name} ({before} before, {now} now)"


def _estimate(study: Study, state: SearchState, budget: float | None, timeout: float | None) -> None:
    """Estimates the training as it is, from a few steps; sets its plan, budget and timeout, and announces them."""

    def measure(_: ProgressCallback) -> dict[str, Any]:
        limits = timeout or DEFAULT_TIMEOUT_S, study.budget.deadline()
        service = f"{FirstSteps.__module__}:{FirstSteps.__name__}"
        return estimate(study.task, study.device, study.seed, study.processes, *limits, service)

    try:
        found = study.measure_once("run_seconds", f"timing a few steps of {study.task}", measure)
    except OutOfBudgetError:
        raise _too_small(study.budget, "to time a few steps of the task") from None
    state.plan, study.step_seconds = found["plan"], found["plan"]["step"]
    _expect_run(study, state, found["seconds"], budget, timeout)
    needed, left = comparison_seconds(state.plan, is_first=True), study.budget.left_for_new()
    if needed > left and not study.store.reused:
        enough = duration_option(SPARE * (study.budget.spent + needed))
        what = f"a comparison takes about {format_duration(needed)}, and {format_duration(left)} are left"
        warnings.warn(
            f"{what}, so nothing may be compared; give about --budget {enough}", ProgressWarning, stacklevel=3
        )


def _correct_estimate(study: Study, state: SearchState, budget: float | None, timeout: float | None) -> None:
    """Takes the seconds of a run from the diagnosis, which has seen many more steps, if the first ones were unusual.

    Other programs only make steps longer: of two estimates the smaller one counts, unless the training gets slower.
    """
    seconds = state.diagnosis.get("seconds_per_run")
    if seconds and state.run_seconds and not state.diagnosis.get("drift", {}).get("slow_from"):
        seconds = min(seconds, state.run_seconds)
    if seconds and not 1 / CHANGED_ESTIMATE < seconds / (state.run_seconds or math.inf) < CHANGED_ESTIMATE:
        _expect_run(study, state, seconds, budget, timeout)


def _expect_run(
    study: Study, state: SearchState, seconds: float | None, budget: float | None, timeout: float | None
) -> None:
    """Sets what follows from the seconds of the training as it is, and announces it: budget, timeout, comparisons."""
    state.run_seconds = seconds
    if budget is None:
        study.budget.total = min(MAX_BUDGET_S, max(MIN_BUDGET_S, BUDGET_RUNS * (seconds or 0.0)))
    total = study.budget.total
    study.timeout = timeout or max(MIN_TIMEOUT_S, total * TIMEOUT_FRACTION, TIMEOUT_RUNS * (seconds or 0.0))
    state.comparison_seconds = min(max(COMPARISON_S[0], total / 12), COMPARISON_S[1])
    run_time = f"takes about {format_duration(seconds)}" if seconds else "has no known length"
    message = f"one run of the task {run_time}; the search may take {format_duration(min(total, study.budget.wall))}"
    warnings.warn(message, ProgressWarning, stacklevel=4)


def _start_of_comparisons(diagnosis: dict[str, Any], plan: dict[str, Any], budget: float) -> int:
    """The step from which a training is slower, if nearly all of it lies beyond and it is reached soon; else 0."""
    slow_from = diagnosis.get("drift", {}).get("slow_from") or 0
    is_early = slow_from <= EARLY_SHARE * (plan.get("steps") or 0)
    is_near = 2 * slow_from * plan["step"] <= REACH_SHARE * budget
    return slow_from if is_early and is_near else 0


def _takes_the_place_of_a_comparison(plan: dict[str, Any], seconds: float, left: float) -> bool:
    """Whether a script whose start takes long could not be compared any more after a diagnosis of ``seconds``."""
    needed = comparison_seconds(plan, is_first=True)
    return "check_seconds" in plan and needed <= left < needed + plan["start"] + seconds


def _diagnose(study: Study, state: SearchState, selection: MethodSelection, varied: dict[str, float]) -> None:
    """Sets ``state.diagnosis`` and ``state.candidates``, the methods worth trying, and ``study.start_step``.

    Where the budget allows no diagnosis, or that fails, all methods are candidates whose facts hold.
    """
    budget, plan = study.budget, state.plan
    seconds = min(MAX_DIAGNOSIS_S, budget.total * DIAGNOSIS_SHARE)
    with budget.reserve(budget.left()):  # keeps half of it
        deadline = budget.deadline()

    def measure(on_progress: ProgressCallback) -> Any:
        where = {"device": study.device, "processes": study.processes, "timeout": study.timeout, "seed": study.seed}
        return diagnose(study.task, budget=seconds, deadline=deadline, on_progress=on_progress, **where)

    why = ""
    if DIAGNOSIS_STEPS * plan["step"] > max(seconds, MIN_DIAGNOSIS_S):
        why = f"its {DIAGNOSIS_STEPS} steps of {plan['step']:.1f} s do not fit into the budget"
    elif _takes_the_place_of_a_comparison(plan, seconds, budget.left()):
        why = "the budget does not allow both a diagnosis and a comparison"
    else:
        try:
            state.diagnosis = study.measure_once("diagnosis", f"diagnosing {study.task}", measure)
        except OutOfBudgetError:
            why = "it did not fit into the budget"
        except RunError as error:
            why = str(error)
    if why:
        study.note("diagnosis", "diagnosis", "not made", why)
        cards = {name: method_class(name).card for name in method_names()}
        advice, not_advised = advise_without_profile(frozenset(plan["facts"]), cards)
        state.diagnosis = {"advice": advice, "not_advised": not_advised, "facts": plan["facts"]}
    study.start_step = _start_of_comparisons(state.diagnosis, plan, budget.total)
    state.candidates = candidates_for(state.diagnosis, selection, study.refusal, varied, study.processes)
    for name, why in state.candidates.not_tried:
        study.note(name, "diagnosis", "not tried", why)
