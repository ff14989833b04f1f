"""Generates pages while the site is built, from cards, records, effects, the command line and CONTRIBUTING.md."""

import argparse
import json
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]


def on_files(files, config):
    pages = {
        "methods.md": methods_page,
        "effects.md": effects_page,
        "benchmarks.md": benchmarks_page,
        "cli.md": cli_page,
        "contributing.md": contributing_page,
    }
    for name, make in pages.items():
        files.append(File.generated(config, name, content=make()))
    return files


def methods_page() -> str:
    from hasten.engine.registry import method_class, method_names

    lines = [
        "# Methods",
        "",
        "One line per method; `hasten methods NAME` prints the whole card with its options and records.",
        "",
    ]
    lines += ["| method | what it does | exactness |", "|---|---|---|"]
    cards = {name: method_class(name).card for name in method_names()}
    lines += [f"| [{name}](#{name}) | {card.summary} | {card.exactness.name} |" for name, card in sorted(cards.items())]
    for name, card in sorted(cards.items()):
        lines += [
            "",
            f"## {name}",
            "",
            f"{card.summary.capitalize()}.",
            "",
            f"Pays when {card.gain_when}.",
            "",
            f"Source: {card.source}",
        ]
        lines += ["", *options_table(method_class(name)), *records_table(name)]
    return "\n".join(lines)


def effects_page() -> str:
    """Method by make of the model: acts, or why not; from data/effects.json, which make_effects.py writes."""
    measured = json.loads((ROOT / "docs" / "data" / "effects.json").read_text(encoding="utf-8"))
    pairs = measured["pairs"]
    methods, makes = (list(dict.fromkeys(pair[key] for pair in pairs)) for key in ("method", "make"))
    acts = {(pair["method"], pair["make"]): pair["acts"] for pair in pairs}
    lines = [
        *("---", "hide: [toc]", "---", ""),  # the table needs the width
        "# Effects",
        "",
        "Every method observes one step of a run and shows that it acted, or reports the reason why it has no effect; "
        "a method without effect is not measured. The table shows short runs with a small model of each make "
        f"(`hasten.testing.models`), with torch {measured['torch']} on the {measured['device'].upper()}, "
        f"`compile` with backend {measured['backend']}, {measured['date']}.",
        "",
        "| method | " + " | ".join(make.replace("_", " ") for make in makes) + " |",
        "|---" * (len(makes) + 1) + "|",
    ]
    for method in methods:
        cells = " | ".join("acts" if acts[method, make] else "-" for make in makes)
        lines.append(f"| [{method}](#{method}) | {cells} |")
    for method in methods:
        lines += ["", f"## {method}", "", "| model | acts | what it shows, or why not |", "|---|---|---|"]
        makes_of: dict[tuple, list[str]] = {}  # (acts, text) -> makes
        for pair in pairs:
            if pair["method"] == method:
                makes_of.setdefault((pair["acts"], pair["text"]), []).append(pair["make"].replace("_", " "))
        lines += [f"| {', '.join(of)} | {'yes' if yes else 'no'} | {text} |" for (yes, text), of in makes_of.items()]
    return "\n".join(lines)


def options_table(cls) -> list[str]:
    import dataclasses

    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    if not fields:
        return []
    rows = [f"| `{field.name}` | `{field.default!r}` | {field.metadata.get('range', '')} |" for field in fields]
    return ["| option | default | range |", "|---|---|---|", *rows, ""]


def records() -> list[dict]:
    return [json.loads(line) for line in (ROOT / "records" / "index.jsonl").read_text(encoding="utf-8").splitlines()]


def records_table(method: str) -> list[str]:
    own = [record for record in records() if method in record["methods"] and record["status"] == "current"]
    if not own:
        return []
    rows = [f"| {record['claim']} | {record['workload']} | {ratio(record)} | {record['date']} |" for record in own]
    return ["| record | workload | ratio | date |", "|---|---|---|---|", *rows, ""]


def benchmarks_page() -> str:
    lines = ["# Benchmarks", "", "Every row is a directory under `records/` with the raw numbers of both arms.", ""]
    for status, title in ("current", "Current"), ("missed", "Goals that were missed"), ("superseded", "Superseded"):
        rows = [record for record in records() if record["status"] == status]
        if not rows:
            continue
        lines += [f"## {title}", "", "| claim | workload | ratio | machine | date |", "|---|---|---|---|---|"]
        lines += [
            f"| {row['claim']} | {row['workload']} | {ratio(row)} | {row['machine']} | {row['date']} |"
            for row in sorted(rows, key=lambda row: (row["claim"], row["workload"], row["date"]))
        ]
        lines.append("")
    return "\n".join(lines)


def ratio(record: dict) -> str:
    value = record.get("ratio")
    return "" if not value else f"{value['median']:.2f}x ({value['low']:.2f} to {value['high']:.2f})"


def cli_page() -> str:
    from hasten.cli.main import build_parser

    lines = [
        "# Command line",
        "",
        'Exit codes: 0 done, 1 a result that is a "no" or a run that could not continue, 2 a wrong request.',
        "",
    ]
    for name, parser in subparsers(build_parser()):
        lines += [f"## {name}", "", "```", parser.format_help().strip(), "```", ""]
    return "\n".join(lines)


def subparsers(parser: argparse.ArgumentParser, prefix: str = "hasten"):
    """(full name, parser) of every verb, verbs of verbs included."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield f"{prefix} {name}", child
                yield from subparsers(child, f"{prefix} {name}")


def contributing_page() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
