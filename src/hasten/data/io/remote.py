"""Remote files through fsspec (s3, gs, http, hf, ...; https://filesystem-spec.readthedocs.io), with retries.

Own code where fsspec does not suffice: fsspec retries nothing over HTTP, its HTTP ``find`` and ``glob`` treat a page
that does not answer as an empty directory, and its ``glob`` selects hidden files and does not descend into directories
that match, as local patterns do.
"""

import io
import re
import time
import warnings
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import cache, lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hasten.core.errors import ConfigurationError, HastenWarning, ProgressWarning, RunError, format_error

RETRY_DELAYS_S = (1.0, 2.0, 4.0)
MAX_REQUESTS = 32  # concurrent
SHARD_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")  # behind the suffix, in the names of TensorFlow
READ_TIMEOUT_S = 30.0  # without a byte from a web server, after which the request is repeated
# Keys of fsspec's info() that change with a file; those that depend on the content come first.
VERSION_FIELDS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id")
VERSION_FIELDS += ("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
# Errors that a retry does not remove.
PERMANENT_ERRORS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, ValueError)
RETRIED_STATUSES = (408, 425, 429)  # the HTTP statuses from 400 to 499 after which a retry may help
MISSING_STATUSES = (404, 410)  # HTTP statuses of files that do not exist
NO_RANGES = (
    "the server does not support range requests, which reading parts of this file requires; "
    "download the file, or use a server that supports them"
)

T = TypeVar("T")

_supports_ranges: dict[tuple[str, str], bool] = {}  # {(scheme, server): whether it answers range requests}


class NotFoundError(ConfigurationError):
    """A remote file or directory does not exist, according to its server."""


