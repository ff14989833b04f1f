"""Values that the HTML report and the terminal show, computed from a validated result. Nothing here draws.

The result has passed ``validation.validate``: every key of its schema exists, unknown values are None.
"""

from collections.abc import Mapping, Sequence
from math import ceil, log
from statistics import median
from typing import Any

from hasten.core.card import PHASES
from hasten.core.recipe import Recipe
from hasten.reporting import formatting
from hasten.reporting.result_schema import EVIDENCE_LEVELS
from hasten.utils.targets import first_sustained_target

ARMS = ("baseline", "strong_baseline", "tuned")  # in the order of display
MIN_GAIN = 1.005  # a smaller contribution is reported as none
DISTURBED_PERCENT = 10.0  # of the processors' time, that other programs may use before the figures are doubtful
WITHOUT_GATE = ("exact", "precision checked")  # evidence that needs no whole training
NOT_RUN = ("no effect", "not tried")  # verdicts of trials without a measurement
NOT_DONE = ("not made", "not used")  # verdicts about a part of the search: the diagnosis, --metric
NOT_COMPARED = ("refused", "failed", *NOT_RUN)  # listed after the trials that were compared, in this order

Json = dict[str, Any]


def is_recommended(result: Json) -> bool:
    """Whether the verdict is "faster". Where the quality is the evidence, the gate must have been passed."""
    needs_gate = result["evidence"] not in (*WITHOUT_GATE, "estimated")
    is_supported = result["quality"]["passed"] is True or not needs_gate
    return result["verdict"] == "faster" and is_supported and result["speedup"]["median"] is not None


def gain_of(recipe: Json) -> Json:
    """The speed-up of a recipe of the frontier that counts: of the whole training or to the target, the surer one."""
    whole, to_target = recipe.get("training_speedup") or {}, recipe["speedup"]
    is_surer = (whole.get("low") or 0.0) > (to_target["low"] or 0.0)
    return whole if is_surer else to_target


def evidence_text(level: str) -> str:
    """An evidence level with its meaning: ``proven (the quality gate passed ...)``."""
    return f"{level} ({EVIDENCE_LEVELS[level]})" if level in EVIDENCE_LEVELS else level


def frontier_rows(result: Json) -> list[Json]:
    """The recipes of the frontier, baseline and slowest first.

    Returns:
        The keys of ``FrontierRecipe``, with the gain as ``speedup``; ``number`` counts from 1, ``change`` and
        ``change_interval`` are the quality as texts, ``height`` is its mean: 0 for the baseline and for exact recipes
        without a measurement, else None if it is unknown.
    """
    known = [recipe | {"speedup": gain_of(recipe)} for recipe in result["frontier"] if recipe["speedup"]["median"]]
    ordered = sorted(known, key=lambda recipe: (recipe["role"] != "baseline", recipe["speedup"]["median"]))
    return [recipe | _shown(recipe, result["metric"]["unit"]) | {"number": n} for n, recipe in enumerate(ordered, 1)]


def _shown(recipe: Json, unit: str) -> Json:
    quality, is_baseline = recipe["quality"], recipe["role"] == "baseline"
    is_unchanged = quality["mean"] is None and (is_baseline or recipe["evidence"] == "exact")
    change = formatting.metric(quality["mean"], unit, signed=True)
    text = recipe["text"] or str(Recipe(recipe["recipe"]))
    return {
        "text": "the task as it is" if is_baseline and not recipe["recipe"] else text,
        "change": "unchanged" if is_unchanged and not is_baseline else change,
        "change_interval": formatting.differences_between(quality["low"], quality["high"]),
        "height": 0.0 if is_unchanged else quality["mean"],
        "speedup": recipe["speedup"] | ({"low": None, "high": None} if is_baseline else {}),
    }


