"""Batches as they travel between our own processes: pickled, but for their tensors, which are left in shared memory.

The memory is made before the worker is forked, used again for batch after batch, and has no name: the system takes it back
however the processes end, and no limit of ``/dev/shm`` is in its way.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile

import numpy
import torch

from hasten.data.memory import taken

LINE = 64  # bytes; where tensors begin


def packed(made, slot: Slot) -> bytes:
    """``made`` as a message; its tensors are in the slot."""
    return _Packer().message(made, slot)


def unpacked(message: bytes, slot: Slot):
    """What our own worker has packed. Its tensors are copied out of the slot, which is then free."""
    return _Unpacker(message, slot).load()


class Slot:
    """Shared memory without a name, that grows."""

    def __init__(self):
        self.file = _nameless_file()
        self.mapped = numpy.empty(0, numpy.uint8)

    def memory(self, size: int) -> numpy.ndarray:
        """At least ``size`` bytes of it; called by the writer first."""
        if len(self.mapped) < size:
            if os.fstat(self.file).st_size < size:
                os.ftruncate(self.file, size)
            self.mapped = numpy.frombuffer(mmap.mmap(self.file, os.fstat(self.file).st_size), numpy.uint8)
        return self.mapped

    def close(self) -> None:
        os.close(self.file)
        self.mapped = None


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hasten-data")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Packer(pickle.Pickler):
    """Pickles anything; of a tensor only where in the slot it is."""

    def __init__(self):
        self.buffer, self.tensors, self.size = io.BytesIO(), [], 0
        super().__init__(self.buffer, protocol=5)

    def persistent_id(self, thing):
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided:
            return None
        begin, self.size = self.size, self.size + -(-thing.nbytes // LINE) * LINE
        self.tensors.append((begin, thing.detach()))
        return begin, tuple(thing.shape), thing.dtype

    def message(self, made, slot: Slot) -> bytes:
        self.dump(made)
        memory = slot.memory(self.size)
        for begin, tensor in self.tensors:
            _view(memory, begin, tensor.shape, tensor.dtype).copy_(tensor)
        return self.buffer.getvalue()


class _Unpacker(pickle.Unpickler):
    def __init__(self, message: bytes, slot: Slot):
        super().__init__(io.BytesIO(message))
        self.slot = slot

    def persistent_load(self, place):
        begin, shape, dtype = place
        tensor = taken(shape, dtype)
        memory = self.slot.memory(begin + tensor.nbytes)
        return tensor.copy_(_view(memory, begin, shape, dtype))


def _view(memory: numpy.ndarray, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(memory[begin : begin + dtype.itemsize * numpy.prod(shape, dtype=int)]).view(dtype).view(shape)
