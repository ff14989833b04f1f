"""The allocator of GPU memory extends its segments, instead of leaving gaps between segments of fixed size."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext
from hasten._torch_compat import set_allocator_settings
from hasten.utils.process_setting import with_setting


@dataclass(frozen=True)
class ExpandableSegments(Method):
    """Sets ``expandable_segments:True`` of PyTorch's allocator for what the run allocates from then on.

    Where sizes vary from step to step, such as the lengths of texts, gaps between segments can take a large part of the
    GPU's memory. Without them a larger batch fits, and ``cudaMalloc`` is called less often.
    """

    card = Card(
        summary="GPU memory in segments that grow, so that no gaps are left between them",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html, PYTORCH_CUDA_ALLOC_CONF",
        gain_when="the shapes of batches vary, or a step nearly fills the GPU's memory",
        accelerates={"forward", "backward"},
        applies_to={"cuda"},
        remedy_for={"out_of_memory": {}},
        script_edit={"by_hand": "start the script with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"},
    )

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        if run.device.type != "cuda":
            return run.report_no_effect(self, f"it is about GPU memory; this run is on {run.device}", context)
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            return run.report_no_effect(self, "PYTORCH_CUDA_ALLOC_CONF has switched it on already", context)

        run.observe_effect(self, partial(_describe, run.device))
        off = "expandable_segments:False"  # torch's default, which it does not report
        return with_setting(context, set_allocator_settings, "expandable_segments:True", lambda: off)


def _describe(device: torch.device) -> str:
    index = torch.device(device).index or 0
    snapshot: Any = torch.cuda.memory_snapshot()  # pyright: ignore[reportUnknownMemberType]
    segments = [segment for segment in snapshot if segment["device"] == index]
    count = sum(bool(segment.get("is_expandable")) for segment in segments)
    if not count:
        raise NoEffectError("all memory of the run lies in segments of fixed size")
    return f"{count} of {len(segments)} segments of GPU memory can grow"
