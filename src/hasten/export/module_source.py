"""The source of one module: which names it defines and imports, and which names each statement uses."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

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
    """One use of a module-level name in a statement.

    Attributes:
        name: the name as written.
        attribute: the attribute after the dot, or None.
        whole: the node of the name.
        with_attribute: the node of the name and the attribute.
        bound: local names in scope.
        in_annotation: whether it is part of a type annotation.
    """

    name: str
    attribute: str | None
    whole: ast.AST
    with_attribute: ast.AST
    bound: frozenset[str]
    in_annotation: bool = False


@dataclass
class ModuleSource:
    """A module. ``wanted``: indices of the top-level statements to write. ``places``: (node, symbol) of each name they use."""

    name: str
    text: str
    inline: Callable[[str], bool]
    wanted: set[int] = field(default_factory=set)
    places: list[tuple[ast.AST, Symbol]] = field(default_factory=list)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def definitions(self) -> dict[str, int]:
        """Each top-level name with the index of the statement that defines it."""
        return {name: index for index, statement in enumerate(self.tree.body) for name in _made_by(statement)}

    @cached_property
    def imports(self) -> dict[str, Symbol]:
        """The symbol of each imported name; an import of a module that is copied in counts at any depth."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, IMPORTS) and (node in self._top or self._copied_in(node)):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = self._stands_for(node, alias)
        return found

    @cached_property
    def dotted(self) -> dict[str, set[str]]:
        """``import a.b`` binds ``a`` and loads ``a.b``: name -> modules to be loaded as well."""
        found = defaultdict(set)
        for node in self._top:
            for alias in node.names if isinstance(node, ast.Import) else ():
                if "." in alias.name and not alias.asname:
                    found[alias.name.partition(".")[0]].add(alias.name)
        return found

    def side_effect_statements(self) -> list[int]:
        """Statements that are kept although no name refers to them: all of main; in a user's file those that define nothing."""
        if is_library(self.name):
            return []
        kept = enumerate(self.tree.body)
        return [
            index
            for index, node in kept
            if not isinstance(node, IMPORTS)
            and not _is_idle(node)
            and (self.name == MAIN or not isinstance(node, DEFINITIONS))
        ]

    def needed_to_load(self) -> list[str]:
        """The modules to copy in that this one imports at its top level."""
        named = [
            self._stands_for(node, alias)
            for node in self.tree.body
            if isinstance(node, IMPORTS)
            for alias in node.names
        ]
        modules = [
            f"{module}.{name}" if name and importlib.util.find_spec(f"{module}.{name}") else module
            for module, name in named
            if self.inline(module) and _is_package(module)
        ]
        modules += [module for module, _ in named if self.inline(module) and not _is_package(module)]
        return [module for module in modules if not _is_package(module)]

    def defined(self) -> list[str]:
        """The names that the wanted statements define."""
        return [name for name, index in self.definitions.items() if index in self.wanted]

    def uses(self, index: int) -> Iterator[Use]:
        return self._uses(self.tree.body[index], frozenset())

    def replaced(self, other: dict[str, str]) -> str:
        """Returns the text with the source of some definitions replaced."""
        edits = []
        for name, text in other.items():
            edits.append((*self._lines(self.tree.body[self.definitions[name]]), text.strip("\n").encode() + b"\n"))
        return _edited(self.text.encode(), 0, edits).decode()

    def render(self, names: dict[Symbol, str]) -> str:
        """Returns the wanted statements with every name replaced by its name in the script."""
        edits = [(*self._span(node), names[symbol].encode()) for node, symbol in self.places]
        for name in self.defined():
            if names[self.name, name] != name:
                edits.append((*self._place_of_definition(name), names[self.name, name].encode()))
        for node in ast.walk(self.tree):
            if _is_card(node):
                edits.append((*self._lines(node), b""))
            elif isinstance(node, IMPORTS) and node not in self._top and self._copied_in(node):
                edits.append((*self._span(node), b"pass"))
        pieces, raw, before = [], self.text.encode(), None
        for index in sorted(self.wanted):
            low, high = self._lines(self.tree.body[index])
            piece = _edited(raw[low:high], low, [edit for edit in edits if low <= edit[0] < high]).decode().strip("\n")
            close = (
                before is not None
                and not isinstance(before, DEFINITIONS)
                and not isinstance(self.tree.body[index], DEFINITIONS)
            )
            pieces.append(("" if before is None else "\n" if close else "\n\n\n") + piece)
            before = self.tree.body[index]
        return "".join(pieces)

    @cached_property
    def _top(self) -> list[ast.AST]:
        """Top-level imports, with those under ``if TYPE_CHECKING`` and, in hasten's own modules, under ``try``."""

        def has_imports(statement: ast.stmt) -> bool:
            return _is_type_checking(statement) or (isinstance(statement, ast.Try) and is_library(self.name))

        inner = [
            node for statement in self.tree.body for node in (statement.body if has_imports(statement) else [statement])
        ]
        return [node for node in inner if isinstance(node, IMPORTS)]

    @cached_property
    def _starts(self) -> list[int]:
        """The byte offset of each line."""
        starts = [0]
        for line in self.text.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def _stands_for(self, node, alias: ast.alias) -> Symbol:
        if isinstance(node, ast.Import):
            return (alias.name if alias.asname else alias.name.partition(".")[0]), ""
        module = node.module or ""
        if node.level:
            module = importlib.util.resolve_name("." * node.level + module, self.name.rpartition(".")[0])
        return module, alias.name

    def _copied_in(self, node) -> bool:
        return any(self.inline(self._stands_for(node, alias)[0]) for alias in node.names)

    def _span(self, node) -> tuple[int, int]:
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _lines(self, node) -> tuple[int, int]:
        """The byte range of a statement's lines, with its decorators and the comment directly above it."""
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        lines = self.text.splitlines()
        while first > 1 and lines[first - 2].lstrip().startswith("#") and node in self.tree.body:
            first -= 1
        return self._starts[first - 1], self._starts[node.end_lineno]

    def _place_of_definition(self, name: str) -> tuple[int, int]:
        node = self.tree.body[self.definitions[name]]
        if isinstance(node, DEFINITIONS):
            keyword = {"ClassDef": "class ", "FunctionDef": "def ", "AsyncFunctionDef": "async def "}[
                type(node).__name__
            ]
            low = self._span(node)[0] + len(keyword)
            return low, low + len(name.encode())
        return next(self._span(each) for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == name)

    def _uses(self, node: ast.AST, bound: frozenset[str], in_annotation: bool = False) -> Iterator[Use]:
        """Yields every use of a non-local name under ``node``."""
        if _is_card(node) or isinstance(node, IMPORTS):
            return
        annotation = getattr(node, "returns", None) or getattr(node, "annotation", None)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id not in bound:
                yield Use(node.value.id, node.attr, node.value, node, bound, in_annotation)
        elif isinstance(node, ast.Name):
            if node.id not in bound and not isinstance(node.ctx, ast.Store):
                yield Use(node.id, None, node, node, bound, in_annotation)
        elif isinstance(node, FUNCTIONS):
            body = node.body if isinstance(node.body, list) else [node.body]
            inside = bound | self._locals(node.args, *body)
            for part in ast.iter_child_nodes(node):
                yield from (
                    self._annotations_and_defaults(part, bound)
                    if part is node.args
                    else self._uses(part, inside if part in body else bound, in_annotation or part is annotation)
                )
        elif isinstance(node, COMPREHENSIONS):
            inside = bound | {
                each.id for part in node.generators for each in ast.walk(part.target) if isinstance(each, ast.Name)
            }
            for part in ast.iter_child_nodes(node):
                yield from self._uses(part, inside)
        else:
            for part in ast.iter_child_nodes(node):
                yield from self._uses(part, bound, in_annotation or part is annotation)

    def _annotations_and_defaults(self, arguments: ast.arguments, bound) -> Iterator[Use]:
        for part in ast.walk(arguments):
            for inner in [getattr(part, "annotation", None)] if isinstance(part, ast.arg) else []:
                if inner is not None:
                    yield from self._uses(inner, bound, in_annotation=True)
        for default in [*arguments.defaults, *(each for each in arguments.kw_defaults if each)]:
            yield from self._uses(default, bound)

    def _locals(self, *parts: ast.AST) -> frozenset[str]:
        """The local names of a function."""
        found, of_module, waiting = set(), set(), list(parts)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, IMPORTS) and not self._copied_in(node):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found.add(node.name)
            elif isinstance(node, ast.Global):
                of_module |= set(node.names)
            if isinstance(node, DEFINITIONS):
                found.add(node.name)
            elif not isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
                waiting += ast.iter_child_nodes(node)
        return frozenset(found - of_module)


