"""Harmful methods offered to the tuner as if they were speed-ups (``_harmful.py``).

Each runs in a search of its own, ``hasten tune TASK --with ./_harmful.py:Class``, once for every exactness class that
it may claim, and really makes training faster. All searches share a directory, so the original is measured once. A
harmless control method is offered, too, and must be accepted: a tuner that refuses everything is useless. A search on
a script takes ``--script``; ``scripts/slow.py samples`` reads its samples slowly, which the bait makes fast.

Figure: every harmful method is refused with a reason; the harmless control method is accepted.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from _common import finish, on_progress, parser, print_progress, show
from _harmful import HARMFUL

import hasten
from hasten import RunError

FILE = Path(__file__).parent / "_harmful.py"
OTHER_METHODS = ("fused_optimizer",)  # the only other method that is tried: the search is about the offered method


def verdict_on(name: str, options) -> dict:
    """The verdict on one method."""
    method = f"{FILE}:{name}"
    try:
        result = hasten.tune(
            hasten.script(options.script) if options.script else options.task,
            budget=options.budget,
            methods=OTHER_METHODS,
            extra=[method],
            out=options.out,
            device="cpu",
            on_progress=on_progress,
        )
    except RunError as error:
        return {"name": name, "accepted": None, "why": f"the search failed: {error}", "trials": []}
    trials = [trial for trial in result["trials"] if name in trial["what"]]
    why = trials[-1]["why"] if trials else "it was not tried"
    return {"name": name, "accepted": method in result["recipe"], "why": why, "trials": trials}


def _measured(answer: dict) -> bool:
    """Returns whether the method lost in a trial; one that the budget never reached was not refused."""
    return bool(answer["trials"]) and answer["trials"][-1]["verdict"] in ("refused", "no gain", "slower")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help="of the methods; default: all")
    options.add_argument("--task", default="digits")
    options.add_argument(
        "--script", metavar="COMMAND", help="that trains, such as 'python train.py', in place of a task"
    )
    options.add_argument("--budget", type=float, default=None, help="seconds of a search; default: that of the tuner")
    options.add_argument("--out", type=Path, default=Path("runs/harmful"), help="directory that the searches share")
    options = options.parse_args()
    answers = []
    for name in options.names or ["Honest", *HARMFUL]:
        print_progress(f"offering {name}")
        answers.append(verdict_on(name, options))
    verdicts = {True: "accepted", False: "refused", None: "failed"}
    show(
        ("method", "verdict", "why"),
        [(each["name"], verdicts[each["accepted"]], textwrap.shorten(each["why"], 120)) for each in answers],
    )

    harmful = [each for each in answers if each["name"] in HARMFUL]
    refused = sum(each["accepted"] is False and _measured(each) for each in harmful)
    control_accepted = all(each["accepted"] for each in answers if each["name"] not in HARMFUL)
    if len(harmful) < len(answers):
        print(f"\nthe harmless control method is {'accepted' if control_accepted else 'NOT accepted'}")
    figure = f"{len(harmful)} of {len(harmful)} refused with a reason; it is {refused}"
    return finish(options, figure, refused == len(harmful) and control_accepted, {"fates": answers})


if __name__ == "__main__":
    sys.exit(main())
