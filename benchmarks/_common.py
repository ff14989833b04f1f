"""Shared by the benchmarks: interleaved turns, intervals, tables, the verdict on a figure, and its record."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import string
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# packages whose versions every record lists if they are installed
PEERS = ("pytorch-ignite", "accelerate", "lightning", "deepspeed", "ray", "mosaicml", "loadtune", "scipy")
MISS = 0.05  # probability that an interval misses the median

README = """# {title}: {reached}

{figure}.

```
{printed}
```

Made on {date} by `{command}` with {versions} on {hardware}.

`result.json` holds the raw numbers, from which `benchmarks/{script}` makes what stands above: medians, and in brackets
where they lie with 95 % certainty by the sign test (below six rounds: the whole range). Where arms took turns,
ratios and differences are taken round by round.
"""

_printed: list[str] = []  # lines printed by this run so far


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % confidence interval."""

    median: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def interval(values: Iterable[float]) -> Interval:
    """Returns the median with the interval of the sign test, which assumes no distribution and is robust against
    bursts.

    With fewer than six values no interval reaches 95 %; the whole range is returned.
    """
    ordered = sorted(values)
    # binomial tail in units of 2**-count, as integers: floats overflow at about a thousand values
    count, left_out, tail = (len(ordered), 0, 1)
    while 2 * tail / 2**count <= MISS:
        left_out += 1
        tail += math.comb(count, left_out)
    low = max(left_out - 1, 0)
    return Interval(statistics.median(ordered), ordered[low], ordered[count - 1 - low])


def in_turns(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list]:
    """Returns what each arm returned, by round. Every other round runs in reverse order, so that drift affects all arms
    alike.
    """
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms) if number % 2 == 0 else reversed(arms):
            print_progress(f"round {number + 1} of {rounds}: {name}")
            taken[name].append(arms[name]())
    return taken


def installed(module: str) -> str | None:
    """Returns None if the module can be imported, otherwise the reason to print in its row."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        return "not installed" if missing == module.partition(".")[0] else f"does not import: {missing} is missing"
    except Exception as error:
        return f"does not import: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return None


def print_progress(text: str) -> None:
    """Prints progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def on_progress(what: str, done: float, seconds_left: float | None = None) -> None:
    """Prints progress of the library's functions: one line per change."""
    if what != on_progress.last:
        on_progress.last = what
        print_progress(f"  {done:4.0%} {what}")


on_progress.last = None


def print_line(line: str = "") -> None:
    """Prints a line of the result and adds it to the record."""
    print(line)
    _printed.append(line)


def show(headings: tuple[str, ...], rows: Iterable[tuple]) -> None:
    """Prints a plain-text table."""
    lines = [headings, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for number, line in enumerate(lines):
        print_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print_line("  ".join("-" * width for width in widths))


def parser(doc: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="write the raw numbers there; into a directory (records), as a record"
    )
    return made


def finish(options: argparse.Namespace, figure: str, reached: bool | None, numbers: dict) -> int:
    """Prints whether the figure was reached, writes the record and returns the exit code.

    ``reached=None``: it could not be measured.
    """
    outcomes = {True: "reached", False: "NOT reached", None: "not measured"}[reached]
    print(f"\nFigure: {figure}: {outcomes}.")
    if options.json:
        result = {"figure": figure, "reached": reached, **circumstances(), **plain(numbers)}
        place = record(options.json, result, outcomes) if options.json.is_dir() else written(options.json, result)
        print(f"The raw numbers are in {place}.")
    return 0 if reached else 1


def record(records: Path, result: dict, summary: str) -> Path:
    """Writes the raw numbers and the printed lines into a new directory of ``records``."""
    script, here = Path(sys.argv[0]), result["environment"]
    place = new_record(records, slug(script.stem))
    written(place / "result.json", result)
    text = README.format(
        title=script.stem.replace("_", " ").capitalize(),
        reached=summary,
        figure=result["figure"],
        printed="\n".join(_printed).strip(),
        date=result["date"],
        command=result["command"],
        script=script.name,
        hardware=f"{here['gpu']}, {here['cpu']}" if "gpu" in here else f"{here['cpu']}, {here['cores']} cores",
        versions=", ".join(f"{name} {here[name]}" for name in ("hasten", "python", "torch", "numpy")),
    )
    (place / "README.md").write_text(text, encoding="utf-8")
    return place


def new_record(records: Path, claim: str) -> Path:
    """Returns a new directory ``DATE_CLAIM_MACHINE``; its name sorts after those of earlier records of the same day."""
    names = (
        f"{time.strftime('%Y-%m-%d')}{letter}_{claim}_{machine_name()}" for letter in ("", *string.ascii_lowercase[1:])
    )
    return next(records / name for name in names if not (records / name).exists())


def written(path: Path, result: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def circumstances() -> dict:
    """Returns date, command, machine and versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "environment": machine(),
        "peers": {name: found for name in PEERS if (found := _version(name))},
    }


def machine() -> dict:
    """Returns versions and machine, with its GPU if PyTorch can use one."""
    import torch

    from hasten.engine.environment import environment

    return environment("cuda" if torch.cuda.is_available() else "cpu")


def machine_name() -> str:
    """The machine as a part of a directory name, such as ``intel-xeon-processor-2-cores`` or ``nvidia-h200``."""
    here = machine()
    if "gpu" in here:
        return slug(here["gpu"].lower())
    cpu = here["cpu"].lower().partition("@")[0].replace("(r)", "").replace("(tm)", "")
    return "-".join([*slug(cpu).split("-")[:4], str(here["cores"]), "cores"])


def slug(task: str) -> str:
    """Returns a task's name as a part of a directory name: ``tiny-shakespeare``, ``mine-py-task``."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in task.rpartition("/")[2]).split())


def search_directory(runs: Path, task: str) -> Path:
    """Returns the search directory of a task. Benchmarks share it, so a trial that one has measured is not repeated."""
    return runs / f"tune-{slug(task)}"


def plain(thing):
    """Converts intervals and tuples to JSON types."""
    if isinstance(thing, Interval):
        return asdict(thing)
    if isinstance(thing, dict):
        return {str(key): plain(value) for key, value in thing.items()}
    return [plain(each) for each in thing] if isinstance(thing, (list, tuple)) else thing


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
