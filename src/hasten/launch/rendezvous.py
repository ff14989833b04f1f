"""The rendezvous endpoint of a job: which node hosts its store, and by which address this node is reached from there.

torchrun chooses the node that hosts the store by host name and address, and fails at once if the store does not answer.
Here a node waits for a host that starts later, or that was lost and comes back (tests/launch: test_agents,
test_elastic).
"""

import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address

import psutil

from hasten.core.errors import ConfigurationError, ProgressWarning, RunError

LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # of no network (RFC 5737): the default route leads there
TIMEOUT_S = 60.0  # how long to wait for the host at the first meeting
REPORT_EVERY_S = 10.0


def local_address(endpoint: str, timeout: float = TIMEOUT_S) -> str:
    """The address of this node that HOST:PORT can reach. ConfigurationError if no route leads there, or if the name is
    unknown for ``timeout`` s: a cluster may enter it only when the host starts, so a warning reports the first failure.

    Many systems give the own name of a node a loopback address; this node is then reached by its default route. Without
    a default route, as on a computer without a network, the loopback address is used.
    """
    host, port = split_host_port(endpoint)
    waits, is_reported = _waits(endpoint, timeout), False
    while True:
        try:
            resolved = socket.gethostbyname(host)
            if _is_loopback(resolved) and host not in (resolved, "localhost"):
                with suppress(OSError):  # there is no default route
                    return _source_address(ELSEWHERE, port)
            return _source_address(resolved, port)
        except OSError as error:
            if isinstance(error, socket.gaierror):
                if not is_reported:
                    attempts = f"trying again for {timeout:.0f} s, in case it starts later"
                    warnings.warn(f"{host} has no address yet; {attempts}", ProgressWarning, stacklevel=2)
                    is_reported = True
                if next(waits, False):
                    continue
            advice = "give --rdzv-endpoint an IP address of one of the nodes that all of them can reach"
            raise ConfigurationError(f"the nodes cannot meet at {endpoint}: {error.strerror}; {advice}") from None


def _source_address(host: str, port: int) -> str:
    """The address of this node from which it would send to HOST:PORT."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        probe.connect((host, port))
        return probe.getsockname()[0]


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback


def _waits(endpoint: str, timeout: float) -> Iterator[bool]:
    """Yields True after each wait of 0.2 s, for ``timeout`` s; reports every 10 s that this node waits."""
    began = reported = time.monotonic()
    while (now := time.monotonic()) - began <= timeout:
        if now - reported > REPORT_EVERY_S:
            warnings.warn(f"waiting for {endpoint} since {now - began:.0f} s", ProgressWarning, stacklevel=3)
            reported = now
        time.sleep(0.2)
        yield True


def interface_of(address: str) -> str | None:
    """Name of the network interface with this address; None if this node has none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(a.address == address for a in addresses)), None)


def hosts_rendezvous(endpoint: str, timeout: float = TIMEOUT_S) -> bool:
    """True if HOST is this node and no store answers at HOST:PORT, so that this node must host it. Else waits for the
    answer and returns False; RunError after ``timeout`` s.
    """
    host, port = split_host_port(endpoint)
    waits = _waits(endpoint, timeout)
    while True:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=REPORT_EVERY_S).close()
            return False
        if _is_this_node(host):
            return True
        if not next(waits, False):
            advice = f"start the same command on {host}, and check that this node can reach it"
            raise RunError(f"no answer from the rendezvous at {endpoint} for {timeout:.0f} s; {advice}")


def _is_this_node(host: str) -> bool:
    """Whether the host name resolves to an address of this node; False if it does not resolve."""
    try:
        address = socket.gethostbyname(host)
        return _is_loopback(address) or interface_of(address) is not None
    except OSError:
        return False


def split_host_port(endpoint: str) -> tuple[str, int]:
    """Splits "HOST:PORT" into (host, port number)."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
