"""The Trainer of Transformers logs losses as they are, instead of reading each to see whether it is a number."""

from dataclasses import dataclass
from typing import Any

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext


@dataclass(frozen=True)
class SkipLossNanFilter(Method):
    """Sets ``logging_nan_inf_filter`` of the Trainer to False.

    With the filter, the CPU waits for the loss of every step on a GPU. Only the log of the training changes: the filter
    replaces a loss that is no finite number by the mean of the others, and without it the log shows none from there on.
    Evaluations, which leave out such losses, keep the filter.
    """

    card = Card(
        summary="train by the Trainer of Transformers without waiting for the loss of every step",
        exactness=Exactness.BIT_EXACT,
        source="https://github.com/huggingface/transformers/issues/33693",
        gain=(1.0, 1.07),
        gain_when="the steps on a fast GPU are short; on the CPU there is nothing to wait for",
        accelerates={"logging"},
        applies_to={"loss_nan_filter", "cuda"},
        script_edit={
            "by_hand": "pass logging_nan_inf_filter=False to TrainingArguments, if all losses of evaluations are finite"
        },
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        trainer = run.services.trainer()
        if not getattr(getattr(trainer, "args", None), "logging_nan_inf_filter", False):
            return run.report_no_effect(self, "no Trainer of Transformers filters the losses that it logs", model)
        trainer.args.logging_nan_inf_filter, evaluate = False, trainer.evaluation_loop

        def evaluate_with_filter(*args: Any, **kwargs: Any) -> Any:
            trainer.args.logging_nan_inf_filter = True
            try:
                return evaluate(*args, **kwargs)
            finally:
                trainer.args.logging_nan_inf_filter = False

        trainer.evaluation_loop = evaluate_with_filter

        def observe() -> str:
            if trainer.args.logging_nan_inf_filter:
                raise NoEffectError("the filter was switched on again")
            return "the Trainer did not read the loss of the step"

        run.observe_effect(self, observe)
        return model
