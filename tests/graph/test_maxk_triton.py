"""The Triton kernels against the dense formulas, in Triton's interpreter, which needs no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

PROGRAM = """
import torch
from hasten.graph import Adjacency, compress
from hasten.graph.aggregation.triton_kernels import product, sampled_product

generator = torch.Generator().manual_seed(0)
edges = torch.stack([torch.randint(bound, (60,), generator=generator) for bound in (9, 6)])  # row 6 is isolated
weights = torch.rand(60, generator=generator, dtype=torch.float64)

def check(width, k, weighted, mean):
    adjacency = Adjacency.from_edge_index(edges, 9, 7, weights if weighted else None)
    dense = torch.zeros(7, 9, dtype=torch.float64)
    dense.index_put_((edges[1], edges[0]), weights if weighted else torch.ones_like(weights), accumulate=True)
    if mean:
        dense /= torch.bincount(edges[1], minlength=7).clamp(min=1)[:, None]
    sparse = compress(torch.randn(9, width, generator=generator, dtype=torch.float64), k)
    gradient = torch.randn(7, width, generator=generator, dtype=torch.float64)
    out = product(sparse.values, sparse.columns, adjacency, width, mean)
    torch.testing.assert_close(out, dense @ sparse.to_dense(), rtol=1e-12, atol=1e-12)
    sampled = sampled_product(gradient, sparse.columns, adjacency, mean)
    torch.testing.assert_close(sampled, (dense.T @ gradient).gather(1, sparse.columns.long()), rtol=1e-12, atol=1e-12)

for width, k in ((64, 7), (256, 32), (300, 33)):
    for weighted, mean in ((False, False), (True, False), (False, True)):
        check(width, k, weighted, mean)
print("all equal")
"""


@needs_triton
@pytest.mark.slow  # a process of its own: Triton reads TRITON_INTERPRET once, when it is imported
def test_triton_kernels_equal_the_dense_product():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.stdout == "all equal\n", result.stderr
