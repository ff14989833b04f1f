"""Int8 models of the workloads: size, latency at batch 1 and 64, and what the metric loses.

Each workload is trained as its textbook run, once (``--runs DIR`` keeps it), and quantized with the default budget. The
latencies are compared in turns with the float model in ONNX Runtime, the strongest float reference here, and with eager
PyTorch, all with one thread.

Figure: at most 27 % of the float file; at batch 64 at least 2x as fast as float ONNX Runtime on three of five; the
metric loses at most 1 %, or the model is refused.

Bound: int8 weights are a quarter of the bytes. On cores without int8 dot products (VNNI) the multiplication of int8
vectors has about twice the rate of float32, so that 2x is the ceiling there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _common import finish, on_progress, parser, print_progress, show

import hasten
from hasten.deploy.candidates import has_vnni
from hasten.deploy.quantize import quantize

WORKLOADS = ("digits", "fashion_mnist", "cifar10", "adult", "imdb")
SIZE, SPEED, FASTER, LOSS = 0.27, 2.0, 3, 0.01


def trained(workload: str, runs: Path) -> Path:
    """The run directory of the workload's textbook training."""
    directory = runs / f"int8-{workload}"
    if not (directory / "result.json").exists():
        print_progress(f"training {workload}")
        hasten.train(workload, out=directory, device="cpu", resume=directory.exists(), on_progress=on_progress)
    return directory


def row(workload: str, result: dict) -> tuple:
    """A row of the table."""
    chosen, size = result["chosen"], result["float"]["bytes"]
    if chosen is None:
        best = min(result["trials"], key=lambda trial: trial["loss"])
        return workload, f"{size / 1e3:.0f}", "refused", f"{best['name']} loses {best['loss']:.1%}", "", "", "", ""
    speeds = [chosen["speedup"][batch] for batch in ("1", "64")]
    of_torch = [chosen["speedup"][batch]["median"] / result["torch_speedup"][batch]["median"] for batch in ("1", "64")]
    return (
        workload,
        f"{size / 1e3:.0f}",
        f"{chosen['bytes'] / size:.0%}",
        chosen["name"],
        *(f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in speeds),
        ", ".join(f"{ratio:.1f}" for ratio in of_torch),
        f"{chosen['loss']:.2%}",
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    options.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where trained runs are kept")
    options = options.parse_args()
    results = {}
    for workload in options.workloads:
        run = trained(workload, options.runs)
        results[workload] = quantize(run, workload, budget="5m", max_loss=LOSS, on_progress=on_progress)
    heads = ("workload", "float, kB", "int8", "how", "speed-up, batch 1", "batch 64", "over eager PyTorch", "loss")
    show(heads, (row(workload, result) for workload, result in results.items()))
    chosen = {workload: result["chosen"] for workload, result in results.items() if result["chosen"]}
    fast = [name for name, one in chosen.items() if one["speedup"]["64"]["median"] >= SPEED]
    small = [name for name, one in chosen.items() if one["bytes"] <= SIZE * results[name]["float"]["bytes"]]
    figure = (
        f"at most {SIZE:.0%} of the float file: {len(small)} of {len(results)}; at least {SPEED}x at batch 64 on "
        f"{FASTER}: {len(fast)}; a loss of at most {LOSS:.0%} or refused: all {len(results)}; "
        f"{'with' if has_vnni() else 'without'} VNNI"
    )
    reached = len(small) == len(results) and len(fast) >= FASTER
    return finish(options, figure, reached, {"results": results})


if __name__ == "__main__":
    sys.exit(main())
