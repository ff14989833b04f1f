"""Whether sending gradients in 16 bits pays: the seconds saved in the exchange against the seconds of the rounding."""

from collections.abc import Mapping

import torch

from hasten.profiling.flops import fastest_call

HALF_PRECISION_SAVING = 0.5  # share of float32's bytes that 16-bit gradients save


def measure_cast_seconds(size: int, device: torch.device) -> float:
    """Seconds of casting ``size`` bytes of float32 to bfloat16 and back."""
    gradients = torch.zeros(size // 4, device=device)
    return fastest_call(lambda: gradients.copy_(gradients.to(torch.bfloat16)), device)


def cast_speedup(cost: Mapping, codec_seconds: float, step: float) -> tuple[float, str]:
    """(speed-up of a step of ``step`` seconds if gradients were exchanged in 16 bits, the reason).

    No more can be saved than is exposed: what is hidden behind the backward pass stays hidden.

    Args:
        cost: result of ``communication_cost``, with every value known.
        codec_seconds: result of ``measure_cast_seconds``.
        step: seconds per step.
    """
    seconds, sent = cost["seconds"], (1 - HALF_PRECISION_SAVING) * cost["seconds"]
    hidden = max(seconds - cost["exposed"], 0.0)
    saved = min(cost["exposed"], seconds) - max(sent - hidden, 0.0) - codec_seconds
    speedup = step / max(step - saved, 1e-3 * step)
    why = (
        f"rounding {cost['bytes'] / 1e6:.3g} MB takes {1e3 * codec_seconds:.3g} ms, and half of them take "
        f"{1e3 * sent:.3g} ms to send: {'at most' if saved > 0 else 'no gain,'} {speedup:.2f}x"
    )
    return speedup, why
