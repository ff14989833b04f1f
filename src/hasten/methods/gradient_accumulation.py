"""A batch in several pieces, each with its own forward and backward pass, their gradients added up.

The step stays the same and takes a fraction of the memory, which makes room for a larger batch or model, or
lets the pieces fit into the cache. Every piece counts by its share of the samples, so a loss that averages over
samples gives the same gradient; batch normalisation does not, because each piece would be normalised alone.
"""

from dataclasses import dataclass

import torch

from hasten._torch_compat import BatchNorm
from hasten.core.card import Card, Exactness
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext


@dataclass(frozen=True)
class GradientAccumulation(Method):
    card = Card(
        summary="each batch in pieces, one after the other, to save memory",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/notes/amp_examples.html, gradient accumulation",
        gain_when="the batch does not fit into memory, or its activations not into the cache; otherwise it costs time",
        presets=({}, {"pieces": 4}),
        remedy_for={"out_of_memory": {}},
    )
    accumulation_steps: int = option(2, at_least=1)

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        """Sets the microbatches here and not in ``plan``: whether pieces give the same gradient depends on the model."""
        if any(isinstance(part, BatchNorm) for part in model.modules()):
            run.report_no_effect(
                self, "the model has batch normalisation, which would see every piece alone: not the same formula"
            )
        elif min(self.accumulation_steps, run.plan.batch_size) < 2:
            run.report_no_effect(self, "the batch stays in one piece")
        else:
            run.plan.microbatches = self.accumulation_steps
        return model
