"""The measurements on an NVIDIA GPU, one step a call; ``make bench-gpu`` makes them all. docs/gpu.md says what for.

Each takes at most 10 minutes, all of them about half an hour. Without a GPU that this PyTorch can use, a step says so
and does nothing. The tests with the marker ``gpu`` (``make test-gpu``) show what needs no long measurement.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_tasks
import torch
from _common import finish, on_progress, parser, print_line, show

TASKS = Path(gpu_tasks.__file__)
SCRIPTS = TASKS.with_name("scripts")
STATE = ("name", "driver_version", "compute_mode", "clocks.sm", "power.limit", "temperature.gpu")
STATE += ("clocks_throttle_reasons.active",)
COMPARISON_S = 45.0
BF16, GRAPH = 2.0, 2.0  # the speed-ups that are expected of bfloat16 on the GPT and of a CUDA graph on the small layers
BF16_MEMORY = 0.55
PLANTED, PLANTED_TOLERANCE = (0.03, 0.10), 0.002  # shares of a step; what the step takes beside its known length
HIDDEN_MS = 1.0  # of the host in each step, which a GPU that is busy all the time hides
SUSPENSIONS, SAME_RATIO = 500, 0.01
SAME_PACE = 0.97  # of the first epoch, that the fifth must reach


def environment() -> tuple[str, bool, dict]:
    """Step 1: the GPU, its memory, its driver, and whether something slows it down."""
    free, total = torch.cuda.mem_get_info()
    query = f"--query-gpu={','.join(STATE)}"
    state = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True).stdout.strip()
    print_line(state)
    print_line(
        f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}; {free / 1e9:.0f} of {total / 1e9:.0f} GB are free"
    )
    return "nearly all memory is free", free > 0.9 * total, {"state": state, "free": free, "total": total}


def self_comparison() -> tuple[str, bool, dict]:
    """Step 4: a task compared with itself gets no verdict."""
    results = [compared("digits", "baseline", "baseline", seed=seed) for seed in range(4)]
    show(("verdict", "ratio", "spread, %"), [row_of(result) for result in results])
    wrong = sum(result["verdict"] in ("faster", "slower") for result in results)
    return f"no verdict in 4 self-comparisons; it is {wrong}", wrong == 0, {"results": results}


def planted(device: str = "cuda") -> tuple[str, bool, dict]:
    """Step 5: a step that is longer by a known share has this ratio; work of the host that the GPU hides has none."""
    task, longer = f"{TASKS}:known_step", f"{TASKS}:Longer:milliseconds="
    results, reached = {}, []
    for share in PLANTED:
        method = f"{longer}{share * gpu_tasks.KNOWN_STEP_MS:g}"
        results[f"{share:.0%} longer"] = found = compared(task, method, "baseline", 30.0, device=device)
        low, high = (found["ratio"][end] for end in ("low", "high"))
        is_narrow = high - low <= 2 * share
        reached.append(is_narrow and low - PLANTED_TOLERANCE <= 1 + share <= high + PLANTED_TOLERANCE)
    if device != "cpu":  # which cannot hide it
        found = compared(task, f"{longer}{HIDDEN_MS:g},on_host=true", "baseline", 30.0, device=device)
        results[f"{HIDDEN_MS:g} ms of the host"] = found
        reached.append(found["verdict"] not in ("faster", "slower"))
    show(("planted", "verdict", "ratio", "spread, %"), [(name, *row_of(found)) for name, found in results.items()])
    figure = f"each interval holds what was planted; {sum(reached)} of {len(reached)} do"
    return figure, all(reached), {"results": results}


def suspended(device: str = "cuda", suspensions: int = SUSPENSIONS) -> tuple[str, bool, dict]:
    """Step 6: two arms, one with four loader workers and a thread that pins, are suspended and resumed many times."""
    from hasten.benchmarking.compare import run_interleaved
    from hasten.core.recipe import Recipe
    from hasten.engine.tasks import TaskRef

    task, workers = TaskRef.of(f"{TASKS}:known_step"), Recipe.parse("loader_workers:num_workers=4")
    limits = {"budget": 500.0, "rounds": (1, 1), "looks": [suspensions // 2]}
    comparison = run_interleaved(task, Recipe(), workers, device=device, on_progress=on_progress, **limits)
    blocks, ratio = len(comparison.a.blocks), comparison.ratio.median
    print_line(f"{blocks} pairs of blocks, ratio {ratio:.4f}")
    same = abs(ratio - 1) <= SAME_RATIO and 2 * blocks == suspensions
    figure = f"no hang in {suspensions} suspensions, and the ratio is 1 to {SAME_RATIO:g}"
    return figure, same, {"result": comparison.to_json()}


def memory() -> tuple[str, bool, dict]:
    """Step 8: two arms that do not fit the GPU together are compared all the same, or the sentence names both."""
    from hasten.core.errors import RunError

    try:
        result = compared(f"{TASKS}:large", "baseline", "fused_optimizer", budget=150.0)
    except RunError as error:
        print_line(str(error))
        return "a comparison of arms of 80 GB", False, {"error": str(error)}
    print_line(str(result))
    return "a comparison of arms of 80 GB, in turns of whole processes", not result["interleaved"], {"result": result}


def largest_batch() -> tuple[str, bool, dict]:
    """Step 8: the largest batch that fits by estimate does train, without and with what saves memory."""
    from hasten.core.errors import RunError
    from hasten.core.recipe import Recipe
    from hasten.tuning.largest_batch import fitting_factor, memory_savers

    rows, trained = [], []
    for recipe in (Recipe(), memory_savers(frozenset({"cuda", "repeated_blocks"}))):
        plan = built("small_batches", recipe)
        factor = fitting_factor(plan["batch_size"], plan["peak_memory"], plan["samples_per_epoch"])
        larger = recipe.with_method("batch_size", factor=factor) if factor > 1 else recipe
        try:
            peak, why = built("small_batches", larger)["peak_memory"][0]["reserved"] / 1e9, ""
        except RunError as error:
            peak, why = float("nan"), str(error)
        rows.append((str(recipe), factor, f"{peak:.0f} GB {why}"))
        trained.append(not why)
    show(("recipe", "batch, in multiples of 4", "peak"), rows)
    grows = rows[1][1] > rows[0][1]
    figure = f"both estimates train ({sum(trained)} of 2 do), and with savings a larger batch fits ({grows})"
    return figure, all(trained) and grows, {"rows": rows}


def built(task: str, recipe: Any) -> dict:
    """The plan of an arm that has trained its first steps, in a process of its own."""
    from hasten.benchmarking.worker_group import start_workers
    from hasten.engine.tasks import TaskRef

    arguments = {"task": TaskRef.of(f"{TASKS}:{task}"), "methods": recipe.methods, "device": "cuda", "seed": 0}
    with start_workers(1, "hasten.benchmarking.arm:Arm", **arguments) as arm:
        return arm.call("build", with_evaluation=False)


def hand_over() -> tuple[str, bool, dict]:
    """Step 9: ten trials of half the GPU's memory and more, one after the other, without an "out of memory"."""
    from hasten.core.errors import RunError
    from hasten.core.recipe import Recipe

    failed, seconds = [], []
    for _ in range(10):
        began = time.monotonic()
        try:
            built("large", Recipe())
        except RunError as error:
            failed.append(str(error))
        seconds.append(time.monotonic() - began)
    print_line(f"seconds of a trial: {', '.join(f'{each:.1f}' for each in seconds)}; failed: {failed or 'none'}")
    return f"no failure in 10 trials; it is {len(failed)}", not failed, {"seconds": seconds, "failed": failed}


