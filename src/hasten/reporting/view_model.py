"""What the page and the terminal show, computed from a validated result. Nothing here draws."""

from math import log
from statistics import median

from hasten.core.card import PHASES
from hasten.reporting import formatting

ARMS = ("baseline", "strong_baseline", "tuned")  # in the order in which they are shown
SMALLEST_GAIN = 1.005  # a share below it is called nothing
NEVER_RAN = ("no effect", "not tried")
AFTER_WHO_LOST = ("refused", "failed", *NEVER_RAN)  # verdicts, the more telling first


def won(result: dict) -> bool:
    """Whether a tuning may be called a success: faster, and the gate passed. Missing proof is no proof."""
    return (
        result["verdict"] == "faster"
        and result["quality"]["passed"] is True
        and result["speedup"]["median"] is not None
    )


def tune_headline(result: dict) -> str:
    if won(result):
        return f"{formatting.ratio(result['speedup']['median'])} faster"
    if result["verdict"] == "faster":
        return "Faster, but not as good" if result["quality"]["passed"] is False else "Faster, but not proven"
    return (
        "Leave it as it is" if result["verdict"] == "no improvement" else result["verdict"].capitalize() or "No verdict"
    )


def tune_sentence(result: dict) -> str:
    """What was won in seconds and at what quality; or why nothing was."""
    if not won(result):
        return result["why"] or "Nothing that was tried made the training faster at equal quality."
    times, metric = result["time_to_target"], result["metric"]
    held = quality_in_words(result["quality"], metric["unit"])
    if not times.get("baseline") or not times.get("tuned"):
        return held
    return f"Trains to {goal(metric)} in {formatting.seconds(times['tuned'])} instead of {formatting.seconds(times['baseline'])}. {held}"


def goal(metric: dict) -> str:
    """``accuracy 0.97``: what the training is to reach."""
    name = metric["name"] or "the target"
    return name if metric["target"] is None else f"{name} {formatting.plain(metric['target'], metric['unit'])}"


def compare_headline(result: dict) -> str:
    said, middle = result["verdict"], result["ratio"]["median"]
    if said in ("faster", "slower") and middle:
        return f"b is {formatting.ratio(middle if said == 'faster' else 1 / middle)} {'faster' if said == 'faster' else 'slower'}"
    return said.capitalize() or "No verdict"


def break_even(result: dict) -> str:
    """What the search cost against what it saves, in a sentence."""
    after, expected = result["break_even_runs"], result["expected_runs"]
    if not won(result) or after is None:
        return "It found nothing to save, so it does not pay for itself; the answer is what it bought."
    text = f"It has paid for itself after {formatting.count(max(after, 1), 'run', 'runs')}."
    if expected is None:
        return text
    verdict = "so it pays" if after <= expected else "so it does not pay for those alone"
    return f"{text} {formatting.count(expected, 'run is', 'runs are').capitalize()} expected, {verdict}."


def quality_in_words(quality: dict, unit: str) -> str:
    if quality["passed"] is None:
        return "Its quality was not tested."
    if not quality["passed"]:
        return "It did not pass the quality gate."
    margin = (
        f" within the margin of {formatting.plain(quality['margin'], unit, 2)}" if quality["margin"] is not None else ""
    )
    return f"Its quality holds{margin}."


def moment(points: list[dict], target: float | None, higher_is_better: bool) -> dict | None:
    """The first point that reaches the target and still holds it at the next look; None if there is none."""
    if target is None:
        return None
    reached = [point["metric"] >= target if higher_is_better else point["metric"] <= target for point in points]
    return next(
        (point for index, point in enumerate(points) if reached[index] and all(reached[index + 1 : index + 2])), None
    )


