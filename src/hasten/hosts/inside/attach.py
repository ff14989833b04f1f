"""``hasten.attach``: a script names the parts of its own training loop, instead of being watched for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

SESSION = "hasten.hosts.inside.session"  # imported only in a process that hasten has started


class AttachedRun:
    """A training loop of the user's own, as ``attach`` returns it.

    Attributes:
        batches: The loader; under hasten, the same batches as the methods of a recipe read them.
    """

    def __init__(self, batches: Iterable[Any], report: Callable[[str, Any, bool | None], None] | None = None) -> None:
        self.batches, self._report = batches, report

    def metric(self, name: str, value: Any, *, higher_is_better: bool | None = None) -> None:
        """Gives hasten a value that was measured on held-out data, such as ``("val_loss", 0.31)``.

        A trial is judged by it if it is the only name, or the only one with a direction.

        Args:
            name: Of the metric.
            value: A number, or a tensor of one element; it is read only under hasten.
            higher_is_better: The direction; required only if the name does not determine it.
        """
        if self._report is not None:
            self._report(name, value, higher_is_better)


def attach(model: Any, optimizer: Any, loader: Iterable[Any]) -> AttachedRun:
    """Names the model, optimizer and loader of a training loop for ``hasten diagnose``, ``tune`` and ``train``.

    In a script that hasten has not started, nothing is changed: ``batches`` is ``loader``, and metrics are not read.
    Call it once, after all three were made and before the loop.

    Args:
        model: The module that the loop calls; several are a list.
        optimizer: A ``torch.optim.Optimizer``, whose updates are the steps; several are a list. None if the loop has
            none.
        loader: A DataLoader, or any iterable that can be read once per epoch and gives ready batches.

    Returns:
        The run: iterate over ``run.batches``, and pass what was measured on held-out data to ``run.metric``.
    """
    session = getattr(sys.modules.get(SESSION), "current", None)
    if session is None:
        return AttachedRun(loader)
    return AttachedRun(session.attach(model, optimizer, loader), session.report)
