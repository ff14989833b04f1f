"""Residual blocks that begin as the identity: the last batch normalisation of each starts with a scale of zero.

So the signal first passes the shortcuts alone, which makes the start of training with large batches easier (Goyal et al. 2017, arXiv 1706.02677, section 5.1:
8192 pictures a batch, error 24.11 % to 23.74 %).

Which normalisation is the last of a block that has a shortcut is read from the block itself: torch.fx follows a copy of it, without numbers, to where a
normalisation's output is added to something that took a shorter way. Where two of them meet (one normalises the shortcut), it is the one behind more
operations. A net without shortcuts has none, which matters: there zeros would shut off everything behind them.
"""

import copy
import operator
from dataclasses import dataclass

import torch
from torch import fx

from hasten._torch_compat import BatchNorm
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method
from hasten.core.run_context import RunContext

ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}


@dataclass(frozen=True)
class ZeroInitResidual(Method):
    card = Card(
        summary="the last batch normalisation of each residual block starts with a scale of zero",
        exactness=Exactness.CHANGES_TRAINING,
        source="Goyal et al. 2017, arXiv 1706.02677, section 5.1",
        gain_when="residual nets with batch normalisation, large batches, and a short warm-up",
        accelerates={"steps"},
        applies_to={"repeated_blocks", "convolutions"},
        order=WrapOrder.FIRST,
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        last = _last_of_blocks(model)
        if not last:
            run.report_no_effect(
                self, "no batch normalisation of the model is added to a shortcut, as far as torch.fx can follow it"
            )
        fresh = [norm for norm in last if norm.weight.is_meta or bool((norm.weight == 1).all())]
        if last and not fresh:
            trained = any(norm.weight.any() for norm in last)
            run.report_no_effect(
                self,
                "zeros would shut off what these scales have learnt already"
                if trained
                else "the scales start with zeros already",
            )
        for norm in fresh:
            torch.nn.init.zeros_(norm.weight)
        return model


def _last_of_blocks(module: torch.nn.Module) -> list[BatchNorm]:
    """The normalisations at the end of residual branches; of what cannot be followed as a whole, those of its parts."""
    if not any(isinstance(part, BatchNorm) and part.affine for part in module.modules()):
        return []
    try:
        graph = fx.Tracer().trace(copy.deepcopy(module))
    except Exception:  # it decides by numbers, or takes what fx cannot give it
        return [norm for part in module.children() for norm in _last_of_blocks(part)]
    ways: dict[fx.Node, int] = {}  # how many operations lie between the input and here; 0: none of it comes here
    for node in graph.nodes:
        longest = max((ways[before] for before in node.all_input_nodes), default=0)
        ways[node] = longest + 1 if longest or node.op == "placeholder" else 0
    sums = [node.all_input_nodes for node in graph.nodes if node.target in ADDITIONS]
    ends = [max(terms, key=ways.get) for terms in sums if len(terms) == 2 and all(ways[term] for term in terms)]
    norms = [module.get_submodule(end.target) for end in ends if end.op == "call_module"]
    return [norm for norm in norms if isinstance(norm, BatchNorm) and norm.affine]
