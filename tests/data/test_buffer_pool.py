"""The buffer pool reuses memory as soon as it is unreferenced, and never before."""

import gc
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hasten.data import arrays
from hasten.data.buffer_pool import (
    ALIGNMENT,
    MAX_BLOCKS_PER_SIZE,
    MAX_FREE_BYTES,
    MAX_SIZES,
    _free,
    acquire,
    thread_scratch,
)


@pytest.fixture(autouse=True)
def from_scratch():
    gc.collect()
    _free.clear()


def test_pool_reuses_memory_after_the_last_reference():
    tensor = acquire((1000, 100), torch.float32)
    place, view = tensor.data_ptr(), tensor[10:20].view(-1)
    del tensor
    assert acquire((1000, 100), torch.float32).data_ptr() != place, "a view still holds it"
    del view
    assert place in [acquire((1000, 100), torch.float32).data_ptr() for _ in range(2)]


def test_pool_keeps_memory_of_referenced_batches():
    def held_by(use):
        tensor = acquire((64, 100), torch.float32).fill_(1.0)
        return tensor.data_ptr(), use(tensor)

    weights = torch.ones(100, requires_grad=True)
    for use in (
        torch.Tensor.numpy,
        lambda t: (t * weights).sum(),
        lambda t: t.untyped_storage(),
        lambda t: torch.utils.dlpack.to_dlpack(t),
    ):
        place, holder = held_by(use)
        others = [acquire((64, 100), torch.float32) for _ in range(MAX_BLOCKS_PER_SIZE + 1)]
        assert place not in [other.data_ptr() for other in others], use
        del holder, others


def test_pool_holds_few_unused_buffers():
    held = [acquire((10_000,), torch.float32) for _ in range(3 * MAX_BLOCKS_PER_SIZE)]
    del held
    for size in range(2 * MAX_SIZES):
        acquire((4096 << (size % 12),) if size < 12 else (50_000 + 10_000 * size,), torch.uint8)
    assert len(_free) <= MAX_SIZES and all(len(blocks) <= MAX_BLOCKS_PER_SIZE for blocks in _free.values())


def test_pool_limits_unused_bytes_and_keeps_the_last_size():
    def use(*sizes):
        held = [acquire((size,), torch.uint8) for size in sizes]  # never written to, so that they cost nothing
        return len(held)

    small, quarter = MAX_FREE_BYTES // 64, MAX_FREE_BYTES // 4
    for sizes in (
        [small],
        [quarter] * 3,
        [small],
        [2 * quarter],
        [quarter] * MAX_BLOCKS_PER_SIZE,
        [2 * MAX_FREE_BYTES],
    ):
        use(*sizes)
        assert sum(size * len(blocks) for size, blocks in _free.items()) <= MAX_FREE_BYTES
        if sizes == [2 * quarter]:
            assert len(_free[small]) == 1 and len(_free[quarter]) == 1


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 5), (7, 11, 13), (4096,), (4097,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.uint16])
def test_pool_accepts_any_shape_and_dtype(shape, dtype):
    tensor = acquire(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()


def test_pool_epoch_allocates_no_new_memory():
    pipeline = arrays(torch.zeros(64, 100_000)).batch(8)
    list(pipeline)  # more at once than a loop ever holds
    tracemalloc.start()
    for batch in pipeline:
        assert batch.shape == (8, 100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < batch.nbytes / 2


def test_thread_scratch_is_per_thread_and_name():
    first = thread_scratch("a", (100, 10), torch.float32)
    assert (
        thread_scratch("a", (50, 20), torch.int32).data_ptr()
        == first.data_ptr()
        != thread_scratch("b", (100, 10), torch.float32).data_ptr()
    )
    with ThreadPoolExecutor(1) as other:
        assert (
            other.submit(lambda: thread_scratch("a", (100, 10), torch.float32).data_ptr()).result() != first.data_ptr()
        )
    assert thread_scratch("a", (1000, 1000), torch.uint8).shape == (1000, 1000)


def test_thread_scratch_made_in_inference_mode_is_usable_outside():
    with torch.inference_mode():
        thread_scratch("c", (8,), torch.int64).zero_()
    assert thread_scratch("c", (8,), torch.int64).add_(1).tolist() == [1] * 8


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 8, 100_000, 10_000_000])
def test_pool_memory_is_aligned_as_that_of_torch(size):
    """So that a batch gives the same bits in new and in reused memory."""
    held = [acquire((size,), torch.uint8) for _ in range(5)]
    assert [tensor.data_ptr() % ALIGNMENT for tensor in held] == [0] * 5
