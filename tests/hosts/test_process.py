"""How a script that does not answer any more is ended, and why it is said to have ended."""

import sys

import pytest

from hasten.core.errors import ConfigurationError, MemoryExhaustedError
from hasten.hosts import process
from hasten.hosts.process import ScriptProcess
from hasten.hosts.script_ref import ScriptRef

CONNECTS = "import os, socket\nmade = socket.socket(socket.AF_UNIX)\nmade.connect(os.environ['HASTEN_HOST'] + '/socket')"


def written(folder, text: str) -> ScriptRef:
    (folder / "train.py").write_text(text)
    return ScriptRef.of_command([sys.executable, "train.py"], directory=str(folder))


def test_process_that_is_killed_here_after_its_connection_broke_is_not_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "END_S", 0.3)
    ref = written(tmp_path, f"{CONNECTS}\nmade.close()\nprint('cleaning up', flush=True)\nimport time\ntime.sleep(600)")
    with ScriptProcess(ref, {}) as run, pytest.raises(ConfigurationError, match="^train failed: cleaning up$"):
        run.wait_until_trained(60.0, None)


def test_process_that_the_kernel_kills_is_out_of_memory(tmp_path):
    ref = written(tmp_path, f"{CONNECTS}\nos.kill(os.getpid(), 9)")
    with ScriptProcess(ref, {}) as run, pytest.raises(MemoryExhaustedError, match="was ended by SIGKILL"):
        run.wait_until_trained(60.0, None)
