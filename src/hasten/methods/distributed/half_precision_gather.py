"""Gathers the shards of zero's weights in bfloat16: half the bytes of float32, and half the memory of what is gathered.

Each rank keeps its shard of the weights, and of the optimizer state, in float32. What is gathered for a block, and the
computation of that block, are in bfloat16; gradients are added up in float32. It is what fully_shard calls a
``MixedPrecisionPolicy``. Beside ``bfloat16``, which casts after gathering, the network would carry float32.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule

from hasten.core.card import Card, Exactness
from hasten.core.errors import ConfigurationError, NoEffectError
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.utils.op_recorder import OpRecorder


@dataclass(frozen=True)
class HalfPrecisionGather(Method):
    """Sets the dtype in which the shards of ``zero`` (stages 2 and 3) are gathered to bfloat16."""

    card = Card(
        summary="gathers sharded weights in bfloat16, and computes in it",
        exactness=Exactness.REDUCED_PRECISION,
        source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html, MixedPrecisionPolicy",
        gain_when="zero with stage 2 or 3, where gathering weights is not hidden by the computation",
        accelerates={"forward", "backward"},
        applies_to={"distributed", "matrix_weights"},
        after=("zero",),
        not_searched="it changes how zero gathers weights; ask for both by name",
    )

    def setup(self, run: RunContext) -> None:
        assert run.parallel is not None
        run.parallel.gather_dtype = torch.bfloat16

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not isinstance(model, FSDPModule):
            raise ConfigurationError(
                "half_precision_gather needs zero with stage 2 or 3; add zero:stage=2, or remove it"
            )
        run.observe_effect(self, partial(_observe, model))
        return model


def _observe(model: torch.nn.Module) -> Generator[None, None, str]:
    """Effect check: the step gathered weights in bfloat16."""
    with OpRecorder() as recorder:
        yield
    gathers = [name for name, dtype in recorder.ops if "all_gather" in name or "allgather" in name]
    if not any(dtype is torch.bfloat16 for _, dtype in recorder.ops):
        raise NoEffectError(f"nothing in the step is in bfloat16 ({len(gathers)} kinds of gathers)")
    counts = [s.count for (name, dtype), s in recorder.ops.items() if name in gathers and dtype is torch.bfloat16]
    return f"{sum(counts)} gathers of weights in bfloat16" if counts else "the step computes in bfloat16"
