"""Unchanged training scripts, tuned by one command: how much faster the whole training is.

Each script is tuned once, then it runs unchanged and with the recipe, in turns, from its start to its end: the imports,
the evaluation and what hasten itself costs are part of both times. ``--planted``: scripts with one planted fault
(``scripts/slow.py``); hasten has to find the fault and remove it, or, where no method can, to name the line.

Figures: a script with a TensorDataset 1.5x with the same output, a Transformers classifier 1.3x, Lightning's small CNN
2x, a dense Keras network 2x, a Keras LSTM 3x. Planted: 5 of 6 faults found, 1.3x in the median, and the line named that
reads values in every step.

Bound: what the methods leave untouched. A script that spends half of its time in its own code gains at most 2x.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from _common import finish, in_turns, interval, parser, print_progress, show
from public_scripts import lines_of

HERE = Path(__file__).parent
TESTED = HERE.parent / "tests/hosts/scripts"
DATA = Path(os.environ.get("HASTEN_DATA", HERE.parents[1] / "shared/data"))
MEDIAN = 1.3  # of the planted faults


@dataclass(frozen=True)
class Script:
    """A script, what it takes, and the figure; of planted faults, the methods that remove it or the line to name."""

    command: list[str]
    figure: float = 1.0
    module: str = "torch"
    options: tuple[str, ...] = ("--budget", "2m", "--evidence", "exact")
    methods: tuple[str, ...] = ()
    line: str = ""
    same_output: bool = False  # the tuned script has to print the same


SCRIPTS = {
    "TensorDataset": Script([f"{TESTED}/tensors.py", "400"], 1.5, same_output=True),
    "Lightning CNN": Script([f"{TESTED}/lightning_cnn.py", "150"], 2.0, "lightning"),
    "Keras dense": Script([f"{TESTED}/keras_dense.py", "100"], 2.0, "keras"),
    "Keras LSTM": Script([f"{TESTED}/keras_lstm.py", "100"], 3.0, "keras"),
    "Transformers BERT": Script(
        [f"{HERE}/scripts/bert_sst2.py", f"{DATA}/sst2", "2"],
        1.3,
        "transformers",
        ("--budget", "8m", "--evidence", "precision"),
    ),
}
READERS = ("in_memory_batches", "cache_dataset", "loader_workers", "autotune_loader")
PLANTED = {
    fault: Script([f"{HERE}/scripts/slow.py", fault, epochs], methods=methods, line=line)
    for fault, epochs, methods, line in (
        ("samples", "150", READERS, ""),
        ("evaluation", "30", ("eval_no_grad",), ""),
        ("optimizer", "25", ("fused_optimizer",), ""),
        ("convolutions", "20", ("channels_last",), ""),
        ("reading", "30", (), "max(float(p.grad"),
        ("threads", "8", ("num_threads",), ""),
    )
}


def run(command: list[str], directory: Path) -> tuple[float, str]:
    """Runs a command to its end. Returns seconds and standard output; RuntimeError with the last lines if it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode not in (0, 1):  # 1: no improvement
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-400:]}")
    return time.perf_counter() - began, done.stdout


def hasten(verb: str, *options: str, script: list[str]) -> list[str]:
    return [sys.executable, "-m", "hasten", verb, "--quiet", *options, "--", *script]


def judge(name: str, script: Script, rounds: int) -> dict:
    """The numbers of a script: what the search found, and both sides of the whole training."""
    if find_spec(script.module) is None:
        return {"script": name, "skipped": "not installed"}
    command = [sys.executable, *script.command]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        print_progress(f"{name}: search")
        spent, text = run(hasten("tune", "--json", "--out", "tuned", *script.options, script=command), directory)
        found = json.loads(text)
        row = {"script": name, "found": found, "search_seconds": spent}
        if script.line:
            print_progress(f"{name}: diagnose")
            row["named"] = names_line(run(hasten("diagnose", "--json", script=command), directory)[1], script)
        if found["verdict"] != "faster":
            return row
        arms = {
            "unchanged": lambda: run(command, directory),
            "tuned": lambda: run(hasten("train", "--recipe", "tuned/recipe.toml", script=command), directory),
        }
        print_progress(f"{name}: whole trainings")
        runs = in_turns(arms, rounds)
    seconds = {arm: [one[0] for one in taken] for arm, taken in runs.items()}
    outputs = [[lines_of(one[1]) for one in taken] for taken in runs.values()]
    return row | {"seconds": seconds, "same output": outputs[0] == outputs[1]}


