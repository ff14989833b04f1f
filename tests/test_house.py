"""Small fences that keep the house as it was meant: line budgets, a light import, a README in each room, one method a file."""

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HASTEN = Path(__file__).resolve().parents[1] / "src" / "hasten"
BUDGETS = {"engine/loop.py": 120, "engine/plan.py": 250}
ROOMS = sorted(path.name for path in HASTEN.iterdir() if (path / "__init__.py").exists())
METHODS = sorted(path for path in (HASTEN / "methods").rglob("*.py") if not path.name.startswith("_"))


@pytest.mark.parametrize(("file", "budget"), BUDGETS.items())
def test_line_budget(file, budget):
    lines = len((HASTEN / file).read_text(encoding="utf-8").splitlines())
    assert lines <= budget, f"{file} has {lines} lines; move something out rather than raise its budget of {budget}"


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_readme(room):
    readme = HASTEN / room / "README.md"
    assert readme.exists() and len(readme.read_text(encoding="utf-8").split()) > 20, (
        f"{room}/README.md: a map of the room, the way through it, how to add to it"
    )


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_one_method_a_file(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Method" for base in node.bases)
    ]
    assert len(classes) == 1, f"{path.name} has the methods {classes}"
    assert ast.get_docstring(tree), f"{path.name} does not say what it is for"


def test_importing_hasten_touches_neither_torch_nor_a_device():
    loaded = "import sys, hasten; dir(hasten); print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "rich", "PIL"} & set(modules)


def seconds_of(*words: str) -> tuple[float, str]:
    """The processor's time that a program of Python takes, and what it says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, said


def test_help_is_there_at_once():
    """At most 0.3 s of the processor's time, or on a slow machine twelve times what Python alone takes to start; the best of several."""
    times = []
    for _ in range(5):
        seconds, said = seconds_of("-m", "hasten", "--help")
        assert "eject" in said
        times.append(seconds)
        if seconds < 0.3 or seconds < 12 * seconds_of("-c", "pass")[0]:
            return
    pytest.fail(f"hasten --help takes {min(times):.2f} s")


def test_the_package_says_that_it_is_typed():
    assert (HASTEN / "py.typed").exists()
