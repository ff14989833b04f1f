"""Adds up the time of each phase of a step: clock on the CPU, events on a GPU, no synchronization."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

PHASES = ("input", "copy", "forward", "backward", "grad_transform", "optimizer_step")
BACKWARD_OVER_FORWARD = 2.0  # two matrix products for each of forward: used if a CUDA graph replays both as one


class PhaseTimer:
    """Records the begin and the end of every phase while it runs, and adds them up when it is stopped."""

    def __init__(self, device: torch.device):
        self.device, self.running = device, False
        self.intervals: list[tuple[str, Any, Any]] = []  # (phase, begin, end); end is None inside a graph capture

    def start(self) -> None:
        """Discards earlier records and starts recording."""
        self.intervals, self.running = [], True

    def now(self) -> Any:
        """A timestamp: seconds as float, on a GPU a CUDA event; None while nothing is recorded."""
        if not self.running:
            return None
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():  # what is captured runs later, in a replay
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def record(self, phase: str, began: Any) -> None:
        """Records ``phase`` as lasting from ``began`` (a result of ``now``) until now."""
        if began is not None:
            self.intervals.append((phase, began, self.now()))

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``function`` so that the time of its calls is recorded under ``phase``."""

        def timed(*args: Any) -> Any:
            began = self.now()
            result = function(*args)
            self.record(phase, began)
            return result

        return timed

    def stop(self) -> dict[str, float]:
        """Stops recording, and waits for a GPU. Returns {phase: seconds since ``start``} of all PHASES."""
        self.running = False
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
        seconds: Counter[str] = Counter()
        for phase, began, ended in self.intervals:
            if ended is not None:
                seconds[phase] += began.elapsed_time(ended) / 1000 if on_gpu else ended - began
        return _split_forward_backward(seconds)


def _split_forward_backward(seconds: Counter[str]) -> dict[str, float]:
    """Returns {phase: seconds} of all PHASES. The seconds of "forward_backward" are divided between the two passes: in
    the proportion in which they were timed inside it, else 1 to 2.
    """
    if "forward_backward" not in seconds:  # a loop that calls the passes one by one
        return {name: seconds[name] for name in PHASES}
    both = seconds.pop("forward_backward", 0.0)
    forward, backward = seconds["forward"], seconds["backward"]
    if not forward:
        forward, backward = 1.0, BACKWARD_OVER_FORWARD
    scale = both / (forward + backward)
    return {name: seconds[name] for name in PHASES} | {"forward": forward * scale, "backward": backward * scale}
