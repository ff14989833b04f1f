"""Terminal output of ``hasten export`` and ``hasten quantize``."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from hasten.reporting import formatting
from hasten.reporting.rich_layout import DIM, GOOD, grid, headline, indented, pairs, stack

Json = Mapping[str, Any]
MAX_LAYERS = 5


def export_answer(result: Json) -> RenderableType:
    """The files, and how well the exported model agrees with the trained one."""
    metric = result["metric"]
    rows = [(name, _size(size)) for name, size in result["files"].items()]
    if result["difference"] is not None:
        text = f"{result['difference']:.1g} of the largest output at most (allowed: {result['tolerance']:.0e})"
        rows.append(("difference", text))
    values = [formatting.metric(metric[key]) for key in ("trained", "exported") if metric[key] is not None]
    rows.append((metric["name"], ", exported ".join(values)))
    return stack(headline(f"Exported to {result['out']}", "", True), pairs(rows))


def quantize_answer(result: Json) -> RenderableType:
    """The verdict, the trials with size, speed and loss, and what single layers cost."""
    chosen, name = result["chosen"], result["metric"]["name"]
    heads = {"faster": "Faster in int8", "smaller": "Smaller in int8", "no improvement": "No int8 model passes"}
    allowed = f"{name} may lose {result['max_loss']:.1%}"
    rows = [("float", f"{name} {formatting.metric(result['float']['metric'])}, {_size(result['float']['bytes'])}")]
    if chosen:
        share = chosen["bytes"] / result["float"]["bytes"]
        text = f"{chosen['name']}: {name} {formatting.metric(chosen['metric'])}, {_size(chosen['bytes'])} ({share:.0%})"
        rows.append(("int8", text))
    if result["peak_memory_bytes"]:
        peaks = result["peak_memory_bytes"]
        rows.append(("peak memory", f"{_size(peaks['float'])} in float, {_size(peaks['int8'])} in int8, at batch 64"))
    if result["torch_speedup"]:
        ratios = (f"{formatting.with_interval(ratio)} at batch {n}" for n, ratio in result["torch_speedup"].items())
        rows.append(("PyTorch", f"eager, over float: {', '.join(ratios)}"))
    layers = sorted(result["layers"].items(), key=lambda item: -item[1])[:MAX_LAYERS]
    rows += [("costly layers" if not i else "", f"{layer}: {loss:.2%}") for i, (layer, loss) in enumerate(layers)]
    rows.append(("search", f"{formatting.seconds(result['seconds'])}, {result['threads']} thread"))
    end = f"Result: {result['out']}" if chosen else f"Allow more with --max-loss; {_nearest(result['trials'], name)}"
    return stack(
        headline(f"{heads[result['verdict']]} ({allowed})", result["task"], bool(chosen)),
        pairs(rows),
        Text(),
        indented(_trial_table(result["trials"], chosen)),
        *(indented(Text(f"not tried: {one['name']}: {one['why']}", DIM)) for one in result["not_tried"]),
        Text(),
        Text(end, DIM),
    )


def _trial_table(trials: Sequence[Json], chosen: Json | None) -> RenderableType:
    """A row for each trial: whether it passed, its loss, its size, and its speed over float ONNX Runtime."""
    has_speed = any(trial["speedup"] for trial in trials)
    table = grid("int8", "", ">loss", ">size", *((">at batch 1", ">at batch 64") if has_speed else ()))
    for trial in trials:
        speeds = [formatting.ratio(ratio["median"]) for ratio in trial["speedup"].values()] or ["", ""]
        is_chosen = chosen is not None and trial["name"] == chosen["name"]
        state = "chosen" if is_chosen else "passes" if trial["passed"] else "refused"
        cells = (state, f"{trial['loss']:.2%}", _size(trial["bytes"]), *(speeds if has_speed else ()))
        table.add_row(trial["name"], *cells, style=GOOD if is_chosen else "")
    return table


def _nearest(trials: Sequence[Json], metric: str) -> str:
    best = min(trials, key=lambda trial: trial["loss"])
    return f"{best['name']} loses {best['loss']:.1%} of the {metric}"


def _size(size: float) -> str:
    """Bytes as people read them: ``24.4 kB``."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"
