"""Transformers: a callback in the user's Trainer finds the metrics, and its loop of evaluation is one evaluation; the
seams of torch see everything else.

The fields of ``TrainingArguments`` can be varied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hasten.hosts.inside.replace import replaces

if TYPE_CHECKING:
    from hasten.hosts.inside.frameworks import FrameworkLoop

NO_METRIC = ("_runtime", "_per_second", "_time", "epoch")  # suffixes of entries that do not measure the model


def watch(module: Any, loop: FrameworkLoop) -> None:
    """Adds a callback that reports metrics to ``loop`` to each Trainer; ``module`` is ``transformers.trainer``."""

    class TransformersCallback(module.TrainerCallback):
        """Reports to hasten what the Trainer does; changes nothing."""

        def __init__(self, trainer: Any):
            self.trainer = trainer

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            loop.trainer, loop.length = self.trainer, state.max_steps
            if getattr(args, "logging_nan_inf_filter", False):
                loop.facts.add("loss_nan_filter")

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            held_out = [name for name in metrics or () if not name.endswith(NO_METRIC)]
            for name in held_out:
                loop.report(name, metrics[name])
            loop.monitor = _monitor(args, held_out) or loop.monitor

    @replaces(module.Trainer, "__init__")
    def watched_init(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        trainer.add_callback(TransformersCallback(trainer))

    @replaces(module.Trainer, "evaluation_loop")
    def evaluation_loop(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():  # as its steps are
            loop.models.begin_evaluation()  # it may call another object than the one that is trained
        try:
            return original(trainer, *args, **kwargs)
        finally:
            loop.models.end_evaluation(now=True)


def watch_arguments(module: Any, loop: FrameworkLoop) -> None:
    """Lets ``--vary`` change the fields of TrainingArguments; ``module`` is ``transformers.training_args``."""

    @replaces(module.TrainingArguments, "__post_init__")
    def post_init(original: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
        vars(arguments).update(loop.take(type(arguments).__name__, vars(arguments)))
        original(arguments, *args, **kwargs)


def _monitor(args: Any, held_out: list[str]) -> tuple[str, str] | None:
    """(metric that chooses the best model, "max" or "min"); None if it is not among ``held_out``."""
    name = args.metric_for_best_model
    if name is None or args.greater_is_better is None:
        return None
    name = name if name.startswith("eval_") else f"eval_{name}"
    return (name, "max" if args.greater_is_better else "min") if name in held_out else None
