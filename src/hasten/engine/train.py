"""``train``: a task under a recipe, from start to end.

This file is the verb: it reads what was asked for, refuses what cannot be, builds the run and clears up after it.
What happens on the way is in ``running.py``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

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
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.devices import pick_device
from hasten.engine.environment import environment, own_code
from hasten.engine.error_messages import explain_error
from hasten.engine.metrics import higher_is_better
from hasten.engine.observers import Observer
from hasten.engine.plan import build
from hasten.engine.registry import default_methods, make_method, make_methods, method_class
from hasten.engine.run_dir import RunDirectory
from hasten.engine.signals import catch_stop_signals
from hasten.engine.tasks import TaskRef
from hasten.engine.trainer import Trainer

NO_LENGTH = (
    "the training data tell no length: nobody knows how much is left, and a pass ends only where they end; "
    "give the dataset a __len__, and an end if it has none (itertools.islice)"
)


def train(
    task,
    recipe=None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    seed: int = 0,
    max_bad_rows: int | None = None,
    watch: ProgressCallback = no_progress,
    checkpoint_seconds: float = 30.0,
    observers: Sequence[Observer] = (),
    timeout: float = DEFAULT_TIMEOUT_S,
    begun: Callable[[str | None], None] | None = None,
) -> dict:
    """Trains a task under a recipe and says how it went.

    Args:
        task: a workload's name, ``file.py:function``, a Task, or a function that returns one.
        recipe: anything that ``Recipe.read`` takes; None is the task's own training, or the recipe of the run that is gone on with.
        out: the folder of the run; None writes nothing.
        resume: goes on with the run in ``out``, and begins where there is none; the weights and the log become those of an undisturbed
            run, bit for bit.
        device: "cpu", "cuda", "cuda:1"; None picks.
        skip_bad: so many rows that cannot be read are left out, of the training data as of the validation data, counted in "skipped_rows" and listed
            in the run's folder (skipped.jsonl). For pipelines of hasten.data; None leaves it to them.
        watch: told the progress, ten times a second at most.
        checkpoint_seconds: between two checkpoints; stretched so that saving costs less than 1 % of the run. 0: after every step.
        observers: told the records of the log, see ``engine/observers.py``.
        patience: seconds to wait for another rank that says nothing, where several train.
        begun: called, on every rank, once the folder holds this run; with the folder of the first rank.

    Returns:
        metric, metric_name, best_metric, steps, samples, seconds, split (seconds by part), seconds_to_target and samples_to_target
        (None if the target was never reached and held), reached, stopped (early), skipped (rows), chosen (settings that methods found
        while they ran, by method), evaluations, idle, out, ...

    Raises:
        Refusal: a wrong request; nothing was started.
        Failure: the run could not go on, or was asked to stop.
    """
    began = perf_counter()
    device = pick_device(device)
    with init_process_group(device, timeout) as ranks:
        device = device_of(ranks, device)
        return _train(
            task,
            recipe,
            out,
            resume,
            device,
            seed,
            max_bad_rows,
            watch,
            checkpoint_seconds,
            observers,
            began,
            begun,
            ranks,
        )


def _train(
    task,
    recipe,
    out,
    resume,
    device,
    seed,
    max_bad_rows,
    watch,
    checkpoint_seconds,
    observers,
    began,
    begun,
    ranks: ProcessGroupInfo,
) -> dict:
    ref = TaskRef.of(task)
    task = ref.load()
    if max_bad_rows is not None and not ranks.is_single_process:
        raise ConfigurationError(
            "skip_bad is for one process: several would count their bad rows apart; leave it out, or mend the data"
        )
    task = task if max_bad_rows is None else with_bad_row_limit(task, max_bad_rows)
    recipe = None if recipe is None else Recipe.coerce(recipe)
    higher_is_better(task)  # refused now rather than after the first pass
    if recipe is not None:
        check_conflicts(
            sort_methods(make_methods(recipe))
        )  # now, or what the folder has to complain about would hide it
    identity = {
        "task": task.name,
        "seed": seed,
        "batch_size": task.batch_size,
        "epochs": task.epochs,
        "skip_bad_rows": max_bad_rows,
    }
    code = ref.fingerprint() if ref.given is None else None
    if not ranks.is_single_process:
        check_ranks_agree(ranks, identity_of(task, seed, code, recipe))
    folder = on_main_process(
        ranks, lambda: None if out is None else RunDirectory(out, identity, recipe, resume, without_strategy)
    )
    recipe = folder.recipe if folder else recipe or Recipe()
    result = folder.finished() if folder else None
    if not ranks.is_single_process:
        recipe, result, out = single_process_recipe(ranks, recipe, result, out)
    if result:
        _notice(
            ranks,
            f"the run in {out} had come to its end, with {result['recipe']}: this is its result, and nothing was trained",
        )
        return result
    if folder and folder.environment.get("code", code) != code:
        _notice(
            ranks, f"{ref} has been edited since the run in {out} began; what is trained from here on is the new one"
        )
    if folder and resume and not folder.begun:
        _notice(ranks, f"there is no run in {out} to go on with; it starts anew")
    with catch_stop_signals() as asked:
        try:
            program = build(task, with_strategy(make_methods(recipe), ranks), device=device, seed=seed, ranks=ranks)
        except Exception as error:
            raise explain_error(error, "building the run", task.batch_size or 0) from error
        if program.plan.steps is None:
            _notice(ranks, NO_LENGTH)
        on_main_process(
            ranks, lambda: folder and folder.begin(environment(device) | {"code": code, "processes": ranks.world_size})
        )
        if begun:
            begun(out)
        try:
            with program.process_context():
                trainer = Trainer(program, recipe, folder, observers, watch, checkpoint_seconds, asked, began)
                try:
                    return trainer.run()
                finally:
                    trainer.close()
        except KeyboardInterrupt:
            raise RunInterrupted(
                f"stopped at once{'; go on from the newest checkpoint with --resume' if folder else ''}"
            ) from None
        finally:
            if folder:
                folder.close()


def _notice(ranks: ProcessGroupInfo, what: str) -> None:
    """Tells it once, where a user of ``train`` sees it."""
    if ranks.is_main_process:
        warnings.warn(what, HastenWarning, stacklevel=4)


def identity_of(task: Task, seed: int, code: str | None, recipe: Recipe | None) -> dict[str, str]:
    """What has to be alike on all ranks, in words."""
    validation = "none" if task.validation_data is None else "some"
    told = {
        "seed": seed,
        "task": task.name,
        "code of the task": code,
        "recipe": recipe,
        "hasten": own_code(),
        "validation data": validation,
    }
    fields = {name.replace("_", " "): getattr(task, name) for name in ("batch_size", "epochs", "evaluate_every")}
    return {what: str(value) for what, value in (told | fields).items()}


def device_of(ranks: ProcessGroupInfo, device: str) -> str:
    """The device of this rank: of several GPUs each rank of a machine gets its own.

    Raises:
        Refusal: there are not so many.
    """
    if ranks.is_single_process or not device.startswith("cuda"):
        return device
    if device != "cuda":
        raise ConfigurationError(
            f"several processes cannot share {device}; say --device cuda, and each gets a GPU of its own"
        )
    if ranks.local_rank >= (there := torch.cuda.device_count()):
        raise ConfigurationError(
            f"there are {there} GPUs for {ranks.local_rank + 1} processes or more; take fewer processes, or --device cpu"
        )
    return f"cuda:{ranks.local_rank}"


def with_strategy(methods: list[Method], ranks: ProcessGroupInfo) -> list[Method]:
    """The methods, and the usual way to train with several processes where none of them is one."""
    if ranks.is_single_process or any("parallelize" in method.card.replaces for method in methods):
        return methods
    return [*methods, *map(make_method, default_methods("distributed"))]


def without_strategy(recipe: Recipe) -> Recipe:
    """What stays of a recipe when other processes go on with its run, in another way: all but a strategy that trains what one process trains."""
    cards = {
        name: method_class(name).card for name in recipe.methods if ":" not in name
    }  # code from outside is not loaded for this
    exact = (Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH)
    return recipe.drop(
        *(name for name, card in cards.items() if "parallelize" in card.replaces and card.exactness in exact)
    )


def single_process_recipe(
    ranks: ProcessGroupInfo, recipe: Recipe, result: dict | None, out: str | Path | None
) -> tuple[Recipe, dict | None, str | None]:
    """The recipe and the result that rank 0 found in the run's folder, which is its alone; and which folder that is."""
    told = json.loads(ranks.broadcast(json.dumps([recipe.methods, result, None if out is None else str(out)]).encode()))
    return Recipe(told[0]), *told[1:]
