"""Data parallel training: every rank has the whole model and a part of each batch; the gradients are averaged.

torch's DistributedDataParallel does it bucket by bucket while the backward pass still goes on (Li et al. 2020, arXiv 2006.15704).
Of a batch in several pieces only the last one talks. The loss has to be a mean over the samples, as all of torch's are by themselves.
"""

from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel

from hasten.contract.card import Card, Exactness, Order
from hasten.contract.errors import Refusal
from hasten.contract.method import Method, setting
from hasten.contract.replicas import notice_batch_norm, talking_last


@dataclass(frozen=True)
class DDP(Method):
    card = Card(
        summary="the batch shared out among processes, gradients averaged while they are computed",
        exactness=Exactness.SAME_MATHS,
        source="Li et al. 2020, arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel",
        gain_when="the model fits one device and a step's arithmetic takes longer than sending its gradients",
        speeds={"input", "forward", "backward"},
        applies_to={"several processes"},
        order=Order.FIRST,
        replaces={"shard"},
        tries=({}, {"bucket_megabytes": 1.0}, {"static_graph": True}),
    )
    bucket_megabytes: float = setting(25.0, above=0)  # gradients that travel together
    static_graph: bool = False  # the same parameters are used in every step, which spares a search
    find_unused: bool = False  # looks in each step which parameters have no gradient

    def shard(self, model, run):
        if run.ranks.alone:
            run.nothing_to_do(self, "there is one process only; say --processes")
            return model
        if self.static_graph and run.loop.microbatches > 1:
            raise Refusal("ddp:static_graph=true wants every backward pass alike; of a batch in several pieces only the last one talks")
        notice_batch_norm(model)
        return DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_megabytes,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused,
            gradient_as_bucket_view=True,
        )

    def micro(self, micro, run):
        if run.ranks.alone or run.loop.microbatches == 1:
            return micro
        return talking_last(micro, run.clock, run.model.no_sync)

    def export(self, model, run):
        return model if run.ranks.alone else model.module
