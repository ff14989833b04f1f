"""Exchanges ddp's gradients in 16 bits: half the bytes of float32.

Each rank divides its gradients by the number of ranks, so that their sum stays in range, casts them, and adds up those
of all ranks. torch's own hook for bfloat16 refuses gloo (https://github.com/pytorch/pytorch, bf16_compress_hook); this
one sends either dtype over any backend. bf16 has the range of float32 and 8 bits of precision; fp16 has 11 bits, but
values above 65504 or far below 6e-5 are lost.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hasten import Card, ConfigurationError, Exactness, Method, NoEffectError, RunContext, option
from hasten.utils.op_recorder import OpRecorder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class HalfPrecisionAllreduce(Method):
    """Registers a communication hook on DistributedDataParallel, with ``reduce_dtype`` bf16 or fp16."""

    card = Card(
        summary="rounds gradients to 16 bits for their exchange between processes",
        exactness=Exactness.REDUCED_PRECISION,
        source="https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html",
        gain_when="the network is slow: sending the saved bytes takes longer than rounding and is not hidden",
        accelerates={"backward"},
        applies_to={"distributed"},
        after=("ddp", "zero"),
        presets=({"reduce_dtype": "bf16"}, {"reduce_dtype": "fp16"}),
        gradient_bytes_saved=0.5,
    )
    reduce_dtype: str = option("bf16", one_of=tuple(DTYPES))

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not isinstance(model, DistributedDataParallel):
            raise ConfigurationError(
                "half_precision_allreduce needs ddp or zero:stage=1, and the recipe has another strategy; remove one"
            )
        if all(weight.dtype.itemsize <= 2 for weight in model.parameters()):
            return run.report_no_effect(self, "the gradients have 16 bits already", model)
        run.observe_effect(self, partial(_observe, DTYPES[self.reduce_dtype]))
        cast(Any, model).register_comm_hook(DTYPES[self.reduce_dtype], _all_reduce_mean)
        return model


def _observe(dtype: torch.dtype) -> Generator[None, None, str]:
    with OpRecorder() as recorder:
        yield
    calls = {precision: stats.count for (name, precision), stats in recorder.ops.items() if name == "allreduce_"}
    if dtype not in calls:
        raise NoEffectError(f"the step called no all-reduce in {dtype}")
    return f"the step called {calls[dtype]} all-reduce in {str(dtype).removeprefix('torch.')}"


GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]  # DDP requires this annotation


def _all_reduce_mean(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: a future of the bucket's gradients, averaged over all ranks in ``dtype``."""
    gradients: torch.Tensor = bucket.buffer()
    rounded = gradients.div(dist.get_world_size()).to(dtype)
    work = cast(Any, dist).all_reduce(rounded, async_op=True)

    def write_back(summed: Any) -> torch.Tensor:
        return gradients.copy_(summed.value()[0])

    return work.get_future().then(write_back)