def launch_bound() -> tuple[str, bool, dict]:
    """Step 15: small layers: the diagnosis names the launches, and a CUDA graph removes them."""
    from hasten.profiling.diagnose import diagnose

    task = f"{TASKS}:launch_bound"
    verdict = diagnose(task, device="cuda", budget=40.0, on_progress=on_progress)["verdict"]
    print_line(verdict)
    recipes = ("cuda_graph", "compile", "compile + cuda_graph + fused_optimizer", "bfloat16")
    results = {recipe: compared(task, "baseline", recipe) for recipe in recipes}
    show(("recipe", "verdict", "ratio", "spread, %"), [(name, *row_of(found)) for name, found in results.items()])
    named, gain = "waits for Python" in verdict, results["cuda_graph"]["ratio"]["median"]
    figure = f"launch-bound is named ({named}), and cuda_graph gives {GRAPH:g}x; it is {gain:.2f}x"
    return figure, named and gain >= GRAPH, {"verdict": verdict, "results": results}


def gpt() -> tuple[str, bool, dict]:
    """Step 15: a GPT of 350 million weights: bfloat16, TF32, compiled, and all of it together."""
    task = f"{TASKS}:gpt"
    recipes = (
        "tf32",
        "bfloat16",
        "bfloat16 + compile",
        "bfloat16 + sdpa:kernel=cudnn",
        "bfloat16 + compile + cuda_graph",
    )
    results = {recipe: compared(task, "baseline", recipe) for recipe in recipes}
    show(("recipe", "verdict", "ratio", "spread, %"), [(name, *row_of(found)) for name, found in results.items()])
    bf16 = results["bfloat16"]
    gain, used = bf16["ratio"]["median"], [peak_of(bf16, arm) for arm in ("a", "b")]
    share = used[1] / used[0] if all(used) else None
    figure = (
        f"bfloat16 gives {BF16:g}x in {BF16_MEMORY:g} of the memory; it is {gain:.2f}x in {share or float('nan'):.2f}"
    )
    return figure, gain >= BF16 and (share or 1.0) <= BF16_MEMORY, {"results": results}


