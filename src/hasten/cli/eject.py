"""Writes the composed run as one flat PyTorch script that does not need hasten."""

from pathlib import Path

from hasten.cli import values
from hasten.cli.answer import Answer
from hasten.contract.errors import Failure, Refusal

HELP = "the composed run as one flat PyTorch script without hasten"


def arguments(parser) -> None:
    parser.add_argument("task", metavar="TASK")
    values.add_recipe(parser)
    parser.add_argument("--out", metavar="FILE", help="the script's file; standard output unless said")


def run(options, watch) -> Answer:
    from hasten.engine.eject import eject

    if options.out and Path(options.out).exists():
        raise Refusal(f"{options.out} exists already; choose another --out")
    source = eject(options.task, values.recipe(options), device=options.device)
    if not options.out:
        return Answer({"source": source}, lambda: source.rstrip("\n"))
    try:
        Path(options.out).write_text(source, encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {options.out}: {error.strerror}") from None
    lines = source.count("\n")
    return Answer({"out": options.out, "lines": lines}, lambda: f"{options.out}: {lines} lines; run it with: python {options.out}")
