"""Trains a task, with a recipe if one is given, and leaves a folder with everything about the run."""

import shlex

from hasten.cli import values
from hasten.cli.answer import Answer
from hasten.contract.errors import Failure, Refusal

HELP = "train a task, with a recipe if one is given"


def arguments(parser) -> None:
    parser.add_argument("task", metavar="TASK")
    values.add_recipe(parser)
    parser.add_argument("--out", type=values.folder, metavar="DIR", help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out where it stopped")


def run(options, watch) -> Answer:
    from hasten.engine.train import train

    if options.resume and not options.out:
        raise Refusal("--resume goes on with the run in --out DIR; say which folder that is")
    recipe = values.recipe(options)
    try:
        result = train(options.task, recipe, out=options.out, resume=options.resume, device=options.device, seed=options.seed, watch=watch)
    except KeyboardInterrupt:
        raise Failure(_how_to_go_on(options)) from None

    def page():
        from hasten.reporting.terminal import train_answer

        return train_answer(result)

    return Answer(result, page)


def _how_to_go_on(options) -> str:
    if not options.out:
        return "stopped; nothing was kept, because no --out DIR was given"
    words = ["hasten", "train", options.task]
    words += ["--recipe", options.recipe] if options.recipe else []
    words += [word for method in options.methods for word in ("--with", method)]
    words += ["--seed", str(options.seed)] if options.seed else []
    words += ["--device", options.device] if options.device else []
    return f"stopped; go on with: {shlex.join([*words, '--out', options.out, '--resume'])}"
