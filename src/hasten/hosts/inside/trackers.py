"""Watches the trackers that a script imports: each is handed to ``hosts.metric_loggers`` once it is there."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hasten.hosts.metric_loggers import WATCHED


class TrackerFinder:
    """A finder on ``sys.meta_path`` that calls ``WATCHED[name](module, report)`` after the import of a tracker.

    Args:
        report: ``(name, value)`` of each number that is logged.
    """

    def __init__(self, report: Callable[[str, float], None]):
        self.report, self.inside = report, False
        for name in WATCHED.keys() & sys.modules.keys():
            WATCHED[name](sys.modules[name], report)
        sys.meta_path.insert(0, self)  # pyright: ignore[reportArgumentType]  # a finder needs find_spec only

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a tracker, with a loader that watches it; None for any other module."""
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _WatchingLoader(spec.loader, self.report)
                return spec
        return None


class _WatchingLoader:
    """Loads a tracker as its own loader does, puts that one back, and watches the module."""

    def __init__(self, loader: Any, report: Callable[[str, float], None]):
        self.loader, self.report = loader, report

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        WATCHED[module.__name__](module, self.report)
