"""A data parallel strategy without torch's DDP: averages the gradients after the backward pass."""

import torch.distributed as dist

from hasten import Card, Exactness, Method


class Averaging(Method):
    card = Card(
        summary="averages gradients by hand",
        exactness=Exactness.EQUIVALENT_MATH,
        applies_to={"distributed"},
        replaces={"parallelize"},
    )

    def parallelize(self, model, run):
        return model

    def grad_transform(self, grad_transform, run):
        def average_gradients():
            for parameter in run.unwrapped_model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= run.ranks.world_size
            grad_transform()

        return average_gradients
