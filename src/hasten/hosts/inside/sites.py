"""Where in the user's code a loader, an optimizer or a model came from: ``train.py:81#1``."""

import inspect
import os
import sys
from collections import Counter
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

FRAMEWORKS = (
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "transformers",
    "accelerate",
    "keras",
    "torch_geometric",
)
HIDDEN = ("torch", "importlib", "contextlib", "functools", "typing", *FRAMEWORKS)  # packages whose frames are no site


class Sites:
    """The sites that were seen, by kind ("loaders", "optimizers", ...); each is plain data with its ``site``.

    Args:
        directory: Files below it are named by their relative path.
    """

    def __init__(self, directory: str):
        self.directory = directory
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.early = True  # until the first step has ended
        self.by_stack: dict[tuple[str, Any], dict[str, Any]] = {}
        self.by_object: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str, thing: Any, **facts: Any) -> dict[str, Any] | None:
        """Notes an object that the code which is running now has made or calls; None if that is hasten's own code."""
        line, stack = self.line(), None
        if line is None:
            return None
        package = _package(inspect.currentframe())
        if package in FRAMEWORKS:
            facts["made_by"] = package
        if kind == "loaders" and package in FRAMEWORKS:  # which make one anew for every epoch
            stack = _stack(inspect.currentframe())
            if (kind, stack) in self.by_stack:
                record = self.by_object[thing] = self.by_stack[kind, stack]
                return record
        self.counts[kind, line] += 1
        record = {
            "site": f"{line}#{self.counts[kind, line]}",
            "type": class_name(thing),
            "early": self.early,
            **facts,
        }
        self.records.setdefault(kind, []).append(record)
        self.by_object[thing] = record
        if stack is not None:
            self.by_stack[kind, stack] = record
        return record

    def of(self, thing: Any) -> dict[str, Any] | None:
        """The record of an object; None if it was not noted."""
        return self.by_object.get(thing)

    def line(self, frame: FrameType | None = None) -> str | None:
        """``file:line`` of the innermost frame of the user, from ``frame``; None if hasten's own code called torch."""
        frame = frame or inspect.currentframe()
        while frame is not None:
            name = _module(frame)
            package = name.partition(".")[0]
            if package == "hasten" and not name.startswith(__package__ or "hasten.hosts.inside"):
                return None
            if package not in (*HIDDEN, "hasten"):
                return f"{self.relative(frame.f_code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back
        return None

    def main(self) -> str | None:
        """The file of the module that runs, also if it was started by its name; None if there is none."""
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


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _package(frame: FrameType | None) -> str:
    """The package of the code that uses torch: of the innermost frame that is neither torch's nor hasten's."""
    while frame is not None and _module(frame).partition(".")[0] in ("torch", "hasten"):
        frame = frame.f_back
    return "" if frame is None else _module(frame).partition(".")[0]


def _stack(frame: FrameType | None) -> tuple[tuple[str, int], ...]:
    lines: list[tuple[str, int]] = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)
