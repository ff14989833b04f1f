"""A training of the user's own as a task of ``tune``, ``compare`` and ``diagnose`` from Python."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.hosts.inside_files import SESSION
from hasten.hosts.script_ref import ScriptRef

A_TRAINING = "a training is a command or a function that makes and trains everything"


def script(
    training: str | Sequence[str] | Callable[[], Any], *, metric: str | None = None, vary: Sequence[str] = ()
) -> ScriptRef:
    """Your own training, with its own loop, as a task for ``tune``, ``compare`` and ``diagnose``.

    Every measurement runs it anew, in a process and a sandbox of its own. So a model or a Trainer is not enough: what
    makes them must be a part of the training.

    Args:
        training: A command, such as ``"python train.py --epochs 90"`` or its list of words; or a function without
            arguments that makes everything and trains it. The function must stand at the top of a module that can be
            imported; a notebook has none. In the file that calls ``script``, this call must stand under
            ``if __name__ == "__main__":``.
        metric: The metric to judge by, as ``NAME[:min|max]``; None: the one that the training logs or prints.
        vary: Arguments of the training, of which a search may try other values; see ``--vary``.

    Returns:
        What ``tune``, ``compare`` and ``diagnose`` take as their task; nothing has run yet.

    Raises:
        ConfigurationError: There is no such command, or the function cannot be imported.
    """
    if not callable(training):
        if not isinstance(training, (str, list, tuple)):
            raise ConfigurationError(f"{A_TRAINING}, not {type(training).__name__}")
        argv = shlex.split(training) if isinstance(training, str) else [str(word) for word in training]
        return ScriptRef.of_command(argv, metric, vary=vary)
    if SESSION in os.environ:
        raise ConfigurationError("the training itself calls hasten.script; call it under if __name__ == '__main__':")
    name, root, file = _place(training)
    function = training.__qualname__
    # not an import statement: the name of a file may have a -
    call = f"from importlib import import_module; import_module({name!r}).{function}()"
    argv = [sys.executable, "-c", call]
    ref = ScriptRef.of_command(argv, metric, vary=vary)
    path = os.pathsep.join(filter(None, [str(root), ref.environment.get("PYTHONPATH")]))
    return replace(ref, name=training.__name__, file=str(file), environment={**ref.environment, "PYTHONPATH": path})


def _place(function: Callable[..., Any]) -> tuple[str, Path, Path]:
    """The name of a function's module, the directory from which it is imported, and its file."""
    if not inspect.isfunction(function):
        raise ConfigurationError(f"{A_TRAINING}, not {type(function).__name__}")
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None or function.__qualname__ != function.__name__ or not function.__name__.isidentifier():
        where = "in a notebook or a shell" if file is None else "inside of another function or class"
        raise ConfigurationError(
            f"{function.__qualname__} stands {where}; write it at the top of a file, such as train.py, and import it"
        )
    name, path = function.__module__, Path(file).resolve()
    if name == "__main__":
        spec = getattr(module, "__spec__", None)  # of python -m
        name = spec.name if spec else path.stem
    return name, path.parents[name.count(".") + (path.name == "__init__.py")], path
