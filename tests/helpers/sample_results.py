"""Example results of the commands. Tests change them; nothing but ``searched`` is a measurement."""

import json
import math
from math import exp
from pathlib import Path


def interval(median: float, spread: float = 0.08) -> dict:
    return {"median": median, "low": median * (1 - spread), "high": median * (1 + spread)}


def curve(seed: int, total: float, best: float, points: int = 14) -> dict:
    """A metric that rises to ``best`` over ``total`` seconds, slightly different for each seed."""
    shape = [
        (k / points, best - 0.12 * exp(-6 * k / points) + 0.002 * ((seed * 7 + k * 3) % 5 - 2) / 2)
        for k in range(1, points + 1)
    ]
    return {
        "seed": seed,
        "points": [
            {"seconds": share * total, "samples": int(share * 43110), "metric": value} for share, value in shape
        ],
    }


def trial(what: str, stage: str, verdict: str, ratio: float | None, why: str = "") -> dict:
    return {
        "what": what,
        "stage": stage,
        "verdict": verdict,
        "ratio": ratio and interval(ratio, 0.03),
        "seconds": 3.2,
        "why": why,
    }


ENVIRONMENT = {
    "machine": {
        "cpu": "Ordinary CPU @ 2.50GHz",
        "cores": 2,
        "memory_gb": 24,
        "device": "cpu",
        "gpu": None,
        "os": "Linux 6.1",
    },
    "versions": {"python": "3.11.7", "torch": "2.13.0", "hasten": "0.1.0"},
    "system_noise": {"spread_percent": 3.1, "steal_percent": 0.2, "involuntary_switches": 120},
    "seed": 0,
}

BASELINE = {
    "input": 0.52,
    "forward": 0.031,
    "backward": 0.046,
    "optimizer_step": 0.052,
    "evaluation": 0.081,
    "logging": 0.002,
}
TUNED = {
    "input": 0.012,
    "forward": 0.027,
    "backward": 0.041,
    "optimizer_step": 0.019,
    "evaluation": 0.03,
    "logging": 0.002,
}


