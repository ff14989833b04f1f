"""Turns a program that imports modules into one file, by copying in the source of every name that it uses.

Only reachable definitions are copied, with their comments. If two definitions have the same name, one gets the name of
its module as a prefix. Modules for which ``inline`` returns False stay imports.
"""

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
InlinedScript = tuple[list[str], list[tuple[str, str]], str]  # of a program with its modules copied in


def inline_imports(main: str, inline: Callable[[str], bool], replacements: dict[Symbol, str]) -> InlinedScript:
    """Copies the source of everything that the module text ``main`` names into one file.

    ``inline`` decides by name whether a module is copied in; ``replacements`` holds source to use instead of that of
    some top-level definitions.

    Returns:
        The remaining import lines; (module, source) of each that was copied in, in an order of execution; and the
        source of the program itself.

    Raises:
        ConfigurationError: The source of a definition cannot be found.
    """
    collector = _Collector(inline, replacements)
    collector.read(MAIN, main)
    collector.finish_annotations()
    names = _assign_names(collector)
    texts = {name: source.render(names) for name, source in collector.sources.items()}
    main_text = texts.pop(MAIN)
    return _import_lines(collector, names), [(name, text) for name, text in texts.items() if text], main_text


@dataclass
class _Collector:
    """Finds all definitions that the program needs, by following names from module to module."""

    inline: Callable[[str], bool]
    replacements: dict[Symbol, str]
    sources: dict[str, ModuleSource] = field(default_factory=dict)
    imported: dict[Symbol, str] = field(default_factory=dict)  # names that stay imports -> their local name
    submodules: set[str] = field(default_factory=set)  # `a.b` of `import a.b`, where `a` is used
    annotations: list[tuple[ModuleSource, ast.AST, Symbol]] = field(default_factory=list)  # in hasten's modules
    # in scope at the uses of each symbol
    local_names: dict[Symbol, set[str]] = field(default_factory=lambda: defaultdict(set))

    def read(self, name: str, text: str) -> ModuleSource:
        """Parses the module ``name`` into ``sources``, after the modules that it imports, and marks the statements that
        are written without being named: all of main, and those with side effects of a user's file.
        """
        source = ModuleSource(name, text, self.inline)
        for dependency in source.inlined_dependencies():
            self.source(dependency)
        self.sources[name] = source  # after the modules it imports, so that a base class precedes its subclasses
        for index in source.side_effect_statements():
            self.want(source, index)
        return source

    def source(self, name: str) -> ModuleSource:
        """The parsed module called ``name``, read on the first call; ConfigurationError if it has no source."""
        if name in self.sources:
            return self.sources[name]
        try:
            text = inspect.getsource(importlib.import_module(name))
        except (OSError, TypeError):
            raise ConfigurationError(f"the source of {name} cannot be found, so it cannot be written out") from None
        new = {symbol[1]: text for symbol, text in self.replacements.items() if symbol[0] == name}
        return self.read(name, ModuleSource(name, text, self.inline).replaced(new) if new else text)

    def want(self, source: ModuleSource, index: int) -> None:
        """Marks top-level statement ``index`` of a module, and everything that it names, to be written."""
        if index in source.wanted:
            return
        source.wanted.add(index)
        for use in source.uses(index):
            local_name, node = use.name, use.node
            if use.name in source.definitions:
                symbol = (source.name, use.name)
            elif use.name in source.imports:
                symbol = self.resolve(source.imports[use.name])
                if use.attribute and not symbol[1] and self.inline(symbol[0]):  # module.function
                    symbol, node = self.resolve((symbol[0], use.attribute)), use.attribute_node
                    local_name = use.attribute
            else:
                continue  # a builtin
            if use.in_annotation and symbol[1] and self.inline(symbol[0]) and is_library(source.name):
                self.annotations.append((source, node, symbol))
                continue
            self.local_names[symbol] |= use.local_names
            source.references.append((node, symbol))
            if symbol[1] and (symbol[0] == MAIN or self.inline(symbol[0])):
                target = self.source(symbol[0])
                self.want(target, target.definitions[symbol[1]])
            else:
                self.imported.setdefault(symbol, local_name)
                self.submodules |= source.submodules.get(local_name, set())

    def finish_annotations(self) -> None:
        """Replaces type annotations by ``Any`` where the script does not contain the names that they use."""
        for source, node, symbol in self.annotations:
            target = self.sources.get(symbol[0])
            if target is None or target.definitions.get(symbol[1]) not in target.wanted:
                symbol = ANY
                self.imported[ANY] = "Any"
            source.references.append((node, symbol))

    def resolve(self, symbol: Symbol) -> Symbol:
        """(module, name) of a definition, through re-exports (``hasten.Task``); ConfigurationError without a source."""
        module, name = symbol
        if not name or not self.inline(module):
            return symbol
        value = getattr(importlib.import_module(module), name, None) or importlib.import_module(f"{module}.{name}")
        if isinstance(value, ModuleType):
            return value.__name__, ""
        if isinstance(value, (type, FunctionType)) and value.__module__ != module and self.inline(value.__module__):
            return value.__module__, name
        source = self.source(module)
        if name in source.definitions:
            return symbol
        if name in source.imports:
            return self.resolve(source.imports[name])
        raise ConfigurationError(f"{module}.{name} has no source of its own, so it cannot be written out")


def _assign_names(collector: _Collector) -> dict[Symbol, str]:
    """(module, name) of each definition and import -> its unique name in the file: its own if that is free, else with
    its module as a prefix or a number as a suffix.
    """
    taken, names = set(dir(builtins)), dict[Symbol, str]()
    defined = [(source.name, name) for source in collector.sources.values() for name in source.defined()]
    for symbol in [*collector.imported, *sorted(defined, key=lambda symbol: is_library(symbol[0]))]:
        module, name = symbol
        name = collector.imported.get(symbol, name)
        numbered = (f"{name}_{number}" for number in range(2, 99))
        candidates = [name, f"{module.rpartition('.')[2]}_{name.lstrip('_')}", *numbered]
        names[symbol] = next(n for n in candidates if n not in taken and n not in collector.local_names[symbol])
        taken.add(names[symbol])
    return names


def _import_lines(collector: _Collector, names: dict[Symbol, str]) -> list[str]:
    lines, members = {f"import {module}" for module in collector.submodules}, defaultdict[str, set[str]](set)
    for module, name in collector.imported:
        alias = names[module, name]
        if name:
            members[module].add(name if alias == name else f"{name} as {alias}")
        else:
            lines.add(f"import {module}" if alias == module else f"import {module} as {alias}")
    return sorted(lines) + [f"from {module} import {', '.join(sorted(m))}" for module, m in sorted(members.items())]
