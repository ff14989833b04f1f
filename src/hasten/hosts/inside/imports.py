"""Watches what a script imports: a function is called with each module of interest once it is imported."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportFinder:
    """A finder on ``sys.meta_path`` that calls ``watchers[name](module)`` after the import of a module.

    Args:
        watchers: By the name of the module; several mappings may name the same one.
    """

    def __init__(self, *watchers: Mapping[str, Callable[[Any], None]]):
        self.watchers: dict[str, list[Callable[[Any], None]]] = {}
        for name, watch in (item for one in watchers for item in one.items()):
            self.watchers.setdefault(name, []).append(watch)
        for name in self.watchers.keys() & sys.modules.keys():
            _call_all(self.watchers[name], sys.modules[name])
        sys.meta_path.insert(0, self)  # pyright: ignore[reportArgumentType]  # a finder needs find_spec only

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a module of interest, with a loader that calls its function; None for any other module."""
        if name not in self.watchers:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                watching: Any = _WatchingLoader(spec.loader, partial(_call_all, self.watchers[name]))
                spec.loader = watching
                return spec
        return None


def _call_all(watchers: Sequence[Callable[[Any], None]], module: Any) -> None:
    for watch in watchers:
        watch(module)


class _WatchingLoader:
    """Loads a module as its own loader does, puts that one back, and calls the function."""

    def __init__(self, loader: Any, watch: Callable[[Any], None]):
        self.loader, self.watch = loader, watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.watch(module)