def faster() -> dict:
    """A successful ``hasten tune digits``."""
    recipe = {
        "in_memory_batches": {},
        "fused_optimizer": {},
        "num_threads": {"count": 1},
        "budgeted_schedule": {"factor": 0.35},
    }
    return ENVIRONMENT | {
        "kind": "tune",
        "peak_memory_bytes": {"baseline": [cpu_peak(420e6)], "tuned": [cpu_peak(1.31e9)]},
        "task": "digits",
        "verdict": "faster",
        "why": "four methods together, confirmed on three fresh seeds",
        "metric": {"name": "accuracy", "higher_is_better": True, "target": 0.97, "unit": ""},
        "recipe": recipe,
        "frontier": [
            recipe_of_frontier({}, 1.0, role="baseline"),
            recipe_of_frontier({"fused_optimizer": {}}, 1.16, role="strong baseline")
            | {"speedup": {"median": 1.16, "low": None, "high": None}},
            recipe_of_frontier(recipe, 5.12, "proven", "recommended", (0.0021, -0.0011, 0.0053))
            | {"speedup": {"median": 5.12, "low": 4.63, "high": 5.71}},
        ],
        "recipe_file": "recipe.toml",
        "out": "runs/tune-digits",
        "strong_baseline_recipe": {"fused_optimizer": {}},
        "speedup": {"median": 5.12, "low": 4.63, "high": 5.71},
        "speedup_over_strong_baseline": {"median": 4.43, "low": 4.02, "high": 4.9},
        "time_to_target": {"baseline": 8.2, "strong_baseline": 7.1, "tuned": 1.6},
        "samples_to_target": {"baseline": [24000, 25500, 23000], "tuned": [17000, 18200, 16800]},
        "seconds_to_target": {"baseline": [8.4, 8.1, None], "tuned": [1.7, 1.6, 1.8]},
        "quality": {
            "baseline": 0.9731,
            "tuned": 0.9752,
            "margin": 0.005,
            "difference": {"mean": 0.0021, "low": -0.0011, "high": 0.0053},
            "seeds": [100, 101, 102],
            "passed": True,
        },
        "curves": {
            "baseline": [curve(seed, 14.0, 0.976) for seed in (100, 101, 102)],
            "tuned": [curve(seed, 3.1, 0.978) for seed in (100, 101, 102)],
        },
        "step_profile": {"baseline": BASELINE, "tuned": TUNED},
        "contributions": [
            {"method": "in_memory_batches", "speedup": interval(2.6, 0.05)},
            {"method": "budgeted_schedule", "speedup": interval(1.7, 0.06)},
            {"method": "fused_optimizer", "speedup": interval(1.12, 0.03)},
            {"method": "num_threads", "speedup": interval(1.04, 0.02)},
        ],
        "trials": [
            trial("in_memory_batches", "systems", "kept", 2.7),
            trial("num_threads:count=1", "systems", "kept", 1.06),
            trial(
                "loader_workers:num_workers=2",
                "systems",
                "slower",
                0.71,
                "the workers cost more than they save on two cores",
            ),
            trial("cache_dataset", "systems", "no gain", 1.003, "in_memory_batches already reads from memory"),
            trial("channels_last", "systems", "not tried", None, "the model has no convolutions"),
            trial("fused_optimizer", "systems", "kept", 1.14),
            trial("bfloat16", "precision", "slower", 0.42, "this CPU emulates bfloat16"),
            trial("budgeted_schedule:factor=0.35", "training", "kept", 1.72),
            trial(
                "batch_size:factor=4", "training", "refused", 1.31, "accuracy 0.021 below the baseline, margin 0.005"
            ),
            trial("znorm", "training", "no gain", 0.98, "the target was not reached sooner"),
            trial("all methods that were kept", "composition", "won", 5.1),
            trial(
                "all methods that were kept",
                "confirmation",
                "won",
                5.12,
                "three fresh seeds, both arms trained completely",
            ),
        ],
        "ceilings": {
            "input": 3.4,
            "forward": 1.04,
            "backward": 1.07,
            "optimizer_step": 1.08,
            "evaluation": 1.12,
            "logging": 1.0,
        },
        "phases": {
            "input": 0.71,
            "forward": 0.04,
            "backward": 0.06,
            "optimizer_step": 0.07,
            "evaluation": 0.11,
            "logging": 0.003,
        },
        "facts": ["cpu", "indexed_samples", "multiple_epochs"],
        "search_seconds": 151.0,
        "budget_seconds": 170.0,
        "break_even_runs": 23.0,
        "expected_runs": 10,
    }


def no_improvement() -> dict:
    """A ``hasten tune`` that found no improvement."""
    result = faster()
    unsuccessful = [
        one | {"verdict": "no gain", "ratio": interval(1.004, 0.01)} if one["verdict"] in ("kept", "won") else one
        for one in result["trials"][:10]
    ]
    return result | {
        "verdict": "no improvement",
        "why": "The step consists of arithmetic; no method that applies made it faster by more than the noise.",
        "recipe": {},
        "frontier": [],
        "recipe_file": None,
        "speedup": None,
        "speedup_over_strong_baseline": None,
        "time_to_target": {"baseline": 8.2},
        "quality": {"baseline": 0.9731, "margin": 0.005},
        "curves": {"baseline": result["curves"]["baseline"]},
        "step_profile": {"baseline": BASELINE | {"input": 0.004, "backward": 0.4, "forward": 0.22}},
        "ceilings": {"input": 1.01, "optimizer_step": 1.07, "evaluation": 1.12, "logging": 1.0},
        "contributions": [],
        "trials": unsuccessful,
        "break_even_runs": None,
    }


def recipe_of_frontier(
    recipe: dict, ratio: float, evidence: str = "", role: str = "", quality: tuple | None = None, **texts: str
) -> dict:
    return {
        "recipe": recipe,
        "text": "",
        "role": role,
        "evidence": evidence,
        "speedup": interval(ratio, 0.0 if role == "baseline" else 0.06),
        "quality": quality and dict(zip(("mean", "low", "high"), quality, strict=True)),
        "why": "",
        "to_prove": "",
    } | texts


