"""A script in its own process group, with hasten inside: started, asked, suspended, killed; its end explained.

It is forked from the server of ``benchmarking.fork_server``, which ends it when this process ends, whatever happens.
Messages are JSON: nothing that comes back from a script is executed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hasten.benchmarking.fork_server import clean_server, seconds_to_wait, timeout_error
from hasten.core.errors import ConfigurationError, HastenWarning, MemoryExhaustedError, RunError
from hasten.hosts.inside_files import CLAIM, FAILURE, OUTPUT, RESUMED, RIVAL, SESSION, SOCKET, SPEC, STARTED
from hasten.hosts.sandbox import Sandbox, writable_places
from hasten.hosts.site_map import device_of, hidden_checkpoints, hide_checkpoints, known_sites
from hasten.utils.durations import duration_option
from hasten.utils.typed_arguments import typed_numbers

if TYPE_CHECKING:
    from hasten.hosts.script_ref import ScriptRef

INJECTED = str(Path(__file__).with_name("inject"))
END_S = 10.0  # for a process to end after its connection broke
EXIT_S = 3.0  # for a script to leave after its training; a command with further stages takes longer
CHUNK_S = 0.5  # of training between two looks at the clock
ERROR_BYTES = 1 << 16  # of the end of the output, in which errors are looked for
OUTPUT_BYTES = 1 << 24  # of the end of the output, in which metrics are looked for
NOT_LOADED = (
    "runs no Python that loads hasten: it ignores PYTHONPATH (python -I, -E or -S), sets it anew (write "
    "PYTHONPATH=.:$PYTHONPATH), or runs on another machine"
)
CUDA_ERROR = re.compile(r"[\w.]*Error: CUDA error: ")  # the line that says which; others with general advice follow
# the traceback of accelerate or torchrun, which follows that of the script that it has started
OF_LAUNCHER = re.compile(r"accelerate/commands/launch\.py.*CalledProcessError|ChildFailedError", re.DOTALL)
OF_SIGNAL = re.compile(r"died with <Signals|Signal \d+ \(SIG")  # what only the launcher knows
LOGGED_BY_TORCHRUN = "torch/distributed/elastic/"  # in its lines
TRACEBACK = "Traceback (most recent call last)"
ERROR_TYPE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)\b")  # at the begin of a message
ADDRESS_IN_USE = re.compile(os.strerror(errno.EADDRINUSE), re.IGNORECASE)
MAX_TRACEBACK = 40  # lines that are repeated
MORE_BUDGET = 4  # times the present one, that is advised where a script did not train
FREE_SPACE = "free space there, and start again; what was measured is kept"


class ScriptProcess:
    """One run of a script. As a context manager it kills the process group at the end.

    Args:
        script: The command.
        methods: Method -> options.
        device: Name of the device to assume until the model is seen.
        seed: Added to the script's seeds; None leaves them.
        sites: The site map of an earlier run, or None.
        deadline: Time of ``time.monotonic`` at which the start is given up.
        steps: Steps that the run will be asked for at most, if these are few; None if that is not known.
    """

    def __init__(
        self,
        script: ScriptRef,
        methods: dict[str, Any],
        device: str = "cpu",
        seed: int | None = 0,
        sites: dict[str, Any] | None = None,
        deadline: float | None = None,
        steps: int | None = None,
    ):
        self.script, self.methods, self.device, self.seed, self.sites = script, methods, device, seed, sites
        self.steps = steps
        self._open(deadline)

    def _open(self, deadline: float | None) -> None:
        """Starts the script, in a sandbox of its own."""
        from hasten.engine.error_messages import translate_disk_errors  # needs torch, unlike a training for real

        left = seconds_to_wait(None, deadline)
        self.script.check_unchanged()
        script, self.began = self.script, time.monotonic()
        self.connection: Connection | None = None
        self.world_size = 1  # processes that train together
        self.groups = set[int]()  # process groups of the command, and of its process that trains
        with ExitStack() as stack:
            box = stack.enter_context(Sandbox.for_directory(script.directory, places=writable_places()))
            with translate_disk_errors(box.directory, FREE_SPACE):
                self.directory = Path(tempfile.mkdtemp(prefix="session-", dir=box.directory))
            self.listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self.listener.bind(str(self.directory / SOCKET))
            self.listener.listen(1)
            self.server = clean_server()
            how = (self.methods, self.device, self.seed, self.sites)
            with translate_disk_errors(box.directory, FREE_SPACE):
                write_spec(self.directory, script, *how, mode="trial", steps=self.steps)
            argv, environment = script.argv_under(self.methods), injected(script.environment, self.directory)
            environment.setdefault("PYTHONHASHSEED", "0")
            environment.setdefault("PYTHONUNBUFFERED", "1")
            environment["MPLBACKEND"] = "Agg"  # plt.show() in a window would wait until it is closed
            self.hidden = set(hidden_checkpoints(script))  # another run may find more of them meanwhile
            command = {"argv": box.wrap(argv, sorted(self.hidden)), "environment": box.environment(environment)}
            output = str(self.directory / OUTPUT)
            self.pid = self.server.execute(script.directory, **command, output=output, timeout=left)
            self.groups.add(self.pid)
            stack.callback(self._end)
            self.exit = os.pidfd_open(self.pid)
            stack.callback(os.close, self.exit)
            self.stack = stack.pop_all()

    def wait_until_trained(self, timeout: float | None, deadline: float | None) -> dict[str, Any]:
        """Waits for the end of the first step. Returns the session's first message: ``steps``, ``process_cpu`` (s).

        A script that resumes from a checkpoint is started again without it: a trial begins at step 0.

        Raises:
            ConfigurationError: The script failed by itself, or made no backward pass in time or at all.
            RunError: The script failed under the methods, or one that has trained before made no step in ``timeout``
                seconds (DeadlineError: until ``deadline``).
            ScriptChangedError: Its files are not those with which the search began.
        """
        try:
            answer = self._wait_for_first_step(timeout, deadline)
        except ConfigurationError as error:
            if not self.found_checkpoints():
                hidden = ", ".join(hidden_checkpoints(self.script))
                why = f"{error}; it was started without {hidden}, from which it resumes: leave that option out"
                raise ConfigurationError(why) if hidden else error from None
        else:
            if not self.found_checkpoints():
                return answer
        self.close()
        self._open(deadline)
        return self.wait_until_trained(timeout, deadline)

    def found_checkpoints(self) -> bool:
        """Whether this run has resumed from a checkpoint. Hides new ones from later runs, and warns of them."""
        path = self.directory / RESUMED
        paths = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        if new := hide_checkpoints(self.script, paths):
            text = f"{self.script.name} resumes from {', '.join(new)}; its trials start without, at step 0"
            warnings.warn(text, HastenWarning, stacklevel=3)
        return not self.hidden.issuperset(paths)

    def _wait_for_first_step(self, timeout: float | None, deadline: float | None) -> dict[str, Any]:
        """Waits as ``wait_until_trained``; ScriptChangedError if a file was edited while the script imported it."""
        try:
            return self._receive_first_answer(timeout, deadline)
        finally:
            self.script.check_unchanged()  # also where the script has failed: an edit may be half done

    def _receive_first_answer(self, timeout: float | None, deadline: float | None) -> dict[str, Any]:
        limit = None if timeout is None else time.monotonic() + timeout
        soonest = min((moment for moment in (limit, deadline) if moment is not None), default=None)
        if not wait([self.listener, self.exit], seconds_to_wait(None, soonest) if soonest else None):
            self.kill()
            self._raise_reported()
            if known_sites(self.script) is not None:  # it does train
                seconds_to_wait(None, deadline)
                raise timeout_error(timeout)
            if not (self.directory / STARTED).exists():
                raise ConfigurationError(f"{self.script.command} {NOT_LOADED}, or has not started it yet")
            waited = time.monotonic() - self.began
            if deadline is None:  # no budget limits it
                what = f"{self.script.name} did not train within {waited:.0f} s: no backward pass"
                raise ConfigurationError(f"{what}; prepare its data in a run by itself, or give a command that trains")
            raise ConfigurationError(
                f"{self.script.name} did not train within {waited:.0f} s, its part of the budget: no backward pass; "
                f"give at least --budget {duration_option(MORE_BUDGET * waited)}, or a command that trains"
            )
        if not wait([self.listener], 0):
            self._explain_end()
        self.connection = Connection(self.listener.accept()[0].detach())
        answer = self._receive(timeout, deadline)
        self.groups.add(answer.pop("group"))
        self.world_size = answer.pop("world_size")
        return answer

    def check_one_process(self) -> None:
        """Raises ConfigurationError if the script trains in several processes, as far as that is known by now."""
        count = max(self.world_size, 1 + self.rivals())
        if count > 1:
            raise ConfigurationError(
                f"{self.script.name} trains in {count} processes by itself, which diagnose can measure but tune and "
                "compare cannot: they suspend one process; start one, or write the training as a hasten.Task and give "
                f"--processes {count}"
            )

    def train_in_chunks(self, deadline: float | None) -> Iterator[dict[str, Any]]:
        """Trains on in requests of about ``CHUNK_S`` seconds. Yields each answer; the last one has ``ended``."""
        count, answer = 1, dict[str, Any]()
        while not answer.get("ended"):
            began = time.monotonic()
            answer = self.ask("train", None, deadline, count=count)
            step = (time.monotonic() - began) / max(1, answer["count"])
            count = max(1, min(10 * count, int(CHUNK_S / max(step, 1e-6))))
            yield answer

    def ask(self, call: str, timeout: float | None = None, deadline: float | None = None, **arguments: Any) -> dict:
        """Sends a request to the session, such as "train" or a key of ``ANSWERS``, and returns the answer to it.

        Raises:
            ConfigurationError, RunError: The script failed by itself, or under the methods.
            RunError: The request failed, or was not answered within ``timeout`` seconds.
            DeadlineError: It was not answered at the deadline.
        """
        assert self.connection is not None, "wait_until_trained comes first"
        seconds_to_wait(timeout, deadline)  # starts nothing after the deadline
        self._signal(signal.SIGCONT)
        try:
            self.connection.send_bytes(json.dumps({"call": call, **arguments}).encode())
        except OSError:
            self._explain_end()
        answer = self._receive(timeout, deadline)
        if "error" in answer:
            raise RunError(f"{self.script.name}: {answer['error']}")
        return answer

    def _receive(self, timeout: float | None, deadline: float | None) -> dict[str, Any]:
        assert self.connection is not None
        try:
            if not self.connection.poll(seconds_to_wait(timeout, deadline)):
                seconds_to_wait(timeout, deadline)
                raise timeout_error(timeout)
            return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._explain_end()
        except RunError:
            self.kill()
            raise

    def check_end(self) -> None:
        """Lets a script that has ended leave; raises as ``ask`` if it does so with an error, as by ``sys.exit(1)``."""
        assert self.connection is not None, "it has answered"
        with contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps({"call": "end"}).encode())
        self._signal(signal.SIGCONT)  # an arm is suspended between its blocks
        if wait([self.exit], EXIT_S) and (self.server.exit_code(self.pid) or 0) > 0:  # a signal ends hardly more
            self._explain_end()

    def rivals(self) -> int:
        """The number of processes of the script that train besides the one that answers."""
        return len(list(self.directory.glob(f"{RIVAL}-*")))

    def output(self, limit: int = ERROR_BYTES) -> str:
        """The end of what the script has printed, on both streams: at most ``limit`` bytes."""
        return self.printed(limit)[1].decode(errors="replace")

    def printed(self, limit: int = OUTPUT_BYTES) -> tuple[int, bytes]:
        """(number of earlier bytes, last ``limit`` bytes) of what the script has printed on both streams."""
        try:
            with open(self.directory / OUTPUT, "rb") as file:
                before = max(0, os.path.getsize(file.name) - limit)
                file.seek(before)
                return before, file.read(limit)
        except OSError:
            return 0, b""

    def _explain_end(self) -> NoReturn:
        """Kills what is left of the script, and raises the error that says how it ended.

        MemoryExhaustedError, RunError under methods, else ConfigurationError, after its traceback was printed; or the
        error that the session has reported in FAILURE.
        """
        ended = wait([self.exit], END_S)
        environment, has_trained = f"{SESSION}={self.directory}", (self.directory / CLAIM).exists()
        continues = not has_trained and _processes_with(environment)  # also before it has left the process group
        self.kill()
        code, output, name = self.server.exit_code(self.pid), _of_script(self.output()), self.script.name
        self._raise_reported()
        if code == 0 and not (self.directory / STARTED).exists():
            raise ConfigurationError(f"{self.script.command} {NOT_LOADED}")
        if code == 0 and (continues or _processes_with(environment)):
            raise ConfigurationError(f"{self.script.command} continues in the background; start it in the foreground")
        if code == 0 and not has_trained:
            raise ConfigurationError(f"{self.script.command} ended without training: there was no backward pass")
        if not ended:  # the signal was sent here
            text = f"{name} failed: {_reason(output)}"
        elif code is not None and code < 0:
            cause = ", probably because memory ran out" if code == -signal.SIGKILL else ""
            text = f"{name} was ended by {signal.Signals(-code).name}{cause}"
        else:
            text = f"{name} failed by itself with exit code {code}: {_reason(output)}"
        from hasten._torch_compat import is_gpu_taken, is_out_of_memory  # need torch, unlike a training for real

        why = RuntimeError(_reason(output))
        if (ended and code == -signal.SIGKILL) or is_out_of_memory(why) or is_gpu_taken(why):
            raise MemoryExhaustedError(text.replace(" by itself", ""))
        if ended and ADDRESS_IN_USE.search(str(why)):
            raise ConfigurationError(
                f"{name} needs a port that is taken: two trials run at the same time; let it take a free one, as by "
                "MASTER_PORT=0 or torchrun --standalone"
            )
        if self.methods:
            raise RunError(text.replace(" by itself", ""))
        if TRACEBACK in output:
            lines = output[output.rindex(TRACEBACK) :].splitlines()
            print("\n".join(lines[-MAX_TRACEBACK:]), file=sys.stderr)
        raise ConfigurationError(text)

    def _raise_reported(self) -> None:
        """Raises the error that a process of the script has reported in FAILURE, if any."""
        if (self.directory / FAILURE).exists():
            failure = json.loads((self.directory / FAILURE).read_text(encoding="utf-8"))
            raise (ConfigurationError if failure["refused"] else RunError)(failure["text"])

    def suspend(self) -> None:
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    def _end(self) -> None:
        self.kill()
        until = time.monotonic() + END_S
        while (left := _processes_with(f"{SESSION}={self.directory}")) and time.monotonic() < until:
            for pid in left:  # in groups of their own: ranks of torchrun, daemons
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self.connection is not None:
            self.connection.close()
        self.server.wait_for_group(self.pid)

    def close(self) -> None:
        """Kills all processes of the script, and removes its sandbox."""
        self.stack.close()

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_spec(
    directory: Path,
    script: ScriptRef,
    methods: dict[str, Any],
    device: str,
    seed: int | None,
    sites: dict[str, Any] | None,
    mode: str,
    steps: int | None = None,
) -> None:
    """Writes SPEC, which ``hosts.inside.session`` reads, into ``directory``, just before the command begins. The
    arguments are those of ``ScriptProcess``; ``mode`` is "trial", or "train" for ``hasten train``.
    """
    spec = {
        "began": time.perf_counter(),  # one clock for all processes of a machine
        "name": Path(script.file).name if script.file else script.name,
        "file": script.file,
        "directory": script.directory,
        "methods": methods,
        "device": device_of(device, sites),
        "seed": seed,
        "sites": sites,
        "mode": mode,
        "steps": steps,
        "vary": script.vary,
        "typed": typed_numbers(script.argv_under(methods)),
    }
    (directory / SPEC).write_text(json.dumps(spec), encoding="utf-8")


def injected(environment: Any, directory: Path) -> dict[str, str]:
    """A copy of ``environment`` in which Python processes import hasten's ``sitecustomize`` at their start and find the
    ``directory`` of the session.
    """
    path = os.pathsep.join(filter(None, [INJECTED, environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path, SESSION: str(directory)}


def _processes_with(variable: str) -> list[int]:
    """The process IDs of this user's processes that have ``NAME=value`` in their environment."""
    found: list[int] = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as file:
                if variable.encode() in file.read().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _of_script(output: str) -> str:
    """The output without the traceback by which a launcher says that the script has failed."""
    before, _, last = output.rpartition(TRACEBACK)
    lines = [line for line in before.splitlines(keepends=True) if LOGGED_BY_TORCHRUN not in line]
    knows_less = OF_LAUNCHER.search(last) and not OF_SIGNAL.search(last)
    return "".join(lines) if knows_less and any(map(str.strip, lines)) else output


