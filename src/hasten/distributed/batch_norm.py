"""Batch normalization over the global batch, on any device that supports all-gather; torch.nn.SyncBatchNorm needs GPUs.

The ranks gather mean and variance of their shards and combine them (Chan et al. 1983). In the backward pass they sum
the gradients with respect to the mean and the variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hasten._torch_compat import BatchNorm
from hasten.core.run_context import TrainProgress


@dataclass(frozen=True)
class SyncGroup:
    """Whether the current batch is sharded over ``world_size`` ranks; one object for all batch norm layers and copies.

    ``progress`` has the size of the current global batch.
    """

    progress: TrainProgress
    world_size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncGroup:
        return self

    @property
    def is_sharded(self) -> bool:
        """False for a batch of fewer samples than ranks: each rank reads all of it and uses its own statistics."""
        return self.progress.global_batch_size >= self.world_size


class DistributedBatchNorm(BatchNorm):
    """A layer that normalizes over the global batch while it trains; made in place by ``convert_sync_batchnorm``."""

    group: SyncGroup

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.group.is_sharded):
            return super().forward(inputs)
        outputs, mean, variance, count = _Normalize.apply(inputs, self.weight, self.bias, self.eps)
        if self.track_running_stats and self.running_mean is not None:
            self._update_running_stats(mean, variance * (count / (count - 1)))
        return outputs

    @torch.no_grad()
    def _update_running_stats(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        momentum: Any = self.momentum  # None for a cumulative average
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / self.num_batches_tracked.item() if momentum is None else momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)

    def _check_input_dim(self, inputs: torch.Tensor) -> None:
        if inputs.dim() < 2:
            expected = "batch normalization expects at least 2 dimensions (samples, channels)"
            raise ValueError(f"{expected}, got {inputs.dim()}")


def convert_sync_batchnorm(norm: BatchNorm, group: SyncGroup) -> None:
    """Converts a layer in place to normalize over the shards of all ranks; its weights and statistics stay."""
    norm.__class__ = DistributedBatchNorm
    vars(norm)["group"] = group


class _Normalize(torch.autograd.Function):
    """(outputs, mean, variance, count of the global batch) of inputs of shape (samples, channels, ...)."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: Any, bias: Any, eps: float) -> tuple[torch.Tensor, ...]:
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        axes = [axis for axis in range(inputs.dim()) if axis != 1]
        variance, mean = torch.var_mean(wide, axes, correction=0)
        local = torch.cat([mean, variance, mean.new_full((1,), inputs.numel() / inputs.shape[1])])
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
        means, variances, counts = torch.stack(gathered).split([len(mean), len(mean), 1], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
        scale = (variance + eps).rsqrt()
        normal = (wide - _channel_view(mean, inputs)) * _channel_view(scale, inputs)
        # not ``normal``: the layer before keeps its output, these inputs, while a float32 copy would be memory besides
        ctx.save_for_backward(inputs, mean, scale, weight, count)
        ctx.mark_non_differentiable(mean, variance, count)
        outputs = normal if weight is None else normal * _channel_view(weight, inputs)
        outputs = outputs if bias is None else outputs + _channel_view(bias, inputs)
        return outputs.to(inputs.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad_outputs: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        inputs, mean, scale, weight, count = ctx.saved_tensors
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        normal = (wide - _channel_view(mean, inputs)) * _channel_view(scale, inputs)
        wide = grad_outputs.to(normal.dtype)
        axes = [axis for axis in range(grad_outputs.dim()) if axis != 1]
        grad_bias, grad_weight = wide.sum(axes), (wide * normal).sum(axes)
        summed = torch.cat([grad_bias, grad_weight])
        dist.all_reduce(summed)
        mean_grad, mean_grad_normal = (_channel_view(part, grad_outputs) for part in (summed / count).chunk(2))
        slope = scale if weight is None else scale * weight
        grad_inputs = _channel_view(slope, grad_outputs) * (wide - mean_grad - normal * mean_grad_normal)
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dtype = scale.dtype if weight is None else weight.dtype
        return (
            grad_inputs.to(grad_outputs.dtype),
            grad_weight.to(dtype) if needs_weight else None,
            grad_bias.to(dtype) if needs_bias else None,
            None,
        )


def _channel_view(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value per channel, shaped to broadcast along the second dimension of ``like``."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
