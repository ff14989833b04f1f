"""Every way to start a training reaches it: python, python -m, bash, torchrun, accelerate, a console script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.core.errors import ConfigurationError
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import watch_script

SCRIPTS = Path(__file__).with_name("scripts")
BIN = Path(sys.executable).parent
COMMANDS = {
    "python": ["python", "train.py"],
    "module": ["python", "-m", "package.train"],
    "bash": ["bash", "run.sh"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "train.py"],
    "accelerate": ["accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "train.py"],
    "console script": ["my-train"],
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with the same training as script, module, shell script and console script."""
    text = (SCRIPTS / "ddp.py").read_text()
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(text)
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "run.sh").write_text('exec python train.py "$@"\n')
    (tmp_path / "my-train").write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_module('package.train')\n")
    (tmp_path / "my-train").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), str(BIN), os.environ["PATH"]]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hasten(*argv: str) -> tuple[int, dict]:
    command = [sys.executable, "-m", "hasten", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    return done.returncode, json.loads(done.stdout or "{}") | {"stderr": done.stderr}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", [way for way in COMMANDS if way != "python"])  # as all other tests start scripts
def test_diagnose_reaches_the_training_however_it_is_started(way, project):
    code, result = hasten("diagnose", "--budget", "6s", "--quiet", "--json", "--", *COMMANDS[way])
    assert code == 0, result
    file = "package/train.py" if way in ("module", "console script") else "train.py"
    optimizers = result["sites"]["optimizers"]
    assert [(entry["site"].rpartition(":")[0], entry["type"]) for entry in optimizers] == [(file, "SGD")]
    assert result["metric"]["name"] == "val loss" and result["metric"]["direction"] == "min"
    assert not list(project.glob("runs"))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["bash"])
def test_tune_reaches_the_training_however_it_is_started(way, project):
    argv = ("--budget", "40s", "--methods", "num_threads", "--quiet", "--json", "--", *COMMANDS[way])
    code, result = hasten("tune", *argv)
    assert code in (0, 1) and "verdict" in result, result
    assert any(trial["what"].startswith("num_threads") for trial in result["trials"])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("verb", [("compare", "--b", "num_threads:count=1"), ("tune", "--metric", "val loss")])
def test_several_processes_are_refused_after_their_first_step(verb, project):
    code, result = hasten(*verb, "--budget", "200s", "--quiet", "--json", "--", *COMMANDS["torchrun"])
    assert code == 2 and "trains in 2 processes by itself, which diagnose can measure" in result["error"]
    assert "--budget" not in result["error"] and not list(project.glob("runs"))
    left = subprocess.run(["pgrep", "-f", str(project)], capture_output=True, text=True).stdout
    assert not left, "processes of the script are left"


@pytest.mark.parametrize(
    ("argv", "name", "file"),
    [
        (["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"], "train", "train.py"),
        (["accelerate", "launch", "train.py"], "train", "train.py"),
        (["bash", "run.sh", "--lr", "1"], "run", None),
        (["my-train", "--lr", "1"], "my-train", None),
    ],
)
def test_name_of_a_command_is_that_of_its_script(argv, name, file, project):
    ref = ScriptRef.of_command(argv)
    assert str(ref) == name and ref.file == (file and str(project / file))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_python_that_ignores_pythonpath_inside_a_shell_script_is_refused_with_the_reason(project):
    (project / "run.sh").write_text("python -I train.py\n")
    with pytest.raises(ConfigurationError, match=r"bash run.sh runs no Python that loads hasten: .*python -I"):
        watch_script(ScriptRef.of_command(["bash", "run.sh"]))
