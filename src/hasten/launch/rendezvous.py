"""Where the machines of a job meet, and by which of its addresses this one is reached from there.

torchrun decides which node has the store by its host name and address, and fails at once where the store does not answer.
Here a node is waited for that starts later, or comes back after it was lost (tests/launch: test_agents, test_elastic).
"""

from __future__ import annotations

import socket
import time
import warnings

import psutil

from hasten.core.errors import ConfigurationError, ProgressWarning, RunError

HERE = "127.0.0.1"
TIMEOUT_S = 60.0  # seconds until somebody has to answer there
TOLD_EVERY = 10.0  # seconds


def local_address(place: str) -> str:
    """The address by which whoever is at HOST:PORT reaches this machine.

    Raises:
        Refusal: no machine is called so, or no way leads there.
    """
    host, port = split_host_port(place)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sent_nothing:
            sent_nothing.connect((host, port))
            return sent_nothing.getsockname()[0]
    except OSError as error:
        raise ConfigurationError(
            f"the machines cannot meet at {place}: {error.strerror}; name a machine of the job by an address that all of them reach"
        ) from None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has the address."""
    known = psutil.net_if_addrs().items()
    return next((name for name, all_of_it in known if any(each.address == address for each in all_of_it)), None)


def hosts_rendezvous(place: str, timeout: float = TIMEOUT_S) -> bool:
    """Whether this process is to answer at HOST:PORT. Where another machine is, somebody is waited for to answer there.

    Raises:
        Failure: nobody does.
    """
    host, port = split_host_port(place)
    begun = told = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=TOLD_EVERY).close()
            return False
        except OSError:
            now = time.monotonic()
        if _is_here(host):
            return True
        if now - begun > timeout:
            raise RunError(
                f"nobody has answered at {place} for {timeout:.0f} s; start the same command on {host}, or mend the way there"
            )
        if now - told > TOLD_EVERY:
            warnings.warn(f"waiting for {place} since {now - begun:.0f} s", ProgressWarning, stacklevel=2)
            told = now
        time.sleep(0.2)


def _is_here(host: str) -> bool:
    """Whether an address of this machine is called so; a name may be gone with its machine."""
    try:
        return interface_of(socket.gethostbyname(host)) is not None
    except OSError:
        return False


def split_host_port(place: str) -> tuple[str, int]:
    """HOST and PORT."""
    host, _, port = place.rpartition(":")
    return host, int(port)
