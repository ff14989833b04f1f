"""Turns a program that imports modules into one file that does not: every name it uses is copied in as source.

Only what is reachable is copied, comments and all. Two things of one name that meet in the one file are told
apart by the name of the module they came from. Modules for which ``inline`` says no stay imports.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

from hasten.contract.errors import Refusal
from hasten.engine.syntax import MAIN, Source, Symbol


@dataclass(frozen=True)
class Flat:
    """A program without the modules it was written with.

    Attributes:
        imports: the import lines that are left.
        modules: (module, source) of all that was copied in; what is needed while loading comes first.
        main: the program itself.
    """

    imports: list[str]
    modules: list[tuple[str, str]]
    main: str


def flatten(main: str, inline: Callable[[str], bool], instead: dict[Symbol, str]) -> Flat:
    """The flat form of the module text ``main``.

    Args:
        inline: ``(module name) -> bool``, whether a module is copied in.
        instead: other source for some top-level definitions.

    Raises:
        Refusal: something whose source cannot be found.
    """
    gathered = _Gathered(inline, instead)
    gathered.read(MAIN, main)
    names = _names(gathered)
    texts = [(name, source.written(names)) for name, source in gathered.sources.items()]
    modules = [(name, text) for name, text in texts if text and name != MAIN]
    return Flat(_import_lines(gathered, names), modules, dict(texts)[MAIN])


@dataclass
class _Gathered:
    """Follows names from module to module until nothing new is needed."""

    inline: Callable[[str], bool]
    instead: dict[Symbol, str]
    sources: dict[str, Source] = field(default_factory=dict)
    outside: dict[Symbol, str] = field(default_factory=dict)  # what stays an import, and what it is called
    dotted: set[str] = field(default_factory=set)  # `import a.b` beside a use of `a`
    hidden: dict[Symbol, set[str]] = field(default_factory=lambda: defaultdict(set))  # local names where the symbol is used

    def read(self, name: str, text: str) -> Source:
        """Takes in a module: all of main and whatever does something in a user's file; of ours only what is asked for."""
        source = Source(name, text, self.inline)
        for other in source.needed_to_load():
            self.source(other)
        self.sources[name] = source  # behind what it needs, so that a class stands before what derives from it
        for index in source.doing_something():
            self.want(source, index)
        return source

    def source(self, name: str) -> Source:
        if name in self.sources:
            return self.sources[name]
        try:
            text = inspect.getsource(importlib.import_module(name))
        except (OSError, TypeError):
            raise Refusal(f"the source of {name} cannot be found, so it cannot be written out") from None
        replacements = {symbol[1]: other for symbol, other in self.instead.items() if symbol[0] == name}
        return self.read(name, Source(name, text, self.inline).replaced(replacements) if replacements else text)

    def want(self, source: Source, index: int) -> None:
        """Takes in one top-level statement and everything that it names."""
        if index in source.wanted:
            return
        source.wanted.add(index)
        for use in source.uses(index):
            called = use.name
            if use.name in source.definitions:
                symbol, node = (source.name, use.name), use.whole
            elif use.name in source.imports:
                symbol = self.resolved(source.imports[use.name])
                node = use.whole
                if use.attribute and not symbol[1] and self.inline(symbol[0]):
                    symbol, node, called = self.resolved((symbol[0], use.attribute)), use.with_attribute, use.attribute
            else:
                continue  # a builtin
            self.hidden[symbol] |= use.bound
            source.places.append((node, symbol))
            if symbol[1] and (symbol[0] == MAIN or self.inline(symbol[0])):
                target = self.source(symbol[0])
                self.want(target, target.definitions[symbol[1]])
            else:
                self.outside.setdefault(symbol, called)
                self.dotted |= source.dotted.get(called, set())

    def resolved(self, symbol: Symbol) -> Symbol:
        """Where a name is really defined: ``from hasten import Task`` means the class in hasten.contract.task."""
        module, name = symbol
        if not name or not self.inline(module):
            return symbol
        loaded = importlib.import_module(module)
        found = getattr(loaded, name, None) or importlib.import_module(f"{module}.{name}")
        if isinstance(found, ModuleType):
            return found.__name__, ""
        if isinstance(found, (type, FunctionType)) and found.__module__ != module and self.inline(found.__module__):
            return found.__module__, name
        source = self.source(module)
        if name in source.definitions:
            return symbol
        if name in source.imports:
            return self.resolved(source.imports[name])
        raise Refusal(f"{module}.{name} has no source of its own, so it cannot be written out")


def _names(gathered: _Gathered) -> dict[Symbol, str]:
    """A name of its own for everything in the file: the one it has wherever that is free."""
    taken, names = set(dir(builtins)), {}
    defined = [(source.name, name) for source in gathered.sources.values() for name in source.defined()]
    for symbol in [*gathered.outside, *sorted(defined, key=lambda symbol: symbol[0].partition(".")[0] == "hasten")]:
        module, name = symbol
        wish = gathered.outside.get(symbol, name)
        wishes = [wish, f"{module.rpartition('.')[2]}_{wish.lstrip('_')}", *(f"{wish}_{number}" for number in range(2, 99))]
        names[symbol] = next(each for each in wishes if each not in taken and each not in gathered.hidden[symbol])
        taken.add(names[symbol])
    return names


def _import_lines(gathered: _Gathered, names: dict[Symbol, str]) -> list[str]:
    lines, members = {f"import {module}" for module in gathered.dotted}, defaultdict(set)
    for module, name in gathered.outside:
        alias = names[module, name]
        if name:
            members[module].add(name if alias == name else f"{name} as {alias}")
        else:
            lines.add(f"import {module}" if alias == module else f"import {module} as {alias}")
    return sorted(lines) + [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(members.items())]
