"""Whether ``torch.autocast`` has something to lower in a model, and can."""

from __future__ import annotations

from functools import cache

import torch


def autocast_obstacle(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why a model has nothing to compute in ``dtype``, or cannot be; None if there is none."""
    name = str(dtype).removeprefix("torch.")
    if all(parameter.ndim < 2 or parameter.dtype != torch.float32 for parameter in model.parameters()):
        return f"the model has no float32 matrix that could be multiplied in {name}"
    if torch.is_autocast_enabled(device.type):  # when a script calls its model for the first time
        lowered = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        return f"the model is called under torch.autocast already, which computes in {lowered}"
    if getattr(model, "_original_forward", None) is not None:  # accelerate sets it for mixed precision
        return "accelerate calls the model under torch.autocast already"
    has_lstm = any(isinstance(module, torch.nn.LSTM) for module in model.modules())
    if device.type == "cpu" and has_lstm and not _lstm_runs_in(dtype):
        return f"the model has an LSTM, which this CPU cannot compute in {name}"
    return None


@cache
def _lstm_runs_in(dtype: torch.dtype) -> bool:
    with torch.device("meta"):  # so that no random numbers are drawn
        lstm = torch.nn.LSTM(1, 1)
    try:
        with torch.autocast("cpu", dtype):
            lstm.to_empty(device="cpu")(torch.zeros(1, 1, 1))
    except RuntimeError:  # oneDNN has no such kernel for this CPU
        return False
    return True
