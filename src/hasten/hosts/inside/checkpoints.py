"""Notes the checkpoint from which a script resumes, so that trials can start without it, at step 0.

A file is a checkpoint if an optimizer, schedule or scaler gets its state from it before the first step, or if the
script loads it before the first step and saves to it later. Weights that are only loaded, as for fine-tuning, are none.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hasten.hosts.inside.replace import replaces

DEPTH = 3  # of dictionaries and lists, in which a state is looked for
RESTORED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)  # pyright: ignore[reportPrivateImportUsage]
TRAINER_STATE = "trainer_state.json"  # beside the files of a checkpoint of Transformers, which is a directory


class CheckpointSeam:
    """Writes the paths of the checkpoints that a script resumes from to ``file``, a JSON list: those in ``copy``, where
    a trial may run, as paths in ``directory``, of which it is a copy.

    Patches ``torch.load``, ``torch.save`` and the ``load_state_dict`` of RESTORED.
    """

    def __init__(self, file: Path, copy: str, directory: str):
        self.file, self.found = file, list[str]()
        self.copy, self.directory = copy, directory
        self.loading = True
        self.loaded: dict[str, set[int]] = {}  # path -> ids of the dictionaries in it
        replaces(torch, "load")(self._load)
        replaces(torch, "save")(self._save)
        for owner in RESTORED:
            replaces(owner, "load_state_dict")(self._restore)

    def end_loading(self) -> None:
        """After the first step: what is loaded from here on is nothing to resume from."""
        self.loading = False
        self.loaded = {path: set() for path in self.loaded}

    def report(self, path: str) -> None:
        if path.startswith(f"{self.copy}/"):
            path = self.directory + path.removeprefix(self.copy)
        if path not in self.found:
            self.found.append(path)
            self.file.write_text(json.dumps(self.found), encoding="utf-8")

    def _load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(f, *args, **kwargs)
        if self.loading and (path := _path_of(f)):
            self.loaded[path] = set(_dictionaries(loaded, DEPTH))
        return loaded

    def _save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path_of(f)
        if path and path in self.loaded:
            self.report(path)
        return original(obj, f, *args, **kwargs)

    def _restore(self, original: Callable[..., Any], restored: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        for path, inner in self.loaded.items() if self.loading else ():
            if id(state_dict) in inner:
                for found in _checkpoints_with(path):
                    self.report(found)
        return original(restored, state_dict, *args, **kwargs)


def _path_of(file: Any) -> str:
    """The absolute path of a path or an open file; empty for a buffer in memory."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.path.realpath(name) if isinstance(name, (str, os.PathLike)) else ""


def _checkpoints_with(path: str) -> list[str]:
    """A checkpoint of Transformers and those beside it, of which a script would take the next; else the file itself."""
    directory = os.path.dirname(path)
    if not os.path.exists(os.path.join(directory, TRAINER_STATE)):
        return [path]
    parent = os.path.dirname(directory)
    beside = sorted(os.path.join(parent, name) for name in os.listdir(parent))
    return [one for one in beside if os.path.exists(os.path.join(one, TRAINER_STATE))]


def _dictionaries(value: Any, depth: int) -> list[int]:
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else []
    below = [found for each in inner for found in _dictionaries(each, depth - 1)] if depth else []
    return [id(value), *below] if isinstance(value, Mapping) else below
