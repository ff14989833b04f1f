"""Checks that losses, weights and metrics are finite, and finds the cause where they are not: the data, or the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from hasten.core.data import BatchSource
from hasten.core.errors import RunError
from hasten.distributed.dtensor_state import to_local
from hasten.engine.registry import remedies
from hasten.utils.batch import batch_tensors
from hasten.utils.rng import preserve_rng_state


def _calmer() -> str:
    return f"a lower learning rate or {remedies('divergence')} may help"


def weights_are_finite(model: torch.nn.Module) -> bool:
    """Whether all trained parameters of this rank are finite; frozen ones may be masks."""
    trained = [
        to_local(parameter) for parameter in model.parameters() if parameter.requires_grad and not parameter.is_meta
    ]
    return not trained or bool(torch.stack([parameter.isfinite().all() for parameter in trained]).all())


def check_weights_finite(model: torch.nn.Module, step: int) -> None:
    if not weights_are_finite(model):
        raise RunError(f"the weights are not finite after step {step}: the training diverged; {_calmer()}")


def check_metric_finite(metric: float, step: int, validation: BatchSource) -> None:
    """Raises a Failure for a NaN metric; an infinite metric is allowed unless the validation data are not finite."""
    told = f"the metric is {metric} after step {step}"
    with preserve_rng_state():
        bad = next((i for i, batch in enumerate(validation.epoch(0, 0), 1) if not _finite(batch)), None)
    if bad:
        raise RunError(f"{told}: batch {bad} of the validation data holds NaN or infinity; clean the data")
    if math.isnan(metric):
        raise RunError(f"{told}: the validation data are finite; {_calmer()}")


def non_finite_loss_error(loss: float, where: str, read_again: Callable[[], Iterator]) -> RunError:
    """The error for a loss that is not finite. ``read_again()`` yields its batch first."""
    return RunError(f"the loss is {loss} at {where}: {_why_not_finite(read_again)}")


def _why_not_finite(read_again: Callable[[], Iterator]) -> str:
    """The cause in words: the batch holds NaN or infinity, or the training diverged."""
    try:
        found = next(iter(read_again()))
    except Exception:
        return "this batch could not be read again to look for the cause in it"
    if _finite(found):
        return f"the batch itself is finite, the training diverged; {_calmer()}"
    return "the batch itself holds NaN or infinity; clean the data"


def _finite(batch) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in batch_tensors(batch))
