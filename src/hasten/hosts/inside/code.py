"""What the script's own code costs: tensors that it reads on the host, and the lines that it spends its time in.

Only while a diagnosis asks for it. A value that the host reads (``loss.item()``, ``print(loss)``) makes the CPU wait
for the GPU; the time in each such call is measured. The lines come from samples of the stack of the training thread.
"""

import functools
import inspect
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from hasten.hosts.inside.sites import HIDDEN, frames_from, module_of

INTERVAL_S = 0.005  # between two samples of the stack
# For which the training thread keeps the interpreter once the sampler waits for it. By default 5 ms: a function of pure
# Python that takes less would never be seen, and each sample be of the call into torch that comes after it.
SWITCH_INTERVAL_S = 1e-4
READS = {  # attribute of torch.Tensor -> how a script writes the call
    "item": ".item()",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "__bool__": "bool(tensor)",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__repr__": "print(tensor)",
    "__format__": "print(tensor)",
}
COPIES = ("to", "cuda", "copy_")  # between host and GPU: from pageable memory they wait for what is queued before
PLACES = (torch.Tensor, torch.device, str, int)  # what such a copy may be given as its target
LOADERS = f"{__package__}.loaders"  # on the stack while the script waits for a batch
CALLS_OF_ROOTS, BACKWARD = f"{__package__}.models", f"{__package__}.steps"  # on the stack in a forward, a backward pass
LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], "<frozen ")


