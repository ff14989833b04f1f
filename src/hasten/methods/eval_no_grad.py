"""Evaluation without recording gradients, for a training that evaluates its model as if it were to be trained."""

from collections.abc import Generator
from dataclasses import dataclass

import torch

from hasten import Batch, Card, Exactness, ForwardFn, Method, RunContext, WrapOrder
from hasten.utils.batch import batch_tensors
from hasten.utils.op_recorder import NOT_CHECKED


@dataclass(frozen=True)
class EvalNoGrad(Method):
    """Calls the model under ``torch.no_grad`` while it is in eval mode.

    Without it, a call records a graph for a backward pass that never comes: it costs time, and the memory of all
    activations. The outputs are the same. hasten's own evaluation records nothing, so the method acts in trainings that
    run their own loop.
    """

    card = Card(
        summary="evaluate the model without recording gradients",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/generated/torch.no_grad.html",
        gain_when="a training script that evaluates often and without torch.no_grad",
        accelerates={"evaluation"},
        applies_to={"evaluation_gradients"},
        order=WrapOrder.LAST,
        script_edit={"evaluation": "torch.no_grad()"},
    )

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        if not run.services.eval_records_gradients():
            return run.report_no_effect(self, "the evaluation records no gradients", forward)
        model, spared, differentiates = run.model, [0], [False]

        def forward_without_gradients(batch: Batch) -> torch.Tensor:
            if model.training or not torch.is_grad_enabled():
                return forward(batch)
            # a saliency map, an adversarial example
            if differentiates[0] or any(tensor.requires_grad for tensor in batch_tensors(batch)):
                return forward(batch)
            try:
                with torch.no_grad():
                    outputs = forward(batch)
            except RuntimeError:
                outputs = forward(batch)  # raises again, unless the model differentiates in it, as for forces
                differentiates[0] = True
                return outputs
            spared[0] += 1
            return outputs

        def observe() -> Generator[None, None, str]:
            yield
            if not spared[0]:
                return f"{NOT_CHECKED}: there was no evaluation until the observed step"
            return f"{spared[0]} calls of the model in eval mode recorded no gradients"

        run.observe_effect(self, observe)
        return forward_without_gradients
