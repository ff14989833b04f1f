"""What the command line prints, as rich renderables: the answer first, its evidence below, within 80 columns.

Results go through the same shapes as the page's. Texts are Text objects, never markup: a bracket in a method's
name is a bracket. Where the output is no terminal, rich leaves the colours out and the words carry everything.
"""

import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hasten.core.card import FACTS, PHASES, TRAITS, Exactness
from hasten.core.recipe import Recipe
from hasten.reporting import formatting, view_model
from hasten.reporting.result_schema import validate
from hasten.reporting.rich_layout import HEAD, QUIET, bar, grid, headline, indented, pairs

BAR = 40  # characters
MOST_LOSERS = 8  # shown in the terminal; the page has them all

CHANGES = {
    Exactness.BIT_EXACT: "every weight is the same to the last bit",
    Exactness.EQUIVALENT_MATH: "the same formula; rounding may differ",
    Exactness.REDUCED_PRECISION: "the same formula with fewer bits; quality is tested",
    Exactness.CHANGES_TRAINING: "another way to train; quality is tested",
}


def tune_answer(result: dict) -> RenderableType:
    """The verdict of ``tune``, what each method gave, and what was tried in vain."""
    result = validate(result)
    won = view_model.won(result)
    parts = [
        headline(view_model.tune_headline(result), result["task"], won),
        Text(view_model.tune_sentence(result)),
        Text(),
    ]
    if won:
        parts += [
            _before_and_after(result["time_to_target"]),
            pairs(_sureness(result)),
            *_contributions(view_model.contributions(result)),
        ]
    else:
        best = view_model.best_trial(view_model.in_vain(result["trials"]))
        closest = (
            [("the best", f"{best['what']}, {formatting.with_interval(best['ratio'])}: {best['verdict']}")]
            if best
            else []
        )
        parts.append(
            pairs(
                [
                    *closest,
                    *_one_process(result),
                    (
                        "the search",
                        f"took {formatting.seconds(result['search_seconds'])}. {view_model.break_even(result)}",
                    ),
                ]
            )
        )
    return Group(*parts, *_losers(result["trials"]), *_where(result, won))


def compare_answer(result: dict) -> RenderableType:
    """The verdict of ``compare`` and both arms side by side."""
    result = validate(result)
    good = result["verdict"] == "faster"
    arms = grid("", "recipe", ">1000 samples", ">evaluation", ">start")
    for arm in ("a", "b"):
        costs = (result[key].get(arm) for key in ("seconds_per_1000_samples", "evaluation_seconds", "start_seconds"))
        arms.add_row(Text(arm, HEAD), Text(result[arm] or formatting.NOTHING), *map(formatting.seconds, costs))
    evidence = [("time of a / b", f"{formatting.with_interval(result['ratio'])}, 95 % interval")]
    if result["cpu_ratio"]["median"] is not None:
        evidence.append(("in CPU seconds", formatting.with_interval(result["cpu_ratio"])))
    if (result["processes"] or 1) > 1:
        evidence.append(("processes", f"{result['processes']:.0f} in each arm"))
    evidence.append(
        (
            "measured",
            f"{formatting.count(result['blocks'], 'block', 'blocks')}, the arms taking turns{_noise(result['system_noise'])}",
        )
    )
    why = [Text(result["why"])] if result["why"] else []
    return Group(
        headline(view_model.compare_headline(result), result["task"], good),
        *why,
        Text(),
        pairs(evidence),
        Text(),
        indented(arms),
    )


def diagnose_answer(result: dict) -> RenderableType:
    """A bar for every phase with its share and ceiling, the verdict in words, and what could pay."""
    result = validate(result)
    rows = view_model.anatomy(result["phases"], {})
    ceilings = view_model.ceiling_medians(result["ceilings"])
    longest = max((row["before"] for row in rows), default=1) or 1
    phases = grid("phase", "", ">share", ">ceiling")
    for row in rows:
        phases.add_row(
            row["phase"],
            bar(row["before"] / longest, BAR),
            formatting.percent(row["before"]),
            formatting.ratio(ceilings.get(row["phase"])),
        )
    for name, value in view_model.other_ceilings(ceilings, result["phases"]).items():
        phases.add_row(Text(name.replace("_", " ")), "", "", formatting.ratio(value))
    parts = [headline("Where the time goes", result["task"], False), Text(result["verdict"]), Text(), indented(phases)]
    parts += [
        Text(),
        pairs(_step_facts(result)),
        Text("  ceiling: how much faster the whole would be if the phase cost nothing", style=QUIET),
    ]
    return Group(*parts, *_input_throughput(result["input"]), *advised(result["advice"]))


