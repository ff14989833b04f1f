"""The injected sitecustomize: inert without torch, chained to the user's own, and silent whatever goes wrong."""

import json
import os
import subprocess
import sys

import pytest

from hasten.hosts.process import INJECTED


def run(code: str, directory, *path: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs Python code with hasten's directory first in PYTHONPATH."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([INJECTED, *path]), **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)


def test_process_without_torch_stays_as_it_is(tmp_path):
    code = "import sys, json; print([m for m in sys.modules if m.startswith(('torch', 'hasten'))], sys.path[1:2])"
    watched = run(code, tmp_path, HASTEN_HOST=str(tmp_path))
    assert watched.returncode == 0 and watched.stderr == ""
    assert watched.stdout.startswith("[]") and INJECTED not in watched.stdout


def test_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.was_run = __file__\n")
    output = run("import sys; print(sys.was_run)", tmp_path, str(tmp_path), HASTEN_HOST=str(tmp_path))
    assert output.stdout.strip() == str(tmp_path / "sitecustomize.py")


def test_error_inside_hasten_is_noted_and_changes_nothing(tmp_path):
    """There is no spec.json, so the session cannot begin."""
    (tmp_path / "torch.py").write_text("value = 3\n")
    output = run("import torch; print(torch.value, torch.__loader__)", tmp_path, HASTEN_HOST=str(tmp_path))
    assert output.returncode == 0 and output.stdout.startswith("3 <_frozen_importlib_external.SourceFileLoader")
    assert output.stderr == "" and (tmp_path / "error").exists()


def test_package_that_only_looks_for_torch_does_not_keep_the_session_out(tmp_path):
    """As transformers and Lightning do before the script imports torch."""
    (tmp_path / "torch.py").write_text("value = 3\n")
    code = "import importlib.util as u; u.find_spec('torch'); import torch; print(torch.__loader__)"
    output = run(code, tmp_path, HASTEN_HOST=str(tmp_path))
    assert output.stdout.startswith("<_frozen_importlib_external.SourceFileLoader") and output.stderr == ""
    assert (tmp_path / "error").exists()


IMPORTS = """
import runpy, sys
finder = runpy.run_path({path!r})["ImportFinder"]
def start(_):
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, finder)]
    finder({{"trainer": [lambda module: seen.append(module.Trainer)]}})
seen = []
finder({{"tensors": [start]}})
try:
    import trainer
except ValueError:
    print("failed")
print(seen, type(sys.modules["trainer"].__spec__).__name__ if "trainer" in sys.modules else "")
"""


@pytest.mark.parametrize(
    ("end", "printed"),
    [("", ["['complete'] ModuleSpec"]), ("raise ValueError", ["failed", "[] "])],
    ids=["ends", "fails"],
)
def test_module_that_imports_torch_itself_is_watched_at_its_end(end, printed, tmp_path):
    """As ``from transformers import Trainer`` does, where it is the first line of a script."""
    (tmp_path / "tensors.py").touch()
    (tmp_path / "trainer.py").write_text(f"import tensors\nTrainer = 'complete'\n{end}\n")
    done = run(IMPORTS.format(path=os.path.join(INJECTED, "sitecustomize.py")), tmp_path, str(tmp_path))
    assert done.stdout.splitlines() == printed and not done.stderr


def test_torch_that_cannot_be_imported_fails_as_without_hasten(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
    output = run("import torch", tmp_path, HASTEN_HOST=str(tmp_path))
    assert output.returncode == 1 and output.stderr.endswith("ImportError: broken\n")
    assert not (tmp_path / "error").exists()


@pytest.mark.slow
def test_cost_before_torch_is_at_most_10_ms(tmp_path):
    """CPU time of Python's start with the injected file, over that without it."""
    import resource

    def seconds(**variables: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(10):
            run("pass", tmp_path, **variables)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 10

    assert min(seconds(HASTEN_HOST=str(tmp_path)) for _ in range(3)) - min(seconds() for _ in range(3)) < 0.010


def test_session_of_a_trial_that_cannot_begin_ends_it(tmp_path):
    (tmp_path / "torch.py").write_text("value = 3\n")
    (tmp_path / "spec.json").write_text('{"mode": "trial"}')
    output = run("import torch; print(torch.value)", tmp_path, HASTEN_HOST=str(tmp_path))
    assert output.returncode == 2 and output.stdout == output.stderr == "" and not (tmp_path / "error").exists()
    failure = json.loads((tmp_path / "failure").read_text())
    assert failure["refused"] and failure["text"].startswith("hasten cannot run in the Python of the script (")
