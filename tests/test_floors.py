"""The house: imports point down only. Floors and exceptions are data here; a new room has to be put on a floor."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
FLOORS = {
    "_torch_compat": -1,
    "_torch_compat_elastic": -1,
    "contract": 0,
    "engine": 1,
    "methods": 2,
    "data": 2,
    "export": 2,
    "launch": 2,
    "reporting": 2,
    "measure": 3,
    "diagnosis": 4,
    "tuning": 5,
    "cli": 6,
    "testing": 6,
}
LOOKS_UP_BY_NAME = {("engine/registry.py", "hasten.methods")}  # the folder that is searched for methods; no method is named
PUBLIC = {"Task", "Method", "Card", "Exactness", "WrapOrder", "option", "RunContext", "TrainPlan", "Recipe", "Refusal", "Failure"}

FILES = sorted(SOURCE.rglob("*.py"))
WORKLOADS = [path for path in FILES if path.is_relative_to(SOURCE / "hasten" / "workloads")]
OURS = [path for path in FILES if path.parent != SOURCE / "hasten" and path not in WORKLOADS]


def imports(path: Path, top_only: bool = False) -> list[str]:
    """Every module that a file imports, as ``package.module`` or ``package.module.name``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write out where {node.module} is, relative imports hide the floor"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def rooms(path: Path) -> list[tuple[str, str]]:
    """(room, module) of every import of ours in a file."""
    found = [module for module in imports(path) if module.startswith("hasten.")]
    return [(module.split(".")[1], module) for module in found]


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", OURS, ids=name)
def test_imports_point_down(path):
    where = str(path.relative_to(SOURCE / "hasten"))
    room = where.split("/")[0]
    assert room in FLOORS, f"the room {room} has no floor yet"
    for other, module in rooms(path):
        if other == "__version__" or any(where == file and module == allowed for file, allowed in LOOKS_UP_BY_NAME):
            continue
        assert other in FLOORS, f"{where} imports {module}; our own code names the room that a thing is in"
        assert other == room or FLOORS[other] < FLOORS[room], f"{where} (floor {FLOORS[room]}) imports {module} (floor {FLOORS[other]})"


@pytest.mark.parametrize("path", sorted((SOURCE / "hasten" / "methods").glob("*.py")), ids=name)
def test_a_method_knows_the_contract_only(path):
    for room, module in rooms(path):
        private = module.startswith("hasten.methods._")
        assert room in ("contract", "_torch_compat") or private, (
            f"{path.name} imports {module}; a method imports the contract, never the engine or another method"
        )


@pytest.mark.parametrize("path", WORKLOADS, ids=name)
def test_a_workload_uses_public_names_only(path):
    for module in imports(path):
        if module.partition(".")[0] == "hasten" and not module.startswith("hasten.workloads."):
            assert module.partition(".")[2] in PUBLIC, f"{path.name} imports {module}; a workload uses what any user can"


@pytest.mark.parametrize(
    "where",
    [
        "__init__.py",
        "__main__.py",
        "core/__init__.py",
        "core/errors.py",
        "core/recipe.py",
        "core/progress.py",
        *[f"cli/{path.name}" for path in (SOURCE / "hasten" / "cli").glob("*.py")],
    ],
)
def test_nothing_heavy_is_imported_on_the_way_to_help(where):
    heavy = {"torch", "numpy", "rich", "PIL", "jinja2", "psutil", "cloudpickle", "tomli_w", "safetensors", "transformers"}
    for module in imports(SOURCE / "hasten" / where, top_only=True):
        assert module.partition(".")[0] not in heavy, f"{where} imports {module} at its top"


def test_the_engine_is_found_by_this_test():
    assert len(OURS) > 40 and len(WORKLOADS) >= 5, "the paths of this test lead nowhere"
