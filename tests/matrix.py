"""Runs the quick tests on every supported pair of torch and Python that can be installed: ``make test-matrix``.

Each pair gets an environment of its own under ``.matrix/``, which later calls reuse. A torch without a CPU build at the
configured package index is installed as its CUDA build of several GB, which runs on the CPU as well; ``--cpu-only``
reports it as not installed instead. The exit code is 1 if a test failed or no pair could be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [
    *((torch, python) for torch in ("2.11", "2.12", "2.13") for python in ("3.11", "3.12")),
    *((torch, "3.13") for torch in ("2.13", "2.14", "2.15")),  # the newest Python, up to the newest pair
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", metavar="TORCH/PYTHON", help="such as 2.13/3.11; default: all supported")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="default: tests")
    parser.add_argument("--markers", default="not slow", help="pytest's -m; default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="test processes; default: %(default)s")
    parser.add_argument("--cpu-only", action="store_true", help="skip a torch that exists as a CUDA build only")
    parser.add_argument("--remove", action="store_true", help="remove each environment of up to 5 GB after its tests")
    options = parser.parse_args()
    pairs = [tuple(pair.split("/")) for pair in options.pairs] if options.pairs else PAIRS
    rows = []
    for torch, python in pairs:
        print(f"== torch {torch}, Python {python}", flush=True)
        rows.append((torch, python, *run_pair(torch, python, options)))
        print(f"   {rows[-1][2]}: {rows[-1][3]}", flush=True)
    print_table([("torch", "Python", "result", "details"), *rows])
    results = {row[2] for row in rows}
    return 1 if "failed" in results or results == {"not installed"} else 0


def run_pair(torch: str, python: str, options: argparse.Namespace) -> tuple[str, str]:
    """(``passed``, ``failed`` or ``not installed``, details) of one pair."""
    directory = ROOT / ".matrix" / f"torch{torch}-py{python}"
    try:
        return run_tests(
            make_environment(directory, torch, python, options.cpu_only), options, Path(f"{directory}.log")
        )
    except NotInstalledError as error:
        return "not installed", str(error)
    finally:
        if options.remove:
            shutil.rmtree(directory, ignore_errors=True)


def run_tests(python: Path, options: argparse.Namespace, log: Path) -> tuple[str, str]:
    """(``passed`` or ``failed``, details) of the tests under this interpreter, whose output goes to ``log``."""
    version = "import sys, torch; print(torch.__version__, sys.version.split()[0])"
    found = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout.split()
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(options.workers)]
    with log.open("w") as file:
        command += ["-m", options.markers, *options.tests]
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    summary = re.findall(r"^[= ]*(\d+ (?:passed|failed).*? in [\d.]+s|ERROR.*)", log.read_text(), re.MULTILINE)
    details = (
        f"torch {found[0]}, Python {found[1]}: {summary[-1] if summary else 'no summary'}; {log.relative_to(ROOT)}"
    )
    return "passed" if code == 0 else "failed", details


class NotInstalledError(Exception):
    """A pair cannot be installed here, with the reason."""


def make_environment(directory: Path, torch: str, python: str, is_cpu_only: bool) -> Path:
    """The interpreter of an environment with hasten, its development dependencies and this torch.

    Raises:
        NotInstalledError: no such Python, no build of torch for it, or a package fails to install.
    """
    environment_python = directory / "bin" / "python"
    if (directory / "ready").exists():
        return environment_python
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    interpreter = next(interpreters(python), None)
    if interpreter is None:
        raise NotInstalledError(f"no interpreter python{python} on this machine")
    run([interpreter, "-m", "venv", directory], directory)
    if is_cpu_only and not has_cpu_build(environment_python, torch):
        raise NotInstalledError(f"no CPU build of torch {torch} at the package index")
    constraint = directory / "constraints.txt"
    constraint.write_text(f"torch=={torch}.*\n")
    run([environment_python, "-m", "pip", "install", "-c", constraint, "-e", f"{ROOT}[dev]"], directory)
    (directory / "ready").touch()
    return environment_python


def has_cpu_build(python: Path, torch: str) -> bool:
    command = [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", f"torch=={torch}.0+cpu"]
    return subprocess.run(command, capture_output=True).returncode == 0


def interpreters(version: str) -> Iterator[str]:
    """The interpreters of a Python version that start: on the PATH, then those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = shutil.which(f"python{version}")
    for path in [*([found] if found else []), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))]:
        check = f"import sys; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"
        if subprocess.run([path, "-c", check], capture_output=True).returncode == 0:
            yield path


def run(command: list, directory: Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    (directory / "install.log").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        errors = (
            re.findall(r"^ERROR: (.*)$", done.stderr, re.MULTILINE) or done.stderr.strip().splitlines()[-1:] or ["?"]
        )
        raise NotInstalledError(errors[-1][:160])


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]))


if __name__ == "__main__":
    sys.exit(main())
