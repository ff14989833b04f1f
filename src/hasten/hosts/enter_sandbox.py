"""Runs a command in a sandbox.

::

    python -I -S enter_sandbox.py overlay|copy FOLDER CWD DIRECTORY ... -- SHARED ... -- HIDDEN ... -- COMMAND ...

``sandbox.py`` starts this file as a script. It then becomes the command (exec), so that process id, process group,
signals and exit code are those of the command itself. Each start makes a fresh layer in FOLDER. Exit code 125: the
sandbox could not be made; 126 or 127: the command could not be started.

Standard library only, and of that what imports fast: ``json``, ``typing``, ``signal`` or ``re`` would double the 20 ms
that a start takes.
"""

import ctypes
import fcntl
import os
import stat
import sys
import time

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
SIGPIPE, SIGXFSZ, SIG_DFL = 13, 25, None
NO_SANDBOX, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127  # as `docker run` and `env` exit
SHARED_MEMORY = "/dev/shm"  # also in sandbox.py
COPY = "HASTEN_COPY"  # the copy in which the command runs; also in inside_files.py

_libc = ctypes.CDLL(None, use_errno=True)


def main(isolation: str, directory: str, cwd: str, *arguments: str) -> None:
    """Makes the layer and becomes the command; returns never."""
    first = arguments.index("--")
    second = arguments.index("--", first + 1)
    third = arguments.index("--", second + 1)
    directories, shared, hidden = arguments[:first], arguments[first + 1 : second], arguments[second + 1 : third]
    command = list(arguments[third + 1 :])
    try:
        _hold_lock(directory)
        layer = os.path.join(directory, f"layer-{os.getpid()}-{time.monotonic_ns()}")
        os.mkdir(layer)
        if isolation == "copy":
            command = _enter_copy(cwd, layer, command)
            hidden = tuple(os.path.relpath(path, cwd) for path in hidden if path.startswith(cwd + "/"))
        else:
            _enter_overlays(directories, layer, shared)
            os.chdir(cwd)  # the current directory still is the one below the overlay
        for path in hidden:
            _remove(path)
    except OSError as error:
        _exit(NO_SANDBOX, f"cannot make the sandbox: {error.strerror or error} ({error.filename})")
    for ignored in (SIGPIPE, SIGXFSZ):  # this interpreter ignores them, which the command would inherit
        _libc.signal(ignored, SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        _exit(code, f"cannot run {command[0]}: {error.strerror}")


def _hold_lock(directory: str) -> None:
    """A shared lock that the command inherits: while it runs, no other sandbox removes the directory as stale."""
    descriptor = os.open(os.path.join(directory, "lock"), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.set_inheritable(descriptor, True)


def _enter_overlays(directories: tuple[str, ...], layer: str, shared: tuple[str, ...]) -> None:
    userxattr = _enter_namespace()
    own = [(path, os.open(path, os.O_PATH)) for path in shared]
    layers = _Layers(layer, userxattr)
    box = os.path.dirname(layer)
    for directory in sorted(directories, key=lambda path: box.startswith(f"{path}/")):  # which would hide the layers
        if directory == SHARED_MEMORY:
            _cover_shared_memory(os.path.join(layer, "shm"), userxattr)
            continue
        points = [path for path in _mount_points_below(directory) if not path.startswith(f"{box}/")]
        below = [(path, os.open(path, os.O_PATH)) for path in points]
        layers.overlay(directory, directory)
        for path, descriptor in below:  # an overlay shows the directory's own file system only
            source = f"/proc/self/fd/{descriptor}"
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                layers.overlay(source, path)
            else:
                _mount(source, path, flags=MS_BIND)
                _mount(None, path, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)
            os.close(descriptor)
    for path, descriptor in own:
        _mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND)
        os.close(descriptor)


def _cover_shared_memory(layer: str, userxattr: bool) -> None:
    """Mounts fresh memory of the same size over /dev/shm, as an overlay if it holds files: they stay readable.

    An empty /dev/shm gets a plain tmpfs: an overlay would make each batch of a loader's worker 20 us slower.
    """
    status = os.statvfs(SHARED_MEMORY)
    options = f"mode=1777,size={status.f_blocks * status.f_frsize}"
    if not os.listdir(SHARED_MEMORY):
        return _mount("tmpfs", SHARED_MEMORY, kind="tmpfs", options=options)
    os.mkdir(layer)
    _mount("tmpfs", layer, kind="tmpfs", options=options)
    return _Layers(layer, userxattr, in_memory=True).overlay(SHARED_MEMORY, SHARED_MEMORY)


def _enter_namespace() -> bool:
    """Enters a mount namespace; without the privilege also a user namespace, in which the user keeps its own id.

    Returns:
        Whether it is a user namespace. Overlays must keep their marks in ``user.*`` extended attributes there.
    """
    if os.geteuid() == 0 and _libc.unshare(CLONE_NEWNS) == 0:
        in_user_namespace = False
    else:
        uid, gid = os.geteuid(), os.getegid()
        if _libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "user namespaces are not permitted", "unshare")
        for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
        in_user_namespace = True
    _mount(None, "/", flags=MS_REC | MS_PRIVATE)
    return in_user_namespace


