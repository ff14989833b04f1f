"""Checkpoints written in a thread while the training continues.

The thread copies the state to staging buffers and writes them. Weights and optimizer state change in the optimizer
step only. The training therefore computes the next gradients meanwhile and waits for the copy before that step, never
for the disk. From a GPU the thread copies to page-locked memory on a stream of its own. What may change at any time,
such as the statistics of a batch norm in a captured CUDA graph, is copied at once, in the order of the GPU's work.
"""

import warnings
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event
from time import thread_time
from typing import Any

import torch

from hasten._torch_compat import in_place_version
from hasten.core.errors import HastenWarning, format_error
from hasten.utils.batch import map_tensors

Key = tuple[Any, ...]  # equal for tensors that share memory and layout
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # other classes may store their values elsewhere


class AsyncCheckpointer:
    """Writes checkpoints in a thread, one after the other: ``begin`` waits for the previous one."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None
        self.copied = Event()
        self.copied.set()
        self.staging: dict[Key, torch.Tensor] = {}  # buffers that the next checkpoint reuses
        self.copy_synchronously = False  # the weights changed outside the optimizer step
        self.seconds = 0.0  # CPU seconds of the thread for the latest checkpoint

    def begin(
        self, state: dict[str, Any], update_only: Iterable[torch.Tensor], write: Callable[[dict[str, Any]], None]
    ) -> None:
        """Copies ``state`` (nested tensors and plain data) to the host and calls ``write(copy)`` in the thread.

        The thread copies the tensors in ``update_only``, which change only after ``before_update``; all others are
        copied by this call. RunError if the previous checkpoint could not be written.
        """
        self.finish()
        found: dict[Key, torch.Tensor] = {}
        map_tensors(lambda tensor: found.setdefault(_address(tensor), tensor.detach()), state)
        self.staging = {key: _staging_buffer(self.staging.get(key), tensor) for key, tensor in found.items()}
        unchanged = set[Key]() if self.copy_synchronously else set(map(_address, update_only))
        copied_later = found.keys() & unchanged
        for key in found.keys() - copied_later:
            self.staging[key].copy_(found[key], non_blocking=True)
        streams = _side_streams(found.values())
        later = {key: found[key] for key in copied_later}
        versions = [in_place_version(tensor) for tensor in later.values()]
        copy = map_tensors(lambda tensor: self.staging[_address(tensor)], state)
        self.copied.clear()
        self.pending = self.thread.submit(self._save, later, versions, streams, copy, write)

    def before_update(self) -> None:
        """Waits until the thread has copied the tensors in ``update_only``; called before every optimizer step."""
        if not self.copied.is_set():
            self.copied.wait()

    def finish(self) -> None:
        """Waits until the checkpoint that was begun is on the disk; raises RunError if it could not be written."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the thread and ends it; warns, since the run may have failed, if its checkpoint was not written."""
        self.thread.shutdown()
        if self.pending is not None and (error := self.pending.exception()):
            warnings.warn(f"the newest checkpoint is missing: {format_error(error)}", HastenWarning, stacklevel=2)

    def _save(
        self,
        later: dict[Key, torch.Tensor],
        versions: list[int],
        streams: dict[torch.device, torch.cuda.Stream],
        copy: dict[str, Any],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        began = thread_time()
        try:
            for key, tensor in later.items():
                with _on_stream(streams, tensor):
                    self.staging[key].copy_(tensor, non_blocking=True)
            for stream in streams.values():
                stream.synchronize()
            torn = versions != [in_place_version(tensor) for tensor in later.values()]
            self.copy_synchronously = self.copy_synchronously or torn
        finally:
            self.copied.set()
        if not torn:  # a torn copy mixes two steps: it is dropped, and later copies are synchronous
            write(copy)
        self.seconds = thread_time() - began


def _address(tensor: torch.Tensor) -> Key:
    """A key that is equal for tensors that share memory and layout."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided or not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _staging_buffer(previous: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """``previous`` if it has the shape and dtype of ``tensor``, else a new buffer in host memory."""
    wanted = torch.strided, tensor.shape, tensor.dtype
    if previous is not None and (previous.layout, previous.shape, previous.dtype) == wanted:
        return previous
    with suppress(RuntimeError):  # the system may allow less page-locked memory than the state takes
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda and tensor.layout == torch.strided)
    return torch.empty_like(tensor, device="cpu")


@contextmanager
def _on_stream(streams: dict[torch.device, torch.cuda.Stream], tensor: torch.Tensor) -> Generator[None]:
    """Context manager: copies of ``tensor`` are queued on the one of ``streams`` for its GPU; without effect on a CPU.

    Its GPU is made the current one as well: to leave a stream, torch returns to the current one, in a new thread the
    first, and would create a context with hundreds of MB there.
    """
    if not tensor.is_cuda:
        yield
        return
    with torch.cuda.device(tensor.device), torch.cuda.stream(streams[tensor.device]):
        yield


def _side_streams(tensors: Iterable[torch.Tensor]) -> dict[torch.device, torch.cuda.Stream]:
    """A new stream on every GPU that holds one of the tensors; it waits for all work that is queued there."""
    streams = {device: torch.cuda.Stream(device) for device in {tensor.device for tensor in tensors if tensor.is_cuda}}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))
    return streams
