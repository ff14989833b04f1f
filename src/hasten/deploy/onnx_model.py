"""A model in ONNX Runtime: loaded from a file, called with torch tensors."""

import importlib
from pathlib import Path
from typing import Any

import torch

from hasten.core.errors import ConfigurationError, RunError

MODEL = "model.onnx"
MAX_MODEL_BYTES = 2**31  # of a protobuf file


def require(module: str) -> Any:
    """Imports a package of the extra ``deploy``; ConfigurationError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{error.name or module} is not installed; pip install 'hasten[deploy]'") from None


class OnnxModel:
    """An inference session. ``threads`` of one operation; 0: all cores.

    Raises:
        ConfigurationError: The file does not exist or is no ONNX model that ONNX Runtime can load.
    """

    def __init__(self, path: str | Path, threads: int = 0):
        runtime = require("onnxruntime")
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigurationError(f"there is no model {path}; make it with: hasten export RUN --onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3  # errors only
        try:
            self.session = runtime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the classes are of a private module
            raise ConfigurationError(f"{path} is no ONNX model that can be loaded: {error!s:.200}") from None
        self.inputs = [entry.name for entry in self.session.get_inputs()]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    def __call__(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """The first output for input tensors in the order of the model's inputs; RunError if they do not fit it."""
        arrays = {name: tensor.numpy() for name, tensor in zip(self.inputs, inputs, strict=True)}
        try:
            return torch.from_numpy(self.session.run(None, arrays)[0])
        except Exception as error:  # the classes are of a private module
            raise RunError(f"{self.path.name} cannot compute this input: {' '.join(str(error).split()):.200}") from None