def _input_throughput(measured: dict) -> list[RenderableType]:
    """A bar for every stage of the input pipeline beside the training step; nothing if nothing was measured."""
    rates, notes = view_model.input_rates(measured), view_model.input_notes(measured)
    if not rates and not notes:
        return []
    longest = max((rate for _, rate, _ in rates), default=1.0)
    table = grid("input", "", ">samples/s")
    for name, rate, slowest in rates:
        table.add_row(Text(name, HEAD if slowest else ""), bar(rate / longest, BAR), f"{rate:,.0f}")
    sentence = view_model.input_sentence(measured)
    return [Text(), indented(table), *([Text(sentence)] if sentence else []), *([pairs(notes)] if notes else [])]


def advised(advice: list[dict]) -> list[RenderableType]:
    """What could pay, at most how much, and why."""
    if not advice:
        return []
    table = grid("could pay", ">at most", "why")
    for row in advice:
        if row["bound"] is not None:
            table.add_row(Text(row["method"], HEAD), formatting.ratio(row["bound"]), Text(row["why"]))
    return [Text(), indented(table), *_unbounded(advice)]


def train_answer(result: dict) -> RenderableType:
    """The numbers that a training ended with."""
    result = validate({**result, "kind": "train"})
    name = result["metric_name"] or "metric"
    rows = [(name, f"{formatting.metric(result['metric'])}, at its best {formatting.metric(result['best_metric'])}")]
    rows.append(
        (
            "trained for",
            f"{formatting.count(result['steps'], 'step', 'steps')} in {formatting.seconds(result['seconds'])}",
        )
    )
    if result["seconds_to_target"] is not None:
        rows.append(("target", f"reached after {formatting.seconds(result['seconds_to_target'])}"))
    elif result["target"] is not None:
        rows.append(("target", f"{formatting.plain(result['target'])} not reached"))
    if result["stopped"]:
        rows.append(("stopped", "before the plan's last step"))
    if result["skipped_rows"]:
        many = formatting.count(result["skipped_rows"], "row", "rows")
        rows.append(
            ("left out", f"{many} that could not be read{'; skipped.jsonl lists them' if result['out'] else ''}")
        )
    if result["tuned_settings"]:
        where = "; recipe.toml keeps it" if result["out"] else ""
        rows.append(("found", f"{Recipe(result['tuned_settings'])}, while it ran{where}"))
    rows += [("no_effect", ": ".join(pair)) for pair in result["no_effect"]]
    if result["out"]:
        rows.append(("folder", result["out"]))
    return Group(
        headline(f"{name.capitalize()} {formatting.metric(result['metric'])}", result["task"], True), pairs(rows)
    )


def methods_table(methods: list[dict]) -> RenderableType:
    """The catalogue, gathered by what a method may change.

    Args:
        methods: ``{"name", "summary", "exactness": its words, "gain": (low, high) or None, "not_here": why, or None}``.
    """
    table = grid("", ">claimed", "")
    for exactness, changes in CHANGES.items():
        members = [method for method in methods if method["exactness"] == exactness.value]
        if members:
            table.add_row(Text(exactness.value.capitalize(), HEAD), "", Text(changes, QUIET))
        for method in members:
            not_here = f" ({method['not_here']})" if method.get("not_here") else ""
            table.add_row(
                Text(f"  {method['name']}"), _claim(method), Text.assemble(method["summary"], (not_here, QUIET))
            )
        if members:
            table.add_row()
    return Group(
        table,
        Text("Claims are their sources'; `hasten tune TASK` measures. `hasten methods NAME` tells more.", style=QUIET),
    )


