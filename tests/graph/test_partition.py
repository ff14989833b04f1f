"""Partitions of graphs, and their files."""

import json
import sys

import pytest
import torch

from hasten import ConfigurationError
from hasten.graph.partitions.partition import (
    DESCRIPTION,
    IDS,
    edge_cut,
    load_partition,
    partition_graph,
    relabel_graph,
    save_partition,
    take_part,
)
from helpers.partitioned_graphs import random_graph

GRAPH = random_graph()
PARTS = 4
ALGORITHMS = pytest.mark.parametrize("algorithm", ["metis", "ranges"])


def edges(indptr, indices) -> set[tuple[int, int, int]]:
    """(source, target, number among equal edges)."""
    targets = torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff())
    pairs = list(zip(indices.tolist(), targets.tolist(), strict=True))
    return {(*pair, pairs[:i].count(pair)) for i, pair in enumerate(pairs)}


@ALGORITHMS
def test_partition_graph_every_node_belongs_to_one_part_of_nearly_equal_size(algorithm):
    partition = partition_graph(*GRAPH, PARTS, algorithm)
    assert partition.old_ids.sort().values.equal(torch.arange(partition.num_nodes))
    sizes = partition.offsets.diff()
    assert sizes.sum() == partition.num_nodes and sizes.min() > 0 and sizes.max() <= 1.2 * sizes.float().mean()


@ALGORITHMS
def test_relabel_graph_has_the_same_edges(algorithm):
    partition = partition_graph(*GRAPH, PARTS, algorithm)
    indptr, indices, old_positions = relabel_graph(partition, *GRAPH)
    assert edges(indptr, partition.old_ids[indices]) == {
        (source, int(partition.new_ids()[target]), number) for source, target, number in edges(*GRAPH)
    }
    assert torch.equal(partition.old_ids[indices], GRAPH[1][old_positions])


def test_take_part_parts_together_are_the_graph():
    partition = partition_graph(*GRAPH, PARTS, "metis")
    indptr, indices, _ = relabel_graph(partition, *GRAPH)
    parts = [take_part(partition, indptr, indices, part) for part in range(PARTS)]
    assert torch.equal(torch.cat([part[0].diff() for part in parts]), indptr.diff())
    assert torch.equal(torch.cat([part[1] for part in parts]), indices)
    assert all(int(part[0][-1]) == len(part[1]) for part in parts)


def test_take_part_is_a_copy():
    """A view would keep all edges in memory, and change with them."""
    partition = partition_graph(*GRAPH, PARTS, "ranges")
    indptr, indices = (array.clone() for array in GRAPH)
    _, own = take_part(partition, indptr, indices, 1)
    expected = own.clone()
    indices.zero_()
    assert torch.equal(own, expected)


def test_partition_graph_metis_cuts_no_edge_between_two_cliques():
    """Nodes alternate between the cliques, so ranges cut about half of the edges."""
    nodes = torch.arange(40)
    indices = torch.cat([nodes[(nodes % 2 == node % 2) & (nodes != node)] for node in range(40)])
    graph = torch.arange(41) * 19, indices
    cuts = {}
    for algorithm in ("metis", "ranges"):
        partition = partition_graph(*graph, 2, algorithm)
        cuts[algorithm] = edge_cut(partition, *relabel_graph(partition, *graph)[:2])
    assert cuts["metis"] == 0 and cuts["ranges"] > 0.4


def test_partition_graph_same_seed_gives_the_same_parts():
    first, second = (partition_graph(*GRAPH, PARTS, "metis", seed=3) for _ in range(2))
    assert torch.equal(first.old_ids, second.old_ids) and torch.equal(first.offsets, second.offsets)


def test_partition_graph_without_pymetis_takes_ranges_or_refuses(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    assert partition_graph(*GRAPH, 2).algorithm == "ranges"
    with pytest.raises(ConfigurationError, match="requires pymetis; pip install"):
        partition_graph(*GRAPH, 2, "metis")


@pytest.mark.parametrize(
    ("indptr", "indices", "text"),
    [
        ([0, 1, 2], [0.0, 1.0], "indices must be a tensor of int64"),
        ([1, 2], [0], "must ascend from 0"),
        ([0, 2, 1], [0], "must ascend"),
        ([0, 1, 3], [0, 1], "must ascend from 0 to the number of edges, which is 2"),
        ([0, 1, 2], [0, 2], r"indices must be in \[0, 2\)"),
        ([0, 1, 2], [0, -1], r"indices must be in \[0, 2\)"),
    ],
)
def test_partition_graph_arrays_that_are_no_graph_are_refused(indptr, indices, text):
    with pytest.raises(ConfigurationError, match=text):
        partition_graph(torch.tensor(indptr), torch.tensor(indices), 1)


@pytest.mark.parametrize(
    ("convert", "given"),
    [
        (torch.Tensor.int, "Tensor of torch.int32"),
        (torch.Tensor.numpy, "ndarray of int64"),
        (torch.Tensor.tolist, "list"),
    ],
)
def test_partition_graph_arrays_of_another_type_are_refused(convert, given):
    advice = r"pass torch.as_tensor\(indptr, dtype=torch.int64\)"
    with pytest.raises(ConfigurationError, match=f"indptr must be a tensor of int64; got {given}.*; {advice}"):
        partition_graph(*map(convert, GRAPH), 1)


@pytest.mark.parametrize("parts", [0, 3, 1.5, "a"])
def test_partition_graph_wrong_number_of_parts_is_refused(parts):
    message = f"num_parts of a graph of 2 nodes must be an integer from 1 to 2; got {parts!r}"
    with pytest.raises(ConfigurationError, match=message):
        partition_graph(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), parts)