def copies() -> tuple[str, bool, dict]:
    """Step 16: what the ablation of the copy says, against the gain of the methods that hide it."""
    from hasten.profiling.diagnose import diagnose

    task = f"{TASKS}:copy_bound"
    found = diagnose(task, device="cuda", budget=60.0, on_progress=on_progress)
    ceilings = {name: found["ceilings"][name]["median"] for name in ("copy", "input") if name in found["ceilings"]}
    results = {
        name: compared(task, "baseline", name) for name in ("prefetch_to_device", "loader_workers:num_workers=8")
    }
    print_line(f"{found['verdict']} Phase copy: {found['phases']['copy']:.1%}; ceilings: {ceilings}")
    show(("recipe", "verdict", "ratio", "spread, %"), [(name, *row_of(each)) for name, each in results.items()])
    gain = results["prefetch_to_device"]["ratio"]["low"]
    bound = max(ceilings.values(), default=1.0)
    return (
        f"the gain {gain:.2f}x is within the ceiling {bound:.2f}x",
        gain <= bound * 1.02,
        {"found": found, "results": results},
    )


def short_batch() -> tuple[str, bool, dict]:
    """Step 17: compiled, 10.5 batches an epoch: the fifth epoch is as fast as the second, which compiles nothing."""
    paces = {
        make.__name__: paces_of(make()) for make in (gpu_tasks.images_with_short_batch, gpu_tasks.text_with_short_batch)
    }
    show(
        ("task", *(f"epoch {number}, samples/s" for number in range(2, 6))),
        [(name, *map(round, each)) for name, each in paces.items()],
    )
    worst = min(each[-1] / each[0] for each in paces.values())
    return f"epoch 5 at {SAME_PACE:g} of epoch 2 at least; it is {worst:.3f}", worst >= SAME_PACE, {"paces": paces}


def paces_of(task, device: str = "cuda") -> list[float]:
    """Samples per second of the second to fifth epoch of a compiled training; the first compiles."""
    from hasten.core.recipe import Recipe
    from hasten.engine.devices import synchronize
    from hasten.engine.loop import train_epoch
    from hasten.engine.plan import build
    from hasten.engine.registry import make_methods

    program, paces = build(task, make_methods(Recipe.coerce("compile")), device=device), []
    with program.process_context():
        for _ in range(5):
            before, began = program.run.progress.samples, time.perf_counter()
            for _ in train_epoch(program):
                pass
            synchronize(program.run.device)
            paces.append((program.run.progress.samples - before) / (time.perf_counter() - began))
    return paces[1:]


def checkpoint() -> tuple[str, bool, dict]:
    """Step 18: seconds for which a training of 1.3 billion weights stands still for a checkpoint."""
    from hasten.engine import checkpoint as states
    from hasten.engine.async_checkpoint import AsyncCheckpointer
    from hasten.engine.loop import train_steps
    from hasten.engine.plan import build

    program = build(gpu_tasks.gpt(width=2048, batch=4), device="cuda")
    writer, stalls = AsyncCheckpointer(), []
    with program.process_context(), tempfile.TemporaryDirectory() as directory:
        steps, target = train_steps(program), Path(directory) / "state.pt"

        def write(state: dict) -> None:
            torch.save(state, target)

        for number in range(3):
            next(steps)
            torch.cuda.synchronize()
            began = time.perf_counter()
            writer.begin(states.get_state(program), states.update_only_tensors(program.run), write)
            stalls.append(time.perf_counter() - began)
            began = time.perf_counter()
            writer.before_update()
            stalls[-1] += time.perf_counter() - began
            writer.finish()
            print_line(
                f"checkpoint {number + 1}: {target.stat().st_size / 1e9:.1f} GB, the stall is {stalls[-1]:.2f} s"
            )
    return f"below 2 s once the buffers exist; it is {stalls[-1]:.2f} s", stalls[-1] < 2.0, {"stalls": stalls}


