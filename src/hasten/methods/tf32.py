"""TF32: float32 matrix products on the tensor cores, with 10 bits of mantissa instead of 23.

Inputs are rounded, sums are kept in float32, and nothing in the model changes. The switch is global to the
process, so it is put back afterwards.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hasten.core.card import Card, Exactness
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import ContextFactory


@dataclass(frozen=True)
class TF32(Method):
    card = Card(
        summary="float32 matrix products and convolutions on the tensor cores, in TF32",
        exactness=Exactness.REDUCED_PRECISION,
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html, TensorFloat-32",
        gain_when="NVIDIA GPUs from Ampere on, for what is still computed in float32",
        accelerates={"forward", "backward"},
        applies_to={"cuda", "tf32_hardware", "matrix_weights"},
        strong_baseline=True,
    )

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        if run.device.type != "cuda" or torch.cuda.get_device_capability(run.device) < (8, 0):
            run.report_no_effect(self, f"TF32 needs an NVIDIA GPU from Ampere on; this run is on {run.device}")
            return context
        if why := _chosen_already():
            run.report_no_effect(self, why)
            return context

        @contextmanager
        def with_tf32():
            before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            try:
                torch.set_float32_matmul_precision("high")
                torch.backends.cudnn.allow_tf32 = True
                with context():
                    yield
            finally:
                torch.set_float32_matmul_precision(before[0])
                torch.backends.cudnn.allow_tf32 = before[1]

        return with_tf32


def _chosen_already() -> str | None:
    """Why there is nothing left to switch on; None where there is."""
    try:
        on = torch.get_float32_matmul_precision() != "highest" and torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch refuses to read the switch that it has a newer one for, once that one was set
        return "the precision of float32 products was set already, through torch.backends.fp32_precision"
    return "TF32 is on already" if on else None
