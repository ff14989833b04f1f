"""Numbers as people read them, and commands as they type them. Everything that is not there is an en dash."""

import shlex
from collections.abc import Collection

NOTHING, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"  # en dash, minus and multiplication sign


def seconds(value: float | None) -> str:
    """``420 µs``, ``12 ms``, ``8.2 s``, ``2 min 31 s``, ``1 h 23 min``."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0 s"
    for unit, name in ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")):
        if abs(value) < unit * (59.95 if name == "s" else 999.5):
            return f"{_digits(value / unit, 3 if abs(value / unit) >= 100 else 2)} {name}"
    whole = round(value)
    if whole < 3600:
        return _two(whole, "min", "s")
    return _two(round(value / 60), "h", "min")


def ratio(value: float | None) -> str:
    """``1.04x``, ``5.1x``, ``23x``, with a true multiplication sign."""
    return NOTHING if value is None else f"{_ratio_digits(value)}{TIMES}"


def with_interval(interval: dict) -> str:
    """``5.1x (4.6 to 5.7x)``; without the brackets where no interval is known."""
    return ratio(interval["median"]) + ("" if between(interval) == NOTHING else f" ({between(interval)})")


def between(interval: dict) -> str:
    """``4.6 to 5.7x`` of an interval with ``low`` and ``high``; one-sided where one end is open."""
    low, high = interval["low"], interval["high"]
    if low is None and high is None:
        return NOTHING
    if low is None or high is None:
        return f"at least {ratio(low)}" if high is None else f"at most {ratio(high)}"
    if low < 1.995 <= high < 9.995:  # both ends with as many digits as the smaller one needs
        return f"{low:.2f} to {high:.2f}{TIMES}"
    return f"{_ratio_digits(low)} to {ratio(high)}"


def metric(value: float | None, unit: str = "", signed: bool = False) -> str:
    """Four digits behind the point for small numbers, four significant ones for others."""
    if value is None:
        return NOTHING
    text = f"{value:+.4f}" if signed else f"{value:.4f}"
    if abs(value) >= 10:
        text = f"{value:+.4g}" if signed else f"{value:.4g}"
    return f"{text.replace('-', MINUS)} {unit}".strip()


def plain(value: float | None, unit: str = "", digits: int = 4) -> str:
    """As few digits as the number needs, and no more than ``digits``: targets and margins."""
    return NOTHING if value is None else f"{value:.{digits}g} {unit}".strip()


def count(value: float | None, one: str, many: str) -> str:
    """``1 run``, ``23 runs``."""
    return NOTHING if value is None else f"{value:,.0f} {one if round(value) == 1 else many}"


def percent(share: float | None) -> str:
    if share is None:
        return NOTHING
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def train_command(task: str, methods: Collection[str], file: str, processes: float | None = 1) -> str:
    """What trains with the methods of a recipe's file; code from outside has to be named once more."""
    outside = [word for name in methods if ":" in name for word in ("--with", name)]
    among = ["--processes", f"{processes:.0f}"] if (processes or 1) > 1 else []
    return shlex.join(["hasten", "train", task, *(["--recipe", file] if methods else []), *outside, *among])


def shorten(text: str, length: int) -> str:
    """The middle left out: of a file and its class both ends tell something."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[head + 1 - length :]}"


def _two(amount: int, large: str, small: str) -> str:
    return f"{amount // 60} {large} {amount % 60} {small}".removesuffix(f" 0 {small}")


def _ratio_digits(value: float) -> str:
    if abs(value) < 1.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if abs(value) < 19.95 else f"{value:,.0f}"


def _digits(value: float, significant: int) -> str:
    text = f"{value:.{significant}g}"
    return f"{value:.0f}" if "e" in text else text
