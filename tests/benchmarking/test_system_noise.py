"""How much of the processors other programs used: the work of own processes does not count."""

import subprocess
import sys

import pytest

from hasten.benchmarking import system_noise
from hasten.benchmarking.system_noise import SystemNoise
from hasten.reporting.view_model import disturbance

SECONDS = 0.5
TICKS = 0.05  # the kernel counts in hundredths of a second and rounds each of user and system time down
MEASURE = f"""
import subprocess, sys
from hasten.benchmarking.system_noise import _own_cpu_seconds
busy = "import time\\nwhile time.process_time() < {SECONDS}: pass"
other = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
readings = [_own_cpu_seconds()]
for command in ([sys.executable, "-c", busy], [sys.executable, "-c", other, busy]):
    subprocess.run(command, check=True)
    readings.append(_own_cpu_seconds())
print(readings[1] - readings[0], readings[2] - readings[1])
"""


def test_own_cpu_seconds_include_ended_processes_but_no_others():
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, stdout=subprocess.PIPE, text=True)
    own, other = map(float, done.stdout.split())
    assert own >= SECONDS - TICKS > other


def test_others_percent_is_what_own_processes_do_not_explain(monkeypatch):
    ticks, own = iter([[0] * 8, [60, 0, 10, 25, 5, 0, 0, 10]]), iter([1.0, 1.3])
    monkeypatch.setattr(system_noise, "_cpu_ticks", lambda: next(ticks))
    monkeypatch.setattr(system_noise, "_own_cpu_seconds", lambda *_: next(own))
    monkeypatch.setattr(system_noise.os, "sysconf", lambda name: 100)
    figures = SystemNoise().summary(1.0, 2)
    assert figures["others_percent"] == pytest.approx(100 * (70 - 30) / 110)
    assert figures["steal_percent"] == pytest.approx(100 * 10 / 110)


def test_disturbance_is_told_from_some_percent_on():
    assert disturbance({"others_percent": 35.2}).startswith("other programs used 35 % of the processors")
    assert disturbance({"others_percent": 3.0}) == disturbance({"others_percent": None}) == disturbance({}) == ""


def test_work_of_another_rank_is_no_disturbance():
    rank = "import os; from hasten.benchmarking.system_noise import _own_cpu_seconds as own; print(own(os.getppid()))"

    def read() -> float:
        return float(subprocess.run([sys.executable, "-c", rank], check=True, stdout=subprocess.PIPE, text=True).stdout)

    before = read()
    busy = f"import time\nwhile time.process_time() < {SECONDS}: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert read() - before >= SECONDS - TICKS
