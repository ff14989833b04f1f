"""Conventions of the package: line budgets, a fast import, a README in each package, one method per file."""

import ast
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
HASTEN = TESTS.parent / "src" / "hasten"
BUDGETS = {"engine/loop.py": 125, "engine/plan.py": 275}  # at 120 columns
PACKAGES = sorted(path.name for path in HASTEN.iterdir() if (path / "__init__.py").exists())
METHODS = sorted(path for path in (HASTEN / "methods").rglob("*.py") if not path.name.startswith("_"))


@pytest.mark.parametrize(("file", "budget"), BUDGETS.items())
def test_line_budget(file, budget):
    lines = len((HASTEN / file).read_text(encoding="utf-8").splitlines())
    assert lines <= budget, f"{file} has {lines} lines; move something out rather than raise its budget of {budget}"


def modules_of(package: str) -> list[Path]:
    """The modules that the README of a package must name; methods and workloads have tables of their own."""
    if package in ("methods", "workloads"):
        return []
    files = (HASTEN / package).glob("*.py") if package == "data" else (HASTEN / package).rglob("*.py")
    return sorted(path for path in files if not path.name.startswith("__"))


def test_every_package_has_a_readme():
    readmes = {package: HASTEN / package / "README.md" for package in PACKAGES}
    short = [
        package
        for package, path in readmes.items()
        if not path.exists() or len(path.read_text(encoding="utf-8").split()) <= 20
    ]
    assert not short, f"a README.md with a map of the package, the way through it, how to add to it: {short}"
    unnamed = [
        module.relative_to(HASTEN).as_posix()
        for package, readme in readmes.items()
        for module in modules_of(package)
        if not re.search(rf"\b{re.escape(module.name)}\b", readme.read_text(encoding="utf-8"))
    ]
    assert not unnamed, f"the README.md of the package must name these modules: {unnamed}"


def test_every_package_has_a_directory_of_tests():
    missing = [package for package in PACKAGES if not list((TESTS / package).glob("test_*.py"))]
    assert not missing, f"no tests/PACKAGE/test_*.py of {missing}"


def test_one_method_per_file():
    for path in METHODS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Method" for base in node.bases)
        ]
        assert len(classes) == 1, f"{path.name} must define one method; it defines {classes}"
        assert ast.get_docstring(tree), f"{path.name} has no docstring"


def test_importing_hasten_imports_no_torch():
    loaded = "import sys, hasten; dir(hasten); print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "rich", "PIL"} & set(modules)


def cpu_seconds(*arguments: str) -> tuple[float, str]:
    """Returns the CPU seconds and the standard output of Python with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def test_help_starts_quickly():
    """At most 0.3 s of CPU time, or on a slow machine twelve times the start of Python; the best of five."""
    times = []
    for _ in range(5):
        seconds, output = cpu_seconds("-m", "hasten", "--help")
        assert "eject" in output
        times.append(seconds)
        if seconds < 0.3 or seconds < 12 * cpu_seconds("-c", "pass")[0]:
            return
    pytest.fail(f"hasten --help takes {min(times):.2f} s")


def test_package_is_marked_as_typed():
    assert (HASTEN / "py.typed").exists()
