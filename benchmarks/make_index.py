"""Writes ``records/index.jsonl``: one line of JSON for each record directory. Run it after a record was added.

The file lies in the package (``src/hasten/records.jsonl``; ``records/index.jsonl`` links to it), so that installed
users see the records with ``hasten methods NAME``. The keys of a line:

    claim, workload, machine, date   from the name of the directory; workload is null for a claim about no workload
    commit                           the commit of this repository that added the record
    status                           current; superseded (a newer record has the same claim, workload and machine);
                                     missed (the figure was not reached, or the search found no improvement)
    ratio                            {median, low, high} of the first speed-up that the record states, or null
    methods                          the methods that were measured, by their present names
    path                             the directory, relative to the repository
    trials                           of a search: [{what, verdict, ratio, why}] of each trial; the verdict is
                                     "withdrawn", without a ratio, for those listed in records/withdrawn.jsonl
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "records" / "index.jsonl"
WITHDRAWN = ROOT / "records" / "withdrawn.jsonl"  # {workload, method, until: date, why} of trials that measured nothing
METHOD_FILES = {path.stem for path in (ROOT / "src" / "hasten" / "methods").rglob("*.py")}

FOLDER = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)(?P<letter>[a-z]?)_(?P<rest>.+)_(?P<machine>[^_]+)")
NUMBER = r"([0-9.]+)"
RATIOS = [
    rf"{NUMBER}x? \({NUMBER} to {NUMBER}\)x",
    rf"{NUMBER}x \({NUMBER} to {NUMBER}\)",
    rf"as fast as ddp; it is {NUMBER} \({NUMBER} to {NUMBER}\)",
]
NO_IMPROVEMENT = ("no improvement",)

# What a record was measured with, where the record does not name it in a field.
METHODS_OF_CLAIM = {
    "ddp-scaling": ["ddp"],
    "ddp-scaling-longer-steps": ["ddp"],
    "parameter-server": ["ddp", "parameter_server"],
    "zero-memory": ["ddp", "zero"],
}


def entries() -> list[dict]:
    """One entry per record directory, in the order of their names, which begin with the date."""
    known = {entry["path"]: entry for entry in read()}
    found = [
        _entry(directory, known)
        for directory in sorted(ROOT.glob("records/*/"))
        if (directory / "result.json").exists()
    ]
    newest = {_subject(entry): entry["path"] for entry in found}
    for entry in found:
        if newest[_subject(entry)] != entry["path"]:
            entry["status"] = "superseded"
    return found


def read() -> list[dict]:
    """The entries of the present index."""
    return [json.loads(line) for line in INDEX.read_text(encoding="utf-8").splitlines()] if INDEX.exists() else []


def _entry(directory: Path, known: dict[str, dict]) -> dict:
    result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    name = FOLDER.fullmatch(directory.name)
    claim, _, workload = name["rest"].partition("_")
    path = directory.relative_to(ROOT).as_posix()
    search = result if "trials" in result else result.get("result") or {}
    trials = [
        {"what": trial["what"], **{key: trial.get(key) for key in ("verdict", "ratio", "why")}}
        for trial in search.get("trials", [])
    ]
    workload = search.get("task", workload) or None
    trials = [_withdrawn(trial, workload, name["date"]) for trial in trials]
    missed = result.get("reached") is False or result.get("verdict") in NO_IMPROVEMENT
    return {
        "claim": claim,
        "workload": workload,
        "machine": name["machine"],
        "commit": known.get(path, {}).get("commit") or _commit(path),
        "date": name["date"],
        "status": "missed" if missed else "current",
        "ratio": search.get("speedup") or _ratio(result.get("figure", "")),
        "methods": _methods(claim, result, trials),
        "path": path,
        "trials": trials,
    }


def _withdrawn(trial: dict, workload: str | None, date: str) -> dict:
    """The trial; without its ratio if it measured a method that did not act."""
    for entry in map(json.loads, WITHDRAWN.read_text(encoding="utf-8").splitlines()):
        same = entry["workload"] == workload and entry["method"] in _members(trial["what"]) and date <= entry["until"]
        if same and trial["ratio"]:
            return {**trial, "verdict": "withdrawn", "ratio": None, "why": entry["why"]}
    return trial


def _subject(entry: dict) -> tuple:
    return entry["claim"], entry["workload"], entry["machine"]


def _ratio(figure: str) -> dict | None:
    """The first ratio with an interval in a sentence such as ``it is 1.58 (1.43 to 1.93)x``."""
    found = [match for pattern in RATIOS if (match := re.search(pattern, figure))]
    if not found:
        return None
    first = min(found, key=lambda match: match.start())
    return dict(zip(("median", "low", "high"), map(float, first.groups()), strict=True))


def _methods(claim: str, result: dict, trials: list[dict]) -> list[str]:
    names = {name for trial in trials if trial["verdict"] != "not tried" for name in _members(trial["what"])}
    parts = [result.get(key, {}) for key in ("found", "outcomes", "told", "figure")]  # "told" in records of 2026-11-22
    text = json.dumps(parts)
    names |= set(re.findall(r"[a-z_]+", text)) & {name for name in METHOD_FILES if "_" in name}
    return sorted(names.union(METHODS_OF_CLAIM.get(claim, [])) & METHOD_FILES)


def _members(recipe: str) -> list[str]:
    """The method names in ``num_threads:count=2 + ema``."""
    return [member.partition(":")[0] for member in recipe.split(" + ")]


def _commit(path: str) -> str | None:
    command = ["git", "log", "--diff-filter=A", "--format=%h", "--", f"{path}/result.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split()[-1] if done.stdout.split() else None


if __name__ == "__main__":
    lines = [json.dumps(entry) for entry in entries()]
    INDEX.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} records in {INDEX.relative_to(ROOT)}")
