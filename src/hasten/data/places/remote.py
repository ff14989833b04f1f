"""Files in other places, through fsspec (s3, gs, http, hf, ...; https://filesystem-spec.readthedocs.io), with patience."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from glob import has_magic

from hasten.contract.errors import Failure, Refusal, one_line

WAITS = (1.0, 2.0, 4.0)  # seconds before a file is asked for again
MARKS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")  # what file systems call a version
HOPELESS = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    ImportError,
    ValueError,
)  # asking again does not help


def matches(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    """The files that a remote path, folder or pattern means."""
    system, name = _system(pattern)

    def look() -> list[str]:
        if has_magic(name):
            return [path for path, about in system.glob(name, detail=True).items() if about["type"] == "file"]
        if system.isdir(name):
            return [path for path in system.find(name) if not suffixes or path.lower().endswith(suffixes)]
        return [name] if system.exists(name) else []

    return [system.unstrip_protocol(path) for path in _patiently(pattern, look)]


def mark_of(path: str) -> list:
    """[path, bytes, version] of a remote file."""
    system, name = _system(path)
    system.invalidate_cache()
    about = _patiently(path, lambda: system.info(name))
    return [path, about.get("size"), next((str(about[mark]) for mark in MARKS if mark in about), None)]


class RemoteFile(io.RawIOBase):
    """A remote file that is opened anew where it stood when the connection breaks."""

    def __init__(self, path: str):
        self._path, self._place, self._file = path, 0, None
        self._size = _patiently(path, lambda: self._open().size)

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

        data = _patiently(self._path, ask)
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
    return _patiently(path, lambda: url_to_fs(path))


def _patiently(path: str, ask: Callable):
    """What ``ask()`` gives, asked again with growing pauses while the other side fails."""
    for wait in (*WAITS, None):
        try:
            return ask()
        except Refusal:
            raise
        except HOPELESS as error:
            raise Refusal(f"cannot read {path}: {one_line(error)}") from None
        except Exception as error:  # each file system has errors of its own
            if wait is None:
                raise Failure(f"{path} cannot be reached, asked {len(WAITS) + 1} times: {one_line(error)}") from None
            time.sleep(wait)
