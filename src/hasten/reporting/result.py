"""Results as they lie in a folder, read without trust: ``read_result`` and the shape of every kind.

A shape says which keys are read and what they hold. Reading fills what is missing (None, an empty text,
an empty list), drops what nobody asked for and refuses what is of the wrong type, so that whoever draws a
result never has to ask twice. Texts lose control characters: a method's name cannot move the cursor.
"""

import json
from pathlib import Path

from hasten.contract.errors import Refusal

NUMBER, AMOUNT = "a number", "a number from 0 up"
TEXT, YES_NO, SCALAR, FACT = "a text", "true or false", "a number or a text", "a fact"  # a fact may be anything
INTERVAL = {"median": AMOUNT, "low": AMOUNT, "high": AMOUNT}
AMOUNTS, FACTS = {str: AMOUNT}, {str: FACT}  # {str: ...}: any keys
RECIPE = {str: {str: SCALAR}}
POINT = {"seconds": AMOUNT, "samples": AMOUNT, "metric": NUMBER}
METRIC = {"name": TEXT, "higher_is_better": YES_NO, "target": NUMBER, "unit": TEXT}

COMMON = {
    "task": TEXT,
    "processes": AMOUNT,
    "verdict": TEXT,
    "why": TEXT,
    "machine": FACTS,
    "versions": FACTS,
    "noise": FACTS,
    "seed": NUMBER,
}

SHAPES = {
    "tune": COMMON
    | {
        "metric": METRIC,
        "recipe": RECIPE,
        "recipe_file": TEXT,
        "out": TEXT,
        "competent_recipe": RECIPE,
        "speedup": INTERVAL,
        "speedup_over_competent": INTERVAL,
        "one_process": INTERVAL,
        "winner_in_one_process": INTERVAL,
        "time_to_target": AMOUNTS,
        "samples_to_target": {str: [AMOUNT]},
        "stopwatch_to_target": {str: [AMOUNT]},
        "quality": {
            "baseline": NUMBER,
            "tuned": NUMBER,
            "margin": AMOUNT,
            "difference": {"mean": NUMBER, "low": NUMBER, "high": NUMBER},
            "seeds": [NUMBER],
            "passed": YES_NO,
        },
        "curves": {str: [{"seed": NUMBER, "points": [POINT]}]},
        "anatomy": {str: AMOUNTS},
        "shares": [{"method": TEXT, "speedup": INTERVAL}],
        "trials": [{"what": TEXT, "stage": TEXT, "verdict": TEXT, "ratio": INTERVAL, "seconds": AMOUNT, "why": TEXT}],
        "headroom": AMOUNTS,
        "phases": AMOUNTS,
        "facts": [TEXT],
        "search_seconds": AMOUNT,
        "budget_seconds": AMOUNT,
        "pays_after_runs": AMOUNT,
        "runs_expected": AMOUNT,
    },
    "compare": COMMON
    | {
        "a": TEXT,
        "b": TEXT,
        "ratio": INTERVAL,
        "cpu_ratio": INTERVAL,
        "blocks": AMOUNT,
        "seconds_per_1000_samples": AMOUNTS,
        "evaluation_seconds": AMOUNTS,
        "start_seconds": AMOUNTS,
    },
    "diagnose": COMMON
    | {
        "phases": AMOUNTS,
        "headroom": AMOUNTS,
        "advice": [{"method": TEXT, "bound": AMOUNT, "why": TEXT}],
        "seconds_per_step": AMOUNT,
        "flops": {"achieved_gflops": AMOUNT, "peak_gflops": AMOUNT, "share": AMOUNT},
        "not_advised": [{"method": TEXT, "why": TEXT}],
        "causes": FACTS,
        "input": {
            "stages": AMOUNTS,
            "step_throughput": AMOUNT,
            "end_to_end": AMOUNT,
            "first_batch_seconds": AMOUNT,
            "prefetched": YES_NO,
            "data_wait_fraction": AMOUNT,
            "bottleneck": TEXT,
            "skipped_rows": [{"row": AMOUNT, "where": TEXT, "why": TEXT}],
            "not_measured": {str: TEXT},
        },
    },
    "train": COMMON
    | {
        "metric": NUMBER,
        "best_metric": NUMBER,
        "metric_name": TEXT,
        "higher_is_better": YES_NO,
        "target": NUMBER,
        "steps": AMOUNT,
        "seconds": AMOUNT,
        "seconds_to_target": AMOUNT,
        "stopped": FACT,
        "skipped": AMOUNT,
        "chosen": RECIPE,
        "out": TEXT,
        "device": TEXT,
        "split": AMOUNTS,
        "idle": [[TEXT]],
        "recipe": TEXT,
        "evaluations": [{"step": AMOUNT} | POINT],
    },
}

