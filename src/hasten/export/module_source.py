"""The source of one module: the names that it defines and imports, and those that each statement uses."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Symbol = tuple[str, str]  # (module, name); no name: the module itself
MAIN = ""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)


def is_library(module: str) -> bool:
    """Whether a module belongs to hasten itself; a workload is a task, as a user's file is."""
    return f"{module}.".startswith("hasten.") and not f"{module}.".startswith("hasten.workloads.")


@dataclass(frozen=True)
class Use:
    """One use of a module-level name in a statement."""

    name: str  # as written
    attribute: str | None  # after the dot
    node: ast.AST  # of the name
    attribute_node: ast.AST  # of the name and the attribute
    local_names: frozenset[str]  # in scope
    in_annotation: bool = False  # whether it is part of a type annotation


@dataclass
class ModuleSource:
    """The source of a module, and which of its statements are wanted."""

    name: str  # dotted; empty for the program itself
    text: str
    inline: Callable[[str], bool]  # (module name) -> whether a module is copied in
    wanted: set[int] = field(default_factory=set)  # indices of the top-level statements to write
    references: list[tuple[ast.AST, Symbol]] = field(default_factory=list)  # each name that they use

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def definitions(self) -> dict[str, int]:
        """Top-level name -> index of the statement that defines it."""
        return {name: index for index, statement in enumerate(self.tree.body) for name in defined_names(statement)}

    @cached_property
    def imports(self) -> dict[str, Symbol]:
        """Imported name -> symbol; imports of modules that are copied in count at any depth."""
        found: dict[str, Symbol] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, IMPORTS) and (node in self._top or self._is_inlined(node)):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = self._symbol_of(node, alias)
        return found

    @cached_property
    def submodules(self) -> dict[str, set[str]]:
        """Name bound by ``import a.b`` ("a") -> submodules imported with it ({"a.b"})."""
        found = defaultdict[str, set[str]](set)
        for node in self._top:
            for alias in node.names if isinstance(node, ast.Import) else ():
                if "." in alias.name and not alias.asname:
                    found[alias.name.partition(".")[0]].add(alias.name)
        return found

    def side_effect_statements(self) -> list[int]:
        """Indices of statements to write even if unreferenced: all of main; of a user's file all but definitions."""
        if is_library(self.name):
            return []
        skipped = IMPORTS if self.name == MAIN else (*IMPORTS, *DEFINITIONS)
        statements = enumerate(self.tree.body)
        return [i for i, node in statements if not isinstance(node, skipped) and not _is_boilerplate(node)]

    def inlined_dependencies(self) -> list[str]:
        """The modules to copy in that this one imports at its top level; submodules of packages first."""
        imports = [node for node in self.tree.body if isinstance(node, IMPORTS)]
        symbols = [self._symbol_of(node, alias) for node in imports for alias in node.names]
        symbols = [(module, name) for module, name in symbols if self.inline(module)]
        submodules = [f"{module}.{name}" for module, name in symbols if name and _is_package(module)]
        modules = [module for module, _ in symbols]
        return [m for m in [*submodules, *modules] if importlib.util.find_spec(m) and not _is_package(m)]

    def defined(self) -> list[str]:
        """The names that the statements in ``wanted`` define."""
        return [name for name, index in self.definitions.items() if index in self.wanted]

    def uses(self, index: int) -> Iterator[Use]:
        """Every use of a module-level name in a top-level statement."""
        return self._uses(self.tree.body[index], frozenset())

    def replaced(self, sources: dict[str, str]) -> str:
        """The module's text, with the definitions in ``sources`` (name -> source) replaced."""
        spans = {name: self._lines(self.tree.body[self.definitions[name]]) for name in sources}
        edits = [(*spans[name], text.strip("\n").encode() + b"\n") for name, text in sources.items()]
        return _edit(self.text.encode(), 0, edits).decode()

    def render(self, names: dict[Symbol, str]) -> str:
        """Source of the statements in ``wanted``, with each symbol renamed to its name in the script."""
        edits = [(*self._span(node), names[symbol].encode()) for node, symbol in self.references]
        for name in self.defined():
            if names[self.name, name] != name:
                edits.append((*self._name_span(name), names[self.name, name].encode()))
        for node in ast.walk(self.tree):
            if _is_card(node):
                edits.append((*self._lines(node), b""))
            elif isinstance(node, IMPORTS) and node not in self._top and self._is_inlined(node):
                edits.append((*self._span(node), b"pass"))
        raw, text, previous = self.text.encode(), "", None
        for statement in (self.tree.body[index] for index in sorted(self.wanted)):
            low, high = self._lines(statement)
            if previous is not None:
                text += "\n\n\n" if isinstance(previous, DEFINITIONS) or isinstance(statement, DEFINITIONS) else "\n"
            text += _edit(raw[low:high], low, [edit for edit in edits if low <= edit[0] < high]).decode().strip("\n")
            previous = statement
        return text

    @cached_property
    def _top(self) -> list[ast.Import | ast.ImportFrom]:
        """Top-level imports, with those under ``if TYPE_CHECKING`` and, in hasten's own modules, under ``try``."""
        nodes: list[ast.stmt] = []
        for statement in self.tree.body:
            is_block = _is_type_checking(statement) or (isinstance(statement, ast.Try) and is_library(self.name))
            nodes += getattr(statement, "body", []) if is_block else [statement]
        return [node for node in nodes if isinstance(node, IMPORTS)]

    @cached_property
    def _starts(self) -> list[int]:
        """Byte offset of the start of each line in the text."""
        starts = [0]
        for line in self.text.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def _symbol_of(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Symbol:
        if isinstance(node, ast.Import):
            return (alias.name if alias.asname else alias.name.partition(".")[0]), ""
        module = node.module or ""
        if node.level:
            module = importlib.util.resolve_name("." * node.level + module, self.name.rpartition(".")[0])
        return module, alias.name

    def _is_inlined(self, node: ast.Import | ast.ImportFrom) -> bool:
        return any(self.inline(self._symbol_of(node, alias)[0]) for alias in node.names)

    def _span(self, node: Any) -> tuple[int, int]:
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _lines(self, node: Any) -> tuple[int, int]:
        """(start, end) byte of a statement's lines, including decorators and the comment directly above."""
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        lines = self.text.split("\n")  # as ast counts lines: a form feed ends none
        while first > 1 and lines[first - 2].lstrip().startswith("#") and node in self.tree.body:
            first -= 1
        return self._starts[first - 1], self._starts[node.end_lineno]

    def _name_span(self, name: str) -> tuple[int, int]:
        node = self.tree.body[self.definitions[name]]
        if isinstance(node, DEFINITIONS):
            keywords = {ast.ClassDef: "class ", ast.FunctionDef: "def ", ast.AsyncFunctionDef: "async def "}
            low = self._span(node)[0] + len(keywords[type(node)])
            return low, low + len(name.encode())
        return next(self._span(n) for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name)

    def _uses(self, node: Any, local: frozenset[str], in_annotation: bool = False) -> Iterator[Use]:
        """Yields every use of a name under ``node`` that is not in ``local``."""
        if _is_card(node) or isinstance(node, IMPORTS):
            return
        annotation = getattr(node, "returns", None) or getattr(node, "annotation", None)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id not in local:
                yield Use(node.value.id, node.attr, node.value, node, local, in_annotation)
        elif isinstance(node, ast.Name):
            if node.id not in local and not isinstance(node.ctx, ast.Store):
                yield Use(node.id, None, node, node, local, in_annotation)
        elif isinstance(node, FUNCTIONS):
            body = node.body if isinstance(node.body, list) else [node.body]
            inside = local | self._locals(node.args, *body)
            for part in ast.iter_child_nodes(node):
                if part is node.args:
                    yield from self._uses_in_signature(node.args, local)
                else:
                    yield from self._uses(part, inside if part in body else local, in_annotation or part is annotation)
        else:
            if isinstance(node, COMPREHENSIONS):
                targets = [n for part in node.generators for n in ast.walk(part.target)]
                local = local | {n.id for n in targets if isinstance(n, ast.Name)}
            for part in ast.iter_child_nodes(node):
                yield from self._uses(part, local, in_annotation or part is annotation)

    def _uses_in_signature(self, arguments: ast.arguments, local: frozenset[str]) -> Iterator[Use]:
        for part in ast.walk(arguments):
            if isinstance(part, ast.arg) and part.annotation is not None:
                yield from self._uses(part.annotation, local, in_annotation=True)
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                yield from self._uses(default, local)

    def _locals(self, *parts: ast.AST) -> frozenset[str]:
        """The names that are local in a function: parameters and what its body assigns."""
        found, global_names, waiting = set[str](), set[str](), list(parts)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, IMPORTS) and not self._is_inlined(node):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found.add(node.name)
            elif isinstance(node, ast.Global):
                global_names |= set(node.names)
            if isinstance(node, DEFINITIONS):
                found.add(node.name)
            elif not isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
                waiting += ast.iter_child_nodes(node)
        return frozenset(found - global_names)


