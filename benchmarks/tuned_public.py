"""Public training scripts, tuned by one command: how much faster their trainings become.

The scripts are those of ``public_scripts.py``, from checkouts in DIR, with the arguments that they have by default
where a step of these takes less than about a second on two cores, and with whole Fashion-MNIST in place of MNIST. Each
is searched for ``--budget``, at the exact level or that of ``--evidence``. A script for which nothing is found counts
as 1x, and so does one that hasten refuses.

Figure: 1.3x in the median. The speed-up is that of the whole training, predicted from measured steps and evaluations.
Bound: what exact methods leave untouched, which is most of it in scripts whose time goes into large matrix products.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from _common import finish, parser, print_progress, show
from public_data import mnist_at
from public_scripts import SCRIPTS, Script, copy_of

FIGURE = 1.3
LEVELS = "exact", "precision"
ALL_IMAGES = mnist_at("../data", 60_000, 10_000)
ALL_IMAGES_OF_LIGHTNING = mnist_at("../../../Datasets", 60_000, 10_000)
NANOGPT = (  # as the README of nanoGPT trains on a CPU
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 "
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 "
    "--dropout=0.0"
)
USUAL = {  # arguments and data in place of the short ones of ``SCRIPTS``
    "nanoGPT": {"command": NANOGPT},
    "word LSTM": {"command": "main.py --data data/tiny"},
    "word Transformer": {"command": "main.py --data data/tiny --model Transformer --use-optimizer --lr 0.001"},
    "mnist": {"command": "main.py --no-accel", "prepare": ALL_IMAGES},
    "mnist_rnn": {"command": "main.py", "prepare": ALL_IMAGES},
    "siamese_network": {"command": "main.py --no-accel", "prepare": ALL_IMAGES},
    "dcgan": {"command": "main.py --dataset fake --ngf 32 --ndf 32"},
    "vae": {"command": "main.py --no-accel", "prepare": ALL_IMAGES},
    "gcn": {"command": "main.py --no-accel"},
    "gat": {"command": "main.py --no-accel"},
    "Pytorch-UNet": {"command": "train.py --scale 1 --bilinear"},
    "imagenet": {"command": "main.py --dummy -b 16 --no-accel"},
    "image_classifier": {"command": "train_torch.py", "prepare": ALL_IMAGES_OF_LIGHTNING},
    "Fabric": {"command": "train_fabric.py", "prepare": ALL_IMAGES_OF_LIGHTNING},
}


def search(name: str, script: Script, checkouts: Path, budget: str, evidence: str) -> dict:
    """The row of a script: ``found`` (the result of the search) or ``refused`` (one line), or ``skipped``."""
    if not (checkouts / script.directory).is_dir():
        return {"script": name, "skipped": f"{script.directory} is not in DIR"}
    with tempfile.TemporaryDirectory(prefix="public-") as place:
        directory = copy_of(script, checkouts, Path(place))
        options = ["--quiet", "--json", "--evidence", evidence, "--budget", budget, "--out", f"{place}/tuned"]
        command = [sys.executable, "-m", "hasten", "tune", *options, "--", sys.executable, *script.command.split()]
        began, environment = time.perf_counter(), {**os.environ, **script.environment}
        streams = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, cwd=directory, env=environment, **streams)
        row = {"script": name, "command": script.command, "seconds": time.perf_counter() - began}
    if done.returncode not in (0, 1):  # 1: nothing is surely faster
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return row | {"refused": lines[-1].removeprefix("hasten: ")}
    found = json.loads(done.stdout)
    return row | ({"refused": found["error"]} if "error" in found else {"found": found})


def speedup_of(row: dict) -> float:
    found = row.get("found", {})
    return found["speedup"]["median"] if found.get("verdict") == "faster" else 1.0


def cells(row: dict) -> tuple:
    """A row of the table."""
    seconds = f"{row['seconds']:.0f}" if "seconds" in row else ""
    if "found" not in row:
        return row["script"], row.get("skipped") or row["refused"][:90], "", "", seconds
    found = row["found"]
    if found["verdict"] != "faster":
        return row["script"], found["verdict"], "", "1", seconds
    ratio = found["speedup"]
    interval = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return row["script"], " + ".join(found["recipe"]), found["evidence"], interval, seconds


def main() -> int:
    options = parser(__doc__)
    options.add_argument("checkouts", type=Path, metavar="DIR")
    options.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(SCRIPTS)}")
    options.add_argument("--budget", default="2m", help="of each search (default: %(default)s)")
    options.add_argument("--evidence", default="exact", choices=LEVELS, help="weakest to accept (default: %(default)s)")
    options = options.parse_args()
    rows = []
    for name in options.only.split(",") if options.only else list(SCRIPTS):
        print_progress(name)
        script = replace(SCRIPTS[name], **USUAL.get(name, {}))
        rows.append(search(name, script, options.checkouts.absolute(), options.budget, options.evidence))
        print_progress("  ".join(cells(rows[-1])))
    show(("script", "recipe", "evidence", "speed-up", "search, s"), map(cells, rows))
    ran = [speedup_of(row) for row in rows if "skipped" not in row]
    median = statistics.median(ran) if ran else 0.0
    faster = sum(speedup > 1 for speedup in ran)
    figure = f"public scripts, {options.evidence}: {median:.2f}x in the median of {len(ran)}, {faster} faster"
    return finish(options, figure, median >= FIGURE if ran and not options.only else None, {"scripts": rows})


if __name__ == "__main__":
    sys.exit(main())
