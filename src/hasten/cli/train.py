"""Trains a task with a recipe, or as it is, and writes a run directory with log, checkpoints, weights and result.

The exit code is 1 if the task has a target and the training did not reach it.
"""

import re
import shlex
import warnings
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from hasten.cli import argument_types as types
from hasten.cli.output import CommandResult, page
from hasten.core.errors import ConfigurationError, HastenWarning, RunError, RunInterrupted
from hasten.core.progress import ProgressCallback
from hasten.launch.rank_results import in_job, is_main_process, is_managed_rank, note_run, resume_directory

HELP = "train a task, with a recipe if one is given"
CHECKPOINT_EVERY_S = 30.0
OWN_FILES = "writes and resumes its own files"
FOR_TASKS: dict[str, tuple[Any, str]] = {  # options: (default, what a script does itself)
    "out": (None, OWN_FILES),
    "resume": (False, OWN_FILES),
    "checkpoint_every": (CHECKPOINT_EVERY_S, OWN_FILES),
    "max_bad_rows": (None, "reads its own data"),
    "json": (types.DEFAULTS["json"], "prints to standard output itself"),
    "seed": (types.DEFAULTS["seed"], "sets its own seeds"),
    "max_restarts": (types.DEFAULT_RESTARTS, "starts its own processes"),
    "timeout": (types.DEFAULT_TIMEOUT_S, "starts its own processes"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten train`` to its parser."""
    parser.add_argument("task", metavar="TASK")
    types.add_recipe_options(parser)
    types.add_processes(parser, "shard every batch over N processes on this machine (data parallel)")
    types.add_max_restarts(parser)
    types.add_timeout(parser)
    parser.add_argument(
        "--out", type=types.directory, metavar="DIR", help="run directory (default: a new one, runs/train-TASK)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume the run in --out from its newest checkpoint, with its own recipe unless one is given; "
        "an empty directory starts a new run",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=types.duration,
        default=CHECKPOINT_EVERY_S,
        metavar="TIME",
        help="interval between checkpoints (default: 30s); longer if saving would take more than 1 %% of the run",
    )
    parser.add_argument(
        "--max-bad-rows",
        type=types.positive_int,
        metavar="N",
        help="skip up to N unreadable rows of the training data, and as many of the validation data, that hasten.data "
        "reads, in one process only; DIR/skipped.jsonl lists them",
    )


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Train in this process or in this rank of a job; with ``--processes`` above 1, start the job."""
    if not isinstance(options.task, str):
        return _run_script(options)
    types.check_not_in_job(options.processes)
    if options.processes > 1 and not in_job():
        from hasten.engine.registry import make_methods
        from hasten.launch.launcher import launch, preflight_check

        # A wrong option is reported before the ranks start, which takes seconds.
        preflight_check(options.task, options.processes, make_methods(types.preflight_recipe(options)))
        restarts = options.max_restarts
        return CommandResult(None, deferred=partial(launch, options.argv, options.processes, (1, 1), None, restarts))
    from hasten.engine.train import train

    _choose_directory(options)
    recipe = None  # that of a resumed run
    if options.recipe is not None or options.methods:
        recipe = types.recipe_from_options(options)
    try:
        result = train(
            options.task,
            recipe,
            **types.values(options, "out", "resume", "device", "seed", "max_bad_rows", "timeout"),
            on_progress=on_progress,
            checkpoint_seconds=options.checkpoint_every,
            begun=note_run if is_managed_rank() else None,  # pyright: ignore[reportArgumentType]  # out is set
        )
    except KeyboardInterrupt:
        error_type = RunInterrupted if is_managed_rank() else RunError  # the launcher may have interrupted its rank
        raise error_type(_how_to_resume(options)) from None
    return CommandResult(result, page("terminal", "train_answer"), code=1 if _target_missed(result) else 0)


def _run_script(options: Namespace) -> CommandResult:
    """Run the user's command with the recipe; standard input, output and exit code are those of the command."""
    from hasten.hosts.launch import check_same_script, check_train, train_script

    for name, (default, reason) in FOR_TASKS.items():
        if getattr(options, name) not in (None, default):
            raise ConfigurationError(f"--{name.replace('_', '-')} is for tasks; {options.task} {reason}; leave it out")
    recipe = types.recipe_from_options(options)
    sites, device = check_train(options.task, recipe, options.recipe, options.processes, options.device)
    check_same_script(options.task, sites)
    if options.recipe and not recipe.methods:
        warnings.warn(f"{options.recipe} has no method: the script trains as it is", HastenWarning, stacklevel=2)
    return CommandResult(None, deferred=partial(train_script, options.task, recipe, device, sites))


def _choose_directory(options: Namespace) -> None:
    """Set ``options.out`` if it is not given; in a rank that was restarted, set ``options.resume``, too."""
    resumed = resume_directory()
    if resumed:
        # it was begun before the launcher learned of it
        if is_main_process() and not Path(resumed, "environment.json").exists():
            where = f"the run directory {resumed} of this job is not on this node"
            raise RunError(f"{where}; put --out on a disk that all nodes share, and start again with --resume")
        options.out, options.resume = resumed, True
    elif options.resume and not options.out:
        raise ConfigurationError("--resume needs the run directory; add --out DIR")
    elif options.resume and is_main_process() and not Path(options.out).exists():  # only rank 0 needs the directory
        raise ConfigurationError(_missing_directory(Path(options.out)))
    options.out = options.out or _new_directory(options.task)


def _target_missed(result: dict) -> bool:
    if result["target"] is None or result["reached"]:
        return False
    best = "nothing was measured" if result["best_metric"] is None else f"the best was {result['best_metric']:.4g}"
    what = f"the target {result['target']:g} was not reached and held, {best}"
    warnings.warn(f"{what}; train longer or change the target", HastenWarning, stacklevel=2)
    return True


def _new_directory(task: str) -> str:
    """``runs/train-TASK``, or the first of ``runs/train-TASK-2``, ... that does not exist: no run is overwritten."""
    from hasten.engine.tasks import TaskRef

    name = "runs/train-" + re.sub(r"[^\w-]", "-", str(TaskRef.of(task)))
    if not Path(name).exists():
        return name
    return next(path for number in count(2) if not Path(path := f"{name}-{number}").exists())


def _missing_directory(out: Path) -> str:
    """The error message for ``--resume`` of a directory that does not exist, which may be a typing error."""
    runs = [path.parent.name for path in out.parent.glob("*/environment.json")]
    similar = [str(out.parent / name) for name in get_close_matches(out.name, runs)]
    hint = f" (did you mean {', '.join(similar)}?)" if similar else ""
    return f"there is no directory {out} to resume{hint}; for a new run remove --resume or create the directory"


def _how_to_resume(options: Namespace) -> str:
    if not Path(options.out).exists():
        return "interrupted before the run began; nothing was written"
    command = ["hasten", "train", options.task]
    command += ["--recipe", options.recipe] if options.recipe else []
    command += [word for method in options.methods for word in ("--with", method)]
    for name, default in (("seed", 0), ("device", None), ("max_bad_rows", None), ("processes", 1)):
        value = getattr(options, name)
        command += [] if value == default else [f"--{name.replace('_', '-')}", str(value)]
    return f"interrupted; to resume: {shlex.join([*command, '--out', options.out, '--resume'])}"
