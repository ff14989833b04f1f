"""Only the inputs of each repeated block are kept; the rest is computed again when the backward pass needs it.

About a third more arithmetic for a fraction of the memory, which makes room for a larger batch or model.
Random numbers (dropout) repeat themselves in the second computation, and batch normalisation counts the
batch only once.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from hasten._torch_compat import BatchNorm
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method
from hasten.core.run_context import RunContext


@dataclass(frozen=True)
class ActivationCheckpointing(Method):
    card = Card(
        summary="activations inside repeated blocks computed again instead of kept, to save memory",
        exactness=Exactness.BIT_EXACT,
        source="Chen et al. 2016, arXiv 1604.06174; torch.utils.checkpoint",
        gain_when="memory limits the batch; by itself it costs one more forward pass",
        applies_to={"repeated_blocks"},
        requires={"python_between_kernels"},  # it keeps and restores the random state of every block
        order=WrapOrder.EARLY,
        remedy_for={"out_of_memory": {}},
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        blocks = repeated_blocks(model)
        if not blocks:
            run.report_no_effect(self, "the model has no sequence of like blocks")
        for block in blocks:
            block.forward = partial(_recomputed, block.forward)  # a partial of a bound method survives deepcopy
        return model


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost composite modules that stand beside another of their class in a ModuleList or Sequential."""
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)):
        kinds = [type(child) for child in model]
        like = [child for child in model if kinds.count(type(child)) > 1 and any(True for _ in child.children())]
    else:
        like = []
    inside = [block for child in model.children() if child not in like for block in repeated_blocks(child)]
    return like + inside


def _recomputed(forward, *inputs, **named):
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    norms = [part for part in forward.__self__.modules() if isinstance(part, BatchNorm) and part.track_running_stats]
    if norms and torch.compiler.is_compiling():  # which takes no contexts, and chooses itself what to compute again
        return forward(*inputs, **named)
    contexts = {"context_fn": lambda: (nullcontext(), _not_counting(norms))} if norms else {}
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True, **contexts, **named)


@contextmanager
def _not_counting(norms: list[BatchNorm]):
    """The running statistics have seen this batch in the first computation; the second leaves them alone."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, counted in before:
            norm.momentum, norm.num_batches_tracked = momentum, counted
