"""Writes ``src/hasten/tuning/experience.toml``: which compositions made which kind of task faster, from the records.

Run it after ``make_index.py``. Tasks are grouped by the words that ``hasten.tuning.experience`` compares: device, kind
of model and data, phases of the step that take long. Each group gives up to three kinds of rows:

    basis = "exact"       the bit-exact and same-formula methods that were kept in most searches that measured them
    basis = "consensus"   the methods of at least half of the winning recipes, with their most frequent options
    basis = "won"         a recipe that won the newest search of a task

A trial or a winning recipe whose method was withdrawn (records/withdrawn.jsonl), and a member of a winning recipe
without a share of its own, do not count. No row names a workload.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from math import prod
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from hasten.core.card import FACTS
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.engine.composition import check_conflicts
from hasten.engine.registry import make_methods, method_names
from hasten.tuning.experience import COMPARED, LARGE_PHASES, TABLE, compared_words, is_exact

ROOT = Path(__file__).resolve().parent.parent
OLD_FACTS = {"several epochs": "multiple_epochs", "several processes": "distributed"}  # spellings before 2026-11-23
MIN_SHARE, MIN_RATIO = 0.5, 1.02  # of the searches or winners; of what a member contributes
HEAD = """\
# Which compositions made which kind of task faster. Written by benchmarks/make_experience.py; do not edit.
# facts: of the tasks; basis: "exact" (kept in most searches), "consensus" (methods of at least half of the winning
# recipes), "won" (one recipe that won); speedup: median over the searches; searches: number of them; shares: of the
# searches that kept the method, or of the winning recipes that contain it.
"""


def table() -> str:
    """The content of experience.toml."""
    rows = [row for facts, group in _groups().items() for row in _rows(facts, group)]
    return HEAD + "".join(map(_to_toml, rows))


def _groups() -> dict[tuple[str, ...], list[Any]]:
    """The searches by the words of their task, in the order of COMPARED."""
    tasks = defaultdict(list)
    for search in _searches():
        tasks[search["workload"], search["words"] - set(LARGE_PHASES.values())].append(search)
    groups = defaultdict(list)
    for (_, words), searches in tasks.items():  # one measurement of the phases may be off: most searches count
        large = Counter(word for search in searches for word in search["words"] - words)
        words = words | {word for word, count in large.items() if count > len(searches) / 2}
        groups[tuple(word for word in COMPARED if word in words)] += searches
    return dict(sorted(groups.items()))


def _searches() -> list[Any]:
    """Every search of the records: ``workload``, ``words``, ``trials``, ``won`` (its recipe or None), ``speedup``."""
    found = []
    for entry in map(json.loads, (ROOT / "records" / "index.jsonl").read_text(encoding="utf-8").splitlines()):
        if not entry["trials"]:
            continue
        result = json.loads((ROOT / entry["path"] / "result.json").read_text(encoding="utf-8"))
        result = result if "trials" in result else result["result"]
        facts = {OLD_FACTS.get(fact, fact.replace(" ", "_")) for fact in result["facts"]} & FACTS.keys()
        found.append(
            {
                "workload": entry["workload"],
                "is_newest": entry["status"] != "superseded",
                "words": compared_words(facts, result["phases"]),
                "trials": entry["trials"],
                "won": _winner(result, entry["workload"], entry["date"]),
                "speedup": (result.get("speedup") or {}).get("median"),
            }
        )
    return found


def _winner(result: Any, workload: str, date: str) -> Recipe | None:
    """The winning recipe without members that contribute nothing; None without one, or if a member was withdrawn."""
    if result["verdict"] != "faster" or _withdrawn(workload, date) & result["recipe"].keys():
        return None
    idle = {part["method"] for part in result.get("contributions") or () if not _contributes(part["speedup"])}
    return Recipe(result["recipe"]).drop(*idle) or None


def _contributes(share: Any) -> bool:
    if not share or share["median"] is None:
        return True
    return share["median"] > MIN_RATIO and (share["low"] is None or share["low"] > 1)


def _withdrawn(workload: str, date: str) -> set[str]:
    lines = (ROOT / "records" / "withdrawn.jsonl").read_text(encoding="utf-8").splitlines()
    entries = (entry for entry in map(json.loads, lines) if entry["workload"] == workload and date <= entry["until"])
    return {entry["method"] for entry in entries}


def _rows(facts: tuple[str, ...], searches: list[Any]) -> list[Any]:
    winners = [search for search in searches if search["won"]]
    newest = [search for search in winners if search["is_newest"]]
    rows = [_exact(searches), *([_consensus(winners)] if len(winners) > 1 else []), *map(_won, newest)]
    unique = {str(row["recipe"]): row for row in reversed(rows) if row["recipe"]}  # the first row of a recipe stays
    order = ("exact", "consensus", "won")
    ordered = sorted(unique.values(), key=lambda row: (order.index(row["basis"]), -row["speedup"]))
    return [{"facts": facts, **row} for row in ordered]


def _exact(searches: list[Any]) -> Any:
    """The exact methods that most searches kept, with the product of their ratios as speed-up."""
    kept, measured, ratios = defaultdict(Counter), Counter(), defaultdict(list)
    for search in searches:
        seen = set()
        for trial in search["trials"]:
            recipe = _single(trial["what"])
            if recipe is None or not trial["ratio"] or not is_exact(recipe):
                continue
            (name,) = recipe.methods
            seen.add(name)
            if trial["verdict"] == "kept":
                kept[name][str(recipe)] += 1
                ratios[name].append(trial["ratio"]["median"])
        measured.update(seen)
    shares = {name: sum(counts.values()) / measured[name] for name, counts in kept.items()}
    good = {
        name: share for name, share in shares.items() if share > MIN_SHARE and geometric_mean(ratios[name]) > MIN_RATIO
    }
    recipe = _compose(good, {name: counts.most_common(1)[0][0] for name, counts in kept.items()})
    speedup = prod(geometric_mean(ratios[name]) for name in recipe.methods)
    return _row("exact", recipe, speedup, len(searches), good)


def _consensus(winners: list[Any]) -> Any:
    texts = defaultdict(Counter)
    for search in winners:
        for name, options in search["won"].methods.items():
            texts[name][str(Recipe({name: options}))] += 1
    shares = {name: sum(counts.values()) / len(winners) for name, counts in texts.items()}
    good = {name: share for name, share in shares.items() if share >= MIN_SHARE}
    recipe = _compose(good, {name: counts.most_common(1)[0][0] for name, counts in texts.items()})
    speedup = median(search["speedup"] for search in winners)
    return _row("consensus", recipe, speedup, len(winners), good)


def _won(search: Any) -> Any:
    return _row("won", search["won"], search["speedup"], 1, dict.fromkeys(search["won"].methods, 1.0))


def _compose(shares: dict[str, float], texts: dict[str, str]) -> Recipe:
    """The methods with the largest shares that can be combined."""
    recipe = Recipe()
    for name in sorted(shares, key=lambda name: (-shares[name], name)):
        larger = recipe | Recipe.parse(texts[name])
        try:
            check_conflicts(make_methods(larger))
        except ConfigurationError:
            continue
        recipe = larger
    return recipe


def _single(what: str) -> Recipe | None:
    """The recipe of a trial of one installed method; None for any other trial."""
    recipe = Recipe.parse(what) if what.partition(":")[0] in method_names() else None
    return recipe if recipe and len(recipe.methods) == 1 else None


def _row(basis: str, recipe: Recipe, speedup: float, searches: int, shares: dict[str, float]) -> Any:
    shares = {name: shares[name] for name in sorted(recipe.methods, key=lambda name: (-shares[name], name))}
    return {"basis": basis, "recipe": recipe, "speedup": speedup, "searches": searches, "shares": shares}


def _to_toml(row: Any) -> str:
    shares = ", ".join(f"{name} = {share:.2f}" for name, share in row["shares"].items())
    return (
        f"\n[[composition]]\nfacts = {json.dumps(row['facts'])}\n"
        f'basis = "{row["basis"]}"\nrecipe = "{row["recipe"]}"\n'
        f"speedup = {row['speedup']:.2f}\nsearches = {row['searches']}\nshares = {{ {shares} }}\n"
    )


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
    print(f"{table().count('[[composition]]')} compositions in {TABLE.relative_to(ROOT)}")
