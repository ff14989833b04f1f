"""A run's folder: the database of the run. Anything that can read a folder can read a run.

::

    recipe.toml         the methods, with the settings that some of them found while they ran
    environment.json    task, recipe as it was asked for, seed, versions, machine
    log.jsonl           every step's loss and every evaluation: append-only, the same bytes for the same run
    times.jsonl         when: wall-clock seconds of the run at steps, evaluations and checkpoints
    skipped.jsonl       rows that could not be read and were left out, where there are any
    checkpoints/        the newest two
    model.safetensors   the trained model as exported
    result.json         written last: a folder with a result is a finished run
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hasten.core.errors import ConfigurationError, RunError
from hasten.core.recipe import Recipe
from hasten.engine.error_messages import translate_disk_errors

BEFORE_IT_BEGINS = {
    "recipe.toml",
    "log.jsonl",
    "times.jsonl",
    "checkpoints",
}  # the last three empty: environment.json makes it a run
TEMPORARY = ".part"
GO_ON = "what was saved before is whole; free the disk and go on with --resume"


class RunDirectory:
    """The files of one run."""

    def __init__(
        self, path: str | Path, identity: dict, recipe: Recipe | None, resume: bool, essence: Callable[[Recipe], Recipe]
    ):
        """Looks, but does not touch.

        Args:
            recipe: None: the one that the run there was begun with; a new run has no methods then.
            essence: what of a recipe has to stay as it was for a run to be gone on with.

        Raises:
            Refusal: the folder holds something else, or a run that must not be gone on with.
        """
        self.path, self.resume_key = Path(path), essence
        self.identity, self.recipe = identity, recipe or Recipe()
        self.written = self.recipe  # what recipe.toml says
        self.environment: dict = {}  # of the run that is gone on with
        try:
            found = set(os.listdir(self.path)) if self.path.exists() else set()
            self.begun = begun = "environment.json" in found
            strange = not begun and any(map(self._is_strange, found))
        except OSError as error:
            raise ConfigurationError(
                f"cannot use {self.path} as a run's folder: {error.strerror}; choose another --out"
            ) from None
        if strange:
            raise ConfigurationError(f"{self.path} is not empty and holds no run; choose another --out")
        if begun and not resume:
            raise ConfigurationError(
                f"{self.path} already holds a run; go on with it with --resume, or choose another --out"
            )
        if begun:
            self._go_on_with(recipe)
        self.identity = {**identity, "recipe": essence(self.recipe).methods}

    def finished(self) -> dict | None:
        """The result of a run that came to its end."""
        try:
            return json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def begin(self, environment: dict) -> None:
        """Makes the folder ready to be written to, and keeps other processes out of it."""
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self._log = open(self.path / "log.jsonl", "ab", buffering=0)  # noqa: SIM115  open as long as the run
            self._times = open(self.path / "times.jsonl", "ab", buffering=0)  # noqa: SIM115
            fcntl.lockf(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
            for half_written in (*self.path.glob(f"*{TEMPORARY}"), *(self.path / "checkpoints").glob(f"*{TEMPORARY}")):
                half_written.unlink()
        except BlockingIOError:
            raise ConfigurationError(
                f"another process is training in {self.path}; wait for it or choose another --out"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from None
        if not self.begun:
            if (
                self.path / "environment.json"
            ).exists():  # since we looked, another process has begun, and may have ended
                raise ConfigurationError(
                    f"{self.path} already holds a run; go on with it with --resume, or choose another --out"
                )
            self.write("recipe.toml", self.recipe.to_toml())
            self.write(
                "environment.json",
                json.dumps({**self.identity, "recipe": self.recipe.methods, **environment}, indent=2) + "\n",
            )

    def log(self, records: list[dict]) -> None:
        """Appends to the deterministic log."""
        self._append(self._log, records)

    def note_time(self, what: str, step: int, seconds: float) -> None:
        """Appends ``{"what", "step", "seconds"}`` to the times; ``seconds`` since the run began."""
        self._append(self._times, [{"what": what, "step": step, "seconds": round(seconds, 6)}])

    def logged(self) -> int:
        """The log's length in bytes, after it has reached the disk."""
        with translate_disk_errors(self.path / "log.jsonl", GO_ON):
            os.fsync(self._log.fileno())
            return os.fstat(self._log.fileno()).st_size

    def cut_log(self, length: int) -> None:
        """Forgets what was logged after a checkpoint."""
        with translate_disk_errors(self.path / "log.jsonl", GO_ON):
            os.ftruncate(self._log.fileno(), length)

    def write(self, name: str, text: str) -> None:
        atomic_write(self.path / name, lambda file: file.write(text.encode()))

    def remove(self, name: str) -> None:
        with translate_disk_errors(self.path / name, GO_ON):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        self._log.close()
        self._times.close()

    def _append(self, file: BinaryIO, records: list[dict]) -> None:
        left = lines_of(records).encode()
        with translate_disk_errors(Path(file.name), GO_ON):
            while left:
                left = left[file.write(left) :]

    def _is_strange(self, name: str) -> bool:
        """Whether a run that was killed before it had begun cannot have left this."""
        path, final = self.path / name, name.removesuffix(TEMPORARY)
        if final != name or name not in BEFORE_IT_BEGINS:
            return final not in BEFORE_IT_BEGINS | {"environment.json"}
        return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0 and name != "recipe.toml"

    def _go_on_with(self, recipe: Recipe | None) -> None:
        """The run that is there, if it is the one asked for: under the recipe that it was begun with, what this came to, or none at all."""
        try:
            self.environment = then = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
            found = self.written = Recipe.load(self.path / "recipe.toml")
            begun = _recipe_of(then, found)
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"the run in {self.path} cannot be read: {error}; choose another --out") from None
        if recipe is None or recipe == found:  # what runs is what the folder says
            named = recipe.methods if recipe else {}
            if any(":" in name and name not in named for name in (begun | found).methods):
                raise ConfigurationError(
                    f"the run in {self.path} was begun with code from outside; if you trust it, name it again: --with '{begun}'"
                )
            self.recipe = begun
        if self.resume_key(self.recipe) != self.resume_key(begun):
            raise self._another("recipe", begun, self.recipe)
        for name, now in self.identity.items():
            if (before := then.get(name)) != now:
                raise self._another(name, before, now)

    def _another(self, what: str, there, here) -> ConfigurationError:
        what = f"another {what.replace('_', ' ')}: {_shown(there)} there, {_shown(here)} here"
        return ConfigurationError(f"the run in {self.path} has {what}; say the same or choose another --out")