def names_line(text: str, script: Script) -> bool:
    """Whether the diagnosis names the line of the script that holds the planted text as one that reads values."""
    path = Path(script.command[0])
    number = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if script.line in line)
    found = [one["site"] for one in json.loads(text)["synchronizations"]]
    return any(site.endswith(f"{path.name}:{number}") for site in found)


def ratio_of(row: dict):
    seconds = row.get("seconds")
    return seconds and interval(a / b for a, b in zip(seconds["unchanged"], seconds["tuned"], strict=True))


def is_reached(script: Script, row: dict) -> bool:
    ratio = ratio_of(row)
    return bool(ratio) and ratio.median >= script.figure and (row["same output"] or not script.same_output)


def is_found(script: Script, row: dict) -> bool:
    """Whether the planted fault was named and, where a method can, removed."""
    if script.line:
        return row["named"]
    return bool(row.get("seconds")) and any(method in row["found"]["recipe"] for method in script.methods)


def cells(name: str, script: Script, row: dict) -> tuple:
    if "skipped" in row:
        return name, row["skipped"]
    found, ratio = row["found"], ratio_of(row)
    searched = f"{row['search_seconds']:.0f}"
    if not ratio:
        return name, found["verdict"], "", "", searched, "", ""
    steps, seconds = found["speedup"], row["seconds"]
    return (
        name,
        " + ".join(found["recipe"]),
        found["evidence"],
        f"{steps['median']:.2f} ({steps['low']:.2f} to {steps['high']:.2f})",
        searched,
        f"{statistics.median(seconds['unchanged']):.1f} -> {statistics.median(seconds['tuned']):.1f}",
        f"{ratio:.2f}",
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--planted", action="store_true", help="the scripts with planted faults")
    options.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join([*SCRIPTS, *PLANTED])}")
    options.add_argument("--rounds", type=int, default=3, help="whole trainings of each side")
    options = options.parse_args()
    scripts = PLANTED if options.planted else SCRIPTS
    names = options.only.split(",") if options.only else list(scripts)
    rows = {}
    for name in names:
        rows[name] = judge(name, scripts[name], options.rounds)
        print_progress("  ".join(map(str, cells(name, scripts[name], rows[name]))))
    measured = {name: row for name, row in rows.items() if "skipped" not in row}
    judged = {name: (is_found if options.planted else is_reached)(scripts[name], row) for name, row in measured.items()}
    last = "found" if options.planted else "figure"
    headings = ("script", "recipe", "evidence", "steps, by the search", "search, s", "training, s", "ratio", last)
    table = []
    for name, row in rows.items():
        goal = {True: "yes", False: "no", None: ""}[judged.get(name)]
        if not options.planted and name in judged:
            differs = scripts[name].same_output and not row.get("same output", True)
            goal = f"{scripts[name].figure}: {goal}{', other output' * differs}"
        shown = cells(name, scripts[name], row)
        table.append((*shown, *[""] * (7 - len(shown)), goal))
    show(headings, table)
    if options.planted:
        ratios = [ratio.median for row in measured.values() if (ratio := ratio_of(row))]
        median = statistics.median(ratios) if ratios else 0.0
        figure = f"{sum(judged.values())} of {len(judged)} planted faults found, {median:.2f}x in the median"
        reached = sum(judged.values()) >= len(judged) - 1 and median >= MEDIAN
    else:
        figure = f"unchanged scripts: {sum(judged.values())} of {len(judged)} reach their figure"
        reached = all(judged.values())
    return finish(options, figure, reached if judged else None, {"scripts": list(rows.values())})


if __name__ == "__main__":
    sys.exit(main())
