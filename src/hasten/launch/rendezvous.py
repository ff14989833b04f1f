"""The rendezvous endpoint of a job: which node hosts its store, and by which address this node is reached from there.

torchrun chooses the node that hosts the store by host name and address, and fails at once if the store does not answer.
Here a node waits for a host that starts later, or that was lost and comes back (tests/launch: test_agents,
test_elastic).
"""

import socket
import time
import warnings

import psutil

from hasten.core.errors import ConfigurationError, ProgressWarning, RunError

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 60.0  # how long to wait for the host at the first meeting
REPORT_EVERY_S = 10.0


def local_address(endpoint: str) -> str:
    """The address of this node that HOST:PORT can reach; ConfigurationError if no route leads there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
            probe.connect(split_host_port(endpoint))
            return probe.getsockname()[0]
    except OSError as error:
        advice = "give --rdzv-endpoint an address of one of the nodes that all of them can reach"
        raise ConfigurationError(f"the nodes cannot meet at {endpoint}: {error.strerror}; {advice}") from None


def interface_of(address: str) -> str | None:
    """Name of the network interface with this address; None if this node has none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(a.address == address for a in addresses)), None)


def hosts_rendezvous(endpoint: str, timeout: float = TIMEOUT_S) -> bool:
    """True if HOST is this node and no store answers at HOST:PORT, so that this node must host it. Else waits for the
    answer and returns False; RunError after ``timeout`` s.
    """
    host, port = split_host_port(endpoint)
    began = reported = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=REPORT_EVERY_S).close()
            return False
        except OSError:
            now = time.monotonic()
        if _is_this_node(host):
            return True
        if now - began > timeout:
            advice = f"start the same command on {host}, and check that this node can reach it"
            raise RunError(f"no answer from the rendezvous at {endpoint} for {timeout:.0f} s; {advice}")
        if now - reported > REPORT_EVERY_S:
            warnings.warn(f"waiting for {endpoint} since {now - began:.0f} s", ProgressWarning, stacklevel=2)
            reported = now
        time.sleep(0.2)


def _is_this_node(host: str) -> bool:
    """Whether the host name resolves to an address of this node; False if it does not resolve."""
    try:
        return interface_of(socket.gethostbyname(host)) is not None
    except OSError:
        return False


def split_host_port(endpoint: str) -> tuple[str, int]:
    """Splits "HOST:PORT" into (host, port number)."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
