"""Computes the speed-up of a time-to-target record from its raw numbers. Needs NumPy only.

    python records/time_to_target.py records/2026-11-22c_time-to-target_cifar10_intel-xeon-processor-2-cores

The seconds of a run are start + samples x seconds per sample, evaluations included. The speed-up is the ratio of the
geometric means over the runs. Its 95 % interval combines the spread over the seeds with the interval of the interleaved
comparison of the pace, as independent errors of a logarithm. The spread is Welch's t of independent arms; in records
until the morning of 2026-11-24, Student's t of paired seeds. Exact methods train the same samples: their speed-up is
that of a whole training, and its interval that of the comparison.
"""

import json
import sys
from pathlib import Path

import numpy

ERROR = 0.05  # probability that the interval misses the true value
LENGTHS = {"budgeted_schedule": "factor"}  # method -> its option that is the length of the training


def speedup(folder: Path) -> dict[str, float]:
    """The speed-up of the tuned recipe over the baseline in ``folder``: median, low and high end of the interval.

    Raises:
        StopIteration: the record holds no confirmed recipe.
    """
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    pace = _pace(folder / "trials.jsonl", result["recipe"])
    ratio, start = pace["ratio"], pace["start_seconds"]
    seconds_a = pace["seconds_per_1000_samples"]["a"] / 1000
    seconds_b = seconds_a / ratio["median"]
    if result.get("evidence") == "exact":
        whole = _samples_of_a_training(folder / "trials.jsonl")
        speedup = (start["a"] + whole * seconds_a) / (start["b"] + whole * seconds_b)
        return {name: speedup * ratio[name] / ratio["median"] for name in ("median", "low", "high")}
    pace_error = numpy.log(ratio["high"] / ratio["low"]) / 2
    if isinstance(result.get("samples_compared"), dict):
        arms = [numpy.array(result["samples_compared"][arm], float) for arm in ("baseline", "tuned")]
        seconds = (start["a"] + arms[0][:, 0] * seconds_a, start["b"] + arms[1][:, 0] * seconds_b)
        if result["samples_compared"].get("paired"):
            center, seed_error = _paired(numpy.log(seconds[0] / seconds[1]), 0.0)
        else:
            center, seed_error = _independent(*map(numpy.log, seconds), *(arm[:, 1] / arm[:, 0] for arm in arms))
    else:
        samples = _samples(result)
        logs = numpy.log([(start["a"] + row[0] * seconds_a) / (start["b"] + row[1] * seconds_b) for row in samples])
        center, seed_error = _paired(logs, _rounding(samples))
    reach = numpy.hypot(seed_error, pace_error)
    ends = {"median": 0.0, "low": -reach, "high": reach}
    return {name: float(numpy.exp(center + offset)) for name, offset in ends.items()}


def _paired(logs, rounding: float) -> tuple[float, float]:
    """(mean, half width of its interval) of the log ratios of paired seeds."""
    count, half_width = len(logs), 0.0
    if count > 1:
        spread = max(logs.std(ddof=1), rounding)
        half_width = t_quantile(1 - ERROR / 2, count - 1) * spread / numpy.sqrt(count)
    return logs.mean(), half_width


def _independent(logs_a, logs_b, distances_a, distances_b) -> tuple[float, float]:
    """(difference of the means, half width of its interval) of the logarithms of two arms.

    ``distances``: samples between two evaluations / samples; a count is rounded up to the next evaluation.
    """
    center = logs_a.mean() - logs_b.mean()
    if min(len(logs_a), len(logs_b)) < 2:
        return center, 0.0
    variances = [
        max(logs.std(ddof=1), distances.mean() / numpy.sqrt(12)) ** 2 / len(logs)
        for logs, distances in ((logs_a, distances_a), (logs_b, distances_b))
    ]
    degrees = sum(variances) ** 2 / (variances[0] ** 2 / (len(logs_a) - 1) + variances[1] ** 2 / (len(logs_b) - 1))
    return center, t_quantile(1 - ERROR / 2, degrees) * numpy.sqrt(sum(variances))


def t_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t for a probability above 1/2: with t = sqrt(degrees) tan(angle) the density is
    cos(angle)^(degrees - 1).
    """
    angles = numpy.linspace(0, numpy.pi / 2, 200_001)
    density = numpy.cos(angles) ** (degrees - 1)
    area = numpy.concatenate([[0.0], numpy.cumsum((density[1:] + density[:-1]) / 2)])
    angle = numpy.interp((2 * probability - 1) * area[-1], area, angles)
    return float(numpy.sqrt(degrees) * numpy.tan(angle))


def _pace(trials: Path, recipe: dict) -> dict:
    """The interleaved comparison of the baseline with the recipe that the confirmation made, or with one that differs
    from it in the length of the training only: its steps are the same.
    """
    found = [json.loads(line) for line in trials.read_text(encoding="utf-8").splitlines()]
    found = [trial for trial in found if trial["kind"] in ("pace", "speed") and trial["what"]["a"] == {}]
    found = [trial for trial in found if trial["what"]["salt"] == "confirmation"]
    same = [trial for trial in found if trial["what"]["b"] == recipe]
    same += [trial for trial in found if _without_length(trial["what"]["b"]) == _without_length(recipe)]
    if not same:
        raise StopIteration(f"{trials} holds no comparison of the confirmed recipe")
    return same[0]["outcome"]


def _without_length(recipe: dict) -> dict:
    return {name: {**options, LENGTHS.get(name, ""): None} for name, options in recipe.items()}


def _samples_of_a_training(trials: Path) -> float:
    """Samples that the whole training trains, from the plan of its first steps."""
    lines = map(json.loads, trials.read_text(encoding="utf-8").splitlines())
    plan = next(line["outcome"]["plan"] for line in lines if line["kind"] == "run_seconds")
    return plan["samples_per_epoch"] * plan["epochs"]


def _samples(result: dict) -> list[list[int]]:
    """For each seed: samples to the target of (baseline, tuned), then the samples since the evaluation before, if
    recorded.
    """
    if result.get("samples_compared"):
        return result["samples_compared"]
    arms = [  # records of 2026-11-20: a run that never reached the target counts with all its samples
        [
            reached or curve["points"][-1]["samples"]
            for reached, curve in zip(result["samples_to_target"][arm], result["curves"][arm], strict=True)
        ]
        for arm in ("baseline", "tuned")
    ]
    return [list(pair) for pair in zip(*arms, strict=True)]


def _rounding(samples: list[list[int]]) -> float:
    """Smallest standard deviation of the log ratio: counts are rounded up to the next evaluation."""
    known = numpy.array([row for row in samples if len(row) == 4], float).reshape(-1, 4)
    return float(numpy.hypot(*(known[:, 2:] / known[:, :2]).mean(0)) / numpy.sqrt(12)) if len(known) else 0.0


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("{median:.2f}x ({low:.2f} to {high:.2f})".format(**speedup(Path(name))))
