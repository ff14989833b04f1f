"""A recipe as a patch of the script that it was found with: ``hasten eject --recipe R -- python train.py``."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.core.method import Method
from hasten.core.recipe import Recipe
from hasten.engine.composition import sort_methods
from hasten.engine.registry import make_methods, takes_any_option
from hasten.export.patch import ScriptEdit, Site, edit_of, line_of_model, name_of_model, write_patch
from hasten.hosts.arm import ScriptArm
from hasten.hosts.launch import check_train
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.site_map import known_sites
from hasten.utils.typed_arguments import typed_numbers, with_typed

TRAINING = "training"  # role of a loader


def patch_script(script: ScriptRef, recipe: Recipe, recipe_file: str | None, device: str | None) -> str:
    """The patch that puts a recipe into a script; ``patch -p1`` applies it where the command runs.

    The sites come from the map beside the recipe file. Without one, or if the script or its arguments have changed
    since then, the script is watched for a few steps.

    Raises:
        ConfigurationError: The recipe cannot act in a script, or the script fails by itself.
        RunError: The script cannot be watched.
    """
    sites, assumed = check_train(script, recipe, recipe_file, 1, device)
    if sites is None or sites["fingerprint"] != script.fingerprint():
        sites = _watch(script, assumed)
    file = os.path.relpath(script.file, script.directory) if script.file else sites["main"]
    places = [*_as_places(sites, script.directory), *_argument_places(sites), *_step_places(sites, script.directory)]
    edits = [_edit(script, method, places) for method in sort_methods(make_methods(recipe))]
    return write_patch(edits, places, Path(script.directory), file)


def _edit(script: ScriptRef, method: Method, places: list[Site]) -> ScriptEdit:
    """The edit of a method. Arguments of the script are changed where they are: in the command, or in a call."""
    if not takes_any_option(type(method)):
        return edit_of(method)
    values = dict(vars(method)["values"])
    in_calls = {name: value for name, value in values.items() if name not in typed_numbers(script.argv)}
    at = {f"argument {name}": f"{name}={value!r}" for name, value in in_calls.items()}
    at = {kind: text for kind, text in at.items() if any(place["kind"] == kind for place in places)}
    parsed = {name: value for name, value in in_calls.items() if f"argument {name}" not in at}
    return ScriptEdit(method.name, method.card.summary, at, _command_by_hand(script, values, parsed))


def _command_by_hand(script: ScriptRef, values: Mapping[str, Any], parsed: Mapping[str, Any]) -> str:
    """A sentence: how to start the script with other ``values``, of which its parser needs ``parsed``; "" if none."""
    command = with_typed(script.argv, values)
    more = ", ".join(f"{name} = {value}" for name, value in parsed.items())
    if command == list(script.argv):
        return f"start the script with other values of its arguments: {more}" if more else ""
    return f"start the script as: {shlex.join(command)}" + (f", and with {more}" if more else "")


def _argument_places(sites: dict[str, Any]) -> list[Site]:
    """The calls in which a script passes numbers to a framework, once for each of these arguments."""
    entries = [(entry, name) for entry in sites["framework_arguments"] for name in entry["names"]]
    return [{"kind": f"argument {name}", **_place(entry)} for entry, name in entries]


def _step_places(sites: dict[str, Any], directory: str) -> list[Site]:
    """The calls of ``optimizer.step``; ``type`` is the name of the model there, "" unless it is the only one."""
    models = [_place(entry) for entry in sites["models"]]
    places = [_place({"site": f"{entry['step']}#1"}) for entry in sites["optimizers"] if entry.get("step")]
    for place in places:
        is_one = len(models) == 1 and models[0]["file"] == place["file"]
        place["kind"] = "step"
        place["type"] = name_of_model(directory, place["file"], models[0]["line"], place["line"]) if is_one else ""
    return places


def _watch(script: ScriptRef, device: str) -> dict[str, Any]:
    with ScriptArm(script, methods={}, device=device, seed=0) as arm:
        arm.build()
    return known_sites(script) or {}


def _as_places(sites: dict[str, Any], directory: str) -> list[Site]:
    """The sites as ``write_patch`` takes them: those of training loaders, called models, optimizers and evaluations."""
    training_loaders = [entry for entry in sites["loaders"] if entry["role"] == TRAINING]
    chosen = {
        "loader": training_loaders,
        "dataset": training_loaders,
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
    """File, line, index, type and maker of a site, which the map writes as ``train.py:81#1``."""
    where, _, index = entry["site"].rpartition("#")
    file, _, line = where.rpartition(":")
    about = {"type": entry.get("type", ""), "made_by": entry.get("made_by", "")}
    return {"file": file, "line": int(line), "index": int(index), **about}
