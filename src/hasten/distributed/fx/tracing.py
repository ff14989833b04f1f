"""Traces a model into a torch.fx graph, for methods that partition models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.fx
from torch import nn

from hasten._torch_compat import MODULE_STATE_ATTRIBUTES
from hasten.utils.rng import get_rng_state, preserve_rng_state
from hasten.utils.tree import bitwise_equal

PLAIN_TYPES = (bool, int, float, str)  # of attributes by which a module may choose what it computes
FACTORIES = ("arange", "zeros", "ones", "full", "empty", "linspace")  # torch.fx would call them with unknown sizes


def try_trace(module: nn.Module, is_leaf: Callable[[nn.Module], bool] | None = None) -> torch.fx.Graph | None:
    """The graph of a model; None if it cannot be traced, or differs in evaluation mode.

    Also None if the control flow depends on random numbers (LayerDrop) or on a count of calls. Changes nothing.
    ``is_leaf`` tells whether a submodule is one node of the graph; None for torch.fx's choice (modules of torch.nn).
    """
    tracer = torch.fx.Tracer()
    if is_leaf is not None:
        tracer.is_leaf_module = lambda m, module_qualified_name: is_leaf(m)
    held = [vars(part).get(name) for part in module.modules() for name in MODULE_STATE_ATTRIBUTES]
    attributes = [*map(vars, module.modules()), *(each for each in held if isinstance(each, dict))]
    before = [dict(each) for each in attributes]
    try:
        with preserve_rng_state(), _factories_as_nodes():
            state = get_rng_state()
            graph = tracer.trace(module)
            with eval_mode(module):
                same = str(graph) == str(tracer.trace(module))
            draws = not bitwise_equal(state, get_rng_state())
        return graph if same and not draws and not _counts(before, attributes) else None
    except Exception:
        return None
    finally:
        for now, old in zip(attributes, before, strict=True):
            now.clear()
            now.update(old)


def _counts(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    """Whether tracing changed a bool, number or text among the modules' attributes: control flow may depend on it."""
    changes = [(new, old.get(name)) for old, now in zip(before, after, strict=True) for name, new in now.items()]
    return any(isinstance(new, PLAIN_TYPES) and (type(new), new) != (type(old), old) for new, old in changes)


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
    """Whether a node calls a function with dropout (not a Dropout module), which may draw in evaluation mode, too."""
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
