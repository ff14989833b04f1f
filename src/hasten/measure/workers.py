"""Processes of their own for whatever is measured, so that a trial leaks nothing into the next.

A worker is forked from a nursery that has imported torch and nothing has run in yet: it starts in
milliseconds and clean. It lives in a process group of its own and can be frozen, loader workers and
all, while another takes its turn. It dies with us.
"""

from __future__ import annotations

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
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from types import MappingProxyType

import torch

from hasten._torch_compat import LAZILY_IMPORTED_MODULES, is_out_of_memory
from hasten.contract.errors import Aftermath, Failure, Notice, Progress, Refusal
from hasten.contract.watch import Watch, silent
from hasten.engine.budget import usable_cores
from hasten.engine.failures import explained
from hasten.engine.ranks import LEFT_ALONE, tells_of_another

OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # who measures is no rank of what is measured
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
IMPORTED_ONCE = ("torch", *LAZILY_IMPORTED_MODULES, "hasten.measure.arm")
ERRORS = {"Refusal": Refusal, "Aftermath": Aftermath, "Failure": Failure}  # by the word that tells of them


class Worker:
    """An object of ours that lives in a process of its own.

    ``Worker("module:Class", **arguments)`` makes it there; ``call("name", **arguments)`` runs one of its methods.
    Use as a context manager: leaving kills the whole process group. ``_environment`` is what the process finds besides ours,
    ``_patience`` how many seconds of silence it is given where a call does not say.
    """

    def __init__(self, service: str, _environment: Mapping[str, str] = MappingProxyType({}), _patience: float | None = None, **arguments):
        ours, theirs = socket.socketpair()
        self.pid = _nursery().fork(theirs, _environment)
        theirs.close()
        self.connection = Connection(ours.detach())
        self.frozen, self.patience = False, _patience
        self.call("__init__", _service=service, **arguments)

    def call(self, method: str, *, timeout: float | None = None, watch: Watch = silent, **arguments):
        """What the method returns. Its progress goes to ``watch``, its Notices become ours.

        Raises:
            Refusal, Failure: as raised over there; a Failure too if the process died, broke or said nothing for ``timeout`` seconds.
        """
        timeout = self.patience if timeout is None else timeout
        self.ask(method, arguments)
        while True:
            with self._alive():
                spoke = self.connection.poll(timeout)
            if not spoke:
                self.kill()
                raise too_long(timeout)
            kind, content = self.hear()
            if kind == "result":
                return content
            pass_on(kind, content, watch)

    def ask(self, method: str, arguments: dict) -> None:
        """Lets the process begin with a method; what comes of it is to be heard."""
        self.thaw()
        with self._alive():
            self.connection.send((method, arguments))

    def hear(self) -> tuple[str, object]:
        """(kind, content) of the next thing that the process has to say: "result" at last, or one of ERRORS."""
        with self._alive():
            return self.connection.recv()

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """Around the connection and nothing else: a ``watch`` whose own pipe is broken says nothing of the process."""
        try:
            yield
        except (EOFError, ConnectionError):
            raise Failure(_cause_of_death(_nursery().status(self.pid))) from None

    def freeze(self) -> None:
        """Stops the process and its children where they are."""
        if not self.frozen:
            self._signal(signal.SIGSTOP)
            self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            self._signal(signal.SIGCONT)
            self.frozen = False

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        self.connection.close()


class _Nursery:
    """The process that workers are forked from."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hasten.measure.workers", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if _has_file_number(sys.stderr) else subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the one who asked, not for the measuring processes
        )
        theirs.close()
        with self.process.stdin as told:
            told.write(json.dumps({"path": sys.path, "modules": _installed_modules()}).encode())

    def fork(self, theirs: socket.socket, environment: Mapping[str, str]) -> int:
        request = json.dumps({"path": sys.path, "directory": os.getcwd(), "environment": dict(environment)}).encode()
        try:
            socket.send_fds(self.socket, [request], [theirs.fileno()])
            return int(self._answer())
        except BaseException:  # an answer that comes later would be taken for that of another request
            self.process.kill()
            raise

    def status(self, pid: int) -> int | None:
        """The exit status of a worker that ended (negative: the signal that ended it)."""
        try:
            self.socket.send(str(pid).encode())
            answer = self._answer()
        except OSError:
            return None
        return None if answer == "None" else int(answer)

    def _answer(self) -> str:
        answer = self.socket.recv(64)
        if not answer:
            raise Failure("the measuring processes could not be started")
        return answer.decode()


def _installed_modules() -> list[str]:
    """What this process has imported of installed packages and of ours: no worker need repeat what the task imports."""
    folders = tuple(site.getsitepackages())
    loaded = [(name, getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())]
    wanted = [name for name, file in loaded if file.startswith(folders) or name.partition(".")[0] == "hasten"]
    return sorted(name for name in wanted if not name.startswith(("_pytest", "pytest")))


_the_nursery: _Nursery | None = None
_passed_on: set[str] = set()  # Notices that workers need not tell again, without their numbers


def _nursery() -> _Nursery:
    global _the_nursery
    if _the_nursery is None or _the_nursery.process.poll() is not None:
        _the_nursery = _Nursery()
    return _the_nursery


def _has_file_number(stream) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):  # a notebook's or a test's stand-in
        return False


def listen_anew() -> None:
    """What workers told during an earlier request is told again."""
    _passed_on.clear()


@contextlib.contextmanager
def told_already() -> Iterator[None]:
    """Notices given inside are shown as ever; a worker that gives them too is not passed on."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message, category, *where) -> None:
            if issubclass(category, Notice):
                _passed_on.add(_without_numbers(str(message)))
            shown(message, category, *where)

        warnings.showwarning = show
        yield