def tune_headline(result: Json) -> str:
    """The headline of ``tune``: the seconds of a whole training before and after, the speed-up, or the verdict."""
    if not is_recommended(result):
        if result["verdict"] == "faster":
            failed = result["quality"]["passed"] is False
            return "Faster, but worse quality" if failed else "Faster, but quality not tested"
        verdict = "Nothing was compared" if _is_without_comparison(result) else result["verdict"].capitalize()
        return _so_far(verdict or ("No answer yet" if result["is_partial"] else "No verdict"), result)
    before, after = training_times(result)
    gain = f"{'Steps ' * is_of_steps(result)}{formatting.ratio(result['speedup']['median'])} faster"
    seconds = result["training_seconds"]
    is_shorter = before and seconds["baseline"] > MIN_GAIN * seconds["tuned"]
    text = f"{after} instead of {before}" if is_shorter else gain + " to the target" * bool(before)
    return _so_far(f"{text}, estimated" if result["evidence"] == "estimated" else text, result)


def _is_without_comparison(result: Json) -> bool:
    """Whether a search found nothing because it compared nothing, as with a small budget."""
    trained = [trial for trial in result["trials"] if trial["stage"] in ("training", "confirmation")]
    is_judged = any(trial["verdict"] in ("refused", "no gain", "slower") for trial in trained)
    is_known = is_judged or best_trial(result["trials"]) or any(row["evidence"] for row in result["frontier"])
    return result["verdict"] == "no improvement" and not is_known


def is_of_steps(result: Json) -> bool:
    """Whether the speed-up is that of training steps only: nothing is known about a whole training or a target."""
    is_known = training_times(result)[0] or result["time_to_target"].get("tuned")
    return result["evidence"] in WITHOUT_GATE and not is_known


def _so_far(text: str, result: Json) -> str:
    return f"{text}, so far" if result["is_partial"] and result["verdict"] else text


def training_times(result: Json) -> tuple[str, str]:
    """The whole training without the recipe and with it as texts (``12 h 4 min``); empty texts if one is unknown."""
    seconds = result["training_seconds"]
    if seconds["baseline"] is None or seconds["tuned"] is None:
        return "", ""
    return formatting.seconds(seconds["baseline"]), formatting.seconds(seconds["tuned"])


def tune_sentence(result: Json) -> str:
    """The gain in seconds and the quality, or the reason why there is no gain."""
    if not is_recommended(result):
        return result["why"] or "No method that was tried made the training faster at equal quality."
    of_steps = _sentence_of_steps(result) if is_of_steps(result) else ""
    return " ".join(filter(None, (_training_sentence(result), _target_sentence(result), of_steps)))


def _sentence_of_steps(result: Json) -> str:
    """``With its start of 4.1 s, a training of 1 min is 2.1x faster, one of 10 min 2.9x.``, or that it gains less."""
    start, gain = result["start_seconds"], result["speedup"]["median"]
    if start.get("baseline") is None or start.get("tuned") is None:
        return "A whole training also starts and evaluates, so it gains less."
    lengths = [times * 60 * max(1, ceil(start["baseline"] / 30)) for times in (1, 10)]
    short, long = (
        formatting.ratio(seconds / (start["tuned"] + (seconds - start["baseline"]) / gain)) for seconds in lengths
    )
    shown, longer = map(formatting.seconds, lengths)
    begins = f"With its start of {formatting.seconds(start['baseline'])}"
    return f"{begins}, a training of {shown} is {short} faster, one of {longer} {long}."


def _training_sentence(result: Json) -> str:
    """``A whole training takes 4 h 50 min to 5 h 40 min, predicted from measured steps: 2.3x faster (2.1 to 2.5x).``"""
    baseline, tuned, low, high = (result["training_seconds"][key] for key in ("baseline", "tuned", "low", "high"))
    if not (baseline and tuned and low and high):
        return ""
    source = "measured" if result["training_measured"] else "predicted from measured steps"
    ratio = {"median": baseline / tuned, "low": baseline / high, "high": baseline / low}
    gain = _faster(ratio) if ratio["median"] > MIN_GAIN else "about as long as without the recipe"
    return f"A whole training takes {formatting.seconds(low)} to {formatting.seconds(high)}, {source}: {gain}."