LARGEST_FILE = 32 << 20  # bytes
LARGEST_NUMBER = 1e18  # what is beyond it, or beneath its inverse, nobody has measured
LONGEST_TEXT = 400  # characters


def read_result(folder: str | Path) -> dict:
    """The result that lies in a run's folder, shaped, with its ``kind``.

    Raises:
        Refusal: no folder, no result in it, a half-written or foreign file, or a key of the wrong type.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise Refusal(f"there is no folder {folder}; name one that `hasten tune` or `hasten train` has written")
    path = folder / "result.json"
    if not path.is_file():
        raise Refusal(f"{folder} holds no result.json; the run has not finished, or this is not its folder")
    return shaped(read_json(path), str(path))


def shaped(result: dict, where: str = "the result") -> dict:
    """A result of any kind with every key that its shape names, and nothing else."""
    if not isinstance(result, dict):
        raise Refusal(f"{where} holds no result of hasten: it must be an object with a verdict or evaluations")
    kind = result.get("kind") or _kind_of(result)
    if not isinstance(kind, str) or kind not in SHAPES:
        raise Refusal(f"{where} holds no result that hasten knows; it must come from tune, train, compare or diagnose")
    return {"kind": kind} | fitted(result, SHAPES[kind], where)


def read_json(path: Path):
    """What a JSON file holds.

    Raises:
        Refusal: it cannot be read, is too large, or is not whole.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise Refusal(f"{path} is larger than {LARGEST_FILE} bytes; that is no result of hasten")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{path} is not whole JSON (cut short while it was written?); run the command that wrote it again") from None


def fitted(value, shape, where: str):
    """``value`` in the given shape: holes filled, strangers dropped.

    Raises:
        Refusal: something of the wrong type; the message says where.
    """
    if isinstance(shape, str):
        return _scalar(value, shape, where)
    wanted = type(shape)
    if value is None:
        value = wanted()
    if shape is INTERVAL and isinstance(value, (int, float)):
        value = {"median": value}  # measured, but without an interval
    if not isinstance(value, wanted):
        raise Refusal(f"{where} must be {'a list' if wanted is list else 'an object'}, not {_kind_name(value)}")
    if wanted is list:
        return [fitted(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value)]
    if str in shape:
        return {_clean(key): fitted(item, shape[str], f"{where}: {_clean(key)}") for key, item in value.items()}
    return {key: fitted(value.get(key), inner, f"{where}: {key}") for key, inner in shape.items()}


def _scalar(value, kind: str, where: str):
    if value is None:
        return "" if kind == TEXT else None
    if isinstance(value, str) and kind in (TEXT, SCALAR, FACT):
        return _clean(value)
    if isinstance(value, bool) and kind in (YES_NO, SCALAR, FACT):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and kind in (NUMBER, AMOUNT, SCALAR, FACT):
        if kind == AMOUNT and value < 0:
            raise Refusal(f"{where} must be {kind}, not below it")
        return _sane(value)
    if kind == FACT:
        return None  # lists and objects among the facts are left out
    raise Refusal(f"{where} must be {kind}, not {_kind_name(value)}")


def _sane(value: int | float) -> int | float | None:
    """None for what is no number or beyond all measure."""
    if not abs(value) <= LARGEST_NUMBER:  # NaN too
        return None
    return value if abs(value) >= 1 / LARGEST_NUMBER else 0


def _clean(text: str) -> str:
    """On one line, printable, of sane length."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def _kind_of(result: dict) -> str | None:
    if "trials" in result:
        return "tune"
    return "train" if "evaluations" in result and "verdict" not in result else None


def _kind_name(value) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
