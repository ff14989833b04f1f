"""Traces a model into a torch.fx graph, for methods that partition models."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy
import torch
import torch.fx
from torch import nn

from hasten._torch_compat import MODULE_STATE_ATTRIBUTES

PLAIN_TYPES = (bool, int, float, str)  # of attributes by which a module may choose what it computes
FACTORIES = ("arange", "zeros", "ones", "full", "empty", "linspace")  # torch.fx would call them with unknown sizes


def try_trace(module: nn.Module, is_leaf: Callable[[nn.Module], bool] | None = None) -> torch.fx.Graph | None:
    """The graph of a model; None if it cannot be traced, or differs in evaluation mode.

    None, too, for a model whose control flow depends on random numbers (LayerDrop) or on a count of its calls. Tracing
    changes neither the random generators nor the attributes of the model. ``is_leaf`` tells whether a submodule is one
    node of the graph; None for torch.fx's choice (modules of torch.nn).
    """
    tracer = torch.fx.Tracer()
    if is_leaf is not None:
        tracer.is_leaf_module = lambda m, module_qualified_name: is_leaf(m)
    before = _python_state(module)
    try:
        with _factories_as_nodes():
            graph = tracer.trace(module)
            with eval_mode(module):
                same = str(graph) == str(tracer.trace(module))
    except Exception:
        return None
    finally:
        changed = _restore(before)
    return graph if same and not changed else None


def _python_state(module: nn.Module) -> tuple[Any, ...]:
    """State that a forward pass may change besides tensors: random generators, and attributes of modules."""
    dicts: list[Any] = []
    for part in module.modules():
        dicts += [vars(part), *map(vars(part).get, MODULE_STATE_ATTRIBUTES)]
    copies = [(attributes, dict(attributes)) for attributes in dicts if isinstance(attributes, dict)]
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(), copies


def _restore(before: tuple[Any, ...]) -> bool:
    """Restores the state; whether anything had changed on which control flow may depend. A number that became part of
    the graph decides nothing.
    """
    torch_state, python_state, numpy_state, copies = before
    drew = not (
        torch.equal(torch_state, torch.get_rng_state())
        and python_state == random.getstate()
        and all(map(numpy.array_equal, numpy_state, numpy.random.get_state()))
    )
    counted = any(
        isinstance(value, PLAIN_TYPES) and not _is_same(value, old.get(name))
        for attributes, old in copies
        for name, value in attributes.items()
    )
    if drew:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
    for attributes, old in copies:
        attributes.clear()
        attributes.update(old)
    return drew or counted


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and a == b)


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Sets models to evaluation mode (no dropout, no batch statistics), and restores each submodule's mode on exit."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def is_shape_value(node: torch.fx.Node) -> bool:
    """Whether a node is a size (or dtype or device), or computed from sizes, rather than a tensor."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "device", "dtype")
    is_operator = getattr(node.target, "__module__", None) == "_operator"
    return is_operator and bool(node.all_input_nodes) and all(map(is_shape_value, node.all_input_nodes))


def is_random_op(node: torch.fx.Node) -> bool:
    """Whether a node calls a function that draws random numbers, in evaluation mode, too."""
    is_dropout = "dropout" in getattr(node.target, "__name__", "") or bool(node.kwargs.get("dropout_p"))
    return node.op == "call_function" and is_dropout


@contextmanager
def _factories_as_nodes() -> Iterator[None]:
    """Context manager: torch.zeros and the like become graph nodes if an argument is a traced size."""
    originals = {name: getattr(torch, name) for name in FACTORIES}
    try:
        for name, function in originals.items():
            setattr(torch, name, _node_or_call(function))
        yield
    finally:
        for name, function in originals.items():
            setattr(torch, name, function)


def _node_or_call(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.fx.Proxy):
                return value.tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return called