def _target_sentence(result: Json) -> str:
    """``Reaches accuracy 0.97 in 1.6 s instead of 8.2 s. The quality gate was passed ...``, where that was measured."""
    times, metric, quality = result["time_to_target"], result["metric"], result["quality"]
    has_gate = quality["passed"] is not None and result["evidence"] not in WITHOUT_GATE
    parts = [quality_sentence(quality, metric["unit"])] if has_gate else []
    if times.get("baseline") and times.get("tuned"):
        tuned, baseline = formatting.seconds(times["tuned"]), formatting.seconds(times["baseline"])
        is_faster = training_times(result)[0] and result["speedup"]["median"] >= 1  # without times it is the headline
        speedup = f": {_faster(result['speedup'])}" if is_faster else ""
        parts.insert(0, f"Reaches {target_text(metric)} in {tuned} instead of {baseline}{speedup}.")
    return " ".join(parts)


def _faster(ratio: Json) -> str:
    interval = formatting.between(ratio)
    return f"{formatting.ratio(ratio['median'])} faster" + ("" if interval == formatting.UNKNOWN else f" ({interval})")


def target_text(metric: Json) -> str:
    """Name and target of the metric as text: ``accuracy 0.97``."""
    name = metric["name"] or "the target"
    return name if metric["target"] is None else f"{name} {formatting.plain(metric['target'], metric['unit'])}"


def compare_headline(result: Json) -> str:
    """The headline of a comparison: ``b is 2.7x faster``."""
    verdict, ratio = result["verdict"], result["ratio"]["median"]
    if verdict in ("faster", "slower") and ratio:
        return f"b is {formatting.ratio(ratio if verdict == 'faster' else 1 / ratio)} {verdict}"
    return verdict.capitalize() or "No verdict"


def break_even_runs(result: Json) -> int | None:
    """Number of trainings after which the search has paid for itself; None if it does not."""
    runs = result["break_even_runs"]
    return None if runs is None or not is_recommended(result) else max(1, ceil(runs))


def break_even(result: Json) -> str:
    """A sentence: after how many trainings the search pays, and how many the user expects; "" while it is unknown."""
    runs, expected = break_even_runs(result), result["expected_runs"]
    if runs is None:
        if is_recommended(result) and result["break_even_runs"] is None:
            return "How long a whole training takes is not known, and so not after how many the search pays."
        is_open = result["is_partial"] or _is_without_comparison(result)
        return "" if is_open else "It found nothing that saves time, so it does not pay."
    text = f"It pays after {formatting.count(runs, 'training', 'trainings')}"
    if expected is None or runs <= expected:
        return f"{text}."
    return f"{text}, but only {formatting.count(expected, 'is', 'are')} expected."


def prices(result: Json) -> list[str]:
    """The prices of a training without the recipe and with it, and that of an hour, as texts; empty if unknown."""
    money = result["money"]
    amounts = (money.get("baseline"), money.get("tuned") if is_recommended(result) else None, result["price_per_hour"])
    if None in (amounts[0], amounts[2]):
        return []
    return [formatting.money(amount) for amount in amounts]


def peak_memory(result: Json) -> tuple[str, str] | None:
    """The peak memory with the recipe and, as a remark, without it; None if unknown."""
    known = {arm: formatting.peak_memory(peaks) for arm, peaks in result["peak_memory_bytes"].items() if peaks}
    baseline, tuned = known.get("baseline", formatting.UNKNOWN), known.get("tuned", "")
    if not known:
        return None
    return (tuned, f"{baseline} without the recipe") if tuned else (baseline, "of a training without methods")