def _made_by(statement: ast.AST) -> list[str]:
    if isinstance(statement, DEFINITIONS):
        return [statement.name]
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [statement.target]
        if isinstance(statement, ast.AnnAssign)
        else []
    )
    return [
        each.id
        for target in targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]


def _is_idle(statement: ast.AST) -> bool:
    """Whether a statement is a docstring, ``__all__`` or ``if __name__ == "__main__"``, which do not belong in the script."""
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return (
        text
        or "__all__" in _made_by(statement)
        or _is_type_checking(statement)
        or (isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test))
    )


def _is_type_checking(statement: ast.AST) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test)


def _is_card(node: ast.AST) -> bool:
    """Whether a statement is ``card = Card(...)``: the script has no use for the card of a method."""
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == "card"
    called = (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).split(".")[-1] == "Card"
    )
    return called and [ast.unparse(target) for target in node.targets] == ["card"]


def _is_package(module: str) -> bool:
    import sys

    found = sys.modules.get(module)
    return (
        hasattr(found, "__path__") if found else importlib.util.find_spec(module).submodule_search_locations is not None
    )


def _edited(raw: bytes, offset: int, edits) -> bytes:
    for low, high, text in sorted(set(edits), reverse=True):
        raw = raw[: low - offset] + text + raw[high - offset :]
    return raw
