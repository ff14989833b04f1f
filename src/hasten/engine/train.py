"""``train``: trains a task under a recipe from start to end, in every rank of a job.

Checks the request, opens the run directory on rank 0, builds the run, and releases everything afterwards. The training
itself is in ``trainer.py``.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError, HastenWarning, RunInterrupted
from hasten.core.method import Method
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S, ProcessGroupInfo
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.distributed.process_group import check_ranks_agree, init_process_group, on_main_process
from hasten.engine.bad_rows import with_bad_row_limit
from hasten.engine.checkpoint import check_exportable
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.data_adapters import ONE_PROCESS_ONLY
from hasten.engine.devices import assign_gpus, pick_device, visible_gpus
from hasten.engine.environment import environment, source_hash
from hasten.engine.error_messages import explain_error
from hasten.engine.forward import dropout_that_is_off
from hasten.engine.memory import reset_peak_memory
from hasten.engine.metrics import higher_is_better
from hasten.engine.observers import Observer
from hasten.engine.optimizer import check_schedule_state
from hasten.engine.plan import Program, build
from hasten.engine.registry import default_methods, make_method, make_methods, method_class
from hasten.engine.run_dir import RunDirectory
from hasten.engine.signals import catch_stop_signals
from hasten.engine.tasks import TaskLike, TaskRef
from hasten.engine.trainer import Trainer

NO_LENGTH = (
    "the training data have no length: the time left is unknown, and an epoch ends only when they end; "
    "give the dataset a __len__, and an end if it has none (itertools.islice)"
)
DROPOUT_IS_OFF = (
    "{} of the model is in evaluation mode, as from_pretrained leaves it, so that its dropout does nothing; call "
    "model.train() in Task(model=), unless that is meant"
)


def train(
    task: TaskLike,
    recipe: Recipe | str | Path | Iterable[str] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    seed: int = 0,
    max_bad_rows: int | None = None,
    on_progress: ProgressCallback = no_progress,
    checkpoint_seconds: float = 30.0,
    observers: Sequence[Observer] = (),
    timeout: float = DEFAULT_TIMEOUT_S,
    begun: Callable[[str | None], None] | None = None,
    require_effect: bool = False,
) -> dict[str, Any]:
    """Trains a task under a recipe.

    Args:
        task: A workload's name, ``file.py:function``, a Task, or a function that returns one.
        recipe: Anything that ``Recipe.coerce`` accepts; None is the task's own training, or the recipe of the resumed
            run.
        out: The run directory; None writes nothing.
        resume: Resumes the run in ``out``, or starts it if there is none. Weights and log become those of an
            uninterrupted run, bit for bit.
        device: "cpu", "cuda" or "cuda:1"; None selects a GPU if there is one.
        seed: Seed of the order of the samples, the weights and all other random numbers.
        max_bad_rows: Skips up to this many unreadable rows of a hasten.data pipeline and lists them in
            ``skipped.jsonl``; None leaves the limit to the pipeline.
        on_progress: Called with the progress, at most ten times a second.
        checkpoint_seconds: Seconds between two checkpoints; longer if saving would cost more than 1 % of the run. 0:
            every step.
        observers: Functions that receive the records of the log, a list of dicts, once a second or every 1,000 steps:
            losses (step, loss) and evaluations (step, samples, metric, validation_loss).
        timeout: Seconds to wait for another rank.
        begun: Called with the run directory of rank 0, on every rank, once it holds this run.
        require_effect: Ends the run with a RunError as soon as a method is known to have no effect.

    Returns:
        metric, metric_name, best_metric, steps, samples, seconds, split (seconds by part), seconds_to_target and
        samples_to_target (None if the target was not reached and held), reached, stopped (early), skipped_rows (their
        number), tuned_settings (method -> options that it found while it ran), evaluations, no_effect ((method, reason)
        pairs), effects (method -> what shows that it acted), peak_memory_bytes (of each rank, see
        ``engine/memory.py``), out, ...

    Raises:
        ConfigurationError: The request is wrong; nearly always raised before the first step.
        RunError: The run failed, or was asked to stop.
    """
    began = perf_counter()
    if callable(observers) or not all(map(callable, observers)):
        raise ConfigurationError(f"observers={observers!r} is no list of functions; write observers=[function]")
    device = pick_device(device)
    with init_process_group(device, timeout) as ranks:
        device, ref = device_of(ranks, device), TaskRef.of(task)
        reset_peak_memory(torch.device(device))
        loaded = ref.load()
        code = ref.fingerprint() if ref.obj is None else None  # of the modules that loading has imported
        if max_bad_rows is not None:
            if not ranks.is_single_process:
                raise ConfigurationError(ONE_PROCESS_ONLY)
            loaded = with_bad_row_limit(loaded, max_bad_rows)
        chosen = None if recipe is None else Recipe.coerce(recipe)
        directory = _open_run_directory(ranks, loaded, chosen, out, resume, seed, max_bad_rows, code)
        chosen = directory.recipe if directory else chosen or Recipe()
        result = directory.finished() if directory else None
        chosen, result, out = ranks.broadcast((chosen, result, None if out is None else str(out)))  # of rank 0
        for message in _resume_warnings(directory, resume, ref, code, result, out):
            _warn(ranks, message)
        if result:
            return result
        with catch_stop_signals() as signals:
            program = _build(ranks, loaded, chosen, device, seed)
            program.effects.require_effect = require_effect
            if out is not None:
                check_exportable(program.run.unwrapped_model.state_dict())
                check_schedule_state(program.schedule)
            if program.plan.steps is None:
                _warn(ranks, NO_LENGTH)
            if name := dropout_that_is_off(program.run.unwrapped_model):
                _warn(ranks, DROPOUT_IS_OFF.format(name))
            facts = environment(device) | {"code": code, "processes": ranks.world_size}
            on_main_process(ranks, lambda: directory and directory.begin(facts))
            if begun:
                begun(None if out is None else str(Path(out).absolute()))  # nodes may have other working directories
            arguments = (program, chosen, directory, observers, on_progress, checkpoint_seconds, signals, began)
            try:
                with program.process_context(), closing(Trainer(*arguments)) as trainer:
                    return trainer.run()
            except KeyboardInterrupt:
                advice = "; resume from the newest checkpoint with --resume" if directory else ""
                raise RunInterrupted(f"stopped at once{advice}") from None
            finally:
                if directory:
                    directory.close()


def _open_run_directory(
    ranks: ProcessGroupInfo,
    task: Task,
    recipe: Recipe | None,
    out: str | Path | None,
    resume: bool,
    seed: int,
    max_bad_rows: int | None,
    code: str | None,
) -> RunDirectory | None:
    """Checks the request (ConfigurationError); the run directory on rank 0, None on other ranks or without ``out``."""
    higher_is_better(task)  # reports an unknown metric now, not after the first epoch
    if recipe is not None:
        check_conflicts(sort_methods(make_methods(recipe)))  # before the run directory can report another mismatch
    if not ranks.is_single_process:
        check_ranks_agree(ranks, run_identity(task, seed, code, recipe))
    identity = {
        "task": task.name,
        "seed": seed,
        "batch_size": task.batch_size,
        "epochs": task.epochs,
        "max_bad_rows": max_bad_rows,
    }
    arguments = (identity, recipe, resume, without_strategy)
    return on_main_process(ranks, lambda: None if out is None else RunDirectory(out, *arguments))


def _resume_warnings(
    directory: RunDirectory | None,
    resume: bool,
    ref: TaskRef,
    code: str | None,
    result: dict[str, Any] | None,
    out: str | Path | None,
) -> list[str]:
    """Warnings on resuming: the run had finished, its task was edited since, or ``out`` holds no run."""
    if result:
        return [f"the run in {out} had finished, with {result['recipe']}: this is its result, and nothing was trained"]
    if directory and directory.environment.get("code", code) != code:
        return [f"{ref} has been edited since the run in {out} began; from here on the edited code is trained"]
    if directory and resume and not directory.begun:
        return [f"there is no run in {out} to resume; it starts anew"]
    return []


def _warn(ranks: ProcessGroupInfo, message: str) -> None:
    """Warns once, on rank 0, at the line that called ``train``."""
    if ranks.is_main_process:
        warnings.warn(message, HastenWarning, stacklevel=3)


def _build(ranks: ProcessGroupInfo, task: Task, recipe: Recipe, device: str, seed: int) -> Program:
    try:
        return build(task, with_strategy(make_methods(recipe), ranks), device=device, seed=seed, ranks=ranks)
    except Exception as error:
        raise explain_error(error, "building the run", task.batch_size or 0) from error


def run_identity(task: Task, seed: int, code: str | None, recipe: Recipe | None) -> dict[str, str]:
    """Name -> value, as text, of what all ranks must have in common: task, seed, code, recipe, batch size, ..."""
    facts = {
        "seed": seed,
        "task": task.name,
        "code of the task": code,
        "recipe": recipe,
        "hasten": source_hash(),
        "validation data": "none" if task.validation_data is None else "some",
        "batch size": task.batch_size,
        "epochs": task.epochs,
        "evaluate every": task.evaluate_every,
    }
    return {name: str(value) for name, value in facts.items()}


def device_of(ranks: ProcessGroupInfo, device: str) -> str:
    """The device of this rank: for "cuda" a GPU of its own. ConfigurationError if there are too few. A collective."""
    if ranks.is_single_process or not device.startswith("cuda"):
        return device
    if device != "cuda":
        advice = "use --device cuda, and each gets a GPU of its own"
        raise ConfigurationError(f"several processes cannot share the device {device}; {advice}")
    return f"cuda:{assign_gpus(ranks.all_gather(visible_gpus()))[ranks.rank]}"


def with_strategy(methods: list[Method], ranks: ProcessGroupInfo) -> list[Method]:
    """The methods, plus the default strategy if there are several ranks and none of the methods is a strategy."""
    if ranks.is_single_process or any("parallelize" in method.card.replaces for method in methods):
        return methods
    return [*methods, *map(make_method, default_methods("distributed"))]


def without_strategy(recipe: Recipe) -> Recipe:
    """The recipe without parallelization strategies that compute the same: those may change on resume."""
    # a class outside hasten stays in the recipe without being imported
    cards = {name: method_class(name).card for name in recipe.methods if ":" not in name}
    exact = (Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH)
    return recipe.drop(*(n for n, card in cards.items() if "parallelize" in card.replaces and card.exactness in exact))