def quality_sentence(quality: Json, unit: str) -> str:
    """A sentence: whether the quality gate was passed, and the margin (``unit``: that of the metric)."""
    if quality["passed"] is None:
        return "The quality was not tested."
    if not quality["passed"]:
        return "The quality gate was not passed."
    if quality["margin"] is None:
        return "The quality gate was passed."
    return f"The quality gate was passed with a margin of {formatting.plain(quality['margin'], unit, 2)}."


def metric_text(metric: Json) -> str:
    """The metric of a script: ``test accuracy, higher is better; 0.97, 0.98, 0.985``, or why there is none."""
    if not metric["name"]:
        return metric["why"] or formatting.UNKNOWN
    better = {"max": ", higher is better", "min": ", lower is better"}.get(metric["direction"], "")
    values = ", ".join(map(formatting.plain, metric["values"][-3:]))
    return f"{metric['name']}{better}" + (f"; {values}" if values else "")


def site_rows(sites: Json) -> list[tuple[str, str]]:
    """("loader", "train.py:81 DataLoader, training, batch 64") of each loader, optimizer, model and evaluation."""
    rows = []
    for kind in ("loaders", "optimizers", "models", "evaluations"):
        for entry in sites.get(kind, ()):
            facts = [entry.get("type") or "", entry.get("role") or ""]
            if entry.get("batch_size"):
                facts.append(f"batch {entry['batch_size']:.0f}")
            if "num_workers" in entry:
                workers = formatting.count(entry["num_workers"] or 0, "worker", "workers")
                facts.append(f"{workers}, pinned" if entry.get("pin_memory") else workers)
            if entry.get("made_by"):
                facts.append(f"set by {entry['made_by']}")
            if entry.get("no_grad") is False:
                facts.append("records gradients")
            text = ", ".join(filter(None, facts))
            rows.append((kind.removesuffix("s"), f"{(entry.get('site') or '').removesuffix('#1')} {text}".strip()))
    return rows


def arms(curves: Json, target: float | None, higher_is_better: bool, times: Mapping[str, float | None]) -> list[Json]:
    """The learning curves of every arm, ready to draw, from {arm: [{"seed", "points"}]}.

    ``times`` is {arm: measured seconds to the target}; arms without a time get the median over their curves, if most
    reach the target. Returns ``{"name", "label", "lines": [[(seconds, metric)]], "target_points": [(seconds, metric)],
    "time"}`` per arm with points.
    """
    rows = []
    for name in sorted(curves, key=lambda arm: (ARMS.index(arm) if arm in ARMS else len(ARMS), arm)):
        runs = []
        for run in curves[name]:
            points = [point for point in run["points"] if None not in (point["seconds"], point["metric"])]
            if points:
                runs.append(sorted(points, key=lambda point: point["seconds"]))
        if not runs:
            continue
        at = [first_sustained_target([point["metric"] for point in run], target, higher_is_better) for run in runs]
        reached = [run[index] for run, index in zip(runs, at, strict=True) if index is not None]
        time = times.get(name)
        if time is None and len(reached) * 2 > len(runs):
            time = median(point["seconds"] for point in reached)
        rows.append(
            {
                "name": name,
                "label": name.replace("_", " "),
                "lines": [[(point["seconds"], point["metric"]) for point in points] for points in runs],
                "target_points": [(point["seconds"], point["metric"]) for point in reached],
                "time": time,
            }
        )
    return rows


INPUT_NAMES = {"end_to_end": "end to end", "step_throughput": "training step"}


def input_rates(measured: Json) -> list[tuple[str, float, bool]]:
    """(name, samples/s, is bottleneck) of every input stage, of the whole pipeline and of the training step."""
    rates = measured["stages"] | {name: measured[key] for key, name in INPUT_NAMES.items()}
    bottleneck = INPUT_NAMES["step_throughput"] if measured["bottleneck"] == "step" else measured["bottleneck"]
    return [(name, rate, name == bottleneck) for name, rate in rates.items() if rate]


