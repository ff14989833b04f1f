"""The user's own command where a cluster has set WORLD_SIZE, as in a pod of Kubeflow: it is no rank of a hasten job."""

import sys

import pytest

from hasten.cli import diagnose
from hasten.cli.main import main


@pytest.fixture
def pod(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("exit(3)")
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    return [sys.executable, "train.py"]


def test_failed_training_keeps_its_exit_code(pod):
    assert main(["train", "--", *pod]) == 3


def test_script_is_diagnosed_in_this_process_and_the_answer_printed(pod, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("hasten.profiling.diagnose.diagnose", lambda task, **_: asked.append(task) or {"kind": "x"})
    monkeypatch.setattr(diagnose, "page", lambda *_: lambda result: "the answer")
    assert main(["diagnose", "--", *pod]) == 0
    assert [task.command for task in asked] == [" ".join(pod)] and capsys.readouterr().out == "the answer\n"


def test_several_processes_of_a_script_are_refused(pod, capsys):
    assert main(["diagnose", "--processes", "2", "--", *pod]) == 2
    assert "train starts its own processes; leave --processes out" in capsys.readouterr().err


def test_script_under_launch_is_refused(pod, capsys):
    assert main(["launch", "--nproc-per-node", "2", "--", "train", "--", *pod]) == 2
    error = capsys.readouterr().err
    assert "train starts its own processes; write hasten train -- " in error and error.count("\n") == 1


@pytest.mark.parametrize("verb", ["train", "diagnose"])
def test_processes_in_a_rank_of_the_cluster_are_refused(pod, capsys, verb):
    assert main([verb, "digits", "--processes", "2"]) == 2
    assert "--processes 2 in a process that is one of 2 already" in capsys.readouterr().err
