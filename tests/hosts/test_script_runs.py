"""Scripts that imitate public ones, run untouched: watched, compared, checked, and trained with a recipe."""

import subprocess
import sys
import time

import pytest
import torch

from hasten.core.errors import RunError
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_method
from hasten.engine.resources import available_cores
from hasten.hosts.process import ScriptProcess, _processes_with
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import SERVICES, ScriptTrial, watch_script
from hasten.hosts.site_map import known_sites
from helpers.host_scripts import SCRIPTS, arm, script, written

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

RUNS = {  # script and arguments -> its steps
    ("tensors.py", "1"): 128,
    ("mnist.py", "--epochs", "2", "--save", "w.pt"): 20,
    ("words.py", "50"): 50,
    ("gpt.py", "50"): 50,
    ("gan.py", "3"): 48,
}
# runs a script, then prints a hash of the weights that it saved or left in its namespace, and three random numbers
HASHED = """
import hashlib, os, runpy, sys
sys.argv = sys.argv[1:]
left = runpy.run_path(sys.argv[0], run_name="__main__")
import torch
states = [torch.load("w.pt")] if os.path.exists("w.pt") else []
states += [thing.state_dict() for thing in left.values() if isinstance(thing, torch.nn.Module)]
digest = hashlib.sha256()
for tensor in [tensor for state in states for tensor in state.values()]:
    digest.update(tensor.numpy().tobytes())
print(len(states) > 0, digest.hexdigest(), torch.rand(3).tolist())
"""


@pytest.mark.parametrize(("argv", "steps"), RUNS.items(), ids=[argv[0] for argv in RUNS])
def test_watching_changes_nothing(argv, steps, tmp_path):
    (tmp_path / "hashed.py").write_text(HASHED)
    command = [sys.executable, str(tmp_path / "hashed.py"), str(SCRIPTS / argv[0]), *argv[1:]]
    alone = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    (tmp_path / "w.pt").unlink(missing_ok=True)
    ref = ScriptRef.of_command(command, directory=str(tmp_path))
    with ScriptProcess(ref, {}, seed=0) as process:
        answer = process.wait_until_trained(120.0, None)
        if not answer.get("ended"):
            answer = process.ask("train", 120.0, None, count=10_000)
        assert answer["ended"] and answer["steps"] == steps
        assert process.output() == alone.stdout and "\nTrue " in alone.stdout
    assert not (tmp_path / "w.pt").exists(), "a trial wrote into the user's directory"


THREADS = """
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
workers = torch.utils.data.DataLoader(range(2), num_workers=1, collate_fn=lambda _: torch.get_num_threads())
assert list(workers) == [1, 1]  # torch sets the number in its workers, whatever the recipe says
for step in range(2000):
    loss = model(torch.ones(2, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(torch.get_num_threads(), "threads")
"""


def test_number_of_threads_that_the_script_sets_is_that_of_the_recipe(tmp_path):
    ref = written(tmp_path, THREADS)
    sites = watch_script(ref)
    assert [entry["count"] for entry in sites["threads"]] == [1]
    assert ("idle_cores" in sites["facts"]) == (available_cores() > 1)
    for recipe, threads in (("num_threads:count=2", 2), ("malloc_tuning", 1)):
        methods = Recipe.parse(recipe).methods
        with ScriptProcess(ref, methods, seed=0, sites=known_sites(ref)) as process:
            process.wait_until_trained(120.0, None)
            assert process.ask("train", 120.0, None, count=10_000)["ended"]
            assert process.output() == f"{threads} threads\n"


DENORMALS = """
import torch

def survivors(count):  # denormal numbers that arithmetic does not flush
    planted = torch.ones(count, dtype=torch.int32).view(torch.float32)
    return int(torch.count_nonzero((planted * 1.0).view(torch.int32)))

def in_worker(_):
    return survivors(1)

if __name__ == "__main__":
    torch.set_num_threads(2)
    survivors(1 << 18)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = torch.utils.data.DataLoader(
        range(1), num_workers=1, multiprocessing_context="spawn", collate_fn=in_worker
    )
    for step in range(20):
        loss = model(torch.ones(2, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(survivors(1), survivors(1 << 18), *workers)
"""


