"""Finds the data of the workloads, or downloads them once and checks their SHA-256.

The search order is ``$HASTEN_DATA``, ``~/.cache/hasten`` (where downloads go) and the ``data`` folder of the installed package.
"""

import gzip
import hashlib
import http.client
import importlib.util
import io
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hasten import ConfigurationError, RunError

CHUNK = 1 << 18  # bytes
PATIENCE = 30  # seconds that a server may be silent
BLOCK = 512  # bytes; what tar archives are made of


@dataclass(frozen=True)
class File:
    """A file of a data set: its place in the data folder, its official address, and what its bytes must hash to."""

    path: str
    address: str
    sha256: str


def fetched(file: File) -> Path:
    """Where the file lies, after fetching it if it was nowhere; its checksum is right.

    Raises:
        Refusal: the file that is there is another one.
        Failure: it could not be fetched; the message says from where, and where to put it by hand.
    """
    path = found(file.path)
    if path is None:
        return made_once(file.path, lambda unfinished: _download(file, unfinished))
    if (actual := _sha256(path)) != file.sha256:
        raise ConfigurationError(
            f"{path} is not the expected file (sha256 {actual[:12]}…, not {file.sha256[:12]}…); remove it, or put the one of {file.address} there"
        )
    return path


def found(path: str) -> Path | None:
    """Where a path of the data folder exists, if anywhere."""
    return next((folder / path for folder in _folders() if (folder / path).is_file()), None)


def made_once(path: str, make: Callable[[Path], None]) -> Path:
    """The file at ``path`` of the download folder, written by ``make`` and put in place only when it is whole.

    Raises:
        Failure: it cannot be written.
    """
    place = _downloads() / path
    unfinished = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            make(unfinished)
            os.replace(unfinished, place)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write {place}: {error.strerror or error}; set HASTEN_DATA to a folder that has {path}"
        ) from None
    return place


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every file in a tar.gz, in its order; nothing is written anywhere.

    ``tarfile`` would take 2.5 s for the pictures of CIFAR-10, and every measuring process has to wait for them.
    Names longer than 100 characters are not understood.

    Raises:
        Refusal: it is damaged, or no such archive.
    """
    try:
        content, place = gzip.decompress(path.read_bytes()), 0
        while any(header := content[place : place + BLOCK]):  # zeros end the archive
            size = int(header[124:136].strip(b" \0"), 8)
            if size < 0 or place + BLOCK + size > len(content):
                raise EOFError("it is cut off")
            if header[156:157] in (b"0", b"\0"):
                yield header[:100].rstrip(b"\0").decode(), content[place + BLOCK : place + BLOCK + size]
            place += BLOCK + -(-size // BLOCK) * BLOCK
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigurationError(
            f"{path} cannot be read as a tar.gz archive ({error}); remove it, and it is fetched again"
        ) from None


def pack(files: Iterable[tuple[str, bytes]], to: Path) -> None:
    """Writes a tar.gz of (name, content)."""
    with tarfile.open(to, "w:gz", compresslevel=6) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _folders() -> list[Path]:
    own = os.environ.get("HASTEN_DATA")
    if own and not Path(own).expanduser().is_dir():
        raise ConfigurationError(f"HASTEN_DATA={own} is not a folder")
    folders = [Path(own).expanduser(), _downloads()] if own else [_downloads()]
    package = importlib.util.find_spec("hasten")  # None for an exported script on a machine without hasten
    return [
        *folders,
        *(Path(path) / "workloads" / "data" for path in (package.submodule_search_locations if package else [])),
    ]


def _downloads() -> Path:
    return Path.home() / ".cache" / "hasten"


def _download(file: File, to: Path) -> None:
    digest = hashlib.sha256()
    with to.open("wb") as sink:
        for chunk in _chunks(file):
            sink.write(chunk)
            digest.update(chunk)
    if digest.hexdigest() != file.sha256:
        raise RunError(
            f"what {file.address} sent is not the expected file (sha256 {digest.hexdigest()[:12]}…); put the right one at {_downloads() / file.path}"
        )


def _chunks(file: File) -> Iterator[bytes]:
    """What the file's address sends, piece by piece, with a bar on stderr."""
    try:
        with urllib.request.urlopen(file.address, timeout=PATIENCE) as source, _bar(file, source) as advance:
            while chunk := source.read(CHUNK):
                advance(len(chunk))
                yield chunk
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise RunError(
            f"cannot fetch {file.address}: {why}; fetch it by hand and put it at {_downloads() / file.path}"
        ) from None


@contextmanager
def _bar(file: File, source) -> Iterator[Callable[[int], None]]:
    """A bar with the size and the time left; what it gives is told how many bytes have come."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    total = source.headers.get("Content-Length")
    columns = TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(file.path, total=int(total) if total else None)
        yield lambda count: bar.advance(task, count)


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
