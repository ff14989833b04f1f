"""A Python file of the user's, and edits that change its text where they must, so that its formatting stays."""

import ast
import codecs
import copy
import difflib
import io
import itertools
import re
import tokenize
from pathlib import Path
from typing import Any

CALLEES = {"loader": ("DataLoader",), "dataset": ("DataLoader",)}  # beside the class that the site map names
LINE_LENGTH = 100  # a call on one line stays on one line up to this length
ATTACH = {"hasten.attach", "attach"}  # functions whose first argument is the model
# A function that calls one of these trains; it must not run without gradients.
GRADIENTS = {"backward", "grad", "step", "zero_grad", "manual_backward", "scaler", "loss_scaler", "grad_scaler"}

IMPORT = (ast.Import, ast.ImportFrom)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)  # statements that may call a model


NO_TORCH = "the file does not import torch at its top"


class CannotEditError(Exception):
    """Why an edit cannot be made at a site."""


class SourceFile:
    """A source file and the edits to its text. Positions are offsets into its UTF-8 bytes, as those of ``ast``."""

    def __init__(self, name: str, content: bytes, tree: ast.Module) -> None:
        self.name, self.content, self.tree = name, content, tree
        self.insertions: dict[int, list[str]] = {}  # offset -> texts, in the order of the methods
        self.replacements: dict[tuple[int, int], str] = {}
        self.lines = [0]  # offset of each line
        for line in content.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.lines[0] = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0  # ``ast`` does not count it
        self.newline = "\r\n" if b"\r\n" in content else "\n"

    @staticmethod
    def read(directory: Path, name: str) -> "SourceFile | str":
        """The file, or why it cannot be edited."""
        path = (directory / name).resolve()
        if not path.is_relative_to(directory.resolve()):
            return f"lies outside of {directory}"
        if "site-packages" in path.parts:
            return "belongs to an installed package"
        try:
            content, relative = path.read_bytes(), path.relative_to(directory.resolve())
            return SourceFile(relative.as_posix(), content, ast.parse(content.decode("utf-8-sig")))
        except UnicodeDecodeError:
            return "is not UTF-8 text"
        except (OSError, SyntaxError, ValueError) as error:
            return f"cannot be read as Python ({type(error).__name__})"

    def edit(self, kind: str, line: int, name: str, text: str) -> None:
        """Adds the edit ``text`` for a site at ``line``, of a kind of ``write_patch``; ``edited`` applies all edits.

        ``name``: class of the object there, or for a "step" the model's name. Raises CannotEditError if the edit is
        impossible; earlier edits stay.
        """
        before = copy.deepcopy((self.insertions, self.replacements))
        try:
            if kind == "process":
                self._insert_for_process(text)
            elif kind == "evaluation":
                self._wrap_evaluation(line, text)
            elif kind == "model":
                self._insert_after_assignment(line, text)
            elif kind == "step":
                self._insert_before_step(line, name, text)
            elif kind == "dataset":
                self._wrap_dataset(self._calls(line, (name, *CALLEES[kind])), text)
            elif kind.startswith("argument "):
                self._replace_keyword(self._calls(line, (name,)), text)
            else:
                for call in self._calls(line, (name, *CALLEES.get(kind, ()))):
                    self._add_keywords(call, text)
            ast.parse(self.edited())
        except (CannotEditError, SyntaxError) as error:
            self.insertions, self.replacements = before
            raise CannotEditError(str(error)) from None

    def edited(self) -> bytes:
        """The content after all edits."""
        changes = [(start, start, "".join(texts)) for start, texts in self.insertions.items()]
        changes += [(start, end, text) for (start, end), text in self.replacements.items()]
        content = self.content
        for start, end, text in sorted(changes, reverse=True):
            content = content[:start] + text.replace("\n", self.newline).encode() + content[end:]
        return content

    def diff(self) -> str:
        """The unified diff; empty without edits."""
        old, new = (text.decode("utf-8").split("\n") for text in (self.content, self.edited()))
        lines = [*difflib.unified_diff(_ended(old), _ended(new), f"a/{self.name}", f"b/{self.name}")]
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def _offset(self, line: int, column: int) -> int:
        return self.lines[line - 1] + column

    def _span(self, node: Any) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: Any) -> str:
        start, end = self._span(node)
        return self.content[start:end].decode("utf-8")

    def _nodes(self, kind: Any, line: int | None = None) -> list[Any]:
        """The nodes of the types ``kind`` in the file; with ``line``, only those whose lines include it."""
        found: list[Any] = [node for node in ast.walk(self.tree) if isinstance(node, kind)]
        return [node for node in found if line is None or node.lineno <= line <= _end(node)]

    def _calls(self, line: int, names: tuple[str, ...]) -> list[ast.Call]:
        """The calls of ``names`` that begin at a line, else those around it; without any, the only call that begins
        there. CannotEditError if there is none, or it is not the only one.
        """
        around: list[ast.Call] = self._nodes(ast.Call, line)
        named = [call for call in around if _callee(call) and _callee(call) in names]
        starting = [call for call in around if call.lineno == line]
        if chosen := [call for call in named if call.lineno == line] or named:
            return chosen
        if len(starting) == 1:
            return starting
        raise CannotEditError("the call is not the only one on the line" if around else "there is no call")

    def _add_keywords(self, call: ast.Call, text: str) -> None:
        """Sets the keyword arguments in ``text``: replaces the value of one that the call has, adds the others."""
        wanted = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(wanted, ast.Call), "the edit of a call is a list of keyword arguments"
        present = {keyword.arg: keyword for keyword in call.keywords}
        if None in present:
            raise CannotEditError("the call has ** arguments, which may hold the same keyword")
        added: list[str] = []
        for keyword in wanted.keywords:
            value = ast.unparse(keyword.value)
            if old := present.get(keyword.arg):
                self.replacements[self._span(old.value)] = value
            else:
                added.append(f"{keyword.arg}={value}")
        if {"fused", "foreach"} <= {keyword.arg for keyword in wanted.keywords} | present.keys():
            raise CannotEditError("the call passes foreach=, which excludes fused=")
        if added:
            self._append_arguments(call, ", ".join(added))

    def _wrap_dataset(self, calls: list[ast.Call], text: str) -> None:
        """Passes the dataset of each loader through the class that ``text`` defines, with its ``collate``."""
        wrapper = text.partition("class ")[2].partition("(")[0]
        for call in calls:
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            dataset = call.args[0] if call.args else keywords.get("dataset")
            if dataset is None or isinstance(dataset, ast.Starred):
                raise CannotEditError("the call does not show the dataset")
            if "collate_fn" in keywords:
                raise CannotEditError("the call passes a collate_fn")
            self.replacements[self._span(dataset)] = f"{wrapper}({self._text(dataset)})"
            self._add_keywords(call, f"collate_fn={wrapper}.collate")
        self._ensure_torch()
        self._insert_after(self._torch_import(), f"\n\n{text}")

    def _replace_keyword(self, calls: list[ast.Call], text: str) -> None:
        """Sets an argument of the one call that passes it by its name."""
        name = text.partition("=")[0]
        passing = [call for call in calls if any(keyword.arg == name for keyword in call.keywords)]
        if len(passing) != 1:
            raise CannotEditError(f"no call passes {name} by its name")
        self._add_keywords(passing[0], text)

    def _append_arguments(self, call: ast.Call, text: str) -> None:
        """Adds arguments after the last one of a call: on its line, or on a line of their own if it has one."""
        last, closing = self._end_of_arguments(call)
        end = self._offset(*last.end)
        if last.string == "(":
            return self._insert(end, text)
        comma = last.string == ","
        line = self._line(last.end[0])
        fits = len(line.rstrip()) + len(text) + 2 <= LINE_LENGTH
        if closing.start[0] == last.end[0] and (call.lineno == last.end[0] or fits):
            return self._insert(end, f" {text}" if comma else f", {text}")
        if closing.start[0] == last.end[0]:
            return self._insert(end, ("" if comma else ",") + "\n" + _indent(line) + text)
        after_comment = self.lines[last.end[0]]  # the last argument has its line, maybe with a comment
        if not comma:
            self._insert(end, ",")
        return self._insert(after_comment, f"{_indent(line)}{text}{',' * comma}\n")

    def _end_of_arguments(self, call: ast.Call) -> tuple[tokenize.TokenInfo, tokenize.TokenInfo]:
        """The last token before the closing parenthesis of a call, and that parenthesis; columns are in bytes."""
        skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.ENCODING)
        text = re.sub(rb"[\x80-\xff]", b"x", self.content[self.lines[0] :])  # one column a byte, as in the tree
        tokens = [one for one in tokenize.tokenize(io.BytesIO(text).readline) if one.type not in skipped]
        ends, end = [token.end for token in tokens], (call.end_lineno or 0, call.end_col_offset or 0)
        if end not in ends:  # within an f-string of Python 3.11, which is one token
            raise CannotEditError("the end of the call was not found")
        index = ends.index(end)
        return tokens[index - 1], tokens[index]

    def line_of_assignment(self, line: int) -> int:
        """The line that last assigns the name which is called at a line, such as ``model``, or is attached there; 0 if
        that is not clear.
        """
        here = self._nodes(ast.Call, line)
        called = {self._text(call.func) for call in here}
        called |= {self._text(call.args[0]) for call in here if called & ATTACH and call.args}
        made = [node for node in self._assigned_calls() if any(self._text(one) in called for one in node.targets)]
        names = {self._text(target) for node in made for target in node.targets}
        functions = {id(self._function_of(node)) for node in made}
        return max((node.lineno for node in made), default=0) if len(names) == len(functions) == 1 else 0

    def _assigned_calls(self) -> list[ast.Assign]:
        """The statements that assign the result of a call, such as a new model."""
        return [node for node in self._nodes(ast.Assign) if isinstance(node.value, ast.Call)]

    def name_of_model(self, line: int, step: int) -> str:
        """See ``patch.name_of_model``."""
        here, updates = self._nodes(ast.Call, line), self._nodes(ast.Call, step)
        functions = {id(self._function_of(call)) for call in (*here, *updates)}
        assigned = {self._text(target) for node in self._assigned_calls() for target in node.targets}
        names = {self._text(call.func) for call in here} & assigned
        return names.pop() if updates and len(names) == len(functions) == 1 else ""

    def _insert_before_step(self, line: int, model: str, text: str) -> None:
        """Inserts a statement about the gradients of the model before the update at a line."""
        statements = [node for node in self._nodes(ast.Expr, line) if node.lineno == line]
        calls = [node.value for node in statements if isinstance(node.value, ast.Call)]
        if len(calls) != 1 or _callee(calls[0]) != "step" or calls[0].args or calls[0].keywords:
            raise CannotEditError("the optimizer is not updated by a call of its step() without arguments")
        if not model:
            raise CannotEditError("it is not clear what the model is called there")
        before = self._line(line)
        if before[: statements[0].col_offset].strip():
            raise CannotEditError("another statement is on the same line")
        self._ensure_torch()
        self._insert(self.lines[line - 1], f"{_indent(before)}{text.replace('{model}', model)}\n")

    def _function_of(self, node: ast.AST) -> ast.AST:
        """The innermost function that contains a node, or the module."""
        around = [one for one in self._nodes(FUNCTION) if node in ast.walk(one)]
        return around[-1] if around else self.tree

    def _insert_after_assignment(self, line: int, text: str) -> None:
        """Inserts a statement about the model after the statement that assigns it."""
        if not line:
            raise CannotEditError("it is not clear where the model is made")
        assignments = self._nodes((ast.Assign, ast.AnnAssign), line)
        around = [node for node in assignments if isinstance(node.value, ast.Call)]
        targets = [target for node in around for target in getattr(node, "targets", [getattr(node, "target", None)])]
        if len(targets) != 1 or not isinstance(targets[0], (ast.Name, ast.Attribute)):
            raise CannotEditError("the model is not assigned to one name where it is made")
        statement = around[0]
        text = text.replace("{model}", self._text(targets[0]))
        if "torch." in text:
            self._ensure_torch()
        self._insert_after(statement, text)

    def _insert_after(self, statement: ast.stmt, text: str) -> None:
        """Inserts lines with the indentation of the statement after it, which must be alone on its lines."""
        first, last = self._line(statement.lineno), self._line(statement.end_lineno or statement.lineno)
        rest = last.encode()[statement.end_col_offset or 0 :].decode().strip()
        if first[: statement.col_offset].strip() or (rest and not rest.startswith("#")):
            raise CannotEditError("another statement is on the same line")
        indent = _indent(first)
        end = self.lines[statement.end_lineno or statement.lineno]
        missing = "" if last.endswith("\n") else "\n"
        self._insert(end, missing + "".join(f"{indent}{line}\n" for line in text.split("\n")))

    def _insert_for_process(self, text: str) -> None:
        """Inserts lines after the top-level imports that begin with torch's; in a file without it, before the first
        statement but docstring and ``__future__``, since an import may start the training. If ``text`` is one call, it
        also replaces the file's own calls of that function.
        """
        for call in self._same_calls(text):
            self.replacements[self._span(call)] = text
        if self._torch_imports():
            self._ensure_torch()
            return self._insert_after(self._torch_import(), text)
        first = next((one for one in self.tree.body if not _comes_first(one)), None)
        if first is None:
            raise CannotEditError("the file holds no statement" if self.tree.body else NO_TORCH)
        offset = self.lines[min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))]) - 1]
        if "torch." in text:
            self._insert(offset, "import torch\n")
        self._insert(offset, f"{text}\n")

    def _same_calls(self, text: str) -> list[ast.Call]:
        """The calls in the file of the one function that ``text`` calls; none if it is more than such a call."""
        body = ast.parse(text).body
        wanted = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
        if not isinstance(wanted, ast.Call):
            return []
        return [call for call in self._nodes(ast.Call) if ast.unparse(call.func) == ast.unparse(wanted.func)]

    def _torch_imports(self) -> list[ast.stmt]:
        """The import statements at the top of the file, from the first of torch on."""
        for number, statement in enumerate(self.tree.body):
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) and not statement.level else []
            if any(name.partition(".")[0] == "torch" for name in names):
                return [*itertools.takewhile(lambda one: isinstance(one, IMPORT), self.tree.body[number:])]
        return []

    def _torch_import(self) -> ast.stmt:
        """The last statement of ``_torch_imports``; CannotEditError if there is none."""
        if imports := self._torch_imports():
            return imports[-1]
        raise CannotEditError(NO_TORCH)

    def _ensure_torch(self) -> None:
        """Inserts ``import torch`` unless the file binds that name at its top."""
        imports = [alias for node in self.tree.body if isinstance(node, ast.Import) for alias in node.names]
        if not any(alias.name.partition(".")[0] == "torch" and alias.asname is None for alias in imports):
            self._insert_after(self._torch_import(), "import torch")

    def _wrap_evaluation(self, line: int, text: str) -> None:
        """Decorates the function of the evaluation at a line by ``@text``, or puts its loop under ``with text:``, or a
        statement that follows ``model.eval()``.

        CannotEditError if there is none of these, or if each computes gradients.
        """
        self._ensure_torch()
        functions = self._nodes(ast.FunctionDef, line)
        taking_gradients = _functions_with_gradients(self.tree)
        yields = functions and any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in ast.walk(functions[-1]))
        if functions and not _takes_gradients(functions[-1], taking_gradients) and not yields:
            first = min([functions[-1].lineno, *(decorator.lineno for decorator in functions[-1].decorator_list)])
            indent = _indent(self._line(first))
            return self._insert(self.lines[first - 1], f"{indent}@{text}\n")
        loops = self._nodes((ast.For, ast.While), line)
        if loops and not _takes_gradients(loops[-1], taking_gradients):
            return self._indent_block(loops[-1], text)
        statement = self._statement_after_eval(line, taking_gradients)
        if statement is None:
            raise CannotEditError("the evaluation is no function and no loop of its own")
        return self._indent_block(statement, text)

    def _statement_after_eval(self, line: int, taking_gradients: set[str]) -> ast.stmt | None:
        """The statement at a line that calls a model after ``eval()`` of it in the same block; None if there is none.

        Also None if it is not alone on its lines, or if it or one up to the next ``train()`` takes gradients.
        """
        for block in (block for node in ast.walk(self.tree) for block in _blocks(node)):
            here = [n for n, one in enumerate(block) if isinstance(one, SIMPLE) and one.lineno <= line <= _end(one)]
            if not here:
                continue
            statement, before, after = block[here[0]], block[: here[0]], block[here[0] + 1 :]
            rest = self._line(_end(statement)).encode()[statement.end_col_offset or 0 :].strip()
            has_own_lines = not self._line(statement.lineno)[: statement.col_offset].strip() and not rest.startswith(
                b";"
            )
            called = {ast.unparse(call.func) for call in ast.walk(statement) if isinstance(call, ast.Call)}
            modes = [mode for mode in map(_mode_call, before) if mode and mode[0] in called]
            until_train = itertools.takewhile(lambda one: (_mode_call(one) or ("", ""))[1] != "train", after)
            takes = any(_takes_gradients(one, taking_gradients) for one in (statement, *until_train))
            return statement if has_own_lines and not takes and modes and modes[-1][1] == "eval" else None
        return None

    def _indent_block(self, block: ast.stmt, text: str) -> None:
        """Indents a statement under ``with text:``; CannotEditError if it yields or holds a string of several lines."""
        if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(block)):
            raise CannotEditError("the evaluation yields inside, where its consumer may train")
        last = block.end_lineno or block.lineno
        strings = [node for node in ast.walk(block) if isinstance(node, (ast.Constant, ast.JoinedStr))]
        if any(node.lineno != _end(node) for node in strings):
            raise CannotEditError("the evaluation holds a string of several lines, which must not be indented")
        indent = _indent(self._line(block.lineno))
        if any(text in inserted for inserted in self.insertions.get(self.lines[block.lineno - 1], [])):
            return  # two evaluations in one statement
        self._insert(self.lines[block.lineno - 1], f"{indent}with {text}:\n")
        for number in range(block.lineno, last + 1):
            if self._line(number).strip():
                self._insert(self.lines[number - 1], "    ")

    def _line(self, number: int) -> str:
        return self.content[self.lines[number - 1] : self.lines[number]].decode("utf-8")

    def _insert(self, offset: int, text: str) -> None:
        if text not in self.insertions.setdefault(offset, []) or not text.strip():
            self.insertions[offset].append(text)


