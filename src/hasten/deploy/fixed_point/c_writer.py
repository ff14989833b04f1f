"""Writes an integer model as C99: ``model.h`` holds the weights, ``model.c`` the program. No float, no malloc."""

import re
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hasten.deploy.fixed_point.layers import IntegerModel, Linear

NUMBERS_PER_LINE = 20


def write_c(model: IntegerModel, directory: Path, task: str, classes: tuple[str, ...] | None = None) -> list[Path]:
    """Writes ``model.h`` and ``model.c`` into a directory; returns their paths.

    ``model_run(input, output)`` computes the int8 scores of one int8 sample, in static buffers: it is not reentrant.
    With ``-DMODEL_MAIN`` the file is a program from int8 samples on standard input to int8 scores on standard output,
    whose exit code is 1 after a partial last sample. ``task`` and ``classes`` are names for comments.
    """
    loader = PackageLoader("hasten.deploy.fixed_point", ".")
    templates = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    slots, sizes = _buffers(model)
    layers = [
        {
            "index": index,
            "kind": type(layer).__name__,
            "layer": layer,
            "sources": [model.activations[name] for name in layer.inputs],
            "output": model.activations[layer.output],
            "from": [slots[model.storage(name)] for name in layer.inputs],
            "to": slots[layer.output],
            "per_channel": int(isinstance(layer, Linear) and len(layer.requantization.multipliers) > 1),
        }
        for index, layer in enumerate(model.layers)
    ]
    context = {
        "task": _comment(task),
        "classes": [_comment(name) for name in classes or ()],
        "input": model.input,
        "output": model.output,
        "layers": layers,
        "buffers": sizes,
        "numbers": _numbers,
        "weight_bytes": model.bytes,
        "buffer_bytes": sum(sizes),
    }
    paths = [directory / "model.h", directory / "model.c"]
    for path in paths:
        path.write_text(templates.get_template(f"{path.name}.j2").render(context), encoding="utf-8")
    return paths


def _buffers(model: IntegerModel) -> tuple[dict[str, str], list[int]]:
    """(activation that is no view -> C name of its memory, bytes of each buffer, reused after its last reader)."""
    last_use = {model.storage(name): index for index, layer in enumerate(model.layers) for name in layer.inputs}
    slots, sizes = {model.input.name: "input", model.output.name: "output"}, list[int]()
    free: list[int] = []
    taken: dict[str, int] = {}
    for index, layer in enumerate(model.layers):
        if layer.output not in slots:
            size = model.activations[layer.output].size
            slot = min(free, key=lambda i: abs(sizes[i] - size), default=None)
            if slot is None:
                slot = len(sizes)
                sizes.append(0)
            else:
                free.remove(slot)
            sizes[slot] = max(sizes[slot], size)
            slots[layer.output], taken[layer.output] = f"buffer_{slot}", slot
        read = {model.storage(name) for name in layer.inputs}
        free += [taken.pop(name) for name in read if last_use[name] == index and name in taken]
    return slots, sizes


def _comment(text: str) -> str:
    """The text with ``_`` for all but letters, digits and `` _.,:-``, so that a name from data cannot end a comment."""
    return re.sub(r"[^A-Za-z0-9 _.,:-]", "_", text)


def _numbers(values: Iterable[int]) -> str:
    """The numbers of a C initializer, separated by commas, ``NUMBERS_PER_LINE`` a line."""
    texts = [str(int(value)) for value in values]
    lines = [", ".join(texts[i : i + NUMBERS_PER_LINE]) for i in range(0, len(texts), NUMBERS_PER_LINE)]
    return ",\n  ".join(lines)
