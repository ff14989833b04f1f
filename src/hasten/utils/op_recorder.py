"""Records the operations of a training step: how many, in which precision, how many FLOPs, how many seconds.

A recorder sees operations as they reach a kernel, after autocast has chosen their precision. Inside a model that
``torch.compile`` compiled it sees the matrix products and convolutions that call a library, not the fused kernels.
Inside a replayed CUDA graph it sees nothing.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from hasten._torch_compat import TorchDispatchMode, in_place_version, is_view_op
from hasten.utils.tree import tree_leaves

NOT_CHECKED = "effect not checked"  # how the evidence begins where a check cannot look
CONVERSION = "_to_copy"  # behind Tensor.to: to another precision, another device or another memory format
CONVOLUTIONS = ("convolution", "cudnn_convolution", "mkldnn_convolution")


@dataclass
class OpStats:
    """Calls of one operation in one precision."""

    count: int = 0  # number of calls
    flops: int = 0  # floating-point operations; 0 unless it is a matrix product, a convolution or attention
    seconds: float = 0.0  # of all calls; 0 unless the recorder is timed
    channels_last: int = 0  # calls whose input has the channels-last memory format, and not the default one
    channels_first: int = 0  # calls whose input has the default memory format, and not channels-last


class OpRecorder(TorchDispatchMode):
    """A context manager that counts operations by name and precision. The operations compute what they always do.

    Args:
        timed: Also measures seconds, which makes each operation on a GPU wait for the one before.

    Attributes:
        ops: (name, precision of the first floating-point input or None) -> OpStats. A conversion to another precision
            is named with its target: ``_to_copy to bfloat16``.
    """

    supports_higher_order_operators = True  # such as torch.cond and flex_attention, which would raise otherwise

    def __init__(self, timed: bool = False) -> None:
        super().__init__()
        self.timed = timed
        self.ops: dict[tuple[str, torch.dtype | None], OpStats] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: compiled code stays compiled under the recorder, instead of running eagerly."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_view_op(func) or not hasattr(func, "overloadpacket") or func.namespace == "profiler":
            return func(*args, **kwargs)  # an operation of higher order has no overloads
        tensors = [leaf for leaf in tree_leaves([*args, kwargs]) if isinstance(leaf, torch.Tensor)]
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        began = self._now(tensors) if self.timed else 0.0
        packet = func.overloadpacket
        name = packet.__name__
        changed = args[0] if name.startswith("_foreach_") and name.endswith("_") else []
        versions = [in_place_version(tensor) for tensor in changed]
        output = func(*args, **kwargs)
        if changed and versions == [in_place_version(tensor) for tensor in changed]:
            torch.autograd.graph.increment_version(changed)  # torch forgets to, under a mode
        if name == CONVERSION and output.dtype != tensors[0].dtype:
            name += f" to {str(output.dtype).removeprefix('torch.')}"
        stats = self.ops.setdefault((name, floating[0].dtype if floating else None), OpStats())
        stats.count += 1
        if self.timed:
            stats.seconds += self._now(tensors) - began
        if packet in flop_registry:
            with suppress(Exception):  # torch's formulas do not know all shapes; the step must continue
                stats.flops += int(flop_registry[packet](*args, **kwargs, out_val=output))
        if name in CONVOLUTIONS and floating[0].ndim == 4:
            last = floating[0].is_contiguous(memory_format=torch.channels_last)
            first = floating[0].is_contiguous()  # with one channel, or one pixel, it is both
            stats.channels_last += last and not first
            stats.channels_first += first and not last
        return output

    def flops(self, *dtypes: torch.dtype) -> int:
        """Floating-point operations in any of some precisions; in all of them without an argument."""
        return sum(stats.flops for (_, dtype), stats in self.ops.items() if not dtypes or dtype in dtypes)

    def count(self, prefix: str) -> int:
        """Calls of the operations whose name begins with ``prefix``."""
        return sum(stats.count for (name, _), stats in self.ops.items() if name.startswith(prefix))

    @staticmethod
    def _now(tensors: list[torch.Tensor]) -> float:
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return time.perf_counter()
