"""TF32: float32 matrix products on the tensor cores, with 10 instead of 23 bits of mantissa."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext
from hasten.utils.float32_precision import get_float32_precision, set_float32_precision

AMPERE = (8, 0)  # compute capability
NEEDS = "TF32 needs an NVIDIA GPU from Ampere on"


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
        if run.device.type != "cuda":
            return run.report_no_effect(self, f"{NEEDS}; this run is on {run.device}", context)
        if allows_tf32():
            return run.report_no_effect(self, "TF32 is enabled already", context)

        @contextmanager
        def with_tf32() -> Generator[None]:
            before = get_float32_precision()
            try:
                allow_tf32()
                with context():
                    yield
            finally:
                set_float32_precision(before)

        run.observe_effect(self, partial(_describe, run.device))
        return with_tf32


def _describe(device: torch.device) -> str:
    if torch.cuda.get_device_capability(device) < AMPERE:  # not asked before: a script may yet choose its GPUs
        raise NoEffectError(f"{NEEDS}; this one has compute capability {torch.cuda.get_device_capability(device)}")
    if not allows_tf32():
        raise NoEffectError("something has switched TF32 off during the run")
    return "float32 matrix products and convolutions may use TF32"


def allows_tf32() -> bool:
    """Whether matrix products and convolutions on a GPU may use TF32, whichever of PyTorch's interfaces allowed it."""
    settings = get_float32_precision()
    return settings["matmul"] == settings["conv"] == "tf32"


def allow_tf32() -> None:
    """Allows TF32 through the interface that the program uses, so that it can still read its settings."""
    settings, cudnn = get_float32_precision(), cast(Any, torch.backends.cudnn)
    if settings["older matmul"] is None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    if settings["older cudnn"] is None:
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    else:
        cudnn.allow_tf32 = True
