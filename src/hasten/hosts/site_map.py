"""What is known of a script from its first watched run: its loaders, optimizers and models with file and line.

Later runs recognize these objects by site, ``file:line#index`` of the code that made or first called them. A site that
is missing in a later run means that it is not the run that was watched.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hasten
from hasten.core.errors import ConfigurationError
from hasten.engine.registry import comes_with_hasten

if TYPE_CHECKING:
    from hasten.core.recipe import Recipe
    from hasten.hosts.script_ref import ScriptRef

FILE = "sites.json"  # beside the recipe that was found with it
KINDS = ("loaders", "optimizers", "models", "evaluations", "seeds", "framework_arguments", "threads")
OF_A_RUN = (
    *("device", "main", "arguments", "facts", "memory", "host_memory", "samples_per_step", "first_steps"),
    *("total_steps", "expected_steps", "watched_steps", "watched_seconds", "evaluation_every", "evaluation_seconds"),
    *("metric", "metric_has_come"),
)

OF_EVALUATIONS = {"evaluations", "evaluation_gradients"}  # facts that are known once the script has evaluated

_known: dict[str, dict[str, Any]] = {}  # by fingerprint of the script
_hidden: dict[str, list[str]] = {}  # the same: paths of checkpoints, without which its trials start


def remember(script: ScriptRef, described: dict[str, Any]) -> dict[str, Any]:
    """Merges what a session has described into the site map of the script; returns the map, by KINDS and OF_A_RUN."""
    site_map = {kind: described["sites"].get(kind, []) for kind in KINDS}
    before = _known.get(script.fingerprint(), {})
    for kind in KINDS:
        sites = {entry["site"] for entry in site_map[kind]}
        site_map[kind] = site_map[kind] + [entry for entry in before.get(kind, ()) if entry["site"] not in sites]
    for name in OF_A_RUN:
        value = described.get(name)
        site_map[name] = before.get(name) if value is None else value
    if site_map["facts"] is not None:  # a run that was just begun has not evaluated yet
        site_map["facts"] = sorted({*site_map["facts"], *(OF_EVALUATIONS & {*(before.get("facts") or ())})})
    _known[script.fingerprint()] = site_map
    return site_map


def changed_numbers(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Name -> value in ``after`` of the arguments that are numbers and differ from ``before``.

    Texts are left out: one may hold the time of the start.
    """
    numbers = {name: value for name, value in after.items() if isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if before.get(name) != value}


def known_sites(script: ScriptRef) -> dict[str, Any] | None:
    """The site map of this command from earlier runs in this process, see ``remember``; None before the first one."""
    return _known.get(script.fingerprint())


def device_of(assumed: str, known: Mapping[str, Any] | None) -> str:
    """The device that a script trains on: where earlier runs put its parameters, else the one that is ``assumed``.

    A site map may come from another machine, whose GPU this one does not have: then the assumed device is the CPU.
    """
    seen = (known or {}).get("device")
    return seen if seen and (seen == "cpu" or assumed.startswith("cuda")) else assumed


def hidden_checkpoints(script: ScriptRef) -> list[str]:
    """Paths without which the trials of a script start, so that they begin at step 0."""
    return _hidden.get(script.fingerprint(), [])


def hide_checkpoints(script: ScriptRef, paths: Sequence[str]) -> list[str]:
    """Hides paths from later trials of a script, see ``hidden_checkpoints``. Returns those that are new."""
    hidden = _hidden.setdefault(script.fingerprint(), [])
    new = [path for path in paths if path not in hidden]
    hidden += new
    return new


def write(directory: Path, script: ScriptRef, recipe: Recipe) -> None:
    """Writes the site map of a script to FILE in the directory of a recipe; nothing if the script has not run."""
    from hasten.engine.run_dir import atomic_write  # needs torch, unlike a training for real

    site_map = known_sites(script)
    if site_map is not None:  # without the parsed arguments, which may hold a password
        sites = {name: site_map[name] for name in ("main", "device", *KINDS)}
        own = {"fingerprint": script.fingerprint(), "checked": _checked(recipe)}
        text = json.dumps(own | sites, indent=1)
        advice = "what was measured is kept; free the disk, and the same command continues the search"
        atomic_write(directory / FILE, lambda file: file.write(text.encode()), advice)


def is_checked(recipe: Recipe, sites: Mapping[str, Any] | None, script: ScriptRef) -> bool:
    """Whether the search has checked just this recipe, in this environment, on a device that is here.

    The code may have changed since, and the arguments, unless a method of the recipe is the user's own.
    """
    if sites is None or ((sites["device"] or "").startswith("cuda") and not _has_gpu()):
        return False
    is_unchanged = all(map(comes_with_hasten, recipe.methods)) or sites["fingerprint"] == script.fingerprint()
    return is_unchanged and sites["checked"] == _checked(recipe)


def _checked(recipe: Recipe) -> list[str]:
    return [str(recipe), hasten.__version__, sys.prefix, version("torch")]


def _has_gpu() -> bool:
    """Whether this process may see an NVIDIA GPU, as far as that shows without torch."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def read_beside(recipe: str | None) -> dict[str, Any] | None:
    """The site map beside a recipe file, the ``fingerprint`` of its script, and its ``main`` file; None without one.

    Raises:
        ConfigurationError: It cannot be read.
    """
    path = Path(recipe).with_name(FILE) if recipe else None
    if path is None or not path.is_file():
        return None
    try:
        newer: dict[str, Any] = {"framework_arguments": [], "threads": []}  # than some maps
        site_map = newer | json.loads(path.read_text(encoding="utf-8"))
        own = {name: site_map.get(name) for name in ("fingerprint", "main", "device", "checked")}
        return {**own, **{kind: list(site_map[kind]) for kind in KINDS}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} is no site map ({type(error).__name__}); tune again, or remove it") from None