def defined_names(statement: ast.AST) -> list[str]:
    """The names that a top-level statement defines, except by imports."""
    if isinstance(statement, DEFINITIONS):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    nodes = [node for target in targets for node in ast.walk(target)]
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _is_boilerplate(statement: ast.AST) -> bool:
    """Whether a statement is a docstring, ``__all__``, or under ``TYPE_CHECKING`` or ``if __name__ == "__main__"``."""
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    is_main = isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)
    return is_docstring or is_main or _is_type_checking(statement) or "__all__" in defined_names(statement)


def _is_type_checking(statement: ast.AST) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test)


def _is_card(node: ast.AST) -> bool:
    """Whether a statement is ``card = Card(...)`` or an annotation of it, which the script does not need."""
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target) == "card"
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return False
    is_card = ast.unparse(node.value.func).split(".")[-1] == "Card"
    return is_card and [ast.unparse(target) for target in node.targets] == ["card"]


def _is_package(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.submodule_search_locations is not None


def _edit(raw: bytes, offset: int, edits: list[tuple[int, int, bytes]]) -> bytes:
    """``raw`` after edits (start, end, new bytes) that do not overlap; positions count from ``offset`` before it."""
    for low, high, text in sorted(set(edits), reverse=True):
        raw = raw[: low - offset] + text + raw[high - offset :]
    return raw