def pass_on(kind: str, content, watch: Watch) -> None:
    """What a process says on the way becomes ours.

    Raises:
        Refusal, Failure: what ended it.
    """
    if kind == "watch":
        watch(*content)
    elif kind == "notice":
        _pass_on(*content)
    else:
        raise ERRORS[kind](content)


def too_long(seconds: float) -> Failure:
    return Failure(f"took longer than {seconds:.0f} s and was ended")


def _pass_on(text: str, is_progress: bool, filename: str, lineno: int) -> None:
    """A worker's Notice, as if it had been given here; once, also where another worker tells it with other numbers."""
    if is_progress:
        warnings.warn_explicit(text, Progress, filename, lineno)
    elif (words := _without_numbers(text)) not in _passed_on:
        _passed_on.add(words)
        warnings.warn_explicit(text, Notice, filename, lineno)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "", text)


def _cause_of_death(status: int | None) -> str:
    if status == -signal.SIGKILL:
        return "the process was killed, most likely because memory ran out"
    if status is not None and status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return "the process ended without an answer"


# ── the other side ───────────────────────────────────────────────────────────────────────────────


def _raise_children(control: socket.socket) -> None:
    """The nursery's life: fork a worker for every request until our parent is gone."""
    if not (words := sys.stdin.read()):
        return  # whoever started us was interrupted in the middle of it
    told = json.loads(words)
    sys.path[:] = told["path"]
    for name in OF_A_JOB:
        os.environ.pop(name, None)
    for module in (*IMPORTED_ONCE, *told["modules"]):
        with contextlib.suppress(Exception, SystemExit):
            import_module(module)
    statuses: dict[int, int] = {}
    raised: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not message:
            _end(raised)
            return
        _reap(statuses)
        if not descriptors:
            control.send(str(_reap(statuses, int(message)).get(int(message))).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _live(Connection(descriptors[0]), json.loads(message))
        raised.add(pid)
        os.close(descriptors[0])
        with contextlib.suppress(BrokenPipeError):  # whoever asked is gone; the next reading says so
            control.send(str(pid).encode())


def _end(groups: set[int]) -> None:
    """Kills whole process groups: a frozen loader worker would otherwise stay for ever."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def _reap(statuses: dict[int, int], wanted: int | None = None) -> dict[int, int]:
    """Notes the exit statuses of children that ended; waits a moment for the one that is asked for."""
    with contextlib.suppress(ChildProcessError):
        if wanted is not None and wanted not in statuses:
            statuses[wanted] = os.waitstatus_to_exitcode(os.waitpid(wanted, 0)[1])
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return statuses


def _live(connection: Connection, request: dict) -> None:
    """A worker's life: makes its object, answers calls until the connection closes."""
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(2, 1)  # what the user's code prints must not mix with our answers
    sys.path[:] = request["path"]
    os.environ.update(request["environment"])
    if "LOCAL_WORLD_SIZE" in request["environment"] and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())  # of a machine that is shared; torch was imported before anybody knew
    with contextlib.suppress(OSError):
        os.chdir(request["directory"])
    tempfile.tempdir = None
    served, say = None, _voice(connection)
    try:
        while True:
            method, arguments = connection.recv()
            try:
                if method == "__init__":
                    module, _, name = arguments.pop("_service").rpartition(":")
                    served = getattr(import_module(module), name)(**arguments)
                    served.watch = lambda *progress: say("watch", progress)
                    answer = None
                else:
                    answer = getattr(served, method)(**arguments)
                say("result", answer)
            except (Refusal, Failure) as error:
                told = Aftermath(error) if tells_of_another(error) else error
                say(next(word for word, kind in ERRORS.items() if isinstance(told, kind)), str(told))
            except MemoryError:
                say("Failure", "ran out of memory")
            except SystemExit:
                say("Failure", "the task's own code ended the process (sys.exit)")
            except Exception as error:
                if tells_of_another(error):
                    say("Aftermath", LEFT_ALONE)
                else:
                    say("Failure", "ran out of memory" if is_out_of_memory(error) else str(explained(error, "the training", 0)))
    except (EOFError, ConnectionError):
        pass
    finally:
        os._exit(0)


def _voice(connection: Connection) -> Callable[[str, object], None]:
    """How a worker speaks: one message at a time, from whichever thread. Its Notices go to the one who asked, too."""
    ours, speaking, shown = os.getpid(), threading.RLock(), warnings.showwarning

    def say(kind: str, content) -> None:
        with speaking:
            connection.send((kind, content))

    def notice(message, category, filename, lineno, *rest) -> None:
        if not issubclass(category, Notice):
            shown(message, category, filename, lineno, *rest)
        elif os.getpid() == ours:  # loader workers have this connection too, and would speak in between
            say("notice", (str(message), issubclass(category, Progress), filename, lineno))

    warnings.simplefilter("default", Notice)  # whatever the environment says of other warnings
    warnings.showwarning = notice
    return say


if __name__ == "__main__":
    _raise_children(socket.socket(fileno=int(sys.argv[1])))
