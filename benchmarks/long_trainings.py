"""Long trainings: workloads with 200 times their epochs, half a day each, tuned within 3 minutes.

Two searches for exact recipes on each: one of ``--budget`` seconds, one so long that it tries all candidates. Their
recipes are then compared with each other and with the task as it is, step against step, in interleaved blocks. With
--out what was done is stored step by step, and a later call continues.

Figure: the short search finds an exact recipe within its budget on every workload; its steps are at least 90 % as fast
as those of the long search's recipe.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from _common import finish, parser, print_line, print_progress, show

from hasten.benchmarking.compare import run_interleaved
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef

TASKS = Path(__file__).parent / "budget_tasks.py"
WORKLOADS = ("fashion_mnist", "tiny_shakespeare", "adult", "imdb")
LEAST = 0.9  # of the speed of the long search's recipe
MAX_OVER = 0.1, 15.0  # of the budget, or seconds


def main() -> int:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", default=WORKLOADS, metavar="WORKLOAD")
    options.add_argument("--budget", type=int, default=180, help="seconds of the short search")
    options.add_argument("--full", type=int, default=900, help="seconds of the long search")
    options.add_argument("--compare", type=int, default=60, help="seconds of each comparison")
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    options.add_argument("--out", type=Path, help="file of JSON lines: what was done, which is not repeated")
    options = options.parse_args()
    done, until = stored(options.out), monotonic() + options.seconds
    for workload in options.workloads:
        for step, make in steps(options).items():
            if (workload, step) not in done and monotonic() < until:
                print_progress(f"{workload}: {step}")
                row = done[workload, step] = {"workload": workload, "step": step, **make(workload, done)}
                print_progress(f"  {row['text']}")
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return report(options, done)


def stored(file: Path | None) -> dict[tuple[str, str], dict]:
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {(row["workload"], row["step"]): row for row in map(json.loads, lines)}


def steps(options) -> dict[str, Callable[[str, dict], dict]]:
    """What is done for a workload, in this order, from what was done before."""

    def compared(workload: str, a: str, b: str) -> dict:
        ref = TaskRef.of(f"{TASKS}:{workload}_long")
        recipes = [Recipe.parse(text.split(" + ")) if text else Recipe() for text in (a, b)]
        if recipes[0] == recipes[1]:
            return {"ratio": {"median": 1.0, "low": 1.0, "high": 1.0}, "text": "the same recipe"}
        ratio = run_interleaved(ref, *recipes, budget=options.compare, device="cpu").ratio
        return {"ratio": ratio.to_json(), "text": str(ratio)}

    return {
        "short": lambda workload, done: search(workload, options.budget),
        "full": lambda workload, done: search(workload, options.full),
        "speedup": lambda workload, done: compared(workload, "", done[workload, "short"]["recipe"]),
        "share": lambda workload, done: compared(
            workload, done[workload, "full"]["recipe"], done[workload, "short"]["recipe"]
        ),
    }


def search(workload: str, budget: int) -> dict:
    """A search by the command line: the recipe as text, what it claims, and how long it took."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "hasten", "tune", f"{TASKS}:{workload}_long", "--json", "--quiet"]
        command += ["--evidence", "exact", "--budget", f"{budget}s", "--out", directory]
        began = monotonic()
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        seconds = monotonic() - began
        result = json.loads(process.stdout)
    found = Recipe(result.get("recipe") or {})
    claim = result.get("speedup") or {"median": 1.0, "low": 1.0, "high": 1.0}
    text = f"{found or 'no recipe'} in {seconds:.0f} s, {claim['median']:.2f}x"
    return {"recipe": str(found) if found else "", "claim": claim, "seconds": seconds, "budget": budget, "text": text}


def report(options, done: dict) -> int:
    rows, reached = [], True
    for workload in options.workloads:
        short, full, speedup, share = (done.get((workload, step)) for step in ("short", "full", "speedup", "share"))
        if not (short and full and speedup and share):
            reached = None
            continue
        late = short["seconds"] - short["budget"]
        if (
            not short["recipe"]
            or share["ratio"]["median"] < LEAST
            or late > max(MAX_OVER[0] * short["budget"], MAX_OVER[1])
        ):
            reached = False if reached is not None else None
        cells = (between(part["ratio"]) for part in (speedup, share))
        rows.append((workload, f"{short['seconds']:.0f} s", between(short["claim"]), *cells, short["recipe"]))
        rows.append(("", f"{full['seconds']:.0f} s", between(full["claim"]), "", "", full["recipe"]))
    show(("workload", "search", "it claims", "measured again", "of the long search's speed", "recipe"), rows)
    print_line()
    figure = "an exact recipe within the budget, at least 90 % as fast a step as that of a long search"
    return finish(options, figure, reached, {"done": list(done.values())})


def between(ratio: dict) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
