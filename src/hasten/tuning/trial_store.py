"""Every finished trial, written down at once, so that no search measures anything twice.

One JSON line a trial, keyed by everything that its outcome depends on. A search that was killed goes
on where it stopped: it walks the same path and finds the answers already here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from hasten.core.errors import ConfigurationError, RunError

FILE, LOCK = "trials.jsonl", "lock"
PASSING = (
    "memory ran out",
    "out of memory",
    "the process was",
    "took longer",
    "no such file",
    "input/output error",
    "stale file handle",
    "no space left",
    "connection",
)  # failures of the moment, not of the recipe


class TrialStore:
    """The trials of one search. ``setting``: what all of them share (task, device, versions, machine)."""

    def __init__(self, folder: Path, setting: dict):
        self.path, self.setting = folder / FILE, setting
        self.known: dict[str, dict] = {}
        self.found = 0  # trials answered from the file
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = (folder / LOCK).open("a")  # held as long as the search lives, however it ends
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []
        except BlockingIOError:
            raise ConfigurationError(
                f"another search is running in {folder}; wait for it or choose another --out"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot use {folder}: {error.strerror}; choose another --out") from None
        for line in lines:
            try:
                entry = json.loads(line)
                self.known[entry["key"]] = entry
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when the search was killed
        self.from_before = set(self.known)

    def trial(self, kind: str, what: dict, measure: Callable[[], dict], failure_lasts: bool = True) -> tuple[str, dict]:
        """(key, outcome) of a trial: remembered, or measured now and written down before anything else happens.

        Args:
            failure_lasts: a failure would be the same another time; unlike that of the task itself, whose data may be mended.
        """
        key = self._key(kind, what)
        if key in self.known:
            self.found += key in self.from_before
            self.from_before.discard(key)  # found once, however often it is asked for
            return key, self.known[key]["outcome"]
        outcome = measure()
        self.known[key] = entry = {"key": key, "kind": kind, "what": what, "outcome": outcome}
        if "failed" in outcome and (not failure_lasts or any(words in outcome["failed"].lower() for words in PASSING)):
            return key, outcome  # another time it may work: known to this search, not to the next
        try:
            with self.path.open("a", encoding="utf-8") as file:
                if file.tell() and not self._ends_whole():
                    file.write("\n")
                file.write(json.dumps(entry, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from None
        return key, outcome

    def knows(self, kind: str, what: dict) -> bool:
        return self._key(kind, what) in self.known

    def _key(self, kind: str, what: dict) -> str:
        return hashlib.sha256(json.dumps([kind, what, self.setting], sort_keys=True, default=str).encode()).hexdigest()[
            :24
        ]

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
