"""Transport of batches between processes: everything is pickled except tensors, which are passed in shared memory.

The memory is allocated before the worker is forked, reused for every batch, and anonymous: the operating system frees
it however the processes end, and the size limit of ``/dev/shm`` does not apply.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from typing import Any

import numpy
import torch

from hasten.data.buffer_pool import acquire

ALIGNMENT = 64  # bytes


def serialize(value: Any, buffer: SharedBuffer) -> bytes:
    """Returns a value in pickled form, without its strided tensors, which are copied into the buffer."""
    pickler = _TensorPickler()
    pickler.dump(value)
    memory = buffer.memory(pickler.size)
    for offset, tensor in pickler.tensors:
        _view(memory, offset, tensor.shape, tensor.dtype).copy_(tensor)
    return pickler.stream.getvalue()


def deserialize(message: bytes, buffer: SharedBuffer) -> Any:
    """Deserializes a message of ``serialize``. Tensors are copied out of the buffer, which can then be reused."""
    return _Unpickler(message, buffer).load()


class SharedBuffer:
    """Anonymous memory shared by a process and its forked children, which grows on demand."""

    def __init__(self):
        self.file = os.memfd_create("hasten-data")
        self.mapped = numpy.empty(0, numpy.uint8)

    def memory(self, size: int) -> numpy.ndarray:
        """Returns at least ``size`` bytes as uint8, growing the buffer. The writer must call it before the reader."""
        if len(self.mapped) < size:
            if os.fstat(self.file).st_size < size:
                os.ftruncate(self.file, size)
            self.mapped = numpy.frombuffer(mmap.mmap(self.file, os.fstat(self.file).st_size), numpy.uint8)
        return self.mapped

    def close(self) -> None:
        os.close(self.file)
        self.mapped = numpy.empty(0, numpy.uint8)


class _TensorPickler(pickle.Pickler):
    """Pickles a strided tensor as its offset in the buffer, its shape and its dtype, and everything else as usual."""

    def __init__(self):
        self.stream, self.tensors, self.size = io.BytesIO(), [], 0
        super().__init__(self.stream, protocol=5)

    def persistent_id(self, obj: Any) -> tuple | None:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return None
        offset = self.size
        self.size += -(-obj.nbytes // ALIGNMENT) * ALIGNMENT
        self.tensors.append((offset, obj.detach()))
        return offset, tuple(obj.shape), obj.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: bytes, buffer: SharedBuffer):
        super().__init__(io.BytesIO(message))
        self.buffer = buffer

    def persistent_load(self, pid: tuple) -> torch.Tensor:
        offset, shape, dtype = pid
        tensor = acquire(shape, dtype)
        memory = self.buffer.memory(offset + tensor.nbytes)
        return tensor.copy_(_view(memory, offset, shape, dtype))


def _view(memory: numpy.ndarray, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize * numpy.prod(shape, dtype=int)
    return torch.from_numpy(memory[offset : offset + size]).view(dtype).view(shape)
