"""Worker processes for measurements, so that no trial changes the next one.

A :class:`Worker` holds one object in its own process. The process is forked from a :class:`ForkServer` that has
imported torch and run nothing else, so it starts in about 50 ms, clean, in a process group of its own.

Why not the fork server of ``multiprocessing``? It was tried on 2026-11-23 (Python 3.11, Linux, 2 cores). It starts a
worker in the same 50 ms, but it cannot keep these promises:

* It imports the parent's main module in every worker, and so runs a script without an ``if __name__ == "__main__"``
  guard again.
* Its workers hold the pipe that keeps the server alive. After SIGKILL of a parent with a suspended worker, the server,
  the worker and its loader processes stayed for ever.
* It makes "forkserver" the start method inside a worker, where "fork" is that of the parent, so the data loader that is
  measured is not the one that trains.
* Its preloaded modules are one setting of the whole process, ignored once the user's own code has started the server,
  and are searched without the parent's ``sys.path``.

Signals go to the process group instead of through psutil: 0.01 ms against 17 ms for a tree of 7 processes, in one
system call, and a process whose own parent has ended is reached, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, NoReturn, cast

import torch

from hasten._torch_compat import LAZILY_IMPORTED_MODULES
from hasten.core.errors import (
    ConfigurationError,
    HastenWarning,
    MemoryExhaustedError,
    PeerFailure,
    ProgressWarning,
    RunError,
)
from hasten.core.progress import ProgressCallback, no_progress
from hasten.distributed.process_group import PEER_GONE, is_peer_failure
from hasten.engine.error_messages import explain_error
from hasten.engine.resources import available_cpus

# removed in workers: the rank of this process is not theirs
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
STDOUT, STDERR = 1, 2  # file descriptors
PRELOAD = ("torch", *LAZILY_IMPORTED_MODULES, "hasten.benchmarking.arm")
# a subclass before its base
ERRORS = {kind.__name__: kind for kind in (ConfigurationError, PeerFailure, MemoryExhaustedError, RunError)}
MAX_REQUEST_BYTES = 1 << 20  # to the fork server
CLOSE_TIMEOUT_S = 5.0  # it takes milliseconds
CUDA_FILES = ("/nvidia-uvm", "/dxg")  # that a process which has initialized CUDA holds open; the second on WSL 2
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # "1": torch.cuda.is_available() does not initialize CUDA


class DeadlineError(RunError):
    """The time at which a measurement must end has come while a worker was still busy; the worker was killed."""


class Worker:
    """An object in its own process. As a context manager it kills the whole process group at the end.

    Args:
        service: ``module:Class`` of the object. The class is called in the worker.
        environment: variables to set in the worker, besides those of this process.
        timeout: default of ``call``, in seconds; None waits forever.
        deadline: default of ``call``, as a time of ``time.monotonic``; also limits the creation of the object.
        **arguments: arguments of the class.

    Raises:
        ConfigurationError, RunError: raised by the class, or the process could not be started.
        DeadlineError: the object was not ready at the deadline.
    """

    def __init__(
        self,
        service: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        timeout: float | None = None,
        deadline: float | None = None,
        /,
        **arguments: Any,
    ):
        ours, theirs = socket.socketpair()
        self.server = clean_server()
        self.pid = self.server.fork(theirs, environment, seconds_to_wait(None, deadline))
        theirs.close()
        self.connection = Connection(ours.detach())
        self.timeout, self.deadline = timeout, deadline
        try:
            self.call("__init__", _service=service, **arguments)
        except BaseException:
            self.__exit__()
            raise

    def call(
        self,
        method: str,
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        watch: ProgressCallback = no_progress,
        **arguments: Any,
    ) -> Any:
        """Calls a method of the object and returns its result. Forwards progress to ``watch``, and warnings.

        The worker is killed after ``timeout`` seconds without a message, and at ``deadline`` (a time of
        ``time.monotonic``) in any case; with None, which both are by default, it is not.

        Raises:
            ConfigurationError, RunError: raised by the method.
            RunError: the process died, or was silent for ``timeout`` seconds.
            DeadlineError: the method had not returned at the deadline.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline = self.deadline if deadline is None else deadline
        try:
            seconds_to_wait(timeout, deadline)  # starts nothing after the deadline
            self.send(method, arguments)
            return self._result(timeout, deadline, watch)
        except DeadlineError:
            self.kill()
            raise

    def _result(self, timeout: float | None, deadline: float | None, watch: ProgressCallback) -> Any:
        while True:
            seconds = seconds_to_wait(timeout, deadline)
            with self._explain_death():
                has_message = self.connection.poll(seconds)
            if not has_message:
                seconds_to_wait(timeout, deadline)
                self.kill()
                raise timeout_error(timeout)
            kind, content = self.recv()
            if kind == "result":
                return content
            forward_message(kind, content, watch)

    def send(self, method: str, arguments: dict[str, Any]) -> None:
        """Resumes the process and starts a method there, without waiting for its result."""
        self.resume()
        with self._explain_death():
            self.connection.send((method, arguments))

    def recv(self) -> tuple[str, Any]:
        """Waits for the next message: (kind, content); kind is "watch", "warning", "result" or a key of ``ERRORS``."""
        with self._explain_death():
            return self.connection.recv()

    @contextlib.contextmanager
    def _explain_death(self) -> Iterator[None]:
        """Context manager around uses of the connection: if it breaks, a RunError names how the process ended."""
        try:
            yield
        except (EOFError, ConnectionError):
            raise exit_error(self.server.exit_code(self.pid)) from None

    def suspend(self) -> None:
        """Stops the process and its children, such as loader workers, until ``resume`` or the next ``send``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits until the group has ended, so that its memory and its part of the GPU are free for the next one."""
        self.kill()
        self.connection.close()
        self.server.wait_for_group(self.pid)


