"""The trial store: every finished trial is written to a file at once, so that no search measures anything twice.

One JSON line per trial, with a key made of everything that its outcome depends on. A search that was killed and is
started again makes the same decisions, and finds the outcomes here.
"""

import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.engine.error_messages import translate_disk_errors
from hasten.engine.run_dir import lock_file

FILE, LOCK = "trials.jsonl", "lock"
BEGIN = '{"key": '  # of every line
FREE_THE_DISK = "what was measured before is kept; free the disk, and the same command continues the search"
TRANSIENT_FAILURES = (  # of the machine at that moment, not of the recipe
    "memory ran out",
    "out of memory",
    "busy or unavailable",  # a GPU that another process has for itself
    "the process was",
    "took longer",
    "no such file",
    "input/output error",
    "stale file handle",
    "no space left",
    "disk is full",
    "quota exceeded",
    "failed writing file",
    "fit into memory",
    "connection",
)


class TrialStore:
    """The trials of one search, which has its directory for itself from here on.

    Args:
        directory: Where the file of the trials lies; created if missing.
        settings: Part of every key: what all trials share (task, device, versions, machine). They can be set later.

    Raises:
        ConfigurationError: Another search is running there, or the directory cannot be used.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]):
        self.path, self.settings = directory / FILE, dict(settings)
        self.outcomes: dict[str, dict] = {}  # by key
        self.reused = 0  # number of trials that were answered from the file of an earlier search
        self._made = [path for path in (directory / LOCK, directory, *directory.parents) if not path.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = (directory / LOCK).open("a")
            self._unlock = weakref.finalize(self, lock.close)  # releases the lock, as does the end of the process
            lock_file(lock)
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []
        except BlockingIOError:
            raise ConfigurationError(
                f"another search is running in {directory}; wait for it or choose another --out"
            ) from None
        except OSError as error:
            self._remove_made()
            raise ConfigurationError(f"cannot use {directory}: {error.strerror}; choose another --out") from None
        damaged = 0
        for line in lines:
            try:
                entry = json.loads(line)
                self.outcomes[entry["key"]] = entry["outcome"]
            except (ValueError, KeyError, TypeError):
                damaged += line[: len(BEGIN)] != BEGIN[: len(line)]  # else a search was killed
        if damaged:
            what = f"{damaged} of {len(lines)} lines of {self.path} cannot be read"
            warnings.warn(f"{what}; these trials are measured again", HastenWarning, stacklevel=2)
        self._from_file = set(self.outcomes)

    def leave(self) -> None:
        """Gives up a search that was refused: removes the directories that were made for it, and releases the lock."""
        self._remove_made()
        self._unlock()

    def _remove_made(self) -> None:
        for path in self._made:
            with suppress(OSError):  # it was never made, or something else lies there by now
                path.rmdir() if path.is_dir() else path.unlink()

    def trial(
        self, kind: str, what: Mapping[str, Any], measure: Callable[[], dict], failure_lasts: bool = True
    ) -> tuple[str, dict]:
        """(key, outcome) of a trial: from the store, or measured now and written before anything else happens.

        The key is made of ``kind``, ``what`` and the settings. The outcome has ``failed`` if the trial failed; then it
        is not written to the file if ``failure_lasts`` is False, as for the task's own failures, which the user may
        fix, or if the cause is of the moment (TRANSIENT_FAILURES).

        Raises:
            RunError: the file cannot be written.
        """
        key = self._key(kind, what)
        if key in self.outcomes:
            self.reused += key in self._from_file
            self._from_file.discard(key)  # counted once
            return key, self.outcomes[key]
        outcome = self.outcomes[key] = measure()
        failure = outcome.get("failed")
        is_refused = not outcome.get("passed", True)  # by a check of exactness
        why = failure or (outcome.get("why", "") if is_refused else "")
        is_transient = any(text in why.lower() for text in TRANSIENT_FAILURES)
        if is_transient or (failure is not None and not failure_lasts):
            return key, outcome  # for this search only; the next one tries again
        with translate_disk_errors(self.path, FREE_THE_DISK), self.path.open("a", encoding="utf-8") as file:
            if file.tell() and not self.path.read_bytes().endswith(b"\n"):
                file.write("\n")
            entry = {"key": key, "kind": kind, "what": what, "outcome": outcome}
            file.write(json.dumps(entry, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return key, outcome

    def __contains__(self, trial: tuple[str, Mapping[str, Any]]) -> bool:
        """Whether the outcome of a trial ``(kind, what)`` is known."""
        return self._key(*trial) in self.outcomes

    def _key(self, kind: str, what: Mapping[str, Any]) -> str:
        text = json.dumps([kind, what, self.settings], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]
