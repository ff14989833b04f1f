"""TF32: float32 matrix products on the tensor cores, with 10 instead of 23 bits of mantissa."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hasten.core.card import Card, Exactness
from hasten.core.errors import NoEffectError
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import ContextFactory


@dataclass(frozen=True)
class TF32(Method):
    """Rounds the inputs of matrix products and convolutions to TF32; sums and the model stay in float32.

    The switches are global to the process, so they are restored after the run.
    """

    card = Card(
        summary="float32 matrix products and convolutions on the tensor cores, in TF32",
        exactness=Exactness.REDUCED_PRECISION,
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html, TensorFloat-32",
        gain_when="NVIDIA GPUs from Ampere on, for everything that is still computed in float32",
        accelerates={"forward", "backward"},
        applies_to={"cuda", "tf32_hardware", "matrix_weights"},
        strong_baseline=True,
        script_edit={"process": "torch.set_float32_matmul_precision('high')\ntorch.backends.cudnn.allow_tf32 = True"},
    )

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        if run.device.type != "cuda" or torch.cuda.get_device_capability(run.device) < (8, 0):
            run.report_no_effect(self, f"TF32 needs an NVIDIA GPU from Ampere on; this run is on {run.device}")
            return context
        if reason := _already_set():
            run.report_no_effect(self, reason)
            return context

        @contextmanager
        def with_tf32() -> Generator[None]:
            precision, allow_tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            try:
                torch.set_float32_matmul_precision("high")
                torch.backends.cudnn.allow_tf32 = True
                with context():
                    yield
            finally:
                torch.set_float32_matmul_precision(precision)
                torch.backends.cudnn.allow_tf32 = allow_tf32

        run.observe_effect(self, _describe)
        return with_tf32


def _already_set() -> str | None:
    """Why TF32 need not be switched on: the process has set the precision already. None if it has not."""
    try:
        enabled = torch.get_float32_matmul_precision() != "highest" and torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch refuses to read the old switches once the new ones were set
        return "the precision of float32 products was set already, through torch.backends.fp32_precision"
    return "TF32 is enabled already" if enabled else None


def _describe() -> str:
    if _already_set() is None:  # "medium", or the new switches, which the task may have set since, are as good
        raise NoEffectError("something has switched TF32 off during the run")
    return "float32 matrix products and convolutions may use TF32"
