"""Trains a script for real: its own command with the methods of a recipe inside, and nothing else changed."""

import os
import re
import signal
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.core.recipe import Recipe
from hasten.hosts.inside_files import BEGUN, ERROR, STARTED
from hasten.hosts.process import NOT_LOADED, injected, write_spec
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.site_map import is_checked, read_beside
from hasten.utils.signals import handle_signals

# a scheduler sends them to the process that it started, for a checkpoint before its time is over
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def check_train(
    script: ScriptRef, recipe: Recipe, recipe_file: str | None, processes: int, device: str | None
) -> tuple[dict[str, Any] | None, str]:
    """Checks a request before anything runs.

    A recipe that the search has checked here is not checked again: to do so imports torch, which takes as long as the
    script needs to import it.

    Returns:
        (site map beside the recipe file or None, device to assume until the script shows its own).

    Raises:
        ConfigurationError: The recipe cannot act in a script, ``processes`` is not 1, or the site map is unreadable.
    """
    if processes != 1:
        raise ConfigurationError(f"{script} starts its own processes; leave --processes out")
    sites = read_beside(recipe_file)
    if sites and sites["device"] and device is None and is_checked(recipe, sites, script):
        return sites, sites["device"]
    from hasten.engine.devices import pick_device

    script.check_recipe(recipe)
    return sites, pick_device(device)


def check_same_script(script: ScriptRef, sites: dict[str, Any] | None) -> None:
    """Refuses a recipe whose sites the command cannot reach, before anything runs.

    Where code or arguments have changed since the search, the files of the sites must be there, and the command must
    start the file in which the training was started then, or another one that names it. Other changes show after the
    first step.

    Raises:
        ConfigurationError: The recipe is for another script.
    """
    if sites is None or sites["fingerprint"] == script.fingerprint():
        return
    entries = [entry["site"] for kind in ("loaders", "optimizers", "models") for entry in sites[kind]]
    files = sorted({site.rpartition(":")[0] for site in entries})
    main, own = sites["main"], os.path.relpath(script.file, script.directory) if script.file else None
    for file in files:
        is_gone = not Path(script.directory, file).is_file()
        if is_gone or (file == main and own not in (None, main) and not _names(script, Path(file).stem)):
            why = "does not exist here" if is_gone else f"is not what {script.command} starts"
            raise ConfigurationError(
                f"the recipe is for another script: it was found with {file}, which {why}; tune this command, or give "
                "the recipe without the sites.json beside it"
            )


def _names(script: ScriptRef, module: str) -> bool:
    """Whether the script's file holds the name of a module, which it may import."""
    text = Path(script.file or "").read_text(encoding="utf-8", errors="replace")
    return re.search(rf"\b{re.escape(module)}\b", text) is not None


def train_script(script: ScriptRef, recipe: Recipe, device: str, sites: dict[str, Any] | None) -> int:
    """Runs the command with the recipe, with this process's input and output, and forwards signals to it.

    Warns if the recipe had no effect. Returns the exit code, 128 + N if signal N ended the command.
    """
    with tempfile.TemporaryDirectory(prefix="hasten-") as directory:
        write_spec(Path(directory), script, recipe.methods, device, None, sites, mode="train")
        environment = injected(script.environment, Path(directory))  # without a recipe too: see frameworks/pyg.py
        with subprocess.Popen(script.argv_under(recipe.methods), cwd=script.directory, env=environment) as process:

            def forward(number: int, _: Any) -> None:
                # the terminal sends Ctrl-C to both: the script decides, its code counts
                if number != signal.SIGINT or not _is_in_foreground():
                    process.send_signal(number)

            with handle_signals((signal.SIGINT, *FORWARDED), forward):
                code = process.wait()
        if recipe and (why := _why_unused(Path(directory))):
            warnings.warn(f"the recipe had no effect: the command {why}", HastenWarning, stacklevel=2)
    return code if code >= 0 else 128 - code


def _is_in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process and, in the same process group, to the command."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # its session has lost it
        return False
    finally:
        os.close(terminal)


def _why_unused(directory: Path) -> str:
    """Why the methods cannot have acted in the processes of the command; empty if a session has begun in one."""
    if not (directory / STARTED).exists():
        return NOT_LOADED
    if (directory / ERROR).exists():
        error = (directory / ERROR).read_text(encoding="utf-8", errors="replace")
        return f"cannot run hasten in one of its processes: {error}"
    return "" if (directory / BEGUN).exists() else "imports no torch"
