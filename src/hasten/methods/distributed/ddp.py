"""Data parallel training: every rank has the whole model and a part of each batch; the gradients are averaged.

torch's DistributedDataParallel does it bucket by bucket while the backward pass still goes on (Li et al. 2020, arXiv 2006.15704).
Of a batch in several pieces only the last one talks. The loss has to be a mean over the samples, as all of torch's are by themselves.
"""

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import ForwardFn
from hasten.distributed.collectives import sync_on_last_microbatch, warn_local_batch_norm


@dataclass(frozen=True)
class DDP(Method):
    card = Card(
        summary="the batch shared out among processes, gradients averaged while they are computed",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Li et al. 2020, arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel",
        gain_when="the model fits one device and a step's arithmetic takes longer than sending its gradients",
        accelerates={"input", "forward", "backward"},
        applies_to={"distributed"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"bucket_cap_mb": 1.0}, {"static_graph": True}),  # as it is, it is what distributed runs do anyway
        default_for={"distributed"},
        remedy_for={"unused_parameters": {"find_unused": True}},
    )
    bucket_cap_mb: float = option(25.0, above=0)  # gradients that travel together
    static_graph: bool = False  # the same parameters are used in every step, which spares a search
    find_unused_parameters: bool = False  # looks in each step which parameters have no gradient

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if self.static_graph and run.plan.microbatches > 1:
            raise ConfigurationError(
                "ddp:static_graph=true wants every backward pass alike; of a batch in several pieces only the last one talks"
            )
        warn_local_batch_norm(model, remedy="; sync_batch_norm gives that")
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
        return sync_on_last_microbatch(forward_backward, run.progress, run.model.no_sync)

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return model.module
