"""cuDNN measures its convolution algorithms at the first call of each shape, and keeps the fastest."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import torch

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext
from hasten.utils.op_recorder import CONVOLUTIONS, NOT_CHECKED, OpRecorder
from hasten.utils.process_setting import with_setting


@dataclass(frozen=True)
class CudnnBenchmark(Method):
    """Sets ``torch.backends.cudnn.benchmark`` for the run.

    Pays where shapes repeat: each new one costs a measurement. Another algorithm may add in another order.
    """

    card = Card(
        summary="cuDNN measures its convolution algorithms and keeps the fastest for each shape",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        gain_when="convolutions of few shapes on an NVIDIA GPU",
        accelerates={"forward", "backward"},
        applies_to={"cuda", "convolutions"},
        on_gpu={"baseline": True},
        script_edit={"process": "torch.backends.cudnn.benchmark = True"},
    )

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        if run.device.type != "cuda":
            return run.report_no_effect(self, f"cuDNN is for NVIDIA GPUs; this run is on {run.device}", context)
        if torch.backends.cudnn.benchmark:
            return run.report_no_effect(self, "it is switched on already", context)

        run.observe_effect(self, _observe)
        cudnn = torch.backends.cudnn
        return with_setting(context, partial(setattr, cudnn, "benchmark"), True, lambda: cudnn.benchmark)


def _observe() -> Generator[None, None, str]:
    """Effect check: a convolution ran while the switch was on."""
    with OpRecorder() as recorder:
        yield
    if not torch.backends.cudnn.benchmark:
        raise NoEffectError("something has switched it off during the run")
    count = sum(recorder.count(name) for name in CONVOLUTIONS)
    if not count:
        return f"{NOT_CHECKED}: the step shows no convolution"
    return f"cuDNN chose the algorithms of {count} convolutions by measurement"
