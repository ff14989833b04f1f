"""Trains a task, with a recipe if one is given, and leaves a folder with everything about the run."""

import re
import shlex
import warnings
from difflib import get_close_matches
from functools import partial
from itertools import chain, count
from pathlib import Path

from hasten.cli import argument_types
from hasten.cli.output import CommandResult
from hasten.core.errors import ConfigurationError, HastenWarning, RunError, RunInterrupted
from hasten.launch.rank_results import in_job, is_main_process, is_managed_rank, note_run, resume_directory

HELP = "train a task, with a recipe if one is given"


def arguments(parser) -> None:
    parser.add_argument("task", metavar="TASK")
    argument_types.add_recipe(parser)
    argument_types.add_processes(parser, "share every batch out among N processes on this machine (data parallel)")
    argument_types.add_restarts(parser)
    argument_types.add_timeout(parser)
    parser.add_argument(
        "--out",
        type=argument_types.folder,
        metavar="DIR",
        help="the run's folder; a new one, runs/train-TASK, unless said",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out from its newest checkpoint, under its own recipe unless said; begins in an empty folder",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=argument_types.seconds,
        default=30.0,
        metavar="TIME",
        help="at most that much is trained again after a loss; 30s unless said, longer where saving would cost more than 1 %% of the run",
    )
    parser.add_argument(
        "--max-bad-rows",
        type=argument_types.count,
        metavar="N",
        help="leave out up to N rows that cannot be read, of data that hasten.data reads; skipped.jsonl in DIR lists them",
    )


def run(options, watch) -> CommandResult:
    """Exit code 1 where the task has a target that the training did not reach."""
    if options.processes > 1 and not in_job():
        from hasten.engine.registry import make_methods
        from hasten.launch.launcher import launch, preflight_check

        methods = make_methods(
            argument_types.recipe_of_ranks(options)
        )  # a wrong word need not wait until all ranks have started
        preflight_check(options.task, options.processes, methods)
        return CommandResult(
            None, deferred=partial(launch, options.words, options.processes, max_restarts=options.restarts)
        )
    from hasten.engine.train import train

    if again := resume_directory():
        options.out, options.resume = again, True
    elif options.resume and not options.out:
        raise ConfigurationError("--resume goes on with the run in --out DIR; say which folder that is")
    elif options.resume and is_main_process() and not Path(options.out).exists():  # rank 0 has the folder
        raise ConfigurationError(_no_such_folder(Path(options.out)))
    recipe = argument_types.recipe(options) if options.recipe is not None or options.methods else None
    options.out = options.out or _new_folder(options.task)
    try:
        result = train(
            options.task,
            recipe,
            out=options.out,
            resume=options.resume,
            device=options.device,
            seed=options.seed,
            max_bad_rows=options.max_bad_rows,
            watch=watch,
            checkpoint_seconds=options.checkpoint_every,
            timeout=options.timeout,
            begun=note_run if is_managed_rank() else None,
        )
    except KeyboardInterrupt:
        raise (RunInterrupted if is_managed_rank() else RunError)(
            _how_to_go_on(options)
        ) from None  # who started a rank may end it

    def page():
        from hasten.reporting.terminal import train_answer

        return train_answer(result)

    missed = result["target"] is not None and not result["reached"]
    if missed:
        best = "nothing was measured" if result["best_metric"] is None else f"the best was {result['best_metric']:.4g}"
        warnings.warn(
            f"the target {result['target']:g} was not reached and held, {best}; train for longer or lower it",
            HastenWarning,
            stacklevel=2,
        )
    return CommandResult(result, page, code=1 if missed else 0)


def _new_folder(task: str) -> str:
    """``runs/train-TASK``, or the first of ``runs/train-TASK-2``, ... that is not there yet: no run is written over."""
    from hasten.engine.tasks import TaskRef

    first = "runs/train-" + re.sub(r"[^\w-]", "-", str(TaskRef.of(task)))
    return next(
        name for name in chain([first], (f"{first}-{number}" for number in count(2))) if not Path(name).exists()
    )


def _no_such_folder(out: Path) -> str:
    """A mistyped folder must not become a training from the start that nobody sees before it should be over."""
    runs = [found.parent.name for found in out.parent.glob("*/environment.json")]
    close = [str(out.parent / name) for name in get_close_matches(out.name, runs)]
    hint = f" (did you mean {', '.join(close)}?)" if close else ""
    return f"there is no folder {out} to go on with{hint}; to begin, leave --resume out, or make the folder first"


def _how_to_go_on(options) -> str:
    if not Path(options.out).exists():
        return "stopped before the run began; nothing was written"
    words = ["hasten", "train", options.task]
    words += ["--recipe", options.recipe] if options.recipe else []
    words += [word for method in options.methods for word in ("--with", method)]
    words += ["--seed", str(options.seed)] if options.seed else []
    words += ["--device", options.device] if options.device else []
    words += ["--max-bad-rows", str(options.max_bad_rows)] if options.max_bad_rows else []
    words += ["--processes", str(options.processes)] if options.processes > 1 else []
    return f"stopped; go on with: {shlex.join([*words, '--out', options.out, '--resume'])}"
