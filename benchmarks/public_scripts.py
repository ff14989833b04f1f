"""Public training scripts under hasten: watching them changes nothing, and finds what there is.

DIR holds checkouts of the repositories by their names (nanoGPT, examples, Pytorch-UNet, pytorch-lightning, keras);
those that are missing are skipped. Each script runs in a copy with small data from HASTEN_DATA, or made up: alone, and
watched. An observer of its own counts steps and hashes the weights in both runs (``weight_recorder/``). Nothing is
downloaded.

Figure: weights, output and steps of every script are the same, every loader, optimizer, model and evaluation is found,
and no metric is wrong: it is the right one, or hasten asks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _common import finish, parser, print_progress, show
from public_data import blobs, cora, corpus, mnist_at, shakespeare, wikitext

RECORDER = Path(__file__).with_name("weight_recorder")
LIMIT_S = 300.0  # of a run
SAME = ("same weights", "same output")
BARS = ("it/s", "%|", "━")
TIMES = re.compile(
    r"(?i)((?:\btime|\bdata|ms/batch|mfu)\W*[\d.]+( \([^)]*\))?|[\d.]+ ?(?:ms|s|it)(?:/\w+)?\b|[\d.]+%\|.*)"
)


# ── the scripts, and what there is to be found ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Script:
    """A public script.

    Attributes:
        directory: Where it lies below DIR.
        command: After ``python``.
        optimizers: Their types.
        models: The types of the models that are trained.
        loaders: How many DataLoaders there are, for training and else.
        metric: (words of its name, direction); None if the run measures nothing on held-out data, so that hasten must
            not take any number. No model is then called in evaluation mode either.
        prepare: Makes its data in the copy of the directory.
        at: Backward pass after which the weights are compared.
        steps: Stop after so many; None: it runs to its end.
        environment: Its variables.
    """

    directory: str
    command: str
    optimizers: tuple[str, ...]
    models: tuple[str, ...]
    loaders: tuple[int, int] = (0, 0)
    metric: tuple[str, str] | None = None
    prepare: Callable[[Path], None] = lambda directory: None
    at: int = 50
    steps: int | None = None
    environment: dict[str, str] = field(default_factory=dict)


GPT = (
    "--device=cpu --compile=False --eval_iters=3 --eval_interval=40 --max_iters=120 --lr_decay_iters=120 "
    "--block_size=32 --batch_size=8 --n_layer=2 --n_head=2 --n_embd=32"
)
WORDS = "--data data/tiny --epochs 2 --emsize 32 --nhid 32 --nlayers 1 --bptt 20 --log-interval 20"
GRAPH = "--epochs 100 --no-accel --val-every 5"
ADADELTA, ADAM, SGD = ("Adadelta",), ("Adam",), ("SGD",)
ON_MNIST: dict[str, Any] = {"loaders": (1, 1), "metric": ("accuracy", "max")}
WORD_MODEL: dict[str, Any] = {"metric": ("valid loss", "min"), "prepare": corpus}
ON_CORA: dict[str, Any] = {"metric": ("acc val", "max"), "prepare": cora}
OF_KERAS: dict[str, Any] = {"loaders": (1, 0), "steps": 200, "environment": {"KERAS_BACKEND": "torch"}}
IMAGES, FABRIC = mnist_at("../data"), "pytorch-lightning/examples/fabric/image_classifier"

SCRIPTS = {
    "nanoGPT": Script(
        "nanoGPT",
        f"train.py config/train_shakespeare_char.py {GPT}",
        ("AdamW",),
        ("GPT",),
        metric=("val loss", "min"),
        prepare=shakespeare,
    ),
    "word LSTM": Script("examples/word_language_model", f"main.py {WORDS}", (), ("RNNModel",), **WORD_MODEL),
    "word Transformer": Script(
        "examples/word_language_model",
        f"main.py {WORDS} --model Transformer --nhead 2 --use-optimizer --lr 0.001",
        ("AdamW",),
        ("TransformerModel",),
        **WORD_MODEL,
    ),
    "mnist": Script("examples/mnist", "main.py --epochs 2 --no-accel", ADADELTA, ("Net",), **ON_MNIST, prepare=IMAGES),
    "mnist_rnn": Script("examples/mnist_rnn", "main.py --epochs 2", ADADELTA, ("Net",), **ON_MNIST, prepare=IMAGES),
    "siamese_network": Script(
        "examples/siamese_network",
        "main.py --epochs 1 --no-accel",
        ADADELTA,
        ("SiameseNetwork",),
        **ON_MNIST,
        prepare=mnist_at("../data", 3_000, 1_000),
        at=30,
    ),
    "dcgan": Script(
        "examples/dcgan",
        "main.py --dataset fake --niter 3 --ngf 8 --ndf 8 --manualSeed 1 --workers 0",
        ADAM * 2,
        ("Discriminator", "Generator"),
        (1, 0),
    ),
    "vae": Script(
        "examples/vae",
        "main.py --epochs 2 --no-accel --batch-size 100",
        ADAM,
        ("VAE",),
        (1, 1),
        ("loss", "min"),
        IMAGES,
    ),
    "gcn": Script("examples/gcn", f"main.py {GRAPH}", ADAM, ("GCN",), **ON_CORA),
    "gat": Script(
        "examples/gat",
        "main.py --epochs 20 --no-accel --val-every 5 --hidden-dim 16",
        ADAM,
        ("GAT",),
        **ON_CORA,
        at=10,
    ),
    "Pytorch-UNet": Script(
        "Pytorch-UNet",
        "train.py --epochs 1 --scale 1 --bilinear",
        ("RMSprop",),
        ("UNet",),
        (1, 1),
        ("validation dice", "max"),
        blobs,
        at=12,
        steps=12,
    ),
    "imagenet": Script(
        "examples/imagenet",
        "main.py --dummy -a resnet18 -b 2 -j 0 --epochs 1 --seed 1 --no-accel",
        SGD,
        ("ResNet",),
        (1, 0),
        at=25,
        steps=25,
    ),
    "image_classifier": Script(
        FABRIC, "train_torch.py --epochs 1", ADADELTA, ("Net",), **ON_MNIST, prepare=mnist_at("../../../Datasets")
    ),
    "Fabric": Script(
        FABRIC, "train_fabric.py --epochs 1", ADADELTA, ("Net",), **ON_MNIST, prepare=mnist_at("../../../Datasets")
    ),
    "Lightning transformer": Script(
        "pytorch-lightning/examples/pytorch/basics",
        "transformer.py",
        SGD,
        ("LanguageModel",),
        (1, 0),
        prepare=wikitext,
        at=20,
        steps=20,
    ),
    "Lightning bug report": Script(
        "pytorch-lightning/examples/pytorch/bug_report",
        "bug_report_model.py",
        SGD,
        ("BoringModel",),
        (1, 2),
        ("valid loss", "min"),
        at=1,
    ),
    "Keras functional": Script("keras/examples", "demo_functional.py", ADAM, ("Functional",), **OF_KERAS),
    "Keras subclass": Script("keras/examples", "demo_subclass.py", SGD, ("MyModel",), **OF_KERAS),
}


def copy_of(script: Script, checkouts: Path, place: Path) -> Path:
    """The directory of a copy of a script below ``place``, with its data."""
    directory = place / script.directory
    shutil.copytree(checkouts / script.directory, directory)
    script.prepare(directory)
    return directory


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    """What a run has shown: by the observer, in its output, and (only if watched) by hasten."""

    seen: dict = field(default_factory=dict)
    output: str = ""
    ended_well: bool = False
    steps: int = 0
    sites: dict = field(default_factory=dict)
    metric: dict = field(default_factory=dict)


class Observer:
    """Receives what the recorder of a run sends; the process that trains most counts."""

    def __init__(self) -> None:
        self.by_pid: dict[int, dict] = {}
        self.name = f"hasten-public-{os.getpid()}-{time.monotonic_ns()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + self.name)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            message = json.loads(self.socket.recv(4096))
            self.by_pid[message["pid"]] = message

    def seen(self) -> dict:
        time.sleep(0.2)  # the last messages
        return max(self.by_pid.values(), key=lambda one: one["backwards"], default={"backwards": 0, "updates": 0})


def environment(script: Script, observer: Observer) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")]))
    recorder = {"PYTHONPATH": path, "RECORDER": observer.name, "RECORDER_STEP": str(script.at)}
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **fixed, **script.environment, **recorder}


def alone(script: Script, directory: Path) -> Run:
    """The script without hasten."""
    observer = Observer()
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, *script.command.split()]
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=directory, env=environment(script, observer), **streams) as process:
            until = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
                if script.steps is not None and steps_of(observer.seen()) >= script.steps:
                    break
            code = process.poll()
            process.kill()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Run(observer.seen(), text, code == (None if script.steps is not None else 0))


def watched(script: Script, directory: Path) -> Run:
    """The script as the first run of a search sees it."""
    from hasten.core.errors import ConfigurationError, RunError
    from hasten.hosts.process import OUTPUT_BYTES, ScriptProcess
    from hasten.hosts.script_ref import ScriptRef
    from hasten.hosts.whole_run import seen_metric

    observer = Observer()
    before = dict(os.environ)
    os.environ.update(environment(script, observer))
    try:
        ref = ScriptRef.of_command([sys.executable, *script.command.split()], directory=str(directory))
    finally:
        os.environ.clear()
        os.environ.update(before)
    deadline = time.monotonic() + LIMIT_S
    run = Run()
    try:
        with ScriptProcess(ref, {}, seed=None, deadline=deadline) as process:
            answer = process.wait_until_trained(None, deadline)
            if script.steps is not None:
                answer = process.ask("train", None, deadline, count=script.steps - answer["steps"])
            else:
                answer = process.ask("train", None, deadline, count=1 << 40)
            described = process.ask("describe", None, deadline)
            run.steps, run.sites = answer["steps"], described["sites"]
            run.metric, run.output = seen_metric(ref, process, described), process.output(OUTPUT_BYTES)
            run.ended_well = answer.get("ended", False) is (script.steps is None)
    except (ConfigurationError, RunError) as error:
        run.output += f"\nhasten: {error}"
    run.seen = observer.seen()
    return run


def steps_of(seen: dict) -> int:
    """The steps that the observer has counted: updates, or backward passes where no optimizer of torch updates."""
    return seen["updates"] or seen["backwards"]


# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def lines_of(output: str) -> list[str]:
    """The lines of an output without times and progress bars, which are drawn by the clock."""
    shown = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", output)  # colors, and movements of the cursor
    lines = [line for line in re.split(r"[\n\r\x08]+", shown) if not any(bar in line for bar in BARS)]
    return [line for line in (TIMES.sub("", line).strip() for line in lines) if line]


def same_output(script: Script, plain: Run, under: Run) -> bool:
    first, second = lines_of(plain.output), lines_of(under.output)
    if script.steps is not None:  # stopped at about the same place
        length = min(len(first), len(second))
        first, second = first[:length], second[:length]
    return first == second


def missing_sites(script: Script, sites: dict) -> str:
    """What was not found, or found but is not there; empty if all is right."""
    loaders = Counter(one["role"] for one in sites.get("loaders", ()))
    others = loaders["evaluation"] if script.steps is None else script.loaders[1]  # those of later parts of the script
    found = {
        "loaders": ((loaders["training"], others), script.loaders),
        "optimizers": (types(sites.get("optimizers", ())), sorted(script.optimizers)),
        "models": (types(sites.get("models", ())), sorted(script.models)),
        "evaluations": (bool(sites.get("evaluations")), script.metric is not None),
    }
    return "; ".join(f"{name}: {seen}, not {there}" for name, (seen, there) in found.items() if seen != there)


def types(sites) -> list[str]:
    return sorted(one["type"] for one in sites)


def metric_verdict(script: Script, metric: dict) -> str:
    """Whether the metric is right, WRONG, asked for, or none is taken; and its name."""
    if not metric or not metric["name"]:
        names = [one["name"] for one in metric.get("candidates", ())] if metric else []
        return f"asks ({', '.join(names)})" if names else "none"
    name = f"{metric['name']} ({metric['direction']})"
    if script.metric is None:
        return f"WRONG: {name}"
    words, direction = script.metric
    there = set(re.findall(r"[a-z]+", metric["name"].lower()))
    is_right = set(words.replace("_", " ").split()) <= there and metric["direction"] == direction
    return f"right: {name}" if is_right else f"WRONG: {name}"


def judge(name: str, script: Script, checkout: Path) -> dict:
    """Runs a script alone and watched, in two copies at one place. Returns the row of the table, and the details."""
    row: dict = {"script": name, "command": script.command}
    if not (checkout / script.directory).is_dir():
        return row | {"skipped": f"{script.directory} is not in DIR"}
    runs = []
    with tempfile.TemporaryDirectory(prefix="public-") as place:
        for run in (alone, watched):
            shutil.rmtree(place)
            runs.append(run(script, copy_of(script, checkout, Path(place))))
    plain, under = runs
    row["same weights"] = plain.seen.get("hash", "") == under.seen.get("hash", "") != ""
    row["same output"] = same_output(script, plain, under)
    row["ended"] = plain.ended_well and under.ended_well
    expected = steps_of(plain.seen if script.steps is None else under.seen)
    row["steps"] = f"{under.steps} of {expected}"
    # at a stop, hasten has seen the last update and the observer has not
    row["steps are right"] = 0 <= under.steps - expected <= (script.steps is not None)
    row["sites"] = missing_sites(script, under.sites) or "all"
    row["metric"] = metric_verdict(script, under.metric)
    row["runs"] = [asdict(run) | {"output": run.output[-4000:]} for run in runs]
    return row


def is_right(row: dict) -> bool:
    return (
        all(row[flag] for flag in (*SAME, "ended", "steps are right"))
        and row["sites"] == "all"
        and not row["metric"].startswith("WRONG")
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("checkouts", type=Path, metavar="DIR")
    options.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(SCRIPTS)}")
    options = options.parse_args()
    names = options.only.split(",") if options.only else list(SCRIPTS)
    rows = []
    for name in names:
        print_progress(name)
        rows.append(judge(name, SCRIPTS[name], options.checkouts.absolute()))
        print_progress(json.dumps({key: value for key, value in rows[-1].items() if key != "runs"}))
    ran = [row for row in rows if "skipped" not in row]
    yes = {True: "same", False: "DIFFER"}
    show(
        ("script", "weights", "output", "steps", "sites", "metric"),
        [(row["script"], *(yes[row[same]] for same in SAME), row["steps"], row["sites"], row["metric"]) for row in ran]
        + [(row["script"], row["skipped"], "", "", "", "") for row in rows if "skipped" in row],
    )
    right = sum(map(is_right, ran))
    figure = f"watching changes nothing and finds everything, {right} of {len(ran)} scripts"
    return finish(options, figure, right == len(ran) if ran else None, {"scripts": rows})


if __name__ == "__main__":
    sys.exit(main())
