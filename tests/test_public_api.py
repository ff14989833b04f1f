"""The public names of hasten: what type checkers see is what is imported at run time."""

import ast
import sys
from pathlib import Path

import pytest

import hasten
import hasten.data


def typed_imports(package) -> dict[str, str]:
    """Name and module of each import under ``if TYPE_CHECKING``."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    assert all(alias.asname == alias.name for node in block.body for alias in node.names), "a public name has `as`"
    return {alias.name: node.module for node in block.body for alias in node.names}


@pytest.mark.parametrize("package", [hasten, hasten.data])
def test_type_checkers_see_the_modules_that_are_imported_at_run_time(package):
    assert typed_imports(package) == package._MODULES


@pytest.mark.parametrize(("package", "others"), [(hasten, ["__version__"]), (hasten.data, [])])
def test_all_lists_the_public_names(package, others):
    assert dir(package) == package.__all__ == sorted([*package._MODULES, *others])


@pytest.mark.parametrize("name", hasten._MODULES)
def test_public_name_is_defined_in_its_module_and_documented(name):
    value = getattr(hasten, name)
    if hasten._MODULES[name] == "hasten.core.types":  # an alias of a type has neither
        assert name in vars(sys.modules["hasten.core.types"])
        return
    assert value.__module__ == hasten._MODULES[name], "name the module that defines it, so that editors jump there"
    assert value.__doc__


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'hasten' has no attribute 'trian'"):
        hasten.trian  # noqa: B018


def test_star_import_gives_every_public_name():
    names = {}
    exec("from hasten import *", names)
    assert names.keys() - {"__builtins__"} == set(hasten.__all__)