def exact_only() -> dict:
    """A ``hasten tune`` of a task of twelve hours without a metric: the exact level, nothing trained to the end."""
    exact = {"in_memory_batches": {}, "channels_last": {}, "malloc_tuning": {}}
    frontier = [
        recipe_of_frontier({}, 1.0, role="baseline"),
        recipe_of_frontier({"fused_optimizer": {}}, 1.04, "exact", "strong baseline"),
        recipe_of_frontier(exact, 2.26, "exact", "recommended", why="bit-exact on 30 steps"),
        recipe_of_frontier(
            exact | {"bfloat16": {}},
            3.1,
            "estimated",
            why="the loss of 200 steps agrees",
            to_prove="no metric is known; add validation data and a metric",
        ),
    ]
    return ENVIRONMENT | {
        "kind": "tune",
        "task": "long.py:task",
        "verdict": "faster",
        "evidence": "exact",
        "recipe": exact,
        "recipe_file": "runs/tune-long/recipe.toml",
        "out": "runs/tune-long",
        "speedup": interval(2.26, 0.06),
        "frontier": frontier,
        "training_seconds": {"baseline": 43440.0, "tuned": 19200.0, "low": 17400.0, "high": 20400.0},
        "training_measured": False,
        "price_per_hour": 2.5,
        "money": {"baseline": 30.17, "tuned": 13.33},
        "trials": [trial("loader_workers:num_workers=2", "systems", "slower", 0.71, "two cores are busy")],
        "search_seconds": 121.0,
        "budget_seconds": 120.0,
        "break_even_runs": 0.01,
        "expected_runs": 10,
    }


def proven() -> dict:
    """A ``hasten tune`` with recipes of every evidence level."""
    exact = {"in_memory_batches": {}, "channels_last": {}}
    full = exact | {"budgeted_schedule": {"factor": 0.5, "peak": 5.0}}
    frontier = [
        recipe_of_frontier({}, 1.0, role="baseline"),
        recipe_of_frontier({"fused_optimizer": {}}, 1.14, "exact", "strong baseline"),
        recipe_of_frontier(exact, 1.95, "exact", why="in float64 the weights differ by 5e-16"),
        recipe_of_frontier(exact | {"bfloat16": {}}, 2.31, "precision checked", quality=(-0.0004, -0.0031, 0.0023)),
        recipe_of_frontier(full, 2.85, "proven", "recommended", (0.0021, -0.0011, 0.0053)),
        recipe_of_frontier(
            full | {"bfloat16": {}, "batch_size": {"factor": 4, "rule": "linear"}},
            4.4,
            "estimated",
            quality=(-0.0018, -0.0102, 0.0066),
            to_prove="5 more seeds, about 12 min: --budget +12m",
        ),
    ]
    return faster() | {
        "task": "images.py:task",
        "evidence": "proven",
        "frontier": frontier,
        "recipe": full,
        "contributions": [
            {"method": "in_memory_batches", "speedup": interval(1.56, 0.05)},
            {"method": "budgeted_schedule", "speedup": interval(1.45, 0.06)},
            {"method": "channels_last", "speedup": interval(1.24, 0.03)},
        ],
        "speedup": interval(2.85, 0.06),
        "speedup_over_strong_baseline": interval(2.5, 0.08),
        "time_to_target": {"baseline": 46.4, "strong_baseline": 40.7, "tuned": 16.3},
        "curves": {
            "baseline": [curve(seed, 80.0, 0.976) for seed in (100, 101, 102)],
            "tuned": [curve(seed, 27.0, 0.978) for seed in (100, 101, 102)],
        },
        "training_seconds": {"baseline": 82.0, "tuned": 28.8, "low": 27.1, "high": 30.5},
        "training_measured": True,
        "margin_why": "one standard deviation between seeds: no worse than another seed would be",
        "break_even_runs": 2.8,
    }


def searched() -> dict:
    """A search of digits from records/ (2026-11-22), shortened; the frontier and its evidence are added by hand."""
    return json.loads(Path(__file__).with_name("tuned_digits.json").read_text(encoding="utf-8"))


