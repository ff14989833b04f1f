"""Claims of searches, repeated: the speed-ups that ``hasten tune`` predicts for foreign trainings, and those measured.

Four of them: a character GPT (nanoGPT), an LSTM language model and an image classifier with a schedule per epoch
(pytorch/examples), from checkouts in DIR, and a tabular network written as tutorials write it. Each is searched with
``--budget``, then trained from start to end, unchanged and with the recipe, in turns, with seeds that the search has
not seen where the script takes one. The time and the last metric are those of the whole training.

Figure: the ratio that was measured is not below the interval that was claimed, in every search that claims one.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from _common import finish, in_turns, interval, parser, print_progress, show
from public_data import mnist_at
from public_scripts import SCRIPTS, Script, copy_of
from tuned_public import NANOGPT
from tuned_scripts import DATA, HERE, hasten, run

FRESH = 7001  # the first seed of a repetition
TABLE = f"{HERE}/scripts/adult_table.py {DATA}/adult 20"
LSTM = "main.py --data data/tiny --epochs 10"
IMAGES = {"command": "main.py --no-accel --epochs 3", "prepare": mnist_at("../data", 60_000, 10_000)}


@dataclass(frozen=True)
class Training:
    """A script, its last metric as a pattern, the argument that sets its seed, and those that ``--vary`` may change."""

    script: Script
    metric: str
    seed: str = ""
    vary: str = ""


TRAININGS = {
    "character GPT": Training(
        replace(SCRIPTS["nanoGPT"], command=f"{NANOGPT} --learning_rate=1e-3"),  # that of its configuration
        r"val loss ([\d.]+)",
        vary="max_iters,lr_decay_iters,learning_rate",
    ),
    "LSTM language model": Training(
        replace(SCRIPTS["word LSTM"], command=LSTM), r"test loss +([\d.]+)", "--seed {}", "epochs,lr"
    ),
    "image classifier": Training(replace(SCRIPTS["mnist"], **IMAGES), r"Accuracy: (\d+)/", "--seed {}", "epochs,lr"),
    "tabular network": Training(Script("", TABLE, ("Adam",), ("Network",)), r"accuracy ([\d.]+)", "{}"),
}


def judge(name: str, training: Training, checkouts: Path, options) -> dict:
    """The result of the search, and both sides of the whole training: seconds and last metric of each round."""
    script, settings = training.script, ["--json", "--budget", options.budget, "--out", "tuned"]
    if options.evidence:
        settings += ["--evidence", options.evidence]
    if options.vary and training.vary:
        settings += ["--vary", training.vary]
    command = [sys.executable, *script.command.split()]
    with tempfile.TemporaryDirectory() as place:
        directory = copy_of(script, checkouts, Path(place)) if script.directory else Path(place)
        print_progress(f"{name}: search")
        spent, text = run(hasten("tune", *settings, script=command), directory)
        found = json.loads(text)
        row = {"training": name, "command": script.command, "found": found, "seconds_of_search": spent}
        if "error" in found or found["verdict"] != "faster" or not options.rounds:
            return row

        def repeated(*recipe: str):
            """A function that runs the training with the next fresh seed."""
            seeds = iter(range(FRESH, FRESH + 100))

            def once() -> dict:
                arguments = [*command, *training.seed.format(next(seeds)).split()]
                seconds, output = run(hasten("train", *recipe, script=arguments) if recipe else arguments, directory)
                return {"seconds": seconds, "metric": float(re.findall(training.metric, output)[-1])}

            return once

        arms = {"unchanged": repeated(), "tuned": repeated("--recipe", "tuned/recipe.toml")}
        return row | {"runs": in_turns(arms, options.rounds)}


def claimed(found: dict) -> tuple[float, float, float] | None:
    """The predicted speed-up of the whole training: median, low, high; None where its length is unknown."""
    seconds = found.get("training_seconds")
    if found.get("verdict") != "faster" or not seconds:
        return None
    return tuple(seconds["baseline"] / seconds[key] for key in ("tuned", "high", "low"))


def measured(row: dict):
    """The ratio of each pair of whole trainings, as an interval."""
    unchanged, tuned = row["runs"]["unchanged"], row["runs"]["tuned"]
    return interval(a["seconds"] / b["seconds"] for a, b in zip(unchanged, tuned, strict=True))


def is_kept(row: dict) -> bool:
    """Whether the median of the repetition lies in the interval that was claimed, or is better."""
    return measured(row).median >= claimed(row["found"])[1]


def cells(row: dict) -> tuple:
    found, seconds = row["found"], f"{row['seconds_of_search']:.0f}"
    if "runs" not in row:
        return row["training"], found.get("error") or found["verdict"], "", "", "", "", seconds
    ratio, steps = claimed(found), f"steps {found['speedup']['median']:.2f}"
    before, after = (statistics.fmean(one["metric"] for one in row["runs"][arm]) for arm in ("unchanged", "tuned"))
    return (
        row["training"],
        " + ".join(found["recipe"]),
        found["evidence"],
        f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})" if ratio else steps,
        f"{measured(row):.2f}",
        f"{before:.5g} -> {after:.5g}",
        seconds,
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("checkouts", type=Path, metavar="DIR")
    options.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(TRAININGS)}")
    options.add_argument("--budget", default="2m", help="of each search (default: %(default)s)")
    options.add_argument("--evidence", help="weakest to accept (default: that of hasten)")
    options.add_argument("--vary", action="store_true", help="let the search change the training's own arguments")
    options.add_argument("--rounds", type=int, default=3, help="whole trainings of each side")
    options = options.parse_args()
    rows = []
    for name in options.only.split(",") if options.only else TRAININGS:
        rows.append(judge(name, TRAININGS[name], options.checkouts.absolute(), options))
        print_progress("  ".join(cells(rows[-1])))
    show(("training", "recipe", "evidence", "claimed", "repeated", "metric", "search, s"), map(cells, rows))
    repeated = [is_kept(row) for row in rows if "runs" in row and claimed(row["found"])]
    figure = f"claims that a repetition keeps, searches of {options.budget}: {sum(repeated)} of {len(repeated)}"
    return finish(options, figure, all(repeated) if repeated else None, {"trainings": rows})


if __name__ == "__main__":
    sys.exit(main())
