"""Keeps what a trial logs on this machine, where the script's own arguments override the variables of its trackers.

The sandbox sets the variables (``OFFLINE`` in ``sandbox.py``); ``wandb.init(mode="online")`` overrides them.
``WATCHED`` names the modules; ``inject/sitecustomize.py`` calls ``WATCHED[name](module)`` at the end of the import of
each one, whether torch is imported before or later: no other module has taken its functions by then.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from hasten.hosts.inside.replace import replaces
from hasten.hosts.inside_files import SESSION

LOCAL_SCHEMES = ("", "file", "sqlite")  # of MLflow's addresses; others are servers, and databases that may be elsewhere
OF_TRACKIO = ("space_id", "dataset_id", "server_url")  # arguments of ``trackio.init``, and ends of its variables
COMMITS = ("create_commit", "upload_file", "upload_folder", "upload_large_folder", "delete_file", "delete_folder")
CHANGES = ("preupload_lfs_files", "create_branch", "create_tag", "delete_repo")  # without an answer
REPO_TYPES = {"dataset": "datasets/", "space": "spaces/"}  # in a URL; a model has none
NO_COMMIT = "0" * 40


def keep_wandb_offline(module: Any) -> None:
    """Makes ``wandb.init`` run in mode "offline", or "disabled"; ``module`` is ``wandb.sdk.wandb_init``.

    The script may ask for another mode by an argument, by ``settings`` or by the variable WANDB_MODE.
    """

    @replaces(module, "init")
    def init(original: Any, *args: Any, **kwargs: Any) -> Any:
        settings = kwargs.get("settings")
        of_settings = settings.get("mode") if isinstance(settings, dict) else getattr(settings, "mode", None)
        asked = kwargs.get("mode") or of_settings or os.environ.get("WANDB_MODE")
        kwargs["mode"] = "disabled" if asked == "disabled" else "offline"
        return original(*args, **kwargs)


def keep_mlflow_offline(module: Any) -> None:
    """Replaces the address of a server by a local one; ``module`` is ``mlflow.tracking._tracking_service.utils``.

    The script may give it to ``set_tracking_uri`` or set the variable MLFLOW_TRACKING_URI.
    """

    @replaces(module, "set_tracking_uri")
    def set_tracking_uri(original: Any, uri: Any) -> None:
        if not _is_remote(uri):
            original(uri)

    @replaces(module, "get_tracking_uri")
    def get_tracking_uri(original: Any) -> Any:
        uri = original()
        return f"sqlite:///{os.environ.get(SESSION, os.curdir)}/mlflow.db" if _is_remote(uri) else uri


def keep_mlflow_registry_offline(module: Any) -> None:
    """Ignores calls that set a server as model registry; ``module`` is ``mlflow.tracking._model_registry.utils``."""
    os.environ.pop("MLFLOW_REGISTRY_URI", None)

    @replaces(module, "set_registry_uri")
    def set_registry_uri(original: Any, uri: Any) -> None:
        if not _is_remote(uri):
            original(uri)


def keep_mlflow_client_offline(module: Any) -> None:
    """Removes addresses of servers from the arguments of ``MlflowClient``; ``module`` is ``mlflow.tracking.client``.

    Lightning's ``MLFlowLogger`` passes them directly.
    """

    @replaces(module.MlflowClient, "__init__")
    def init(original: Any, *args: Any, **kwargs: Any) -> None:
        local = {name: None if _is_remote(value) else value for name, value in kwargs.items()}
        original(*(None if isinstance(value, str) and _is_remote(value) else value for value in args), **local)


def _is_remote(uri: Any) -> bool:
    """Whether an address of MLflow may be that of another machine."""
    scheme = urlsplit(str(uri)).scheme.partition("+")[0]  # sqlite+pysqlite
    return scheme not in LOCAL_SCHEMES or str(uri).startswith("databricks")


def keep_trackio_offline(module: Any) -> None:
    """Removes the addresses of servers from the arguments of ``trackio.init``; ``module`` is ``trackio``."""

    @replaces(module, "init")
    def init(original: Any, *args: Any, **kwargs: Any) -> Any:
        for name in OF_TRACKIO:
            os.environ.pop(f"TRACKIO_{name.upper()}", None)
        return original(*args, **{name: value for name, value in kwargs.items() if name not in OF_TRACKIO})


def keep_swanlab_offline(module: Any) -> None:
    """Makes ``swanlab.init`` run in mode "offline", unless it asks for "disabled"; ``module`` is ``swanlab``."""

    @replaces(module, "init")
    def init(original: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["mode"] = "disabled" if kwargs.get("mode") == "disabled" else "offline"
        return original(*args, **kwargs)


def keep_comet_offline(module: Any) -> None:
    """Disables ``comet_ml.Experiment``, which has no offline mode; ``module`` is ``comet_ml``.

    ``comet_ml.start`` makes an ``OfflineExperiment``, unless the script passes ``online=True``.
    """

    @replaces(module.Experiment, "__init__")
    def init(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs | {"disabled": True})


def keep_trainer_offline(module: Any) -> None:
    """Sets ``push_to_hub`` of all TrainingArguments to False; ``module`` is ``transformers.training_args``."""

    @replaces(module.TrainingArguments, "__post_init__")
    def post_init(original: Any, arguments: Any) -> None:
        arguments.push_to_hub = False
        original(arguments)


def keep_hub_offline(module: Any) -> None:
    """``module`` is ``huggingface_hub.hf_api``: nothing is uploaded, and the script gets the answers of success."""

    def create_repo(api: Any, repo_id: str, *args: Any, repo_type: str | None = None, **kwargs: Any) -> Any:
        name = repo_id if "/" in repo_id else f"offline/{repo_id}"  # the name of the user is known to the server
        return module.RepoUrl(f"{api.endpoint}/{REPO_TYPES.get(repo_type or '', '')}{name}", api.endpoint)

    def commit(api: Any, repo_id: str, *args: Any, commit_message: str | None = None, **kwargs: Any) -> Any:
        url = f"{create_repo(api, repo_id, repo_type=kwargs.get('repo_type'))}/commit/{NO_COMMIT}"
        answer = module.CommitInfo(url, commit_message or "", "", NO_COMMIT)
        return api.run_as_future(lambda: answer) if kwargs.get("run_as_future") else answer

    def change(*args: Any, **kwargs: Any) -> None: ...

    answers = {"create_repo": create_repo, **dict.fromkeys(COMMITS, commit), **dict.fromkeys(CHANGES, change)}
    for name, answer in answers.items():
        setattr(module.HfApi, name, answer)
        if name in vars(module):  # the same as a function
            setattr(module, name, getattr(module.api, name))


WATCHED: Mapping[str, Callable[[Any], None]] = {
    "wandb.sdk.wandb_init": keep_wandb_offline,
    "mlflow.tracking._tracking_service.utils": keep_mlflow_offline,
    "mlflow.tracking._model_registry.utils": keep_mlflow_registry_offline,
    "mlflow.tracking.client": keep_mlflow_client_offline,
    "trackio": keep_trackio_offline,
    "swanlab": keep_swanlab_offline,
    "comet_ml": keep_comet_offline,
    "transformers.training_args": keep_trainer_offline,
    "huggingface_hub.hf_api": keep_hub_offline,
}
