"""What `hasten data` prints: storages and their speeds, and what a conversion gave."""

import shlex
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from hasten.reporting import formatting
from hasten.reporting.rich_layout import HEAD, QUIET, grid, headline, indented, pairs

MOST_COLUMNS, MOST_BAD = 12, 3  # shown; the JSON has them all
LIMITS = {
    "disk": "The disk limits reading",
    "network": "The network limits reading",
    "decode": "Decoding limits reading",
    "copy": "Copying rows into batches limits reading",
}


def inspect_answer(result: dict) -> RenderableType:
    """What is there, how fast it is read, and which storage would be faster."""
    about = "" if result["rows_exact"] else "about "
    rows = [
        ("files", f"{formatting.count(result['files'], 'file', 'files')}, {size(result['bytes'])}"),
        ("beside them", _left(result["others"], "not looked at")),
        ("rows", f"{about}{formatting.count(result['rows'], 'row', 'rows')}"),
        ("columns", _columns(result["columns"])),
        ("classes", _classes(result["classes"])),
        ("left out", _listed(result["skipped_rows"])),
    ]
    paces = [
        ("from the network", _figure(result, "network", size, "/s")),
        ("from the disk", _figure(result, "disk", size, "/s")),
        ("from memory", _figure(result, "page_cache", size, "/s")),
        ("decoding", _figure(result, "decode", _three_digits, " rows/s")),
        ("into batches", _figure(result, "copy", _three_digits, " rows/s")),
    ]
    told = f"Not measured: {result['trouble']}" if result["trouble"] else _verdict(result)
    parts = [headline(result["title"], result["path"], False), _told(rows), Text(), Text(told), Text(), _told(paces)]
    return Group(*parts, *_storages(result))


def convert_answer(result: dict) -> RenderableType:
    """What was written, that it was read back, and what it gives."""
    gain = result["gain"]
    paces = f"{pace(gain['before'])} before, {pace(gain['after'])} now" if gain["ratio"] else ""
    estimated = f"estimated {formatting.ratio(gain['estimated'])}" if gain["estimated"] else "not estimated"
    rows = [
        (
            "files",
            f"{formatting.count(len(result['files']), 'file', 'files')}, {size(result['bytes'])}, before {size(result['bytes_before'])}",
        ),
        ("left as they are", _left(result["others"], "not converted")),
        ("read back", f"all {formatting.count(result['rows'], 'row', 'rows')}, content {result['digest']}"),
        ("left out", _skipped(result)),
        ("classes", _classes(result["classes"])),
        ("took", formatting.seconds(result["seconds"])),
        (
            "gain",
            f"{estimated}, measured {formatting.with_interval(gain | {'median': gain['ratio']})}"
            if gain["ratio"]
            else "",
        ),
        ("one core", paces),
        ("open it with", result["open"]),
    ]
    return Group(headline(_gained(result["to"], gain), result["out"], gain["verdict"] == "faster"), _told(rows))


