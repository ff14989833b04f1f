"""Time to target: the recipe that ``hasten tune`` finds for each workload, against the textbook run and the strong
baseline.

Every search measures both sides: the speed of the arms in turns, the samples to the target on paired fresh seeds
(``hasten/tuning/confirm.py``). An interrupted search is continued. Each finished search becomes a directory under
``records/``; ``--table`` prints a table of them.

Figures: digits and adult 8x, fashion_mnist 4.5x, tiny_shakespeare and cifar10 3x over the textbook, imdb measured; 2x
over the strong baseline on four of them; quality inside the margin on all. The time of the search is not included, but
printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from _common import circumstances, finish, new_record, on_progress, parser, print_progress, search_directory, show, slug

import hasten
from hasten import ConfigurationError, Recipe, RunError

RECORDS = Path(__file__).parent.parent / "records"
CLAIM = "time-to-target"
FIGURES = {"digits": 8.0, "fashion_mnist": 4.5, "tiny_shakespeare": 3.0, "adult": 8.0, "cifar10": 3.0, "imdb": 1.0}
OVER_STRONG_BASELINE, ON = 2.0, 4
HEADINGS = (
    "workload",
    "textbook, s",
    "tuned, s",
    "speed-up",
    "speed-up of the whole training",
    "over strong baseline",
    "quality, before / after",
    "margin",
    "search, s",
    "recipe",
)
KEPT = ("result.json", "recipe.toml", "trials.jsonl")

README = """# Time to target: {task}

{sentence}

| | |
|---|---|
{rows}

Made on {date} by `{command}` with {versions}.

`result.json` is the result of the search, `trials.jsonl` every trial with its raw times, `recipe.toml` the recipe.
{lines}"""

LINES = """The speed-up is computed from the raw numbers, with NumPy only, by
`python records/time_to_target.py records/{directory}`.

