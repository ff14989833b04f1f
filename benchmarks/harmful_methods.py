"""Harmful methods offered to the tuner as if they were speed-ups (``harmful.py``).

Each runs in a search of its own, ``hasten tune TASK --with ./harmful.py:Class``, once for every exactness class that it
may claim, and really makes training faster. All searches share a folder, so the original is measured once. One honest
method is offered, too, and must be accepted: a tuner that refuses everything is useless.

Figure: every harmful method is refused with a reason; the honest method is accepted.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from _common import finish, parser, print_progress, show, watch
from harmful import HARMFUL

from hasten import RunError, tune

FILE = Path(__file__).parent / "harmful.py"
OTHER_METHODS = ("fused_optimizer",)  # the only other method that is tried: the search is about the offered method


def verdict_on(name: str, options) -> dict:
    """The verdict on one method."""
    method = f"{FILE}:{name}"
    try:
        result = tune(
            options.task,
            budget=options.budget,
            methods=OTHER_METHODS,
            extra=[method],
            out=options.out,
            device="cpu",
            watch=watch,
        )
    except RunError as error:
        return {"name": name, "accepted": None, "why": f"the search failed: {error}", "trials": []}
    fate = result["verdict_on"][0]
    return {
        "name": name,
        "accepted": fate["accepted"],
        "why": fate["why"],
        "trials": [trial for trial in result["trials"] if name in trial["what"]],
    }


def _measured(fate: dict) -> bool:
    """Returns whether the method lost in a trial; one that the budget never reached was not refused."""
    return bool(fate["trials"]) and fate["trials"][-1]["verdict"] in ("refused", "no gain", "slower")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help="of the methods; default: all")
    options.add_argument("--task", default="digits")
    options.add_argument("--budget", type=float, default=None, help="seconds of a search; default: that of the tuner")
    options.add_argument("--out", type=Path, default=Path("runs/harmful"), help="folder that the searches share")
    options = options.parse_args()
    fates = []
    for name in options.names or ["Honest", *HARMFUL]:
        print_progress(f"offering {name}")
        fates.append(verdict_on(name, options))
    verdicts = {True: "taken", False: "refused", None: "failed"}
    show(
        ("method", "fate", "why"),
        [(each["name"], verdicts[each["accepted"]], textwrap.shorten(each["why"], 120)) for each in fates],
    )

    harmful = [each for each in fates if each["name"] in HARMFUL]
    refused = sum(each["accepted"] is False and _measured(each) for each in harmful)
    honest = all(each["accepted"] for each in fates if each["name"] not in HARMFUL)
    print(f"\nthe honest bait is {'taken' if honest else 'NOT taken'}" if len(harmful) < len(fates) else "")
    figure = f"{len(harmful)} of {len(harmful)} refused with a reason; it is {refused}"
    return finish(options, figure, refused == len(harmful) and honest, {"fates": fates})


if __name__ == "__main__":
    sys.exit(main())
