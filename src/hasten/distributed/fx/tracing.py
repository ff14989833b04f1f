"""What a model computes, as a graph of torch.fx: for methods that cut models apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import numpy
import torch
import torch.fx
from torch import nn

from hasten._torch_compat import MODULE_STATE_ATTRIBUTES

PLAIN = (bool, int, float, str)  # types of what a part of a model may keep to decide by
MAKERS = (
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "linspace",
)  # functions that torch.fx would call at once, with sizes that are not known yet


def try_trace(module: nn.Module, is_leaf: Callable[[nn.Module], bool] | None = None) -> torch.fx.Graph | None:
    """The graph of a model; None where it cannot be told, or is another one when the model is evaluated.

    Nor can that of a model which decides while it computes: by random numbers (LayerDrop), or by a count of its calls. Neither is changed by looking.

    Args:
        is_leaf: whether a part is one node of the graph; None for torch.fx's choice, which looks into all that is not of torch.nn.
    """
    tracer = torch.fx.Tracer()
    if is_leaf is not None:
        tracer.is_leaf_module = lambda part, name: is_leaf(part)
    before = _moving(module)
    try:
        with _making_nodes():
            graph = tracer.trace(module)
            with eval_mode(module):
                same = str(graph) == str(tracer.trace(module))
    except Exception:
        return None
    finally:
        moved = _put_back(before)
    return graph if same and not moved else None


def _moving(module: nn.Module) -> tuple:
    """What computing may move beside tensors: the generators, and what parts of a model keep."""
    held = [
        each
        for part in module.modules()
        for each in (vars(part), *map(vars(part).get, MODULE_STATE_ATTRIBUTES))
        if isinstance(each, dict)
    ]
    kept = [(each, dict(each)) for each in held]
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(), kept


def _put_back(before: tuple) -> bool:
    """Makes it as it was; whether anything had moved that a model could decide by. A number that is part of the graph by now decides nothing."""
    torchs, pythons, numpys, kept = before
    drawn = not (
        torch.equal(torchs, torch.get_rng_state())
        and pythons == random.getstate()
        and all(map(numpy.array_equal, numpys, numpy.random.get_state()))
    )
    counted = any(
        isinstance(value, PLAIN) and not _same(value, was.get(name))
        for held, was in kept
        for name, value in held.items()
    )
    if drawn:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        numpy.random.set_state(numpys)
    for held, was in kept:
        held.clear()
        held.update(was)
    return drawn or counted


def _same(one, other) -> bool:
    return one is other or (type(one) is type(other) and one == other)


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Inside, models are as they are when they are evaluated: nothing is dropped, nor counted by batch normalisation."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def is_shape_value(node: torch.fx.Node) -> bool:
    """Whether it is a size, or made of sizes, rather than a tensor."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "device", "dtype")
    return (
        node.target.__module__ == "_operator"
        and bool(node.all_input_nodes)
        and all(map(is_shape_value, node.all_input_nodes))
    )


def is_random_op(node: torch.fx.Node) -> bool:
    """Whether it is a function that draws random numbers, whatever mode the model is in."""
    return node.op == "call_function" and (
        "dropout" in getattr(node.target, "__name__", "") or bool(node.kwargs.get("dropout_p"))
    )


@contextmanager
def _making_nodes() -> Iterator[None]:
    """Inside, functions that make tensors become nodes where a size is one."""
    kept = {name: getattr(torch, name) for name in MAKERS}
    try:
        for name, function in kept.items():
            setattr(torch, name, _node_or_call(function))
        yield
    finally:
        for name, function in kept.items():
            setattr(torch, name, function)


def _node_or_call(function: Callable) -> Callable:
    @wraps(function)
    def called(*given, **named):
        proxies = [each for each in (*given, *named.values()) if isinstance(each, torch.fx.Proxy)]
        return (
            proxies[0].tracer.create_proxy("call_function", function, given, named)
            if proxies
            else function(*given, **named)
        )

    return called
