"""The scripts of ``tests/hosts/scripts``, and arms of them."""

import sys
from pathlib import Path

from hasten.core.recipe import Recipe
from hasten.hosts.arm import ScriptArm
from hasten.hosts.script_ref import ScriptRef

SCRIPTS = Path(__file__).parents[1] / "hosts" / "scripts"


def script(*argv: str, directory: Path = SCRIPTS) -> ScriptRef:
    return ScriptRef.of_command([sys.executable, *argv], directory=str(directory))


def written(tmp_path: Path, text: str) -> ScriptRef:
    (tmp_path / "train.py").write_text(text)
    return script("train.py", directory=tmp_path)


def arm(ref: ScriptRef, recipe: str = "baseline") -> ScriptArm:
    return ScriptArm(ref, methods=Recipe.coerce(recipe).methods, device="cpu", seed=0, timeout=120.0)
