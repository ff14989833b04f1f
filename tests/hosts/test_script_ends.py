"""How a script ends: stopped early, killed, with processes in groups of their own."""

import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from hasten.core.errors import ConfigurationError, HastenWarning, MemoryExhaustedError, RunError
from hasten.hosts import process
from hasten.hosts.arm import ScriptArm
from hasten.hosts.process import ScriptProcess, _reason
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import ScriptTrial, watch_script

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
TRAINS = """
import os, time, torch
{first}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{second}
for step in range({steps}):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep({pause})
print("val loss 0.5")
"""
CONNECTS = """
import os, socket, time
made = socket.socket(socket.AF_UNIX)
made.connect(os.environ["HASTEN_HOST"] + "/socket")
"""


def command(directory: Path, text: str) -> ScriptRef:
    (directory / "train.py").write_text(text)
    return ScriptRef.of_command([sys.executable, "train.py"], directory=str(directory))


def written(directory: Path, steps: int, first: str = "", second: str = "", pause: float = 0.0) -> ScriptRef:
    return command(directory, TRAINS.format(steps=steps, first=first, second=second, pause=pause))


def test_run_that_is_stopped_before_its_first_metric_is_pruned(tmp_path):
    ref = written(tmp_path, 600, pause=0.1)  # 60 s
    began = time.monotonic()
    run = ScriptTrial(ref).run(target=0.1, time_limit=1.5)
    assert run["pruned"] and run["metric"] is None and run["evaluations"] == []
    assert time.monotonic() - began < 20


def test_steps_of_an_optimizer_that_accelerate_wraps_are_counted(tmp_path):
    second = """
import accelerate, hasten
model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
hasten.attach(model, optimizer, [1])
"""
    with ScriptProcess(written(tmp_path, 20, second=second), {}) as process:
        assert process.wait_until_trained(120.0, None)["steps"] == 1
        assert process.ask("train", 120.0, None, count=100)["steps"] == 20


def test_process_that_trains_in_a_group_of_its_own_is_suspended(tmp_path):
    """As a rank of torchrun: its parent waits for it."""
    first = "if pid := os.fork():\n    os.waitpid(pid, 0)\n    os._exit(0)\nos.setsid()"
    second = "open(os.environ['HASTEN_HOST'] + '/pid', 'w').write(str(os.getpid()))"
    with ScriptProcess(written(tmp_path, 10**9, first, second), {}) as process:
        process.wait_until_trained(120.0, None)
        process.suspend()
        pid = int((process.directory / "pid").read_text())
        assert _reaches(pid, "T")
        assert process.ask("train", 60.0, None, count=3)["count"] == 3
    assert _reaches(pid, "Z")


def _reaches(pid: int, state: str) -> bool:
    """Whether a process is in this state within 5 s; "Z" holds for one that is gone, too."""
    path, until = Path(f"/proc/{pid}/stat"), time.monotonic() + 5
    while time.monotonic() < until:
        found = path.read_text().rpartition(")")[2].split()[0] if path.exists() else "Z"
        if found == state:
            return True
        time.sleep(0.01)
    return False


def test_model_that_was_called_as_a_part_of_another_is_taken_once_it_is_attached(tmp_path):
    second = """
import hasten
holder = torch.nn.ModuleList([model])
model(torch.ones(1, 2))
hasten.attach(model, optimizer, [1])
"""
    with ScriptProcess(written(tmp_path, 20, second=second), {}) as process:
        process.wait_until_trained(120.0, None)
        models = process.ask("describe", 60.0, None)["sites"]["models"]
    assert ("Linear", True) in [(model["type"], model["called"]) for model in models]


def test_process_that_is_killed_here_after_its_connection_broke_is_not_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "END_S", 0.3)
    ref = command(tmp_path, f"{CONNECTS}made.close()\nprint('cleaning up', flush=True)\ntime.sleep(600)")
    with ScriptProcess(ref, {}) as run, pytest.raises(ConfigurationError, match=r"^train failed: cleaning up$"):
        run.wait_until_trained(60.0, None)


