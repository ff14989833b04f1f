"""Writes ``docs/data/effects.json``: what every method shows on a model of each make, in short runs on the CPU.

    python docs/make_effects.py [--backend inductor]

The methods run with their first preset, those that need several processes excluded. ``docs/hooks.py`` renders the file.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import torch

from hasten.core.recipe import Recipe
from hasten.engine.registry import method_class, method_names
from hasten.testing.effects import observe_effect
from hasten.testing.models import available_makes

FILE = Path(__file__).resolve().parent / "data" / "effects.json"


def options_of(name: str, backend: str) -> dict:
    options = dict(method_class(name).card.presets[0])
    if name == "compile":
        options["backend"] = backend
    if name == "num_threads":
        options["count"] = 2  # one is what the runs compute with
    return options


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="inductor", help="of torch.compile")
    backend = arguments.parse_args().backend
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pairs = []
    for name in method_names():
        if "distributed" in method_class(name).card.applies_to:
            continue
        recipe = Recipe().with_method(name, **options_of(name, backend))
        for make, task in available_makes().items():
            effect = observe_effect(task(), recipe)
            pairs.append({"method": name, "make": make, "acts": effect.acts, "text": effect.text})
            print(f"{recipe} on {make}: {'acts' if effect.acts else 'no effect'}: {effect.text}", flush=True)
    made = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "device": "cpu", "backend": backend}
    lines = ",\n".join(f"  {json.dumps(pair)}" for pair in pairs)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(f'{json.dumps(made)[:-1]}, "pairs": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
