"""Emulates a slow network between the processes of one machine: a network namespace whose traffic passes through this
program.

``python network_emulation.py MEGABITS MILLISECONDS COMMAND ...`` runs a command in the namespace. Packets sent over the
interface ``slow0``, a TUN device, arrive at this program, which delays them by the given milliseconds, limits their
rate to the given megabits per second, and writes them back. Both directions of the link share one rate limiter, so it
passes twice the rate. The loopback interface has its usual speed. Requires root and iproute2.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from queue import SimpleQueue

ADDRESS, INTERFACE = "10.88.0.1", "slow0"
LARGEST = 60_000  # bytes per packet: few large packets cost this program less time
MAKE_TUN, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # linux/if_tun.h
OF_NETWORK = 0x40000000  # linux/sched.h
BACKLOG = 0.2  # length of the queue in seconds at the link's rate; further packets are dropped


def main(megabits: float, milliseconds: float, command: list[str]) -> int:
    name = f"slow-cable-{os.getpid()}"
    ip("netns", "add", name)
    try:
        with open(f"/run/netns/{name}") as namespace:
            ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), OF_NETWORK)
        relay(tun(), 2e6 * megabits / 8, milliseconds / 1e3)
        return subprocess.run(command, env=os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE}).returncode
    finally:
        ip("netns", "del", name)


def tun() -> int:
    """Creates the TUN device and the routing rules that lead packets to the address through it."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, MAKE_TUN, struct.pack("16sH22x", INTERFACE.encode(), TUN_WITHOUT_HEADER))
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{ADDRESS}/32", "dev", INTERFACE)
    ip("link", "set", INTERFACE, "mtu", str(LARGEST), "up")
    for what in ("all/rp_filter", f"{INTERFACE}/rp_filter"):
        write(f"/proc/sys/net/ipv4/conf/{what}", "0")
    write(f"/proc/sys/net/ipv4/conf/{INTERFACE}/accept_local", "1")
    ip("route", "add", ADDRESS, "dev", INTERFACE, "src", ADDRESS, "table", "100")
    ip("rule", "add", "pref", "10", "iif", INTERFACE, "lookup", "local")
    ip("rule", "add", "pref", "20", "to", ADDRESS, "lookup", "100")
    ip("rule", "add", "pref", "30", "lookup", "local")
    ip("rule", "del", "pref", "0")
    return device


def relay(device: int, rate: float, delay: float) -> None:
    """Writes every packet back later, by this rate in bytes per second and this delay in seconds."""
    waiting: SimpleQueue = SimpleQueue()

    def take() -> None:
        free = 0.0  # when the rate limiter has passed the earlier packets
        while True:
            packet = os.read(device, LARGEST + 64)
            now = time.monotonic()
            if free < now + BACKLOG:
                free = max(free, now) + len(packet) / rate
                waiting.put((free + delay, packet))

    def give() -> None:
        while True:
            due, packet = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(device, packet)

    for end in (take, give):
        threading.Thread(target=end, daemon=True).start()


def ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
