"""The kernel of ``scaled_dot_product_attention``: cuDNN's, FlashAttention, or the memory-efficient one."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hasten import Batch, Card, Exactness, ForwardFn, Method, NoEffectError, RunContext, option
from hasten.utils.op_recorder import NOT_CHECKED, OpRecorder

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Sdpa(Method):
    """Prefers one kernel for ``torch.nn.functional.scaled_dot_product_attention``; the others serve what it cannot do.

    PyTorch prefers FlashAttention wherever it can run. Which kernel is the fastest depends on the GPU, the lengths and
    the mask. FlashAttention and cuDNN compute in float16 and bfloat16 only, so they need such a recipe.
    """

    card = Card(
        summary="choice of the attention kernel",
        exactness=Exactness.REDUCED_PRECISION,  # the kernels know no float64, in which a formula is checked
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html",
        gain_when="attention over long sequences in bfloat16 or float16, on a recent NVIDIA GPU",
        accelerates={"forward", "backward"},
        applies_to={"cuda", "matrix_weights"},
        presets=({"kernel": "cudnn"}, {"kernel": "efficient"}, {"kernel": "flash"}),
        script_edit={
            "by_hand": "call the model under torch.nn.attention.sdpa_kernel(kernels, set_priority=True), best first",
        },
    )

    kernel: str = option("cudnn", one_of=tuple(KERNELS))  # the preferred one

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        if run.device.type != "cuda":
            return run.report_no_effect(self, f"the kernels are for NVIDIA GPUs; this run is on {run.device}", forward)
        preferred = KERNELS[self.kernel]
        priority = [preferred, *(other for other in KERNELS.values() if other is not preferred)]

        def forward_with_kernel(batch: Batch) -> torch.Tensor:
            with sdpa_kernel(priority, set_priority=True):
                return forward(batch)

        run.observe_effect(self, self._observe)
        return forward_with_kernel

    def _observe(self) -> Generator[None, None, str]:
        """Effect check: the operations by which attention was computed."""
        with OpRecorder() as recorder:
            yield
        names = {name for name, _ in recorder.ops if name.startswith("_scaled_dot_product") and "backward" not in name}
        counts = {name: recorder.count(name) for name in sorted(names)}
        if not recorder.ops:
            return f"{NOT_CHECKED}: the step shows no operations, as in a CUDA graph"
        if self.kernel == "math" and not counts:
            return f"{NOT_CHECKED}: the plain kernel consists of ordinary operations"
        if not counts:
            raise NoEffectError("the step has no call of scaled_dot_product_attention with a kernel of its own")
        if not any(self.kernel in name for name in counts):
            raise NoEffectError(f"{self.kernel} cannot compute this attention; it was computed by {', '.join(counts)}")
        return ", ".join(f"{count} calls of {name}" for name, count in counts.items())
