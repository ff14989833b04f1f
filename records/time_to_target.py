"""Computes the speed-up of a time-to-target record from its raw numbers. Needs NumPy only.

    python records/time_to_target.py records/2026-11-22c_time-to-target_cifar10_intel-xeon-processor-2-cores

The seconds of a run are start + samples x seconds per sample, evaluations included. The speed-up is the geometric mean
over the paired seeds. Its 95 % interval combines the spread over the seeds (Student's t) with the interval of the
interleaved comparison of the pace, as independent errors of a logarithm. Exact methods train the same samples: their
speed-up is that of a whole training, and its interval that of the comparison.
"""

import json
import sys
from pathlib import Path

import numpy

ERROR = 0.05  # probability that the interval misses the true value


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
    samples = _samples(result)
    logs = numpy.log([(start["a"] + row[0] * seconds_a) / (start["b"] + row[1] * seconds_b) for row in samples])
    count, pace_error = len(logs), numpy.log(ratio["high"] / ratio["low"]) / 2
    seed_error = 0.0
    if count > 1:
        spread = max(logs.std(ddof=1), _rounding(samples))
        seed_error = t_quantile(1 - ERROR / 2, count - 1) * spread / numpy.sqrt(count)
    reach = numpy.hypot(seed_error, pace_error)
    ends = {"median": 0.0, "low": -reach, "high": reach}
    return {name: float(numpy.exp(logs.mean() + offset)) for name, offset in ends.items()}


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t for a probability above 1/2: with t = sqrt(degrees) tan(angle) the density is
    cos(angle)^(degrees - 1).
    """
    angles = numpy.linspace(0, numpy.pi / 2, 200_001)
    density = numpy.cos(angles) ** (degrees - 1)
    area = numpy.concatenate([[0.0], numpy.cumsum((density[1:] + density[:-1]) / 2)])
    angle = numpy.interp((2 * probability - 1) * area[-1], area, angles)
    return float(numpy.sqrt(degrees) * numpy.tan(angle))


def _pace(trials: Path, recipe: dict) -> dict:
    """The interleaved comparison of the baseline with the recipe that the confirmation made."""
    for line in trials.read_text(encoding="utf-8").splitlines():
        trial = json.loads(line)
        what = trial["what"]
        is_confirmation = trial["kind"] in ("pace", "speed") and what["salt"] == "confirmation"
        if is_confirmation and what["a"] == {} and what["b"] == recipe:
            return trial["outcome"]
    raise StopIteration(f"{trials} holds no comparison of the confirmed recipe")


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
