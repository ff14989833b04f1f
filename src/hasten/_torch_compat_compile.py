"""The private parts of torch.compile that hasten depends on. See ``_torch_compat.py``."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn


def compiler_backend(name: str, mode: str) -> Callable[[torch.fx.GraphModule, list[Any]], Any]:
    """The function with which ``torch.compile(backend=name, mode=mode)`` compiles one graph."""
    from torch import _inductor
    from torch._dynamo.backends.registry import lookup_backend

    if name != "inductor":
        return lookup_backend(name)
    return lambda graph, inputs: _inductor.compile(graph, inputs, options=_inductor.list_mode_options(mode))


def compile_in_place(modules: list[nn.Module], backend: Callable[..., Any]) -> None:
    """Compiles the calls of some modules, as ``nn.Module.compile`` does, whatever class their ``forward`` is from.

    torch.compile never starts a graph in a function of torch.nn, but follows a call into one from a function elsewhere.
    Modules of one class share a function and so a graph, other classes have code of their own: torch counts the graphs
    of a code object and stops compiling at eight.

    The whole and the short batch of an epoch each get a graph of static shapes. With torch's own rule, the first short
    batch makes the batch dimension symbolic, and the slower kernels of that graph then serve all later batches.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    compiled: dict[type, Callable[..., Any]] = {}
    for module in modules:
        if type(module) not in compiled:
            own = FunctionType(call.__code__.replace(), call.__globals__)
            compiled[type(module)] = _with_static_batch_sizes(torch.compile(own, backend=backend))
        module._compiled_call_impl = partial(compiled[type(module)], module)


_MOST_STATIC_SIZES = 4  # whole batches, short ones, and the microbatches of both; further sizes share a symbolic graph


def _with_static_batch_sizes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled call; the first dimension of its arguments is static while it has few sizes."""
    sizes: set[int] = set()

    def mark(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.ndim and (value.shape[0] in sizes or len(sizes) < _MOST_STATIC_SIZES):
                sizes.add(value.shape[0])
                torch._dynamo.mark_static(value, 0)
        elif isinstance(value, (tuple, list, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                mark(item)

    def call(*args: Any, **kwargs: Any) -> Any:
        mark(args)
        mark(kwargs)
        return compiled(*args, **kwargs)

    return call


def graph_break_of(graph: torch.fx.GraphModule) -> tuple[str, str, int] | None:
    """(reason, file, line) of the graph break that ends a graph, inside a compiler backend; None if it returns."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    return reason.reason.splitlines()[0], frame.filename if frame else "?", frame.lineno if frame else 0


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module itself, not only of one around it, go to compiled code."""
    return module._compiled_call_impl is not None


def graph_break_reasons() -> Counter[str]:
    """Why torch.compile ended graphs, or did not start them, so far in this process: reason -> how often."""
    from torch._dynamo.utils import counters

    reasons: Counter[str] = Counter()
    for text, count in counters["unimplemented"].items():
        explanation = [line.strip() for line in text.splitlines() if line.strip().startswith("Explanation: ")]
        reasons[explanation[0].removeprefix("Explanation: ") if explanation else text.splitlines()[0]] += count
    return reasons


def compile_seconds() -> float:
    """Seconds that this process has spent in torch.compile so far, forward and backward graphs together."""
    utils = sys.modules.get("torch._dynamo.utils")  # not imported: nothing was compiled
    spent = utils.cumulative_time_spent_ns if utils else {}
    return sum(spent.get(phase, 0) for phase in ("entire_frame_compile", "entire_backward_compile")) / 1e9


_TIME_SAVED = "distributed_ephemeral_timeout_us"  # of a compilation: what compiling its cached graphs once took


def cached_compile_seconds() -> float:
    """Seconds that compiling took for the graphs that this process has read from inductor's cache on disk instead."""
    utils = sys.modules.get("torch._dynamo.utils")  # as above
    saved = [getattr(metrics, _TIME_SAVED, None) for metrics in utils.get_compilation_metrics()] if utils else []
    return sum(microseconds or 0 for microseconds in saved) / 1e6
