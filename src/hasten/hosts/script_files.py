"""The files that decide what a script does: code and configuration below its directory, and files of its command.

They are read once, when a search or another command begins. Whether they are still the same is known from their times
and sizes, without reading them again.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

MAX_FILES, MAX_BYTES = 2000, 1 << 20  # files that are read, and the size of each
MAX_ENTRIES = 20_000  # names that are looked at: a data set beside the script may hold millions
MAX_OF_CODE = 500  # names in a directory below that of the script, from which on it holds data
WRITTEN = ("runs", "node_modules", "__pycache__", "wandb", "mlruns", "outputs", "multirun", "lightning_logs", "logs")
# files of an environment, a search, a run
MADE_IN = ({"pyvenv.cfg"}, {"trials.jsonl", "lock"}, {"environment.json", "log.jsonl"})
CODE = (".py", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg")  # and configuration, which decides what code does
DECIDING = {*CODE, ".json", ""}  # suffixes of files that a run does not write, also where the command names them

_State = tuple[int, int]  # time of the last change in ns, size in bytes


class ScriptChangedError(Exception):
    """A file of a script has changed since a search or another command began; it ends that command with exit code 2.

    It is neither a RunError nor a ConfigurationError, which count as the result of one trial: all later trials would
    measure another script.
    """


class ScriptFiles:
    """The files of a script as they are when this object is made.

    Args:
        directory: Below it lies the code.
        argv: The command, which runs in ``cwd``.
        began: What they were read for: "search", or "command" for any other one.

    Attributes:
        digest: A hash of the command and of the content of the files.
    """

    def __init__(self, directory: Path, argv: Sequence[str], cwd: str, began: str):
        self.began = began
        self.known: dict[Path, tuple[_State, bytes]] = {}
        digest = hashlib.sha256(json.dumps([list(argv), cwd]).encode())
        for path in dict.fromkeys([*code_files(directory), *(Path(cwd, argument) for argument in argv[1:])]):
            with suppress(OSError, ValueError):  # editors leave links to nothing; an argument may be no name of a file
                if path.is_file() and path.stat().st_size <= MAX_BYTES:
                    self.known[path] = _state_of(path), _digest_of(path)
                    digest.update(self.known[path][1])
        self.digest = digest.hexdigest()

    def changed(self) -> Path | None:
        """A file with another content than before, or that is gone; None if there is none. New files do not count."""
        deciding = (path for path in self.known if path.suffix in DECIDING)
        return next((path for path in deciding if not self._is_same(path)), None)

    def _is_same(self, path: Path) -> bool:
        state, digest = self.known[path]
        try:
            if (now := _state_of(path)) == state:
                return True
            if _digest_of(path) != digest:
                return False
        except OSError:
            return False
        self.known[path] = now, digest  # saved without a change
        return True


def code_files(directory: Path) -> list[Path]:
    """Files of CODE below a directory, those of its upper levels first.

    None in hidden directories, those of WRITTEN, those that hold the files of one of MADE_IN, and those with more than
    MAX_OF_CODE names. At most MAX_FILES, among the first MAX_ENTRIES names.
    """
    return list(islice((path for entries in _directories(directory) for path in _code_among(entries)), MAX_FILES))


def _directories(top: Path) -> Iterator[list[os.DirEntry[str]]]:
    """The entries of each directory below ``top`` that may hold code, sorted by name; upper levels first."""
    left, waiting = MAX_ENTRIES, deque([top])
    while waiting and left > 0:
        directory = waiting.popleft()
        most = left if directory == top else min(left, MAX_OF_CODE)
        entries = _entries_of(directory, most + 1)
        left -= len(entries)
        if directory != top and (len(entries) > most or _are_written(entries)):
            continue
        yield entries
        below = (entry for entry in entries if entry.is_dir(follow_symlinks=False))
        waiting.extend(Path(entry) for entry in below if entry.name[0] != "." and entry.name not in WRITTEN)


def _entries_of(directory: Path, most: int) -> list[os.DirEntry[str]]:
    """Up to ``most`` entries of a directory, sorted by name; none if it cannot be read."""
    with suppress(OSError), os.scandir(directory) as entries:
        return sorted(islice(entries, most), key=lambda entry: entry.name)
    return []


def _are_written(entries: list[os.DirEntry[str]]) -> bool:
    """Whether a directory with these entries is that of an environment, a search or a run."""
    names = {entry.name for entry in entries}
    return any(files <= names for files in MADE_IN)


def _code_among(entries: list[os.DirEntry[str]]) -> Iterator[Path]:
    ours = "recipe.toml" if _are_written(entries) else ""  # of a search with --out . beside the script
    files = (entry for entry in entries if entry.name.endswith(CODE) and not entry.is_dir(follow_symlinks=False))
    return (Path(entry) for entry in files if entry.name != ours)


def _state_of(path: Path) -> _State:
    about = path.stat()
    return about.st_mtime_ns, about.st_size


def _digest_of(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
