"""hasten's recipe against the recommendation of loadtune 0.3 for the same task.

loadtune runs as documented (``loadtune tune FILE``) with a larger budget than its defaults: three repeats, two rounds,
batch sizes allowed. hasten's engine then trains with its recommendation, translated to the hasten methods of the same
meaning (workers, threads, compile, autocast). So both sides use the same engine and only the choices differ. Both
recipes are timed in turns (``hasten.compare``) and trained to the end on the same seeds. The printed ratio is that of
the times to the target; the final metrics of both are printed, too.

hasten's recipe comes from the search of ``time_to_target.py`` (``--runs``), which is made now if it does not exist.
``--proven`` takes the recipe of the newest record of the workload instead: no search, but the same comparison.
``--exact`` gives hasten the wall time that loadtune took, and exact methods only; autocast is dropped from loadtune's
choice, since it is not exact. Then the speed of steps decides, and nothing is trained to the end.
pytorch-autotune 2 requires CUDA and is not measured here.

Figure: hasten's recipe is never slower and, without ``--exact``, faster on most workloads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import torch
from _common import finish, installed, on_progress, parser, print_progress, search_directory, show
from time_to_target import newest_records

import hasten
from hasten import ConfigurationError, Recipe, RunError

WORKLOADS = ("digits", "fashion_mnist", "tiny_shakespeare", "adult", "cifar10")
HERE = Path(__file__).parent
FIRST_SEED = 200  # seeds that neither tuner has used
LOADTUNE_OPTIONS = ("--repeats", "3", "--max-rounds", "2", "--auto-batch", "--no-plots")
TIE = 0.02  # loadtune's tie threshold: a smaller gain is not an improvement


def loadtunes_choice(workload: str, steps: int) -> dict:
    """Returns loadtune's recommendation: {"knobs", "recipe", "claimed", "seconds"}; an empty recipe if nothing beat its
    baseline.
    """
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory) / "raw.json"
        program = Path(sys.executable).with_name("loadtune")
        argv = [
            program,
            "tune",
            HERE / "_loadtune_workload.py",
            "--steps",
            str(steps),
            *LOADTUNE_OPTIONS,
            "--save-raw",
            raw,
            "--out",
            Path(directory) / "report.md",
        ]
        began = time.monotonic()
        done = subprocess.run(
            argv, env=os.environ | {"HASTEN_BENCHMARK_TASK": workload}, capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began
        if not raw.exists():
            raise RunError(
                f"loadtune ended with code {done.returncode}: "
                f""
                f"{(done.stdout + done.stderr).strip().splitlines()[-1][:200]}"
            )
        result = json.loads(raw.read_text())
    return {**chosen(result), "seconds": seconds, "trials": len(result["trials"]), "narrative": result["narrative"]}


def chosen(result: dict) -> dict:
    """Applies loadtune's own rule (``loadtune.experiment.best_trial``): within its tie, the configuration with fewest
    workers.
    """
    good = [trial for trial in result["trials"] if trial["result"] and not trial["result"].get("error")]
    base = result["baseline"]["throughput"]
    top = max((trial["result"]["throughput"] for trial in good), default=0.0)
    if top <= base:
        return {"knobs": {}, "recipe": Recipe(), "claimed": 1.0}
    near = [trial for trial in good if trial["result"]["throughput"] >= top * (1 - TIE)]
    best = min(near, key=lambda trial: (trial["knobs"]["num_workers"], -trial["result"]["throughput"]))
    return {"knobs": best["knobs"], "recipe": as_recipe(best["knobs"]), "claimed": best["result"]["throughput"] / base}


def as_recipe(knobs: dict) -> Recipe:
    """Translates loadtune's configuration to a hasten recipe.

    The batch size is loadtune's only on a GPU.
    """
    if knobs["batch_size"]:
        raise ConfigurationError("loadtune changed the batch size, which it does on GPUs only; that is not translated")
    recipe = Recipe()
    if workers := knobs["num_workers"]:
        prefetch = knobs["prefetch_factor"] or 2
        recipe = recipe.with_method(
            "loader_workers",
            workers=workers,
            prefetch=prefetch,
            persistent=knobs["persistent_workers"],
            pin=knobs["pin_memory"],
        )
    if knobs["num_threads"] not in (None, torch.get_num_threads()):
        recipe = recipe.with_method("num_threads", count=knobs["num_threads"])
    if knobs["compile"]:
        recipe = recipe.with_method("compile")
    if knobs["amp"]:
        recipe = recipe.with_method("bfloat16")
    return recipe


def measured(workload: str, theirs: Recipe, ours: Recipe, options) -> dict:
    """Measures the time to the target of both recipes on the same seeds."""
    from hasten.tuning.time_to_target import Counts, time_to_target

    pace = hasten.compare(workload, theirs, ours, budget=options.budget, device=options.device, on_progress=on_progress)
    runs: dict[str, list[dict]] = {"loadtune": [], "hasten": []}
    for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
        for name, recipe in (("loadtune", theirs), ("hasten", ours)):
            print_progress(f"  seed {seed}, {name}")
            runs[name].append(hasten.train(workload, recipe, device=options.device, seed=seed))
    samples = Counts(*([(_samples(run), 0) for run in runs[name]] for name in ("loadtune", "hasten")))
    ratio, seconds_theirs, seconds_ours = time_to_target(pace, samples)
    return {
        "ratio": ratio.to_json(),
        "seconds": {"loadtune": seconds_theirs, "hasten": seconds_ours},
        "metric": {name: fmean(run["metric"] for run in each) for name, each in runs.items()},
        "reached": {name: sum(run["reached"] for run in each) for name, each in runs.items()},
        "samples": samples.to_json(),
        "pace": pace,
    }


def measured_exact(workload: str, theirs: Recipe, ours: Recipe, options) -> dict:
    """Measures the steps of both recipes."""
    pace = hasten.compare(workload, theirs, ours, budget=options.budget, device=options.device, on_progress=on_progress)
    seconds = pace["seconds_per_1000_samples"]
    return {"ratio": pace["ratio"], "seconds": {"loadtune": seconds["a"], "hasten": seconds["b"]}, "pace": pace}


def _samples(run: dict) -> int:
    """Returns samples to the target; a run that never reached it counts with all its samples."""
    return run["samples_to_target"] or run["samples"]


def against(workload: str, options) -> dict:
    known = proven(workload) if options.proven else None
    print_progress(f"{workload}: loadtune searches")
    theirs = loadtunes_choice(workload, options.steps)
    print_progress(
        f"{workload}: loadtune recommends {theirs['recipe']}; hasten "
        f""
        f"{'uses the recorded recipe' if options.proven else 'searches, or reads its trials'}"
    )
    if options.exact:
        theirs["recipe"] = theirs["recipe"].drop("bfloat16")
        found = searched_exact(workload, theirs["seconds"], options)
    else:
        found = known or searched(workload, options)
    ours, measure = Recipe(found["recipe"]), measured_exact if options.exact else measured
    is_same = ours.methods == theirs["recipe"].methods
    measurement = None if is_same else measure(workload, theirs["recipe"], ours, options)
    return {
        "loadtune": {**theirs, "recipe": str(theirs["recipe"])},
        "hasten": {
            "recipe": str(ours),
            "seconds": found["search_seconds"],
            "verdict": found["verdict"],
            "earlier": " earlier" if known else "",
        },
        "measured": measurement,
    }


def proven(workload: str) -> dict:
    """Returns the recipe of the newest CPU record of the workload."""
    found = newest_records().get(workload)
    if not found or found["device"] != "cpu":
        raise ConfigurationError(f"no record of {workload} on a CPU")
    return found


def searched(workload: str, options) -> dict:
    directory = search_directory(options.runs, workload)
    return hasten.tune(
        workload, budget=options.search_budget, out=directory, device=options.device, on_progress=on_progress
    )


def searched_exact(workload: str, seconds: float, options) -> dict:
    """The result of a search among exact methods, in ``seconds``."""
    with tempfile.TemporaryDirectory() as directory:
        how = {"evidence": "exact", "out": directory, "device": options.device, "on_progress": on_progress}
        return hasten.tune(workload, budget=seconds, **how)


def row_of(workload: str, one: dict) -> tuple[str, ...]:
    measurement, searches = (
        one["measured"],
        f"{one['loadtune']['seconds']:.0f} / {one['hasten']['seconds']:.0f}{one['hasten']['earlier']}",
    )
    recipes = one["loadtune"]["recipe"], one["hasten"]["recipe"]
    if measurement is None:
        return (workload, *recipes, "the same recipe", "", "", searches)
    ratio, seconds, metric = measurement["ratio"], measurement["seconds"], measurement.get("metric")
    return (
        workload,
        *recipes,
        f"{ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
        f"{seconds['loadtune']:.1f} / {seconds['hasten']:.1f}",
        f"{metric['loadtune']:.4g} / {metric['hasten']:.4g}" if metric else "",
        searches,
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default: all")
    options.add_argument(
        "--steps", type=int, default=100, help="steps of each of loadtune's trials; its own default is 100"
    )
    options.add_argument("--budget", type=float, default=60.0, help="seconds of the comparison in turns")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--search-budget", type=float, help="seconds of hasten's search; default: that of the tuner")
    options.add_argument(
        "--proven", action="store_true", help="hasten's recipes are those of the newest records: no search"
    )
    options.add_argument(
        "--exact", action="store_true", help="hasten searches exact methods in the wall time of loadtune"
    )
    options.add_argument("--device", help="as for hasten")
    options.add_argument("--runs", type=Path, default=Path("runs"), help="directory of hasten's searches")
    options = options.parse_args()
    print("pytorch-autotune 2: not measured, it needs CUDA\n")
    if why := installed("loadtune"):
        print(f"loadtune: {why}")
        return finish(options, "never slower than loadtune, faster on most", None, {"loadtune": why})
    done, failed = {}, {}
    for workload in options.workloads or WORKLOADS:
        try:
            done[workload] = against(workload, options)
        except (RunError, ConfigurationError) as error:
            failed[workload] = str(error)
    time_of = "1000 samples, s" if options.exact else "to target, s"
    show(
        ("workload", "loadtune's recipe", "hasten's recipe", "hasten faster by", time_of, "metric", "search, s"),
        [row_of(name, one) for name, one in done.items()]
        + [(name, f"not measured: {why}", *[""] * 5) for name, why in failed.items()],
    )
    ratios = [one["measured"]["ratio"] if one["measured"] else {"low": 1.0, "high": 1.0} for one in done.values()]
    faster, slower = sum(ratio["low"] > 1.01 for ratio in ratios), sum(ratio["high"] < 0.99 for ratio in ratios)
    what = (
        "never slower than loadtune at the exact level"
        if options.exact
        else "never slower than loadtune, faster on most"
    )
    figure = f"{what}; faster on {faster} of {len(ratios)}, slower on {slower}"
    reached = None if not ratios else not slower and not failed and (options.exact or 2 * faster > len(ratios))
    return finish(options, figure, reached, {"workloads": done, "failed": failed})


if __name__ == "__main__":
    sys.exit(main())