def arms(curves: dict, target: float | None, higher_is_better: bool, times: dict) -> list[dict]:
    """The curves of every arm, ready to draw.

    Args:
        curves: {arm: [{"seed", "points"}]}.
        target: the metric's value that ends training, or None.
        higher_is_better: the metric's direction.
        times: {arm: seconds to the target}, where it was measured; else the median of the curves' own moments.

    Returns:
        ``{"name", "lines": [[(seconds, metric)]], "moments": [(seconds, metric)], "time"}`` for every arm with points.
    """
    found = []
    for name in sorted(curves, key=lambda arm: (ARMS.index(arm) if arm in ARMS else len(ARMS), arm)):
        runs = [
            [point for point in run["points"] if None not in (point["seconds"], point["metric"])]
            for run in curves[name]
        ]
        runs = [sorted(points, key=lambda point: point["seconds"]) for points in runs if points]
        moments = [at for points in runs if (at := moment(points, target, higher_is_better))]
        if runs:
            own = median(at["seconds"] for at in moments) if len(moments) * 2 > len(runs) else None
            found.append(
                {
                    "name": name,
                    "lines": [[(point["seconds"], point["metric"]) for point in points] for points in runs],
                    "moments": [(at["seconds"], at["metric"]) for at in moments],
                    "time": times.get(name) if times.get(name) is not None else own,
                }
            )
    return found


INPUT_NAMES = {"end_to_end": "end to end", "step_throughput": "training step"}


def input_rates(measured: dict) -> list[tuple[str, float, bool]]:
    """(name, samples/s, whether it is the bottleneck) of each stage of the input, of the whole and of the training step."""
    rates = measured["stages"] | {name: measured[key] for key, name in INPUT_NAMES.items()}
    bottleneck = INPUT_NAMES["step_throughput"] if measured["bottleneck"] == "step" else measured["bottleneck"]
    return [(name, rate, name == bottleneck) for name, rate in rates.items() if rate]


def input_sentence(measured: dict) -> str:
    """How much of its time the training step waits for data, and for which stage."""
    if measured["data_wait_fraction"] is None:
        return ""
    sentence = f"The training step waits for data {formatting.percent(measured['data_wait_fraction'])} of the time"
    if measured["bottleneck"] in ("step", ""):
        return f"{sentence}; the step is the bottleneck"
    stage = measured["bottleneck"]
    return f"{sentence}; the bottleneck is {'the input pipeline' if stage == 'input' else f'its stage {stage!r}'}"


def input_notes(measured: dict) -> list[tuple[str, str]]:
    """(what, reason) of everything that was not measured, and the rows that were skipped."""
    notes = [(name.replace("_", " "), f"not measured: {reason}") for name, reason in measured["not_measured"].items()]
    if rows := measured["skipped_rows"]:
        first = f"{rows[0]['where']}: {rows[0]['why']}"
        notes.append(
            ("skipped_rows", f"{formatting.count(len(rows), 'row', 'rows')} that could not be read, the first: {first}")
        )
    return notes


def anatomy(before: dict, after: dict) -> list[dict]:
    """``{"phase", "meaning", "before", "after", "ratio"}`` for every phase that took any time, in a step's order."""
    names = [name for name in PHASES if name in before or name in after] + sorted(
        (before.keys() | after.keys()) - PHASES.keys()
    )
    rows = []
    for name in names:
        old, new = before.get(name), after.get(name)
        if old or new:
            rows.append(
                {
                    "phase": name,
                    "meaning": PHASES.get(name, ""),
                    "before": old,
                    "after": new,
                    "ratio": old / new if old and new else None,
                }
            )
    return rows


def ceiling_medians(ceilings: dict) -> dict[str, float]:
    """The median of each ceiling that was measured."""
    return {name: ratio["median"] for name, ratio in ceilings.items() if ratio["median"] is not None}


def other_ceilings(ceilings: dict, phases: dict) -> dict:
    """Ceilings of what is no phase of the step (the allocator, a larger batch), as far as they promise anything."""
    return {name: value for name, value in ceilings.items() if name not in phases and value and value > SMALLEST_GAIN}


