"""Terminal output of ``hasten export`` and ``hasten quantize``."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from hasten.reporting import formatting
from hasten.reporting.formatting import file_size, loss_percent
from hasten.reporting.rich_layout import DIM, GOOD, grid, headline, indented, pairs, stack
from hasten.reporting.validation import validate
from hasten.reporting.view_model import Json

MAX_LAYERS = 5


def export_answer(result: Json) -> RenderableType:
    """The files, and how well the exported model agrees with the trained one."""
    metric = result["metric"]
    rows = [(name, file_size(size)) for name, size in result["files"].items()]
    if result["difference"] is not None:
        text = f"{result['difference']:.1g} of the largest output at most (allowed: {result['tolerance']:.0e})"
        rows.append(("difference", text))
    values = [formatting.metric(metric[key]) for key in ("trained", "exported") if metric[key] is not None]
    rows.append((metric["name"], ", exported ".join(values)))
    return stack(headline(f"Exported to {result['out']}", "", True), pairs(rows))


def quantize_answer(result: Json) -> RenderableType:
    """The verdict, the trials with size, speed and loss, and what single layers cost."""
    result = validate(result)
    chosen, name, original = chosen_trial(result), result["metric"]["name"], result["float"]
    allowed = f"{name} may lose {loss_percent(result['max_loss'])}"
    if result["validation_samples"]:
        allowed += f", on {formatting.count(result['validation_samples'], 'sample', 'samples')}"
    rows = [("float", f"{name} {formatting.metric(original['metric'])}, {file_size(original['bytes'])}")]
    if chosen:
        size = f"{file_size(chosen['bytes'])} ({_share(chosen, result)})"
        rows.append(("int8", f"{chosen['name']}: {name} {formatting.metric(chosen['metric'])}, {size}"))
    if result["peak_memory_bytes"]:
        peaks = result["peak_memory_bytes"]
        in_float, in_int8 = (file_size(peaks.get(name)) for name in ("float", "int8"))
        rows.append(("peak memory", f"{in_float} in float, {in_int8} in int8, each at its largest batch"))
    if result["torch_speedup"]:
        ratios = (f"{formatting.with_interval(ratio)} at batch {n}" for n, ratio in result["torch_speedup"].items())
        rows.append(("eager PyTorch", f"over the float model: {', '.join(ratios)}"))
    layers = sorted(result["layers"].items(), key=lambda item: -(item[1] or 0.0))[:MAX_LAYERS]
    costs = [f"{layer}: {loss_percent(loss)}" for layer, loss in layers]
    rows += [("" if index else "costly layers", cost) for index, cost in enumerate(costs)]
    threads = formatting.count(result["threads"] or 1, "thread", "threads")
    rows.append(("search", f"{formatting.seconds(result['seconds'])}, {threads}"))
    end = f"Result: {result['out']}" if chosen else _nearest(result["trials"], name)
    return stack(
        headline(f"{quantize_headline(result)} ({allowed})", result["task"], bool(chosen)),
        pairs(rows),
        Text(),
        indented(_trial_table(result["trials"], chosen)),
        *(indented(Text(f"not tried: {one['name']}: {one['why']}", DIM)) for one in result["not_tried"]),
        Text(),
        Text(end, DIM),
    )


def quantize_headline(result: Json) -> str:
    """The verdict as a headline, with the speed at the largest batch or the share of the size."""
    chosen = chosen_trial(result)
    if not chosen:
        passes = any(trial["passed"] for trial in result["trials"])
        return "No int8 model is faster or smaller" if passes else "No int8 model passes"
    speeds = list(chosen["speedup"].values())
    if result["verdict"] == "faster" and speeds:
        return f"{formatting.ratio(speeds[-1]['median'])} as fast in int8"
    slow = [ratio for ratio in speeds if ratio["high"] is not None and ratio["high"] < 1.0]
    pace = f" and {formatting.ratio(min(ratio['median'] for ratio in slow))} of the speed" if slow else ""
    return f"{_share(chosen, result)} of the size{pace} in int8"


def _share(trial: Json, result: Json) -> str:
    """The size of a trial as a share of the float model's."""
    sizes = trial["bytes"], result["float"]["bytes"]
    return f"{sizes[0] / sizes[1]:.0%}" if None not in sizes and sizes[1] else formatting.UNKNOWN


def chosen_trial(result: Json) -> Json | None:
    """The chosen trial, or None, of a validated result (which has a trial with an empty name instead of None)."""
    return result["chosen"] if result["chosen"] and result["chosen"]["name"] else None


def _trial_table(trials: Sequence[Json], chosen: Json | None) -> RenderableType:
    """A row for each trial: whether it passed, its loss, its size, and its speed over float ONNX Runtime."""
    has_speed = any(trial["speedup"] for trial in trials)
    table = grid("int8", "", ">loss", ">size", *((">speed, batch 1", ">batch 64") if has_speed else ()))
    for trial in trials:
        speeds = [formatting.ratio(ratio["median"]) for ratio in trial["speedup"].values()] or ["", ""]
        is_chosen = chosen is not None and trial["name"] == chosen["name"]
        state = "chosen" if is_chosen else "passes" if trial["passed"] else "refused"
        cells = (state, loss_percent(trial["loss"]), file_size(trial["bytes"]), *(speeds if has_speed else ()))
        table.add_row(trial["name"], *cells, style=GOOD if is_chosen else "")
    return table


def _nearest(trials: Sequence[Json], metric: str) -> str:
    known = [trial for trial in trials if trial["loss"] is not None]
    if any(trial["passed"] for trial in trials):
        return "The float model is the best one to deploy"
    if not known:
        return "None has a finite metric"
    best = min(known, key=lambda trial: trial["loss"])
    return f"Allow more with --max-loss: {best['name']} loses {loss_percent(best['loss'])} of the {metric}"
