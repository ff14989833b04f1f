"""Gradient accumulation: each batch in several microbatches, whose gradients are added up."""

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten import Card, ConfigurationError, Exactness, Method, NoEffectError, RunContext, option
from hasten._torch_compat import BatchNorm, without_modes
from hasten.utils.batch import target_of
from hasten.utils.blocks import state_updated_in_forward
from hasten.utils.op_recorder import NOT_CHECKED

CLASSIFICATION: Any = torch.nn.CrossEntropyLoss, torch.nn.NLLLoss
FUNCTIONS = torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss
IGNORED = -100  # a label that torch's losses leave out


@dataclass(frozen=True)
class GradientAccumulation(Method):
    """Runs the forward and backward pass of each microbatch in turn, then one optimizer step.

    A step computes the same and needs a fraction of the activation memory, which allows a larger batch or model, or
    keeps the activations in the cache. Each microbatch is weighted by its share of the samples, so a loss that is a
    mean over samples has the same gradient. Batch normalization has not, because it would normalize each microbatch
    separately.
    """

    card = Card(
        summary="each batch in several microbatches, one after the other, to save memory",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/notes/amp_examples.html, gradient accumulation",
        gain_when="the batch does not fit into memory, or its activations not into the cache; otherwise it costs time",
        presets=({}, {"accumulation_steps": 4}),
        remedy_for={"out_of_memory": {}},
    )

    accumulation_steps: int = option(2, at_least=1)  # microbatches of a batch

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if run.services.in_script:
            reason = "the script forms its batches itself, and only its own loop can cut them"
            raise ConfigurationError(f"{self.name} cannot be used: {reason}; leave it out")
        # not in the plan hook: whether microbatches give the same gradient depends on the model
        if any(isinstance(module, BatchNorm) for module in model.modules()):
            reason = "the model has batch normalization, which would normalize each microbatch separately"
            run.report_no_effect(self, reason)
        elif state := state_updated_in_forward(model):
            run.report_no_effect(self, f"each microbatch would update {state}")
        elif run.task.step is not None:
            run.report_no_effect(self, "the task's own step would carry its state from one microbatch to the next")
        elif why := _uneven(run):
            run.report_no_effect(self, f"{why}, and microbatches are weighted by their samples")
        elif self.accumulation_steps < 2 or (run.plan.is_batch_size_known and run.plan.batch_size < 2):
            run.report_no_effect(self, "each batch is a single microbatch")
        else:
            run.plan.microbatches = self.accumulation_steps
            run.observe_effect(self, partial(_observe, run))
        return model


def _uneven(run: RunContext) -> str:
    """Why samples do not count alike in the loss, as far as torch's losses and the first labels show it; or ""."""
    loss: Any = run.task.loss
    is_classification = getattr(loss, "func", None) in FUNCTIONS or isinstance(loss, CLASSIFICATION)
    names = ("reduction", "weight", "ignore_index")
    given = loss.keywords if isinstance(loss, partial) else {name: getattr(loss, name, None) for name in names}
    if given.get("reduction") == "sum":
        return "the loss is a sum over the samples"
    if is_classification and given.get("weight") is not None:
        return "the loss weights classes"
    labels, peek = None, run.services.peek_batch  # None in a script that `hasten eject` has written
    with suppress(ConfigurationError), without_modes():  # data that can be read only once; a model without values yet
        labels = target_of(peek()) if callable(peek) else None
    is_whole = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
    ignored = IGNORED if (label := given.get("ignore_index")) is None else label
    if run.ranks.any(is_whole and bool((labels == ignored).any())):  # the ranks must cut alike
        return f"the loss is a mean over labels, of which some are left out ({ignored})"
    return ""


def _observe(run: RunContext) -> Generator[None, None, str]:
    before = run.progress.samples
    yield
    samples = run.progress.samples - before
    if samples < 2 * run.ranks.world_size:
        return f"{NOT_CHECKED}: the observed step had {samples} samples, too few for two microbatches on each rank"
    fraction = run.progress.microbatch_fraction  # of the last microbatch of the observed step
    if fraction == 1.0:
        raise NoEffectError("the step was computed in one piece")
    return f"the last microbatch of the step had {fraction:.0%} of its samples"
