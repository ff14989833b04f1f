"""Worker processes for measurements, so that no trial changes the next one.

A :class:`Worker` holds one object in its own process. The process is forked from a :class:`ForkServer` that has
imported torch and run nothing else, so it starts in about 50 ms, clean, in a process group of its own. What runs in the
server and in the workers is in ``worker_process.py``.

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
import json
import os
import re
import signal
import site
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

from hasten.core.errors import (
    ConfigurationError,
    HastenWarning,
    MemoryExhaustedError,
    PeerFailure,
    ProgressWarning,
    RunError,
)
from hasten.core.progress import ProgressCallback, no_progress

STDERR = 2  # file descriptor
# a subclass before its base
ERRORS = {kind.__name__: kind for kind in (ConfigurationError, PeerFailure, MemoryExhaustedError, RunError)}
CLOSE_TIMEOUT_S = 5.0  # it takes milliseconds
GROUP_END_TIMEOUT_S = 60.0  # a process that the kernel cannot end, such as in a driver, would be waited for for ever


class DeadlineError(RunError):
    """Raised where the time at which a measurement must end comes before a worker has started or returned."""


class Worker:
    """An object in its own process. As a context manager it kills the whole process group at the end.

    Args:
        service: ``module:Class`` of the object. The class is called in the worker.
        environment: variables to set in the worker, besides those of this process.
        timeout: default of ``call``, in seconds; None waits forever.
        deadline: of all calls and of the creation of the object, as a time of ``time.monotonic``.
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
        on_progress: ProgressCallback = no_progress,
        **arguments: Any,
    ) -> Any:
        """Calls a method of the object and returns its result. Forwards progress to ``on_progress``, and warnings.

        The worker is killed after ``timeout`` seconds without a message, and at its deadline in any case; if both are
        None, it is not.

        Raises:
            ConfigurationError, RunError: raised by the method.
            RunError: the process died, or was silent for ``timeout`` seconds.
            DeadlineError: the method had not returned at the deadline.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline = self.deadline
        try:
            seconds = seconds_to_wait(timeout, deadline)  # starts nothing after the deadline
            self.send(method, arguments)
            while True:
                with self._explain_death():
                    has_message = self.connection.poll(seconds)
                if not has_message:
                    seconds_to_wait(timeout, deadline)
                    self.kill()
                    raise timeout_error(timeout)
                kind, content = self.recv()
                if kind == "result":
                    return content
                forward_message(kind, content, on_progress)
                seconds = seconds_to_wait(timeout, deadline)
        except DeadlineError:
            self.kill()
            raise

    def send(self, method: str, arguments: dict[str, Any]) -> None:
        """Resumes the process and starts a method there, without waiting for its result."""
        self.resume()
        with self._explain_death():
            self.connection.send((method, arguments))

    def recv(self) -> tuple[str, Any]:
        """Waits for the next message, (kind, content); kinds: "progress", "warning", "result", a key of ``ERRORS``."""
        with self._explain_death():
            return self.connection.recv()

    @contextlib.contextmanager
    def _explain_death(self) -> Iterator[None]:
        """Context manager around uses of the connection: if it breaks, a RunError names how the process ended."""
        try:
            yield
        except (EOFError, ConnectionError):
            raise _exit_error(self.server.exit_code(self.pid)) from None

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
            server_command(control),
            pass_fds=[control.fileno()],
            stdin=subprocess.PIPE,
            stdout=STDERR,  # standard output is for results only; imported modules may print
            start_new_session=True,
        )
        control.close()
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(json.dumps({"path": _import_path(), "modules": _installed_modules()}).encode())
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

    def fork(self, connection: socket.socket, environment: Mapping[str, str], timeout: float | None = None) -> int:
        """Forks a worker that answers calls on ``connection``. Returns its process ID, which is also its group's.

        The first worker waits until the server has imported torch. DeadlineError after ``timeout`` seconds.
        """
        request = {"path": _import_path(), "directory": os.getcwd()}
        request |= {"variables": dict(os.environ), "environment": dict(environment)}
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
        """Waits, at most GROUP_END_TIMEOUT_S seconds, for the end of a killed worker and of all processes of its group.

        A process that gets SIGKILL holds its memory, also that of a GPU, for as long as the kernel takes to release it.
        """
        self._wait({"wait_for": pid, "group": True}, GROUP_END_TIMEOUT_S)

    def _wait(self, request: dict[str, Any], timeout: float | None = None) -> int | None:
        try:
            return self._request(request, timeout=timeout)
        except (OSError, RunError):
            return None

    def _request(self, request: dict[str, Any], descriptors: Sequence[int] = (), timeout: float | None = None) -> int:
        try:
            message = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self.control, [message], descriptors)
            self.control.sendall(message[sent:])
            self.control.settimeout(timeout)
            reply = self.control.recv(64)
            self.control.settimeout(None)
        except TimeoutError:
            self._kill()
            raise DeadlineError("the deadline passed before a worker was started") from None
        except ConnectionError:
            self._kill()
            reply = b""
        except BaseException:  # a late reply would be taken for that of the next request
            self._kill()
            raise
        if not reply:
            raise RunError("the worker processes could not be started")
        return int(reply)

    def _kill(self) -> None:
        """Ends the server, and waits for its end: ``clean_server`` must not take it for one that lives."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_TIMEOUT_S)


_servers: dict[int, ForkServer] = {}  # by process ID of the owner; a forked process inherits one that it cannot use
_shown_warnings: set[str] = set()  # texts without their numbers; workers do not repeat them


def clean_server() -> ForkServer:
    """The fork server of this process; started at the first call, and again if it has ended."""
    server = _servers.get(os.getpid())
    if server is None or server.process.poll() is not None:
        server = _servers[os.getpid()] = ForkServer()
    return server


def _import_path() -> list[str]:
    """``sys.path`` without entries of other types, such as pathlib.Path, which Python ignores and JSON cannot hold."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def _installed_modules() -> list[str]:
    """Names of the imported modules that belong to installed packages or to hasten."""
    directories = tuple(site.getsitepackages())
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    installed = [
        name for name, file in files.items() if file.startswith(directories) or name.partition(".")[0] == "hasten"
    ]
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


def forward_message(kind: str, content: Any, on_progress: ProgressCallback) -> None:
    """Repeats a worker's message: shows progress or a warning (once, ignoring its numbers), or raises the error."""
    if kind == "progress":
        on_progress(*content)
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
    """Seconds until ``timeout`` or ``deadline`` (of ``time.monotonic``); None: for ever. DeadlineError if it passed."""
    if deadline is None:
        return timeout
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("the deadline passed before the measurement was finished")
    return left if timeout is None else min(timeout, left)


def timeout_error(seconds: float | None) -> RunError:
    """The error for a worker that sent no message for ``seconds``."""
    return RunError(
        f"a measured process took longer than {seconds or 0:.0f} s to report and was ended; if it was not hanging, "
        "give it a longer timeout"
    )


def _exit_error(code: int | None) -> RunError:
    """The error for a worker that ended with an exit code (-N: by signal N) instead of a result."""
    if code == -signal.SIGKILL:
        return MemoryExhaustedError("the process was killed, probably because memory ran out")
    if code is not None and code < 0:
        return RunError(f"the process was ended by {signal.Signals(-code).name}")
    return RunError("the process ended without a result")


def server_command(control: socket.socket) -> list[str]:
    """The command line of a fork server that reads its requests from ``control``."""
    return [sys.executable, "-m", "hasten.benchmarking.worker_process", str(control.fileno())]
