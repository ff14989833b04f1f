"""Workers of the fork server: isolation, suspension, death, errors, and the main modules of their parent."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest
import torch

from hasten.benchmarking.fork_server import (
    DeadlineError,
    Worker,
    clean_server,
    mark_warnings_shown,
    reset_shown_warnings,
)
from hasten.benchmarking.worker_process import has_initialized_cuda
from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.data.io.paths import FileMissingError
from helpers import SLACK_S


class ProcessIds(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return os.getpid()


class Service:
    """Runs in a worker, which imports it through this file's directory on sys.path."""

    def __init__(self, start: int = 0, pause: float = 0.0):
        time.sleep(pause)
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def open_files(self) -> list[str]:
        """The open files whose name is that of CUDA's."""
        return [file.path for file in psutil.Process().open_files() if file.path.endswith("nvidia-uvm")]

    def cuda_sum(self) -> float:
        return torch.ones(3, device="cuda").sum().item()

    def process(self) -> int:
        return os.getpid()

    def leave_traces(self) -> None:
        os.environ["LEFT_BEHIND"] = "1"
        torch.set_num_threads(1)
        torch.manual_seed(99)

    def traces(self) -> tuple:
        return os.environ.get("LEFT_BEHIND"), torch.initial_seed()

    def start_loader(self) -> list[int]:
        """Returns the process IDs of this worker and of two persistent loader workers."""
        self.loader = iter(torch.utils.data.DataLoader(ProcessIds(), num_workers=2, persistent_workers=True))
        return [os.getpid(), *sorted({int(next(self.loader)) for _ in range(8)})]

    def surroundings(self) -> tuple:
        return os.getcwd(), sys.path, multiprocessing.get_start_method(), multiprocessing.current_process().name

    def report_for(self, seconds: float) -> None:
        """Sends progress all the time, so that no timeout ends it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.on_progress("working", 0.5)
            time.sleep(0.01)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"

    def refuse(self):
        raise ConfigurationError("not this way")

    def lose(self):
        raise FileMissingError("a.parquet is no whole file")

    def break_down(self):
        raise KeyError("something of the user's")

    def report_progress(self) -> str:
        self.on_progress("working", 0.5)
        return "done"

    def run_out_of_memory(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def print_and_answer(self) -> int:
        print("the user's own words")
        return 7

    def notice(self, text: str) -> None:
        warnings.warn(text, HastenWarning, stacklevel=1)

    def notice_in_a_child(self, text: str) -> int:
        if (child := os.fork()) == 0:
            self.notice(text)
            os._exit(0)
        return os.waitpid(child, 0)[1]


HERE = f"{__name__}:Service"


def worker(**arguments) -> Worker:
    return Worker(HERE, **arguments)


def test_worker_creates_object_and_answers_calls():
    with worker(start=3) as one, worker() as other:
        assert one.call("add", number=4) == 7
        assert other.call("add", number=1) == 1
        assert one.call("process") != other.call("process") != os.getpid()


def test_worker_does_not_see_state_of_another():
    with worker() as one:
        before = one.call("traces")
        one.call("leave_traces")
        assert one.call("traces")[0] == "1"
    with worker() as other:
        assert other.call("traces") == before


def test_worker_suspended_runs_only_during_calls():
    with worker() as one:
        one.suspend()
        deadline = time.monotonic() + 60
        while psutil.Process(one.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.001)
        assert psutil.Process(one.pid).status() == psutil.STATUS_STOPPED
        assert one.call("add", number=2) == 2


def test_worker_exit_ends_the_process():
    with worker() as one:
        pid = one.pid
    deadline = time.monotonic() + 60
    while (
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def status_of(pid: int) -> str:
    """Returns the status of a process; a zombie counts as ended."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return "gone" if status == psutil.STATUS_ZOMBIE else status


def wait_until(pids: list[int], status: str) -> None:
    deadline = time.monotonic() + 60
    while (found := [status_of(pid) for pid in pids]) != [status] * len(pids):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_worker_suspended_suspends_its_loader_workers():
    with worker() as one:
        pids = one.call("start_loader")
        assert len(pids) == 3
        one.suspend()
        wait_until(pids, psutil.STATUS_STOPPED)
        assert one.call("add", number=2) == 2
    wait_until(pids, "gone")


def test_worker_has_directory_path_and_start_method_of_the_parent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "added"))
    with worker() as one:
        assert one.call("surroundings") == (str(tmp_path), sys.path, multiprocessing.get_start_method(), "MainProcess")


@pytest.mark.slow
def test_fork_server_in_a_fork_of_its_owner_is_replaced():
    with worker() as one:
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()

        def use_a_worker():
            with worker(start=1) as other:
                queue.put(other.call("add", number=1))

        process = context.Process(target=use_a_worker)
        process.start()
        process.join(120)
        assert process.exitcode == 0 and queue.get() == 2
        assert one.call("add", number=1) == 1