def only_estimates() -> dict:
    """A ``hasten tune`` that has not proven anything yet and is still running."""
    result = proven()
    rows = [row | {"role": "" if row["role"] == "recommended" else row["role"]} for row in result["frontier"]]
    rows = [row | {"evidence": "estimated", "to_prove": "3 more seeds, about 4 min: --budget +4m"} for row in rows[3:]]
    return no_improvement() | {
        "task": "images.py:task",
        "evidence": "",
        "why": "nothing is proven yet; three recipes are estimated to be faster",
        "frontier": [*result["frontier"][:1], *rows],
        "training_seconds": {"baseline": 82.0, "tuned": None, "low": None, "high": None},
        "training_measured": True,
        "is_partial": True,
        "margin_why": result["margin_why"],
    }


def cpu_peak(resident: float) -> dict:
    return {"device": "cpu", "resident": resident, "current": resident, "available": 8e9}


def gpu_peak(allocated: float, reserved: float) -> dict:
    return {"device": "cuda:0", "allocated": allocated, "reserved": reserved, "current": 4e9, "available": 8e10}


def compared() -> dict:
    return ENVIRONMENT | {
        "kind": "compare",
        "task": "digits",
        "a": "baseline",
        "b": "in_memory_batches + num_threads:count=1",
        "verdict": "faster",
        "ratio": interval(2.7, 0.03),
        "cpu_ratio": 2.6,
        "rounds": 4,
        "blocks": 24,
        "by_position": [{"step": 16, "ratio": interval(2.7, 0.03)}, {"step": 2900, "ratio": interval(1.5, 0.1)}],
        "seconds_per_1000_samples": {"a": 0.73, "b": 0.27},
        "evaluation_seconds": {"a": 0.08, "b": 0.03},
        "start_seconds": {"a": 0.4, "b": 0.4},
        "device": "cuda",
        "interleaved": False,
        "peak_memory_bytes": {"a": [gpu_peak(41e9, 44e9)], "b": [gpu_peak(45e9, 49.5e9), gpu_peak(40e9, 42e9)]},
        "why": "",
    }


def operations() -> dict:
    """The operations of a step in bfloat16; the four shortest get no row of their own."""
    times = {
        ("addmm", "bfloat16"): (13.0, 0.33, 0.30),
        ("mm", "bfloat16"): (26.0, 0.67, 0.25),
        ("gelu", "bfloat16"): (3.0, 0.0, 0.03),
        ("_to_copy to bfloat16", "float32"): (40.0, 0.0, 0.08),
        ("_to_copy to float32", "bfloat16"): (34.0, 0.0, 0.06),
        ("native_layer_norm", "float32"): (7.0, 0.0, 0.05),
        ("_log_softmax", "float32"): (1.0, 0.0, 0.04),
        ("arange", ""): (1.0, 0.0, 0.0003),
    }
    times |= {(f"short_{index}", "float32"): (0.2, 0.0, 0.02 - index / 1000) for index in range(10)}
    rest = 1 - sum(time for _, _, time in times.values())
    times["_fused_adamw_", "float32"] = (1.0, 0.0, rest)
    keys = ("calls_per_step", "flops_share", "time_share")
    return {
        "steps": 5,
        "rows": [
            {"op": op, "dtype": dtype} | dict(zip(keys, values, strict=True)) for (op, dtype), values in times.items()
        ],
        "loss_scale": [{"value": 65536.0, "overflow": False}, {"value": 32768.0, "overflow": True}],
        "note": "",
    }


