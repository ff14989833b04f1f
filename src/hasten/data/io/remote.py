"""Remote files through fsspec (s3, gs, http, hf, ...; https://filesystem-spec.readthedocs.io), with retries.

Own code where fsspec does not suffice: fsspec retries nothing over HTTP, its HTTP ``find`` and ``glob`` take a page
that does not answer for an empty folder, and its ``glob`` selects hidden files and does not descend into folders that
match, as local patterns do.
"""

from __future__ import annotations

import io
import re
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from urllib.parse import urlsplit

from hasten.core.errors import ConfigurationError, HastenWarning, ProgressWarning, RunError, format_error
from hasten.data.io.dir_walk import matcher

WAITS = (1.0, 2.0, 4.0)  # seconds before each retry
AT_ONCE = 32  # concurrent requests
SILENT = 30.0  # seconds without a byte from a web server, after which the request is repeated
VERSION_FIELDS = (  # keys of fsspec's info() that change with a file; those that follow the content come first
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "Digest",
    "mtime",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "updated",
    "created",
)
HOPELESS = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    ImportError,
    ValueError,
)  # a retry does not help
BUSY = (408, 425, 429)  # the HTTP statuses from 400 to 499 after which a retry may help
GONE = (404, 410)  # HTTP statuses of files that do not exist
NO_RANGES = (
    "the server gives whole files only (no range requests), and this kind is read in parts; "
    "download it, or take a server that has them"
)

_in_parts: dict[tuple[str, str], bool] = {}  # {(scheme, server): whether it answers range requests}


class NotFoundError(ConfigurationError):
    """A remote file or folder that does not exist, as its server states."""


