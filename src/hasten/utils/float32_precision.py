"""The precision of float32 products, which PyTorch has two interfaces for: an older and, since 2.9, a newer one.

Once a program has set one of them, reading the same setting through the older one may raise a RuntimeError. Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html, TensorFloat-32.
"""

from collections.abc import Mapping
from typing import Any

import torch

_cudnn: Any = torch.backends.cudnn  # PyTorch's types do not know the newer settings
_onednn: Any = torch.backends.mkldnn
_NEWER: dict[str, Any] = {  # always readable
    "all": torch.backends,
    "matmul": torch.backends.cuda.matmul,
    "cudnn": _cudnn,
    "conv": _cudnn.conv,
    "rnn": _cudnn.rnn,
    "onednn": _onednn,
    "onednn matmul": _onednn.matmul,
    "onednn conv": _onednn.conv,
    "onednn rnn": _onednn.rnn,
}


def get_float32_precision() -> dict[str, Any]:
    """All settings by name, of both interfaces; None for one that only the newer interface can read now."""
    older = {"older matmul": _older_matmul(), "older cudnn": _older_cudnn()}
    return older | {name: owner.fp32_precision for name, owner in _NEWER.items()}


def set_float32_precision(settings: Mapping[str, Any]) -> None:
    """Sets the precision of float32 products of the process to what ``get_float32_precision`` returned."""
    if _older_matmul() != settings["older matmul"]:
        torch.set_float32_matmul_precision(settings["older matmul"] or "highest")  # the default, if it is not readable
    if _older_cudnn() != settings["older cudnn"]:
        _cudnn.allow_tf32 = settings["older cudnn"] is not False
    for name, owner in _NEWER.items():
        if owner.fp32_precision != settings[name]:  # setting one sets those below it
            owner.fp32_precision = settings[name]


def _older_matmul() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _older_cudnn() -> bool | None:
    try:
        return _cudnn.allow_tf32
    except RuntimeError:
        return None
