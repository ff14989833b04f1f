"""How much of the processors other programs used: the work of own processes does not count."""

import subprocess
import sys

import pytest

from hasten.benchmarking import system_noise
from hasten.benchmarking.system_noise import SystemNoise
from hasten.reporting.view_model import disturbance

SECONDS = 0.3
BUSY = f"import time\nwhile time.process_time() < {SECONDS}: pass"
ORPHAN = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid)"


def test_own_cpu_seconds_include_ended_processes_but_no_others():
    before = system_noise._own_cpu_seconds()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    own = system_noise._own_cpu_seconds()
    assert own - before >= SECONDS
    subprocess.run([sys.executable, "-c", ORPHAN, BUSY], check=True, stdout=subprocess.DEVNULL)
    assert system_noise._own_cpu_seconds() - own < SECONDS


def test_others_percent_is_what_own_processes_do_not_explain(monkeypatch):
    ticks, own = iter([[0] * 8, [60, 0, 10, 25, 5, 0, 0, 10]]), iter([1.0, 1.3])
    monkeypatch.setattr(system_noise, "_cpu_ticks", lambda: next(ticks))
    monkeypatch.setattr(system_noise, "_own_cpu_seconds", lambda: next(own))
    monkeypatch.setattr(system_noise.os, "sysconf", lambda name: 100)
    figures = SystemNoise().summary(1.0, 2)
    assert figures["others_percent"] == pytest.approx(100 * (70 - 30) / 110)
    assert figures["steal_percent"] == pytest.approx(100 * 10 / 110)


def test_disturbance_is_told_from_some_percent_on():
    assert disturbance({"others_percent": 35.2}).startswith("other programs used 35 % of the processors")
    assert disturbance({"others_percent": 3.0}) == disturbance({"others_percent": None}) == disturbance({}) == ""
