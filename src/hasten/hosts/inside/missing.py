"""Finds the sites of an earlier run that are missing in this one."""

from typing import Any


def missing_sites(known: dict[str, Any], seen: dict[str, Any]) -> str:
    """Which loader for training, optimizer or model of an earlier run was not seen in this one; empty if all were."""
    for kind, noun in (("optimizers", "optimizer"), ("models", "model"), ("loaders", "training loader")):
        here = {(entry["site"], entry["type"]) for entry in seen.get(kind, ())}
        for entry in known.get(kind, ()):
            if not entry.get("early", True):  # made after the first step
                continue
            if entry.get("role", "training") == "training" and (entry["site"], entry["type"]) not in here:
                return f"the {noun} at {entry['site']} ({entry['type']}) did not come again"
    return ""
