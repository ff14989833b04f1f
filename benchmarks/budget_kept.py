"""Budget kept: ``hasten tune --budget`` on tasks that make it hard, from trainings of milliseconds to 12 hours.

Each search is the real command in a process of its own. An answer is a verdict, or the line that says which budget the
task needs. With --out the searches are stored one by one, and a later call continues: the whole takes 90 minutes.

Figure: every search answers, and takes at most 10 % or 15 s longer than its budget.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

from _common import finish, parser, print_line, print_progress, show

TASKS = Path(__file__).parent / "budget_tasks.py"
METHODS = {"hanging_method": "Hang", "slow_method": "Slower"}  # offered with --with; the task is digits
WORKLOADS = ("digits", "fashion_mnist", "adult", "tiny_shakespeare")
NAMES = (
    *WORKLOADS,
    *(f"{name}_long" for name in WORKLOADS[1:]),
    "twelve_hours",
    "step_of_5_s",
    "step_of_40_s",
    "long_construction",
    "long_evaluation",
    "unknown_evaluation",
    *METHODS,
    "no_validation",
    "constant_metric",
    "whole_batches",
    "stream_of_batches",
    "tiny",
)
BUDGETS = (15, 60, 180)  # seconds
MAX_OVER = 0.1, 15.0  # of the budget, or seconds
PATIENCE = 120.0  # seconds beyond the budget, after which a search is ended


def main() -> int:
    options = parser(__doc__)
    options.add_argument("tasks", nargs="*", default=NAMES, metavar="TASK", help="only these tasks")
    options.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, metavar="SECONDS")
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no further search after so long")
    options.add_argument("--out", type=Path, help="file of JSON lines: the searches done, which are not repeated")
    options = options.parse_args()
    pairs = [(task, budget) for budget in options.budgets for task in options.tasks]
    done, began = stored(options.out), monotonic()
    for task, budget in pairs:
        if monotonic() - began > options.seconds:
            break
        if (task, budget) not in done:
            print_progress(f"{task}, {budget} s")
            row = done[task, budget] = search(task, budget)
            print_progress(f"  {row['over']:+.1f} s: {row['answer']}")
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return report(options, [done[pair] for pair in pairs if pair in done], len(pairs))


def stored(file: Path | None) -> dict[tuple[str, int], dict]:
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {(row["task"], row["budget"]): row for row in map(json.loads, lines)}


def search(task: str, budget: int) -> dict:
    """One search, by the command line, in a directory of its own."""
    name = "digits" if task in METHODS else task
    what = name if name in WORKLOADS else f"{TASKS}:{name}"
    command = [sys.executable, "-m", "hasten", "tune", what, "--budget", f"{budget}s", "--json", "--quiet"]
    if task in METHODS:
        command += ["--with", f"{TASKS}:{METHODS[task]}"]
    with tempfile.TemporaryDirectory() as directory:
        began = monotonic()
        process = subprocess.Popen(
            [*command, "--out", directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            text, errors = process.communicate(timeout=budget + PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, errors = process.communicate()
        seconds = monotonic() - began
    row = {"task": task, "budget": budget, "seconds": seconds, "over": seconds - budget, "code": process.returncode}
    return row | {"load": os.getloadavg()[0]} | answer_of(text, errors)


def answer_of(text: str, errors: str) -> dict:
    """``answer`` in words, and ``answered``: a verdict, or an error that names the budget that is needed."""
    try:
        result = json.loads(text)
    except ValueError:
        return {"answered": False, "answer": (errors.splitlines() or ["nothing"])[-1]}
    if "verdict" not in result:
        return {"answered": "--budget" in result["error"], "answer": result["error"]}
    speedup, evidence = result["speedup"] or {}, result["evidence"]
    faster = f"{speedup['median']:.2f}x, {evidence}" if speedup else result["verdict"]
    return {"answered": True, "answer": faster, "recipe": result["recipe"], "why": result["why"]}


def is_kept(row: dict) -> bool:
    return row["answered"] and row["over"] <= max(MAX_OVER[0] * row["budget"], MAX_OVER[1])


def report(options, rows: list[dict], asked: int) -> int:
    show(
        ("task", "budget", "over", "load", "answer"),
        (
            (row["task"], f"{row['budget']} s", f"{row['over']:+.1f} s", f"{row['load']:.1f}", row["answer"][:80])
            for row in rows
        ),
    )
    print_line()
    kept, complete = sum(map(is_kept, rows)), len(rows) == asked
    print_line(
        f"{sum(row['answered'] for row in rows)} of {len(rows)} answered; {kept} of {len(rows)} kept their budget"
    )
    if not complete:
        print_line(f"{asked - len(rows)} of {asked} were not run")
    figure = "every search answers, at most 10 % or 15 s over its budget"
    return finish(options, figure, complete and kept == len(rows), {"searches": rows})


if __name__ == "__main__":
    sys.exit(main())
