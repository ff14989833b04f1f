"""Isolation of a trial: what the user's command writes is gone afterwards, and it finds nothing of an earlier trial.

::

    with Sandbox.for_directory(cwd, places=writable_places()) as box:
        process = subprocess.Popen(box.wrap(command), env=box.environment(os.environ), cwd=cwd)

An overlay file system covers the working directory and every other place where programs write (``writable_places``:
home directories, /tmp, /var/tmp, /dev/shm, data disks; not the system's own directories), in a mount namespace of
the command alone: it reads the user's files and writes to a temporary layer. Every start of a wrapped command has a
fresh layer, so a script that resumes from a checkpoint starts at step 0 each time. As root this takes a mount
namespace, as an ordinary user a user namespace as well, in which the command keeps its user id. A warning names the
places that no overlay can cover.

Where namespaces are not permitted, the command runs in a copy of its working directory. A copy protects what the
command reaches by relative paths and by paths in its arguments and PYTHONPATH. It cannot protect directories outside,
nor absolute paths into the directory that the program has from elsewhere (a configuration file, an editable
installation), and relative paths that leave the directory miss their targets.

The directories that an overlay covers are not those that other processes see: the command must exchange files and
sockets with its parent in ``Sandbox.directory``. A file of the user that is opened for writing is copied to the layer
whole, which takes time and disk space for a large one.
"""

import fcntl
import functools
import getpass
import glob
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hasten.core.errors import ConfigurationError, HastenWarning

MAX_COPY_BYTES = 200 * 10**6
PROBE_TIMEOUT_S = 10.0  # of a mount, which a file system that hangs would never end
PREFIX = "hasten-sandbox-"
INTERPRETER = sys.executable or "python3"
ENTER = Path(__file__).with_name("enter_sandbox.py")
NEVER_OVERLAID = ("/dev", "/proc", "/sys")  # devices and the kernel's files are no data of the user
VAR_TMP, SHARED_MEMORY, REMOVABLE_DISKS = "/var/tmp", "/dev/shm", "/run/media"  # below directories of the system
OF_THE_SYSTEM = "bin boot dev etc lib lib32 lib64 libx32 lost+found nix proc run sbin snap sys usr var"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
MPS_PIPES = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # to the server that shares a GPU

# Trackers write into the sandbox and upload nothing. {} is a fresh directory. TensorBoard writes plain files.
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_DIR": "{}/wandb",
    "WANDB_CACHE_DIR": "{}/wandb",
    "WANDB_DATA_DIR": "{}/wandb",
    "MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db",
    "TRACKIO_DIR": "{}/trackio",
    "COMET_OFFLINE_DIRECTORY": "{}/comet",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "offline",
}