def tune_digits() -> tuple[str, bool, dict]:
    """Step 19: a search on the digits."""
    return tuned("digits", 160.0)


def tune_text() -> tuple[str, bool, dict]:
    """Step 19: a search on Shakespeare's texts."""
    return tuned("tiny_shakespeare", 300.0)


def tune_gpt_script() -> tuple[str, bool, dict]:
    """Step 19: a search on a script that trains a GPT in float32."""
    return tuned_script("gpt", 150.0)


def tune_cnn_script() -> tuple[str, bool, dict]:
    """Step 19: a search on a script that trains a residual network on images that are mirrored one by one."""
    return tuned_script("cnn", 120.0)


def tune_small_script() -> tuple[str, bool, dict]:
    """Step 19: a search on a script whose layers are so small that the GPU waits for their launches."""
    return tuned_script("small", 120.0)


def tuned_script(training: str, budget: float) -> tuple[str, bool, dict]:
    """A search with the command line, as a user starts it."""
    script = ["--", sys.executable, str(SCRIPTS / "gpu_training.py"), training]
    with tempfile.TemporaryDirectory() as directory:
        options = ["--budget", f"{budget:g}s", "--json", "--out", directory]
        command = [sys.executable, "-m", "hasten", "tune", *options, *script]
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # its progress goes to stderr
        seconds = time.monotonic() - began
    result = json.loads(done.stdout)
    trials = result.get("trials", [])
    print_line(f"exit code {done.returncode} after {seconds:.0f} s: {result.get('verdict')}; {result.get('recipe')}")
    show(("what", "stage", "verdict", "why"), [(t["what"], t["stage"], t["verdict"], t["why"][:160]) for t in trials])
    failed = [trial for trial in trials if trial["verdict"] == "failed"]
    figure = f"faster, and no trial failed; it is {result.get('verdict')}, and {len(failed)} failed"
    return figure, done.returncode == 0 and not failed, {"seconds": seconds, "result": result}


def tuned(task: str, budget: float) -> tuple[str, bool, dict]:
    from hasten.tuning.tune import tune

    with tempfile.TemporaryDirectory() as directory:
        result: Any = tune(task, device="cuda", budget=budget, out=directory, on_progress=on_progress)
        trials = list(result["trials"])
    show(("what", "stage", "verdict", "why"), [(t["what"], t["stage"], t["verdict"], t["why"][:120]) for t in trials])
    failed = [trial for trial in trials if trial["verdict"] == "failed"]
    return f"no trial failed; it is {len(failed)}", not failed, {"trials": trials, "verdict": result["verdict"]}


def compared(task: str, a: str, b: str, budget: float = COMPARISON_S, seed: int = 0, device: str = "cuda") -> dict:
    from hasten.benchmarking.compare import compare

    return compare(task, a, b, device=device, budget=budget, seed=seed, on_progress=on_progress)


def peak_of(result: dict, arm: str) -> int:
    """Bytes that the allocator handed out at most, of one arm; 0 if they are unknown."""
    return max((peak["allocated"] for peak in result["peak_memory_bytes"].get(arm, ())), default=0)


def row_of(result: dict) -> tuple[str, str, str]:
    ratio, noise = result["ratio"], result.get("system_noise") or {}
    return (
        result["verdict"],
        f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        f"{noise.get('spread_percent', float('nan')):.1f}",
    )


STEPS: dict[str, Callable[[], tuple[str, bool, dict]]] = {
    step.__name__: step
    for step in (
        environment,
        self_comparison,
        planted,
        suspended,
        memory,
        largest_batch,
        hand_over,
        launch_bound,
        gpt,
        copies,
        short_batch,
        checkpoint,
        tune_digits,
        tune_text,
        tune_gpt_script,
        tune_cnn_script,
        tune_small_script,
    )
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "step", choices=STEPS, help="; ".join(f"{name}: {step.__doc__}" for name, step in STEPS.items())
    )
    options = options.parse_args()
    if not torch.cuda.is_available():
        print("there is no NVIDIA GPU here that this PyTorch can use: nothing was measured")
        return 0
    figure, reached, numbers = STEPS[options.step]()
    return finish(options, f"{options.step}: {figure}", reached, numbers)


if __name__ == "__main__":
    sys.exit(main())