def method_page(method: dict) -> RenderableType:
    """One method: its card, settings, place among the others, conflicts and records.

    Args:
        method: the card's fields by name, with ``text``, ``hooks``, ``settings`` ([{name, type, default, range}]), ``wraps``,
            ``wrapped_by``, ``conflicts`` ([{method, why}]), ``records`` ([{task, what, verdict, ratio}]) and ``not_here`` where they are known.
    """
    known = {exactness.value: changes for exactness, changes in CHANGES.items()}
    rows = [
        ("changes", f"{method['exactness']}: {known.get(method['exactness'], '')}"),
        ("claimed", f"{_claim(method)}{'; ' if method.get('gain_when') else ''}{method.get('gain_when', '')}"),
        ("source", method.get("source")),
        ("not here", method.get("not_here")),
        ("shortens", _meanings(method, "accelerates", PHASES)),
        ("applies if", _meanings(method, "applies_to", FACTS)),
        ("requires", _meanings(method, "requires", TRAITS)),
        ("invalidates", _meanings(method, "invalidates", TRAITS)),
        ("settings", "\n".join(_setting(each) for each in method.get("settings", ()))),
        ("tuner tries", "\n".join(str(Recipe({method["name"]: values})) for values in method.get("presets", ()))),
        *(
            (name.replace("_", " "), ", ".join(sorted(method.get(name, ()))))
            for name in ("hooks", "replaces", "wraps", "wrapped_by")
        ),
        ("conflicts", "\n".join(f"{each['method']}: {each['why']}" for each in method.get("conflicts", ()))),
        ("records", "\n".join(_record(each) for each in method.get("records", ()))),
    ]
    paragraphs = [" ".join(each.replace("``", "").split()) for each in (method.get("text") or "").split("\n\n")]
    told = [Text("\n".join(paragraphs)), Text()] if any(paragraphs) else []
    return Group(
        headline(method["name"], "", False),
        Text(method["summary"]),
        Text(),
        *told,
        pairs([row for row in rows if row[1]]),
    )


def _setting(setting: dict) -> str:
    """What it is unless said, and in brackets what can be typed."""
    name, default, kind = (setting[key] for key in ("name", "default", "type"))
    allowed = f", {setting['range']}" if setting.get("range") else ""
    if default is None:
        return f"{name}: unless said, the method chooses ({kind}{allowed})"
    default, kind = (str(default).lower(), "true or false") if isinstance(default, bool) else (default, kind)
    return f"{name} = {default} ({kind}{allowed})"


def _record(record: dict) -> str:
    """A trial of the method in somebody's search."""
    ratio = (record.get("ratio") or {}).get("median")
    return f"{record['task']}: {record['what']} {record['verdict']}{f', {ratio:.2f}x' if ratio else ''}"


def _before_and_after(times: dict) -> RenderableType:
    longest = max((value for value in times.values() if value), default=None)
    table = Table.grid(padding=(0, 2))
    for arm, style in (("baseline", QUIET), ("strong_baseline", QUIET), ("tuned", "cyan")):
        if longest and times.get(arm) is not None:
            table.add_row(
                arm.replace("_", " "), bar(times[arm] / longest, BAR, style), Text(formatting.seconds(times[arm]), no_wrap=True)
            )
    return Group(indented(table), Text()) if table.row_count else Text()


def _sureness(result: dict) -> list[tuple[str, str]]:
    metric, quality, over = result["metric"], result["quality"], result["speedup_over_strong_baseline"]
    tested = f"{metric['name'] or 'metric'} {formatting.metric(quality['tuned'], metric['unit'])}, baseline {formatting.metric(quality['baseline'], metric['unit'])}"
    rows = [("sure", f"{formatting.between(result['speedup'])}, 95 % interval{_noise(result['system_noise'])}")]
    rows.append(("quality", f"{tested}, margin {formatting.plain(quality['margin'], metric['unit'], 2)}: passed"))
    if over["median"] is not None:
        strong = Recipe(result["strong_baseline_recipe"])
        rows.append(
            (
                "strong baseline",
                f"{formatting.with_interval(over)} over a set-up by hand{f': {strong}' if strong else ''}",
            )
        )
    rows += _one_process(result)
    rows.append(("the search", f"took {formatting.seconds(result['search_seconds'])}. {view_model.break_even(result)}"))
    return rows


def _one_process(result: dict) -> list[tuple[str, str]]:
    """What one process would be, as the original is and with what was found."""
    rows = []
    if (ratio := result["one_process"])["median"] is not None:
        job = f"{formatting.plain(result['processes'])} as they are"
        rows.append(
            (
                "one process",
                f"with all cores, or OMP_NUM_THREADS, is {formatting.with_interval(ratio)} as fast as {job}",
            )
        )
    if (ratio := result["winner_in_one_process"])["median"] is not None:
        rows.append(
            (
                "",
                f"with what it can take of the best recipe, {formatting.with_interval(ratio)} as fast, over as many samples",
            )
        )
    return rows


