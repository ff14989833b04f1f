"""Checkpoints written in a thread while the training continues.

The thread copies the state to staging buffers and writes them. Weights and optimizer state change in the optimizer step only. On a CPU the
training therefore computes the next gradients meanwhile and waits for the copy before that step, never for the disk. The state on a GPU is
copied before the training continues, since a captured CUDA graph may update it unnoticed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from time import thread_time

import torch

from hasten._torch_compat import in_place_version
from hasten.core.errors import HastenWarning, format_error
from hasten.utils.batch import map_tensors

PLAIN = (torch.Tensor, torch.nn.Parameter)  # other classes may store their values elsewhere


class AsyncCheckpointer:
    """Writes checkpoints one after the other; of two that overlap, the later waits.

    Attributes:
        seconds: CPU seconds of the thread for the latest checkpoint.
    """

    def __init__(self):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.running: Future | None = None
        self.copied = Event()
        self.copied.set()
        self.aside: dict[tuple, torch.Tensor] = {}  # staging buffers; the next checkpoint reuses them
        self.restless = False  # weights were seen to change outside the optimizer step
        self.seconds = 0.0

    def begin(self, state: dict, resting: Iterable[torch.Tensor], write: Callable[[dict], None]) -> None:
        """Begins to copy and write a state.

        Args:
            state: nested dicts and lists of tensors and plain data.
            resting: tensors of the state that change only after a call of ``before_update``.
            write: writes the copied state; called in the thread.

        Raises:
            Failure: the checkpoint before this one could not be written.
        """
        self.finish()
        found: dict[tuple, torch.Tensor] = {}
        map_tensors(lambda tensor: found.setdefault(_address(tensor), tensor.detach()), state)
        self.aside = {key: _room(self.aside.get(key), tensor) for key, tensor in found.items()}
        resting = {_address(tensor) for tensor in resting if tensor.device.type == "cpu" and not self.restless}
        for key in found.keys() - resting:
            self.aside[key].copy_(found[key])
        later = {key: found[key] for key in found.keys() & resting}
        versions = [in_place_version(tensor) for tensor in later.values()]
        copy = map_tensors(lambda tensor: self.aside[_address(tensor)], state)
        self.copied.clear()
        self.running = self.thread.submit(self._save, later, versions, copy, write)

    def before_update(self) -> None:
        """Waits for the copy; called before every optimizer step."""
        if not self.copied.is_set():
            self.copied.wait()

    def finish(self) -> None:
        """Waits until the checkpoint that was begun is on the disk.

        Raises:
            Failure: it could not be written.
        """
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Ends the thread; a checkpoint that could not be written is only a notice, since the run may have failed already."""
        self.thread.shutdown()
        if self.running is not None and (error := self.running.exception()):
            warnings.warn(f"the newest checkpoint is missing: {format_error(error)}", HastenWarning, stacklevel=2)

    def _save(self, later: dict, versions: list[int], copy: dict, write: Callable[[dict], None]) -> None:
        began = thread_time()
        try:
            for key, tensor in later.items():
                self.aside[key].copy_(tensor)
            torn = versions != [in_place_version(tensor) for tensor in later.values()]
            self.restless = self.restless or torn
        finally:
            self.copied.set()
        if not torn:  # else the copy mixes two steps: it is dropped, and later ones are copied at once
            write(copy)
        self.seconds = thread_time() - began


def _address(tensor: torch.Tensor) -> tuple:
    """A key that is equal for tensors that share memory and layout."""
    if type(tensor) not in PLAIN or tensor.layout != torch.strided or not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _room(before: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    usable = (
        before is not None
        and before.layout == torch.strided
        and before.shape == tensor.shape
        and before.dtype == tensor.dtype
    )
    return before if usable else torch.empty_like(tensor, device="cpu")
