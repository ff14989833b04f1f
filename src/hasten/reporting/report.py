"""Writes the HTML report of a run directory. Values are computed in view_model.py and drawn in charts.py."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.reporting import charts, formatting, view_model
from hasten.reporting.frontier_chart import frontier as draw_frontier
from hasten.reporting.frontier_chart import has_quality, legend, small_mark
from hasten.reporting.operations import loss_scale_sentence, operation_groups, operations_note
from hasten.reporting.result_schema import EVIDENCE_LEVELS, Fact
from hasten.reporting.terminal_deploy import chosen_trial, quantize_headline
from hasten.reporting.validation import coerce, read_json, read_result
from hasten.reporting.view_model import Json

FILE_NAME = "report.html"
_SOFTWARE = ("hasten", "python", "torch", "numpy", "cuda")
# by the end of a fact's name, as in memory_gb
_UNITS = {"percent": "%", "gb": "GB", "mb": "MB", "seconds": "s", "mhz": "MHz", "w": "W", "c": "°C"}


def report(run_dir: str | Path) -> Path:
    """Writes ``report.html`` into the run directory of tune or train, or the directory of quantize.

    Args:
        run_dir: The run directory; it contains ``result.json``.

    Returns:
        The path of the report: one file that loads nothing from the network.

    Raises:
        ConfigurationError: There is no result of tune, train or quantize, it is incomplete or has a value of the wrong
            type, or the report cannot be written.
    """
    directory = Path(run_dir)
    result = read_result(directory)
    if result["kind"] not in _CONTEXTS:
        advice = "reports are about the results of `hasten tune`, `train` and `quantize`"
        raise ConfigurationError(f"{directory} holds the result of `hasten {result['kind']}`; {advice}")
    context = _CONTEXTS[result["kind"]](result) | _environment(directory, result) | _recipe(directory, result)
    template = _templates().get_template(f"{result['kind']}.html.j2")
    page = template.render(result=result, kind=result["kind"], **context)
    path, temporary = directory / FILE_NAME, directory / f".{FILE_NAME}.{os.getpid()}"
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None
    return path


def _tune(result: Json) -> Json:
    metric, quality = result["metric"], result["quality"]
    metric = metric | {"higher_is_better": metric["higher_is_better"] is not False}
    arms = view_model.arms(result["curves"], metric["target"], metric["higher_is_better"], result["time_to_target"])
    measured_times = {arm: time for arm, time in result["time_to_target"].items() if time is not None}
    times = {arm["name"]: arm["time"] for arm in arms} | measured_times
    baseline, tuned = times.get("baseline"), times.get("tuned")
    won, shares = view_model.is_recommended(result), view_model.contributions(result)
    steps = view_model.staircase(baseline, tuned, shares) if won else []
    profiles, rows = result["step_profile"], view_model.frontier_rows(result)
    phases = view_model.step_profile(profiles.get("baseline", {}), profiles.get("tuned", {}))
    return {
        "title": f"{view_model.tune_headline(result)}: {result['task']}",
        "won": won,
        "times": {"baseline": baseline, "tuned": tuned},
        "frontier": rows,
        "frontier_chart": _drawings(draw_frontier, rows, result["metric"], quality["margin"]) if len(rows) > 1 else (),
        "arms": arms,
        "curves": _drawings(charts.curves, arms, metric["target"], metric) if arms else (),
        "waterfall": _drawings(charts.waterfall, baseline, tuned, steps) if steps else (),
        "gate": _gate(quality, metric["unit"]),
        "phases": phases,
        "phase_bars": _drawings(charts.phase_bars, _bars(phases)) if phases else (),
        "ceilings": view_model.ceiling_medians(result["ceilings"]),
        "operations_notes": _operations_notes(result["operations"]),
    }


def _train(result: Json) -> Json:
    higher = result["higher_is_better"] is not False
    curve = {"this run": [{"seed": result["seed"], "points": result["evaluations"]}]}
    arms = view_model.arms(curve, result["target"], higher, {})
    metric = {"name": result["metric_name"], "higher_is_better": higher, "unit": ""}
    split = {name: seconds for name, seconds in result["split"].items() if seconds and seconds > 0}
    bar = ("this run", formatting.seconds(sum(split.values())), split)
    return {
        "title": f"{result['task'] or 'training'}: {formatting.metric(result['metric'])}",
        "curves": _drawings(charts.curves, arms, result["target"], metric) if arms else (),
        "split": _drawings(charts.phase_bars, [bar]) if split else (),
    }


def _quantize(result: Json) -> Json:
    chosen = chosen_trial(result)
    return {
        "chosen": chosen,
        "title": f"{quantize_headline(result)}: {result['task']}",
        "headline": quantize_headline(result),
        "losses": _drawings(charts.losses, result["trials"], chosen, result["max_loss"]),
        "layers": _drawings(charts.layers, result["layers"]) if result["layers"] else (),
    }


_CONTEXTS = {"tune": _tune, "train": _train, "quantize": _quantize}


def _drawings(chart: Callable[..., Markup], *args: Any) -> tuple[Markup, Markup]:
    """Calls ``chart(*args, width)`` for a desktop and a phone; the page shows the drawing that fits."""
    return chart(*args, width=charts.WIDE), chart(*args, width=charts.NARROW)


def _gate(quality: Json, unit: str) -> tuple[Markup, ...]:
    if quality["difference"]["mean"] is None or not quality["margin"]:
        return ()
    return _drawings(charts.gate, quality["difference"], quality["margin"], unit, quality["passed"])


def _operations_notes(operations: Json) -> list[str]:
    scale = loss_scale_sentence(operations["loss_scale"])
    return [operations_note(operations), *([f"loss scale: {scale}"] if scale else []), operations["note"]]


def _bars(rows: Iterable[Json]) -> list[tuple[str, str, Json]]:
    bars = []
    for arm, column in (("baseline", "before"), ("tuned", "after")):
        phases = {row["phase"]: row[column] for row in rows if row[column] and row[column] > 0}
        if phases:
            bars.append((arm, formatting.seconds(sum(phases.values())), phases))
    return bars


def _environment(directory: Path, result: Json) -> Json:
    """Machine, versions and noise for the report; those of a training come from environment.json."""
    machine, versions = result["machine"], result["versions"]
    path = directory / "environment.json"
    if not machine and not versions and path.is_file():
        machine = _flatten(read_json(path))
        versions = {name: machine.pop(name) for name in _SOFTWARE if name in machine}
    elif (result.get("processes") or 1) > 1:
        machine = machine | {"processes": int(result["processes"])}
    return {"machine": _facts(machine), "versions": _facts(versions), "system_noise": _facts(result["system_noise"])}


def _flatten(content: Any) -> Json:
    """Merge nested objects into their parent, without the recipe, which the report shows elsewhere."""
    flat = {}
    for key, value in (content if isinstance(content, dict) else {}).items():
        if key != "recipe":
            flat |= value if isinstance(value, dict) else {key: value}
    return coerce(flat, Mapping[str, Fact], "environment.json")


def _facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) as texts: ``memory_gb: 23.5`` becomes ("memory (GB)", "23.5")."""
    rows = []
    for name, value in values.items():
        stem, _, unit = name.rpartition("_")
        label = (f"{stem} ({_UNITS[unit]})" if unit in _UNITS else name).replace("_", " ")
        if isinstance(value, bool):
            rows.append((label, "yes" if value else "no"))
        elif value is not None:
            rows.append((label, f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows


def _task_argument(directory: Path, result: Json) -> str:
    """The task as the command line takes it; the result of a training has only the name of the Task."""
    path = directory / "environment.json"
    content = read_json(path) if result["kind"] == "train" and path.is_file() else {}
    code = content.get("code") if isinstance(content, dict) else None  # "mine.py:task-HASH"
    return (code.rpartition("-")[0] if isinstance(code, str) else "") or result["task"] or "TASK"


def _recipe(directory: Path, result: Json) -> Json:
    """The recipe as TOML (recipe.toml, else from the result), and the command that trains with it."""
    if result["kind"] == "quantize":
        return {}
    path = directory / "recipe.toml"
    methods = result.get("recipe")
    recipe = Recipe.load(path) if path.is_file() else Recipe(methods if isinstance(methods, dict) else {})
    task = _task_argument(directory, result)
    command = formatting.train_command(task, recipe.methods, str(path), result["processes"], result.get("command", ""))
    try:
        return {"recipe": recipe.to_toml().strip() if recipe else "", "recipe_file": str(path), "command": command}
    except (TypeError, ValueError):
        raise ConfigurationError(f"{directory / 'result.json'}: its recipe cannot be written as TOML") from None


def _with_fixed_spaces(function: Callable[..., str]) -> Callable[..., str]:
    """The same function with non-breaking spaces in its result: a number stays on one line with its unit."""
    return lambda *args: function(*args).replace(" ", "\u00a0")


def _breakable(name: str) -> Markup:
    """HTML of a name that the browser may wrap after punctuation."""
    return Markup(re.sub(r"([:/,])", r"\1<wbr/>", str(escape(name))))


def _with_code(sentence: str) -> Markup:
    """HTML of a sentence; options of the command line in it are code that does not wrap."""
    return Markup(re.sub(r"(--[\w-]+(?: \+?\d\w*)?)", r'<code class="nowrap">\1</code>', str(escape(sentence))))


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    for name in ("seconds", "ratio", "metric", "plain", "count", "percent", "loss_percent"):
        environment.globals[name] = _with_fixed_spaces(getattr(formatting, name))
    functions = (charts.phase_class, charts.ratio_mark, small_mark, has_quality, legend, operation_groups)
    texts = (formatting.between, formatting.peak_memory, formatting.file_size, formatting.sentence_case)
    for function in (*functions, *texts):
        environment.globals[function.__name__] = function
    environment.globals |= {"view": view_model, "evidence_levels": EVIDENCE_LEVELS}
    environment.globals |= {"breakable": _breakable, "with_code": _with_code}
    return environment