MAIN = """
import os, signal, sys
sys.path.insert(0, {directory!r})
print("main runs")
from hasten.benchmarking.fork_server import Worker
busy, suspended = Worker("test_fork_server:Service"), Worker("test_fork_server:Service")
pids = busy.call("start_loader") + suspended.call("start_loader")
suspended.suspend()
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script without a guard", "python -c", "standard input"])
def test_parent_killed_leaves_no_process_whatever_its_main_module(way, tmp_path):
    """The main module runs once: no worker imports it."""
    text = MAIN.format(directory=os.path.dirname(__file__))
    script = tmp_path / "main.py"
    script.write_text(text)
    arguments = {"script without a guard": [script], "python -c": ["-c", text], "standard input": ["-"]}[way]
    done = subprocess.run([sys.executable, *arguments], input=text, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL
    lines = done.stdout.split("\n")
    assert lines[0] == "main runs" and lines[2:] == [""]
    pids = [int(pid) for pid in lines[1].split()]
    assert len(pids) == 6
    wait_until(pids, "gone")


@pytest.mark.slow
def test_parent_that_ends_leaves_neither_process_nor_warning(tmp_path):
    text = MAIN.format(directory=os.path.dirname(__file__)).replace("os.kill(os.getpid(), signal.SIGKILL)", "")
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    wait_until([int(pid) for pid in done.stdout.split("\n")[1].split()], "gone")


def test_worker_hasten_error_is_raised_unchanged():
    with worker() as one, pytest.raises(ConfigurationError, match="not this way"):
        one.call("refuse")
    with worker() as one, pytest.raises(ConfigurationError, match="no whole file"):
        one.call("lose")  # a HastenError subclass defined in a higher package


def test_worker_other_error_is_raised_as_run_error_with_its_message():
    with worker() as one:
        with pytest.raises(
            RunError, match=r"KeyError: 'something of the user's'|KeyError: \"something of the user's\""
        ):
            one.call("break_down")
        assert one.call("add", number=1) == 1, "the worker continues after an error"


def test_worker_killed_reports_out_of_memory():
    with worker() as one, pytest.raises(RunError, match="memory"):
        one.call("run_out_of_memory")


def test_watch_that_raises_is_not_reported_as_worker_death():
    def on_progress(*progress):
        raise BrokenPipeError("standard error is closed")

    with worker() as one, pytest.raises(BrokenPipeError, match="standard error is closed"):
        one.call("report_progress", on_progress=on_progress)


def test_worker_call_beyond_the_timeout_is_ended():
    with worker() as one, pytest.raises(RunError, match="took longer"):
        one.call("sleep", seconds=30, timeout=0.3)


@pytest.mark.parametrize("method", ["sleep", "report_for"])
def test_worker_call_beyond_the_deadline_is_ended(method):
    with worker() as one:
        began = time.monotonic()
        one.deadline = began + 0.3
        with pytest.raises(DeadlineError, match=r"^the deadline passed before the measurement was finished$"):
            one.call(method, seconds=30.0, timeout=20.0)
        assert time.monotonic() - began < SLACK_S
        wait_until([one.pid], "gone")
        with pytest.raises(DeadlineError):  # also of a worker that is gone: its death is not the reason
            one.call("add", number=1)


def test_worker_whose_object_is_not_ready_at_the_deadline_is_ended():
    with worker():  # starts the fork server
        began = time.monotonic()
        with pytest.raises(DeadlineError):
            Worker(HERE, {}, None, began + 0.3, pause=30.0)
        assert time.monotonic() - began < SLACK_S


def test_worker_call_within_timeout_and_deadline_returns():
    with worker() as one:
        one.deadline = time.monotonic() + 60
        assert one.call("add", number=1) == 1
        with pytest.raises(RunError, match=r"^a measured process took longer than 0 s") as raised:
            one.call("sleep", seconds=30, timeout=0.2)
        assert not isinstance(raised.value, DeadlineError)


def test_worker_output_of_user_code_does_not_disturb_answers():
    with worker() as one:
        assert one.call("print_and_answer") == 7


def test_worker_warning_is_shown_once_in_the_parent():
    with worker() as one, worker() as other, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)  # Python may warn about resources of other tests
        one.call("notice", text="3 rows were left out")
        other.call("notice", text="5 rows were left out")
        assert one.call("add", number=1) == 1
    assert [(str(each.message), each.category) for each in caught] == [("3 rows were left out", HastenWarning)]
    assert caught[0].filename == __file__


def test_warning_already_shown_is_not_repeated_by_workers():
    reset_shown_warnings()
    with worker() as one, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)  # Python may warn about resources of other tests
        with mark_warnings_shown():
            warnings.warn("2 columns are rounded", HastenWarning, stacklevel=1)
            warnings.warn("a library's own", UserWarning, stacklevel=1)
        one.call("notice", text="3 columns are rounded")
        one.call("notice", text="a row is long")
        warnings.warn("4 columns are rounded", HastenWarning, stacklevel=1)
    assert [str(each.message) for each in caught] == [
        "2 columns are rounded",
        "a library's own",
        "a row is long",
        "4 columns are rounded",
    ]


def test_worker_children_do_not_answer():
    with worker() as one, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)  # Python may warn about resources of other tests
        assert one.call("notice_in_a_child", text="a warning of a loader worker") == 0
        assert one.call("add", number=1) == 1
    assert not caught


def start_holder(megabytes: int) -> int:
    """Starts a process in this process's group that holds memory, whose release takes the kernel a while."""
    code = f"b = bytearray({megabytes} << 20); b[::4096] = bytes(len(b[::4096])); print('ready', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process.pid


