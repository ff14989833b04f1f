"""Features in memory and in a file."""

import numpy
import pytest
import torch

from hasten import ConfigurationError
from hasten.graph.features import InMemoryFeatures, MemoryMappedFeatures

MATRIX = torch.arange(24, dtype=torch.float32).reshape(8, 3)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "features.npy"
    numpy.save(path, MATRIX.numpy())
    return path


@pytest.fixture(params=["memory", "file"])
def features(request, saved):
    return InMemoryFeatures(MATRIX, 8) if request.param == "memory" else MemoryMappedFeatures(saved, 8)


def test_rows_any_order_and_duplicates_are_those_of_the_matrix(features):
    ids = torch.tensor([5, 0, 5, 7])
    assert torch.equal(features.rows(ids), MATRIX[ids])
    assert (len(features), features.width, features.dtype) == (8, 3, torch.float32)


def test_rows_no_ids_have_the_width_of_the_matrix(features):
    assert features.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 3)


def test_rows_changed_by_the_caller_leave_the_source_alone(features):
    ids = torch.tensor([1])
    features.rows(ids).zero_()
    assert torch.equal(features.rows(ids), MATRIX[ids])


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.tensor([0, 8]), r"node ids must be in \[0, 8\); got 8"),
        (torch.tensor([-1, 0]), r"node ids must be in \[0, 8\); got -1"),
        (torch.tensor([0.0]), "node ids must be int64 of one dimension; got torch.float32"),
        (torch.tensor([[0]]), r"node ids must be int64 of one dimension; .* shape \(1, 1\)"),
    ],
)
def test_rows_wrong_ids_are_refused(features, ids, text):
    with pytest.raises(ConfigurationError, match=text):
        features.rows(ids)


def test_features_with_another_number_of_rows_than_nodes_are_refused(saved):
    with pytest.raises(ConfigurationError, match="8 rows, but there are 9 nodes"):
        InMemoryFeatures(MATRIX, 9)
    with pytest.raises(ConfigurationError, match="8 rows, but there are 9 nodes"):
        MemoryMappedFeatures(saved, 9)


def test_memory_mapped_features_part_of_the_file_counts_from_its_first_row(saved):
    part = MemoryMappedFeatures(saved, 3, first=2, end=5)
    assert torch.equal(part.rows(torch.tensor([0, 2])), MATRIX[[2, 4]])
    with pytest.raises(ConfigurationError, match="got first=2, end=9"):
        MemoryMappedFeatures(saved, first=2, end=9)


def test_memory_mapped_features_file_with_python_objects_is_refused(tmp_path):
    path = tmp_path / "objects.npy"
    numpy.save(path, numpy.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigurationError, match=r"not a readable .npy file"):
        MemoryMappedFeatures(path)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (numpy.zeros(3), "two dimensions"),
        (numpy.array(3.0), "two dimensions"),
        (numpy.array([["a"]]), "elements of type <U1, which PyTorch does not know"),
        (numpy.zeros((2, 2), ">f4"), "elements of type >f4, which PyTorch does not know"),
    ],
)
def test_memory_mapped_features_other_arrays_are_refused(tmp_path, array, text):
    path = tmp_path / "other.npy"
    numpy.save(path, array)
    with pytest.raises(ConfigurationError, match=text):
        MemoryMappedFeatures(path)


@pytest.mark.parametrize("keep", [0, 20, -1])
def test_memory_mapped_features_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ConfigurationError, match=r"not a readable .npy file"):
        MemoryMappedFeatures(saved)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy.load leaves the file open
@pytest.mark.parametrize("content", [b"\x93NUMPY\x01\x00v\x00{'descr': (" + b" " * 200, b"PK\x03\x04 no archive"])
def test_memory_mapped_features_damaged_header_is_refused(saved, content):
    saved.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"not a readable .npy file"):
        MemoryMappedFeatures(saved)


def test_memory_mapped_features_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"not a readable .npy file: FileNotFoundError"):
        MemoryMappedFeatures(tmp_path / "missing.npy")
