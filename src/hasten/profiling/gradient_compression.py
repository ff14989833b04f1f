"""Whether saying less to the other processes would pay: rounding or compressing gradients takes time of its own.

Seconds of an all-reduce follow the model that ``hasten network`` fits, latency + bytes / bandwidth.
"""

from __future__ import annotations

import math
from time import perf_counter

import torch

SAVED_BY_ROUNDING = 0.5  # the share of float32's bytes that 16 bits save
READINGS = 3


def net_saving_s(
    size: float, saved_share: float, codec_seconds: float, latency: float, bandwidth: float, exposed_seconds: float
) -> float:
    """Seconds that a step becomes shorter by; below zero: longer.

    Args:
        size: bytes of gradients that a rank gives in a step.
        saved_share: of them, that are not sent any more: 0.5 for 16 bits instead of 32.
        codec_seconds: that making them shorter, and longer again, takes in a step.
        latency: seconds that an exchange takes however short it is; it is not saved.
        bandwidth: bytes of a rank's own that are dealt with in a second.
        exposed_seconds: of a step, in which nothing is done but wait for the exchange. No more than these can be saved.
    """
    if not 0 <= saved_share <= 1 or bandwidth <= 0 or min(size, codec_seconds, latency, exposed_seconds) < 0:
        raise ValueError("a share lies between 0 and 1, a bandwidth above 0, and bytes and seconds are not negative")
    before = latency + size / bandwidth
    after = latency + size * (1 - saved_share) / bandwidth
    hidden = max(before - exposed_seconds, 0.0)  # behind the backward pass, where it stays hidden
    return min(exposed_seconds, before) - max(after - hidden, 0.0) - codec_seconds


def break_even_bandwidth(size: float, saved_share: float, codec_seconds: float) -> float:
    """The bandwidth (bytes/s) below which it pays, where nothing of the exchange is hidden."""
    return math.inf if codec_seconds == 0 else size * saved_share / codec_seconds


def rounding_seconds(size: int, device: torch.device) -> float:
    """What it takes to round so many bytes of float32 to 16 bits, and to widen them again."""
    gradients, taken = torch.zeros(size // 4, device=device), []
    for _ in range(READINGS):
        began = perf_counter()
        gradients.copy_(gradients.to(torch.bfloat16))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(perf_counter() - began)
    return min(taken)


def cast_speedup(talk: dict, codec_seconds: float, step: float) -> tuple[float, str]:
    """(how many times faster a step of so many seconds would be, in words) if gradients were rounded.

    Args:
        talk: what ``communication_of`` told, where everything in it is known.
    """
    saved = net_saving_s(
        talk["bytes"], SAVED_BY_ROUNDING, codec_seconds, 0.0, talk["bytes"] / talk["seconds"], talk["exposed"]
    )
    sent = 1e3 * SAVED_BY_ROUNDING * talk["seconds"]
    given = f"rounding {talk['bytes'] / 1e6:.3g} MB takes {1e3 * codec_seconds:.3g} ms, and half of them take {sent:.3g} ms to send"
    return step / max(
        step - saved, 1e-3 * step
    ), f"{given}: {'at most' if saved > 0 else 'no gain,'} {step / max(step - saved, 1e-3 * step):.2f}x"
