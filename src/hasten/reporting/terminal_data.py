"""Output of `hasten data`: what is stored, reading speeds, faster formats, and the gain of a conversion."""

import shlex
from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hasten.reporting import formatting
from hasten.reporting.formatting import file_size
from hasten.reporting.rich_layout import BOLD, DIM, grid, headline, indented, pairs
from hasten.reporting.view_model import Json

MAX_COLUMNS, MAX_BAD = 12, 3  # shown; the JSON lists all of them
LIMITS = {
    "disk": "The disk limits reading",
    "network": "The network limits reading",
    "decode": "Decoding limits reading",
    "copy": "Copying rows into batches limits reading",
}


def inspect_answer(result: Json) -> RenderableType:
    """What is stored, how fast it is read, and which formats would be faster."""
    about = "" if result["rows_exact"] else "about "
    rows = [
        ("files", f"{formatting.count(result['files'], 'file', 'files')}, {file_size(result['bytes'])}"),
        ("other files", _other_files(result["others"], "not inspected")),
        ("rows", f"{about}{formatting.count(result['rows'], 'row', 'rows')}"),
        ("columns", _columns(result["columns"])),
        ("classes", _classes(result["classes"])),
        ("skipped", _bad_rows(result["skipped_rows"])),
    ]
    speeds = [
        ("from the network", _speed(result, "network", file_size, "/s")),
        ("from the disk", _speed(result, "disk", file_size, "/s")),
        ("from memory", _speed(result, "page_cache", file_size, "/s")),
        ("decoding", _speed(result, "decode", _round, " rows/s")),
        ("into batches", _speed(result, "copy", _round, " rows/s")),
    ]
    verdict = f"Not measured: {result['trouble']}" if result["trouble"] else _verdict(result)
    head = headline(result["title"], result["path"], False)
    return Group(head, pairs(rows), Text(), Text(verdict), Text(), pairs(speeds), *_faster_formats(result))


def convert_answer(result: Json) -> RenderableType:
    """Files, rows and content hash of what was written and read back, and how to open it."""
    files = formatting.count(len(result["files"]), "file", "files")
    skipped = _files_and_rows(result["skipped_files"], result["skipped_rows"])
    rows = [
        ("files", f"{files}, {file_size(result['bytes'])}, before {file_size(result['bytes_before'])}"),
        ("other files", _other_files(result["others"], "not converted")),
        ("verified", f"read back all {formatting.count(result['rows'], 'row', 'rows')}, content {result['digest']}"),
        ("skipped", skipped and f"{skipped} that could not be read; skipped.jsonl lists them"),
        ("classes", _classes(result["classes"])),
        ("time", formatting.seconds(result["seconds"])),
        ("open it with", result["open"]),
    ]
    return Group(headline(f"Stored as {result['to']}", result["out"], True), pairs(rows))


def _round(number: float) -> str:
    """A number rounded to three digits, without decimals, with thousands separators: 12345.6 becomes "12,300"."""
    return f"{float(f'{number:.3g}'):,.0f}"


def _speed(result: Json, name: str, formatted: Callable[[float], str], unit: str) -> str:
    """``1,230 rows/s (1,100 to 1,250)``: the median and, if there are several, the range of the measurements."""
    median = result["speed"][name]
    if median is None:
        return ""
    limits = " to ".join(formatted(value) for value in result["ranges"].get(name, ()))
    return f"{formatted(median)}{unit}" + (f" ({limits})" if limits else "")


def _columns(columns: Mapping[str, str]) -> str:
    shown = [f"{name}: {kind}" for name, kind in list(columns.items())[:MAX_COLUMNS]]
    more = len(columns) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more > 0 else [])]) or formatting.UNKNOWN


def _other_files(others: Mapping[str, int], note: str) -> str:
    files = ", ".join(f"{count:,} {kind}" for kind, count in others.items())
    return files and f"{files}; {note}"


def _bad_rows(bad: Sequence[Json]) -> str:
    """The number of unreadable files and rows, and one line for each of the first."""
    files = sum(entry["row"] is None for entry in bad)
    summary = _files_and_rows(files, len(bad) - files)
    shown = [(entry["where"], entry["why"]) for entry in bad[:MAX_BAD]]
    reasons = [why if where in why else f"{where}: {why}" for where, why in shown]
    more = [f"and {len(bad) - MAX_BAD} more"] if len(bad) > MAX_BAD else []
    return summary and "\n".join([f"{summary} that could not be read:", *reasons, *more])


def _files_and_rows(files: int, rows: int) -> str:
    counts = (files, "file", "files"), (rows, "row", "rows")
    return " and ".join(formatting.count(*each) for each in counts if each[0])


def _classes(names: Sequence[str] | None) -> str:
    """Class names as text: ``3: bird, cat, dog``, in the order of their labels."""
    names = names or []
    shown = ", ".join(names[:MAX_COLUMNS])
    return shown and f"{len(names)}: {shown}{', ...' if len(names) > MAX_COLUMNS else ''}"


def _verdict(result: Json) -> str:
    resized = f", resized to {result['resize']} pixels" if result["resize"] else ""
    text = f"{LIMITS[result['limit']]}: {_speed(result, 'batches', _round, ' rows/s')} on one core{resized}."
    if result["passes"] != "first":
        return text
    if result["limit"] == "copy" and not result["target"]:
        text += " With --target NAME the numeric columns become one matrix, which is copied faster."
    return f"{text} The table fits into memory: this is the first epoch, later ones read decoded rows from memory."


def _faster_formats(result: Json) -> list[RenderableType]:
    if result["trouble"]:
        return []
    if not result["storages"]:
        return [Text(), Text("No other format that was tried would be faster.", DIM)]
    head = "would make the first epoch faster" if result["passes"] == "first" else "would be faster"
    table = grid(head, ">estimate", ">rows/s", ">size")
    for storage in result["storages"]:
        name = f"{storage['to']} at {storage['resize']} pixels" if storage["resize"] else storage["to"]
        estimate = formatting.with_interval(storage | {"median": storage["gain"]})
        table.add_row(Text(name, BOLD), estimate, _round(storage["rows_per_second"]), file_size(storage["bytes"]))
    best = result["storages"][0]
    command = ["hasten", "data", "convert", result["path"], "--to", best["to"]]
    command += ["--resize", str(best["resize"])] if best["resize"] else []
    command += ["--target", result["target"]] if result["target"] and best["to"] == "rows" else []
    command += ["--max-bad-rows", str(result["max_bad_rows"])] if result["max_bad_rows"] else []
    command += ["--fill", str(best["fill"])] if best["fill"] is not None else []
    lines = [Text(f"{shlex.join(command)} --out DIR", no_wrap=True, overflow="ignore")]
    if best["to"] == "rows":
        lines.append(Text('or .cache("disk") in the pipeline, which stores such rows during the first epoch', DIM))
    return [Text(), indented(table), Text(), *lines]
