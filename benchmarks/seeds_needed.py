"""How many paired seeds prove a recipe that is exactly as good as the original, with and without what saves seeds?

For each workload the spread of the original over the seeds comes from the records of ``time_to_target.py``. Then
searches are simulated with the tuner's own gate, for 3, 4, 5, ... paired seeds, until four of five recipes that are as
good as the original pass. Two ways to judge them:

    before   the last evaluation of each run, against a margin of 0.5 % of the metric
    after    the mean of the last evaluations where the curves are flat there, against the larger of 0.5 % and one
             standard deviation of the original, as the search estimates it from three seeds of its own, which also
             inform about the spread

Figure: with the second way at most as many seeds on every workload.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections import defaultdict
from math import sqrt
from pathlib import Path
from typing import Any

from _common import finish, parser, print_progress, show

from hasten.tuning.gate import MIN_SEEDS, MOST_PAIRS, RELATIVE_MARGIN, final_metrics, quality_gate, resolve_margin

RECORDS = Path(__file__).resolve().parent.parent / "records"
POWER = 0.8


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--searches", type=int, default=400, help="simulated searches for each number of seeds")
    options = options.parse_args()
    rows = [row_of(name, records, options.searches) for name, records in workloads().items()]
    show(
        ("workload", "metric", "0.5 % of it", "spread of the last", "spread as judged", "seeds before", "after"),
        [
            (
                row["workload"],
                f"{row['metric']:.3f}",
                f"{RELATIVE_MARGIN * row['metric']:.4f}",
                *(f"{row[key]:.4f}" for key in ("spread_before", "spread_after")),
                *(row[key] or f"over {MOST_PAIRS}" for key in ("before", "after")),
            )
            for row in rows
        ],
    )
    more = [row["workload"] for row in rows if (row["after"] or MOST_PAIRS) > (row["before"] or MOST_PAIRS)]
    least, most = (end(row["after"] or MOST_PAIRS for row in rows) for end in (min, max))
    figure = f"as few paired seeds as before or fewer; it is {least} to {most}, and more on {', '.join(more) or 'none'}"
    return finish(options, figure, not more, {"workloads": rows})


def workloads() -> dict[str, list[dict[str, Any]]]:
    """The results that hold curves of three seeds of the original and of a recipe, by workload."""
    found = defaultdict(list)
    for file in sorted(RECORDS.glob("*time-to-target*/result.json")):
        result = json.loads(file.read_text())
        curves = result.get("curves") or {}
        if all(len(curves.get(arm) or ()) >= MIN_SEEDS for arm in ("baseline", "tuned")) and result["metric"]["target"]:
            found[file.parent.name.split("_")[2]].append(result)
    return dict(sorted(found.items()))


def row_of(name: str, records: list[dict[str, Any]], searches: int) -> dict[str, Any]:
    print_progress(name)
    last, judged = [], []  # metrics of the original, by record
    for result in records:
        arms = [{run["seed"]: _run(run) for run in result["curves"][arm]} for arm in ("baseline", "tuned")]
        metrics = [run["metric"] for run in arms[0].values()]
        margin, _ = resolve_margin(metrics, None)
        ends = list(final_metrics(arms[0], arms[1], margin, result["metric"]["higher_is_better"])[0].values())
        if metrics not in last:  # seeds that an earlier search has trained on the same machine
            last.append(metrics)
            judged.append(ends)
    metric = statistics.fmean(map(statistics.fmean, last))
    spreads = [sqrt(statistics.fmean(map(statistics.variance, each))) for each in (last, judged)]
    return {
        "workload": name,
        "searches": len(last),
        "metric": metric,
        "spread_before": spreads[0],
        "spread_after": spreads[1],
        "before": _seeds(metric, spreads[0], searches, is_after=False),
        "after": _seeds(metric, spreads[1], searches, is_after=True),
    }


def _run(run: dict[str, Any]) -> dict[str, Any]:
    return {"metric": run["points"][-1]["metric"], "evaluations": run["points"]}


def _seeds(metric: float, spread: float, searches: int, is_after: bool) -> int | None:
    """The least number of paired seeds with which POWER of the equal recipes pass; None above MOST_PAIRS."""
    return next((n for n in range(MIN_SEEDS, MOST_PAIRS + 1) if _passed(metric, spread, n, searches, is_after)), None)


def _passed(metric: float, spread: float, seeds: int, searches: int, is_after: bool) -> bool:
    draw, passed = random.Random(seeds), 0
    for _ in range(searches):
        first, before, after = ([draw.gauss(metric, spread) for _ in range(n)] for n in (MIN_SEEDS, seeds, seeds))
        margin, _ = resolve_margin(first if is_after else [metric], None)
        known = {"more_baseline": first} if is_after else {}
        arms = dict(enumerate(before)), dict(enumerate(after))
        passed += quality_gate(*arms, margin=margin, higher_is_better=True, **known).passed
    return passed >= POWER * searches


if __name__ == "__main__":
    sys.exit(main())