class CodeObserver:
    """Watches the thread that made it, from ``__init__`` to ``stop``, outside of evaluations; patches torch meanwhile.

    ``line`` returns ``file:line`` of the innermost frame of the user, and takes a frame.
    """

    def __init__(self, line: Callable[[FrameType | None], str | None], is_evaluating: Callable[[], bool]):
        self.line, self.is_evaluating = line, is_evaluating
        self.reads = Counter[tuple[str, str]]()  # by (site, call)
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.lines = Counter[tuple[str, str, str]]()  # samples by (phase, function, site)
        self.loops = set[str]()  # functions that call the backward pass or the optimizer
        self.samples, self.is_reading, self.waits_for_gpu = 0, False, False
        from unittest.mock import patch  # with asyncio, which most scripts do not need

        self.patches, tensor = ExitStack(), torch.Tensor
        synchronize = self._timed(torch.cuda.synchronize, "torch.cuda.synchronize()")
        replacements = [(torch.cuda, "synchronize", synchronize)]
        replacements += [(tensor, name, self._timed(getattr(tensor, name), call)) for name, call in READS.items()]
        replacements += [(tensor, name, self._noted_copy(getattr(tensor, name))) for name in COPIES]
        for owner, name, replacement in replacements:
            self.patches.enter_context(patch.object(owner, name, replacement))
        self.thread, self.stopped = threading.get_ident(), threading.Event()
        self.switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threading.Thread(target=self._sample, name="hasten-sampler", daemon=True).start()

    def stop(self, steps: int) -> dict[str, Any]:
        """``synchronizations`` and ``functions`` of the ``steps`` that were watched, as ``DiagnoseResult`` has them."""
        self.stopped.set()
        sys.setswitchinterval(self.switch_interval)
        self.patches.close()
        synchronizations, functions = list[dict[str, Any]](), list[dict[str, Any]]()
        for (site, call), count in self.reads.items():
            seconds = self.seconds[site, call] / steps
            read = {"site": site, "call": call, "per_step": count / steps, "seconds_per_step": seconds}
            synchronizations.append(read)
        totals, sites = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
        for (phase, function, site), count in self.lines.most_common():
            totals[phase, function] += count
            sites.setdefault((phase, function), site)  # the line with the most samples
        for (phase, function), count in totals.most_common():
            site, phase = sites[phase, function], "loop" if function in self.loops else phase
            functions.append({"function": function, "site": site, "phase": phase, "share": count / self.samples})
        return {"synchronizations": synchronizations, "functions": functions}

    def _timed(self, original: Callable[..., Any], call: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            if self.is_reading or threading.get_ident() != self.thread or self.is_evaluating() or _is_on_cpu(args):
                return original(*args, **kwargs)
            self.is_reading, self.waits_for_gpu, began = True, torch.cuda.is_initialized(), time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds, self.is_reading, self.waits_for_gpu = time.perf_counter() - began, False, False
                site = self._site_of_read(inspect.currentframe())
                if site is not None:
                    self.reads[site, call] += 1
                    self.seconds[site, call] += seconds

        return read

    def _noted_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``to`` the host is a read; during a copy to the GPU the script's code does nothing but wait."""
        read = self._timed(original, ".to('cpu')")

        @functools.wraps(original)
        def copy(*args: Any, **kwargs: Any) -> Any:
            source, target = _places(original.__name__, *args, **kwargs) if torch.cuda.is_initialized() else ("", "")
            if source == target or threading.get_ident() != self.thread:
                return original(*args, **kwargs)
            if target == "cpu" and original.__name__ == "to":
                return read(*args, **kwargs)
            self.waits_for_gpu = True
            try:
                return original(*args, **kwargs)
            finally:
                self.waits_for_gpu = False

        return copy

    def _site_of_read(self, frame: FrameType | None) -> str | None:
        """The line that has called the function of a frame, which reads a value.

        None for hasten's own reads, and in an optimizer or a loader: what these read is on the host anyway.
        """
        frame = frame and frame.f_back
        names = [module_of(one) for one in frames_from(frame)]
        ours = bool(names) and names[0].startswith("hasten.")
        on_host = any(name.startswith(("torch.optim", "torch.utils.data", LOADERS)) for name in names)
        return None if ours or on_host else self.line(frame)

    def _sample(self) -> None:
        while not self.stopped.wait(INTERVAL_S):
            frame = sys._current_frames().get(self.thread)
            if frame is not None and not self.is_evaluating():
                self._note(frame)

    def _note(self, frame: FrameType) -> None:
        """Counts a sample of the stack by the innermost function of the user.

        One in the forward pass, the backward pass, an update, or a wait for the GPU counts in the total only.
        """
        self.samples += 1
        if self.waits_for_gpu:
            return
        frames = list(frames_from(frame))
        names = [module_of(one) for one in frames]
        users = (one for name, one in zip(names, frames, strict=True) if _is_users(name, one.f_code.co_filename))
        user = next(users, None)
        if user is None or CALLS_OF_ROOTS in names:
            return
        if any(name.startswith(("torch.optim", BACKWARD)) for name in names):
            self.loops.add(user.f_code.co_qualname)
        elif site := self.line(user):
            self.lines["input" if LOADERS in names else "logging", user.f_code.co_qualname, site] += 1


def _is_on_cpu(args: tuple[Any, ...]) -> bool:
    """Whether the tensor that is read lies on the CPU of a script that uses a GPU: such a read does not wait."""
    tensor = args[0] if args else None
    return isinstance(tensor, torch.Tensor) and not tensor.is_cuda and torch.cuda.is_initialized()


def _places(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Device types of source and target of ``Tensor.to``, ``cuda`` or ``copy_``, called with these arguments."""
    first = next((one for one in (*args, *kwargs.values()) if isinstance(one, PLACES)), None)
    given = first.device.type if isinstance(first, torch.Tensor) else None
    if name == "copy_":
        return given or tensor.device.type, tensor.device.type
    if name == "cuda" or (isinstance(first, int) and not isinstance(first, bool)):
        return tensor.device.type, "cuda"
    if isinstance(first, (str, torch.device)):
        given = torch.device(first).type
    return tensor.device.type, given or tensor.device.type


@functools.cache
def _is_users(module: str, file: str) -> bool:
    """Whether a module is neither of the standard library, nor of an installed package, nor hasten's."""
    is_hidden = module.partition(".")[0] in {*HIDDEN, "hasten"}
    return not is_hidden and "-packages/" not in file and not file.startswith(LIBRARIES)
