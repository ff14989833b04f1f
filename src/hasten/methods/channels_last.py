"""The channels-last memory format (NHWC) for images and convolution weights."""

from collections.abc import Generator
from dataclasses import dataclass

import torch

from hasten import BatchFn, Card, Exactness, Method, NoEffectError, RunContext
from hasten.utils.batch import map_tensors
from hasten.utils.op_recorder import NOT_CHECKED, OpRecorder


@dataclass(frozen=True)
class ChannelsLast(Method):
    """Stores images and convolution weights as NHWC.

    Tensor cores and CPU convolutions read NHWC directly; with NCHW, every convolution begins and ends with a
    transposition. Shapes and indices stay the same, only the strides change.
    """

    card = Card(
        summary="images and convolution weights in channels-last memory format",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        gain_when="two-dimensional convolutions, most in lower precision; little with very few channels",
        accelerates={"forward", "backward"},
        on_gpu={"baseline": True},
        applies_to={"convolutions"},
        script_edit={"model": "{model}.to(memory_format=torch.channels_last)"},
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not _has_image_weights(model):
            return run.report_no_effect(self, "the model has no two-dimensional convolution", model)
        run.observe_effect(self, _observe)
        # not by Module.to, which refuses three-dimensional convolutions; by ``data``, so that tied tensors stay tied
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 4:
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
        return model

    def batch_transform(self, to_device: BatchFn, run: RunContext) -> BatchFn:
        if not _has_image_weights(run.model):  # it may flatten images by ``view``, which needs the default format
            return to_device
        return lambda batch: map_tensors(_to_channels_last, to_device(batch))


def _has_image_weights(model: torch.nn.Module) -> bool:
    return any(parameter.ndim == 4 for parameter in model.parameters())


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    is_image = tensor.ndim == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor


def _observe() -> Generator[None, None, str]:
    with OpRecorder() as recorder:
        yield
    last = sum(stats.channels_last for stats in recorder.ops.values())
    first = sum(stats.channels_first for stats in recorder.ops.values())
    if last:
        return f"{last / (last + first):.0%} of the convolutions had an input in channels-last format"
    if first:
        raise NoEffectError("every convolution had an input in the default memory format (NCHW)")
    return f"{NOT_CHECKED}: the step shows no convolution whose input has several channels and pixels"