def _reason(output: str) -> str:
    """Why a script failed: its CUDA error or last line of output, and the last line of its own code in a traceback."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return "it printed nothing"
    if lines[-1].startswith("EOFError") or "EOF when reading a line" in lines[-1]:
        return "it asks for input, and its standard input is empty here (/dev/null)"
    reason = next((line for line in reversed(lines) if CUDA_ERROR.match(line)), None)
    if reason is None:  # of a message of several lines, the one with the type of the error
        ending = output.rpartition(TRACEBACK)[2].splitlines()[-MAX_TRACEBACK:]
        types = [line for line in ending if ERROR_TYPE.match(line)]
        reason = types[-1].strip() if TRACEBACK in output and types else lines[-1]
    frames = re.findall(r'File "([^"]+)", line (\d+)', output)
    own = [(file, line) for file, line in frames if "site-packages" not in file and "/lib/python" not in file]
    where = f" ({os.path.basename(own[-1][0])}:{own[-1][1]})" if own and "Error" in reason else ""
    if "stty: " in output and "to unpack" in reason:
        where += "; it asks a terminal for its size, and its standard input is /dev/null here"
    if f"[Errno {errno.EXDEV}]" in reason:
        where += "; a trial cannot rename a directory of yours: move it away first"
    return f"{reason[:300]}{where}"