@dataclass(frozen=True)
class Sandbox:
    """An isolated place for commands.

    Attributes:
        cwd: Working directory of the command.
        directories: Directories whose content the command cannot change; none of them contains another.
        directory: Temporary directory of this sandbox, in which the command can write. It is removed at the end.
        shared: Paths below ``directories`` that the command can change: caches of compiled code, pipes of CUDA MPS, and
            ``directory``.
        isolation: "overlay", or "copy" with the limits that the module's docstring states.
    """

    cwd: str
    directories: tuple[str, ...]
    directory: Path
    shared: tuple[str, ...] = ()
    isolation: str = "overlay"

    @staticmethod
    @contextmanager
    def for_directory(cwd: str | Path, places: Sequence[str] = ()) -> "Iterator[Sandbox]":
        """Context manager: a sandbox over the working directory and further directories that the command may write to.

        Args:
            cwd: Working directory of the command.
            places: Real paths of the further directories; HastenWarning names those that no overlay can cover.

        Raises:
            ConfigurationError: The directory cannot be isolated; the message has the reason.
        """
        cwd = os.path.realpath(cwd)
        if not os.path.isdir(cwd):
            raise ConfigurationError(f"cannot isolate a trial in {cwd}: it is not a directory")
        if cwd == "/":
            raise ConfigurationError("cannot isolate a trial in /; start the command in the directory of the script")
        base = _base_outside(_outermost([cwd, *(place for place in places if place not in (VAR_TMP, SHARED_MEMORY))]))
        _remove_stale(base)
        with _locked_directory(base) as directory:
            yield _isolate(cwd, directory, places)

    def wrap(self, argv: Sequence[str], hidden: Sequence[str] = ()) -> list[str]:
        """The command that runs ``argv`` in this sandbox. It becomes ``argv`` (exec): process id, process group,
        signals and exit code are those of ``argv``; exit code 125 means that the sandbox could not be made.

        Args:
            argv: The command.
            hidden: Absolute paths of files and directories that it shall not find.

        Raises:
            ConfigurationError: A hidden path is outside of what the sandbox covers: it would be the user's own.
        """
        for path in hidden:
            if not _covers(self.directories, path) or _covers(self.shared, path):
                raise ConfigurationError(
                    f"the command resumes from {path}, which cannot be hidden from a trial; leave that option out, or "
                    f"copy the file to {self.cwd}"
                )
        enter = [INTERPRETER, "-I", "-S", str(ENTER), self.isolation, str(self.directory), self.cwd]
        return [*enter, *self.directories, "--", *self.shared, "--", *hidden, "--", *argv]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """A copy of ``variables`` in which trackers are offline and write to a fresh directory in the sandbox, and
        torch.compile uses the user's cache if that is shared.
        """
        trackers = tempfile.mkdtemp(prefix="trackers-", dir=self.directory)
        offline = {name: value.format(trackers) for name, value in OFFLINE.items()}
        for value in offline.values():
            if value.startswith(trackers):
                os.makedirs(value, exist_ok=True)
        compiled = {INDUCTOR_CACHE: _inductor_cache()} if self.shared else {}
        return {**variables, **offline, **compiled}


def writable_places() -> list[str]:
    """Real paths of home, /var/tmp, /dev/shm, and the readable directories in / that are not the system's."""
    found = [
        f"/{name}" for name in os.listdir("/") if name not in OF_THE_SYSTEM.split() and not os.path.islink(f"/{name}")
    ]
    # below those of the system
    found += map(os.path.realpath, (os.path.expanduser("~"), VAR_TMP, SHARED_MEMORY, REMOVABLE_DISKS))
    return sorted(path for path in found if os.path.isdir(path) and os.access(path, os.R_OK | os.X_OK) and path != "/")


def _isolate(cwd: str, directory: Path, places: Sequence[str]) -> Sandbox:
    """The sandbox over ``cwd`` and those of the places that an overlay can cover; else one with a copy of ``cwd``."""

    def over(covered: Sequence[str]) -> Sandbox:
        directories = _outermost([cwd, *covered])
        shared = [path for path in (*_caches(), str(directory)) if _covers(directories, path)] if covered else []
        return Sandbox(cwd, directories, directory, tuple(shared))

    box = over(places)
    if not (obstacle := _overlay_obstacle(box)):
        return box
    box, covered = over([]), list[str]()
    if reason := _overlay_obstacle(box):
        _check_copy_is_possible(cwd, reason)
        box = replace(box, isolation="copy")
    else:
        for place in places:
            if not _overlay_obstacle(over([*covered, place])):
                covered.append(place)
        box = over(covered)
    if lost := [place for place in places if place not in covered]:
        _warn_once(f"what trials write to {', '.join(lost)}, outside of {cwd}, is kept: {obstacle}")
    return box


@functools.cache
def _warn_once(text: str) -> None:
    """Warns of what holds for every trial at the first one only."""
    warnings.warn(text, HastenWarning, stacklevel=2)


