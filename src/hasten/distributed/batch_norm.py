"""Batch normalisation over the whole batch where every process has a part of it, on any device that the processes can talk from.

torch.nn.SyncBatchNorm does this for GPUs alone. Each rank tells the others the mean and the variance of its part, from which all compute
those of the whole (Chan et al. 1983); on the way back the ranks add up what their parts of the loss say about the mean and the variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hasten._torch_compat import BatchNorm
from hasten.core.run_context import TrainProgress


@dataclass(frozen=True)
class SyncGroup:
    """How a batch is shared out now; all layers of a model ask the same, and so do their copies."""

    progress: TrainProgress
    world: int

    def __deepcopy__(self, memo) -> SyncGroup:
        return self

    @property
    def shared_out(self) -> bool:
        """A batch of fewer samples than ranks is read whole by all of them."""
        return self.progress.global_batch_size >= self.world


class DistributedBatchNorm(BatchNorm):
    """Made of another batch normalisation by ``over_all``."""

    parts: SyncGroup

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.parts.shared_out):
            return super().forward(inputs)
        outputs, mean, variance, count = _Normalize.apply(inputs, self.weight, self.bias, self.eps)
        if self.track_running_stats and self.running_mean is not None:
            self._follow(mean, variance * (count / (count - 1)))
        return outputs

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / self.num_batches_tracked.item() if momentum is None else momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)

    def _check_input_dim(self, inputs: torch.Tensor) -> None:
        if inputs.dim() < 2:
            raise ValueError(
                f"batch normalisation wants samples and channels, not a tensor of {inputs.dim()} dimensions"
            )


def convert_sync_batchnorm(norm: BatchNorm, parts: SyncGroup) -> None:
    """Makes a layer normalise over the parts of all ranks; its weights, its statistics and its place in the model stay."""
    norm.__class__, norm.parts = DistributedBatchNorm, parts


class _Normalize(torch.autograd.Function):
    """(outputs, mean, variance and count of the whole batch), of inputs whose channels are their second dimension."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, eps):
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        axes = [axis for axis in range(inputs.dim()) if axis != 1]
        variance, mean = torch.var_mean(wide, axes, correction=0)
        own = torch.cat([mean, variance, mean.new_tensor([inputs.numel() / inputs.shape[1]])])
        everybodys = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, own)
        means, variances, counts = torch.stack(everybodys).split([len(mean), len(mean), 1], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
        scale = (variance + eps).rsqrt()
        normal = (wide - _channel_view(mean, inputs)) * _channel_view(scale, inputs)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.mark_non_differentiable(mean, variance, count)
        outputs = normal if weight is None else normal * _channel_view(weight, inputs)
        outputs = outputs if bias is None else outputs + _channel_view(bias, inputs)
        return outputs.to(inputs.dtype), mean, variance, count

    @staticmethod
    def backward(ctx, gradient, *_):
        normal, scale, weight, count = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        axes = [axis for axis in range(gradient.dim()) if axis != 1]
        of_bias, of_weight = wide.sum(axes), (wide * normal).sum(axes)
        everybodys = torch.cat([of_bias, of_weight])
        dist.all_reduce(everybodys)
        of_mean, of_spread = (everybodys / count).chunk(2)
        slope = scale if weight is None else scale * weight
        of_inputs = _channel_view(slope, gradient) * (
            wide - _channel_view(of_mean, gradient) - normal * _channel_view(of_spread, gradient)
        )
        _, weight_learns, bias_learns, _ = ctx.needs_input_grad
        of_weight, of_bias = (
            sums.to(weight.dtype) if learns else None
            for sums, learns in ((of_weight, weight_learns), (of_bias, bias_learns))
        )
        return of_inputs.to(gradient.dtype), of_weight, of_bias, None


def _channel_view(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value a channel, laid along the second dimension."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
