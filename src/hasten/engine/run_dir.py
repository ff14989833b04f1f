"""The run directory: the database of a run, readable without hasten.

::

    recipe.toml         the methods, with the options that some of them found while they ran
    environment.json    task, recipe as requested, seed, versions, machine
    log.jsonl           every step's loss and every evaluation: append-only, the same bytes for the same run
    times.jsonl         wall-clock seconds of the run at steps, evaluations and checkpoints
    skipped.jsonl       rows that could not be read and were skipped, if there are any
    checkpoints/        the newest two
    model.safetensors   the trained model as exported
    result.json         written last: a directory with a result is a finished run
"""

import errno
import fcntl
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO

from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.core.recipe import Recipe
from hasten.engine.error_messages import translate_disk_errors

BEFORE_BEGIN = {"recipe.toml", "log.jsonl", "times.jsonl", "checkpoints"}  # the last three empty; then environment.json
TEMPORARY = ".part"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems such as Lustre without flock
FREE_THE_DISK = "the files saved before are complete; make the disk writable or free space, then pass --resume"


class RunDirectory:
    """The files of one run. The constructor reads and checks what is in the directory; it writes nothing.

    ``identity`` are facts, such as task and seed, that must not change when the run is resumed; ``resume_key`` maps a
    recipe to its part that must not change. If ``recipe`` is None, that of the run in the directory is used, or none.
    ConfigurationError if the directory cannot be used as requested; RunError if the run in it cannot be read.
    """

    def __init__(
        self,
        path: str | Path,
        identity: dict[str, Any],
        recipe: Recipe | None,
        resume: bool,
        resume_key: Callable[[Recipe], Recipe],
    ) -> None:
        self.path, self.resume_key = Path(path), resume_key
        self.identity, self.recipe = identity, recipe or Recipe()
        self.written = self.recipe  # in recipe.toml
        self.environment: dict[str, Any] = {}  # environment.json of the run that is resumed
        try:
            names = set(os.listdir(self.path)) if self.path.exists() else set[str]()
            self.begun = "environment.json" in names  # by a run that is to be resumed
            foreign = not self.begun and any(map(self._is_foreign, names))
        except OSError as error:
            advice = "choose another --out"
            raise ConfigurationError(f"cannot use {self.path} as a run directory: {error.strerror}; {advice}") from None
        if foreign:
            raise ConfigurationError(f"{self.path} is not empty and holds no run; choose another --out")
        if self.begun and not resume:
            raise self._already_exists()
        if self.begun:
            self._read_run(recipe)
        self.identity = {**identity, "recipe": resume_key(self.recipe).methods}

    def finished(self) -> dict[str, Any] | None:
        """The content of result.json, which only a finished run has; else None."""
        try:
            return json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def begin(self, environment: dict[str, Any]) -> None:
        """Creates and locks the directory, writes environment.json of a new run; ConfigurationError if it is in use."""
        checkpoints = self.path / "checkpoints"
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            self._log = open(self.path / "log.jsonl", "ab", buffering=0)  # noqa: SIM115  open as long as the run
            self._times = open(self.path / "times.jsonl", "ab", buffering=0)  # noqa: SIM115
            lock_file(self._log)
            for incomplete in (*self.path.glob(f"*{TEMPORARY}"), *checkpoints.glob(f"*{TEMPORARY}")):
                incomplete.unlink()
        except BlockingIOError:
            advice = "wait for it or choose another --out"
            raise ConfigurationError(f"another process is training in {self.path}; {advice}") from None
        except OSError as error:
            raise ConfigurationError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from None
        if not self.begun:
            if (self.path / "environment.json").exists():  # another process has begun a run since __init__
                raise self._already_exists()
            self.write("recipe.toml", self.recipe.to_toml())
            facts = {**self.identity, "recipe": self.recipe.methods, **environment}
            self.write("environment.json", json.dumps(facts, indent=2) + "\n")

    def log(self, records: list[dict[str, Any]]) -> None:
        """Appends records to log.jsonl."""
        self._append(self._log, records)

    def note_time(self, event: str, step: int, seconds: float) -> None:
        """Appends ``{"what": event, "step", "seconds"}`` to times.jsonl; ``seconds`` since the run began."""
        self._append(self._times, [{"what": event, "step": step, "seconds": round(seconds, 6)}])

    def logged(self) -> int:
        """Flushes log.jsonl to the disk and returns its length in bytes."""
        with translate_disk_errors(self.path / "log.jsonl", FREE_THE_DISK):
            os.fsync(self._log.fileno())
            return os.fstat(self._log.fileno()).st_size

    def cut_log(self, length: int) -> None:
        """Cuts log.jsonl to ``length`` bytes: removes what was logged after a checkpoint."""
        with translate_disk_errors(self.path / "log.jsonl", FREE_THE_DISK):
            os.ftruncate(self._log.fileno(), length)

    def write(self, name: str, text: str) -> None:
        atomic_write(self.path / name, lambda file: file.write(text.encode()))

    def remove(self, name: str) -> None:
        with translate_disk_errors(self.path / name, FREE_THE_DISK):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        self._log.close()  # releases the lock
        self._times.close()

    def _append(self, file: BinaryIO, records: list[dict[str, Any]]) -> None:
        rest = to_json_lines(records).encode()
        with translate_disk_errors(Path(file.name), FREE_THE_DISK):
            while rest:
                rest = rest[file.write(rest) :]

    def _is_foreign(self, name: str) -> bool:
        """Whether a file was not written by hasten: a run killed before environment.json leaves known names only."""
        path, final = self.path / name, name.removesuffix(TEMPORARY)
        if final != name or name not in BEFORE_BEGIN:
            return final not in BEFORE_BEGIN | {"environment.json"}
        return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0 and name != "recipe.toml"

    def _read_run(self, recipe: Recipe | None) -> None:
        """Reads the run to be resumed, and checks that its first recipe, that in recipe.toml, or none was requested."""
        try:
            before: Any = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
            self.environment = before
            self.written = Recipe.load(self.path / "recipe.toml")
            methods = before.get("recipe") if hasattr(before, "get") else None
            first_recipe = Recipe.from_tables(methods, "the recipe in environment.json")  # as the run began
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"the run in {self.path} cannot be read: {error}; choose another --out") from None
        if recipe is None or recipe == self.written:
            requested = recipe.methods if recipe else {}
            if any(":" in name and name not in requested for name in (first_recipe | self.written).methods):
                advice = f"if you trust them, name them again: --with '{first_recipe}'"
                raise ConfigurationError(f"the run in {self.path} was begun with methods from outside hasten; {advice}")
            self.recipe = first_recipe
        if self.resume_key(self.recipe) != self.resume_key(first_recipe):
            raise self._mismatch("recipe", first_recipe, self.recipe)
        for name, value in self.identity.items():
            if before.get(name) != value:
                raise self._mismatch(name, before.get(name), value)

    def _already_exists(self) -> ConfigurationError:
        advice = "continue it with --resume, or choose another --out"
        return ConfigurationError(f"{self.path} already holds a run; {advice}")

    def _mismatch(self, name: str, before: Any, now: Any) -> ConfigurationError:
        values = ["none" if value is None else str(value) for value in (before, now)]
        what = f"another {name.replace('_', ' ')}: {values[0]} there, {values[1]} here"
        return ConfigurationError(f"the run in {self.path} has {what}; pass the same or choose another --out")


def to_json_lines(records: list[dict[str, Any]]) -> str:
    """Flat records as JSON, one per line; a single call of the encoder for all is five times as fast."""
    return json.dumps(records, allow_nan=False)[1:-1].replace("}, {", "}\n{") + "\n" if records else ""


def lock_file(file: IO[Any]) -> None:
    """Locks an open file until it is closed or the process ends, or warns where the file system has no locks.
    BlockingIOError if another process has locked it.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        problem = f"the file system of {file.name} has no locks ({error.strerror})"
        warnings.warn(f"{problem}: start no second process in its directory meanwhile", HastenWarning, stacklevel=3)


def atomic_write(path: Path, write: Callable[[BinaryIO], object], advice: str = FREE_THE_DISK) -> None:
    """Replaces ``path`` by a complete file: readers see the old or the new one. RunError if it cannot be written."""
    temporary = path.with_name(path.name + TEMPORARY)
    with translate_disk_errors(path, advice):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name must reach the disk, too
        finally:
            os.close(directory)
