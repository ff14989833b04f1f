"""The served model: loaded from a directory, replaced while requests are answered."""

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.deploy.candidates import has_vnni
from hasten.deploy.onnx_model import MODEL, OnnxModel
from hasten.deploy.signature import SIGNATURE, Signature, TensorSpec, read_signature
from hasten.serving.inputs import zero_inputs

POLL_S = 1.0
Stamp = tuple[tuple[int, int] | None, ...]  # of the files of a model


class ServedModel(OnnxModel):
    """A model of a directory with its signature.

    Args:
        directory: It contains ``model.onnx`` and ``signature.json``.
        threads: Threads of one operation; 0: all cores.

    Attributes:
        signature: What it takes and returns.
        loaded: Time at which it was loaded (ISO 8601), which answers carry as their version.
        files: Inode and time of change of both files, by which a newer model is recognized.

    Raises:
        ConfigurationError: A file is missing or damaged, the model is not what its signature states or cannot compute
            a sample of zeros, or its sums would saturate on this processor.
    """

    def __init__(self, directory: Path, threads: int = 0):
        self.directory, self.threads = directory, threads
        self.files = _stamp(directory)
        self.signature = read_signature(directory)
        if self.signature.needs_vnni and not has_vnni():
            problem = f"the sums of {directory / MODEL} saturate on this processor, which has no VNNI"
            raise ConfigurationError(f"{problem}; quantize the run on such a machine, or serve the float model")
        super().__init__(directory / MODEL, threads)
        self._check()
        self.loaded = datetime.now(UTC).isoformat(timespec="milliseconds")

    def run(self, arrays: Sequence[numpy.ndarray]) -> numpy.ndarray:
        """As ``OnnxModel.run``, in parts of at most ``max_batch`` samples of the signature."""
        samples, step = len(arrays[0]), self.signature.max_batch
        if step is None or samples <= step:
            return super().run(arrays)
        run = super().run
        return numpy.concatenate([run([array[i : i + step] for array in arrays]) for i in range(0, samples, step)])

    def _check(self) -> None:
        """Raises ConfigurationError if the model is not what its signature says, or cannot compute one sample."""
        for kind, found in (("inputs", self.session.get_inputs()), ("outputs", self.session.get_outputs()[:1])):
            specs = getattr(self.signature, kind)
            if len(specs) != len(found) or not all(map(_fits, specs, found)):
                text = "; ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in found)
                problem = f"the {kind} of {self.path} are not those of its signature: {text:.200}"
                raise ConfigurationError(f"{problem}; export the model again")
        try:
            self.run(zero_inputs(self.signature))  # NaN is no error: the mean of a text that is all padding
        except RunError as error:
            raise ConfigurationError(str(error)) from None


def _fits(spec: TensorSpec, entry: Any) -> bool:
    """Whether a tensor of an ONNX model has the dtype of its signature, and no size but those that the signature says.

    A size of the signature may be free in the model: that of an output may follow from a free size of an input and be
    equal for all validation batches.
    """
    types = {"tensor(float)": "float32", "tensor(double)": "float64"}
    dtype = types.get(entry.type, entry.type.removeprefix("tensor(").removesuffix(")"))
    sizes = zip(spec.shape, entry.shape, strict=False)
    return (
        dtype == spec.dtype
        and len(spec.shape) == len(entry.shape)
        and all(size == wanted or not isinstance(size, int) for wanted, size in sizes)
    )


class ModelHolder:
    """The current model; after ``start``, a newer one in its directory takes its place between two batches.

    One that cannot be loaded, or has other inputs, outputs, image or max_batch, is reported, and tried again once its
    files change.

    Args:
        model: The first one.
        report: Called with a line for people about every replacement.
    """

    def __init__(self, model: ServedModel, report: Callable[[str], None]):
        self.model, self.report = model, report
        self.reloads = self.failures = 0
        self.refused: Stamp | None = None  # files that could not be loaded
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="reload", daemon=True)

    @property
    def signature(self) -> Signature:
        """That of the current model."""
        return self.model.signature

    def start(self) -> None:
        """Starts the thread that looks for a newer model every POLL_S seconds."""
        self.thread.start()

    def close(self) -> None:
        """Ends the thread that looks for newer models; waits for it."""
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

    def _reload(self, files: Stamp) -> None:
        try:
            new = ServedModel(self.model.directory, self.model.threads)
            parts = ("inputs", "outputs", "image", "max_batch")
            if differ := [part for part in parts if getattr(new.signature, part) != getattr(self.signature, part)]:
                problem = f"its {' and '.join(differ)} differ from those of the model being served"
                raise ConfigurationError(f"{problem}; start a new server for it")
        except Exception as error:  # whatever it is, the thread must see the next model
            self.failures += 1
            self.refused = files
            reason = str(error) if isinstance(error, ConfigurationError) else format_error(error)
            self.report(f"the newer model was not loaded, the older one still answers: {reason}")
            return
        self.model, self.refused = new, None
        self.reloads += 1
        self.report(f"loaded the newer model of {new.directory}")


def _stamp(directory: Path) -> Stamp:
    """(inode, time of change in ns) of ``model.onnx`` and ``signature.json``; None for one that is missing."""
    stamps: list[tuple[int, int] | None] = []
    for name in (MODEL, SIGNATURE):
        try:
            status = (directory / name).stat()
            stamps.append((status.st_ino, status.st_mtime_ns))
        except OSError:
            stamps.append(None)
    return tuple(stamps)
