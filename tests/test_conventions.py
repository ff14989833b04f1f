"""Conventions of the code base that no linter knows."""

import ast
import dataclasses
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import hasten
from hasten.core.run_context import ParallelContext, RunContext
from hasten.engine.registry import cards_that_state, default_methods, method_class, method_names, remedies

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "hasten"
OUTSIDE_METHODS = sorted(path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "methods"))
# names in torch, or plain English
ORDINARY_WORDS = {"batch_size", "bfloat16", "compile", "float16", "num_threads", "pipeline", "tf32", "zero"}
METHODS = sorted(path.stem for path in (PACKAGE / "methods").rglob("*.py") if not path.stem.startswith("_"))


def literals(tree: ast.AST) -> list[str]:
    """Returns the string constants of a module, without its docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node) is not None
    }
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in constants if id(node) not in docstrings]


def method_names_in(source: str) -> list[str]:
    """Returns the method names in a module's string constants; ordinary words such as ``zero`` count only with an
    option."""
    distinctive = "|".join(set(METHODS) - ORDINARY_WORDS)
    pattern = re.compile(rf"\b({distinctive})\b|\b({'|'.join(ORDINARY_WORDS)}):\w+=")
    return [match.group(0) for text in literals(ast.parse(source)) for match in pattern.finditer(text)]


def test_no_file_outside_methods_names_a_method():
    named = {path.name: method_names_in(path.read_text(encoding="utf-8")) for path in OUTSIDE_METHODS}
    assert not any(named.values()), (
        f"what other packages must know of a method is a field of its card: {dict(filter(all, named.items()))}"
    )


def test_scan_finds_method_names():
    assert method_names_in('HINT = "add gradient_clipping"\nother = f"--with zero:stage={3}"') == [
        "gradient_clipping",
        "zero:stage=",
    ]
    assert method_names_in('"""Like ddp."""\nfloat16 = "num_threads"') == []


@pytest.mark.parametrize("context", [RunContext, ParallelContext])
def test_a_context_has_at_most_14_fields(context):
    assert len(dataclasses.fields(context)) <= 14


@pytest.mark.parametrize(
    "field", ["default_for", "remedy_for", "strong_baseline", "trial_priority", "ceiling", "not_searched", "on_gpu"]
)
def test_cards_that_state_a_field_are_found_without_importing_all_methods(field):
    found = cards_that_state(field)
    states = {name for name in method_names() if ":" not in name and getattr(method_class(name).card, field)}
    assert states and states <= found.keys()


def test_there_is_one_default_strategy_and_a_remedy_for_each_problem():
    assert len(default_methods("distributed")) == 1 and default_methods("cuda") == []
    assert " or " in remedies("out_of_memory") and remedies("divergence") and ":" in remedies("unused_parameters")


def test_no_method_asks_whether_it_is_in_a_single_process():
    """The engine removes methods for several processes from a single one; only methods for one process may ask."""
    asking = [
        path.name
        for path in (PACKAGE / "methods").rglob("*.py")
        if "is_single_process" in path.read_text(encoding="utf-8")
    ]
    assert asking == []


def test_core_is_at_most_1100_lines():
    assert sum(len(path.read_text().splitlines()) for path in (PACKAGE / "core").glob("*.py")) <= 1100


def imports(path: Path, top_only: bool = False) -> list[str]:
    """Returns every module that a file imports, as ``package.module`` or ``package.module.name``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import {node.module} by its absolute name"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_workloads_import_public_names_only():
    public = {f"hasten.{name}" for name in hasten.__all__}
    for path in (PACKAGE / "workloads").glob("*.py"):
        for module in imports(path):
            ours = module.startswith("hasten.") and not module.startswith(("hasten.workloads.", "hasten.graph."))
            assert not ours or module in public, f"{path.name} imports {module}; a workload uses what any user can"


def test_methods_import_neither_the_engine_nor_another_method():
    allowed = ("hasten.core.", "hasten.distributed.", "hasten.graph.", "hasten.loading.", "hasten.utils.")
    allowed += ("hasten._torch_compat",)
    public = {f"hasten.{name}" for name, module in hasten._MODULES.items() if module.startswith("hasten.core.")}
    for path in (PACKAGE / "methods").rglob("*.py"):
        for module in imports(path):
            ours = module.startswith("hasten.") and module not in public
            assert not ours or module.startswith(allowed), f"{path.name} imports {module}"


CORE = [f"core/{path.name}" for path in (PACKAGE / "core").glob("*.py")]
CLI = [f"cli/{path.name}" for path in (PACKAGE / "cli").glob("*.py")]
HELP = ["__init__.py", "__main__.py", "utils/__init__.py", "utils/durations.py", *CORE, *CLI]


def test_nothing_heavy_is_imported_on_the_way_to_help():
    heavy = {"torch", "numpy", "rich", "PIL", "jinja2", "psutil", "cloudpickle", "tomli_w", "safetensors"}
    for where in HELP:
        for module in imports(PACKAGE / where, top_only=True):
            assert module.partition(".")[0] not in heavy, f"{where} imports {module} at its top"


BANNED = re.compile(r"kept|crew|climb|appetite|twins|whereabouts|unmade|in_vain|strangers|firsts|leads|alone")


def test_identifiers_use_the_terms_of_the_field():
    """The banned words have a standard term (``BANNED``)."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME and BANNED.search(token.string):
                found.append(f"{path.relative_to(PACKAGE)}:{token.start[0]} {token.string}")
    assert not found, "\n".join(found)


def test_class_names_are_unique():
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []
