"""Finds series of numbers in what a training prints.

Each line with its numbers replaced is a template. Each number of a template that comes again is a series, named by the
words before it: ``| end of epoch 3 | valid loss 7.02 | valid ppl 1124.18`` holds ``valid loss`` and ``valid ppl``.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise

from hasten.hosts.metric_names import HIGHER, LOWER, WITHOUT_MEANING, meaning_of, phase_of, words_of

Line = tuple[float, str, bool]  # seconds, text, printed while the model was in evaluation mode

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BAR = re.compile(r"[\u2500-\u259f]+|[=>#.*_-]{3,}")
_COUNT = r"\d[\d,]*\s+(?:[A-Za-z]+\s+){0,2}"
_AFTER = "|".join(rf"(?<=\b{word}\s)" for word in ("after", "at", "in", "for", "over", "of"))
_SAMPLES = rf"(?:{_COUNT}(?:samples|images|examples)|(?:{_AFTER}){_COUNT}(?:epochs|steps|iterations))"
_SAMPLES += r"(?![\w/]|\s+(?:per\b|\d))"  # 10000 test images, after 10 epochs
_ON_SAMPLES = re.compile(
    rf"\s*(?:\b(?:on|of|for|over|from|in|after|at)\s+(?:(?:the|all)\s+)*)?\b{_SAMPLES}", re.IGNORECASE
)
_COUNTERS = ("epoch", "ep", "step", "iter", "iteration", "episode")
_GLUED = "|".join(rf"(?<=\b{word}{end})" for word in _COUNTERS for end in ("", "_"))  # epoch3, step_100
_NUMBER = re.compile(
    rf"""
      (?P<time> \d{{4}}-\d\d-\d\d (?:[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?)? | \d+:\d\d(?::\d\d)?(?:[.,]\d+)? )
    | (?: (?<![\w.@/]) | {_GLUED} ) (?P<a> \d+ ) \s* / \s* (?P<b> [1-9]\d* ) (?![\w./])
    | (?: (?<![\w.@]) | {_GLUED} ) (?<!top-) (?<!acc-) (?<!hits-) (?!{_SAMPLES})  # a part of a name: Acc@1, top-5
      (?P<number> (?:(?<![\w)\]])[-+])? (?:
          (?<=[ :=(+-])[1-9]\d{{0,2}}(?:,\d{{3}})+(?:\.\d+)?(?![\d,])  # 1,365.40
        | (?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)? | (?:nan|inf)(?!\w) ) )
      (?!\.?\d)
      (?: (?P<percent>\s?%)
        | (?P<unit> [A-Za-z\u00b5]+ (?:\d+(?:\.\d+)?[A-Za-z]+)* (?:/[A-Za-z]+)? | /[A-Za-z]+ ) )?  # 1m23s, it/s
    """,
    re.VERBOSE | re.IGNORECASE,
)
UNITS_OF_METRICS = {"db", "mm", "cm", "px", "deg", "pp"}  # 31.24dB; others are those of times and speeds
_TQDM = re.compile(r"\d+/\d+ \[\d+:\d\d")  # in the progress bar of tqdm: 5/10 [00:01
_WORD = re.compile(r"(?<![\w./-])[A-Za-z]+(?![\w/-]|\.\w)")  # not a part of an identifier, path or module
_OPEN_BAR = re.compile(
    r"^.*?%\|[^|]*\|\s*\d+/\d+ \[\d+:\d\d[^\]]*\](?=\s*\w)"
)  # of tqdm, behind which the script has printed
_COCO = re.compile(r"\((A[PR])\) @\[ IoU=(\S+) +\| area= *(\w+) \| maxDets= *(\d+) \]")
_SEPARATOR = re.compile(r"[|,;:=\uff1a\uff0c\uff08\uff09(){}\[\]\"'*\t<>]|\s-+\s|\s{3,}")
_MAX_HEADING_WORDS = 4
_NOT_A_HEADING = {"data", "dataset", "datasets", "loader", "loading", "split", "files", "file", "path", "samples"}
_NOT_A_HEADING |= {"images", "examples"}
_MAX_NAME_WORDS = 5
_COUNTED = {"epoch", "step", "iter", "iteration", "episode"}  # a line with such a word begins something new


@dataclass
class Series:
    """The values of one number that a training prints, or of one that it passes to a tracker.

    Attributes:
        name: Its name, with the word for the held-out data: "valid loss", "test accuracy", "eval_f1".
        seconds: When each value was logged, or at the latest printed, in seconds from the command's start.
        values: The values; a percentage and a fraction a/b are between 0 and 1.
        resolution: The smallest step between two values that the printed digits can show; 0 for a full float.
        phase: "validation", "test", "train", "evaluation" (the model was in evaluation mode), or "".
        inherited: The phase is that of a heading, or of the line before.
        in_progress: The line shows the progress through a dataset; values are those at its end.
    """

    name: str
    phase: str
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    resolution: float = 0.0
    inherited: bool = False
    in_progress: bool = False


@dataclass(frozen=True)
class _Number:
    """One number of a line."""

    template: str  # the line up to this number, without the values of numbers
    name: str
    phase: str
    value: float
    step: float  # of its last printed digit
    average: bool = False  # in parentheses after a number of its own name: "Loss 6.9 (7.0)"
    is_metric: bool = True
    counter: tuple[int, int] | None = None  # a/b without the name of a metric: progress


@dataclass(frozen=True)
class _Entry:
    """One printed line."""

    seconds: float
    text: str
    evaluating: bool
    numbers: tuple[_Number, ...]
    heading: str  # phase of the heading above, if this is its first such line
    before: str  # phase of the line before, if this line continues it
    mode_is_certain: bool = False  # training and evaluation print such lines, each in its mode


def series_of(lines: Iterable[Line]) -> list[Series]:
    """All named series in the output of a training, in the order of their first line."""
    # by number: its index in the line, its template, and whether it stands in a bar
    groups = defaultdict[tuple[int, str, bool], list[_Entry]](list)
    for entry in _entries(lines):
        for index, number in enumerate(entry.numbers):
            groups[index, number.template, bool(_TQDM.search(entry.text))].append(entry)
    found = [_series_of(index, part) for (index, *_), entries in groups.items() for part in _by_mode(index, entries)]
    return [series for series in found if series is not None]


def _by_mode(index: int, entries: list[_Entry]) -> list[list[_Entry]]:
    """Splits lines that training and evaluation print alike, without a word for the data, by the model's mode."""
    modes = {entry.evaluating for entry in entries}
    if len(modes) == 1 or any(entry.numbers[index].phase for entry in entries):
        return [entries]
    split = ([entry for entry in entries if entry.evaluating is mode] for mode in (False, True))
    return [[replace(entry, mode_is_certain=True) for entry in part] for part in split]