def input_sentence(measured: Json) -> str:
    """The fraction of time that the training step waits for data, and the stage that it waits for."""
    if measured["data_wait_fraction"] is None:
        return ""
    sentence = f"The training step waits for data {formatting.percent(measured['data_wait_fraction'])} of the time"
    stage = measured["bottleneck"]
    if stage in ("step", ""):
        return f"{sentence}; the step is the bottleneck"
    return f"{sentence}; the bottleneck is {'the input pipeline' if stage == 'input' else f'its stage {stage!r}'}"


def input_notes(measured: Json) -> list[tuple[str, str]]:
    """(name, reason) of everything that was not measured, and the rows that were skipped."""
    notes = [(name.replace("_", " "), f"not measured: {reason}") for name, reason in measured["not_measured"].items()]
    rows = measured["skipped_rows"]
    if rows:
        count, first = formatting.count(len(rows), "unreadable row", "unreadable rows"), rows[0]
        notes.append(("skipped", f"{count}; the first: {first['where']}: {first['why']}"))
    return notes


def step_profile(before: Json, after: Json) -> list[Json]:
    """``{"phase", "meaning", "before", "after", "ratio"}`` for each phase with a time, in the order of a step."""
    names = [name for name in PHASES if name in before or name in after]
    names += sorted((before.keys() | after.keys()) - PHASES.keys())
    rows = []
    for name in names:
        old, new = before.get(name), after.get(name)
        if old or new:
            ratio = old / new if old and new else None
            rows.append({"phase": name, "meaning": PHASES.get(name, ""), "before": old, "after": new, "ratio": ratio})
    return rows


def ceiling_medians(ceilings: Json) -> dict[str, float]:
    """Name -> median of each measured ceiling (time with a phase / time without it)."""
    return {name: ratio["median"] for name, ratio in ceilings.items() if ratio["median"] is not None}


def other_ceilings(ceilings: Json, phases: Json) -> Json:
    """Ceilings of what is no phase of the step (the allocator, a larger batch), if they exceed MIN_GAIN."""
    return {name: value for name, value in ceilings.items() if name not in phases and value and value > MIN_GAIN}


def staircase(start: float | None, end: float | None, shares: Sequence[Json]) -> list[Json]:
    """Steps from the time of the baseline down to the tuned time, one for each method, largest first.

    A share states how much slower the recipe is without the method. The product of the shares is not the total
    speed-up: methods that reinforce each other exceed it, methods that do the same work fall short. Shares that exceed
    it are scaled down in proportion to their logarithms; a shortfall becomes a last step, "combination".

    A step is ``{"name", "from", "to", "low_end", "high_end", "speedup"}``, in seconds. ``low_end`` and ``high_end`` are
    its ends if the share were at the ends of its interval. ``speedup`` is None for "combination".
    """
    if not start or not end or start <= end:
        return []
    gains = [share for share in shares if (share["speedup"]["median"] or 0) > MIN_GAIN]
    gains.sort(key=lambda share: -share["speedup"]["median"])
    total, parts = log(start / end), sum(log(share["speedup"]["median"]) for share in gains)
    scale = min(1.0, total / parts) if parts else 1.0
    steps, top = [], start
    for share in gains:
        low, middle, high = (share["speedup"][key] for key in ("low", "median", "high"))
        bottom = top / middle**scale
        steps.append(
            {
                "name": share["method"],
                "from": top,
                "to": bottom,
                "low_end": top / high**scale if high and high > 0 else bottom,
                "high_end": top / low**scale if low and low > 0 else bottom,
                "speedup": share["speedup"],
            }
        )
        top = bottom
    if top > end * MIN_GAIN:
        steps.append({"name": "combination", "from": top, "to": end, "low_end": end, "high_end": end, "speedup": None})
    return steps


def contributions(result: Json) -> list[Json]:
    """``[{"method", "speedup"}]`` of the recipe's methods; a single method contributes the whole speed-up."""
    if not result["contributions"] and len(result["recipe"]) == 1:
        return [{"method": next(iter(result["recipe"])), "speedup": result["speedup"]}]
    return result["contributions"]