class ForkServer:
    """The process that workers are forked from. It kills all of them when this process ends, even by SIGKILL.

    Signals of the terminal reach neither the server nor the workers: Ctrl-C ends this process, which ends them.
    """

    def __init__(self):
        self.owner = os.getpid()
        self.control, control = socket.socketpair()
        self.process = subprocess.Popen(
            _command(control),
            pass_fds=[control.fileno()],
            stdin=subprocess.PIPE,
            stdout=STDERR,  # standard output is for results only; imported modules may print
            start_new_session=True,
        )
        control.close()
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(json.dumps({"path": sys.path, "modules": _installed_modules()}).encode())
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the server and its workers. A process that was forked from the owner changes nothing."""
        if self.owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # forked processes may hold the socket, too
        self.control.close()
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def is_usable(self) -> bool:
        """Whether the server still runs."""
        return self.process.poll() is None

    def fork(self, connection: socket.socket, environment: Mapping[str, str], timeout: float | None = None) -> int:
        """Forks a worker that answers calls on ``connection``. Returns its process ID, which is also its group's.

        The first worker waits until the server has imported torch. DeadlineError after ``timeout`` seconds.
        """
        request = {"path": sys.path, "directory": os.getcwd(), "environment": dict(environment)}
        return self._request(request, [connection.fileno()], timeout)

    def execute(
        self,
        directory: str,
        argv: list[str],
        environment: Mapping[str, str],
        output: str,
        timeout: float | None = None,
    ) -> int:
        """Starts a command in a process group of its own, which ends with this process like a worker.

        Its standard input is empty; both output streams go to the file ``output``. Returns the process ID. A command
        that cannot be started ends with exit code 127 and the reason in the output.
        """
        request = {"directory": directory, "argv": argv, "variables": dict(environment), "output": output}
        return self._request(request, timeout=timeout)

    def exit_code(self, pid: int) -> int | None:
        """Waits for the end of a worker. Returns its exit code, -N if signal N ended it, None if the server is gone."""
        return self._wait({"wait_for": pid})

    def wait_for_group(self, pid: int) -> None:
        """Waits for the end of a worker that was killed, and of every process of its group.

        A process that gets SIGKILL holds its memory, also that of a GPU, for as long as the kernel takes to release it.
        """
        self._wait({"wait_for": pid, "group": True})

    def _wait(self, request: dict[str, Any]) -> int | None:
        try:
            return self._request(request)
        except (OSError, RunError):
            return None

    def _request(self, request: dict[str, Any], descriptors: Sequence[int] = (), timeout: float | None = None) -> int:
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], descriptors)
            self.control.settimeout(timeout)
            reply = self.control.recv(64)
            self.control.settimeout(None)
        except TimeoutError:
            self.process.kill()
            raise DeadlineError("the deadline passed before a worker was started") from None
        except BaseException:  # a late reply would be taken for that of the next request
            self.process.kill()
            raise
        if not reply:
            raise RunError("the worker processes could not be started")
        return int(reply)


_servers: dict[int, ForkServer] = {}  # by process ID of the owner; a forked process inherits one that it cannot use
_shown_warnings: set[str] = set()  # texts without their numbers; workers do not repeat them


def clean_server() -> ForkServer:
    """The fork server of this process; started at the first call."""
    server = _servers.get(os.getpid())
    if server is None or not server.is_usable():
        server = _servers[os.getpid()] = ForkServer()
    return server


def _installed_modules() -> list[str]:
    """Names of the imported modules that belong to installed packages or to hasten."""
    folders = tuple(site.getsitepackages())
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    installed = [name for name, file in files.items() if file.startswith(folders) or name.partition(".")[0] == "hasten"]
    return sorted(name for name in installed if not name.startswith(("_pytest", "pytest")))


def reset_shown_warnings() -> None:
    """Forgets which warnings of workers were shown, so that they are shown again."""
    _shown_warnings.clear()


@contextlib.contextmanager
def mark_warnings_shown() -> Iterator[None]:
    """Context manager: a HastenWarning given inside is shown, and not again if a worker sends the same one."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_and_mark(message: Warning | str, category: type[Warning], *args: Any) -> None:
            if issubclass(category, HastenWarning):
                _shown_warnings.add(_without_numbers(str(message)))
            show(message, category, *args)

        warnings.showwarning = show_and_mark
        yield