def _entries(lines: Iterable[Line]) -> Iterator[_Entry]:
    """The lines that hold numbers, with the phase that the lines before give to them."""
    heading, seen, header = "", set[str](), ""
    before = ""  # phase of the line before
    for seconds, raw, evaluating in lines:
        text = _printed(raw)
        numbers = _parse(text)
        if not numbers and _ON_SAMPLES.search(text):  # how many samples follow is no heading
            before = phase_of(words_of(_ON_SAMPLES.sub(" ", text))) or before
            continue
        if not numbers:
            words = words_of(text)
            is_heading = 0 < len(words) <= _MAX_HEADING_WORDS and not _NOT_A_HEADING & set(words)
            heading, seen = phase_of(words) if is_heading else "", set()
            is_rule = not words and bool(raw.strip())  # between the header of a table and its rows
            header, before = header if is_rule else text, ""
            continue
        if columns := _named_by_columns(text, header, numbers):
            numbers = columns
        else:
            header = ""
        template = numbers[-1].template
        continues = text[:1] in (" ", "*", "\t") and not _COUNTED & set(words_of(text))
        of_heading = heading if continues and template not in seen else ""
        yield _Entry(seconds, text, evaluating, numbers, of_heading, before if continues else "")
        seen.add(template)
        own = {number.phase for number in numbers} - {""}
        heading = "" if own else heading
        before = own.pop() if len(own) == 1 else ""


def _printed(raw: str) -> str:
    """What a terminal shows of a line: after its last carriage return, without colors and bars."""
    text = raw.rstrip("\r\n").rpartition("\r")[2].rpartition("\b")[2]
    text = _OPEN_BAR.sub("", _ESCAPE.sub("", text))
    return _BAR.sub(" ", _COCO.sub(_coco_name, text)).rstrip()


