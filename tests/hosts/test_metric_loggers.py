"""The seams at trackers, on the trackers themselves; a tracker that is not installed is skipped."""

import importlib

import numpy
import pytest
import torch

from hasten.hosts.inside.metric_loggers import WATCHED


@pytest.fixture
def watch(monkeypatch):
    """Returns a function that watches a tracker's module for this test, and the list that receives its numbers."""

    def start(module_name, package, *methods):
        pytest.importorskip(package)
        module = importlib.import_module(module_name)
        for owner, method in methods:
            monkeypatch.setattr(getattr(module, owner), method, getattr(getattr(module, owner), method))  # undone later
        logged = []
        WATCHED[module_name](module, lambda name, value: logged.append((name, value)))
        return logged

    return start


@pytest.mark.parametrize("package", ["torch.utils.tensorboard", "tensorboardX"])
def test_tensorboard_scalars_are_reported_and_written(watch, tmp_path, package):
    if package.startswith("torch"):
        pytest.importorskip("tensorboard")
    logged = watch(f"{package}.writer", package, ("FileWriter", "add_summary"))
    writer = importlib.import_module(package).SummaryWriter(str(tmp_path))
    writer.add_scalar("Loss/val", 0.5, 1)
    writer.add_scalar("acc", torch.tensor(0.25), 1)
    writer.add_scalars("error", {"val": 0.125}, 1)
    writer.add_histogram("weights", numpy.arange(9.0), 1)
    writer.close()
    assert [name for name, _ in logged] == ["Loss/val", "acc", "error/val"]
    assert [value for _, value in logged] == [0.5, 0.25, 0.125]
    assert any(path.stat().st_size > 100 for path in tmp_path.iterdir() if path.is_file())


@pytest.mark.slow
def test_wandb_runs_offline_are_reported(watch, tmp_path, monkeypatch):
    logged = watch("wandb.sdk.wandb_run", "wandb", ("Run", "log"))
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", dir=str(tmp_path))
    wandb.log({"val/loss": 0.5, "text": "x", "flag": True, "image": numpy.zeros((2, 2))}, step=1)
    run.log({"val": {"acc": torch.tensor(0.25)}, "iter": 3})
    run.finish()
    assert logged == [("val/loss", 0.5), ("val/acc", 0.25), ("iter", 3.0)]


@pytest.mark.slow
def test_mlflow_functions_and_client_are_reported(watch, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    methods = ("MlflowClient", "log_metric"), ("MlflowClient", "log_batch")
    logged = watch("mlflow.tracking.client", "mlflow", *methods)
    import mlflow

    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("test")
    with mlflow.start_run():
        mlflow.log_metric("val_loss", 0.5, step=1, synchronous=True)
        mlflow.log_metrics({"val_acc": 0.25}, step=1, synchronous=True)
    assert logged == [("val_loss", 0.5), ("val_acc", 0.25)]


@pytest.mark.slow
def test_trackio_runs_are_reported(watch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    logged = watch("trackio.run", "trackio", ("Run", "log"))
    import trackio

    trackio.init(project="test", embed=False)
    trackio.log({"val_loss": 0.5})
    trackio.finish()
    assert logged == [("val_loss", 0.5)]


class Summary:
    value = [object()]  # has no field "tag"


def test_tracker_that_changed_its_calls_still_works():
    class FileWriter:
        def add_summary(self, summary):
            return "written"

    module = type("module", (), {"FileWriter": FileWriter})
    WATCHED["torch.utils.tensorboard.writer"](module, lambda name, value: None)
    assert FileWriter().add_summary(Summary()) == "written"
