"""Training by several ranks, computed by hand in one process, as the reference for strategies that communicate less."""

import copy

import torch
from safetensors.torch import load_file
from torch import nn

from hasten.core.process_group_info import ProcessGroupInfo
from hasten.engine.plan import build
from helpers import rank_tasks
from helpers.ranks import run_ranks, training_of


class ByHand:
    """Copies of a task's model, each with an optimizer, and the shards of the batches that they would read as ranks."""

    def __init__(self, task, world: int):
        program = build(task)
        self.models = [copy.deepcopy(program.run.unwrapped_model) for _ in range(world)]
        self.optimizers = [task.optimizer(model) for model in self.models]
        self.weights = [list(model.parameters()) for model in self.models]
        self.batches = [batch for epoch in range(int(task.epochs)) for batch in program.train.epoch(epoch, 0)]
        self.world = world

    def with_gradients(self):
        """Yields the index of every step, from 1; each copy has the gradients of its shard, weighted by its samples."""
        for number, (inputs, labels) in enumerate(self.batches, 1):
            for rank, model in enumerate(self.models):
                first, end = ProcessGroupInfo(rank, self.world).shard_bounds(len(labels))
                weight = self.world * (end - first) / len(labels)
                model.zero_grad()
                (nn.functional.cross_entropy(model(inputs[first:end]), labels[first:end]) * weight).backward()
            yield number

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def average_gradients(self):
        for alike in zip(*self.weights, strict=True):
            mean = torch.stack([weight.grad for weight in alike]).mean(0)
            for weight in alike:
                weight.grad = mean.clone()

    @torch.no_grad()
    def average(self, ranks=None):
        for alike in zip(*(self.weights if ranks is None else [self.weights[rank] for rank in ranks]), strict=True):
            mean = torch.stack(list(alike)).mean(0)
            for weight in alike:
                weight.copy_(mean)

    def against(self, out) -> float:
        """Returns the largest difference between the weights of a run and the mean of the copies, relative to the
        largest weight."""
        weights, names = load_file(out / "model.safetensors"), [name for name, _ in self.models[0].named_parameters()]
        self.average()
        pairs = [(weights[name], weight.detach()) for name, weight in zip(names, self.weights[0], strict=True)]
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def trained(tmp_path, world: int, recipe: str, make=rank_tasks.samples):
    answers = run_ranks(world, training_of, make, recipe, tmp_path / "run")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert len({answer["metric"] for answer in answers}) == 1
    return tmp_path / "run"


def plain():
    return rank_tasks.task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3))
