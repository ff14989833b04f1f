"""The served model: loaded from a directory, replaced while requests are answered."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy

from hasten.core.errors import ConfigurationError
from hasten.deploy.onnx_model import MODEL, OnnxModel
from hasten.deploy.signature import SIGNATURE, Signature, read_signature

POLL_S = 1.0


class ServedModel:
    """A model of a directory with its signature.

    Args:
        directory: It contains ``model.onnx`` and ``signature.json``.
        threads: Threads of one operation; 0: all cores.

    Attributes:
        signature: What it takes and returns.
        loaded: Time of ``time.time`` at which it was loaded; the version that answers carry.
    """

    def __init__(self, directory: Path, threads: int = 0):
        self.directory, self.threads = directory, threads
        self.files = _stamp(directory)
        self.signature = read_signature(directory)
        self.model = OnnxModel(directory / MODEL, threads)
        expected = [spec.name for spec in self.signature.inputs]
        if self.model.inputs != expected:
            found = ", ".join(self.model.inputs)
            raise ConfigurationError(f"{directory / MODEL} takes {found}, its signature {', '.join(expected)}")
        self.loaded = time.time()

    def __call__(self, inputs: tuple[numpy.ndarray, ...]) -> numpy.ndarray:
        """The scores of a batch."""
        return self.model.run(inputs)


class ModelHolder:
    """The current model; a newer one in its directory takes its place between two batches.

    Args:
        model: The first one.
        report: Called with a line for people about every replacement.
    """

    def __init__(self, model: ServedModel, report: Callable[[str], None]):
        self.model, self.report = model, report
        self.reloads = self.failures = 0
        self.refused: tuple[tuple[int, int], ...] | None = None  # files that could not be loaded
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="reload", daemon=True)

    def __call__(self, inputs: tuple[numpy.ndarray, ...]) -> numpy.ndarray:
        """The scores of a batch by the current model."""
        return self.model(inputs)

    @property
    def signature(self) -> Signature:
        """That of the current model."""
        return self.model.signature

    def start(self) -> None:
        """Begins to look for newer models."""
        self.thread.start()

    def close(self) -> None:
        """Ends the thread that looks for newer models."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def _watch(self) -> None:
        seen = self.model.files
        while not self.ended.wait(POLL_S):
            files = _stamp(self.model.directory)
            is_settled, seen = files == seen, files  # not while it is being written
            if is_settled and None not in files and files not in (self.model.files, self.refused):
                self._reload(files)

    def _reload(self, files: tuple[tuple[int, int] | None, ...]) -> None:
        try:
            new = ServedModel(self.model.directory, self.model.threads)
            parts = ("inputs", "outputs", "image", "max_batch")
            if differ := [part for part in parts if getattr(new.signature, part) != getattr(self.signature, part)]:
                raise ConfigurationError(f"its signature has other {' and '.join(differ)}")
        except ConfigurationError as error:
            self.failures += 1
            self.refused = files  # type: ignore[assignment]
            self.report(f"the newer model was not loaded, the older one still answers: {error}")
            return
        self.model, self.refused = new, None
        self.reloads += 1
        self.report(f"loaded the newer model of {new.directory}")


def _stamp(directory: Path) -> tuple[tuple[int, int] | None, ...]:
    """(inode, time of change) of the two files; None for one that is missing."""
    stamps: list[tuple[int, int] | None] = []
    for name in (MODEL, SIGNATURE):
        try:
            status = (directory / name).stat()
            stamps.append((status.st_ino, status.st_mtime_ns))
        except OSError:
            stamps.append(None)
    return tuple(stamps)
