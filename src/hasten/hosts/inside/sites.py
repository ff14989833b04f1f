"""Where in the user's code a loader, an optimizer or a model came from: ``train.py:81#1``."""

import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

FRAMEWORKS = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
    *("transformers", "accelerate", "keras", "torch_geometric"),
)
HIDDEN = {"torch", "importlib", "contextlib", "functools", "typing", "sitecustomize", *FRAMEWORKS}  # no sites


class Sites:
    """The sites that were seen, by kind ("loaders", "optimizers", ...): dictionaries with ``site``, ``type`` and facts.

    Files below ``directory`` are named by their relative path.
    """

    def __init__(self, directory: str):
        self.directory = directory
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.early = True  # until the first step has ended
        self.by_stack: dict[tuple[str, Any], dict[str, Any]] = {}
        self.by_object: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str, thing: Any, **facts: Any) -> dict[str, Any] | None:
        """Records an object that the running code has made or calls; returns the record, None for hasten's own code."""
        line, stack = self.line(), None
        if line is None:
            return None
        packages = (module_of(frame).partition(".")[0] for frame in frames_from(inspect.currentframe()))
        package = next((name for name in packages if name not in ("torch", "hasten")), "")
        if package in FRAMEWORKS:
            facts["made_by"] = package
        if kind == "loaders" and package in FRAMEWORKS:  # which make one anew for every epoch
            frames = frames_from(inspect.currentframe())
            lines = ((frame.f_code.co_filename, frame.f_lineno) for frame in frames)
            length = None
            with suppress(Exception):  # of a stream
                length = len(thing.dataset)
            sampler = type(getattr(thing, "sampler", None)).__name__
            # one line of accelerate prepares several
            stack = (getattr(thing, "batch_size", None), sampler, length, *lines)
            if (kind, stack) in self.by_stack:
                record = self.by_object[thing] = self.by_stack[kind, stack]
                return record
        self.counts[kind, line] += 1
        site = f"{line}#{self.counts[kind, line]}"
        record = {"site": site, "type": class_name(thing), "early": self.early, **facts}
        self.records.setdefault(kind, []).append(record)
        self.by_object[thing] = record
        if stack is not None:
            self.by_stack[kind, stack] = record
        return record

    def of(self, thing: Any) -> dict[str, Any] | None:
        """The record of an object; None if it was not noted."""
        return self.by_object.get(thing)

    def forget(self, kind: str, thing: Any) -> None:
        """Removes the record of an object, if it has one."""
        record = self.by_object.pop(thing, None)
        self.records[kind] = [other for other in self.records.get(kind, ()) if other is not record]

    def line(self, frame: FrameType | None = None) -> str | None:
        """``file:line`` of the innermost frame of the user, from ``frame``; None if hasten's own code called torch."""
        for one in frames_from(frame or inspect.currentframe()):
            name = module_of(one)
            package = name.partition(".")[0]
            if package == "hasten" and not name.startswith(__package__ or "hasten.hosts.inside"):
                return None
            if package not in HIDDEN and package != "hasten":
                return f"{self.relative(one.f_code.co_filename)}:{one.f_lineno}"
        return None

    def main(self) -> str | None:
        """The path of the file that runs as ``__main__``, from the directory of the sites; None if there is none."""
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        return self.relative(file) if file else None

    def relative(self, file: str) -> str:
        """The path of a file from the directory of the sites; absolute if it lies outside."""
        path = os.path.relpath(file, self.directory) if os.path.isabs(file) else file
        return os.path.abspath(file) if path.startswith("..") else path


def class_name(thing: Any) -> str:
    """The class of an object; of a wrapper, such as DistributedDataParallel or Fabric's, that of the model in it."""
    inner = getattr(thing, "module", None)
    if isinstance(thing, nn.Module) and isinstance(inner, nn.Module):
        outer_ids, inner_ids = ({id(parameter) for parameter in one.parameters()} for one in (thing, inner))
        if outer_ids == inner_ids:
            return class_name(inner)
    return type(thing).__name__


def module_of(frame: FrameType) -> str:
    """The name of the module whose code runs in a frame."""
    return frame.f_globals.get("__name__") or ""


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def missing_sites(known: dict[str, Any], seen: dict[str, Any]) -> str:
    """A text on an optimizer, model or training loader of an earlier run that is missing in this one; "" if none is.

    Those that were made after the first step are not required.
    """
    for kind, noun in (("optimizers", "optimizer"), ("models", "model"), ("loaders", "training loader")):
        here = {(entry["site"], entry["type"]) for entry in seen.get(kind, ())}
        for entry in known.get(kind, ()):
            if not entry.get("early", True):  # made after the first step
                continue
            if entry.get("role", "training") == "training" and (entry["site"], entry["type"]) not in here:
                return f"the {noun} at {entry['site']} ({entry['type']}) did not come again"
    return ""