@pytest.mark.parametrize(("recipe", "survivors"), [("flush_denormals", "0 0 0"), ("malloc_tuning", "1 262144 1")])
def test_denormals_in_threads_and_a_spawned_worker_of_a_script_are_flushed_by_the_recipe_only(
    recipe, survivors, tmp_path
):
    ref = written(tmp_path, DENORMALS)
    with ScriptProcess(ref, Recipe.parse(recipe).methods, seed=0, sites=known_sites(ref)) as process:
        process.wait_until_trained(120.0, None)
        assert process.ask("train", 120.0, None, count=10_000)["ended"]
        assert process.output() == f"{survivors}\n"


def test_sites_of_a_script_are_found():
    found = watch_script(script("mnist.py", "--epochs", "2"))
    lines = (SCRIPTS / "mnist.py").read_text().splitlines()

    def line(text: str) -> str:
        return f"mnist.py:{next(i for i, line in enumerate(lines, 1) if text in line)}#1"

    assert {entry["site"]: entry["role"] for entry in found["loaders"]} == {
        line("train_loader ="): "training",
        line("test_loader ="): "evaluation",
    }
    assert [(e["site"], e["type"]) for e in found["optimizers"]] == [(line("optim.Adadelta("), "Adadelta")]
    assert [(e["site"], e["type"]) for e in found["models"]] == [(line("F.nll_loss(model(data), target)"), "Net")]
    assert [(e["site"], e["no_grad"]) for e in found["evaluations"]] == [(line("output = model(data)"), True)]
    assert [e["type"] for e in found["seeds"]] == ["torch.manual_seed"]
    assert found["total_steps"] == 20 and found["samples_per_step"] == 64
    assert {"convolutions", "indexed_samples", "evaluations"} <= set(found["facts"])


def test_estimate_takes_the_watched_run_and_starts_the_script_no_second_time():
    ref = script("tensors.py", "60")
    watch_script(ref)
    first = SERVICES["FirstSteps"](ref, methods={}, device="cpu", seed=0)
    with first as estimated, arm(ref) as started:
        plan, other = estimated.call("build"), started.call("build")
        assert estimated.process is None and plan.keys() == other.keys()
    for name in ("samples_per_epoch", "batch_size", "steps", "evaluate_every"):
        assert plan[name] == other[name], name
    assert set(plan["facts"]) >= set(other["facts"]), "the watched run has seen an evaluation, too"
    assert plan["start"] == pytest.approx(other["start"], rel=0.7) and plan["step"] == pytest.approx(
        other["step"], rel=0.7
    )
    assert plan["evaluation"] == estimated.call("evaluate") > 0


def test_arm_of_a_script_that_ends_is_started_again():
    with arm(script("gan.py", "2")) as worker:  # 32 steps
        plan = worker.call("build")
        blocks = [worker.call("train", count=20) for _ in range(3)]
        assert worker.total == 32 and all(block["samples"] >= 5 * 32 for block in blocks)
        assert plan["samples_per_step"] == 32 and any(block["untimed"] > 0.1 for block in blocks)
        positions = [block["position"] for block in blocks]
        assert positions == sorted(positions)


@pytest.mark.parametrize("name", ["mnist.py", "gpt.py"])
def test_compile_compiles_the_model_of_a_script(name):
    with arm(script(name), "compile:backend=aot_eager") as worker:
        assert " compiled in " in worker.call("build")["effects"]["compile"]


def test_order_of_an_endless_sampler_is_not_drawn_ahead(tmp_path):
    text = (SCRIPTS / "tensors.py").read_text()
    endless = "sampler=torch.utils.data.RandomSampler(x, replacement=True, num_samples=int(1e10))"
    ref = written(tmp_path, text.replace("batch_size=32, shuffle=True", f"batch_size=32, {endless}"))
    with arm(ref, "autotune_loader") as worker, pytest.raises(RunError, match="too long for its order to be drawn"):
        worker.call("build")


def test_evaluations_of_a_script_that_prints_into_a_pipe_lie_where_they_were(tmp_path):
    (tmp_path / "run.sh").write_text(f"{sys.executable} tensors.py 3 2>&1 | tee log.txt")
    text = (SCRIPTS / "tensors.py").read_text() + "    import time\n    time.sleep(0.1)  # for tee\n"
    (tmp_path / "tensors.py").write_text(text)
    run = ScriptTrial(ScriptRef.of_command(["bash", "run.sh"], directory=str(tmp_path))).run()
    steps = [row["step"] for row in run["evaluations"]]
    assert steps == [128, 256, 384]


