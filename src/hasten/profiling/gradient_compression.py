"""Whether compressing gradients pays: the seconds saved in the exchange against the seconds of the compression.

The seconds of an all-reduce follow the model that ``hasten bench-comm`` fits: latency + bytes / bandwidth.
"""

import math
from collections.abc import Mapping
from time import perf_counter

import torch

from hasten.engine.devices import synchronize

HALF_PRECISION_SAVING = 0.5  # share of float32's bytes that 16-bit gradients save
MEASUREMENTS = 3


def net_saving_s(
    size: float, saved_share: float, codec_seconds: float, latency: float, bandwidth: float, exposed_seconds: float
) -> float:
    """Seconds per step that compressing gradients saves; negative if it costs more than it saves.

    Args:
        size: bytes of gradients that a rank contributes in a step.
        saved_share: share of them, from 0 to 1, that is no longer sent: 0.5 for 16 bits instead of 32.
        codec_seconds: seconds of compressing and decompressing in a step.
        latency: seconds of an exchange that do not depend on its size, and are not saved.
        bandwidth: bytes of a rank's gradients that are exchanged in a second.
        exposed_seconds: seconds of a step that are spent waiting for the exchange. No more than these can be saved.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 <= saved_share <= 1 or bandwidth <= 0 or min(size, codec_seconds, latency, exposed_seconds) < 0:
        raise ValueError(
            "saved_share must lie between 0 and 1, bandwidth be above 0, and sizes and seconds not be negative"
        )
    before = latency + size / bandwidth
    after = latency + size * (1 - saved_share) / bandwidth
    hidden = max(before - exposed_seconds, 0.0)  # behind the backward pass, where it stays hidden
    return min(exposed_seconds, before) - max(after - hidden, 0.0) - codec_seconds


def break_even_bandwidth(size: float, saved_share: float, codec_seconds: float) -> float:
    """The bandwidth (bytes/s) below which compression pays if nothing of the exchange is hidden."""
    return math.inf if codec_seconds == 0 else size * saved_share / codec_seconds


def measure_cast_seconds(size: int, device: torch.device) -> float:
    """Seconds of casting ``size`` bytes of float32 to bfloat16 and back."""
    gradients, seconds = torch.zeros(size // 4, device=device), []
    for _ in range(MEASUREMENTS):
        began = perf_counter()
        gradients.copy_(gradients.to(torch.bfloat16))
        synchronize(device)
        seconds.append(perf_counter() - began)
    return min(seconds)


def cast_speedup(cost: Mapping, codec_seconds: float, step: float) -> tuple[float, str]:
    """(speed-up of a step of ``step`` seconds if gradients were exchanged in 16 bits, the reason).

    Args:
        cost: result of ``communication_cost``, with every value known.
        codec_seconds: result of ``measure_cast_seconds``.
        step: seconds per step.
    """
    bandwidth = cost["bytes"] / cost["seconds"]
    saved = net_saving_s(cost["bytes"], HALF_PRECISION_SAVING, codec_seconds, 0.0, bandwidth, cost["exposed"])
    speedup = step / max(step - saved, 1e-3 * step)
    sent = 1e3 * HALF_PRECISION_SAVING * cost["seconds"]
    why = (
        f"rounding {cost['bytes'] / 1e6:.3g} MB takes {1e3 * codec_seconds:.3g} ms, and half of them take {sent:.3g} "
        f"ms to send: {'at most' if saved > 0 else 'no gain,'} {speedup:.2f}x"
    )
    return speedup, why