def diagnosed() -> dict:
    return ENVIRONMENT | {
        "kind": "diagnose",
        "task": "digits",
        "verdict": "The training waits for its data: 71 % of the time goes into reading samples one at a time.",
        "phases": {
            "input": 0.71,
            "forward": 0.04,
            "backward": 0.06,
            "optimizer_step": 0.07,
            "evaluation": 0.11,
            "logging": 0.01,
        },
        "ceilings": {
            "input": 3.4,
            "forward": 1.04,
            "backward": 1.07,
            "optimizer_step": 1.08,
            "evaluation": 1.12,
            "logging": 1.01,
        },
        "advice": [
            {"method": "in_memory_batches", "bound": 3.4, "why": "samples can be read by index"},
            {"method": "loader_workers", "bound": 2.0, "why": "two cores, one of them unused"},
        ],
        "seconds_per_step": 0.0231,
        "device": "cuda",
        "peak_memory_bytes": [gpu_peak(41e9, 44e9)],
        "memory": "a batch of about 640 fits instead of 64; a larger one with gradient_accumulation",
        "flops": {
            "achieved_gflops": 1.9,
            "peak_gflops": 88.0,
            "share": 0.0216,
            "format": "float32",
            "best_format": "bfloat16",
            "best_peak_gflops": 176.0,
            "copy_gb_per_second": 12.5,
        },
        "causes": {"page faults": 12.5, "system time": 0.04},
        "operations": operations(),
        "input": {
            "stages": {"read": 1900.0, "decode": None, "map": 52_000.0, "batch": 31_000.0, "copy": None},
            "step_throughput": 6100.0,
            "end_to_end": 1850.0,
            "first_batch_seconds": 0.02,
            "prefetched": False,
            "data_wait_fraction": 0.77,
            "bottleneck": "read",
            "skipped_rows": [{"row": 3, "where": "numbers.txt line 4", "why": "no number"}],
            "not_measured": {"decode": "read includes it"},
        },
    }


def trained() -> dict:
    points = curve(0, 3.1, 0.978)["points"]
    return {
        "task": "digits",
        "metric": 0.9778,
        "best_metric": 0.9791,
        "steps": 680,
        "seconds": 3.1,
        "seconds_to_target": 1.6,
        "device": "cpu",
        "peak_memory_bytes": [cpu_peak(412e6)],
        "stopped": None,
        "tuned_settings": {"autotune_loader": {"processes": 2, "prefetch": 4}},
        "out": "runs/digits",
        "evaluations": [{"step": index * 48} | point for index, point in enumerate(points, 1)],
    }


def int8_trial(name: str, loss: float, size: int, *speeds: float, in_float: tuple[str, ...] = ()) -> dict:
    """A trial of a quantization; speeds at batch 1 and 64."""
    return {
        "name": name,
        "passed": loss <= 0.01,
        "metric": 0.9 * (1 - loss),
        "loss": loss,
        "bytes": size,
        "in_float": list(in_float),
        "speedup": {batch: interval(speed) for batch, speed in zip(("1", "64"), speeds, strict=False)},
        "seconds": {batch: 1e-4 / speed for batch, speed in zip(("1", "64"), speeds, strict=False)},
    }


def quantized() -> dict:
    """A quantization that found a faster model, with one layer in float."""
    mixed = int8_trial("static per tensor, minmax, 1 layers in float", 0.004, 60_000, 1.4, 2.3, in_float=("conv1",))
    trials = [
        int8_trial("static per tensor, minmax", 0.31, 52_000),
        int8_trial("dynamic per tensor", math.inf, 50_000),
        mixed,
        int8_trial("weights per channel", -0.001, 51_000, 1.0, 1.0),
    ]
    return {
        "kind": "quantize",
        "task": "clothes",
        "target": "cpu",
        "verdict": "faster",
        "metric": {"name": "accuracy", "higher_is_better": True},
        "max_loss": 0.01,
        "float": {"metric": 0.9, "bytes": 203_000, "seconds": {"1": 1e-4, "64": 1e-4}},
        "chosen": mixed,
        "torch_speedup": {"1": interval(0.5), "64": interval(0.7)},
        "trials": trials,
        "layers": {"conv1": 0.3, "conv2": 0.01, "head": -0.002},
        "not_tried": [{"name": "dynamic per channel", "why": "the budget is spent"}],
        "peak_memory_bytes": {"float": 14_000_000, "int8": 11_000_000},
        "threads": 1,
        "seconds": 73.0,
        "out": "runs/clothes/int8",
        **ENVIRONMENT,
    }


def nothing_quantized() -> dict:
    """A quantization in which every model loses too much."""
    trials = [
        int8_trial("integer per tensor, minmax", 0.2, 52_000),
        int8_trial("integer per channel, minmax", 0.02, 53_000),
    ]
    changed = {"target": "dsp", "verdict": "no improvement", "chosen": None, "trials": trials}
    return quantized() | changed | {"torch_speedup": {}, "layers": {}, "not_tried": [], "peak_memory_bytes": None}