def without_gain(shares: Sequence[Json]) -> list[str]:
    """Names of the recipe's methods without a measurable contribution."""
    ratios = {share["method"]: share["speedup"]["median"] for share in shares}
    return [method for method, ratio in ratios.items() if ratio is not None and ratio <= MIN_GAIN]


def sources_of_speed(result: Json) -> dict[str, float | None]:
    """``{"step": ratio of times for the same samples, "samples": ratio of samples to the target}``; None if unknown."""
    totals = {arm: sum(value for value in phases.values() if value) for arm, phases in result["step_profile"].items()}
    samples = medians(result["samples_to_target"])
    return {
        "step": totals["baseline"] / totals["tuned"] if totals.get("baseline") and totals.get("tuned") else None,
        "samples": samples["baseline"] / samples["tuned"] if {"baseline", "tuned"} <= samples.keys() else None,
    }


def medians(seeds: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """{arm: median over its seeds} of the arms for which most seeds have a value."""
    known = {arm: [value for value in values if value] for arm, values in seeds.items()}
    return {arm: median(values) for arm, values in known.items() if len(values) * 2 > len(seeds[arm])}


def disturbance(noise: Mapping[str, Any]) -> str:
    """What to know if other programs used much of the processors during a measurement; else empty."""
    others = noise.get("others_percent")
    if not isinstance(others, (int, float)) or others <= DISTURBED_PERCENT:
        return ""
    return f"other programs used {others:.0f} % of the processors: on an idle machine the figures may differ"


def strong_baseline(result: Json) -> str:
    """The strong baseline as text; empty without one."""
    recipe = Recipe(result["strong_baseline_recipe"])
    return formatting.shorten(str(recipe), 80) if recipe else ""


def best_trial(trials: Sequence[Json]) -> Json | None:
    """The trial with the largest ratio, whatever its verdict; None if no trial has a ratio."""
    measured = [trial for trial in trials if trial["ratio"]["median"] is not None]
    return max(measured, key=lambda trial: trial["ratio"]["median"], default=None)


def stages(trials: Sequence[Json]) -> list[tuple[str, list[Json]]]:
    """[(stage, its trials)]; stages in which nothing was tried come last."""
    groups: dict[str, list[Json]] = {}
    for trial in trials:
        groups.setdefault(trial["stage"] or "trials", []).append(trial)
    return sorted(groups.items(), key=lambda group: all(trial["verdict"] == "not tried" for trial in group[1]))


def unsuccessful(trials: Sequence[Json]) -> list[Json]:
    """The candidates that were not adopted: those that were compared, fastest first, then those of NOT_COMPARED."""

    def rank(trial: Json) -> tuple[int, float]:
        verdict = trial["verdict"]
        group = NOT_COMPARED.index(verdict) + 1 if verdict in NOT_COMPARED else 0
        return group, -(trial["ratio"]["median"] or 0.0)

    others = [trial for trial in trials if trial["stage"] not in ("baseline", "search")]
    return sorted((one for one in others if not is_success(one) and one["verdict"] not in NOT_DONE), key=rank)


def refused_offers(result: Json) -> list[Json]:
    """The methods of ``--with`` that are not in the recipe, each with the reason."""
    return [one for one in result["offered"] if not one["accepted"]]


def is_success(trial: Json) -> bool:
    """Whether the search adopted the method of this trial."""
    return trial["verdict"] in ("kept", "won", "faster", "passed")


def ratio_domain(ratios: Sequence[Json]) -> tuple[float, float]:
    """The (low, high) axis of a column of interval marks: it contains 1 and, within a factor of 32, every median."""
    values = [ratio["median"] for ratio in ratios if ratio["median"]]
    low, high = min([0.8, *(value * 0.9 for value in values)]), max([1.25, *(value * 1.1 for value in values)])
    return max(1 / 32, low), min(32.0, high)