def test_process_that_the_kernel_kills_is_out_of_memory(tmp_path):
    ref = command(tmp_path, f"{CONNECTS}os.kill(os.getpid(), 9)")
    with ScriptProcess(ref, {}) as run, pytest.raises(MemoryExhaustedError, match="was ended by SIGKILL"):
        run.wait_until_trained(60.0, None)


TRAINS_IN_A_FUNCTION = """
import multiprocessing, os, torch
def train():
    x = torch.ones(1, requires_grad=True)
    for step in range(5):
        (x * 2).backward()
{end}
"""
IN_A_CHILD = "one = multiprocessing.get_context('fork').Process(target=train)\none.start()\none.join()"


@pytest.mark.parametrize("end", ["train()\nos._exit(0)", IN_A_CHILD])
def test_script_that_ends_by_exit_of_the_system_has_ended_well(tmp_path, end):
    with ScriptProcess(command(tmp_path, TRAINS_IN_A_FUNCTION.format(end=end)), {}, seed=0) as running:
        running.wait_until_trained(120.0, None)
        assert running.ask("train", 120.0, None, count=100)["ended"]
        assert "sites" in running.ask("describe", 120.0, None)


CUDA_FAILS = """Traceback (most recent call last):
  File "/home/user/train.py", line 7, in <module>
    model.cuda()
torch.AcceleratorError: CUDA error: out of memory
Search for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api for more information.
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def test_reason_of_an_error_of_cuda_is_not_its_general_advice():
    assert _reason(CUDA_FAILS) == "torch.AcceleratorError: CUDA error: out of memory (train.py:7)"
    assert _reason("Traceback\nValueError: no data\nthe job failed") == "the job failed"


def test_reason_is_the_first_line_of_an_error_message_of_several_lines():
    lines = ["Traceback (most recent call last):", '  File "/home/user/train.py", line 7, in <module>', "    load()"]
    message = ["_pickle.UnpicklingError: Weights only load failed.", "Check the documentation of torch.load."]
    assert _reason("\n".join(lines + message)) == f"{message[0]} (train.py:7)"


@pytest.mark.parametrize("ending", ["sys.exit(1)", "os._exit(1)"])
def test_script_that_catches_its_error_and_exits_has_failed(ending, tmp_path):
    """As one under Hydra, which catches all errors."""
    second = f"""
import atexit, sys
def leave():
    {ending}