def _coco_name(match: re.Match[str]) -> str:
    """The name of a number in the summary of pycocotools: ``(AP)``, or with its threshold, ``(AP_0.50_all_100)``."""
    name, *of = match.groups()
    return f"({name})" if of == ["0.50:0.95", "all", "100"] else f"({'_'.join([name, *of]).replace(':', '_')})"


def _parse(text: str) -> tuple[_Number, ...]:
    """The numbers of a line, each with its name and phase; dates and times such as 12:34 are left out."""
    numbers: list[_Number] = []
    template, end = "", 0
    context: list[str] = []  # words before the number, without the names of other metrics: "Test: [10/20] loss 0.5"
    matches = list(_NUMBER.finditer(text))
    after = phase_of(_WORD.findall(text[matches[-1].end() :])) if matches else ""
    for match in matches:
        gap = text[end : match.start()]
        template += re.sub(r"\s+", " ", _ON_SAMPLES.sub(" # samples", gap)).strip()  # numbers may be padded
        template += "~" if match["time"] else "#%" if match["percent"] else "#"
        end = match.end()
        if match["time"]:
            context += _WORD.findall(gap)
            continue
        name, average = _name(gap), False
        if not name and numbers and re.fullmatch(r"\s*\(\s*", gap):
            name, average = numbers[-1].name, True
        is_metric = bool(set(words_of(name)) & (HIGHER | LOWER))
        context += _WORD.findall(gap.replace(name, " ") if is_metric else gap)
        phase = phase_of(words_of(name)) or phase_of(context) or after
        numbers.append(_number(match, template, name, phase, average))
    return tuple(numbers)


def _number(match: re.Match[str], template: str, name: str, phase: str, average: bool) -> _Number:
    if match["a"]:
        a, b = int(match["a"]), int(match["b"])
        is_metric = bool(set(words_of(name)) & (HIGHER | LOWER)) and a <= b
        return _Number(template, name, phase, a / b, 1 / b, average, is_metric, None if is_metric else (a, b))
    printed = match["number"].replace(",", "")
    value, step = float(printed), _last_digit(printed)
    if match["percent"]:
        value, step = value / 100, step / 100
    is_bar = bool(match["percent"]) and match.string.startswith("|", match.end())  # of tqdm
    has_other_unit = (match["unit"] or "").lower() not in ("", *UNITS_OF_METRICS)
    return _Number(template, name, phase, value, step, average, is_metric=not (has_other_unit or is_bar))


def _last_digit(text: str) -> float:
    """The value of one in the last printed digit: 0.01 of "3.14", 1e-7 of "1.25e-05"; 0 of nan and inf."""
    try:
        exponent = Decimal(text).as_tuple().exponent
    except ArithmeticError:  # an exponent of 20 digits, as in a printed hash
        return math.inf
    return float(f"1e{exponent}") if isinstance(exponent, int) else 0.0


@lru_cache(maxsize=10_000)
def _name(gap: str) -> str:
    """The last words before a number: of ``', 'eval_loss': `` eval_loss, of ``Test set: loss: `` loss, of
    ``Accuracy of the network on the 10000 test images: `` Accuracy of the network.
    """
    for segment in reversed(_SEPARATOR.split(_ON_SAMPLES.sub("", gap))):
        words = segment.split()[-_MAX_NAME_WORDS:]
        if words and any(word not in WITHOUT_MEANING for word in words_of(segment)):
            return " ".join(words).strip("-~/\\.`")
    return ""


def _named_by_columns(text: str, header: str, numbers: tuple[_Number, ...]) -> tuple[_Number, ...]:
    """The numbers of a line with the names in the table's header; empty if the line is not a row under that header."""

    def cells(line: str, gap: str) -> list[str]:
        prefix, _, columns = line.rpartition(": ")
        return [re.sub(r"\d", "", prefix), *filter(None, re.split(gap, columns))]

    values = cells(text, r"[\s|,]+")
    headers = [cells(header, gap) for gap in (r"[\s|,]+", r"\s*[|,]\s*|\s{2,}")]  # or with names of several words
    columns = next((one for one in headers if len(one) == len(values)), headers[0])
    is_row = len(numbers) > 1 and not any(number.name for number in numbers[1:])
    if not is_row or len(columns) != len(values) or columns[0] != values[0]:
        return ()
    named, unnamed = [], iter(numbers)
    for column, value in zip(columns[1:], values[1:], strict=True):
        match = _NUMBER.fullmatch(value)
        if match and not match["time"] and (number := next(unnamed, None)):
            phase = phase_of(words_of(column)) or number.phase
            named.append(_number(match, f"{number.template} {column}", column, phase, average=False))
    return tuple(named)


