"""Batch normalisation over the whole batch, of which each process has a part: what one process would compute.

Without it each process normalises its part alone. That is what Goyal et al. 2017 did on purpose (arXiv 1706.02677, remark in section 2.3: the loss
of each part stays independent of the others); it is another formula, and with few samples a process a worse one.
"""

from dataclasses import dataclass

from torch import nn

from hasten._torch_compat import BatchNorm
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.distributed.batch_norm import SyncGroup, convert_sync_batchnorm


@dataclass(frozen=True)
class SyncBatchNorm(Method):
    card = Card(
        summary="batch normalisation over the parts of all processes together",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html; Chan et al. 1983, The American Statistician 37(3)",
        gain_when="a process has few samples of each batch, so that statistics of its own are poor; it costs a message a layer, there and back",
        accelerates={"steps"},
        applies_to={"distributed"},
        requires={"replicated_weights"},
        order=WrapOrder.FIRST,
    )

    def model(self, model: nn.Module, run: RunContext) -> nn.Module:
        found = [
            part for part in model.modules() if isinstance(part, BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
        ]
        norms = [norm for norm in found if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)]
        if not found:
            run.report_no_effect(self, "the model has no batch normalisation")
        elif unknown := sorted({type(norm).__name__ for norm in found} - {type(norm).__name__ for norm in norms}):
            raise ConfigurationError(
                f"sync_batch_norm knows BatchNorm1d, 2d and 3d, and the model has {', '.join(unknown)}; leave it out"
            )
        elif run.parallel.pp_size > 1:
            raise ConfigurationError(
                "pipeline normalises each piece of a batch by itself, and sync_batch_norm cannot change that; leave the latter out"
            )
        elif run.parallel.model_parallel_size == run.ranks.world_size:
            run.report_no_effect(self, "every process sees the whole batch already")
        elif run.parallel.model_parallel_size > 1:
            raise ConfigurationError(
                "sync_batch_norm is not for copies of the model that several processes hold each; leave it out, or make degree the number of processes"
            )
        else:
            parts = SyncGroup(run.progress, run.ranks.world_size)
            for norm in norms:
                convert_sync_batchnorm(norm, parts)
        return model
