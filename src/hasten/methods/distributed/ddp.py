"""Data parallel training: every rank holds the full model and reads a shard of each batch; the gradients are averaged.

torch's DistributedDataParallel averages them bucket by bucket during the backward pass (Li et al. 2020, arXiv
2006.15704). With gradient accumulation only the last microbatch of a step communicates. The loss must be a mean over
the samples, which is the default of torch's losses.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch.nn.parallel import DistributedDataParallel

from hasten import Card, ConfigurationError, Exactness, ForwardFn, Method, RunContext, WrapOrder, option
from hasten.distributed.collectives import sync_on_last_microbatch, warn_local_batch_norm
from hasten.utils.observe_step import observe_collectives


@dataclass(frozen=True)
class DDP(Method):
    """Wraps the model in ``DistributedDataParallel``; the options are those of that class."""

    card = Card(
        summary="shards each batch over processes and averages the gradients during the backward pass",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Li et al. 2020, arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel",
        gain_when="the model fits one device and computing a step takes longer than sending its gradients",
        accelerates={"input", "forward", "backward"},
        applies_to={"distributed"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        # without options it is the default of distributed runs
        presets=({"bucket_cap_mb": 1.0}, {"static_graph": True}),
        default_for={"distributed"},
        remedy_for={"unused_parameters": {"find_unused_parameters": True}},
    )
    bucket_cap_mb: float = option(25.0, above=0)  # MiB of gradients that are sent together
    static_graph: bool = False  # every step uses the same parameters, which spares a search
    find_unused_parameters: bool = False  # searches each step for parameters without a gradient

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if self.static_graph and run.plan.microbatches > 1:
            raise ConfigurationError(
                "ddp:static_graph=true needs every backward pass to be alike, but only the last microbatch of a step "
                "communicates; leave static_graph out"
            )
        warn_local_batch_norm(model, remedy="; sync_batch_norm gives that")
        run.observe_effect(self, partial(observe_collectives, "allreduce_"))
        return DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_cap_mb,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
        )

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        if run.plan.microbatches == 1:
            return forward_backward
        return sync_on_last_microbatch(forward_backward, run.progress, cast(DistributedDataParallel, run.model).no_sync)

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return cast(torch.nn.Module, model.module)