def _contributions(shares: list[dict]) -> list[RenderableType]:
    """What leaving each method out would cost, as bars that start at 1."""
    shares = sorted(
        (share for share in shares if share["speedup"]["median"]), key=lambda share: -share["speedup"]["median"]
    )
    if not shares:
        return []
    longest = max(shares[0]["speedup"]["median"] - 1, 1e-9)
    table = grid("without it, slower by", ">", "", "")
    for share in shares:
        middle = share["speedup"]["median"]
        table.add_row(
            formatting.shorten(share["method"], 34),
            formatting.ratio(middle),
            Text(formatting.between(share["speedup"]), QUIET),
            bar((middle - 1) / longest, 20),
        )
    return [Text(), indented(table)]


def _losers(trials: list[dict]) -> list[RenderableType]:
    """What ran and lost, as many as fit; what had nothing to act on by name; the rest only counted."""
    lost = view_model.in_vain(trials)
    shown = [trial for trial in lost if trial["verdict"] not in view_model.NEVER_RAN][:MOST_LOSERS]
    idle = [trial["what"] for trial in lost if trial["verdict"] == "no effect"]
    table = grid("tried in vain", "", ">", "")
    for trial in shown:
        table.add_row(
            formatting.shorten(trial["what"], 28),
            trial["verdict"],
            formatting.ratio(trial["ratio"]["median"]),
            Text(trial["why"], QUIET),
        )
    told = [indented(table)] if shown else []
    if idle:
        told.append(indented(Text(f"nothing to act on: {', '.join(dict.fromkeys(idle))}", QUIET)))
    if more := len(lost) - len(shown) - len(idle):
        words_for_more = f"and {more} more" if told else f"{more} were not tried"
        told.append(indented(Text(f"{words_for_more}; the report has them all", QUIET)))
    return [Text(), *told] if told else []


def _where(result: dict, won: bool) -> list[RenderableType]:
    """The recipe, the folder that everything lies in, and what trains with it."""
    told = [Text(f"Recipe: {Recipe(result['recipe'])}", style=QUIET)] if won and result["recipe"] else []
    if result["out"]:
        told.append(
            Text(f"Folder: {result['out']}; as a page: hasten report {shlex.quote(result['out'])}", style=QUIET)
        )
    if won and result["recipe"] and result["recipe_file"]:
        told.append(
            Text(formatting.train_command(result["task"], result["recipe"], result["recipe_file"], result["processes"]))
        )
    return [Text(), *told] if told else []


def _step_facts(result: dict) -> list[tuple[str, str]]:
    flops = result["flops"]
    rows = [("a step", formatting.seconds(result["seconds_per_step"]))]
    if flops["share"] is not None:
        of = (
            f" ({formatting.plain(flops['achieved_gflops'])} of {formatting.plain(flops['peak_gflops'])} GFLOP/s)"
            if flops["peak_gflops"]
            else ""
        )
        rows.append(("arithmetic", f"{formatting.percent(flops['share'])} of the measured peak{of}"))
    return rows + [
        (name.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value))
        for name, value in result["causes"].items()
        if value is not None
    ]


def _unbounded(advice: list[dict]) -> list[RenderableType]:
    """Advice whose gain nobody can bound, gathered by its reason."""
    reasons: dict[str, list[str]] = {}
    for row in advice:
        if row["bound"] is None:
            reasons.setdefault(row["why"], []).append(row["method"])
    return (
        [Text(), pairs([("could pay too", f"{', '.join(methods)}: {why}") for why, methods in reasons.items()])]
        if reasons
        else []
    )


def _noise(noise: dict) -> str:
    spread = noise.get("spread_percent")
    return f"; blocks spread by {spread:.1f} %" if isinstance(spread, (int, float)) else ""


def _claim(method: dict) -> str:
    gain = method.get("gain")
    if gain and gain[0] <= 1:
        return f"up to {formatting.ratio(gain[1])}"
    return formatting.between({"low": gain[0], "high": gain[1]}) if gain else formatting.NOTHING


def _meanings(method: dict, field: str, known: dict[str, str]) -> str:
    return "; ".join(f"{name} ({known[name]})" if name in known else name for name in sorted(method.get(field, ())))