def staircase(start: float | None, end: float | None, shares: list[dict]) -> list[dict]:
    """The way from the baseline's time down to the tuned one, a stair for each method, largest first.

    A share says how much longer the recipe takes without the method. Such shares do not multiply up to the whole:
    methods that help each other overshoot it, methods that do the same work fall short. Overshooting shares are
    scaled down (in proportion to their logarithms); what is missing is a last stair of its own.

    Returns:
        ``{"name", "from", "to", "speedup"}`` for each stair, with ``"early"`` and ``"late"``: where the stair would
        end at the ends of its interval. ``speedup`` is None for the last, common stair.
    """
    if not start or not end or start <= end:
        return []
    gains = [share for share in shares if (share["speedup"]["median"] or 0) > SMALLEST_GAIN]
    gains.sort(key=lambda share: -share["speedup"]["median"])
    whole, parts = log(start / end), sum(log(share["speedup"]["median"]) for share in gains)
    scale = min(1.0, whole / parts) if parts else 1.0
    stairs, at = [], start
    for share in gains:
        low, middle, high = (share["speedup"][key] for key in ("low", "median", "high"))
        below = at / middle**scale
        stairs.append(
            {
                "name": share["method"],
                "from": at,
                "to": below,
                "early": at / high**scale if high and high > 0 else below,
                "late": at / low**scale if low and low > 0 else below,
                "speedup": share["speedup"],
            }
        )
        at = below
    if at > end * SMALLEST_GAIN:
        stairs.append({"name": "only together", "from": at, "to": end, "early": end, "late": end, "speedup": None})
    return stairs


def contributions(result: dict) -> list[dict]:
    """What each member of the recipe gives; a recipe of one method gives what that method gives."""
    if not result["contributions"] and len(result["recipe"]) == 1:
        return [{"method": next(iter(result["recipe"])), "speedup": result["speedup"]}]
    return result["contributions"]


def without_gain(shares: list[dict]) -> list[str]:
    """Members of the recipe that gave nothing measurable."""
    return [
        share["method"]
        for share in shares
        if share["speedup"]["median"] is not None and share["speedup"]["median"] <= SMALLEST_GAIN
    ]


def sources_of_speed(result: dict) -> dict:
    """``{"step": how much faster the same samples are worked through, "samples": how many times fewer are needed}``; None where unknown."""
    sums = {arm: sum(value for value in phases.values() if value) for arm, phases in result["step_profile"].items()}
    middle = middles(result["samples_to_target"])
    return {
        "step": sums["baseline"] / sums["tuned"] if sums.get("baseline") and sums.get("tuned") else None,
        "samples": middle["baseline"] / middle["tuned"] if {"baseline", "tuned"} <= middle.keys() else None,
    }


def middles(of_seeds: dict[str, list]) -> dict[str, float]:
    """The median over an arm's seeds, where most of them have a value."""
    known = {arm: [value for value in values if value] for arm, values in of_seeds.items()}
    return {arm: median(values) for arm, values in known.items() if len(values) * 2 > len(of_seeds[arm])}


def best_trial(trials: list[dict]) -> dict | None:
    """The trial with the greatest ratio, whatever became of it."""
    measured = [trial for trial in trials if trial["ratio"]["median"] is not None]
    return max(measured, key=lambda trial: trial["ratio"]["median"], default=None)


def stages(trials: list[dict]) -> list[tuple[str, list[dict]]]:
    """The trials in their order, gathered by stage; a stage in which nothing was measured comes last."""
    gathered: dict[str, list[dict]] = {}
    for trial in trials:
        gathered.setdefault(trial["stage"] or "trials", []).append(trial)
    return sorted(gathered.items(), key=lambda stage: all(trial["verdict"] == "not tried" for trial in stage[1]))


def in_vain(trials: list[dict]) -> list[dict]:
    """The candidates that did not make it: who lost or left it unsure, nearest to a gain first; then who was refused, failed, never ran."""

    def rank(trial: dict) -> tuple[int, float]:
        verdict = trial["verdict"]
        return AFTER_WHO_LOST.index(verdict) + 1 if verdict in AFTER_WHO_LOST else 0, -(trial["ratio"]["median"] or 0.0)

    return sorted(
        (trial for trial in trials if not is_good(trial) and trial["stage"] not in ("baseline", "search")), key=rank
    )


def is_good(trial: dict) -> bool:
    """Whether a trial's verdict is good news."""
    return trial["verdict"] in ("kept", "won", "faster", "passed")


def ratio_domain(ratios: list[dict]) -> tuple[float, float]:
    """The (low, high) that a column of small interval marks shares: it holds 1 and every median, within a factor of 32."""
    values = [ratio["median"] for ratio in ratios if ratio["median"]]
    return max(1 / 32, min([0.8, *(value * 0.9 for value in values)])), min(
        32.0, max([1.25, *(value * 1.1 for value in values)])
    )
