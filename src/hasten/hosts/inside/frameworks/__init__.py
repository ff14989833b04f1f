"""Frameworks that own the training loop: what the seams at torch's level cannot see, one file for each framework.

Each file has ``watch(module, loop)``, which is called once the script has imported the module that holds the trainer of
the framework. It changes the class of the trainer, so that it does not matter how the script imports the class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hasten.hosts.inside.frameworks import keras, lightning, pyg, transformers
from hasten.utils.parsed_arguments import offer_arguments

if TYPE_CHECKING:
    from hasten.hosts.inside.models import ModelSeam
    from hasten.hosts.inside.steps import StepSeam

WATCHED = {
    "lightning.pytorch.trainer.trainer": lightning.watch,
    "pytorch_lightning.trainer.trainer": lightning.watch,
    "transformers.trainer": transformers.watch,
    "transformers.training_args": transformers.watch_arguments,
    "keras.src.backend.torch.trainer": keras.watch,
    "torch_geometric.loader.neighbor_loader": pyg.watch,
    "torch_geometric.loader.link_neighbor_loader": pyg.watch,
}


class FrameworkLoop:
    """The training loop of a framework, as the files of this package see it.

    Attributes:
        steps, models: The seams of the session.
        in_float64: Whether the run checks methods in float64.
        facts: Keys of ``hasten.core.card.FACTS`` that hold because of the framework.
        trainer: The object that runs the loop; None in a script with a loop of its own.
        has_optimizer: Whether an optimizer that is not a ``torch.optim.Optimizer`` has updated.
        monitor: (name, "min" or "max") of the metric by which the script chooses checkpoints or stops; None if it
            names none.
        logged: (time of ``time.perf_counter``, name, value, whether the model was in evaluation) of each metric.
        length: Steps of the training that the framework has begun; None if it does not say.
        new_model: Called before another model is trained, as in each fold.
        no_torch_optimizer: Called with the reason at the first update of an optimizer that methods cannot change.
    """

    def __init__(self, steps: StepSeam, models: ModelSeam):
        self.steps, self.models, self.in_float64 = steps, models, False
        self.no_torch_optimizer: Callable[[str], None] = lambda why: None
        self.facts: set[str] = set()
        self.trainer: Any = None
        self.length: int | None = None
        self.new_model: Callable[[], None] = lambda: None
        self.has_optimizer = False
        self.monitor: tuple[str, str] | None = None
        self.logged: list[tuple[float, str, float, bool]] = []

    def take(self, owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Notes the numbers among the arguments that the script passes to a class or function of the framework.

        Returns:
            Their values, which ``--vary`` may have changed; without those that belong to the script, see
            ``offer_arguments``.
        """
        numbers = offer_arguments({name: value for name, value in given.items() if type(value) in (int, float)})
        if numbers:
            site = {"site": f"{self.steps.sites.line()}#1", "type": owner, "names": sorted(numbers)}
            self.steps.sites.records.setdefault("framework_arguments", []).append(site)
        return numbers

    def report(self, name: str, value: Any) -> None:
        """Notes the value of a metric on held-out data; a value that is not a number is ignored."""
        with suppress(TypeError, ValueError, RuntimeError):
            self.logged.append((time.perf_counter(), name, float(value), True))
            self.models.has_logged = True  # so that the marks of this evaluation stay