def size(number: float) -> str:
    """``512 bytes``, ``1.2 GB`` (10**9 bytes)."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{formatting.plain(number / unit, digits=3)} {name}"
    return formatting.count(number, "byte", "bytes")


def pace(rows: float | None) -> str:
    return "" if rows is None else f"{_three_digits(rows)} rows/s"


def _three_digits(number: float) -> str:
    return f"{float(f'{number:.3g}'):,.0f}"


def _figure(result: dict, name: str, told: Callable[[float], str], unit: str) -> str:
    """``1,230 rows/s (1,100 to 1,250)``: the median, and the readings that lie farthest apart, where there were several."""
    if (median := result["speed"][name]) is None:
        return ""
    between = " to ".join(told(each) for each in result["ranges"].get(name, ()))
    return f"{told(median)}{unit}" + (f" ({between})" if between else "")


def _told(rows: list[tuple[str, str]]) -> RenderableType:
    """The rows in which something is said."""
    return pairs([row for row in rows if row[1]])


def _columns(columns: dict) -> str:
    shown = [f"{name}: {kind}" for name, kind in list(columns.items())[:MOST_COLUMNS]]
    more = len(columns) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more > 0 else [])]) or formatting.NOTHING


def _left(others: dict, what: str) -> str:
    """The files of other forms, and what of them; nothing where there are none."""
    files = ", ".join(f"{count:,} {form}" for form, count in others.items())
    return files and f"{files}; {what}"


def _skipped(result: dict) -> str:
    what = _files_and_rows(result["skipped_files"], result["skipped_rows"])
    return what and f"{what} that could not be read; skipped.jsonl lists them"


def _listed(bad: list[dict]) -> str:
    """How many files and rows could not be read, and the first of them, each in a line."""
    files = sum(each["row"] is None for each in bad)
    what = _files_and_rows(files, len(bad) - files)
    told = [
        each["why"] if each["where"] in each["why"] else f"{each['where']}: {each['why']}" for each in bad[:MOST_BAD]
    ]
    more = [f"and {len(bad) - MOST_BAD} more"] if len(bad) > MOST_BAD else []
    return what and "\n".join([f"{what} that could not be read:", *told, *more])


def _files_and_rows(files: int, rows: int) -> str:
    told = [
        formatting.count(files, "file", "files") if files else "",
        formatting.count(rows, "row", "rows") if rows else "",
    ]
    return " and ".join(filter(None, told))


def _classes(names: list[str] | None) -> str:
    """``3: bird, cat, dog``, in the order of their numbers."""
    shown = ", ".join((names or [])[:MOST_COLUMNS])
    return shown and f"{len(names)}: {shown}{', ...' if len(names) > MOST_COLUMNS else ''}"


def _gained(to: str, gain: dict) -> str:
    """What a conversion gave, in as strong words as the measurement bears."""
    if gain["verdict"] == "no difference":
        return f"Stored as {to}; no clear difference in how fast it is read"
    return f"Read {formatting.ratio(gain['ratio'])} as fast" if gain["ratio"] else f"Stored as {to}"


def _verdict(result: dict) -> str:
    resized = f", resized to {result['resize']} pixels" if result["resize"] else ""
    told = f"{LIMITS[result['limit']]}: {_figure(result, 'batches', _three_digits, ' rows/s')} on one core{resized}."
    if result["limit"] == "copy" and result["passes"] == "first" and not result["target"]:
        told += " With --target NAME, columns of numbers become one matrix, which is copied faster."
    if result["passes"] == "first":
        return f"{told} The table fits into memory: this is the first pass, later ones take decoded rows from there."
    return told


def _storages(result: dict) -> list[RenderableType]:
    if result["trouble"]:
        return []
    if not result["storages"]:
        return [Text(), Text("No other storage that was tried would be faster.", QUIET)]
    head = "would make the first pass faster" if result["passes"] == "first" else "would be faster"
    table = grid(head, ">estimate", ">rows/s", ">size")
    for each in result["storages"]:
        name = f"{each['to']} at {each['resize']} pixels" if each["resize"] else each["to"]
        estimate = formatting.with_interval(each | {"median": each["gain"]})
        table.add_row(Text(name, HEAD), estimate, _three_digits(each["rows_per_second"]), size(each["bytes"]))
    best = result["storages"][0]
    command = ["hasten", "data", "convert", result["path"], "--to", best["to"]]
    command += ["--resize", str(best["resize"])] if best["resize"] else []
    command += ["--target", result["target"]] if result["target"] and best["to"] == "rows" else []
    command += ["--max-bad-rows", str(result["skip_bad"])] if result["skip_bad"] else []
    command += ["--fill", str(best["fill"])] if best["fill"] is not None else []
    or_else = (
        [Text('or .cache("disk") in the pipeline: its first pass stores such rows by itself', QUIET)]
        if best["to"] == "rows"
        else []
    )
    return [
        Text(),
        indented(table),
        Text(),
        Text(f"{shlex.join(command)} --out DIR", no_wrap=True, overflow="ignore"),
        *or_else,
    ]
