"""``hasten tune`` for two processes on a slow network, 200 Mbit/s and 5 ms each way, against DistributedDataParallel.

Runs ``hasten tune`` on ``slow_network_task.py`` in a namespace whose processes communicate through
``network_emulation.py``. The tuner gets no hint: it measures the original (ddp), tries its methods and a single
process, and confirms the winner on fresh seeds. Each emulated machine has one core. The link is measured, too (``hasten
bench-comm``).

Figure: a recipe at least 3x faster in time to target than ddp, quality inside the margin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import finish, parser, print_line, print_progress, show

WANTED = 3.0
MEGABITS, MILLISECONDS = "200", "5"
HERE = Path(__file__).parent
TASK = f"{HERE / 'slow_network_task.py'}:task"


def run_on_slow_network(*argv: str) -> dict:
    """Runs a command on the emulated network and returns its JSON result."""
    command = [
        sys.executable,
        str(HERE / "network_emulation.py"),
        MEGABITS,
        MILLISECONDS,
        sys.executable,
        "-m",
        "hasten",
        *argv,
        "--json",
    ]
    of_one_core = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, env=of_one_core).stdout)
    if "error" in answer:
        sys.exit(f"{' '.join(argv)}: {answer['error']}")
    return answer


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--budget", default="25m", help="of the search")
    options = options.parse_args()
    print_progress("measuring the cable")
    reduce = run_on_slow_network("network", "--processes", "2")["collectives"]["all-reduce"]
    print_progress("searching")
    with tempfile.TemporaryDirectory() as directory:
        found = run_on_slow_network("tune", TASK, "--processes", "2", "--budget", options.budget, "--out", directory)
    return print_result(options, reduce, found)


def print_result(options, reduce: dict, found: dict) -> int:
    print_line(
        f"An all-reduce of two processes on this cable: {1e3 * reduce['latency']:.0f} ms + "
        f""
        f"{reduce['bandwidth'] / 1e6:.0f} MB/s.\n"
    )
    rows = [
        (
            trial["what"],
            trial["stage"],
            trial["verdict"],
            f"{trial['ratio']['median']:.2f}x" if trial.get("ratio") else "",
        )
        for trial in found["trials"]
        if trial["verdict"] != "not tried"
    ]
    show(("tried", "when", "verdict", "ratio"), rows)
    speedup, quality = found.get("speedup") or {"median": 1.0, "low": 1.0, "high": 1.0}, found.get("quality") or {}
    print_line(f"\nverdict: {found['verdict']}; recipe: {found['recipe']}; quality: {quality}")
    figure = (
        f"at least {WANTED:g}x as fast as ddp to the target, quality inside the margin; it is "
        f""
        f"{speedup['median']:.2f}x ({speedup['low']:.2f} to {speedup['high']:.2f})"
    )
    reached = found["verdict"] == "faster" and bool(quality.get("passed")) and speedup["median"] >= WANTED
    return finish(options, figure, reached, {"all-reduce": reduce, "result": found})


if __name__ == "__main__":
    sys.exit(main())
