"""Batch normalization over the global batch, of which each rank reads a shard: the statistics equal those of a single
process.

Without it each rank normalizes its own shard. Goyal et al. 2017 did that on purpose (arXiv 1706.02677, remark in
section 2.3: the loss of each shard stays independent of the others); it is a different formula, and a worse one with
few samples per rank.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

from torch import nn

from hasten import Card, ConfigurationError, Exactness, Method, NoEffectError, RunContext, WrapOrder
from hasten._torch_compat import BatchNorm
from hasten.distributed.batch_norm import SyncGroup, convert_sync_batchnorm
from hasten.utils.observe_step import observe_collectives
from hasten.utils.op_recorder import NOT_CHECKED


@dataclass(frozen=True)
class SyncBatchNorm(Method):
    """Converts the batch norm layers of the model to use statistics of the global batch."""

    card = Card(
        summary="computes batch normalization over the shards of all ranks together",
        exactness=Exactness.EQUIVALENT_MATH,
        source="torch.nn.SyncBatchNorm; Chan et al. 1983, The American Statistician 37(3)",
        gain_when="a rank reads too few samples for good statistics; costs a message per layer and direction",
        accelerates={"steps"},
        applies_to={"distributed"},
        requires={"replicated_weights"},
        order=WrapOrder.FIRST,
    )

    def model(self, model: nn.Module, run: RunContext) -> nn.Module:
        assert run.parallel is not None
        all_norms = [m for m in model.modules() if isinstance(m, BatchNorm) and not isinstance(m, nn.SyncBatchNorm)]
        norms = [norm for norm in all_norms if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)]
        if not all_norms:
            run.report_no_effect(self, "the model has no batch normalization")
        elif unknown := sorted({type(norm).__name__ for norm in all_norms} - {type(norm).__name__ for norm in norms}):
            raise ConfigurationError(
                f"sync_batch_norm supports BatchNorm1d, 2d and 3d, and the model has {', '.join(unknown)}; leave it out"
            )
        elif run.parallel.pp_size > 1:
            raise ConfigurationError(
                "sync_batch_norm cannot be combined with pipeline, which normalizes each microbatch; leave it out"
            )
        elif run.parallel.model_parallel_size == run.ranks.world_size:
            run.report_no_effect(self, "every rank reads the whole batch already")
        elif run.parallel.model_parallel_size > 1:
            raise ConfigurationError(
                "sync_batch_norm does not support several model replicas of several ranks each; "
                "leave it out, or set degree to the number of processes"
            )
        else:
            group = SyncGroup(run.progress, run.ranks.world_size)
            for norm in norms:
                convert_sync_batchnorm(norm, group)
            run.observe_effect(self, partial(_observe, group))
        return model


def _observe(group: SyncGroup) -> Generator[None, None, str]:
    try:
        return (yield from observe_collectives("allgather_", "_allgather_base_"))
    except NoEffectError:
        if group.is_sharded:
            raise
        return f"{NOT_CHECKED}: the observed step had fewer samples than there are ranks"