def _ended(lines: list[str]) -> list[str]:
    """Lines with their newlines; the last has one only if an empty text follows it."""
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _end(node: ast.AST) -> int:
    return getattr(node, "end_lineno", None) or 0


def _callee(call: ast.Call) -> str:
    """The last part of the name that is called: DataLoader of ``torch.utils.data.DataLoader(...)``."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _functions_with_gradients(tree: ast.Module) -> set[str]:
    """Names of the functions of a file that compute gradients, or call one that does."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found: set[str] = set()
    while more := {function.name for function in functions if _takes_gradients(function, found)} - found:
        found |= more
    return found


def _takes_gradients(node: ast.AST, functions: set[str]) -> bool:
    """Whether code calls one of GRADIENTS, or one of ``functions`` by plain name or as ``self.f()``; so
    ``model.train()`` does not count where the file has its own ``train``.
    """
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        owner = getattr(call.func, "value", None)
        is_own = owner is None or getattr(owner, "id", "") == "self"
        if _callee(call) in GRADIENTS or (is_own and _callee(call) in functions):
            return True
    return False


def _mode_call(statement: ast.stmt) -> tuple[str, str] | None:
    """(model, "eval" or "train") of the statement ``model.eval()`` or ``model.train()``; None for any other."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("eval", "train"):
        return ast.unparse(call.func.value), call.func.attr
    return None


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements that a node holds."""
    fields = (value for _, value in ast.iter_fields(node) if isinstance(value, list))
    return [value for value in fields if value and isinstance(value[0], ast.stmt)]


def _comes_first(statement: ast.stmt) -> bool:
    """Whether a statement has to stay at the top of its file: a docstring, or an import from __future__."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")