Where the paired runs themselves took clearly less of a gain (`measured_speedup`), that is what is reported instead.
"""


def run_search(workload: str, options) -> dict:
    """Returns the result of the search, continuing an existing one."""
    print_progress(f"{workload}:")
    return hasten.tune(
        workload,
        budget=options.budget,
        out=search_directory(options.runs, workload),
        device=options.device,
        on_progress=on_progress,
    )


def record(workload: str, result: dict, directory: Path) -> Path:
    """Writes the record of one search."""
    place = new_record(RECORDS, f"{CLAIM}_{slug(workload)}")
    place.mkdir(parents=True)
    for name in KEPT:
        if (directory / name).exists():
            text = (directory / name).read_text(encoding="utf-8")
            (place / name).write_text(text.replace(f"{directory.absolute().parents[1]}/", ""), encoding="utf-8")
    about = circumstances()
    text = README.format(
        task=workload,
        sentence=result["why"][:1].upper() + result["why"][1:] + ".",
        rows="\n".join(
            f"| {heading} | {cell} |" for heading, cell in zip(HEADINGS, row_of(workload, result), strict=True)
        ),
        date=about["date"],
        # the usual settings of the workload's strong baseline
        command=f"python benchmarks/time_to_target.py {workload} --budget {result['budget_seconds']:.0f}",
        versions=", ".join(f"{name} {value}" for name, value in result["versions"].items())
        + f" on {result['machine']['cpu']}, {result['machine']['cores']} cores",
        lines=LINES.format(directory=place.name) if result["speedup"] else "",
    )
    (place / "README.md").write_text(text, encoding="utf-8")
    return place


def row_of(workload: str, result: dict) -> tuple[str, ...]:
    """Returns one row of the table, in the order of HEADINGS. Of an exact recipe the seconds are of whole trainings."""
    times, quality = result["time_to_target"] or result["training_seconds"], result["quality"]
    return (
        workload,
        f"{times['baseline']:.1f}",
        f"{times['tuned']:.1f}" if times["tuned"] else "",
        _ratio(result["speedup"]) if result["speedup"] else result["verdict"],
        _whole_training(result),
        _ratio(result["speedup_over_strong_baseline"]) if result["speedup_over_strong_baseline"] else "",
        " / ".join(f"{metric:.4g}" for metric in (quality["baseline"], quality["tuned"]) if metric is not None),
        _gate(quality),
        f"{result['search_seconds']:.0f}",
        str(Recipe(result["recipe"])),
    )


def newest_records() -> dict[str, dict]:
    """Returns the newest result of every workload that has a record."""
    found = {}
    for path in sorted(RECORDS.glob(f"*_{CLAIM}_*/result.json")):  # directory names begin with the date
        result = json.loads(path.read_text(encoding="utf-8"))
        found[result["task"]] = result
    return {name: found[name] for name in (*FIGURES, *sorted(found.keys() - FIGURES.keys())) if name in found}


def print_markdown() -> int:
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    for workload, result in newest_records().items():
        print("| " + " | ".join(row_of(workload, result)) + " |")
    return 0


def shortcomings(results: dict[str, dict], failed: dict[str, str]) -> list[str]:
    """Returns the reasons why the figures are not reached."""
    found = [f"{name}: {why}" for name, why in failed.items()]
    for name, result in results.items():
        speedup, wanted = (result["speedup"] or {}).get("median", 1.0), FIGURES.get(name, 1.0)
        if speedup < wanted:
            found.append(f"{name} is {speedup:.2f}x, not {wanted:g}x")
        if not result["quality"]["passed"]:
            found.append(f"{name} has not passed its quality gate")
    good = [
        name
        for name, result in results.items()
        if (result["speedup_over_strong_baseline"] or {}).get("median", 1.0) >= OVER_STRONG_BASELINE
    ]
    if len(good) < min(ON, len(results)):
        found.append(f"{OVER_STRONG_BASELINE}x over the strong baseline on {len(good)} workloads only")
    return found


def _whole_training(result: dict) -> str:
    """The speed-up of a whole training and its seconds before and after; "" without a recipe."""
    recommended = [row for row in result["frontier"] if row["role"] == "recommended"]
    if not recommended:
        return ""
    ratio, seconds = recommended[0].get("training_speedup") or recommended[0]["speedup"], result["training_seconds"]
    return f"{_ratio(ratio)}: {seconds['tuned']:.1f} s instead of {seconds['baseline']:.1f} s"


def _gate(quality: dict) -> str:
    if quality["margin"] is None:  # exact methods need no margin
        return "the same numbers" if quality["passed"] else ""
    return f"{quality['margin']:.2g}, {'passed' if quality['passed'] else 'not passed'}"


def _ratio(speedup: dict) -> str:
    return f"{speedup['median']:.2f}x ({speedup['low']:.2f} to {speedup['high']:.2f})"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(FIGURES)}; default: all")
    options.add_argument("--budget", help="of a search, such as 10m, or +10m to continue; default: that of the tuner")
    options.add_argument("--device", help="as for hasten")
    options.add_argument("--runs", type=Path, default=Path("runs"), help="directory of the searches")
    options.add_argument("--table", action="store_true", help="measure nothing; print the records as a markdown table")
    options.add_argument("--no-record", dest="record", action="store_false", help="leave records/ as it is")
    options = options.parse_args()
    if options.table:
        return print_markdown()
    results, failed = {}, {}
    for workload in options.workloads or FIGURES:
        try:
            results[workload] = run_search(workload, options)
        except (RunError, ConfigurationError) as error:
            failed[workload] = str(error)
            continue
        if options.record:
            place = record(workload, results[workload], search_directory(options.runs, workload))
            print_progress(f"  recorded in {place}")
    show(
        HEADINGS,
        [row_of(name, result) for name, result in results.items()]
        + [(name, f"not measured: {why}", *[""] * (len(HEADINGS) - 2)) for name, why in failed.items()],
    )
    lacking = shortcomings(results, failed)
    figure = (
        ", ".join(f"{name} {FIGURES.get(name, 1.0):g}x" for name in [*results, *failed])
        + f", {OVER_STRONG_BASELINE}x over the strong baseline on {ON}, quality inside the margin"
    )
    print("".join(f"\n{each}" for each in lacking))
    return finish(options, figure, not lacking, {"results": results, "failed": failed})


if __name__ == "__main__":
    sys.exit(main())
