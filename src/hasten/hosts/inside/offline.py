"""Keeps what a trial logs on this machine, where the script's own arguments override the variables of its trackers.

The sandbox sets the variables (``OFFLINE`` in ``sandbox.py``); ``wandb.init(mode="online")`` overrides them.
``WATCHED`` names the modules; the host calls ``WATCHED[name](module)`` once the script has imported one.
"""

from collections.abc import Callable, Mapping
from typing import Any

from hasten.hosts.inside.replace import replaces

REMOTE = ("http://", "https://", "databricks")  # how the address of an MLflow server begins
COMMITS = ("create_commit", "upload_file", "upload_folder", "upload_large_folder", "delete_file", "delete_folder")
CHANGES = ("preupload_lfs_files", "create_branch", "create_tag", "delete_repo")  # without an answer
REPO_TYPES = {"dataset": "datasets/", "space": "spaces/"}  # in a URL; a model has none
NO_COMMIT = "0" * 40


def keep_wandb_offline(module: Any) -> None:
    """Replaces an online mode in calls of ``wandb.init`` by "offline"; ``module`` is ``wandb.sdk.wandb_init``."""

    @replaces(module, "init")
    def init(original: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mode") not in (None, "offline", "disabled"):
            kwargs["mode"] = "offline"
        return original(*args, **kwargs)


def keep_mlflow_offline(module: Any) -> None:
    """Ignores calls that set a server as tracking URI; ``module`` is ``mlflow.tracking._tracking_service.utils``."""

    @replaces(module, "set_tracking_uri")
    def set_tracking_uri(original: Any, uri: Any) -> None:
        if not str(uri).startswith(REMOTE):
            original(uri)


def keep_trackio_offline(module: Any) -> None:
    """Removes the addresses of servers from the arguments of ``trackio.init``; ``module`` is ``trackio``."""

    @replaces(module, "init")
    def init(original: Any, *args: Any, **kwargs: Any) -> Any:
        local = {name: value for name, value in kwargs.items() if name not in ("space_id", "dataset_id", "server_url")}
        return original(*args, **local)


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
    "trackio": keep_trackio_offline,
    "transformers.training_args": keep_trainer_offline,
    "huggingface_hub.hf_api": keep_hub_offline,
}