class _Layers:
    """Mounts overlays whose upper layers lie in ``directory``, or in memory where its file system cannot hold them."""

    def __init__(self, directory: str, userxattr: bool, in_memory: bool = False) -> None:
        self.directory, self.count, self.in_memory = directory, 0, in_memory
        self.options = ",userxattr" if userxattr else ""

    def overlay(self, lower: str, target: str) -> None:
        """Mounts a fresh layer over ``lower`` at ``target``."""
        try:
            self._overlay(lower, target)
        except OSError:
            if self.in_memory:
                raise
            # The temporary directory is itself on an overlay (containers) or inside of the directory.
            _mount("tmpfs", self.directory, kind="tmpfs")
            self.in_memory = True
            self._overlay(lower, target)

    def _overlay(self, lower: str, target: str) -> None:
        self.count += 1
        paths = [lower]
        for part in ("upper", "work"):
            paths.append(os.path.join(self.directory, f"{part}-{self.count}"))
            os.mkdir(paths[-1])
        status = os.stat(lower)
        os.chmod(paths[1], stat.S_IMODE(status.st_mode))  # the mode of the directory itself is that of the upper layer
        if os.geteuid() == 0:
            os.chown(paths[1], status.st_uid, status.st_gid)
        descriptors = [os.open(path, os.O_PATH) for path in paths]  # a path itself may contain a comma or a colon
        try:
            lowerdir, upperdir, workdir = (f"/proc/self/fd/{descriptor}" for descriptor in descriptors)
            layers = f"lowerdir={lowerdir},upperdir={upperdir},workdir={workdir}"
            _mount("overlay", target, kind="overlay", options=layers + self.options)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """mount(2). Raises OSError with the target."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*texts, ctypes.c_ulong(flags), options.encode()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount of {kind or 'a directory'}: {os.strerror(code)}", target)


def _mount_points_below(directory: str) -> list[str]:
    """Mount points below the directory, outer before inner, the last mounted of each once."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        points = [point.replace(code, character) for point in points]
    return sorted({point for point in points if point.startswith(directory.rstrip("/") + "/")})


def _enter_copy(cwd: str, layer: str, command: list[str]) -> list[str]:
    """Copies the working directory and enters the copy. Returns the command with paths below ``cwd`` moved there."""
    import re
    import shutil

    copy = os.path.join(layer, os.path.basename(cwd))

    def skip_special_files(directory: str, names: list[str]) -> list[str]:
        types = {name: stat.S_IFMT(os.lstat(os.path.join(directory, name)).st_mode) for name in names}
        return [name for name, kind in types.items() if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)]

    shutil.copytree(cwd, copy, symlinks=True, ignore=skip_special_files)
    for directory, directories, files in os.walk(copy):
        for link in filter(os.path.islink, (os.path.join(directory, name) for name in directories + files)):
            original = os.path.join(cwd, os.path.relpath(link, copy))
            target = os.path.normpath(os.path.join(os.path.dirname(original), os.readlink(original)))
            if not target.startswith(cwd + "/"):  # a relative link out of the directory would miss its target
                os.unlink(link)
                os.symlink(target, link)
    os.chdir(copy)
    os.environ[COPY] = os.path.realpath(copy)
    in_directory = re.compile(rf"(?<![\w./-]){re.escape(cwd)}(?=[/:]|$)")
    for variable in {"PWD", "PYTHONPATH"} & os.environ.keys():
        os.environ[variable] = in_directory.sub(lambda _: copy, os.environ[variable])
    return [in_directory.sub(lambda _: copy, argument) for argument in command]


def _remove(path: str) -> None:
    """Removes a file or a directory, if there is one, from what the command sees; the user's own stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil

        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _exit(code: int, message: str) -> None:
    print(f"hasten: {message}", file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
