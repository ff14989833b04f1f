"""Turns a program that imports modules into one file: the source of every name it uses is copied in.

Only reachable definitions are copied, with their comments. Where two definitions have the same name, one gets the name of its
module as a prefix. Modules for which ``inline`` returns False stay imports.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

from hasten.core.errors import ConfigurationError
from hasten.export.module_source import MAIN, ModuleSource, Symbol, is_library

ANY = "typing", "Any"


@dataclass(frozen=True)
class InlinedScript:
    """A program with its modules copied in.

    Attributes:
        imports: the remaining import lines.
        modules: (module, source) of each module that was copied in, in an order in which they can be executed.
        main: the source of the program itself.
    """

    imports: list[str]
    modules: list[tuple[str, str]]
    main: str


def inline_imports(main: str, inline: Callable[[str], bool], instead: dict[Symbol, str]) -> InlinedScript:
    """Copies the source of everything that the module text ``main`` names into one file.

    Args:
        inline: ``(module name) -> bool``, whether a module is copied in.
        instead: replacement source for some top-level definitions.

    Raises:
        Refusal: the source of a definition cannot be found.
    """
    gathered = _Gathered(inline, instead)
    gathered.read(MAIN, main)
    gathered.finish_annotations()
    names = _names(gathered)
    texts = [(name, source.render(names)) for name, source in gathered.sources.items()]
    modules = [(name, text) for name, text in texts if text and name != MAIN]
    return InlinedScript(_import_lines(gathered, names), modules, dict(texts)[MAIN])


@dataclass
class _Gathered:
    """Follows names from module to module until no new definition is needed."""

    inline: Callable[[str], bool]
    instead: dict[Symbol, str]
    sources: dict[str, ModuleSource] = field(default_factory=dict)
    outside: dict[Symbol, str] = field(default_factory=dict)  # names that stay imports, and their local name
    dotted: set[str] = field(default_factory=set)  # `import a.b` beside a use of `a`
    annotations: list[tuple[ModuleSource, ast.AST, Symbol]] = field(default_factory=list)  # in hasten's own modules
    hidden: dict[Symbol, set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )  # local names where the symbol is used

    def read(self, name: str, text: str) -> ModuleSource:
        """Adds a module: all of main, the statements with side effects of a user's file, nothing yet of hasten's own modules."""
        source = ModuleSource(name, text, self.inline)
        for other in source.needed_to_load():
            self.source(other)
        self.sources[name] = source  # after the modules it imports, so that a base class precedes its subclasses
        for index in source.side_effect_statements():
            self.want(source, index)
        return source

    def source(self, name: str) -> ModuleSource:
        if name in self.sources:
            return self.sources[name]
        try:
            text = inspect.getsource(importlib.import_module(name))
        except (OSError, TypeError):
            raise ConfigurationError(f"the source of {name} cannot be found, so it cannot be written out") from None
        replacements = {symbol[1]: other for symbol, other in self.instead.items() if symbol[0] == name}
        return self.read(name, ModuleSource(name, text, self.inline).replaced(replacements) if replacements else text)

    def want(self, source: ModuleSource, index: int) -> None:
        """Adds one top-level statement and everything that it names."""
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
            if use.in_annotation and symbol[1] and self.inline(symbol[0]) and is_library(source.name):
                self.annotations.append((source, node, symbol))
                continue
            self.hidden[symbol] |= use.bound
            source.places.append((node, symbol))
            if symbol[1] and (symbol[0] == MAIN or self.inline(symbol[0])):
                target = self.source(symbol[0])
                self.want(target, target.definitions[symbol[1]])
            else:
                self.outside.setdefault(symbol, called)
                self.dotted |= source.dotted.get(called, set())

    def finish_annotations(self) -> None:
        """Keeps the annotations that name something in the script; the others become ``Any``."""
        for source, node, (module, name) in self.annotations:
            target = self.sources.get(module)
            known = target is not None and target.definitions.get(name) in target.wanted
            source.places.append((node, (module, name) if known else ANY))
            if not known:
                self.outside[ANY] = "Any"

    def resolved(self, symbol: Symbol) -> Symbol:
        """Returns where a name is defined: ``from hasten import Task`` refers to hasten.core.task."""
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
        raise ConfigurationError(f"{module}.{name} has no source of its own, so it cannot be written out")


def _names(gathered: _Gathered) -> dict[Symbol, str]:
    """Assigns each definition in the file a unique name: its own wherever that is free."""
    taken, names = set(dir(builtins)), {}
    defined = [(source.name, name) for source in gathered.sources.values() for name in source.defined()]
    for symbol in [*gathered.outside, *sorted(defined, key=lambda symbol: is_library(symbol[0]))]:
        module, name = symbol
        wish = gathered.outside.get(symbol, name)
        wishes = [
            wish,
            f"{module.rpartition('.')[2]}_{wish.lstrip('_')}",
            *(f"{wish}_{number}" for number in range(2, 99)),
        ]
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
    return sorted(lines) + [
        f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(members.items())
    ]
