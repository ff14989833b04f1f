"""Scripts and methods that are refused, in one line that says why."""

import subprocess
import sys
import time

import pytest

from hasten.core.errors import ConfigurationError, RunError
from hasten.hosts.process import ScriptProcess
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import ScriptTrial, watch_script
from helpers.host_scripts import SCRIPTS, arm, script, written

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.mark.parametrize("recipe", ["in_memory_batches", "fused_optimizer", "gradient_clipping"])
def test_method_without_its_seam_is_an_error(recipe):
    with arm(script("words.py"), recipe) as worker, pytest.raises(RunError, match=f"{recipe} has no effect: words.py"):
        worker.call("build")


def test_method_that_leaves_the_loader_as_it_is_reports_why():
    why = "cache_dataset has no effect: the samples are in memory already"
    with arm(script("tensors.py"), "cache_dataset") as worker, pytest.raises(RunError, match=why):
        worker.call("build")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\nx = torch.ones(1, requires_grad=True)\nfor _ in range(3): (x * 2).backward()\nint('x')", "int"),
        ("import torch\nraise ValueError('my own fault')", "ValueError: my own fault"),
        ("import torch\nprint(1)", "ended without training: there was no backward pass"),
        ("print(1)", "ended without training: there was no backward pass"),
        ("import torch\ninput('continue? ')", "it asks for input, and its standard input is empty here"),
    ],
)
def test_script_that_does_not_train_is_reported_in_one_line(text, message, tmp_path, capfd):
    with pytest.raises(ConfigurationError) as error:
        watch_script(written(tmp_path, text))
    assert message in str(error.value) and "\n" not in str(error.value)
    crashed = "training" not in message
    assert ("Traceback (most recent call last)" in capfd.readouterr().err) is crashed


def test_command_that_hides_hasten_from_its_training_is_refused_with_the_reason(tmp_path):
    (tmp_path / "run.sh").write_text(f"PYTHONPATH=. {sys.executable} -c 'import time; time.sleep(60)'")
    ref = ScriptRef.of_command(["bash", "run.sh"], directory=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"PYTHONPATH.* sets it anew"):
        watch_script(ref, time.monotonic() + 4)


def test_script_that_never_trains_ends_with_the_budget(tmp_path):
    ref = written(tmp_path, "import torch, time\nwhile True: time.sleep(1)")
    with pytest.raises(
        ConfigurationError, match=r"did not train within .* s, its part of the budget: no backward pass"
    ):
        watch_script(ref, time.monotonic() + 8)


def test_script_that_trains_in_two_processes_is_refused(tmp_path):
    text = """
import os, torch
x = torch.ones(1, requires_grad=True)
os.fork()
while True:
    (x * 2).backward()
"""
    message = "trains in 2 processes by itself"
    with arm(written(tmp_path, text)) as worker, pytest.raises(ConfigurationError, match=message):
        worker.call("build")


@pytest.mark.parametrize(("values", "metric"), [(["nan", "0.5", "0.4"], 0.4), (["0.5", "0.4", "nan"], None)])
def test_metric_that_is_not_finite_at_the_end_is_refused(values, metric, tmp_path):
    text = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch, value in enumerate(VALUES):
    for _ in range(12):
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} val_loss {value}")
"""
    trial = ScriptTrial(written(tmp_path, text.replace("VALUES", repr(values))))
    if metric is None:
        with pytest.raises(RunError, match="the metric is not a finite number at the end"):
            trial.run()
    else:
        result = trial.run()
        assert [row["metric"] for row in result["evaluations"]] == [None, 0.5, 0.4]
        assert result["metric"] == result["best_metric"] == metric


def test_script_that_goes_to_the_background_is_refused(tmp_path):
    ref = written(tmp_path, "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(600)\n")
    with pytest.raises(ConfigurationError, match="continues in the background; start it in the foreground"):
        watch_script(ref)


def test_gradient_accumulation_is_refused_where_the_script_forms_its_batches(tmp_path):
    command = [sys.executable, "-m", "hasten", "train", "--with", "gradient_accumulation", "--quiet", "--"]
    argv = [*command, sys.executable, str(SCRIPTS / "tensors.py"), "1"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "the script forms its batches itself" in done.stderr


def test_script_whose_metric_is_not_clear_needs_none_for_exact_methods(tmp_path):
    printing = "print(f'val_accuracy: {epoch / 9}, val_f1: {epoch / 8}')"
    text = (
        "import torch\nmodel = torch.nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for epoch in range(4):\n    for _ in range(5):\n        optimizer.zero_grad()\n"
        f"        model(torch.randn(8, 4)).sum().backward()\n        optimizer.step()\n    {printing}\n"
    )
    with pytest.raises(ConfigurationError, match="metric"):
        watch_script(written(tmp_path, text))
    assert watch_script(written(tmp_path, text), needs_metric=False)["metric"] is None


def test_script_that_prepares_for_long_is_given_no_budget_where_none_counts(tmp_path):
    ref = written(tmp_path, "import torch, time\nwhile True: time.sleep(1)")
    with ScriptProcess(ref, {}) as run, pytest.raises(ConfigurationError, match=r"no backward pass; prepare its data"):
        run.wait_until_trained(4.0, None)
