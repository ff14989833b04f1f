"""The metric of a script: which of the numbers that a training prints or logs a trial is judged by.

In order of trust: what ``--metric`` names, what the script passes to a tracker (``metric_loggers.py``), what it prints
(``metric_lines.py``). Where the choice is not clear, the user is asked (``question``); nothing is chosen silently.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hasten.core.errors import ConfigurationError, suggest
from hasten.hosts.metric_lines import Series
from hasten.hosts.metric_names import meaning_of, phase_of, words_of

OTHER_DIRECTIONS = {
    *("up", "down", "high", "higher", "low", "lower", "maximum", "minimum", "maximize", "minimize"),
    *("maximise", "minimise", "asc", "desc"),
}

MAX_CANDIDATES = 5
HELD_OUT = ("validation", "test", "evaluation")  # phases


@dataclass
class Found(Series):
    """The metric of a script; ``direction`` is "min" or "max"."""

    direction: str = ""


@dataclass(frozen=True)
class Ambiguous:
    """No metric can be chosen for the given reason; the user must name one of the candidates, or its direction."""

    reason: str
    candidates: tuple[Series, ...]


def series_of_logged(records: Iterable[tuple[float, str, float, bool]]) -> list[Series]:
    """The series of numbers that a script passed to a tracker: seconds, name, value, whether in evaluation mode."""
    series: dict[str, Series] = {}
    training = set[str]()  # names that were logged in training mode
    for seconds, name, value, evaluating in records:
        one = series.setdefault(name, Series(name, phase_of(words_of(name))))
        one.seconds.append(seconds)
        one.values.append(value)
        if not evaluating:
            training.add(name)
    for name, one in series.items():
        if not one.phase and name not in training and meaning_of(name).kind == 3:
            one.phase = "evaluation"
    return list(series.values())


def choose_metric(series: Sequence[Series], evaluating: float = math.inf) -> Found | Ambiguous | None:
    """The metric among series: on held-out data, with a known direction, and better than all others by ``_rank``.

    ``evaluating``: seconds at which the script began to evaluate, after which it prints no options.

    Returns:
        The metric; or several candidates, of which the user must choose; or None if no number looks like a metric.
    """
    series = [one for one in series if _may_be_metric(one)]
    start = min((one.seconds[0] for one in series if len(one.values) > 1), default=evaluating)
    # A number that was printed once, and before all series, is an option of the script: "val_loss_weight=0.5".
    held_out = [one for one in series if one.phase in HELD_OUT and (len(one.values) > 1 or one.seconds[0] > start)]
    good = [one for one in held_out if meaning_of(one.name).direction and _is_plausible(one)]
    if good:
        ranked = sorted(good, key=lambda one: (_rank(one), _evidence(one)), reverse=True)
        rivals = [one for one in ranked if _rank(one) == _rank(ranked[0])]
        if len({meaning_of(one.name).identity for one in rivals}) == 1:
            return Found(**vars(ranked[0]), direction=meaning_of(ranked[0].name).direction)
        return Ambiguous("several metrics of held-out data are equally likely", _distinct(rivals))
    if held_out:
        return Ambiguous("it is not known whether higher or lower is better", _distinct(held_out))
    named = [one for one in series if meaning_of(one.name).direction and _is_plausible(one)]
    if named:
        named.sort(key=lambda one: (one.phase in HELD_OUT, meaning_of(one.name).kind, len(one.values)), reverse=True)
        once = any(one.phase in HELD_OUT for one in named)
        why = "the numbers of held-out data were printed only once, as an option of the script would be"
        return Ambiguous(why if once else "no value is known to be measured on held-out data", _distinct(named))
    return None


def select_metric(series: Sequence[Series], request: str) -> Found:
    """The series that ``--metric NAME[:min|max]`` names.

    Raises:
        ConfigurationError: No series has the name, several have it, or its direction is not known and not given.
    """
    name, direction = parse_request(request)
    wanted = set(words_of(name))
    exact = [one for one in series if one.name.lower() == name.lower()]
    same = exact or [one for one in series if set(words_of(one.name)) == wanted]
    matches = same or [one for one in series if wanted and wanted <= set(words_of(one.name))]
    if not matches:
        known = [one.name for one in series if meaning_of(one.name).direction] or [one.name for one in series]
        hint = suggest(name, known) if known else "; the training printed no number with a name"
        raise ConfigurationError(f"the training printed no metric {name!r}{hint}")
    # training and evaluation may print lines alike, whose numbers have one name
    matches.sort(key=lambda one: (one.phase in HELD_OUT, _rank(one), _evidence(one)), reverse=True)
    if not same and len({(*meaning_of(one.name).identity, one.phase) for one in matches}) > 1:
        raise question(Ambiguous(f"--metric {name!r} fits several values", _distinct(matches)))
    direction = direction or meaning_of(matches[0].name).direction
    if not direction:
        raise question(Ambiguous("it is not known whether higher or lower is better", (matches[0],)))
    return Found(**vars(matches[0]), direction=direction)


def parse_request(request: str) -> tuple[str, str]:
    """Splits ``NAME[:min|max]`` into the name and the direction, which is "" if not given.

    Raises:
        ConfigurationError: The name holds no word, or the direction is another word than min or max.
    """
    name, colon, direction = request.rpartition(":")
    if colon and direction in ("min", "max"):
        request = name
    elif colon and direction.strip().lower() in OTHER_DIRECTIONS:
        raise ConfigurationError(f"--metric {request!r}: the direction is min or max, not {direction!r}")
    else:
        direction = ""
    if not words_of(request):
        raise ConfigurationError(
            f"--metric needs the name of a value, such as 'val loss' or 'val acc:max'; got {request!r}"
        )
    return request.strip(), direction


def question(ambiguous: Ambiguous) -> ConfigurationError:
    """The error that asks the user to choose: each candidate as it must be typed, with up to three of its values."""
    choices: list[str] = []
    for one in ambiguous.candidates[:MAX_CANDIDATES]:
        direction = meaning_of(one.name).direction or "min|max"
        shown = sorted({0, len(one.values) // 2, len(one.values) - 1})
        values = ", ".join(f"{one.values[i]:.4g}" for i in shown)
        choices.append(f'--metric "{one.name}:{direction}" ({values})')
    return ConfigurationError(f"cannot choose the metric: {ambiguous.reason}; pass {' or '.join(choices)}")


def _may_be_metric(series: Series) -> bool:
    """Whether it is a measurement of the model, and not the same number in every line."""
    meaning = meaning_of(series.name)
    constant = len(series.values) > 2 and len(set(series.values)) == 1
    return not (meaning.derived or meaning.beside or constant)


def _is_plausible(series: Series) -> bool:
    """False if the name is that of a fraction of correct answers, and a value is not within 0 to 100, as of a count."""
    finite = [value for value in series.values if math.isfinite(value)]
    return not meaning_of(series.name).rate or (bool(finite) and all(0 <= value <= 100 for value in finite))


def _rank(series: Series) -> tuple[int, ...]:
    """Sort key, largest first: recurring before printed once, metrics of the task before losses, validation before test
    data, plain metrics before variants such as top-5.
    """
    meaning = meaning_of(series.name)
    return (len(series.values) > 1, meaning.kind, series.phase != "test", not meaning.secondary)


def _evidence(series: Series) -> tuple[int, ...]:
    """Sort key between series of equal rank, largest first: no line of progress, a phase of its own, in words rather
    than by the model's mode, more values.
    """
    return (not series.in_progress, not series.inherited, series.phase != "evaluation", len(series.values))


def _distinct(series: Sequence[Series]) -> tuple[Series, ...]:
    """The first series of each name."""
    first: dict[str, Series] = {}
    for one in series:
        first.setdefault(one.name, one)
    return tuple(first.values())
