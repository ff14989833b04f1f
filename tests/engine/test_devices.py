"""Which device a run gets: why a GPU cannot be used, and which GPU is that of each rank."""

import pytest
import torch

from hasten.core.errors import ConfigurationError
from hasten.engine.devices import assign_gpus, why_unusable


@pytest.mark.parametrize(
    ("files", "visible", "built_for", "why"),
    [
        (["nvidiactl"], None, None, None),
        (["nvidia0"], "", "13.0", None),
        (["nvidia0"], None, None, "the installed PyTorch is a CPU build"),
        (["nvidia0"], "0", "13.0", "but PyTorch cannot use it; is its driver too old for CUDA 13.0?"),
    ],
)
def test_gpu_that_pytorch_cannot_use_is_explained(tmp_path, monkeypatch, files, visible, built_for, why):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    found = why_unusable(tmp_path)
    assert found is None if why is None else why in found


ALL = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@pytest.mark.parametrize(
    ("visible", "local_ranks", "indices"),
    [
        ([("a", ALL)] * 4, [0, 1, 2, 3], [0, 1, 2, 3]),  # torchrun
        ([("a", ["GPU-0"]), ("a", ["GPU-1"])], [0, 1], [0, 0]),  # srun --gpus-per-task=1
        ([("a", ["MIG-0"]), ("a", ["MIG-1"])], [0, 1], [0, 0]),
        ([("a", ["GPU-0"]), ("b", ["GPU-0"])], [0, 0], [0, 0]),  # a pod for each rank
        ([("a", ALL[:2])] * 2 + [("b", ALL[:2])] * 2, [0, 1, 0, 1], [0, 1, 0, 1]),
    ],
)
def test_each_rank_gets_a_gpu_of_its_own(visible, local_ranks, indices):
    assert assign_gpus(visible, local_ranks) == indices


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
        assign_gpus(visible, range(len(visible)))