def matches(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    """The files that a remote path, folder or pattern selects; none if it does not exist.

    Raises:
        Refusal: the pattern is no valid address, or the server refuses the request.
        Failure: the server does not answer.
    """
    system, name = _system(pattern)
    is_web = _is_web(pattern)
    ls, find = (
        (partial(_links, system), partial(_walked, system))
        if is_web
        else (partial(system.ls, detail=True), system.find)
    )

    def expand() -> list[str]:
        if magic := re.search(r"[*[]" if is_web else r"[*?[]", name):  # in an address, a question mark begins the query
            begin = name.rfind("/", 0, magic.start()) + 1
            folder = name[:begin] if is_web else name[:begin].rstrip("/")
            return [*_globbed(ls, find, folder, name[begin:].split("/"), suffixes)]
        if _is_page(system, name, suffixes) if is_web else system.info(name)["type"] == "directory":
            return [*_globbed(ls, find, name, [], suffixes)]
        if is_web:
            system.info(name)  # raises if there is no such file
        return [name]

    try:
        return [system.unstrip_protocol(path) for path in _with_retries(pattern, expand)]
    except NotFoundError:
        return []


def remote_signature(path: str) -> list:
    """[path, size in bytes, version] of a remote file; version is None, after a Notice, if the server states none."""
    system, name = _system(path)
    system.invalidate_cache()
    info = _with_retries(path, lambda: system.info(name))
    version = next((str(info[key]) for key in VERSION_FIELDS if key in info), None)
    if version is None:
        _tell_of_no_version(*urlsplit(path)[:2])
    return [path, info.get("size"), version]


def fetch_ranges(wanted: list[tuple[str, int | None, int | None]]) -> list[bytes | None]:
    """Requests ranges (path, begin, end), or whole files (path, None, None), concurrently and without retries.

    Returns:
        The content of each; None if its request failed, or gave fewer bytes. Read that one alone, with retries or a
        clear error.
    """
    contents: list[bytes | None] = [None] * len(wanted)
    by_system: dict[int, tuple] = {}
    for index, (path, begin, _) in enumerate(wanted):
        system, name = _system(path)
        if begin is None or _gives_parts(system, name):
            by_system.setdefault(id(system), (system, []))[1].append((index, name))
    for system, members in by_system.values():
        limit = {"batch_size": AT_ONCE} if system.async_impl else {}
        names, begins, ends = zip(*((name, *wanted[index][1:]) for index, name in members), strict=True)
        answers = system.cat_ranges([*names], [*begins], [*ends], on_error="return", **limit)
        for (index, _), content in zip(members, answers, strict=True):
            _, begin, end = wanted[index]
            if isinstance(content, bytes) and (begin is None or len(content) == end - begin):
                contents[index] = content
    return contents


class RemoteFile(io.RawIOBase):
    """A remote file that is reopened at its position when the connection breaks, which fsspec's own files are not."""

    def __init__(self, path: str):
        self._path, self._place, self._file = path, 0, None
        self._size = _with_retries(path, lambda: self._open().size)
        if self._size is None:
            raise ConfigurationError(
                f"{path}: the server does not state its size, which reading parts of it requires; copy it here first"
            )

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
            data = _with_retries(self._path, ask)
        except ConfigurationError as refused:  # the file could be opened, so the request was right
            raise RunError(str(refused)) from None
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
        raise ConfigurationError(f"reading {path} needs fsspec: pip install 'hasten[data]'") from None
    return _with_retries(path, lambda: url_to_fs(path, **_settings(path)))


def _gives_parts(system, name: str) -> bool:
    """Whether a server answers range requests; one that does not would send the whole file for each range."""
    if not _is_web(name):
        return True
    server = urlsplit(name)[:2]
    if server not in _in_parts:
        try:
            _in_parts[server] = len(system.cat_file(name, 0, 1)) == 1
        except Exception:
            return False  # reading the range alone raises the reason
    return _in_parts[server]


def _settings(path: str) -> dict:
    """A timeout for silent web servers (aiohttp's includes the download); the user's fsspec settings win."""
    if not _is_web(path):
        return {}
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        raise ConfigurationError(f"reading {path} needs aiohttp: pip install 'hasten[data]'") from None
    from fsspec.config import apply_config
    from fsspec.implementations.http import HTTPFileSystem

    configured = apply_config(HTTPFileSystem, {}).get("client_kwargs", {})  # the user's login and proxy
    return {
        "client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=SILENT / 2, sock_read=SILENT)} | configured
    }


def _is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _globbed(ls: Callable, find: Callable, folder: str, pattern: list[str], suffixes: tuple[str, ...]) -> Iterator[str]:
    """The files in a folder that a pattern, split at its slashes, selects: the same as of a local pattern.

    Lists level by level, so that no folder that the pattern excludes is requested; from ``**`` on, and in a folder that
    matches, all are.
    """
    if not pattern or pattern[0] == "**":
        inside = ((path, path.removeprefix(folder).lstrip("/").split("/")) for path in find(folder))
        yield from (path for path, parts in inside if _fits(parts, pattern, suffixes))
        return
    matches = matcher(pattern[0])
    for entry in ls(folder):
        path = entry["name"].rstrip("/")
        if path == folder.rstrip("/") or not matches(path.rpartition("/")[2]):
            continue
        if entry["type"] == "directory":
            yield from _globbed(ls, find, path, pattern[1:], suffixes)
        elif len(pattern) == 1:  # a file, or a link, whose type differs between file systems
            yield path


def _fits(parts: list[str], pattern: list[str], suffixes: tuple[str, ...]) -> bool:
    """Whether a pattern matches a file, given by the parts of its path, or a folder that contains it."""
    if not pattern:
        return not any(part.startswith(".") for part in parts) and (
            not suffixes or parts[-1].lower().endswith(suffixes)
        )
    if pattern[0] == "**" and len(pattern) > 1:
        deeper = len(parts) > 1 and not parts[0].startswith(".") and _fits(parts[1:], pattern, suffixes)
        return deeper or _fits(parts, pattern[1:], suffixes)
    if not matcher(pattern[0])(parts[0]):
        return False
    return len(pattern) == 1 if len(parts) == 1 else _fits(parts[1:], pattern[1:], suffixes)


def _is_page(system, name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether an address is that of a folder: a page of links. It is not requested if the name is that of a file."""
    before_query = name.partition("?")[0]
    named_as_file = suffixes and any(text.lower().endswith(suffixes) for text in (name, before_query))
    return not named_as_file and bool(_links(system, name))


def _walked(system, folder: str) -> Iterator[str]:
    """The files that a page and the pages below it link to."""
    for entry in _links(system, folder):
        path = entry["name"].rstrip("/")
        if entry["type"] != "directory":
            yield path
        elif path != folder.rstrip("/"):
            yield from _walked(system, path)


def _links(system, page: str) -> list[dict]:
    try:
        return _with_retries(page, lambda: system.ls(page, detail=True))
    except NotFoundError:
        return []


@cache
def _tell_of_no_version(scheme: str, server: str) -> None:
    """Warns once for each server."""
    what = f"{scheme}://{server} tells neither a version nor a time of its files"
    warnings.warn(
        f"{what}: a change is noticed only where the length differs, also by .cache('disk')",
        HastenWarning,
        stacklevel=2,
    )


def _with_retries(path: str, ask: Callable):
    """``ask()``, retried after growing pauses while the server fails.

    Raises:
        Nothing, Refusal: the error is one that a retry cannot remove. Failure: the last retry failed.
    """
    for wait in (*WAITS, None):
        try:
            return ask()
        except (ConfigurationError, RunError):
            raise
        except Exception as error:  # each file system has its own error classes
            if "range requests" in str(error):
                raise ConfigurationError(f"{path}: {NO_RANGES}") from None
            if _is_hopeless(error):
                kind = NotFoundError if _is_gone(error) else ConfigurationError
                raise kind(f"cannot read {path}: {format_error(_cause(error))}") from None
            if wait is None:
                raise RunError(
                    f"{path} cannot be reached, asked {len(WAITS) + 1} times: {format_error(_cause(error))}"
                ) from None
            told = f"{path} did not answer ({format_error(_cause(error))}); it is asked again in {wait:g} s"
            warnings.warn(told, ProgressWarning, stacklevel=2)
            time.sleep(wait)


def _is_hopeless(error: Exception) -> bool:
    """Whether a retry cannot help."""
    cause = _cause(error)
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in BUSY
    return isinstance(cause, HOPELESS)


def _is_gone(error: Exception) -> bool:
    """Whether the error means that the file does not exist, rather than that access is denied."""
    cause = _cause(error)
    return getattr(cause, "status", None) in GONE or isinstance(cause, FileNotFoundError)


def _cause(error: BaseException) -> BaseException:
    """The original error: fsspec raises FileNotFoundError for every failed HTTP request."""
    cause = error.__cause__
    of_the_web = isinstance(cause, (TimeoutError, ConnectionError, ValueError)) or type(cause).__module__.startswith(
        "aiohttp."
    )
    return cause if isinstance(error, FileNotFoundError) and of_the_web else error
