"""Numbers and commands as people read and type them. Unknown values are an en dash."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

UNKNOWN, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"  # en dash, minus and multiplication sign


def seconds(value: float | None) -> str:
    """A duration in seconds as text: ``420 µs``, ``8.2 s``, ``2 min 31 s``, ``1 h 23 min``; an en dash for None."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0 s"
    for unit, name, limit in ((1e-6, "µs", 999.5), (1e-3, "ms", 999.5), (1.0, "s", 59.95)):
        if abs(value) < unit * limit:
            return f"{_digits(value / unit, 3 if abs(value / unit) >= 100 else 2)} {name}"
    rounded = round(value)
    return _two_units(rounded, "min", "s") if rounded < 3600 else _two_units(round(value / 60), "h", "min")


def ratio(value: float | None) -> str:
    """A ratio as text: ``1.04x``, ``23x``, with a true multiplication sign; an en dash for None."""
    return UNKNOWN if value is None else f"{_ratio_digits(value)}{TIMES}"


def with_interval(interval: Mapping[str, float | None]) -> str:
    """{"median", "low", "high"} as text: ``5.1x (4.6 to 5.7x)``; ``5.1x`` if the interval is unknown."""
    limits = between(interval)
    return ratio(interval["median"]) + ("" if limits == UNKNOWN else f" ({limits})")


def between(interval: Mapping[str, float | None]) -> str:
    """``4.6 to 5.7x`` of an interval with ``low`` and ``high``; an en dash if they are unknown."""
    low, high = interval["low"], interval["high"]
    if low is None or high is None:
        return UNKNOWN
    if low < 1.995 <= high < 9.995:  # both ends with as many digits as the smaller one needs
        return f"{low:.2f} to {high:.2f}{TIMES}"
    return f"{_ratio_digits(low)} to {ratio(high)}"


def metric(value: float | None, unit: str = "", signed: bool = False) -> str:
    """A metric as text: four decimals below 10, else four significant digits, or all before the point; ``signed`` adds
    a plus sign.
    """
    if value is None:
        return UNKNOWN
    sign, kind = "+" if signed else "", ",.0f" if 9999.5 <= abs(value) < 1e12 else ".4g" if abs(value) >= 10 else ".4f"
    number = f"{value:{sign}{kind}}".replace("-", MINUS)
    return f"{number} {unit}".strip()


def differences_between(low: float | None, high: float | None) -> str:
    """The interval of a difference as text: ``-0.0011 to +0.0053``; empty if an end is unknown."""
    if low is None or high is None:
        return ""
    return f"{metric(low, signed=True)} to {metric(high, signed=True)}"


def money(value: float | None) -> str:
    """An amount of money as text: two decimals, or two significant digits below 0.1; an en dash for None."""
    if value is None:
        return UNKNOWN
    return f"{value:,.2f}" if value >= 0.095 or value == 0 else _digits(value, 2)


def plain(value: float | None, unit: str = "", digits: int = 4) -> str:
    """A number as text with as few digits as it needs, and its unit: ``digits`` significant ones, of large numbers all
    before the point.
    """
    if value is None:
        return UNKNOWN
    number = f"{value:.{digits}g}"
    return f"{f'{value:,.0f}' if 'e+' in number and abs(value) < 1e12 else number} {unit}".strip()


def count(value: float | None, singular: str, plural: str) -> str:
    """A number with its noun: ``1 run``, ``23 runs``; an en dash for None."""
    return UNKNOWN if value is None else f"{value:,.0f} {singular if round(value) == 1 else plural}"


def percent(share: float | None) -> str:
    """A share from 0 to 1 as text: 0.71 as ``71 %``; an en dash for None."""
    if share is None:
        return UNKNOWN
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def loss_percent(share: float | None) -> str:
    """A small share as text: 0.0012 as ``0.12 %``; an en dash for None."""
    return UNKNOWN if share is None else f"{100 * share:.2f} %".replace("-", MINUS)


def file_size(value: float | None) -> str:
    """Bytes as text: ``512 bytes``, ``1.2 GB`` (10**9 bytes); an en dash for None."""
    if value is None:
        return UNKNOWN
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{plain(value / unit, digits=3)} {name}"
    return count(value, "byte", "bytes")


def peak_memory(peaks: Sequence[Mapping[str, Any]]) -> str:
    """The peak memory of the rank that needs most: ``1.2 GB``, ``41 GB (44 GB reserved)``; an en dash if unknown."""
    kind = "allocated" if any(peak.get("allocated") is not None for peak in peaks) else "resident"
    known = [peak for peak in peaks if peak.get(kind) is not None]
    if not known:
        return UNKNOWN
    largest = max(known, key=lambda peak: peak[kind])
    reserved = f" ({file_size(largest['reserved'])} reserved)" if largest.get("reserved") is not None else ""
    ranks = f", the most of {len(known)} ranks" if len(known) > 1 else ""
    return f"{file_size(largest[kind])}{reserved}{ranks}"


def train_command(
    task: str, methods: Collection[str], recipe_file: str, processes: float | None = 1, command: str = ""
) -> str:
    """The command that trains with a recipe file: a task, or the user's own ``command`` as a shell reads it.

    Methods in Python files must be repeated with ``--with``.
    """
    outside = [word for name in methods if ":" in name for word in ("--with", name)]
    recipe = ["--recipe", recipe_file] if methods else []
    job = ["--processes", f"{processes:.0f}"] if processes is not None and processes > 1 else []
    if command:
        return f"{shlex.join(['hasten', 'train', *recipe, *outside])} -- {command}"
    return shlex.join(["hasten", "train", task, *recipe, *outside, *job])


def sentence_case(text: str) -> str:
    """The text with a capital letter first; other letters stay, such as those of AUC."""
    return text[:1].upper() + text[1:]


def shorten(text: str, length: int) -> str:
    """Replace the middle by an ellipsis; of ``path/file.py:Class`` both ends matter."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[head + 1 - length :]}"


def _two_units(amount: int, large: str, small: str) -> str:
    return f"{amount // 60} {large} {amount % 60} {small}".removesuffix(f" 0 {small}")


def _ratio_digits(value: float) -> str:
    if abs(value) < 1.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if abs(value) < 19.95 else f"{value:,.0f}"


def _digits(value: float, significant: int) -> str:
    text = f"{value:.{significant}g}"
    return f"{value:.0f}" if "e" in text else text
