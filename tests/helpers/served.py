"""A process of ``hasten serve`` and a client of it."""

import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx

START_S = 60.0


@contextmanager
def running(directory, *options, token=None):
    """Context manager: ``hasten serve`` on a free port: (client, process, path of what it wrote to standard error)."""
    log = directory / f"server-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "hasten", "serve", str(directory), "--port", "0", *options]
    with open(log, "w") as errors, subprocess.Popen(command, stderr=errors, stdout=errors) as process:
        try:
            address = wait_for_address(process, log)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            with httpx.Client(base_url=address, timeout=30.0, headers=headers) as client:
                yield client, process, log
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60.0)


def wait_for_address(process, log):
    """The address that the server has announced."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if found := re.search(r"at (http://\S+);", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    raise AssertionError(f"the server did not start: {log.read_text()}")
