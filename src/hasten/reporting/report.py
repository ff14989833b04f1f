"""``report(folder)``: a run's folder in, one self-contained page out. Computing is in view_model.py, drawing in charts.py."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.reporting import charts, formatting, view_model
from hasten.reporting.result_schema import Fact, coerce, read_json, read_result

PAGE = "report.html"
_SOFTWARE = ("hasten", "python", "torch", "numpy", "cuda")
_UNITS = {"percent": "%", "gb": "GB", "mb": "MB", "seconds": "s"}  # of facts: memory_gb


def report(folder: str | Path) -> Path:
    """Writes ``report.html`` into the folder of a tune, train, compare or diagnose run.

    Returns:
        The path of the page: one file that loads nothing from anywhere.

    Raises:
        Refusal: there is no result in the folder, it is not whole, or the page cannot be written.
    """
    folder = Path(folder)
    result = read_result(folder)
    page = _render(
        result, **_CONTEXTS[result["kind"]](result), **_environment(folder, result), **_recipe(folder, result)
    )
    path = folder / PAGE
    beside = folder / f".{PAGE}.{os.getpid()}"
    try:
        beside.write_text(page, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None
    return path


def _tune(result: dict) -> dict:
    metric, times, quality = result["metric"], result["time_to_target"], result["quality"]
    higher = metric["higher_is_better"] is not False
    won, ceilings = view_model.won(result), view_model.ceiling_medians(result["ceilings"])
    headline = view_model.tune_headline(result)
    arms = view_model.arms(result["curves"], metric["target"], higher, times)
    rows = view_model.anatomy(result["step_profile"].get("baseline", {}), result["step_profile"].get("tuned", {}))
    times = {arm["name"]: arm["time"] for arm in arms} | {
        arm: seconds for arm, seconds in times.items() if seconds is not None
    }
    stairs = (
        view_model.staircase(times.get("baseline"), times.get("tuned"), view_model.contributions(result)) if won else []
    )
    return {
        "title": f"{headline}: {result['task']}",
        "headline": headline,
        "won": won,
        "times": {"baseline": times.get("baseline"), "tuned": times.get("tuned")},
        "strong_baseline": formatting.shorten(str(Recipe(result["strong_baseline_recipe"])), 80)
        if result["strong_baseline_recipe"]
        else "",
        "sentence": view_model.tune_sentence(result),
        "goal": view_model.goal(metric),
        "measured": sum(trial["ratio"]["median"] is not None for trial in result["trials"]),
        "best": view_model.best_trial(result["trials"]),
        "arms": arms,
        "curves": _drawn(charts.curves, arms, metric["target"], metric | {"higher_is_better": higher}) if arms else (),
        "waterfall": _drawn(charts.waterfall, times["baseline"], times["tuned"], stairs) if stairs else (),
        "no_effect": view_model.without_gain(result["contributions"]),
        "gate": _gate(quality, metric["unit"]),
        "anatomy": _drawn(charts.anatomy, _bars(result["step_profile"], rows)) if rows else (),
        "anatomy_rows": rows,
        "other_ceilings": view_model.other_ceilings(ceilings, result["step_profile"].get("baseline", {})),
        "ceilings": ceilings,
        "tuned_anatomy": bool(result["step_profile"].get("tuned")),
        "measured_seconds": view_model.middles(result["seconds_to_target"]),
        "speed": view_model.sources_of_speed(result),
        "stages": view_model.stages(result["trials"]),
        "domain": view_model.ratio_domain([trial["ratio"] for trial in result["trials"]]),
        "break_even": view_model.break_even(result),
    }


def _train(result: dict) -> dict:
    higher = result["higher_is_better"] is not False
    curve = {"this run": [{"seed": result["seed"], "points": result["evaluations"]}]}
    arms = view_model.arms(curve, result["target"], higher, {})
    metric = {"name": result["metric_name"], "higher_is_better": higher, "unit": ""}
    split = {name: seconds for name, seconds in result["split"].items() if seconds and seconds > 0}
    return {
        "title": f"{result['task'] or 'training'}: {formatting.metric(result['metric'])}",
        "curves": _drawn(charts.curves, arms, result["target"], metric) if arms else (),
        "split": _drawn(charts.anatomy, [("this run", formatting.seconds(sum(split.values())), split)])
        if split
        else (),
    }


def _compare(result: dict) -> dict:
    headline = view_model.compare_headline(result)
    return {"title": f"{headline}: {result['task']}", "headline": headline}


def _diagnose(result: dict) -> dict:
    ceilings = view_model.ceiling_medians(result["ceilings"])
    rows = view_model.anatomy(result["phases"], {})
    bar = [("a step", formatting.seconds(result["seconds_per_step"]), {row["phase"]: row["before"] for row in rows})]
    return {
        "title": f"Where the time goes: {result['task']}",
        "anatomy": _drawn(charts.anatomy, bar) if rows else (),
        "anatomy_rows": rows,
        "other_ceilings": view_model.other_ceilings(ceilings, result["phases"]),
        "ceilings": ceilings,
        "causes": _facts(result["causes"]),
        "input_rates": view_model.input_rates(result["input"]),
        "input_sentence": view_model.input_sentence(result["input"]),
        "input_notes": view_model.input_notes(result["input"]),
    }


_CONTEXTS = {"tune": _tune, "train": _train, "compare": _compare, "diagnose": _diagnose}


def _drawn(chart, *data) -> tuple:
    """The chart for a desk and for a phone; the page shows the one that fits."""
    return chart(*data, width=charts.WIDE), chart(*data, width=charts.NARROW)


def _gate(quality: dict, unit: str) -> tuple:
    if quality["difference"]["mean"] is None or not quality["margin"] or quality["margin"] < 0:
        return ()
    return _drawn(charts.gate, quality["difference"], quality["margin"], unit, quality["passed"])


def _bars(anatomy: dict, rows: list[dict]) -> list[tuple]:
    bars = []
    for arm, column in (("baseline", "before"), ("tuned", "after")):
        phases = {row["phase"]: row[column] for row in rows if row[column] and row[column] > 0}
        if phases:
            bars.append((arm, formatting.seconds(sum(phases.values())), phases))
    return bars


def _environment(folder: Path, result: dict) -> dict:
    """Machine, versions and noise as rows; a training's lie in environment.json beside its result."""
    machine, versions = result["machine"], result["versions"]
    beside = folder / "environment.json"
    if not machine and not versions and beside.is_file():
        found = _flat(read_json(beside))
        versions = {name: found.pop(name) for name in _SOFTWARE if name in found}
        machine = found
    elif (processes := result["processes"] or 1) > 1:
        machine = machine | {"processes": int(processes)}
    return {"machine": _facts(machine), "versions": _facts(versions), "system_noise": _facts(result["system_noise"])}


