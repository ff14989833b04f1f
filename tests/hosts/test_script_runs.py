"""Scripts that imitate public ones, run untouched: watched, compared, checked, and trained with a recipe."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hasten.core.errors import ConfigurationError, RunError
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_method
from hasten.engine.resources import available_cores
from hasten.hosts import exactness
from hasten.hosts.arm import ScriptArm
from hasten.hosts.process import ScriptProcess, _processes_with
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import SERVICES, ScriptTrial, watch_script
from hasten.hosts.site_map import known_sites

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
SCRIPTS = Path(__file__).with_name("scripts")
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


def script(*argv: str, directory: Path = SCRIPTS) -> ScriptRef:
    return ScriptRef.of_command([sys.executable, *argv], directory=str(directory))


def written(tmp_path: Path, text: str) -> ScriptRef:
    (tmp_path / "train.py").write_text(text)
    return script("train.py", directory=tmp_path)


def arm(ref: ScriptRef, recipe: str = "baseline") -> ScriptArm:
    return ScriptArm(ref, methods=Recipe.coerce(recipe).methods, device="cpu", seed=0, timeout=120.0)


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


@pytest.mark.parametrize(
    ("argv", "recipe"),
    [
        (("tensors.py",), "in_memory_batches"),
        (("tensors.py",), "loader_workers:num_workers=2"),
        (("mnist.py",), "cache_dataset"),
        (("gpt.py",), "activation_checkpointing"),
    ],
)
def test_exact_method_gives_the_same_bits(argv, recipe):
    methods = Recipe.parse(recipe).methods
    check = ScriptTrial(script(*argv), methods=methods).check_exactness({}, "BIT_EXACT", 60.0)
    assert check["passed"] and "identical to the bit after 30 steps" in check["why"]


@pytest.mark.parametrize(("argv", "recipe"), [(("gpt.py",), "fused_optimizer"), (("mnist.py",), "channels_last")])
def test_equivalent_method_is_checked_in_float64(argv, recipe):
    check = ScriptTrial(script(*argv), methods=Recipe.parse(recipe).methods).check_exactness(
        {}, "EQUIVALENT_MATH", 60.0
    )
    assert check["passed"] and "in float64" in check["why"] and check["number"] < 1e-10


def test_method_that_changes_the_training_is_not_exact():
    methods = Recipe.parse("gradient_centralization").methods
    for promised in ("BIT_EXACT", "EQUIVALENT_MATH"):
        check = ScriptTrial(script("mnist.py"), methods=methods).check_exactness({}, promised, 60.0)
        assert not check["passed"] and "differ" in check["why"]


def test_lower_precision_is_judged_by_gradients():
    check = ScriptTrial(script("words.py"), methods={"bfloat16": {}}).check_exactness({}, "REDUCED_PRECISION", 60.0)
    assert check["number"] is not None and "gradient" in check["why"]


@pytest.mark.parametrize("name", ["mnist.py", "gpt.py"])
def test_compile_compiles_the_model_of_a_script(name):
    with arm(script(name), "compile:backend=aot_eager") as worker:
        assert " compiled in " in worker.call("build")["effects"]["compile"]


@pytest.mark.parametrize("recipe", ["in_memory_batches", "fused_optimizer", "gradient_clipping"])
def test_method_without_its_seam_is_an_error(recipe):
    with arm(script("words.py"), recipe) as worker, pytest.raises(RunError, match=f"{recipe} has no effect: words.py"):
        worker.call("build")


def test_method_that_leaves_the_loader_as_it_is_reports_why():
    why = "cache_dataset has no effect: the samples are in memory already"
    with arm(script("tensors.py"), "cache_dataset") as worker, pytest.raises(RunError, match=why):
        worker.call("build")


def test_order_of_an_endless_sampler_is_not_drawn_ahead(tmp_path):
    text = (SCRIPTS / "tensors.py").read_text()
    endless = "sampler=torch.utils.data.RandomSampler(x, replacement=True, num_samples=int(1e10))"
    ref = written(tmp_path, text.replace("batch_size=32, shuffle=True", f"batch_size=32, {endless}"))
    with arm(ref, "autotune_loader") as worker, pytest.raises(RunError, match="too long for its order to be drawn"):
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


def test_evaluations_of_a_script_that_prints_into_a_pipe_lie_where_they_were(tmp_path):
    (tmp_path / "run.sh").write_text(f"{sys.executable} tensors.py 3 2>&1 | tee log.txt")
    text = (SCRIPTS / "tensors.py").read_text() + "    import time\n    time.sleep(0.1)  # for tee\n"
    (tmp_path / "tensors.py").write_text(text)
    run = ScriptTrial(ScriptRef.of_command(["bash", "run.sh"], directory=str(tmp_path))).run()
    steps = [row["step"] for row in run["evaluations"]]
    assert steps == [128, 256, 384]


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


@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        ("torch.seed()", "calls torch.seed without a seed"),
        (
            "torch.manual_seed(__import__('time').time_ns() % 10**9)",
            "calls torch.manual_seed with another seed in each",
        ),
    ],
)
def test_script_that_is_not_reproducible_gets_statistics_and_the_cause(tmp_path, seed, cause):
    text = (SCRIPTS / "tensors.py").read_text()
    line = text[: text.index("torch.manual_seed(1)")].count("\n") + 1
    ref = written(tmp_path, text.replace("torch.manual_seed(1)", seed))
    check = ScriptTrial(ref, methods={"in_memory_batches": {}}).check_exactness({}, "BIT_EXACT", 60.0)
    assert check["statistics"] and f"not reproducible (train.py:{line} {cause}" in check["why"]


def test_runs_of_a_check_start_together_and_end_with_it(monkeypatch):
    monkeypatch.setattr(exactness, "TOGETHER", 3)
    ref = script("tensors.py", "4")
    runs = exactness._Runs(ScriptTrial(ref))
    runs.expect([({}, 30, 0), ({}, 30, 1), ({"in_memory_batches": {}}, 30, 0), ({"fused_optimizer": {}}, 30, 0)])
    first = runs.run({}, keep=True)
    began = [process.directory for process in runs.begun.values()]
    assert len(began) == 2 and len(runs.expected) == 1
    assert runs.is_reproducible() and len(runs.begun) == 2, "one of them was used, another one has begun"
    assert runs.run({"in_memory_batches": {}}).steps == first.steps == 30
    began += [process.directory for process in runs.begun.values()]
    runs.close()
    assert not runs.begun and not any(map(Path.exists, began))


def test_script_that_two_processes_cannot_run_at_once_is_checked_run_by_run(tmp_path, monkeypatch):
    monkeypatch.setattr(exactness, "TOGETHER", 2)
    exclusive = "import socket\nlock = socket.socket(socket.AF_UNIX)\n"
    exclusive += f"lock.bind(chr(0) + {f'hasten-test-{tmp_path}'!r})\n"
    ref = written(tmp_path, exclusive + (SCRIPTS / "tensors.py").read_text())
    check = ScriptTrial(ref, methods={"in_memory_batches": {}}).check_exactness({}, "BIT_EXACT", 60.0)
    assert check["passed"] and not check["statistics"], check


def test_operation_that_is_not_deterministic_is_named(tmp_path):
    text = (SCRIPTS / "tensors.py").read_text()
    noise = "torch.zeros(3).put_(torch.tensor([0, 1]), torch.ones(2))\ntorch.manual_seed(1)\n"
    noise += "torch.rand(int.from_bytes(__import__('os').urandom(2), 'big'))"
    ref = written(tmp_path, text.replace("torch.manual_seed(1)", noise))
    check = ScriptTrial(ref, methods={"in_memory_batches": {}}).check_exactness({}, "BIT_EXACT", 60.0)
    assert "not reproducible (torch has no deterministic implementation of put_): two runs" in check["why"]


def test_formula_is_compared_in_float64_where_only_the_last_bits_do_not_repeat(tmp_path):
    """As on a GPU, where some operations add in another order in every run."""
    noisy = "noisy = lambda out: out * (1 + torch.finfo(out.dtype).eps * int.from_bytes(os.urandom(1)) / 64)\n"
    text = (SCRIPTS / "tensors.py").read_text().replace("import sys\n", "import os, sys\n")
    text = text.replace("torch.manual_seed(1)\n", f"torch.manual_seed(1)\n{noisy}")
    text = text.replace("(model(data), target)", "(noisy(model(data)), target)")
    ref = written(tmp_path, text)
    exact = ScriptTrial(ref, methods={"fused_optimizer": {}}).check_exactness({}, "EQUIVALENT_MATH", 60.0)
    assert exact["passed"] and not exact["statistics"] and "in float64" in exact["why"], exact
    assert ScriptTrial(ref, methods={"in_memory_batches": {}}).check_exactness({}, "BIT_EXACT", 60.0)["statistics"]


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
