"""What runs in the fork server and in its workers; ``fork_server.py`` has the other side.

The server imports torch and forks a worker for each request of its parent. A worker creates one object and answers
calls of its methods, until its parent closes the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

import torch

from hasten._torch_compat import LAZILY_IMPORTED_MODULES
from hasten.benchmarking.fork_server import ERRORS, STDERR, server_command
from hasten.core.errors import ConfigurationError, HastenWarning, PeerFailure, ProgressWarning, RunError
from hasten.distributed.process_group import PEER_GONE, is_peer_failure
from hasten.engine.error_messages import explain_error
from hasten.engine.resources import available_cpus

# removed in workers: the rank of the parent is not theirs
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
STDIN, STDOUT = 0, 1  # file descriptors
PRELOAD = ("torch", *LAZILY_IMPORTED_MODULES, "hasten.benchmarking.arm")
MAX_REQUEST_BYTES = 1 << 20
CUDA_FILES = ("/nvidia-uvm", "/dxg")  # that a process which has initialized CUDA holds open; the second on WSL 2
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # "1": torch.cuda.is_available() does not initialize CUDA


def _serve(control: socket.socket) -> None:
    """Main loop of the fork server: handles requests until the parent is gone."""
    if not (text := sys.stdin.read()):
        return  # the parent was interrupted before it wrote
    start = json.loads(text)
    sys.path[:] = start["path"]
    # Python 3.12 and later warn here, in __main__, of the threads of libraries
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning, "__main__")
    inherited = dict(os.environ)
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # the server waits for processes whose parent has ended, see ``_wait_for``
    if module := _preload([*PRELOAD, *start["modules"]]):
        _start_again(control, start, module)
    temporary = _share_temporary_directory()
    exit_codes: dict[int, int | None] = {}  # by process ID of each worker; None while it runs
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        while message and not message.endswith(b"\n"):  # a large one, such as of a long environment, comes in parts
            more = control.recv(MAX_REQUEST_BYTES)
            message = message + more if more else b""
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
                _run_worker(Connection(descriptors[0]), request, inherited, start.get("warning"))
            exit_codes[reply] = None
            if descriptors:
                os.close(descriptors[0])
        with contextlib.suppress(BrokenPipeError):  # the parent is gone; the next receive returns nothing
            control.send(str(reply).encode())
    for group, code in exit_codes.items():
        if code is None:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)  # also ends suspended loader workers, which could not notice
    while orphans := _children():  # in groups of their own, such as the ranks of torchrun; each leaves its children
        for pid in orphans:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    shutil.rmtree(temporary, ignore_errors=True)


def _share_temporary_directory() -> str:
    """Gives all processes that are forked from this one a directory for the sockets of ``multiprocessing``.

    Each would make its own, and leave it behind, since it is killed.
    """
    process: Any = multiprocessing.current_process()
    process._config["tempdir"] = directory = tempfile.mkdtemp(prefix="hasten-")
    return directory


def _children() -> list[int]:
    """The process IDs of the children of this process. Not by psutil, which reads files of other users' processes."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _preload(modules: list[str]) -> str | None:
    """Imports modules and ignores those that fail. Returns the first one that initialized CUDA, which forked
    processes could not use then; None if none did.
    """
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
    directory = "/proc/self/fd"
    for descriptor in os.listdir(directory) if os.path.isdir(directory) else ():
        with contextlib.suppress(OSError):  # the descriptor of the directory itself is closed
            yield os.readlink(f"{directory}/{descriptor}")


def _start_again(control: socket.socket, start: dict[str, Any], module: str) -> None:
    """Replaces this process by a server that leaves the modules to its workers; returns if it is that server already.

    A warning of each worker then states why it starts slowly, or cannot use the GPU.
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
    os.execv(sys.executable, server_command(control))


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
            (STDIN, os.devnull, os.O_RDONLY),
            (STDOUT, request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            os.dup2(os.open(path, flags, 0o600), descriptor)
        os.dup2(STDOUT, STDERR)
        os.chdir(request["directory"])
        os.execvpe(request["argv"][0], request["argv"], request["variables"])
    except OSError as error:
        os.write(STDERR, f"{request['argv'][0]}: {error.strerror}\n".encode())
    os._exit(127)


def _run_worker(
    connection: Connection, request: dict[str, Any], inherited: dict[str, str], warning: str | None
) -> NoReturn:
    """Main loop of a worker: creates the object and handles calls until the connection closes."""
    try:
        _set_up_worker(request, inherited)
        service, send = None, _sender(connection)
        if warning:
            warnings.warn(warning, HastenWarning, stacklevel=1)
        while True:
            method, arguments = connection.recv()
            try:
                if method == "__init__":
                    module, _, name = arguments.pop("_service").rpartition(":")
                    service, result = getattr(import_module(module), name)(**arguments), None
                    service.on_progress = lambda *progress: send("progress", progress)
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


def _set_up_worker(request: dict[str, Any], inherited: dict[str, str]) -> None:
    """Makes this process one like the parent is now: its import path, directory and environment variables.

    ``inherited``: the variables with which the server began. Those that the parent has deleted since are removed; those
    that the server's imports have set stay.
    """
    os.setsid()
    _die_with_server()
    os.dup2(STDERR, STDOUT)  # standard output is for results only; the task may print
    sys.path[:] = request["path"]
    variables = {name: value for name, value in request["variables"].items() if name not in RANK_VARIABLES}
    variables |= request["environment"]
    for name in inherited.keys() - variables.keys():
        os.environ.pop(name, None)
    os.environ.update(variables)
    if "LOCAL_WORLD_SIZE" in request["environment"]:
        _set_threads_of_rank(variables.get("OMP_NUM_THREADS", ""), inherited.get("OMP_NUM_THREADS"))
    with contextlib.suppress(OSError):
        os.chdir(request["directory"])
    tempfile.tempdir = None


def _set_threads_of_rank(threads: str, inherited: str | None) -> None:
    """Sets the number of threads that torch would have in a rank that is launched, by its OMP_NUM_THREADS.

    The server imported torch before ranks shared the machine: torch has read the ``inherited`` value there.
    """
    first = threads.partition(",")[0].strip()  # the others are for nested parallel regions
    if threads != inherited or not threads:
        torch.set_num_threads(int(first) if first.isdecimal() and int(first) else available_cpus())


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
