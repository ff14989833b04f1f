"""Keeps what a trial logs on this machine, where the script's own arguments override the variables of its trackers.

The sandbox sets the variables (``OFFLINE`` in ``sandbox.py``); ``wandb.init(mode="online")`` overrides them.
``WATCHED`` names the modules; the host calls ``WATCHED[name](module)`` once the script has imported one.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

REMOTE = ("http://", "https://", "databricks")  # how the address of an MLflow server begins


def keep_wandb_offline(module: Any) -> None:
    """``module`` is ``wandb.sdk.wandb_init``."""
    original = module.init

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mode") not in (None, "offline", "disabled"):
            kwargs["mode"] = "offline"
        return original(*args, **kwargs)

    module.init = init


def keep_mlflow_offline(module: Any) -> None:
    """``module`` is ``mlflow.tracking._tracking_service.utils``."""
    original = module.set_tracking_uri

    @wraps(original)
    def set_tracking_uri(uri: Any) -> None:
        if not str(uri).startswith(REMOTE):
            original(uri)

    module.set_tracking_uri = set_tracking_uri


def keep_trackio_offline(module: Any) -> None:
    """``module`` is ``trackio``."""
    original = module.init

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        local = {name: value for name, value in kwargs.items() if name not in ("space_id", "dataset_id", "server_url")}
        return original(*args, **local)

    module.init = init


def keep_trainer_offline(module: Any) -> None:
    """``module`` is ``transformers.training_args``."""
    original = module.TrainingArguments.__post_init__

    @wraps(original)
    def post_init(arguments: Any) -> None:
        arguments.push_to_hub = False
        original(arguments)

    module.TrainingArguments.__post_init__ = post_init


WATCHED: Mapping[str, Callable[[Any], None]] = {
    "wandb.sdk.wandb_init": keep_wandb_offline,
    "mlflow.tracking._tracking_service.utils": keep_mlflow_offline,
    "trackio": keep_trackio_offline,
    "transformers.training_args": keep_trainer_offline,
}
