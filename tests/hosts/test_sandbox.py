"""A trial's writes: gone afterwards, as root and as an ordinary user, also after SIGKILL; every start is fresh."""

import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import pytest

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.hosts import sandbox
from hasten.hosts.sandbox import Sandbox
from helpers.process import join_process, start_process

NOBODY = 65534
USERS = ["root", "nobody"] if os.geteuid() == 0 else ["this user"]
# Everything that a training does to its directory, and what an overlay treats specially.
SCRIPT = """
test -e checkpoint.pt && echo resumed || echo step 0
echo weights > checkpoint.pt; echo more >> data/rows.csv; rm data/old.csv; mv train.py renamed.py
rm -r empty; mkdir empty; echo x > empty/x; ls -a > listing
ln -s data link; ln -s "$PWD" there; chmod 500 data .
"""


@pytest.fixture
def place(monkeypatch):
    """A directory for a test in which ``nobody`` may work, with ``project`` as it must stay and ``tmp`` for layers."""
    # mount options are separated by such characters
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="test, sandbox:"))
    for name in ("project/data", "project/empty", "tmp"):
        (directory / name).mkdir(parents=True)
    for name in ("train.py", "data/rows.csv", "data/old.csv"):
        (directory / "project" / name).write_text(f"the user's {name}\n")
    (directory / "project/train.py").chmod(0o640)
    if os.geteuid() == 0:
        for path in [directory, *directory.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
        monkeypatch.setattr(sandbox, "INTERPRETER", _interpreter_for_everyone())
    monkeypatch.setattr(tempfile, "tempdir", str(directory / "tmp"))
    yield directory
    shutil.rmtree(directory)


def _interpreter_for_everyone() -> str:
    """A Python that ``nobody`` may run; the one of the tests may lie in a home directory."""
    for path in filter(None, (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin"))):
        with suppress(PermissionError):
            subprocess.run([path, "-c", ""], user=NOBODY, group=NOBODY, check=True, cwd="/")
            return path
    pytest.skip("no Python that an ordinary user may run")


def become(user: str) -> None:
    if user == "nobody":
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def as_user(user: str, function, *args) -> None:
    """Runs ``function`` in a process of this user; fails if it fails."""

    def run():
        become(user)
        function(*args)

    skip_unless_readable(user)
    assert join_process(start_process(run)) == 0


def skip_unless_readable(user: str) -> None:
    if user == "nobody" and not _can_read(sandbox.ENTER):
        pytest.skip(f"an ordinary user may not read {sandbox.ENTER}")


def _can_read(path: Path) -> bool:
    """Whether ``nobody`` may read a file; a checkout may lie in a private directory."""
    try:
        subprocess.run(["cat", path], user=NOBODY, group=NOBODY, extra_groups=[], check=True, capture_output=True)
    except (subprocess.CalledProcessError, PermissionError):
        return False
    return True


def snapshot(directory: Path) -> dict:
    """Every path below the directory with its type, mode, owner, time of change and content."""
    found = {}
    for path in [directory, *directory.rglob("*")]:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        found[str(path)] = (status.st_mode, status.st_uid, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


def shell(box: Sandbox, cwd: Path, script: str) -> subprocess.CompletedProcess:
    command = box.wrap(["sh", "-c", script])
    return subprocess.run(command, cwd=cwd, env=box.environment(os.environ), capture_output=True, text=True)


def run_twice(project: Path) -> None:
    for starts in (2, 1):
        with Sandbox.for_directory(project) as box:
            assert box.isolation == "overlay"
            for _ in range(starts):  # fresh in each sandbox, and at each start in one
                result = shell(box, project, SCRIPT)
                assert (result.returncode, result.stdout, result.stderr) == (0, "step 0\n", "")


@pytest.mark.parametrize("user", USERS)
def test_trial_that_writes_leaves_the_directory_as_it_was_and_finds_no_earlier_trial(place, user):
    before = snapshot(place / "project")
    as_user(user, run_twice, place / "project")
    assert snapshot(place / "project") == before
    assert list((place / "tmp").iterdir()) == []


def read_and_write(project: Path, other: Path) -> None:
    with Sandbox.for_directory(project, places=[str(other)]) as box:
        script = f"cat train.py; echo changed > '{other}/log.txt'; cat '{other}/log.txt'; id -u; echo x > /dev/null"
        result = shell(box, project, script)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["the user's train.py", "changed", str(os.geteuid())]


@pytest.mark.parametrize("user", USERS)
def test_further_directories_are_covered_and_the_user_keeps_its_id(place, user):
    other = place / "other"
    other.mkdir(mode=0o777)
    other.chmod(0o777)
    as_user(user, read_and_write, place / "project", other)
    assert list(other.iterdir()) == []


def test_signals_process_group_and_exit_code_are_those_of_the_command(place):
    with Sandbox.for_directory(place / "project") as box:
        assert shell(box, place / "project", "exit 7").returncode == 7
        assert subprocess.run(box.wrap(["not-there"]), capture_output=True).returncode == 127
        assert subprocess.run(box.wrap(["./data"]), capture_output=True).returncode == 126
        ignored = shell(box, place / "project", "grep SigIgn /proc/self/status").stdout.split()
        assert int(ignored[1], 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0
        script = "trap 'exit 5' TERM; sleep 60 & echo $$; wait"
        process = subprocess.Popen(box.wrap(["sh", "-c", script]), stdout=subprocess.PIPE, start_new_session=True)
        with process:
            assert int(process.stdout.readline()) == process.pid
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(60) == 5


def train_until_killed(project: Path, pid_of_command) -> None:
    os.setsid()
    with Sandbox.for_directory(project) as box:
        script = f"while true; do {SCRIPT.replace('rm ', 'rm -f ')} done > /dev/null 2>&1"
        process = subprocess.Popen(box.wrap(["sh", "-c", script]), cwd=project)
        pid_of_command.send(process.pid)
        process.wait()
        time.sleep(60)  # the test ends the process group


def kill_at_random(place: Path, user: str, draw: random.Random) -> None:
    """Kills either process after up to 0.3 s; afterwards the directory is as it was, and the next start cleans up."""
    skip_unless_readable(user)
    before = snapshot(place / "project")
    receiver, sender = Pipe(duplex=False)

    def run():
        become(user)
        train_until_killed(place / "project", sender)

    parent = start_process(run)
    at_random = draw.uniform(0, 0.3)
    if draw.random() < 0.5 and receiver.poll(60):
        time.sleep(at_random)
        os.kill(receiver.recv(), signal.SIGKILL)
    else:
        time.sleep(at_random)
        os.kill(parent.pid, signal.SIGKILL)
    time.sleep(0.05)
    assert snapshot(place / "project") == before
    while parent.is_alive() and os.getpgid(parent.pid) != parent.pid:
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.join()
    assert snapshot(place / "project") == before


def start_one_more(project: Path) -> None:
    for _ in range(100):  # killed processes let go of their lock when the kernel has ended them
        with Sandbox.for_directory(project) as box:
            assert shell(box, project, SCRIPT).stdout == "step 0\n"
        if not list(Path(tempfile.gettempdir()).iterdir()):
            return
        time.sleep(0.05)
    raise AssertionError(f"left over: {list(Path(tempfile.gettempdir()).rglob('*'))}")


@pytest.mark.parametrize("user", USERS)
def test_sigkill_of_either_process_leaves_nothing_behind(place, user):
    for seed in range(3):
        kill_at_random(place, user, random.Random(seed))
    as_user(user, start_one_more, place / "project")


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("seed", range(20))
def test_sigkill_at_20_random_moments_leaves_nothing_behind(place, user, seed):
    kill_at_random(place, user, random.Random(100 + seed))
    as_user(user, start_one_more, place / "project")


def test_layers_of_a_command_that_outlives_its_sandbox_are_removed_only_when_it_ends(place):
    project, layers = place / "project", place / "tmp"
    receiver, sender = Pipe(duplex=False)
    parent = start_process(train_until_killed, project, sender)
    command = receiver.recv()
    while not list(layers.glob("*/layer-*/upper-1/checkpoint.pt")):
        time.sleep(0.01)
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    with Sandbox.for_directory(project):
        assert len(list(layers.iterdir())) == 2  # the command still writes into its layer
    os.kill(command, signal.SIGKILL)
    start_one_more(project)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_file_systems_mounted_below_the_directory_are_covered_as_well(place):
    project = place / "project"
    check = """
import os, subprocess, sys
from hasten.hosts.sandbox import Sandbox
with Sandbox.for_directory(sys.argv[1]) as box:
    script = "cat data/rows.csv; echo changed > data/rows.csv; cat empty/file"
    command = box.wrap(["sh", "-c", script])
    print(subprocess.run(command, cwd=sys.argv[1], check=True, stdout=-1, text=True).stdout, end="")
print(open("data/rows.csv").read())
"""
    mounts = "mount -t tmpfs none data && echo mounted > data/rows.csv && echo bound > file && touch empty/file"
    mounts += ' && mount --bind file empty/file && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mounts, "sh", sys.executable, "-c", check, str(project)]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert result.stdout.split() == ["mounted", "bound", "mounted"], result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="nests overlays, for which an ordinary user lacks the privilege")
def test_temporary_directory_on_an_overlay_puts_the_layers_in_memory(place):
    """As in a container, where an overlay cannot be the upper layer of another."""
    inner = """
import os, subprocess, sys
from hasten.hosts.sandbox import Sandbox
with Sandbox.for_directory("project") as box:
    script = "echo x > checkpoint.pt; grep -c ' - tmpfs tmpfs ' /proc/self/mountinfo"
    print(box.isolation, subprocess.run(box.wrap(["sh", "-c", script]), stdout=-1, text=True).stdout.strip())
print(sorted(os.listdir("project")), os.listdir("tmp"))
"""
    with Sandbox.for_directory(place) as outside:
        environment = {**os.environ, "TMPDIR": str(place / "tmp")}
        command = outside.wrap([sys.executable, "-c", inner])
        mounted = Path("/proc/self/mountinfo").read_text().count(" - tmpfs tmpfs ")
        result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert result.stdout.splitlines() == [
        f"overlay {mounted + 1}",
        "['data', 'empty', 'train.py'] []",
    ], result.stderr


FORBID_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_mnt_namespaces; "
IN_A_COPY = """
import json, os, subprocess, sys
from hasten.core.errors import ConfigurationError
from hasten.hosts import sandbox
project, limit = sys.argv[1], int(sys.argv[2])
sandbox.MAX_COPY_BYTES = limit
try:
    with sandbox.Sandbox.for_directory(project) as box:
        argv = ["sh", "-c", sys.stdin.read(), project + "/train.py", "--data=" + project, project + "s/not"]
        for _ in range(2):
            result = subprocess.run(box.wrap(argv), cwd=project, stdout=subprocess.PIPE, text=True)
        print(json.dumps([box.isolation, str(box.directory), result.stdout.splitlines()]))
except ConfigurationError as error:
    print(json.dumps(["refused", str(error)]))
"""


def without_namespaces(project: Path, script: str = "", limit: int = 10**6) -> list:
    """Runs IN_A_COPY where the kernel permits no further namespaces."""
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", "0:0", str(project.parent)], check=True)
    python = [sys.executable, "-c", IN_A_COPY, str(project), str(limit)]
    command = ["unshare", "-Ur", "sh", "-c", FORBID_NAMESPACES + 'exec "$@"', "sh", *python]
    environment = {**os.environ, "TMPDIR": str(project.parent / "tmp")}
    result = subprocess.run(command, input=script, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_without_namespaces_the_command_runs_in_a_copy(place):
    project = place / "project"
    (project / "outside").symlink_to("../tmp")
    os.mkfifo(project / "fifo")
    script = 'pwd; echo "$0"; echo "$1"; echo "$2"; readlink outside; ' + SCRIPT
    before = {path: content for path, (*_, content) in snapshot(project).items()}
    isolation, directory, lines = without_namespaces(project, script)
    assert isolation == "copy"
    copy = lines[0]
    assert copy.startswith(directory) and copy.endswith("/project")
    assert lines[1:] == [f"{copy}/train.py", f"--data={copy}", f"{project}s/not", str(place / "tmp"), "step 0"]
    assert {path: content for path, (*_, content) in snapshot(project).items()} == before


def test_without_namespaces_a_directory_that_is_too_large_to_copy_is_refused_with_the_reason(place):
    outcome, message = without_namespaces(place / "project", limit=10)
    assert outcome == "refused" and "too large to copy for each trial" in message
    assert "namespaces are not permitted" in message
    assert "permit user namespaces" in message and "\n" not in message


def test_place_that_no_overlay_can_cover_is_named_and_the_others_are_covered(place):
    project, other, missing = (str(place / name) for name in ("project", "other", "missing"))
    os.mkdir(other)
    why = f"what trials write to {missing}, outside of {project}, is kept: "
    with pytest.warns(HastenWarning, match=why), Sandbox.for_directory(project, [missing, other]) as box:
        assert box.isolation == "overlay" and set(box.directories) == {project, other}
        assert shell(box, project, f"echo changed > '{other}/log.txt'").returncode == 0
    assert os.listdir(other) == []


def test_writable_places_include_a_home_directory_below_one_of_the_system(monkeypatch):
    monkeypatch.setenv("HOME", "/usr/share")
    assert "/usr/share" in sandbox.writable_places()


def write_to_system_places(project: Path, held: str) -> None:
    name = f"hasten-test-{project.parent.name}"
    with Sandbox.for_directory(project, places=sandbox.writable_places()) as box:
        script = "".join(f"cd {place}; echo x > '{name}'; cat '{name}'; " for place in ("/dev/shm", "/var/tmp"))
        script += f"cat {held or '/dev/null'}; "
        script += f"echo heard > '{box.directory}/message'; df --output=size /dev/shm | tail -1"
        result = shell(box, project, script)
        assert (box.directory / "message").read_text() == "heard\n"
    size = os.statvfs("/dev/shm")
    lines = ["x", "x", *(["held"] if held else []), str(size.f_blocks * size.f_frsize // 1024)]
    assert ([line.strip() for line in result.stdout.splitlines()], result.stderr) == (lines, "")
    assert not Path(f"/dev/shm/{name}").exists() and not Path(f"/var/tmp/{name}").exists()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("holds_data", [False, True])
def test_shared_memory_and_var_tmp_are_covered(place, user, holds_data):
    """Also where the sandbox itself lies in one of them, and where the user's data must be found."""
    held = Path("/dev/shm", f"{place.name}-held".replace(" ", ""))
    try:
        if holds_data:
            held.write_text("held\n")
        as_user(user, write_to_system_places, place / "project", f"'{held}'" if holds_data else "")
    finally:
        held.unlink(missing_ok=True)


def test_root_directory_and_missing_directory_are_refused(place):
    for path in ("/", place / "missing"):
        with pytest.raises(ConfigurationError, match="cannot isolate a trial in"), Sandbox.for_directory(path):
            pass


def test_trackers_are_offline_and_write_to_a_fresh_directory_of_the_sandbox(place):
    with Sandbox.for_directory(place / "project") as box:
        first, second = box.environment({"HOME": "/home/a", "WANDB_MODE": "online"}), box.environment({})
        assert first["WANDB_MODE"] == "offline" and first["HOME"] == "/home/a"
        for name in ("WANDB_DIR", "TRACKIO_DIR", "COMET_OFFLINE_DIRECTORY"):
            assert Path(first[name]).is_dir() and Path(first[name]).is_relative_to(box.directory)
            assert first[name] != second[name]
        assert first["MLFLOW_TRACKING_URI"].startswith(f"sqlite:///{box.directory}/")


def test_start_of_a_command_takes_less_than_50_ms_of_cpu_time(place):
    def cpu_seconds(command):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    with Sandbox.for_directory(place / "project") as box:
        assert min(cpu_seconds(box.wrap(["true"])) for _ in range(5)) < 0.05