def _series_of(index: int, entries: list[_Entry]) -> Series | None:
    """The series of one number of lines alike; None if it is no metric."""
    ends = _ends_of_progress(entries, index)
    column = [entry.numbers[index] for entry in ends]
    number = column[-1]
    if not number.name or not all(one.is_metric for one in column) or _is_counter([one.value for one in column]):
        return None
    if _is_printed_better(ends[-1].numbers, index):
        return None
    phase, inherited = _phase(index, entries)
    return Series(
        name=_full_name(number.name, phase, ends[-1].text),
        phase=phase,
        seconds=[entry.seconds for entry in ends],
        values=[one.value for one in column],
        resolution=min((one.step for one in column if math.isfinite(one.value)), default=0.0),
        inherited=inherited,
        in_progress=len(ends) < len(entries),
    )


def _full_name(name: str, phase: str, text: str) -> str:
    """The name with the word for the held-out data: "valid loss"."""
    if phase in ("", "evaluation") or phase_of(words_of(name)):
        return name
    word = next((word for word in reversed(_WORD.findall(text)) if phase_of([word.lower()]) == phase), phase)
    return f"{word} {name}".lower()


def _phase(index: int, entries: list[_Entry]) -> tuple[str, bool]:
    """(phase of a number as in ``Series``, whether only a heading or the line before states it)."""
    column, line = [entry.numbers[index] for entry in entries], entries[-1].numbers
    phases = {number.phase for number in column}
    if phases != {""}:
        return (phases.pop() if len(phases) == 1 else ""), False
    is_task_metric = meaning_of(column[0].name).kind == 3
    for inherited in ({entry.heading for entry in entries}, {entry.before for entry in entries if is_task_metric}):
        if len(inherited) == 1 and (phase := inherited.pop()):
            return phase, True
    before = next((one.phase for one in reversed(line[:index]) if one.phase), "")
    of_model = [one for one in line[index + 1 :] if not (meaning_of(one.name).derived or meaning_of(one.name).beside)]
    later = {one.phase for one in of_model}
    if before == "train" or (not before and later & {"validation", "test"}):  # "acc 0.91 val_acc 0.88"
        return "", False
    # The loss of the training is often printed after an evaluation, with the model still in evaluation mode.
    is_certain = entries[0].mode_is_certain or is_task_metric
    return ("evaluation" if is_certain and all(entry.evaluating for entry in entries) else ""), False


def _ends_of_progress(entries: list[_Entry], index: int) -> list[_Entry]:
    """The last line of each pass through a dataset, if a counter a/b stands before the number, or in a bar; else all
    lines.
    """
    is_bar = bool(_TQDM.search(entries[0].text))  # whose description stands before the counter
    for i, number in enumerate(entries[0].numbers if is_bar else entries[0].numbers[:index]):
        counts = [entry.numbers[i].counter if i < len(entry.numbers) else None for entry in entries]
        if number.counter is None or "epoch" in number.name.lower() or any(count is None for count in counts):
            continue
        done = [count[0] for count in counts if count is not None]
        last = [entry for entry, (now, later) in zip(entries, pairwise(done), strict=False) if later < now]
        if last:
            return [*last, entries[-1]]
    return entries


def _is_printed_better(numbers: tuple[_Number, ...], index: int) -> bool:
    """Whether a neighbor of the same name shows the number better: with more digits, or as a running average."""

    def quality(number: _Number) -> tuple[float, bool]:
        return -number.step, number.average

    mine = numbers[index]
    neighbors = [i for i in (index - 1, index + 1) if 0 <= i < len(numbers) and numbers[i].name == mine.name]
    others = [numbers[i] for i in neighbors if (numbers[i].average or mine.average) and numbers[i].is_metric]
    return any(quality(other) > quality(mine) for other in others)


def _is_counter(values: list[float]) -> bool:
    """Whether the values are whole numbers in equal steps upwards, such as epochs."""
    steps = {b - a for a, b in pairwise(values)}
    return len(values) > 2 and len(steps) == 1 and steps.pop() > 0 and all(value == round(value) for value in values)
