"""Terminal output of the commands as rich renderables: the answer first, its evidence below, within 80 columns.

Texts are rich Text objects, never markup: a bracket in a method's name is printed as a bracket. Without a terminal rich
omits the colors, so that no information may depend on them.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from hasten.core.recipe import Recipe
from hasten.reporting import formatting, view_model
from hasten.reporting.operations import operations_table
from hasten.reporting.rich_layout import BOLD, DIM, GOOD, aligned, bar, grid, headline, indented, pairs, stack
from hasten.reporting.validation import validate
from hasten.reporting.view_model import Json

BAR_WIDTH = 40  # characters
MAX_UNSUCCESSFUL = 8  # trials; the report shows all of them
MIN_FUNCTION_SHARE, MAX_FUNCTIONS = 0.02, 5  # of a script's own functions that are shown
PHASES_OF_CODE = {"input": "in the DataLoader", "loop": "the training loop, with the loss"}
MIN_READS = 0.05  # a step; a line that reads a tensor less often costs nothing


def tune_answer(result: Json) -> RenderableType:
    """What a training gains, how sure it is, the frontier, and the unsuccessful trials."""
    result = validate(result)
    won, evidence = view_model.is_recommended(result), view_model.evidence_text(result["evidence"])
    shares = _contributions(view_model.contributions(result)) if won else []
    return stack(
        headline(view_model.tune_headline(result), result["task"], won),
        Text.assemble("with ", (str(Recipe(result["recipe"])), BOLD)) if won else "",
        view_model.tune_sentence(result),
        f"Evidence: {evidence}." if won and evidence else "",
        *frontier_table(view_model.frontier_rows(result)),
        Text(),
        pairs([*(_won_facts(result) if won else ()), *_facts(result)]),
        *shares,
        *_unsuccessful(result["trials"]),
        *[
            indented(Text(f"offered {one['method']}, not adopted: {one['why']}"))
            for one in view_model.refused_offers(result)
        ],
        *_next_commands(result, won),
    )


def frontier_table(rows: Sequence[Json]) -> list[RenderableType]:
    """Rows of ``frontier_rows``: a line of values for each, and its recipe below; nothing without rows."""
    if not rows:
        return []
    cells = [("speed-up", "", "quality", "", "evidence")]
    for row in rows:
        ratio, interval = formatting.ratio(row["speedup"]["median"]), formatting.between(row["speedup"])
        interval, change_interval = map(_in_brackets, (interval, row["change_interval"]))
        cells.append((ratio, interval, row["change"], change_interval, row["evidence"]))
    if all(row["change"] == formatting.UNKNOWN for row in rows):
        cells = [(*row[:2], "", "", row[-1]) for row in cells]
    head, *lines = aligned(cells, right=(0, 2))
    parts: list[RenderableType] = [Text(), indented(Text(head, DIM))]
    for row, line in zip(rows, lines, strict=True):
        style = GOOD if row["role"] == "recommended" else ""
        role = f"{row['role']}: " if row["role"] else ""
        parts += [indented(Text(line, style)), indented(Text.assemble((role, style or DIM), (row["text"], DIM)), 6)]
        if row["to_prove"]:
            parts.append(indented(Text(f"to prove it: {row['to_prove']}", DIM), 6))
    return parts


def _in_brackets(interval: str) -> str:
    return "" if interval in ("", formatting.UNKNOWN) else f"({interval})"


def compare_answer(result: Json) -> RenderableType:
    """The verdict of ``compare`` and both arms."""
    result = validate(result)
    arms = grid("", "recipe", ">1000 samples", ">evaluation", ">start")
    for arm in ("a", "b"):
        times = (result[key].get(arm) for key in ("seconds_per_1000_samples", "evaluation_seconds", "start_seconds"))
        arms.add_row(Text(arm, BOLD), Text(result[arm] or formatting.UNKNOWN), *map(formatting.seconds, times))
    blocks = formatting.count(result["blocks"], "block", "blocks")
    rounds = formatting.count(result["rounds"], "round", "rounds")
    arms_ran = "each arm alone, in turns" if result["interleaved"] is False else "arms interleaved"
    measured = f"{blocks}, {arms_ran}, in {rounds} of fresh processes"
    cpu_ratio = result["cpu_ratio"]
    rows = [
        ("time of a / b", f"{formatting.with_interval(result['ratio'])}, 95 % interval"),
        ("in CPU seconds", "" if cpu_ratio["median"] is None else formatting.with_interval(cpu_ratio)),
        ("processes", f"{result['processes']:.0f} in each arm" if (result["processes"] or 1) > 1 else ""),
        *(
            (f"from step {row['step'] or 0:,.0f}", formatting.with_interval(row["ratio"]))
            for row in result["by_position"]
        ),
        ("measured", measured + _noise(result["system_noise"])),
        ("device", result["device"]),
        *((f"memory of {arm}", _memory(result["peak_memory_bytes"].get(arm))) for arm in ("a", "b")),
        *(row for arm in ("a", "b") for row in _effects(result["effects"].get(arm, {}), f"effect in {arm}")),
    ]
    head = headline(view_model.compare_headline(result), result["task"], result["verdict"] == "faster")
    return stack(head, result["why"], Text(), pairs(rows), Text(), indented(arms))


def diagnose_answer(result: Json) -> RenderableType:
    """Share and ceiling of each phase, the verdict, the input pipeline, and the methods that could pay."""
    result = validate(result)
    rows, ceilings = view_model.step_profile(result["phases"], {}), view_model.ceiling_medians(result["ceilings"])
    longest = max((row["before"] for row in rows), default=1) or 1
    phases = grid("phase", "", ">share", ">ceiling")
    for row in rows:
        share, ceiling = formatting.percent(row["before"]), formatting.ratio(ceilings.get(row["phase"]))
        phases.add_row(row["phase"], bar(row["before"] / longest, BAR_WIDTH), share, ceiling)
    for name, value in view_model.other_ceilings(ceilings, result["phases"]).items():
        phases.add_row(Text(name.replace("_", " ")), "", "", formatting.ratio(value))
    return stack(
        headline("Where the time goes", result["task"], False),
        result["verdict"],
        result["drift"]["text"],
        Text(),
        indented(phases),
        Text(),
        pairs(_step_facts(result)),
        Text("  ceiling: speed-up of the whole training if the phase cost nothing", style=DIM),
        *operations_table(result["operations"]),
        *_input_throughput(result["input"]),
        *_script_facts(result),
        *advice_table(result["advice"]),
    )


def train_answer(result: Json) -> RenderableType:
    """The final metric of a training, its time and its run directory."""
    result = validate({**result, "kind": "train"})
    name, seconds = result["metric_name"] or "metric", formatting.seconds
    final, best = formatting.metric(result["metric"]), formatting.metric(result["best_metric"])
    steps = formatting.count(result["steps"], "step", "steps")
    target = "" if result["target"] is None else f"{formatting.plain(result['target'])} not reached"
    if result["seconds_to_target"] is not None:
        target = f"reached after {seconds(result['seconds_to_target'])}"
    skipped = formatting.count(result["skipped_rows"], "unreadable row", "unreadable rows")
    listed, stored = ("; skipped.jsonl lists them", "; stored in recipe.toml") if result["out"] else ("", "")
    rows = [
        (name, f"{final}, best {best}"),
        ("trained for", f"{steps} in {seconds(result['seconds'])}"),
        ("device", result["device"]),
        ("peak memory", _memory(result["peak_memory_bytes"])),
        ("target", target),
        ("stopped", "before the last planned step" if result["stopped"] else ""),
        ("skipped", skipped + listed if result["skipped_rows"] else ""),
        ("autotuned", f"{Recipe(result['tuned_settings'])}{stored}" if result["tuned_settings"] else ""),
        *(("no effect", ": ".join(pair)) for pair in result["no_effect"]),
        *_effects(result["effects"]),
        ("directory", result["out"]),
    ]
    return stack(headline(f"{formatting.sentence_case(name)} {final}", result["task"], True), pairs(rows))


def advice_table(advice: Sequence[Json]) -> list[RenderableType]:
    """The methods that could pay with the upper bound of their gain; those without a bound are grouped by reason."""
    if not advice:
        return []
    table, unbounded = grid("could pay", ">at most", "why"), {}
    for row in advice:
        if row["bound"] is None:
            unbounded.setdefault(row["why"], []).append(row["method"])
        else:
            table.add_row(Text(row["method"], BOLD), formatting.ratio(row["bound"]), Text(row["why"]))
    limit = "at most: if what it works on cost nothing; tune measures the real gain"
    parts: list[RenderableType] = [Text(), indented(table)]
    if table.row_count:
        parts.append(Text(f"  {limit}", style=DIM))
    if unbounded:
        parts += [Text(), pairs([("could pay too", f"{', '.join(names)}: {why}") for why, names in unbounded.items()])]
    return parts


def _won_facts(result: Json) -> list[tuple[str, str]]:
    metric, quality = result["metric"], result["quality"]
    rows = []
    if quality["tuned"] is not None:
        tuned, baseline = (formatting.metric(quality[arm], metric["unit"]) for arm in ("tuned", "baseline"))
        rows.append((metric["name"] or "metric", f"{tuned}, baseline {baseline}"))
    return [*rows, *_effects(result["effects"])]


def _facts(result: Json) -> list[tuple[str, str]]:
    """What is worth knowing with a recipe and without one: margin, time and price of a training, and of the search."""
    quality, seconds, takes, price = result["quality"], result["training_seconds"]["baseline"], "", ""
    margin = formatting.plain(quality["margin"], result["metric"]["unit"], 2)
    if seconds is not None and not view_model.is_recommended(result):
        source = "" if result["training_measured"] else ", predicted from measured steps"
        takes = f"takes {formatting.seconds(seconds)}{source}"
    if prices := view_model.prices(result):
        before, tuned, hour = prices
        amount = before if tuned == formatting.UNKNOWN else f"{tuned} instead of {before}"
        price = f"{amount} for a training, at {hour} an hour"
    elif result["price_per_hour"] is not None:
        price = "unknown, as is the length of the training"
    return [
        ("margin", "" if quality["margin"] is None else ", ".join(filter(None, (margin, result["margin_why"])))),
        ("a training", takes),
        ("price", price),
        *(
            (one["what"], f"{one['verdict']}: {one['why']}")
            for one in result["trials"]
            if one["verdict"] in view_model.NOT_DONE
        ),
        ("device", result["machine"].get("gpu") or result["machine"].get("device") or ""),
        ("peak memory", ", ".join(view_model.peak_memory(result) or ())),
        *_single_process(result),
        *_search_cost(result),
    ]


def _memory(peaks: Sequence[Json] | None, sentence: str = "") -> str:
    return "; ".join(filter(None, (formatting.peak_memory(peaks), sentence))) if peaks else ""


def _effects(effects: Json, label: str = "effect") -> list[tuple[str, str]]:
    """What shows that each method acted."""
    return [(label if index == 0 else "", f"{name}: {seen}") for index, (name, seen) in enumerate(effects.items())]


def _search_cost(result: Json) -> list[tuple[str, str]]:
    if result["search_seconds"] is None:
        return []
    took = f"took {formatting.seconds(result['search_seconds'])}{_noise(result['system_noise'])}."
    unfinished = "It has not ended; this is the best answer so far." if result["is_partial"] else ""
    return [("search", f"{took} {view_model.break_even(result)}".strip()), ("", unfinished)]


def _single_process(result: Json) -> list[tuple[str, str]]:
    """(name, text) rows: speed of a single process, without methods and with the recipe, against several."""
    rows = []
    ratio, winner = result["one_process"], result["winner_in_one_process"]
    if ratio["median"] is not None:
        job = f"{formatting.plain(result['processes'])} processes without methods"
        text = f"with all cores, or OMP_NUM_THREADS: {formatting.with_interval(ratio)} as fast as {job}"
        rows.append(("one process", text))
    if winner["median"] is not None:
        text = f"with the methods of the best recipe that apply: {formatting.with_interval(winner)} as fast per sample"
        rows.append(("", text))
    return rows


def _contributions(shares: Sequence[Json]) -> list[RenderableType]:
    """How much slower the recipe is without each method, as bars that start at a ratio of 1."""
    known = [share for share in shares if share["speedup"]["median"]]
    known.sort(key=lambda share: -share["speedup"]["median"])
    if not known:
        return []
    longest = max(known[0]["speedup"]["median"] - 1, 1e-9)
    table = grid("slower without it by", ">", "", "")
    for share in known:
        ratio = share["speedup"]["median"]
        name, interval = formatting.shorten(share["method"], 34), Text(formatting.between(share["speedup"]), DIM)
        table.add_row(name, formatting.ratio(ratio), interval, bar((ratio - 1) / longest, 20))
    return [Text(), indented(table)]


def _unsuccessful(trials: Sequence[Json]) -> list[RenderableType]:
    """The first trials that were compared and not adopted, the methods without effect, and the number of the rest."""
    rejected = list({(trial["what"], trial["why"]): trial for trial in view_model.unsuccessful(trials)}.values())
    shown = [trial for trial in rejected if trial["verdict"] not in view_model.NOT_RUN][:MAX_UNSUCCESSFUL]
    no_effect = [trial for trial in rejected if trial["verdict"] == "no effect"]
    reasons = [f"{trial['what']}: " * trial["why"].startswith("it ") + trial["why"] for trial in no_effect]
    table = grid("tried without success", "", ">", "")
    names = [formatting.shorten(trial["what"], 28) for trial in shown]
    for trial, name in zip(shown, names, strict=True):
        ratio, why = formatting.ratio(trial["ratio"]["median"]), Text(trial["why"], DIM)
        table.add_row(name if names.count(name) == 1 else trial["what"], trial["verdict"], ratio, why)
    parts = [indented(table)] if shown else []
    parts += [indented(Text(f"not measured: {why}", DIM)) for why in dict.fromkeys(reasons)]
    more = len(rejected) - len(shown) - len(no_effect)
    if more:
        text = f"and {more} more" if parts else f"{formatting.count(more, 'method was', 'methods were')} not tried"
        parts.append(indented(Text(f"{text}; the report lists all of them", DIM)))
    return [Text(), *parts] if parts else []


def _next_commands(result: Json, won: bool) -> list[RenderableType]:
    """The run directory, and the commands that make the report and train with the recipe."""
    parts, recipe = [], result["recipe"] if won else {}
    if result["out"]:
        report = f"hasten report {shlex.quote(result['out'])}"
        parts.append(Text(f"Run directory: {result['out']}; report: {report}", style=DIM))
    if recipe and result["recipe_file"]:
        names = (result["task"], recipe, result["recipe_file"], result["processes"], result["command"])
        parts.append(Text(formatting.train_command(*names), no_wrap=True, overflow="ignore"))
    return [Text(), *parts] if parts else []


def _step_facts(result: Json) -> list[tuple[str, str]]:
    flops, arithmetic = result["flops"], ""
    achieved, peak, best, copied = map(
        formatting.plain,
        (flops[name] for name in ("achieved_gflops", "peak_gflops", "best_peak_gflops", "copy_gb_per_second")),
    )
    if flops["share"] is not None:
        of_peak = f" ({achieved} of {peak} GFLOP/s)" if flops["peak_gflops"] else ""
        arithmetic = f"{formatting.percent(flops['share'])} of the measured peak{of_peak}"
    has_faster = flops["best_peak_gflops"] and flops["best_format"] != flops["format"]
    return [
        ("step", formatting.seconds(result["seconds_per_step"])),
        ("device", result["device"]),
        ("peak memory", _memory(result["peak_memory_bytes"], result["memory"])),
        ("arithmetic", arithmetic),
        ("fastest format", f"{flops['best_format']}, a peak of {best} GFLOP/s" if has_faster else ""),
        ("copying in memory", f"{copied} GB/s" if flops["copy_gb_per_second"] else ""),
        *(
            (name.replace("_", " "), _cause(name, value))
            for name, value in result["causes"].items()
            if value is not None
        ),
        ("disturbed", view_model.disturbance(result["system_noise"])),
    ]


def _cause(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    is_share = name.endswith(("_share", "_cost"))
    return formatting.percent(value) if is_share else formatting.plain(value, digits=3)


def _input_throughput(measured: Json) -> list[RenderableType]:
    """A bar for each stage of the input pipeline and for the training step; nothing if nothing was measured."""
    rates, notes = view_model.input_rates(measured), view_model.input_notes(measured)
    if not rates and not notes:
        return []
    longest = max((rate for _, rate, _ in rates), default=1.0)
    table = grid("input", "", ">samples/s")
    for name, rate, is_bottleneck in rates:
        table.add_row(Text(name, BOLD if is_bottleneck else ""), bar(rate / longest, BAR_WIDTH), f"{rate:,.0f}")
    sentence = view_model.input_sentence(measured)
    return [Text(), indented(table), *([Text(sentence)] if sentence else []), *([pairs(notes)] if notes else [])]


def _script_facts(result: Json) -> list[RenderableType]:
    """What was found in a script: its metric, its sites, the tensors that it reads, and its own functions."""
    if not any(result["sites"].values()):
        return []
    rows = [("metric", view_model.metric_text(result["metric"]))]
    rows += view_model.site_rows(result["sites"])
    parts: list[RenderableType] = [Text(), pairs(rows)]
    own = [one for one in result["functions"] if (one["share"] or 0) >= MIN_FUNCTION_SHARE]
    if own:
        table = grid("the script's own code", "", ">of the time")
        for one in own[:MAX_FUNCTIONS]:
            where = PHASES_OF_CODE.get(one["phase"], "")
            table.add_row(Text(f"{one['function']}, {one['site']}"), where, formatting.percent(one["share"]))
        parts += [Text(), indented(table)]
    reads = [one for one in result["synchronizations"] if (one["per_step"] or 0) >= MIN_READS]
    if reads:
        table = grid("reads a tensor on the host", "", ">a step", ">takes")
        for one in sorted(reads, key=lambda one: -(one["seconds_per_step"] or 0))[:MAX_FUNCTIONS]:
            table.add_row(
                one["site"], one["call"], f"{one['per_step']:.3g}", formatting.seconds(one["seconds_per_step"])
            )
        waits = "the CPU waits there for the GPU" if "cuda" in result["facts"] else "on a GPU, the CPU would wait there"
        parts += [Text(), indented(table), Text(f"  {waits}; read it less often, or later", style=DIM)]
    return parts


def _noise(noise: Mapping[str, Any]) -> str:
    spread, throttling = noise.get("spread_percent"), noise.get("gpu_throttling", "none")
    text = f"; blocks differ by {spread:.1f} %" if isinstance(spread, (int, float)) and spread else ""
    text += "" if throttling == "none" else f"; the GPU was throttled: {throttling}"
    disturbed = view_model.disturbance(noise)
    return f"{text}; {disturbed}" if disturbed else text
