"""Watches what a script passes to its tracker: TensorBoard, Weights & Biases, MLflow, trackio.

``WATCHED`` names the module of each tracker and the function that watches it. The host calls
``WATCHED[name](module, report)`` once the script has imported the module; ``report(name, value)`` then receives each
number that the script logs. A call does what it did before: a value that is no number is ignored here.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hasten.hosts.inside.replace import replaces

Report = Callable[[str, float], None]


def watch_tensorboard(module: Any, report: Report) -> None:
    """Reports written scalars; ``module`` is ``torch.utils.tensorboard.writer`` or ``tensorboardX.writer``."""

    def read(writer: Any, summary: Any, *args: Any, **kwargs: Any) -> None:
        for value in summary.value:
            name = _tag(writer.get_logdir(), value.tag)
            if value.HasField("simple_value"):
                report(name, value.simple_value)
            elif value.HasField("tensor") and len(value.tensor.float_val) == 1:
                report(name, value.tensor.float_val[0])

    _call_before(module.FileWriter, "add_summary", read)


def _tag(directory: str, tag: str) -> str:
    """The name of a scalar; ``add_scalars("L", {"val": 1})`` writes the tag L to a directory ``L_val`` or ``L/val``."""
    for prefix in (tag.replace("/", "_") + "_", tag + "/"):
        _, found, part = str(directory).rpartition("/" + prefix)
        if found and "/" not in part:
            return f"{tag}/{part}"
    return tag


def watch_dictionary(module: Any, report: Report) -> None:
    """Reports the numbers of logged dictionaries; ``module`` is ``wandb.sdk.wandb_run`` or ``trackio.run``."""

    def read(run: Any, data: Any = None, *args: Any, metrics: Any = None, **kwargs: Any) -> None:
        _report_all(data if data is not None else metrics, report)

    _call_before(module.Run, "log", read)


def watch_mlflow(module: Any, report: Report) -> None:
    """Reports metrics; ``module`` is ``mlflow.tracking.client``, through which all functions of MLflow log."""

    def read_one(client: Any, run_id: str, key: str, value: Any, *args: Any, **kwargs: Any) -> None:
        _report_all({key: value}, report)

    def read_batch(client: Any, run_id: str, metrics: Any = (), *args: Any, **kwargs: Any) -> None:
        for metric in metrics:
            report(metric.key, float(metric.value))

    _call_before(module.MlflowClient, "log_metric", read_one)
    _call_before(module.MlflowClient, "log_batch", read_batch)


WATCHED: dict[str, Callable[..., None]] = {
    "torch.utils.tensorboard.writer": watch_tensorboard,
    "tensorboardX.writer": watch_tensorboard,
    "wandb.sdk.wandb_run": watch_dictionary,
    "trackio.run": watch_dictionary,
    "mlflow.tracking.client": watch_mlflow,
}


def _call_before(owner: type, name: str, read: Callable[..., None]) -> None:
    """Replaces a method by one that calls ``read`` with the same arguments first. An error of ``read`` is dropped:
    a version of the tracker whose arguments ``read`` does not know must not end the user's training.
    """

    @replaces(owner, name)
    def watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            read(*args, **kwargs)
        return original(*args, **kwargs)


def _report_all(data: Any, report: Report, prefix: str = "") -> None:
    """Reports the numbers of a dictionary; those of an inner dictionary as ``outer/inner``."""
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        if isinstance(value, Mapping):
            _report_all(value, report, f"{prefix}{key}/")
        elif not isinstance(value, (str, bytes, bool)):
            with suppress(TypeError, ValueError, RuntimeError):  # images, histograms, tensors of several elements
                report(f"{prefix}{key}", float(value))