def _inductor_cache() -> str:
    """The directory in which torch.compile caches what it has compiled; it may not exist yet."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # an id without a name, as in containers
        user = str(os.getuid())
    return os.path.realpath(os.environ.get(INDUCTOR_CACHE) or f"{tempfile.gettempdir()}/torchinductor_{user}")


def _caches() -> list[str]:
    """Directories that the trials share with each other and with the user, which changes only their speed.

    torch.compile's cache, which is made if it does not exist, and the pipes of CUDA MPS.
    """
    with suppress(OSError):
        os.makedirs(_inductor_cache(), exist_ok=True)
    of_mps = [MPS_PIPES, *glob.glob(f"{SHARED_MEMORY}/cuda.*")] if os.path.isdir(MPS_PIPES) else []
    return [path for path in (_inductor_cache(), *of_mps) if os.path.exists(path)]


def _outermost(directories: list[str]) -> tuple[str, ...]:
    """The directories that lie in no other of them, in order; those of devices and of the kernel are left out."""
    outer: list[str] = []
    for directory in sorted(set(directories)):
        never = () if _covers([SHARED_MEMORY], directory) else NEVER_OVERLAID
        if not _covers([*outer, *never], directory):
            outer.append(directory)
    return tuple(outer)


def _covers(directories: Sequence[str], path: str) -> bool:
    return any(Path(path).is_relative_to(directory) for directory in directories)


def _base_outside(directories: tuple[str, ...]) -> str:
    """A directory for temporary directories that lies in none of the directories; raises ConfigurationError."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        base = os.path.realpath(base)
        if not _covers(directories, base) and os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK):
            return base
    remedy = "set TMPDIR to a directory outside of " + ", ".join(directories)
    raise ConfigurationError(f"cannot isolate a trial: there is no place for its temporary files; {remedy}")


@contextmanager
def _locked_directory(base: str) -> Iterator[Path]:
    """A temporary directory that is locked while this process lives, so that no other one removes it as stale."""
    while True:
        directory = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        with suppress(FileNotFoundError):  # a process that looked for stale directories was faster
            descriptor = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.path.exists(os.path.join(directory, "lock")):
                break
            os.close(descriptor)
    try:
        yield Path(directory)
    finally:
        _remove(directory)
        os.close(descriptor)


def _remove_stale(base: str) -> None:
    """Removes the directories of this user's sandboxes that no process holds any more."""
    for entry in os.scandir(base):
        try:
            if not entry.name.startswith(PREFIX) or entry.is_symlink() or entry.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(os.path.join(entry.path, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # its own process may remove it at the same time
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(entry.path)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(descriptor)


def _remove(directory: str) -> None:
    """Removes a directory tree, also directories of mode 000, which overlays leave in their work directories."""
    for parent, names, _ in os.walk(directory):
        for path in (os.path.join(parent, name) for name in names):
            if not os.path.islink(path):  # chmod follows links, out of the sandbox
                with suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(directory, ignore_errors=True)


def _overlay_obstacle(box: Sandbox) -> str:
    """Why overlays over the sandbox's directories are not possible; empty if they are."""
    try:
        probe = subprocess.run(box.wrap(["true"]), capture_output=True, text=True, cwd="/", timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"an overlay took longer than {PROBE_TIMEOUT_S:.0f} s"
    if probe.returncode == 0:
        return ""
    return probe.stderr.strip().removeprefix("hasten: ") or f"exit code {probe.returncode}"


def _check_copy_is_possible(cwd: str, obstacle: str) -> None:
    """Raises ConfigurationError if ``cwd`` is too large to copy; ``obstacle`` is why no overlay is possible."""
    if _size_above(cwd, MAX_COPY_BYTES) <= MAX_COPY_BYTES:
        return
    reason = f"{cwd} holds more than {MAX_COPY_BYTES // 10**6} MB, which is too large to copy for each trial"
    remedy = "permit user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0; in a container, "
    remedy += "--privileged, or --security-opt seccomp=unconfined --security-opt apparmor=unconfined)"
    raise ConfigurationError(f"cannot isolate a trial: {obstacle}, and {reason}; {remedy}")


def _size_above(directory: str, limit: int) -> int:
    """Bytes of the files in a directory, counted until they exceed the limit."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
        if total > limit:
            break
    return total
