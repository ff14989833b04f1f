"""Transport of batches between processes: everything is pickled except tensors, which are passed in shared memory.

The memory is allocated before the worker is forked, reused for every batch, and anonymous: the operating system frees
it however the processes end, and the size limit of ``/dev/shm`` does not apply.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile

import numpy
import torch

from hasten.data.buffer_pool import acquire

ALIGNMENT = 64  # bytes


def serialize(made, slot: SharedBuffer) -> bytes:
    """Serializes ``made``; its tensors are copied into the slot."""
    return _Packer().message(made, slot)


def deserialize(message: bytes, slot: SharedBuffer):
    """Deserializes a message of ``packed``. Its tensors are copied out of the slot, which can then be reused."""
    return _Unpacker(message, slot).load()


class SharedBuffer:
    """Anonymous shared memory that grows on demand."""

    def __init__(self):
        self.file = _anonymous_file()
        self.mapped = numpy.empty(0, numpy.uint8)

    def memory(self, size: int) -> numpy.ndarray:
        """Returns the mapped memory, at least ``size`` bytes, uint8. The writer calls it before the reader."""
        if len(self.mapped) < size:
            if os.fstat(self.file).st_size < size:
                os.ftruncate(self.file, size)
            self.mapped = numpy.frombuffer(mmap.mmap(self.file, os.fstat(self.file).st_size), numpy.uint8)
        return self.mapped

    def close(self) -> None:
        os.close(self.file)
        self.mapped = None


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hasten-data")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Packer(pickle.Pickler):
    """Pickles a strided tensor as its offset in the slot, its shape and its dtype, and everything else as usual."""

    def __init__(self):
        self.buffer, self.tensors, self.size = io.BytesIO(), [], 0
        super().__init__(self.buffer, protocol=5)

    def persistent_id(self, thing):
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided:
            return None
        offset, self.size = self.size, self.size + -(-thing.nbytes // ALIGNMENT) * ALIGNMENT
        self.tensors.append((offset, thing.detach()))
        return offset, tuple(thing.shape), thing.dtype

    def message(self, made, slot: SharedBuffer) -> bytes:
        self.dump(made)
        memory = slot.memory(self.size)
        for offset, tensor in self.tensors:
            _view(memory, offset, tensor.shape, tensor.dtype).copy_(tensor)
        return self.buffer.getvalue()


class _Unpacker(pickle.Unpickler):
    def __init__(self, message: bytes, slot: SharedBuffer):
        super().__init__(io.BytesIO(message))
        self.slot = slot

    def persistent_load(self, location):
        offset, shape, dtype = location
        tensor = acquire(shape, dtype)
        memory = self.slot.memory(offset + tensor.nbytes)
        return tensor.copy_(_view(memory, offset, shape, dtype))


def _view(memory: numpy.ndarray, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.from_numpy(memory[offset : offset + dtype.itemsize * numpy.prod(shape, dtype=int)])
        .view(dtype)
        .view(shape)
    )
