"""Trackers stay offline in a trial, whether the script imports them before torch or after it; on small stand-ins."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.hosts.inside.offline import WATCHED
from hasten.hosts.process import INJECTED, ScriptProcess
from hasten.hosts.script_ref import ScriptRef

STAND_INS = {  # re-export their functions as the real packages do
    "mlflow/__init__.py": "from mlflow.tracking import *",
    "mlflow/tracking/__init__.py": "from mlflow.tracking._tracking_service.utils import *\n"
    "from mlflow.tracking._model_registry.utils import *\nfrom mlflow.tracking.client import MlflowClient",
    "mlflow/tracking/_tracking_service/utils.py": "import os\nuri = None\n"
    "def set_tracking_uri(new):\n    global uri\n    uri = new\n"
    "def get_tracking_uri():\n    return uri or os.environ['MLFLOW_TRACKING_URI']\n",
    "mlflow/tracking/_model_registry/utils.py": "registry = []\ndef set_registry_uri(uri):\n    registry.append(uri)\n",
    "mlflow/tracking/client.py": "from mlflow.tracking._tracking_service import utils\n"
    "class MlflowClient:\n"
    "    def __init__(self, tracking_uri=None, registry_uri=None):\n"
    "        self.uris = tracking_uri or utils.get_tracking_uri(), registry_uri\n"
    "    def log_metric(self, run_id, key, value): ...\n    def log_batch(self, run_id, metrics=()): ...\n",
    "wandb/__init__.py": "from wandb.sdk.wandb_init import init",
    "wandb/sdk/wandb_run.py": "class Run:\n    def log(self, data): ...\n",
    "wandb/sdk/wandb_init.py": "def init(project=None, mode=None, settings=None):\n    return mode\n",
}
WITHOUT_SESSION = """
import sys, types
sys.modules["hasten.hosts.inside.session"] = types.SimpleNamespace(start=lambda *_: None)
"""
SERVER = "http://mlflow.example.invalid"


def write_stand_ins(directory: Path, **others: str) -> None:
    for name, text in {**STAND_INS, **others}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


@pytest.fixture
def run(tmp_path):
    """Runs code in a process that the session's directory says is one of a trial or of a real training."""
    write_stand_ins(tmp_path, **{"torch.py": WITHOUT_SESSION})  # the session of a trial needs the real one
    (session := tmp_path / "session").mkdir()

    def run_code(code: str, mode: str = "trial", **variables: str) -> list[str]:
        (session / "spec.json").write_text(json.dumps({"mode": mode}))
        environment = {**os.environ, "HASTEN_HOST": str(session), "PYTHONPATH": INJECTED}
        environment |= {"MLFLOW_TRACKING_URI": "sqlite:///here.db", "WANDB_MODE": "offline", **variables}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run_code


MLFLOW = f"""
print(mlflow.get_tracking_uri())
mlflow.set_tracking_uri("{SERVER}")
mlflow.set_registry_uri("databricks")
print(mlflow.get_tracking_uri(), mlflow.tracking.registry)
print(mlflow.MlflowClient("{SERVER}", "{SERVER}").uris, mlflow.MlflowClient(tracking_uri="azureml://x").uris)
mlflow.set_tracking_uri("file:///tmp/own")
print(mlflow.get_tracking_uri(), mlflow.MlflowClient("sqlite:///own.db").uris)
"""


@pytest.mark.parametrize("order", ["import torch, mlflow", "import mlflow, torch"])
def test_mlflow_writes_to_no_server_in_any_order(run, order):
    here = "sqlite:///here.db"
    assert run(order + MLFLOW) == [
        here,
        f"{here} []",
        f"('{here}', None) ('{here}', None)",
        "file:///tmp/own ('sqlite:///own.db', None)",
    ]


def test_server_that_the_script_names_before_torch_or_in_a_variable_is_not_used(run, tmp_path):
    local = f"sqlite:///{tmp_path}/session/mlflow.db"
    code = f"import mlflow; mlflow.set_tracking_uri('{SERVER}'); import torch; print(mlflow.MlflowClient().uris[0])"
    assert run(code) == ["sqlite:///here.db"]
    assert run(code, MLFLOW_TRACKING_URI=SERVER) == [local]


@pytest.mark.parametrize("order", ["import torch, wandb", "import wandb, torch"])
def test_wandb_stays_offline_in_any_order(run, order):
    calls = "mode='online'", "settings={'mode': 'online'}", "", "mode='disabled'"
    code = "\n".join([order, *(f"print(wandb.init({call}))" for call in calls)])
    assert run(code, WANDB_MODE="online") == ["offline", "offline", "offline", "disabled"]


def test_real_training_logs_where_the_script_says(run):
    code = f"import mlflow, wandb, torch; print(mlflow.MlflowClient('{SERVER}').uris[0], wandb.init(mode='online'))"
    assert run(code, mode="train") == [f"{SERVER} online"]


def test_tracker_that_cannot_be_kept_offline_ends_the_trial(run, tmp_path):
    (tmp_path / "mlflow/tracking/client.py").write_text("MlflowClient = None")
    with pytest.raises(AssertionError):
        run("import mlflow; print('logs')")
    failure = json.loads((tmp_path / "session" / "failure").read_text())
    assert failure["refused"] and failure["text"].startswith("cannot keep mlflow.tracking.client offline: ")


def test_injected_file_knows_all_trackers(monkeypatch):
    monkeypatch.delenv("HASTEN_HOST", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    names = runpy.run_path(INJECTED + "/sitecustomize.py")["TRACKERS"]
    assert sorted(names) == sorted(WATCHED)


TRAINING = f"""
{{order}}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("uri:", mlflow.MlflowClient("{SERVER}").uris[0].rpartition("/")[2], wandb.init(mode="online"))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["import torch, mlflow, wandb", "import mlflow, wandb, torch"])
def test_session_of_a_trial_keeps_trackers_offline_in_any_order(tmp_path, order):
    write_stand_ins(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING.format(order=order))
    script = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    with ScriptProcess(script, {}) as process:
        process.wait_until_trained(60.0, None)
        assert "uri: mlflow.db offline" in process.output()