def matches(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    """Returns the files that a remote path, directory or pattern selects; none if it does not exist. ConfigurationError
    if the pattern is no valid address or the server refuses the request, RunError if it does not answer.
    """
    system, name = _system(pattern)
    is_web = _is_web(pattern)
    ls = partial(_links, system) if is_web else partial(system.ls, detail=True)
    find = partial(_find_links, system) if is_web else system.find

    def expand() -> list[str]:
        system.invalidate_cache()  # s3fs, gcsfs and huggingface_hub keep old listings
        if magic := re.search(r"[*[]" if is_web else r"[*?[]", name):  # in an address, a question mark begins the query
            begin = name.rfind("/", 0, magic.start()) + 1
            directory = name[:begin] if is_web else name[:begin].rstrip("/")
            return [*_glob(ls, find, directory, name[begin:].split("/"), suffixes)]
        if _is_page(system, name, suffixes) if is_web else system.info(name)["type"] == "directory":
            return [*_glob(ls, find, name, [], suffixes)]
        if is_web:
            system.info(name)  # raises if there is no such file
        return [name]

    try:
        return [_address(system, pattern, name, path) for path in _with_retries(pattern, expand)]
    except NotFoundError:
        return []


def address_of(path: str) -> str:
    """Returns a remote path as ``matches`` returns it."""
    system, name = _system(path)
    return _address(system, path, name, name)


def _address(system: Any, pattern: str, name: str, path: str) -> str:
    """The address of ``path`` in ``system``, which ``pattern`` named as ``name``; with user and server, if there."""
    pattern = pattern.rstrip("/")
    if system._get_kwargs_from_urls(pattern) and pattern.endswith(name):
        return pattern.removesuffix(name) + path
    return system.unstrip_protocol(path)


def remote_signature(path: str) -> list:
    """Returns [path, size in bytes, version] of a remote file; version is None, after a warning, if it has none."""
    system, name = _system(path)
    system.invalidate_cache()
    options = {"expand_info": True} if path.startswith("hf://") else {}  # else the Hub gives no version
    info = _with_retries(path, lambda: system.info(name, **options))
    version = next((str(info[key]) for key in VERSION_FIELDS if key in info), None)
    if version is None:
        _warn_no_version(*urlsplit(path)[:2])
    return [path, info.get("size"), version]


def fetch_ranges(ranges: list[tuple[str, int | None, int | None]]) -> list[bytes | None]:
    """Requests ranges (path, begin, end), or whole files (path, None, None), concurrently and without retries.

    The content of a range is None if its request failed or returned fewer bytes. Read such a range by itself, with
    retries or a clear error.
    """
    contents: list[bytes | None] = [None] * len(ranges)
    by_system: dict[int, tuple[Any, list[tuple[int, str]]]] = {}
    for index, (path, begin, _) in enumerate(ranges):
        system, name = _system(path)
        if begin is None or _answers_ranges(system, name):
            by_system.setdefault(id(system), (system, []))[1].append((index, name))
    for system, requests in by_system.values():
        limit = {"batch_size": MAX_REQUESTS} if system.async_impl else {}
        names, begins, ends = zip(*((name, *ranges[index][1:]) for index, name in requests), strict=True)
        answers = system.cat_ranges([*names], [*begins], [*ends], on_error="return", **limit)
        for (index, _), begin, end, content in zip(requests, begins, ends, answers, strict=True):
            if isinstance(content, bytes) and (begin is None or len(content) == end - begin):
                contents[index] = content
    return contents


class RemoteFile(io.RawIOBase):
    """A remote file for reading, which is reopened at its position when the connection breaks; fsspec's files are not.
    ConfigurationError if it does not exist or its server does not report its size, RunError after four failures.
    """

    def __init__(self, path: str):
        self._path, self._position, self._file = path, 0, None
        self._size = _with_retries(path, lambda: self._open().size)
        if self._size is None:
            problem = f"{path}: the server does not report the file's size, which reading parts of it requires"
            raise ConfigurationError(f"{problem}; download it")

    def _open(self) -> Any:
        if self._file is None:
            system, name = _system(self._path)
            self._file = system.open(name, "rb")
        return self._file

    def readinto(self, buffer: Any) -> int:
        def read() -> bytes:
            try:
                file = self._open()
                file.seek(self._position)
                return file.read(len(buffer))
            except Exception:
                self._file = None
                raise

        try:
            data = _with_retries(self._path, read)
        except ConfigurationError as error:  # the file could be opened, so the request was right
            raise RunError(str(error)) from None
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


def _system(path: str) -> tuple[Any, str]:
    """(fsspec file system of an address, path in that file system); ConfigurationError if fsspec is not installed."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigurationError(f"reading {path} requires fsspec: pip install 'hasten[data]'") from None
    return _with_retries(path, lambda: url_to_fs(path, **_options(path)))


def _answers_ranges(system: Any, name: str) -> bool:
    """Whether a server answers range requests; one that does not would send the whole file for each range."""
    if not _is_web(name):
        return True
    server = urlsplit(name)[:2]
    if server not in _supports_ranges:
        try:
            _supports_ranges[server] = len(system.cat_file(name, 0, 1)) == 1
        except Exception:
            return False  # reading the range by itself raises the reason
    return _supports_ranges[server]


def _options(path: str) -> dict[str, Any]:
    """Returns options for fsspec: for HTTP a timeout per read, not per download, unless the user's fsspec settings
    have one; for other addresses none.
    """
    if not _is_web(path):
        return {}
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        raise ConfigurationError(f"reading {path} requires aiohttp: pip install 'hasten[data]'") from None
    from fsspec.config import apply_config
    from fsspec.implementations.http import HTTPFileSystem

    timeout = ClientTimeout(total=None, sock_connect=READ_TIMEOUT_S / 2, sock_read=READ_TIMEOUT_S)
    configured = apply_config(HTTPFileSystem, {}).get("client_kwargs", {})  # the user's login and proxy
    return {"client_kwargs": {"timeout": timeout} | configured}


def _is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


@lru_cache
def matcher(pattern: str) -> Callable[[str], bool]:
    """Returns ``(name) -> bool`` for one part of a path; only a pattern with a leading dot matches hidden names."""
    match = re.compile(translate(pattern)).match
    return lambda name: match(name) is not None and (pattern.startswith(".") or not name.startswith("."))


def _glob(ls: Callable, find: Callable, directory: str, pattern: list[str], suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yields the files in ``directory`` that match ``pattern`` (split at its slashes), as for local patterns.

    Directories are listed level by level, so that no directory that the pattern excludes is requested; from ``**`` on,
    and in a directory that matches, all are.
    """
    if not pattern or pattern[0] == "**":
        files = ((path, path.removeprefix(directory).lstrip("/").split("/")) for path in find(directory))
        yield from (path for path, parts in files if _matches(parts, pattern, suffixes))
        return
    is_match = matcher(pattern[0])
    for entry in ls(directory):
        path = entry["name"].rstrip("/")
        if path == directory.rstrip("/") or not is_match(path.rpartition("/")[2]):
            continue
        if entry["type"] == "directory":
            yield from _glob(ls, find, path, pattern[1:], suffixes)
        elif len(pattern) == 1:  # a file, or a link, whose type differs between file systems
            yield path


def has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether the name of a file ends in one of some suffixes (none: any), perhaps before the number of a shard."""
    return not suffixes or SHARD_NUMBER.sub("", name.lower()).endswith(suffixes)


def _matches(parts: list[str], pattern: list[str], suffixes: tuple[str, ...]) -> bool:
    """Whether a pattern selects a file: itself, or by a directory above it if its name ends in one of ``suffixes``."""
    if not pattern:
        is_hidden = any(part.startswith(".") for part in parts)
        return not is_hidden and has_suffix(parts[-1], suffixes)
    if pattern[0] == "**" and len(pattern) > 1:
        deeper = len(parts) > 1 and not parts[0].startswith(".") and _matches(parts[1:], pattern, suffixes)
        return deeper or _matches(parts, pattern[1:], suffixes)
    if not matcher(pattern[0])(parts[0]):
        return False
    return len(pattern) == 1 if len(parts) == 1 else _matches(parts[1:], pattern[1:], suffixes)


def _is_page(system: Any, name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether an HTTP address is a directory (a page of links); False, without a request, if it ends in a suffix."""
    before_query = name.partition("?")[0]
    is_file = suffixes and any(has_suffix(text, suffixes) for text in (name, before_query))
    return not is_file and bool(_links(system, name))


def _find_links(system: Any, directory: str) -> Iterator[str]:
    """Yields the files that an HTTP page of links, and the pages below it, link to."""
    for entry in _links(system, directory):
        path = entry["name"].rstrip("/")
        if entry["type"] != "directory":
            yield path
        elif path != directory.rstrip("/"):
            yield from _find_links(system, path)


def _links(system: Any, page: str) -> list[dict]:
    try:
        return _with_retries(page, lambda: system.ls(page, detail=True))
    except NotFoundError:
        return []


@cache
def _warn_no_version(scheme: str, server: str) -> None:
    """Warns, once per server, that its files have no version, so that changes cannot be noticed."""
    warnings.warn(
        f"{scheme}://{server} reports neither a version nor a modification time of its files: "
        "a changed file is detected only if its size differs, also by .cache('disk')",
        HastenWarning,
        stacklevel=2,
    )


def _with_retries(path: str, request: Callable[[], T]) -> T:
    """Returns ``request()``, repeated after growing delays while the server fails; RunError after the last one.
    NotFoundError if the file does not exist, ConfigurationError for another error that a retry does not remove.
    """
    for attempt in range(len(RETRY_DELAYS_S) + 1):
        try:
            return request()
        except (ConfigurationError, RunError):
            raise
        except Exception as error:  # each file system has its own error classes
            if "range requests" in str(error):
                raise ConfigurationError(f"{path}: {NO_RANGES}") from None
            cause = _cause(error)
            reason, status = format_error(cause), getattr(cause, "status", None)
            if isinstance(status, int):
                is_permanent = 400 <= status < 500 and status not in RETRIED_STATUSES
            else:
                is_permanent = isinstance(cause, PERMANENT_ERRORS)
            if is_permanent:
                is_missing = status in MISSING_STATUSES or isinstance(cause, FileNotFoundError)
                kind = NotFoundError if is_missing else ConfigurationError
                raise kind(f"cannot read {path}: {reason}") from None
            if attempt == len(RETRY_DELAYS_S):
                attempts = f"{attempt + 1} attempts: {reason}; check the network and the server"
                raise RunError(f"cannot reach {path} after {attempts}") from None
            delay = RETRY_DELAYS_S[attempt]
            warnings.warn(f"{path} failed ({reason}); next attempt in {delay:g} s", ProgressWarning, stacklevel=2)
            time.sleep(delay)
    raise AssertionError("unreachable")


def _cause(error: Exception) -> BaseException:
    """The error behind fsspec's FileNotFoundError, which it raises for every failed HTTP request."""
    cause = error.__cause__
    if cause is None or not isinstance(error, FileNotFoundError):
        return error
    is_web_error = type(cause).__module__.startswith("aiohttp.")
    return cause if is_web_error or isinstance(cause, (TimeoutError, ConnectionError, ValueError)) else error