def _recipe_of(environment: dict, found: Recipe) -> Recipe:
    """The recipe that a run was begun with; an earlier hasten kept it in recipe.toml alone."""
    if not isinstance(environment, dict):
        raise ValueError("environment.json holds no table")
    methods = environment.get("recipe", found.methods)
    if not isinstance(methods, dict) or not all(isinstance(settings, dict) for settings in methods.values()):
        raise ValueError("the recipe in environment.json is no table of methods")
    if not all(
        isinstance(value, (bool, int, float, str)) for settings in methods.values() for value in settings.values()
    ):
        raise ValueError("a setting in environment.json is no number, text or true/false")
    return Recipe(methods)


def lines_of(records: list[dict]) -> str:
    """A line a record. They are flat and hold numbers, so one call writes them all: five times faster than one for each."""
    return json.dumps(records, allow_nan=False)[1:-1].replace("}, {", "}\n{") + "\n" if records else ""


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file beside and renames it into place: at any instant there is the old one, or the new one, whole.

    Raises:
        Failure: the disk is full, the folder cannot be written to.
    """
    beside = path.with_name(path.name + TEMPORARY)
    with translate_disk_errors(path, GO_ON):
        try:
            with open(beside, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, has to reach the disk
        finally:
            os.close(folder)


def _shown(value) -> str:
    return "none" if value is None else str(value)
