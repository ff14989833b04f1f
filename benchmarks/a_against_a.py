"""A/A test: compares a task with itself. An honest comparison reports no difference.

Both arms are the same task with the same recipe. The tasks differ in the length of their step, in their bottleneck and
in their recipe. The table lists tasks whose data are missing on this machine.

Figure: at least 19 of 20 comparisons report "no difference" or "unsure", and no interval misses 1 by more than 2 %.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import cycle, islice

from _common import finish, parser, print_progress, show

from hasten import ConfigurationError, RunError, compare

THINGS = (
    ("digits", "baseline"),
    ("digits", "fused_optimizer"),
    ("adult", "baseline"),
    ("digits", "loader_workers:num_workers=1"),
    ("digits", "batch_size:factor=4"),
)
MISS = 0.02
ONE_WRONG_IN = 20


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--comparisons", type=int, default=20)
    options.add_argument("--budget", type=float, default=40.0, help="seconds of a comparison at most")
    options = options.parse_args()
    done, missing = [], {}
    for number, (task, recipe) in enumerate(islice(cycle(THINGS), options.comparisons)):
        print_progress(f"comparison {number + 1} of {options.comparisons}: {task}, {recipe}")
        try:
            found = compare(task, recipe, recipe, budget=options.budget, device="cpu", seed=number)
        except (RunError, ConfigurationError) as error:
            missing[task, recipe] = str(error)
            continue
        done.append(found)
    rows = [
        (
            f"{each['task']}, {each['a']}",
            each["verdict"],
            *(f"{each['ratio'][key]:.4f}" for key in ("median", "low", "high")),
            each["blocks"],
            f"{each['system_noise']['spread_percent']:.1f}",
        )
        for each in done
    ]
    rows += [(", ".join(thing), f"not measured: {why[:60]}", "", "", "", "", "") for thing, why in missing.items()]
    show(("thing", "verdict", "ratio", "low", "high", "pairs", "spread of blocks, %"), rows)
    verdicts = Counter(each["verdict"] for each in done)
    honest = verdicts["no difference"] + verdicts["unsure"]
    misses = [max(each["ratio"]["low"] - 1, 1 - each["ratio"]["high"], 0.0) for each in done]
    print("\nverdicts: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    if not done:
        return finish(
            options, "at least 19 of 20", None, {"missing": {", ".join(thing): why for thing, why in missing.items()}}
        )
    print(
        f"the interval holds 1 in {sum(miss == 0 for miss in misses)} of {len(done)}; the worst misses it by "
        f"{100 * max(misses):.2f} %"
    )
    asked = len(done) - len(done) // ONE_WRONG_IN
    reached = honest >= asked and max(misses) <= MISS
    figure = (
        f'at least {asked} of {len(done)} say "no difference" or "unsure" and no interval misses 1 by more '
        f"than 2 %; it is {honest}"
    )
    return finish(options, figure, reached, {"comparisons": done, "missing": [", ".join(thing) for thing in missing]})


if __name__ == "__main__":
    sys.exit(main())