def forward_message(kind: str, content: Any, watch: ProgressCallback) -> None:
    """Repeats a worker's message: shows progress or a warning (once, ignoring its numbers), or raises the error."""
    if kind == "watch":
        watch(*content)
    elif kind == "warning":
        _forward_warning(*content)
    else:
        raise ERRORS[kind](content)


def _forward_warning(text: str, is_progress: bool, filename: str, lineno: int) -> None:
    if is_progress:
        warnings.warn_explicit(text, ProgressWarning, filename, lineno)
    elif (key := _without_numbers(text)) not in _shown_warnings:
        _shown_warnings.add(key)
        warnings.warn_explicit(text, HastenWarning, filename, lineno)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "", text)


def seconds_to_wait(timeout: float | None, deadline: float | None) -> float | None:
    """Seconds until ``timeout`` or ``deadline``, whichever is first; None for ever. DeadlineError if it has passed."""
    if deadline is None:
        return timeout
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("the deadline passed before it was finished")
    return left if timeout is None else min(timeout, left)


def timeout_error(seconds: float | None) -> RunError:
    """The error for a worker that sent no message for ``seconds``."""
    return RunError(f"took longer than {seconds or 0:.0f} s and was ended")


def exit_error(code: int | None) -> RunError:
    """The error for a worker that ended with an exit code (-N: by signal N) instead of a result."""
    if code == -signal.SIGKILL:
        return MemoryExhaustedError("the process was killed, probably because memory ran out")
    if code is not None and code < 0:
        return RunError(f"the process was ended by {signal.Signals(-code).name}")
    return RunError("the process ended without a result")


# ── in the fork server and the workers ──────────────────────────────────────────────────────────


def _serve(control: socket.socket) -> None:
    """Main loop of the fork server: handles requests until the parent is gone."""
    if not (text := sys.stdin.read()):
        return  # the parent was interrupted before it wrote
    start = json.loads(text)
    sys.path[:] = start["path"]
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # the server waits for processes whose parent has ended, see ``_wait_for``
    if module := _preload([*PRELOAD, *start["modules"]]):
        _start_again(control, start, module)
    exit_codes: dict[int, int | None] = {}  # by process ID of each worker; None while it runs
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        if not message:
            break
        request = json.loads(message)
        if (pid := request.get("wait_for")) is not None:
            reply = _wait_for(pid, exit_codes)
            if request.get("group"):
                _wait_for_rest_of_group(pid)
        else:
            reply = os.fork()
            if reply == 0:
                control.close()
                if "argv" in request:
                    _execute(request)
                _run_worker(Connection(descriptors[0]), request, start.get("warning"))
            exit_codes[reply] = None
            if descriptors:
                os.close(descriptors[0])
        with contextlib.suppress(BrokenPipeError):  # the parent is gone; the next receive returns nothing
            control.send(str(reply).encode())
    for group, code in exit_codes.items():
        if code is None:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)  # also ends suspended loader workers, which could not notice


def _preload(modules: list[str]) -> str | None:
    """Imports modules. Returns the first one that has initialized CUDA, which forked processes could not use then."""
    before, os.environ[NVML_CHECK] = os.environ.get(NVML_CHECK), "1"
    try:
        for module in modules:
            with contextlib.suppress(Exception, SystemExit):
                import_module(module)
            if has_initialized_cuda(_open_files()):
                return module
    finally:
        os.environ.pop(NVML_CHECK)
        if before is not None:
            os.environ[NVML_CHECK] = before
    return None


def has_initialized_cuda(open_files: Iterable[str]) -> bool:
    """Whether a process that holds these files open has initialized CUDA, through PyTorch or any other library."""
    return any(path.endswith(CUDA_FILES) for path in open_files)


def _open_files() -> Iterator[str]:
    folder = "/proc/self/fd"
    for descriptor in os.listdir(folder) if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed
            yield os.readlink(f"{folder}/{descriptor}")