"""
    ref = written(tmp_path, 20, second=second)
    (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text() + "leave()\n")
    with pytest.raises(ConfigurationError, match="failed by itself with exit code 1"):
        watch_script(ref)
    with pytest.raises(RunError, match="failed with exit code 1"):
        ScriptTrial(ref, methods={"flush_denormals": {}}).run()


def test_process_that_is_killed_is_taken_as_one_that_lacked_memory(tmp_path):
    """So that the trial store does not remember it as a failure of the recipe."""
    ref = written(tmp_path, 20, second="os.kill(os.getpid(), 9)")
    with pytest.raises(MemoryExhaustedError, match="memory ran out"):
        watch_script(ref)


def test_evaluations_of_a_model_that_stays_in_training_mode_lie_where_they_were(tmp_path):
    second = "print('val loss 0.9')"
    ref = written(tmp_path, 60, second=second, pause=0.05)
    text = (
        (tmp_path / "train.py")
        .read_text()
        .replace("optimizer.step()", "optimizer.step()\n    print('val loss', 1 / (step + 1))")
    )
    (tmp_path / "train.py").write_text(text.replace('print("val loss 0.5")', ""))
    run = ScriptTrial(ref).run()
    steps = [row["step"] for row in run["evaluations"]]
    assert run["steps"] == 60 and steps == sorted(steps) and 0 < steps[-1] <= 60


def test_all_that_a_command_does_is_a_part_of_its_run(tmp_path):
    """Also what it does before it imports torch."""
    ref = written(tmp_path, 20, second="print('val loss 0.9')")
    (tmp_path / "train.py").write_text("import time; time.sleep(3)" + (tmp_path / "train.py").read_text())
    assert ScriptTrial(ref).run()["seconds"] > 3


def test_script_that_writes_much_before_its_first_step_gets_a_warning(tmp_path):
    text = TRAINS.format(steps=3, first='open("data", "wb").write(bytes(60_000_000))', second="", pause=0.0)
    ref = command(tmp_path, text.rpartition("print(")[0])
    with pytest.warns(HastenWarning, match="wrote 60 MB before its first step, as for a download.*run the script by"):
        watch_script(ref)


def test_plots_of_a_trial_open_no_window(tmp_path, monkeypatch):
    """``plt.show()`` would wait until it is closed."""
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    ref = written(tmp_path, 3, second="print('backend', os.environ['MPLBACKEND'], flush=True)")
    with ScriptProcess(ref, {}) as process:
        process.wait_until_trained(120.0, None)
        assert "backend Agg\n" in process.output()


@pytest.mark.parametrize("after", ["", "; sleep 600"], ids=["ends", "continues"])
def test_session_that_cannot_begin_ends_the_trial_with_the_reason(after, tmp_path):
    """As with another version of torch than hasten needs."""
    (tmp_path / "torch.py").write_text("__version__ = '1.4'\n")
    (tmp_path / "train.py").write_text("import time, torch\ntime.sleep(600)\n")
    argv = ["bash", "-c", f"{sys.executable} train.py{after}"]
    ref = ScriptRef.of_command(argv, directory=str(tmp_path))
    reason = rf"^hasten cannot run in the Python of the script \({sys.executable}\): .*Error: .*; install hasten there$"
    with ScriptProcess(ref, {}) as run, pytest.raises(ConfigurationError, match=reason):
        run.wait_until_trained(10.0 if after else 60.0, None)


def test_port_that_another_trial_has_is_explained(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = f"""
import torch.distributed
address = "tcp://127.0.0.1:{taken.getsockname()[1]}"
torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
"""
        ref, why = written(tmp_path, 3, first), "^train needs a port that is taken: .* as by MASTER_PORT=0"
        with ScriptProcess(ref, {"flush_denormals": {}}) as run, pytest.raises(ConfigurationError, match=why):
            run.wait_until_trained(120.0, None)


LONG_STEP = """
import torch
x = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
adam = torch.optim.Adam([x], lr=0.01)
lbfgs = torch.optim.LBFGS([x], lr=0.01, max_iter=600, tolerance_grad=0.0, tolerance_change=0.0)
calls = 0
def closure():
    global calls
    calls += 1
    lbfgs.zero_grad()
    loss = (x**4).sum()
    loss.backward()
    return loss
for step in range(5):
    closure()
    adam.step()
calls = 0
for repeat in range(2):
    lbfgs.step(closure)
for step in range(3):
    closure()
    adam.step()
print(calls, "calls")
"""


def test_backward_passes_of_a_long_step_are_steps(tmp_path):
    """As for physics-informed networks: first Adam, then one call of LBFGS."""
    with ScriptProcess(command(tmp_path, LONG_STEP), {}) as process:
        process.wait_until_trained(120.0, None)
        assert process.ask("train", 60.0, None, count=300)["count"] == 300
        answer = process.ask("train", 60.0, None, count=10_000)
        calls = int(process.output().split(" calls")[0])
    assert calls == 1203 and answer["ended"] and answer["steps"] == 5 + calls - 255


OWN_OPTIMIZER = """
class SAM(torch.optim.Optimizer):
    def step(self, closure):
        FIRST
        with torch.no_grad():
            moves = [0.1 * p.grad for p in self.param_groups[0]["params"]]
            for p, move in zip(self.param_groups[0]["params"], moves): p += move
        AGAIN
        with torch.no_grad():
            for p, move in zip(self.param_groups[0]["params"], moves): p -= move + 0.01 * p.grad