@pytest.mark.parametrize("part", [-1, PARTS, 1.0])
def test_part_that_does_not_exist_is_refused(part):
    partition = partition_graph(*GRAPH, PARTS, "ranges")
    for take in (partition.bounds, lambda part: take_part(partition, *GRAPH, part)):
        with pytest.raises(ConfigurationError, match=f"part must be an integer from 0 to 3; got {part}"):
            take(part)


def test_partition_graph_without_edges_has_parts():
    partition = partition_graph(torch.zeros(9, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 2, "metis")
    assert partition.num_nodes == 8 and partition.num_parts == 2


@pytest.fixture
def saved(tmp_path):
    save_partition(partition_graph(*GRAPH, PARTS, "metis"), tmp_path / "parts")
    return tmp_path / "parts"


def test_load_partition_is_the_one_saved(saved):
    loaded, made = load_partition(saved, *GRAPH, PARTS), partition_graph(*GRAPH, PARTS, "metis")
    assert torch.equal(loaded.old_ids, made.old_ids) and torch.equal(loaded.offsets, made.offsets)
    assert (loaded.checksum, loaded.num_edges, loaded.algorithm) == (made.checksum, made.num_edges, "metis")


def test_load_partition_of_another_graph_is_refused(saved):
    other = random_graph(seed=1)
    with pytest.raises(ConfigurationError, match="the partition is of another graph: it has 240 nodes and"):
        load_partition(saved, *other, PARTS)
    swapped = GRAPH[1].clone()
    swapped[0] = (swapped[0] + 1) % 240
    with pytest.raises(ConfigurationError, match="the partition is of another graph, of as many nodes"):
        load_partition(saved, GRAPH[0], swapped, PARTS)


def test_load_partition_for_another_number_of_ranks_is_refused(saved):
    with pytest.raises(ConfigurationError, match="has 4 parts; start 4 ranks, or make a partition for 2"):
        load_partition(saved, *GRAPH, 2)


@pytest.mark.parametrize("name", [DESCRIPTION, IDS])
def test_load_partition_missing_or_damaged_file_is_refused(saved, name):
    (saved / name).write_bytes(b"{" * 20)
    with pytest.raises(ConfigurationError, match="damaged"):
        load_partition(saved, *GRAPH, PARTS)
    (saved / name).unlink()
    with pytest.raises(ConfigurationError, match="has no partition"):
        load_partition(saved, *GRAPH, PARTS)


@pytest.mark.parametrize(("field", "value"), [("format", 99), ("num_nodes", None), ("num_parts", 3), ("num_nodes", 7)])
def test_load_partition_description_that_does_not_fit_is_refused(saved, field, value):
    described = json.loads((saved / DESCRIPTION).read_text()) | {field: value}
    (saved / DESCRIPTION).write_text(json.dumps(described))
    with pytest.raises(ConfigurationError, match="make a new one"):
        load_partition(saved, *GRAPH, PARTS)


def test_load_partition_ids_that_are_no_permutation_are_refused(saved):
    from safetensors.torch import load_file, save_file

    arrays = load_file(saved / IDS)
    arrays["old_ids"][0] = arrays["old_ids"][1]
    save_file(arrays, saved / IDS)
    with pytest.raises(ConfigurationError, match="damaged: its files do not fit"):
        load_partition(saved, *GRAPH, PARTS)


@pytest.mark.parametrize("damaged", [torch.tensor(3), torch.zeros(241), torch.empty(0, dtype=torch.int64)])
@pytest.mark.parametrize("name", ["offsets", "old_ids"])
def test_load_partition_damaged_array_is_refused(saved, name, damaged):
    from safetensors.torch import load_file, save_file

    save_file(load_file(saved / IDS) | {name: damaged}, saved / IDS)
    with pytest.raises(ConfigurationError, match="damaged: its files do not fit"):
        load_partition(saved, *GRAPH, PARTS)
