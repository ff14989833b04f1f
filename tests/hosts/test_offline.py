"""What a script logs in a trial stays on this machine, also where its own arguments say otherwise; on the trackers."""

import importlib
import subprocess
import sys

import pytest

from hasten.hosts.process import INJECTED

pytestmark = pytest.mark.slow


def run(tmp_path, text: str) -> str:
    """Output of a script in a trial: its own calls, after the seam has seen the import."""
    (tmp_path / "train.py").write_text(
        f"import importlib.util as u\n"
        f"spec = u.spec_from_file_location('injected', {INJECTED + '/sitecustomize.py'!r})\n"
        "injected = u.module_from_spec(spec)\nspec.loader.exec_module(injected)\n"
        "from hasten.hosts.inside.offline import WATCHED\n"
        "injected.ImportFinder({name: [watch] for name, watch in WATCHED.items()})\n" + text
    )
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wandb_asked_to_be_online_stays_offline(tmp_path):
    pytest.importorskip("wandb")
    text = "import wandb\nrun = wandb.init(project='p', mode='online', dir='.')\nprint(run.offline)\nrun.finish()\n"
    assert run(tmp_path, text).splitlines()[0] == "True"
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_mlflow_keeps_a_local_address_and_refuses_that_of_a_server(tmp_path):
    pytest.importorskip("mlflow")
    text = """
import mlflow
mlflow.set_tracking_uri("sqlite:///own.db")
mlflow.set_tracking_uri("https://example.invalid")
print(mlflow.get_tracking_uri())
"""
    assert run(tmp_path, text).splitlines() == ["sqlite:///own.db"]


def test_trackio_asked_for_a_space_logs_here(tmp_path):
    pytest.importorskip("trackio")
    text = """
import os
os.environ["TRACKIO_DIR"] = "here"
import trackio
trackio.init(project="p", space_id="user/space", embed=False)
trackio.log({"loss": 1.0})
trackio.finish()
"""
    run(tmp_path, text)
    assert list(tmp_path.glob("here/p*.db"))


def test_transformers_arguments_push_nothing(tmp_path):
    pytest.importorskip("transformers")
    arguments = importlib.import_module("transformers.training_args").TrainingArguments
    assert "push_to_hub" in arguments.__dataclass_fields__
    text = """
from transformers import TrainingArguments
print(TrainingArguments(output_dir="out", push_to_hub=True, report_to=[]).push_to_hub)
"""
    assert run(tmp_path, text).splitlines() == ["False"]


def test_hugging_face_hub_gets_nothing_and_the_script_an_answer(tmp_path):
    pytest.importorskip("huggingface_hub")
    text = """
import os
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # where no server is
import huggingface_hub
from huggingface_hub import HfApi, upload_folder
api = HfApi()
print(api.create_repo("model", exist_ok=True).repo_id, api.create_repo("me/data", repo_type="dataset").repo_type)
open("weights", "w").close()
print(upload_folder(repo_id="me/model", folder_path=".").oid[:3])
print(api.upload_file(path_or_fileobj="weights", path_in_repo="w", repo_id="me/model", run_as_future=True).result())
print(huggingface_hub.create_commit("me/model", [], commit_message="epoch 3").commit_message)
"""
    url = f"http://127.0.0.1:9/me/model/commit/{'0' * 40}"
    assert run(tmp_path, text).splitlines() == ["offline/model dataset", "000", url, "epoch 3"]


def test_swanlab_asked_to_be_online_stays_offline(tmp_path):
    pytest.importorskip("swanlab")
    text = """
import swanlab
run = swanlab.init(project="p", mode="online", log_dir="here")
swanlab.log({"loss": 1.0})
swanlab.finish()
"""
    run(tmp_path, text)
    assert list(tmp_path.glob("here/*"))


def test_comet_experiment_uploads_nothing(tmp_path):
    pytest.importorskip("comet_ml")
    text = """
import comet_ml
experiment = comet_ml.Experiment("no-key", project_name="p")
experiment.log_metric("loss", 1.0)
print(experiment.disabled)
started = comet_ml.start(api_key="no-key", project_name="p", online=True)
print(getattr(started, "disabled", None))
"""
    assert run(tmp_path, text).splitlines()[-2:] == ["True", "True"]
