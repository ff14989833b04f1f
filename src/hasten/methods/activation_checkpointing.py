"""Activation checkpointing: blocks recomputed in the backward pass instead of stored."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]  # without annotations

from hasten import Card, Exactness, Method, NoEffectError, RunContext, WrapOrder
from hasten._torch_compat import BatchNorm, inside_backward
from hasten.utils.blocks import repeated_blocks, state_updated_in_forward
from hasten.utils.op_recorder import NOT_CHECKED


@dataclass(frozen=True)
class ActivationCheckpointing(Method):
    """Stores only the inputs of each repeated block and recomputes the rest in the backward pass.

    This costs about a third more arithmetic and saves most of the activation memory, which allows a larger batch or
    model. The recomputation draws the same random numbers (dropout), and batch normalization counts each batch once.
    Blocks with other state that a forward pass changes, such as spectral normalization, are stored as usual.
    """

    card = Card(
        summary="recompute the activations of repeated blocks in the backward pass, to save memory",
        exactness=Exactness.BIT_EXACT,
        source="Chen et al. 2016, arXiv 1604.06174; torch.utils.checkpoint",
        gain_when="memory limits the batch size; by itself it costs one more forward pass",
        applies_to={"repeated_blocks"},
        requires={"python_between_kernels"},  # it saves and restores the random state of every block
        order=WrapOrder.EARLY,
        remedy_for={"out_of_memory": {}},
        script_edit={
            "by_hand": "call repeated blocks through torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        },
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        found = repeated_blocks(model)
        blocks = [block for block in found if state_updated_in_forward(block) is None]
        if not found:
            run.report_no_effect(self, "the model has no sequence of blocks of one type")
        elif not blocks:
            state = state_updated_in_forward(found[0])
            run.report_no_effect(self, f"computing a block twice would update {state} twice")
        for block in blocks:
            block.forward = partial(_checkpointed, block, block.forward)  # survives deepcopy, as bound methods do
        if blocks:
            run.observe_effect(self, partial(_observe, blocks))
        return model


def _checkpointed(block: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if any(cache.get_seq_length() for cache in caches):  # such as that of a prefix: a second pass would append to it
        return forward(*args, **kwargs)
    if caches:  # Transformers makes one in training, too, and leaves it out where it recomputes a block itself
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        kwargs |= {"use_cache": False} if "use_cache" in kwargs else {}
    norms = [module for module in block.modules() if isinstance(module, BatchNorm) and module.track_running_stats]
    if norms and torch.compiler.is_compiling():  # it supports no context_fn, and chooses itself what to recompute
        return forward(*args, **kwargs)
    if norms:
        kwargs["context_fn"] = lambda: (nullcontext(), _frozen_statistics(norms))
    options = {"use_reentrant": False, "preserve_rng_state": True}
    return checkpoint(forward, *args, **options, **kwargs)  # pyright: ignore[reportUnknownVariableType]


def _is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values of Transformers, to which every forward pass appends."""
    return any((cls.__module__, cls.__name__) == ("transformers.cache_utils", "Cache") for cls in type(value).__mro__)


@contextmanager
def _frozen_statistics(norms: list[BatchNorm]) -> Generator[None]:
    """Context manager: batch norms do not update running statistics, which a recomputed batch did already."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, num_batches_tracked in before:
            norm.momentum, norm.num_batches_tracked = momentum, num_batches_tracked


def _observe(blocks: list[torch.nn.Module]) -> Generator[None, None, str]:
    """Effect check: a layer of a recomputed block is called once in the forward and once in the backward pass."""
    called: set[int] = set()
    recomputed: set[int] = set()

    def note(index: int, *_: Any) -> None:
        if torch.compiler.is_compiling():  # the step may compile a graph, which must not contain this function
            return
        (recomputed if inside_backward() else called).add(index)

    layers = [(index, layer) for index, block in enumerate(blocks) for layer in block.children()]
    handles = [layer.register_forward_pre_hook(partial(note, index)) for index, layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if recomputed:
        return f"{len(recomputed)} of {len(blocks)} blocks were recomputed in the backward pass"
    if called:
        raise NoEffectError("no block was recomputed in the backward pass")
    return f"{NOT_CHECKED}: the blocks run inside a compiled graph"
