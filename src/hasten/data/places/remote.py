"""Files in other places, through fsspec (s3, gs, http, hf, ...; https://filesystem-spec.readthedocs.io), with patience."""

from __future__ import annotations

import io
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from glob import has_magic
from urllib.parse import urlsplit

from hasten.contract.errors import Failure, Notice, Progress, Refusal, one_line
from hasten.data.places.walks import matcher

WAITS = (1.0, 2.0, 4.0)  # seconds before a file is asked for again
AT_ONCE = 32  # requests on their way
SILENT = 30.0  # seconds without a byte from a web server, after which it is asked again
MARKS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "Digest",
    "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created",
)  # fmt: skip  # what file systems call a version, those first that follow the content
HOPELESS = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    ImportError,
    ValueError,
)  # asking again does not help
BUSY = (408, 425, 429)  # of a web server's answers that blame who asks (400 to 499), those that ask for patience
NO_RANGES = (
    "the server gives whole files only (no range requests), and this kind is read in parts; download it, or take a server that has them"
)
GONE = (404, 410)  # and those that say that there is nothing

_in_parts: dict[tuple[str, str], bool] = {}  # which web servers give parts of files


class Nothing(Refusal):
    """There is no such file, and whoever was asked says so."""


def matches(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    """The files that a remote path, folder or pattern means."""
    system, name = _system(pattern)
    try:
        if _is_web(pattern):
            paths = _on_the_web(system, name, suffixes)
        else:
            paths = _patiently(pattern, lambda: _elsewhere(system, name, suffixes))
    except Nothing:
        return []
    return [system.unstrip_protocol(path) for path in paths]


def mark_of(path: str) -> list:
    """[path, bytes, version] of a remote file; the version is None where the other side tells none, which a Notice says."""
    system, name = _system(path)
    system.invalidate_cache()
    about = _patiently(path, lambda: system.info(name))
    version = next((str(about[mark]) for mark in MARKS if mark in about), None)
    if version is None:
        _tell_of_no_version(*urlsplit(path)[:2])
    return [path, about.get("size"), version]


def at_once(wanted: list[tuple[str, int | None, int | None]]) -> list[bytes | None]:
    """Parts (path, begin, end) of remote files, or whole ones (path, None, None): most of what each takes is the way there and back.

    None stands for what did not come as it should. Whoever then asks for that by itself gets it with patience, or hears why not.
    """
    contents: list[bytes | None] = [None] * len(wanted)
    of_system: dict[int, tuple] = {}
    for number, (path, begin, _) in enumerate(wanted):
        system, name = _system(path)
        if begin is None or _gives_parts(system, name):
            of_system.setdefault(id(system), (system, []))[1].append((number, name))
    for system, those in of_system.values():
        limit = {"batch_size": AT_ONCE} if system.async_impl else {}
        begins, ends = ([wanted[number][which] for number, _ in those] for which in (1, 2))
        came = system.cat_ranges([name for _, name in those], begins, ends, on_error="return", **limit)
        for (number, _), content in zip(those, came, strict=True):
            _, begin, end = wanted[number]
            if isinstance(content, bytes) and (begin is None or len(content) == end - begin):
                contents[number] = content
    return contents


class RemoteFile(io.RawIOBase):
    """A remote file that is opened anew where it stood when the connection breaks."""

    def __init__(self, path: str):
        self._path, self._place, self._file = path, 0, None
        self._size = _patiently(path, lambda: self._open().size)
        if self._size is None:
            raise Refusal(f"{path} has no length that the other side tells, so nothing can be read from its middle; copy it here first")

    def _open(self):
        if self._file is None:
            system, name = _system(self._path)
            self._file = system.open(name, "rb")
        return self._file

    def readinto(self, buffer) -> int:
        def ask() -> bytes:
            try:
                file = self._open()
                file.seek(self._place)
                return file.read(len(buffer))
            except Exception:
                self._file = None
                raise

        try:
            data = _patiently(self._path, ask)
        except Refusal as refused:  # it could be opened: what was asked for was right
            raise Failure(str(refused)) from None
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


def _system(path: str):
    """(file system, path in it)."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise Refusal(f"reading {path} needs fsspec: pip install 'hasten[data]'") from None
    return _patiently(path, lambda: url_to_fs(path, **_settings(path)))


def _gives_parts(system, name: str) -> bool:
    """Whether a server heeds the range that is asked for: of one that does not, each would be the whole file."""
    if not _is_web(name):
        return True
    server = urlsplit(name)[:2]
    if server not in _in_parts:
        try:
            _in_parts[server] = len(system.cat_file(name, 0, 1)) == 1
        except Exception:
            return False  # who asks for it alone hears why
    return _in_parts[server]


def _settings(path: str) -> dict:
    """A web server that says nothing more is given up after some time; by itself, aiohttp would wait five minutes, also while it reads."""
    if not _is_web(path):
        return {}
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        raise Refusal(f"reading {path} needs aiohttp: pip install 'hasten[data]'") from None
    from fsspec.config import apply_config
    from fsspec.implementations.http import HTTPFileSystem

    said = apply_config(HTTPFileSystem, {}).get("client_kwargs", {})  # by the user, whose login and proxy stay
    return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=SILENT / 2, sock_read=SILENT)} | said}


def _is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _elsewhere(system, name: str, suffixes: tuple[str, ...]) -> list[str]:
    if has_magic(name):
        folder, *pattern = re.split(r"/(?=[^/]*[*?[])", name, maxsplit=1)  # at the first part that is no plain name
        folder, pattern = (folder, *pattern) if pattern else ("", name)
        return [*_globbed(system, folder, pattern.split("/"), suffixes)]
    if system.info(name)["type"] == "directory":
        return [path for path in system.find(name) if _wanted(path, name, suffixes)]
    return [name]


def _globbed(system, folder: str, pattern: list[str], suffixes: tuple[str, ...]) -> Iterator[str]:
    """The files in a folder that a pattern means, by its parts, as on the disk.

    Level by level, so that only what may be meant is asked for; from ``**`` on, and in a folder that is meant, everything is.
    """
    if not pattern or pattern[0] == "**":
        inside = ((path, path.removeprefix(folder).lstrip("/").split("/")) for path in system.find(folder))
        yield from (path for path, parts in inside if _fits(parts, pattern, suffixes))
        return
    matches = matcher(pattern[0])
    for entry in system.ls(folder, detail=True):
        path = entry["name"].rstrip("/")
        if path == folder.rstrip("/") or not matches(path.rpartition("/")[2]):
            continue
        if entry["type"] == "directory":
            yield from _globbed(system, path, pattern[1:], suffixes)
        elif len(pattern) == 1:  # a file, or whatever else is none of the folders, as a link
            yield path


def _fits(parts: list[str], pattern: list[str], suffixes: tuple[str, ...]) -> bool:
    """Whether a file, by the parts of its path, is what a pattern means, or lies in a folder that is."""
    if not pattern:
        return not any(part.startswith(".") for part in parts) and (not suffixes or parts[-1].lower().endswith(suffixes))
    if pattern[0] == "**" and len(pattern) > 1:
        deeper = len(parts) > 1 and not parts[0].startswith(".") and _fits(parts[1:], pattern, suffixes)
        return deeper or _fits(parts, pattern[1:], suffixes)
    if not matcher(pattern[0])(parts[0]):
        return False
    return len(pattern) == 1 if len(parts) == 1 else _fits(parts[1:], pattern[1:], suffixes)


def _on_the_web(system, name: str, suffixes: tuple[str, ...]) -> list[str]:
    """A folder is a page of links there; none is looked for where the name is a file's."""
    if magic := re.search(r"[*[]", name):  # a question mark stands before a query
        from fsspec.utils import glob_translate

        begin = name.rindex("/", 0, magic.start()) + 1
        fits = _patiently(name, lambda: re.compile(glob_translate(name)).match)
        return [path for path in _walked(system, name[:begin], math.inf if "**" in name else name.count("/", begin) + 1) if fits(path)]
    before_query = name.partition("?")[0]
    named_as_file = suffixes and any(each.lower().endswith(suffixes) for each in (name, before_query))
    if not named_as_file and _links(system, name):
        return [path for path in _walked(system, name) if _wanted(path, name, suffixes)]
    _patiently(name, lambda: system.info(name))
    return [name]


def _wanted(path: str, folder: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file in a folder is one of those asked for; hidden ones are passed over, as on the disk."""
    return "/." not in path.removeprefix(folder.rstrip("/")) and (not suffixes or path.lower().endswith(suffixes))


def _walked(system, folder: str, levels: float = math.inf) -> Iterator[str]:
    """The files that a page links to, and the pages below it, so many levels deep.

    fsspec's own walk takes a page that does not answer for an empty one, and what lies there for nothing.
    """
    for entry in _links(system, folder):
        path = entry["name"].rstrip("/")
        if entry["type"] != "directory":
            yield path
        elif levels > 1 and path != folder.rstrip("/"):
            yield from _walked(system, path, levels - 1)


def _links(system, page: str) -> list[dict]:
    try:
        return _patiently(page, lambda: system.ls(page, detail=True))
    except Nothing:
        return []


@cache
def _tell_of_no_version(scheme: str, server: str) -> None:
    """Once for each server."""
    what = f"{scheme}://{server} tells neither a version nor a time of its files: a change is noticed only where the length differs"
    warnings.warn(f"{what}, also by .cache('disk')", Notice, stacklevel=2)


def _patiently(path: str, ask: Callable):
    """What ``ask()`` gives, asked again with growing pauses while the other side fails."""
    for wait in (*WAITS, None):
        try:
            return ask()
        except Refusal:
            raise
        except Exception as error:  # each file system has errors of its own
            if "range requests" in str(error):
                raise Refusal(f"{path}: {NO_RANGES}") from None
            if _is_hopeless(error):
                kind = Nothing if _is_gone(error) else Refusal
                raise kind(f"cannot read {path}: {one_line(_cause(error))}") from None
            if wait is None:
                raise Failure(f"{path} cannot be reached, asked {len(WAITS) + 1} times: {one_line(_cause(error))}") from None
            told = f"{path} did not answer ({one_line(_cause(error))}); it is asked again in {wait:g} s"
            warnings.warn(told, Progress, stacklevel=2)
            time.sleep(wait)


def _is_hopeless(error: Exception) -> bool:
    """Whether asking again does not help."""
    cause = _cause(error)
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in BUSY
    return isinstance(cause, HOPELESS)


def _is_gone(error: Exception) -> bool:
    """Whether it says that there is nothing, rather than that one may not have it."""
    cause = _cause(error)
    return getattr(cause, "status", None) in GONE or isinstance(cause, FileNotFoundError)


def _cause(error: BaseException) -> BaseException:
    """What really went wrong: of whatever cannot be asked for on the web, fsspec says that there is no such file."""
    cause = error.__cause__
    of_the_web = isinstance(cause, (TimeoutError, ConnectionError, ValueError)) or type(cause).__module__.startswith("aiohttp.")
    return cause if isinstance(error, FileNotFoundError) and of_the_web else error
