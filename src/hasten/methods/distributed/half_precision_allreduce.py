"""The gradients that ddp exchanges, in 16 bits: half the bytes of float32.

Each rank divides its gradients by the number of ranks, so that their sum stays in range, rounds them, and adds them up with the others'.
torch's own hook for bfloat16 refuses gloo (https://github.com/pytorch/pytorch, bf16_compress_hook); this one sends either format over any backend.
bf16 has the range of float32 and 8 bits of precision; fp16 has 11 bits, and what is above 65504 or far below 6e-5 is lost.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hasten.core.card import Card, Exactness
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class HalfPrecisionAllreduce(Method):
    card = Card(
        summary="gradients rounded to 16 bits on their way between the processes",
        exactness=Exactness.REDUCED_PRECISION,
        source="https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html",
        gain_when="the network is slow: the bytes saved take longer than rounding, and the backward pass does not hide them",
        accelerates={"backward"},
        applies_to={"distributed"},
        after=("ddp", "zero"),
        presets=({"format": "bf16"}, {"format": "fp16"}),
        gradient_bytes_saved=0.5,
    )
    reduce_dtype: str = option("bf16", one_of=tuple(FORMATS))

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not isinstance(model, DistributedDataParallel):
            raise ConfigurationError(
                "half_precision_allreduce rounds what ddp sends (or zero:stage=1), and another strategy was chosen; leave one of them out"
            )
        if all(weight.dtype.itemsize <= 2 for weight in model.parameters()):
            run.report_no_effect(self, "the gradients have 16 bits already")
            return model
        model.register_comm_hook(FORMATS[self.reduce_dtype], _summed)
        return model


def _summed(format: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket of gradients over all ranks, when it will be there."""
    gradients = bucket.buffer()
    short = gradients.div(dist.get_world_size()).to(format)
    on_its_way = dist.all_reduce(short, async_op=True).get_future()
    return on_its_way.then(lambda arrived: gradients.copy_(arrived.value()[0]))