class Holder(Service):
    def hold(self, megabytes: int) -> int:
        return start_holder(megabytes)


def test_worker_exit_waits_for_all_processes_of_its_group():
    """The next trial may start at once: the memory of this one is free."""
    with Worker(f"{__name__}:Holder") as one:
        holder = one.call("hold", megabytes=400)
        assert psutil.pid_exists(holder)
    assert not psutil.pid_exists(holder) and not psutil.pid_exists(one.pid)


UNUSUAL_PACKAGE = """
import atexit, os, tempfile
file = open(os.environ["HASTEN_TEST_CUDA_FILE"])  # stands for a package that initializes CUDA while it is imported
"""

PARENT_OF_UNUSUAL_PACKAGE = """
import site, sys, warnings
site.getsitepackages = lambda: [{packages!r}]  # where the fork server's parent looks for installed packages
sys.path[:0] = [{packages!r}, {tests!r}]
import unusual_package
from hasten.benchmarking.fork_server import Worker
with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("always")
    for _ in range(2):
        with Worker("test_fork_server:Service") as one:
            assert one.call("add", number=2) == 2
            print(one.call("open_files"))
print([str(warning.message) for warning in shown])
"""


@pytest.mark.slow
def test_package_that_initializes_cuda_is_left_to_the_workers(tmp_path):
    (tmp_path / "unusual_package.py").write_text(UNUSUAL_PACKAGE)
    (tmp_path / "nvidia-uvm").touch()  # the name of the device file that CUDA holds open
    program = PARENT_OF_UNUSUAL_PACKAGE.format(packages=str(tmp_path), tests=os.path.dirname(__file__))
    environment = {**os.environ, "HASTEN_TEST_CUDA_FILE": str(tmp_path / "nvidia-uvm")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, shown = done.stdout.splitlines()
    assert first == second == "[]"
    assert shown.count("importing unusual_package initializes CUDA, which a forked process cannot use") == 1


@pytest.mark.parametrize(
    ("open_files", "initialized"),
    [
        (["/dev/null", "socket:[123]", "/dev/nvidiactl"], False),  # NVML only
        (["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"], True),
        (["/dev/dxg"], True),
        ([], False),
    ],
)
def test_cuda_is_recognized_by_the_files_that_it_holds_open(open_files, initialized):
    assert has_initialized_cuda(open_files) is initialized


@pytest.mark.gpu
@pytest.mark.slow
def test_package_that_uses_a_gpu_while_it_is_imported_leaves_the_gpu_to_the_workers(tmp_path):
    (tmp_path / "unusual_package.py").write_text("import torch\nassert torch.zeros(1, device='cuda') == 0\n")
    program = PARENT_OF_UNUSUAL_PACKAGE.format(packages=str(tmp_path), tests=os.path.dirname(__file__))
    program = program.replace('one.call("open_files")', 'one.call("cuda_sum")')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second, shown = done.stdout.splitlines()
    assert first == second == "3.0" and "initializes CUDA" in shown


def test_server_that_was_killed_is_named_and_replaced(tmp_path):
    server = clean_server()
    os.kill(server.process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="the worker processes could not be started"):
        server.execute(str(tmp_path), [sys.executable, "-c", "pass"], {}, str(tmp_path / "output"))
    another = clean_server()
    assert another is not server
    pid = another.execute(str(tmp_path), [sys.executable, "-c", "exit(3)"], dict(os.environ), str(tmp_path / "output"))
    assert another.exit_code(pid) == 3


def test_command_gets_a_long_environment_whole(tmp_path):
    server, output = clean_server(), tmp_path / "output"
    long = {f"VARIABLE_{index}": "x" * 100_000 for index in range(12)}  # as of environment modules on a cluster
    program = "import os; print(sum(len(value) for name, value in os.environ.items() if name.startswith('VARIABLE_')))"
    pid = server.execute(str(tmp_path), [sys.executable, "-c", program], {**os.environ, **long}, str(output))
    assert server.exit_code(pid) == 0 and output.read_text() == "1200000\n"