def _flat(content) -> dict:
    """One level of nesting taken out."""
    flat = {}
    for key, value in (content if isinstance(content, dict) else {}).items():
        if key != "recipe":  # which stands above
            flat |= value if isinstance(value, dict) else {key: value}
    return coerce(flat, Mapping[str, Fact], "environment.json")


def _facts(values: dict) -> list[tuple[str, str]]:
    def told(value) -> str:
        return (
            ("yes" if value else "no")
            if isinstance(value, bool)
            else f"{value:.4g}"
            if isinstance(value, float)
            else str(value)
        )

    def named(name: str) -> str:
        stem, _, unit = name.rpartition("_")
        return (f"{stem} ({_UNITS[unit]})" if unit in _UNITS else name).replace("_", " ")

    return [(named(name), told(value)) for name, value in values.items() if value is not None]


def _recipe(folder: Path, result: dict) -> dict:
    """The recipe's text and the command that trains with it; a recipe that lies in the folder is shown as it is."""
    path = folder / "recipe.toml"
    told = result.get("recipe")
    recipe = Recipe.load(path) if path.is_file() else Recipe(told if isinstance(told, dict) else {})
    command = formatting.train_command(result["task"] or "TASK", recipe.methods, str(path), result["processes"])
    try:
        return {"recipe": recipe.to_toml().strip() if recipe else "", "recipe_file": str(path), "command": command}
    except (TypeError, ValueError):
        raise ConfigurationError(f"{folder / 'result.json'}: its recipe cannot be written as TOML") from None


def _unbroken(say):
    """The same words, held on one line: a number never parts from its unit."""
    return lambda *what: say(*what).replace(" ", "\u00a0")


def _breakable(name: str) -> Markup:
    """A name that may be broken behind its punctuation, not only anywhere."""
    return Markup(re.sub(r"([:/,_])", r"\1<wbr/>", str(escape(name))))


@cache
def _templates() -> Environment:
    unbroken = (
        formatting.seconds,
        formatting.ratio,
        formatting.metric,
        formatting.plain,
        formatting.count,
        formatting.percent,
    )
    helpers = {"between": formatting.between, "breakable": _breakable}
    helpers |= {function.__name__: function for function in (charts.phase_class, charts.ratio_mark, view_model.is_good)}
    helpers |= {function.__name__: _unbroken(function) for function in unbroken}
    here = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=here, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= helpers
    return environment


def _render(result: dict, **context) -> str:
    return _templates().get_template(f"{result['kind']}.html.j2").render(result=result, kind=result["kind"], **context)
