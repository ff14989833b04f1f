"""Which device a run gets: why a GPU cannot be used, and which GPU is that of each rank."""

import pytest

from hasten.core.errors import ConfigurationError, MemoryExhaustedError, RunError
from hasten.engine.devices import assign_gpus, pick_device, why_unusable
from hasten.engine.error_messages import explain_error


@pytest.mark.parametrize(
    ("driver", "built_for", "why"),
    [
        (None, None, None),
        (None, "13.0", None),
        ("580.65.06", None, "the installed PyTorch is a CPU build"),
        ("535.104.05", "13.0", "driver 535.104.05 is too old for the installed PyTorch (CUDA 13.0 needs 580 or newer)"),
        ("535.104.05", "12.6", "(driver 535.104.05), but PyTorch cannot use it"),
        ("", "13.0", "(driver unknown), but PyTorch cannot use it"),
    ],
)
def test_gpu_that_pytorch_cannot_use_is_explained(driver, built_for, why):
    found = why_unusable(driver, built_for)
    assert found is None if why is None else why in found


ALL = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ([("a", ALL)] * 4, [0, 1, 2, 3]),  # torchrun
        ([("a", ["GPU-0"]), ("a", ["GPU-1"])], [0, 0]),  # srun --gpus-per-task=1
        ([("a", ["MIG-0"]), ("a", ["MIG-1"])], [0, 0]),
        ([("a", ["GPU-0"]), ("b", ["GPU-0"])], [0, 0]),  # a pod for each rank
        ([("a", ALL[:2])] * 2 + [("b", ALL[:2])] * 2, [0, 1, 0, 1]),
        ([("a", ALL[:2]), ("b", ALL[:2])] * 2, [0, 0, 1, 1]),  # srun --distribution=cyclic
        ([("a", ALL), ("a", ["GPU-1", "GPU-0"]), ("a", ALL[:3])], [0, 0, 2]),
    ],
)
def test_each_rank_gets_a_gpu_of_its_own(visible, indices):
    assert assign_gpus(visible) == indices


@pytest.mark.parametrize(
    ("visible", "why"),
    [
        ([("a", ["GPU-0"])] * 2, "rank 0 and rank 1 see the same single GPU of a"),
        ([("a", ALL[:2])] * 3, "there are 2 GPUs for 3 processes or more"),
        ([("a", [])] * 2, "there are 0 GPUs for 1 processes or more"),
    ],
)
def test_more_ranks_than_gpus_are_refused(visible, why):
    with pytest.raises(ConfigurationError, match=why):
        assign_gpus(visible)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", MemoryExhaustedError, "Exclusive Process"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", MemoryExhaustedError, "smaller batches"),
        ("CUDA error: no kernel image is available for execution on the device", RunError, "not built for this GPU"),
    ],
)
def test_errors_of_a_gpu_are_explained(text, kind, words):
    """The first two are reasons for two arms to take turns as whole processes."""
    error = explain_error(RuntimeError(text), "step 1", 32)
    assert type(error) is kind and words in str(error)


@pytest.mark.parametrize("name", ["cpu:3", "mps", "gpu", ""])
def test_device_that_is_not_there_is_refused(name):
    with pytest.raises(ConfigurationError, match="use cpu"):
        pick_device(name)