optimizer = SAM(model.parameters(), {})
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    return loss
"""


@pytest.mark.parametrize(
    ("step", "first", "again", "is_refused"),
    [
        ("optimizer.step(closure)", "closure()", "closure()", True),
        ("closure(); optimizer.step(closure)", "pass", "closure()", True),
        ("optimizer.step(closure)", "closure()", "pass", False),  # as Lightning calls any optimizer
    ],
)
def test_methods_on_gradients_refuse_a_closure_that_is_called_at_other_weights(
    tmp_path, step, first, again, is_refused
):
    ref = written(tmp_path, 20, second=OWN_OPTIMIZER.replace("FIRST", first).replace("AGAIN", again))
    text = (tmp_path / "train.py").read_text()
    loop = text[text.index("    model(torch.ones(1, 2)).sum()") : text.index("    time.sleep")]
    (tmp_path / "train.py").write_text(text.replace(loop, f"    {step}\n").rpartition("print(")[0])
    assert watch_script(ref)["total_steps"] == 20
    methods = {"gradient_clipping": {"max_norm": 1.0}}
    why = r"^SAM\.step\(closure\) computes gradients at other weights: leave out methods that change gradients$"
    expected = pytest.raises(ConfigurationError, match=why) if is_refused else nullcontext()
    with ScriptProcess(ref, methods) as run, expected:
        run.wait_until_trained(120.0, None)


def test_arm_whose_script_catches_its_error_and_exits_has_failed(tmp_path):
    ref = written(tmp_path, 34)  # the last block is whole, so that the arm is suspended at its end
    (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text() + "__import__('sys').exit(1)\n")
    with ScriptArm(ref, methods={"flush_denormals": {}}, device="cpu", seed=0, timeout=60.0) as arm:
        arm.build()
        with pytest.raises(RunError, match="train failed with exit code 1"):
            for _ in range(4):
                arm.suspend()
                arm.train(10)


@pytest.mark.parametrize(
    "launcher",
    [
        '  File "/x/accelerate/commands/launch.py", line 999\nsubprocess.CalledProcessError: Command',
        '  File "/x/torch/distributed/run.py", line 9\ntorch.distributed.errors.ChildFailedError:',
    ],
)
def test_reason_under_a_launcher_is_that_of_the_script(launcher):
    logged = "E1129 10:00:00 7 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1)\n"
    failed = 'Traceback (most recent call last):\n  File "/home/user/train.py", line 7, in <module>\nKeyError: 3\n'
    output = failed + logged + f"Traceback (most recent call last):\n{launcher}\n"
    assert process._of_script(output) == failed and _reason(failed) == "KeyError: 3 (train.py:7)"
    assert process._of_script(failed) == failed


def test_reason_that_holds_in_a_trial_only_says_so():
    failed = 'Traceback (most recent call last):\n  File "/home/user/utils.py", line 45, in <module>\n{}\n'
    stty = "stty: 'standard input': Inappropriate ioctl for device\n"
    unpacked = failed.format("ValueError: not enough values to unpack (expected 2, got 0)")
    assert "its standard input is /dev/null" in _reason(stty + unpacked)
    renamed = failed.format("OSError: [Errno 18] Invalid cross-device link: 'a' -> 'b'")
    assert "cannot rename a directory" in _reason(renamed)


def test_signal_that_ended_a_script_under_a_launcher_is_named():
    ended = "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>."
    output = f'epoch 1 loss 0.5\n{process.TRACEBACK}:\n  File "/x/accelerate/commands/launch.py", line 999\n{ended}\n'
    assert process._of_script(output) == output and _reason(output).startswith(ended)
