"""Checks that losses, weights and metrics are finite, and finds whether the data or the training is the cause."""

import math
from collections.abc import Callable, Iterator

import torch

from hasten.core.data import BatchSource
from hasten.core.errors import RunError
from hasten.core.types import Batch
from hasten.distributed.dtensor_state import to_local
from hasten.engine.registry import remedies
from hasten.utils.batch import batch_tensors
from hasten.utils.rng import preserve_rng_state


def _advice() -> str:
    return f"a lower learning rate or {remedies('divergence')} may help"


def weights_are_finite(model: torch.nn.Module) -> bool:
    """Whether all trained parameters of this rank are finite; frozen ones are not checked: they may be masks."""
    trained = [to_local(weight) for weight in model.parameters() if weight.requires_grad and not weight.is_meta]
    return not trained or bool(torch.stack([weight.isfinite().all() for weight in trained]).all())


def check_weights_finite(model: torch.nn.Module, step: int) -> None:
    """Raises a RunError that names ``step`` if a trained parameter of this rank is NaN or infinite."""
    if not weights_are_finite(model):
        raise RunError(f"the weights are not finite after step {step}: the training diverged; {_advice()}")


def check_metric_finite(metric: float, step: int, validation: BatchSource) -> None:
    """Raises a RunError for a NaN metric; an infinite metric is allowed unless the validation data are not finite."""
    problem = f"the metric is {metric} after step {step}"
    with preserve_rng_state():
        bad = next((i for i, batch in enumerate(validation.epoch(0, 0), 1) if not _is_finite(batch)), None)
    if bad:
        raise RunError(f"{problem}: batch {bad} of the validation data holds NaN or infinity; clean the data")
    if math.isnan(metric):
        raise RunError(f"{problem}: the validation data are finite; {_advice()}")


def non_finite_loss_error(loss: float, where: str, read_again: Callable[[], Iterator[Batch]]) -> RunError:
    """The error for a non-finite loss at ``where``. The first batch of ``read_again()`` is searched for the cause."""
    try:
        batch = next(iter(read_again()))
    except Exception:
        cause = "this batch could not be read again to look for the cause in it"
    else:
        cause = "the batch itself holds NaN or infinity; clean the data"
        if _is_finite(batch):
            cause = f"the batch itself is finite, the training diverged; {_advice()}"
    return RunError(f"the loss is {loss} at {where}: {cause}")


def _is_finite(batch: Batch) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in batch_tensors(batch))