def _start_again(control: socket.socket, start: dict[str, Any], module: str) -> None:
    """Replaces this process by a server that leaves the modules to its workers; returns if it is that server already.

    The workers say once why they start slowly, or cannot use the GPU.
    """
    if "warning" in start:
        start["warning"] = f"importing {module} initializes CUDA, so that no measured process can use the GPU"
        return
    start["warning"] = (
        f"importing {module} initializes CUDA, which a forked process cannot use: each measured process imports the "
        "task's packages itself and starts later; initialize CUDA in a function instead"
    )
    start["modules"] = []
    text = os.memfd_create("start")
    os.write(text, json.dumps(start).encode())
    os.lseek(text, 0, os.SEEK_SET)
    os.dup2(text, 0)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, descriptor in (0, STDOUT, STDERR, control.fileno()))
    os.execv(sys.executable, _command(control))


def _command(control: socket.socket) -> list[str]:
    return [sys.executable, "-m", "hasten.benchmarking.fork_server", str(control.fileno())]


def _wait_for_rest_of_group(group: int) -> None:
    """Waits for the processes of a killed group whose parents have ended, which are children of the server now."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)


def _wait_for(pid: int, exit_codes: dict[int, int | None]) -> int:
    code = exit_codes[pid]
    if code is None:
        code = exit_codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code


def _execute(request: dict[str, Any]) -> NoReturn:
    """Becomes the command of ``ForkServer.execute``."""
    try:
        os.setsid()
        _die_with_server()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
            signal.signal(number, signal.SIG_DFL)
        for descriptor, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (STDOUT, request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            os.dup2(os.open(path, flags, 0o600), descriptor)
        os.dup2(STDOUT, STDERR)
        os.chdir(request["directory"])
        os.execvpe(request["argv"][0], request["argv"], request["variables"])
    except OSError as error:
        os.write(STDERR, f"{request['argv'][0]}: {error.strerror}\n".encode())
    os._exit(127)


def _run_worker(connection: Connection, request: dict[str, Any], warning: str | None) -> NoReturn:
    """Main loop of a worker: creates the object and handles calls until the connection closes."""
    try:
        _set_up_worker(request)
        service, send = None, _sender(connection)
        if warning:
            warnings.warn(warning, HastenWarning, stacklevel=1)
        while True:
            method, arguments = connection.recv()
            try:
                if method == "__init__":
                    module, _, name = arguments.pop("_service").rpartition(":")
                    service, result = getattr(import_module(module), name)(**arguments), None
                    service.watch = lambda *progress: send("watch", progress)
                else:
                    result = getattr(service, method)(**arguments)
                send("result", result)
            except (Exception, SystemExit) as error:
                send(*_describe_error(error))
    except (EOFError, ConnectionError):
        pass
    finally:
        os._exit(0)


def _die_with_server() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value)


def _set_up_worker(request: dict[str, Any]) -> None:
    os.setsid()
    _die_with_server()
    os.dup2(STDERR, STDOUT)  # standard output is for results only; the task may print
    sys.path[:] = request["path"]
    os.environ.update(request["environment"])
    if "LOCAL_WORLD_SIZE" in request["environment"] and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(available_cpus())  # the server imported torch before ranks shared the machine
    with contextlib.suppress(OSError):
        os.chdir(request["directory"])
    tempfile.tempdir = None


def _describe_error(error: BaseException) -> tuple[str, str]:
    """(key of ``ERRORS``, message) under which a worker reports an exception to the parent."""
    if isinstance(error, SystemExit):
        return RunError.__name__, "the task's code ended the process (sys.exit)"
    if is_peer_failure(error):
        return PeerFailure.__name__, str(error) if isinstance(error, (ConfigurationError, RunError)) else PEER_GONE
    error = explain_error(cast(Exception, error), "the training", 0)
    return next(name for name, kind in ERRORS.items() if isinstance(error, kind)), str(error)


def _sender(connection: Connection) -> Callable[[str, object], None]:
    """Returns a thread-safe ``send(kind, content)``, and sends the HastenWarnings of this process with it."""
    pid, lock, show = os.getpid(), threading.RLock(), warnings.showwarning

    def send(kind: str, content: object) -> None:
        with lock:
            connection.send((kind, content))

    def send_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *args: Any) -> None:
        if not issubclass(category, HastenWarning):
            show(message, category, filename, lineno, *args)
        elif os.getpid() == pid:  # loader workers inherit the connection and must not write to it
            send("warning", (str(message), issubclass(category, ProgressWarning), filename, lineno))

    warnings.simplefilter("default", HastenWarning)  # independent of PYTHONWARNINGS
    warnings.showwarning = send_warning
    return send


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # the parent may wait, and the end of an interpreter that has imported torch takes 0.2 s
