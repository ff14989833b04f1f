"""A model in ONNX Runtime: loaded from a file, called with arrays. Imports no torch, so that a server starts fast."""

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from hasten.core.errors import ConfigurationError, RunError

MODEL = "model.onnx"


def require(module: str, extra: str = "deploy") -> Any:
    """Imports ``module``, of ``hasten[EXTRA]``; ConfigurationError if it is missing, RunError if its import fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if importlib.util.find_spec(module.partition(".")[0]) is not None and error.name in (None, module):
            raise RunError(f"{module} is installed and cannot be imported: {error}") from None
        raise ConfigurationError(f"{error.name or module} is not installed; pip install 'hasten[{extra}]'") from None


class OnnxModel:
    """An ONNX Runtime session on the CPU for the model in file ``path``. ``threads`` of one operation; 0: all cores.

    Raises:
        ConfigurationError: The file does not exist or is no ONNX model that ONNX Runtime can load.
    """

    def __init__(self, path: str | Path, threads: int = 0):
        runtime = require("onnxruntime")
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigurationError(f"there is no model {path}; make it with: hasten export RUN --onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4  # fatal errors only; others are raised
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # a waiting thread needs no core
        try:
            self.session = runtime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the classes are of a private module
            reason = " ".join(str(error).split())
            raise ConfigurationError(f"{path} is no ONNX model that can be loaded: {reason:.200}") from None
        self.inputs = [entry.name for entry in self.session.get_inputs()]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    def run(self, arrays: Sequence[numpy.ndarray]) -> numpy.ndarray:
        """The first output for arrays in the order of the model's inputs; RunError if they do not fit it."""
        try:
            return self.session.run(None, dict(zip(self.inputs, arrays, strict=True)))[0]
        except Exception as error:  # the classes are of a private module
            raise RunError(f"{self.path.name} cannot compute this input: {' '.join(str(error).split()):.200}") from None


def strip(model: Path) -> None:
    """Removes from a model file, in place, what inference does not need: source lines, inner shapes, descriptions."""
    onnx = require("onnx")
    proto = onnx.load(model)
    del proto.graph.value_info[:], proto.metadata_props[:], proto.graph.metadata_props[:], proto.functions[:]
    proto.doc_string = proto.graph.doc_string = ""
    for entry in (*proto.graph.node, *proto.graph.initializer, *proto.graph.input, *proto.graph.output):
        del entry.metadata_props[:]
        entry.doc_string = ""
    onnx.save(proto, model)


def publish(files: Sequence[Path], directory: Path) -> None:
    """Copies finished files into a directory. All are written before the first takes its place: a full disk leaves the
    earlier ones, and a server that watches the directory loads no part of one, and hardly two that differ in age.
    """
    parts = {file: directory / f".{file.name}.part" for file in files}
    try:
        for file, part in parts.items():
            part.write_bytes(file.read_bytes())
        for file, part in parts.items():
            os.replace(part, directory / file.name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Context manager: hides standard output, warnings and what ``loggers`` log below ERROR; no user can act on it."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
