"""Batches split into microbatches."""

import pytest
import torch

from hasten.utils.batch import chunk_batch


@pytest.mark.parametrize(
    ("samples", "count", "sizes"), [(7, 3, [2, 2, 3]), (3, 10**12, [1, 1, 1]), (4, 1, [4]), (0, 2, [])]
)
def test_chunk_batch_gives_nearly_equal_nonempty_chunks(samples, count, sizes):
    batch = {"x": torch.arange(samples), "scale": torch.tensor(2.0)}
    cut = chunk_batch(batch, count)
    assert [len(piece["x"]) for piece in cut] == sizes
    assert all(piece["scale"] is batch["scale"] for piece in cut)
    assert torch.equal(torch.cat([torch.arange(0), *(piece["x"] for piece in cut)]), batch["x"])
