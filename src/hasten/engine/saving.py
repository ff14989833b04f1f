"""Checkpoints written while the training goes on.

A thread copies the state aside and writes the copy. Weights and the optimizer's state change in the update only, so on a CPU the training computes
the next gradients meanwhile, and before that update waits for the copy, never for the disk. A GPU's are copied before it goes on: a captured graph
updates where nobody sees it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from time import thread_time

import torch

from hasten._torch_compat import in_place_version
from hasten.contract.batch import map_tensors
from hasten.contract.errors import Notice, one_line

PLAIN = (torch.Tensor, torch.nn.Parameter)  # others may have their numbers elsewhere


class Saving:
    """One checkpoint after the other; of two that overlap, the later waits.

    Attributes:
        seconds: of a processor's time that the latest took.
    """

    def __init__(self):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.running: Future | None = None
        self.copied = Event()
        self.copied.set()
        self.aside: dict[tuple, torch.Tensor] = {}  # the latest copy, whose memory the next one uses again
        self.restless = False  # weights were seen to change elsewhere than in the update
        self.seconds = 0.0

    def begin(self, state: dict, resting: Iterable[torch.Tensor], write: Callable[[dict], None]) -> None:
        """Copies a state and writes the copy.

        Args:
            resting: tensors of the state that do not change before ``before_update`` is called.

        Raises:
            Failure: the save before this one could not be written.
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
        """The training is about to change its weights."""
        if not self.copied.is_set():
            self.copied.wait()

    def finish(self) -> None:
        """Waits until what was begun is on the disk.

        Raises:
            Failure: it could not be written.
        """
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits, too; of a run that failed, what could not be written is worth a notice only."""
        self.thread.shutdown()
        if self.running is not None and (error := self.running.exception()):
            warnings.warn(f"the newest checkpoint is missing: {one_line(error)}", Notice, stacklevel=2)

    def _save(self, later: dict, versions: list[int], copy: dict, write: Callable[[dict], None]) -> None:
        began = thread_time()
        try:
            for key, tensor in later.items():
                self.aside[key].copy_(tensor)
            torn = versions != [in_place_version(tensor) for tensor in later.values()]
            self.restless = self.restless or torn
        finally:
            self.copied.set()
        if not torn:  # else the next ones are copied at once, and this one is of no single moment
            write(copy)
        self.seconds = thread_time() - began


def _address(tensor: torch.Tensor) -> tuple:
    """The same for tensors that are one in memory."""
    if type(tensor) not in PLAIN or tensor.layout != torch.strided or not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _room(before: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    usable = before is not None and before.layout == torch.strided and before.shape == tensor.shape and before.dtype == tensor.dtype
    return before if usable else torch.empty_like(tensor, device="cpu")
