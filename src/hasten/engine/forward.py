"""How a model and its loss are called, whatever the shape of the batch and whoever computes the loss."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hasten.core.errors import RunError
from hasten.core.run_context import TrainProgress
from hasten.core.types import Batch, ForwardFn, LossFn
from hasten.utils import batch as batches


def forward_of(model: torch.nn.Module, loss: LossFn, own: bool) -> ForwardFn:
    """``(batch) -> loss``; ``own``: the model returns its loss itself."""
    if own:
        return lambda batch: loss(*call_model(model, batch, own=True))

    def forward(batch):
        if type(batch) in (list, tuple) and len(batch) == 2:  # the usual case, without a detour
            return loss(model(batch[0]), batch[1])
        inputs, named, target = batches.split_inputs_target(batch)
        return loss(model(*inputs, **named), target)

    return forward


def call_model(model: torch.nn.Module, batch, own: bool):
    """(output, target) of a batch; ``own``: the model gets the whole batch and returns its own loss."""
    if not own:
        inputs, named, target = batches.split_inputs_target(batch)
        return model(*inputs, **named), target
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return model(**batch), batches.target_of(batch)
    return (model(*batch) if isinstance(batch, (tuple, list)) else model(batch)), batches.target_of(batch)


def own_loss(output, target=None) -> torch.Tensor:
    """The loss that a model returns itself: ``output.loss``, ``output["loss"]``, the first of a tuple, or a scalar.

    Raises:
        Failure: there is none.
    """
    loss = output
    if hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)):
        loss = output[0] if output else None
    if not isinstance(loss, torch.Tensor):
        raise RunError(
            f"Task(loss=None) is for a model that returns its own loss; this one returned {_shown(loss)}: give it the labels, or give a loss"
        )
    return loss


def refuse_loss(loss) -> NoReturn:
    """Says why training cannot go backward from what Task(loss=) returned."""
    raise RunError(
        f"Task(loss=) must return a tensor that remembers how it was computed, not {_shown(loss)}; leave out float() and .item()"
    )


def _shown(loss) -> str:
    return "None" if loss is None else f"{loss!r:.40} ({type(loss).__name__})"


def accumulate_gradients(
    forward_backward: ForwardFn, microbatches: int, progress: TrainProgress, readers: int = 1
) -> ForwardFn:
    """Forward and backward on the microbatches of a batch, each weighted by its share of the samples; all ranks have as many.

    Args:
        readers: ranks that read different samples.
    """

    def accumulated(batch: Batch) -> Any:
        samples, loss = batches.batch_size(batch), 0.0
        fewest = samples if progress.global_batch_size < readers else progress.global_batch_size // readers
        pieces = batches.chunk_batch(batch, min(microbatches, fewest))
        for index, piece in enumerate(pieces, 1):
            progress.microbatch_fraction, progress.is_last_microbatch = (
                batches.batch_size(piece) / samples,
                index == len(pieces),
            )
            loss = loss + forward_backward(piece).detach() * progress.microbatch_fraction
        return loss

    return accumulated