def test_evaluation_with_gradients_is_found_and_spared(tmp_path):
    text = (SCRIPTS / "tensors.py").read_text().replace("with torch.no_grad():", "if True:")
    ref = written(tmp_path, text)
    assert {"evaluation_gradients", "unfused_optimizer"} <= {*watch_script(ref)["facts"]}
    with arm(ref, "eval_no_grad") as worker:
        plan = worker.call("build")
        assert plan["evaluation"] is not None and worker.call("evaluate") > 0


def test_saliency_after_an_evaluation_has_its_gradients_though_evaluations_record_none(tmp_path):
    text = (SCRIPTS / "tensors.py").read_text().replace("with torch.no_grad():", "if True:")
    text += "\nmodel.eval()\nimage = torch.randn(2, 16, requires_grad=True)\nmodel(image).sum().backward()\n"
    text += "print('saliency', bool(image.grad.abs().sum() > 0))\n"
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-m", "hasten", "train", "--with", "eval_no_grad", "--quiet", "--"]
    done = subprocess.run(
        [*command, sys.executable, "train.py", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "saliency True" in done.stdout, done.stderr


def test_training_with_a_recipe_is_the_users_own(tmp_path):
    command = [sys.executable, "-m", "hasten", "train", "--with", "in_memory_batches", "--quiet", "--"]
    plain = [sys.executable, str(SCRIPTS / "mnist.py"), "--epochs=1", "--save"]
    for argv, name in ((plain, "a.pt"), ([*command, *plain], "b.pt")):
        done = subprocess.run([*argv, name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (tmp_path / f"{name}.out").write_text(done.stdout)
    assert (tmp_path / "a.pt.out").read_text() == (tmp_path / "b.pt.out").read_text()

    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    failed = subprocess.run([*command, sys.executable, "-c", "exit(7)"], cwd=tmp_path, check=False)
    assert failed.returncode == 7


def test_eval_no_grad_has_no_effect_where_nothing_is_recorded():
    assert make_method("eval_no_grad").card.applies_to == {"evaluation_gradients"}


def test_script_arm_evaluates_again_after_the_script_has_ended():
    with arm(script("mnist.py", "--epochs", "4")) as worker:
        worker.call("build", with_evaluation=True)
        assert all(worker.call("evaluate") > 0 for _ in range(6))  # two more than the script has


def test_script_arm_reports_the_evaluations_that_come_inside_of_a_block():
    with arm(script("mnist.py", "--epochs", "4")) as worker:
        plan = worker.call("build")
        block = worker.call("train", count=2 * plan["evaluate_every"] // plan["samples_per_step"])
        assert len(block["evaluations"]) == 2 and 0 < sum(block["evaluations"]) <= block["untimed"] + 1e-6


def test_trial_writes_nothing_outside_of_the_working_directory_either(tmp_path, monkeypatch):
    home, other, project = (tmp_path / name for name in ("home", "other", "project"))
    for directory in (home, other, project):
        directory.mkdir()
    monkeypatch.setenv("HOME", str(home))
    text = f"""
import os, torch
os.makedirs(os.path.expanduser("~/cache"))
model = torch.nn.Linear(2, 1)
for step in range(5):
    model(torch.ones(1, 2)).sum().backward()
torch.save(model.state_dict(), {str(other / "w.pt")!r})
torch.save(model.state_dict(), os.path.expanduser("~/cache/w.pt"))
print(sorted(os.listdir({str(other)!r})), os.listdir(os.path.expanduser("~/cache")))
"""
    with ScriptProcess(written(project, text), {}, seed=0) as process:
        process.wait_until_trained(120.0, None)
        assert process.ask("train", 120.0, None, count=100)["ended"]
        assert process.output() == "['w.pt'] ['w.pt']\n"
    assert not list(home.iterdir()) and not list(other.iterdir())


def test_processes_of_a_script_in_sessions_of_their_own_end_with_it(tmp_path):
    text = """
import os, subprocess, sys, torch
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
x = torch.ones(1, requires_grad=True)
while True:
    (x * 2).backward()
"""
    with ScriptProcess(written(tmp_path, text), {}, seed=0) as process:
        process.wait_until_trained(120.0, None)
        variable = f"HASTEN_HOST={process.directory}"
        assert len(_processes_with(variable)) == 2
    until = time.monotonic() + 10
    while _processes_with(variable) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _processes_with(variable)
