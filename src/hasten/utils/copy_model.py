"""Copies a model of any make; ``copy.deepcopy`` refuses tensors that a computation returned."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def copy_model(model: torch.nn.Module, shared: Iterable[torch.Tensor] = ()) -> torch.nn.Module:
    """A deep copy of a model, which has the tensors in ``shared`` in common with it.

    Attributes may hold results of a computation, such as the hidden state of the last batch or the weight that torch's
    old ``weight_norm`` computes: the copy gets their values, detached.
    """
    with _CopyResults():
        return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


class _CopyResults(TorchFunctionMode):
    """While active, ``deepcopy`` of a tensor that is no leaf of autograd gives its values instead of an error."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))
