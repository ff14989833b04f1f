"""The formats: CBSR and the adjacency matrix."""

import pytest
import torch

from hasten import ConfigurationError
from hasten.graph import CBSR, Adjacency, compress
from hasten.graph.aggregation import cbsr


def test_compress_matrix_restores_largest_values():
    x = torch.tensor([[3.0, -1.0, 2.0], [-5.0, -4.0, -6.0]])
    sparse = compress(x, 2)
    assert sparse.columns.tolist() == [[0, 2], [0, 1]] and sparse.shape == (2, 3)
    assert sparse.to_dense().tolist() == [[3.0, 0.0, 2.0], [-5.0, -4.0, 0.0]]


@pytest.mark.parametrize(("width", "dtype"), [(256, torch.uint8), (257, torch.int16), (40_000, torch.int32)])
def test_columns_take_the_smallest_type(width, dtype):
    x = torch.zeros(2, width)
    x[:, width - 1] = 1
    columns = compress(x, 1).columns
    assert columns.dtype == dtype and columns.flatten().tolist() == [width - 1] * 2


@pytest.mark.parametrize(
    ("values", "columns", "why"),
    [
        (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.uint8), "shape"),
        (torch.zeros(3, 9), torch.zeros(3, 9, dtype=torch.uint8), "at most the width 8"),
        (torch.zeros(3, 2), torch.zeros(3, 2), "expected torch.uint8"),
        (torch.zeros(3, 2), torch.full((3, 2), 99, dtype=torch.uint8), "column 99 is out of range: the matrix has 8"),
        (torch.zeros(1, 2), torch.tensor([[0, 8]], dtype=torch.uint8), "column 8 is out of range"),
        (torch.zeros(2, 2), torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), "columns of row 1 do not ascend"),
        (torch.zeros(2, 2), torch.tensor([[0, 1], [7, 0]], dtype=torch.uint8), "columns of row 1 do not ascend"),
    ],
)
def test_cbsr_of_unequal_parts_is_refused(values, columns, why):
    with pytest.raises(ConfigurationError, match=why):
        CBSR(values, columns, 8)


def test_compress_does_not_check_columns_that_are_right_by_construction(monkeypatch):
    monkeypatch.delattr(cbsr, "out_of_range")
    assert compress(torch.zeros(2, 3), 2).columns.tolist() == [[0, 1]] * 2


def test_from_edge_index_sorts_edges_and_weights():
    edges = torch.tensor([[2, 0, 1, 0, 2], [1, 1, 0, 1, 3]])
    adjacency = Adjacency.from_edge_index(edges, 3, 4, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert adjacency.indptr.tolist() == [0, 1, 4, 4, 5]
    assert adjacency.indices.tolist() == [1, 0, 0, 2, 2]
    assert adjacency.weights is not None and adjacency.weights.tolist() == [3.0, 2.0, 4.0, 1.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_edge_index_without_edges_has_empty_rows(dtype):
    adjacency = Adjacency.from_edge_index(torch.empty(2, 0, dtype=dtype), 3, 2)
    assert adjacency.indptr.tolist() == [0, 0, 0] and adjacency.num_rows == 2


@pytest.mark.parametrize(
    ("indptr", "indices", "why"),
    [
        ([0, 2, 3], [1, 0, 0], "sources of row 0 are not in ascending order"),
        ([0, 1, 1, 3], [1, 2, 1], "sources of row 2 are not in ascending order"),
        ([0, 2, 3], [0, 1, 3], "source 3 of an edge is out of range: there are 3"),
        ([0, 2, 3], [-1, 1, 2], "source -1 of an edge is out of range"),
        ([0, 2, 3], [0.0, 1.0, 2.0], "indices is of type float32; expected integers"),
        ([0, 2], [0, 1, 2], "ends with 2; expected 3"),
        ([0, 3, 2, 3], [0, 1, 2], "indptr decreases"),
        ([1, 3], [0, 1, 2], "start with 0"),
        ([], [0, 1, 2], "start with 0"),
    ],
)
def test_damaged_matrix_is_refused(indptr, indices, why):
    with pytest.raises(ConfigurationError, match=why) as error:
        Adjacency(torch.tensor(indptr, dtype=torch.int64), torch.tensor(indices), 3)
    assert "\n" not in str(error.value)


def test_first_source_of_a_row_may_be_smaller_than_the_row_before():
    assert Adjacency(torch.tensor([0, 0, 2, 2, 3, 3]), torch.tensor([1, 2, 0]), 3).num_rows == 5


@pytest.mark.parametrize(
    ("edges", "why"),
    [
        (torch.rand(2, 3), "float32; expected integers"),
        (torch.zeros(3, 2, dtype=torch.int64), r"shape \(3, 2\); expected \(2, edges\)"),
        (torch.tensor([[0, 3], [0, 0]]), "source 3 of an edge"),
        (torch.tensor([[0, 0], [0, 2]]), "target 2 of an edge"),
    ],
)
def test_damaged_edge_index_is_refused(edges, why):
    with pytest.raises(ConfigurationError, match=why):
        Adjacency.from_edge_index(edges, 3, 2)


@pytest.mark.parametrize("number", [200.0, -1, 2**33, "a", None])
@pytest.mark.parametrize("name", ["num_sources", "num_targets"])
def test_number_of_nodes_that_is_no_32_bit_integer_is_refused(name, number):
    with pytest.raises(ConfigurationError, match=f"{name} must be an integer from 0 to 2147483647; got {number!r}"):
        Adjacency.from_edge_index(torch.tensor([[0], [0]]), **{"num_sources": 3, "num_targets": 3, name: number})


def test_unfit_edge_weights_are_refused():
    edges = torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(ConfigurationError, match="one float per edge"):
        Adjacency.from_edge_index(edges, 2, 2, torch.ones(3))
    with pytest.raises(ConfigurationError, match="detach"):
        Adjacency.from_edge_index(edges, 2, 2, torch.ones(2, requires_grad=True))
