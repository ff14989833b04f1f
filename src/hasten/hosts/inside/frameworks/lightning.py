"""Lightning: a callback in the user's Trainer finds the model, evaluations and metrics; its arguments can be varied.

Lightning calls ``training_step`` of the module, not the module: this call is timed, and methods wrap it. The sanity
check before the first step is not an evaluation.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from hasten.hosts.inside.replace import replaces
from hasten.hosts.metric_names import phase_of, words_of

if TYPE_CHECKING:
    from hasten.hosts.inside.frameworks import FrameworkLoop

BATCH_HOOK = "on_after_batch_transfer"  # of a LightningModule


def watch(module: Any, loop: FrameworkLoop) -> None:
    """Adds a callback for ``loop`` to each Trainer; ``module`` is Lightning's ``trainer.trainer``."""

    class LightningCallback(module.Callback):
        """Reports to hasten what Lightning does; changes nothing."""

        def __init__(self) -> None:
            self.in_training, self.held_out = set[str](), set[str]()  # names of metrics; the first one that logs counts

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            loop.trainer, plugin = trainer, trainer.precision_plugin
            is_mixed = hasattr(plugin, "autocast_context_manager")
            with plugin.train_step_context() if is_mixed else nullcontext():  # methods see the precision of the step
                loop.models.adopt(pl_module, "training_step")
            if loop.in_float64:
                _read_in_float64(pl_module)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            steps = trainer.estimated_stepping_batches
            is_known = pl_module.automatic_optimization and 0 < steps < math.inf
            loop.length = int(steps) if is_known else None

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                # those of a whole epoch come after its validation, so only the next one finds them
                self.in_training |= {name for name in trainer.callback_metrics if not self._is_held_out(name)}
                loop.models.begin_evaluation()

        def _is_held_out(self, name: str) -> bool:
            return name in self.held_out or phase_of(words_of(name)) in ("validation", "test")

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.sanity_checking:
                return
            loop.models.end_evaluation(now=True)
            held_out = [name for name in trainer.callback_metrics if name not in self.in_training]
            self.held_out.update(held_out)
            for name in held_out:
                loop.report(name, trainer.callback_metrics[name])
            loop.monitor = _monitor(trainer, held_out) or loop.monitor

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            for name in ("training_step", BATCH_HOOK):  # a function in the object cannot be pickled
                pl_module.__dict__.pop(name, None)

    @replaces(module.Trainer, "__init__")
    def watched_init(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **{**kwargs, **loop.take("Trainer", kwargs)})
        trainer.callbacks.insert(0, LightningCallback())


def _read_in_float64(pl_module: Any) -> None:
    """Makes Lightning convert all batches to float64, since methods and checks see those of ``training_step`` only."""
    from hasten.utils.batch import map_tensors  # a watched script does not need it

    original = getattr(pl_module, BATCH_HOOK)

    def on_after_batch_transfer(batch: Any, dataloader_idx: int) -> Any:
        batch = original(batch, dataloader_idx)
        return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)

    pl_module.__dict__[BATCH_HOOK] = on_after_batch_transfer


def _monitor(trainer: Any, held_out: list[str]) -> tuple[str, str] | None:
    """(metric that a checkpoint or early-stopping callback monitors, "max" or "min"); None if none of ``held_out``."""
    for callback in trainer.callbacks:
        if getattr(callback, "monitor", None) in held_out and getattr(callback, "mode", None) in ("min", "max"):
            return callback.monitor, callback.mode
    return None
