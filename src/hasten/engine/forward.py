"""How a model and its loss are called, for every shape of a batch and for models that return their own loss."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from hasten._torch_compat import Dropout
from hasten.core.errors import RunError
from hasten.core.run_context import TrainProgress
from hasten.core.types import Batch, ForwardFn, LossFn
from hasten.utils import batch as batches


def make_forward(model: torch.nn.Module, loss: LossFn, own: bool) -> ForwardFn:
    """``(batch) -> loss``: model, then ``loss``; with ``own`` the model gets the batch and returns its loss."""
    if own:
        return lambda batch: loss(*batches.call_model(model, batch, own=True))

    def forward(batch: Batch) -> torch.Tensor:
        if type(batch) in (list, tuple) and len(batch) == 2:  # the usual case, without a function call
            return loss(model(batch[0]), batch[1])
        return loss(*batches.call_model(model, batch, own=False))

    return forward


def own_loss(output: Any, target: Any = None) -> torch.Tensor:
    """The loss in a model's output: ``.loss``, ``["loss"]``, the first scalar of a tuple, or the output; RunError if
    that is no tensor.
    """
    loss: Any = output
    if hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, dict):
        loss = cast(dict[str, Any], output).get("loss")
    elif isinstance(output, (tuple, list)):
        items = cast(Sequence[Any], output)
        scalars = (item for item in items if isinstance(item, torch.Tensor) and not item.ndim)
        loss = next(scalars, items[0] if items else None)
    if not isinstance(loss, torch.Tensor):
        returned = f"{_describe(loss)}: give it the labels, or set Task(loss=)"
        raise RunError(f"Task(loss=None) is for a model that returns its own loss; this one returned {returned}")
    return loss


def dropout_that_is_off(model: torch.nn.Module) -> str:
    """The name of a part in evaluation mode that has dropout and weights to train, as ``from_pretrained`` leaves a
    model; "" if there is none.
    """
    parts: list[tuple[str, torch.nn.Module]] = list(cast(Any, model).named_modules())
    for name, part in parts:
        is_trained = not part.training and any(parameter.requires_grad for parameter in part.parameters())
        if is_trained and any(isinstance(module, Dropout) and module.p for module in part.modules()):
            return name or type(part).__name__
    return ""


def loss_type_error(loss: Any) -> RunError:
    """The error for a Task(loss=) function that returned ``loss`` instead of a tensor with a gradient."""
    return RunError(
        f"Task(loss=) must return a tensor with a gradient, not {_describe(loss)}; leave out float() and .item()"
    )


def _describe(loss: Any) -> str:
    return "None" if loss is None else f"{loss!r:.40} ({type(loss).__name__})"


def accumulate_gradients(
    forward_backward: ForwardFn, microbatches: int, progress: TrainProgress, num_shards: int = 1
) -> ForwardFn:
    """``(batch) -> loss``: forward and backward of each microbatch, weighted by its fraction of the samples.

    There are fewer microbatches, on all ranks, if the smallest of ``num_shards`` shards has fewer samples.
    """

    def accumulated(batch: Batch) -> Any:
        samples, loss = batches.batch_size(batch), 0.0
        first = batch[0] if type(batch) in (list, tuple) else None
        if isinstance(first, torch.Tensor) and first.ndim and first.shape[0] != samples:
            raise RunError(
                f"the first tensor of the batch has {first.shape[0]} rows for {samples} samples, as where time comes "
                "first, so it cannot be cut into microbatches; leave out the method that cuts it"
            )
        global_samples = progress.global_batch_size
        smallest_shard = samples if global_samples < num_shards else global_samples // num_shards
        chunks = batches.chunk_batch(batch, min(microbatches, smallest_shard))
        for index, chunk in enumerate(chunks, 1):
            progress.microbatch_fraction = batches.batch_size(chunk) / samples
            progress.is_last_microbatch = index == len(chunks)
            loss = loss + forward_backward(chunk).detach() * progress.microbatch_fraction
        return loss

    return accumulated
