"""Finds the data of the workloads, or downloads them once and checks their SHA-256.

The search order is ``$HASTEN_DATA``, ``~/.cache/hasten`` (where downloads go) and the ``data`` directory of the
installed package.
"""

import gzip
import hashlib
import http.client
import importlib
import importlib.util
import io
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten import ConfigurationError, RunError

CHUNK_BYTES = 1 << 18
SERVER_TIMEOUT_S = 30  # without any data
TAR_BLOCK_BYTES = 512


@dataclass(frozen=True)
class File:
    """A file of a data set: its path in the data directory, its official address, and the SHA-256 of its content.

    ``reduced``: the SHA-256 of a smaller form of the file, which is accepted where it exists.
    """

    path: str
    address: str
    sha256: str
    reduced: str = ""


def download(file: File) -> Path:
    """Returns the path of the file, with a verified checksum; downloads it if it is in no data directory.

    ConfigurationError if the file exists and has another checksum. RunError if the download failed; the message names
    the address, and the path to put the file at by hand.
    """
    path = find_file(file.path)
    if path is None:
        return create_file(file.path, lambda partial: _download(file, partial))
    if (actual := _sha256(path)) not in (file.sha256, file.reduced):
        problem = f"{path} is not the expected file (sha256 {actual[:12]}…, not {file.sha256[:12]}…)"
        raise ConfigurationError(f"{problem}; remove it, or replace it with {file.address}")
    return path


def find_file(path: str) -> Path | None:
    """The file with this relative path in the first data directory that has it; None if none has."""
    return next((directory / path for directory in _directories() if (directory / path).is_file()), None)


def create_file(path: str, write: Callable[[Path], None]) -> Path:
    """Creates the file ``path`` of the download directory and returns its full path; RunError if it cannot be written.

    ``write`` gets a temporary path, which is renamed at the end.
    """
    target = _download_directory() / path
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(partial)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        advice = f"set HASTEN_DATA to a directory that has {path}"
        raise RunError(f"cannot write {target}: {error.strerror or error}; {advice}") from None
    return target


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every regular file in a tar.gz, in order; it is unpacked in memory, nothing goes to disk.

    ``tarfile`` takes 2.5 s for the images of CIFAR-10, and every measuring process waits for them. Names of more than
    100 characters are not supported. ConfigurationError if the archive is damaged, or no tar.gz.
    """
    try:
        content, offset = gzip.decompress(path.read_bytes()), 0
        while any(header := content[offset : offset + TAR_BLOCK_BYTES]):  # zeros end the archive
            size = int(header[124:136].strip(b" \0"), 8)
            if size < 0 or offset + TAR_BLOCK_BYTES + size > len(content):
                raise EOFError("it is truncated")
            offset += TAR_BLOCK_BYTES
            if header[156:157] in (b"0", b"\0"):
                yield header[:100].rstrip(b"\0").decode(), content[offset : offset + size]
            offset += -(-size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES
    except (OSError, EOFError, ValueError, zlib.error) as error:
        advice = "remove it to download it again"
        raise ConfigurationError(f"{path} cannot be read as a tar.gz archive ({error}); {advice}") from None


def import_package(module: str, workload: str, package: str, extra: str) -> Any:
    """Imports and returns a module; ConfigurationError if the package that has it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        advice = f"pip install 'hasten[{extra}]'"
        raise ConfigurationError(f"the workload {workload} needs the package {package}; {advice}") from None


def pack(files: Iterable[tuple[str, bytes]], path: Path) -> None:
    """Writes (name, content) pairs as a tar.gz at ``path``."""
    with tarfile.open(path, "w:gz", compresslevel=6) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _directories() -> list[Path]:
    """The directories that may hold data, in search order; ConfigurationError if HASTEN_DATA is not a directory."""
    configured = os.environ.get("HASTEN_DATA")
    if configured and not Path(configured).expanduser().is_dir():
        raise ConfigurationError(f"HASTEN_DATA={configured} is not a directory")
    directories = [Path(configured).expanduser()] if configured else []
    package = importlib.util.find_spec("hasten")  # None for an exported script on a machine without hasten
    locations = (package and package.submodule_search_locations) or []
    return [*directories, _download_directory(), *(Path(path) / "workloads" / "data" for path in locations)]


def _download_directory() -> Path:
    return Path.home() / ".cache" / "hasten"


def _download(file: File, path: Path) -> None:
    with path.open("wb") as sink:
        sink.writelines(_chunks(file))
    if (actual := _sha256(path)) != file.sha256:
        problem = f"what {file.address} sent is not the expected file (sha256 {actual[:12]}…)"
        raise RunError(f"{problem}; put the right one at {_download_directory() / file.path}")


def _chunks(file: File) -> Iterator[bytes]:
    """Downloads the content of the file's address in chunks, with a progress bar on stderr; RunError if that fails."""
    from rich.console import Console
    from rich.progress import wrap_file

    shown: Any = {"description": f"downloading {file.path}", "console": Console(stderr=True), "transient": True}
    try:
        # a new opener reads the proxies of the environment now; urlopen keeps those of its first call
        with urllib.request.build_opener().open(file.address, timeout=SERVER_TIMEOUT_S) as source:
            size = int(source.headers.get("Content-Length") or 0)
            with wrap_file(source, size, **shown) as content:
                while chunk := content.read(CHUNK_BYTES):
                    yield chunk
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        by_hand = f"put the file at {_download_directory() / file.path} by hand"
        advice = f"{by_hand}, or set HASTEN_DATA to a directory that has {file.path}"
        raise RunError(f"cannot download {file.address}: {reason}; {advice}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
