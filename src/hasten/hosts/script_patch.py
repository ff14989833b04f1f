"""A recipe as a patch of the script that it was found with: ``hasten eject --recipe R -- python train.py``."""

import os
from typing import Any

from hasten.core.recipe import Recipe
from hasten.engine.devices import pick_device
from hasten.export.patch import Site, line_of_model, write_patch
from hasten.hosts.arm import ScriptArm
from hasten.hosts.launch import check_train
from hasten.hosts.script_ref import ScriptRef

TRAINING = "training"  # role of a loader


def patch_script(script: ScriptRef, recipe: Recipe, recipe_file: str | None, device: str | None) -> str:
    """The patch that puts a recipe into a script; ``patch -p1`` applies it where the command runs.

    The sites come from the map beside the recipe file. Without one, or if the script or its arguments have changed
    since then, the script is watched for a few steps.

    Raises:
        ConfigurationError: The recipe cannot act in a script, or the script fails by itself.
        RunError: The script cannot be watched.
    """
    sites = check_train(script, recipe, recipe_file, processes=1)
    if sites is None or sites["fingerprint"] != script.fingerprint():
        sites = _watch(script, pick_device(device))
    file = os.path.relpath(script.file, script.directory) if script.file else None
    return write_patch(_as_places(sites, script.directory), recipe, script.directory, file)


def _watch(script: ScriptRef, device: str) -> dict[str, Any]:
    with ScriptArm(script, methods={}, device=device, seed=0) as arm:
        arm.build()
    return script.sites() or {}


def _as_places(sites: dict[str, Any], directory: str) -> list[Site]:
    """The sites as ``write_patch`` takes them: those of training loaders, called models, optimizers and evaluations."""
    chosen = {
        "loader": [entry for entry in sites["loaders"] if entry["role"] == TRAINING],
        "optimizer": sites["optimizers"],
        "model": [entry for entry in sites["models"] if entry["called"]],
        "evaluation": [entry for entry in sites["evaluations"] if not entry["no_grad"]],
    }
    places = [{"kind": kind, **_place(entry)} for kind, entries in chosen.items() for entry in entries]
    for place in places:
        if place["kind"] == "model":  # a model is noted where it is called
            place["line"] = line_of_model(directory, place["file"], place["line"])
            place["type"] = ""  # what is assigned there may be the model in another call, such as .to(device)
    return places


def _place(entry: dict[str, Any]) -> dict[str, Any]:
    """File, line, index and type of a site, which the map writes as ``train.py:81#1``."""
    where, _, index = entry["site"].rpartition("#")
    file, _, line = where.rpartition(":")
    return {"file": file, "line": int(line), "index": int(index), "type": entry.get("type", "")}
