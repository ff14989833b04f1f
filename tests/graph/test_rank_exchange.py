"""What ranks exchange: ids, rows of features and edges of their own nodes; wrong calls are refused on every rank."""

import pytest
import torch

from hasten.core.errors import ConfigurationError
from hasten.graph.features import InMemoryFeatures
from hasten.graph.partitions.exchange import RankExchange
from hasten.graph.partitions.partition import partition_graph, take_part
from hasten.graph.partitions.remote_features import RemoteFeatures
from hasten.graph.partitions.sampler import VanillaSampler
from helpers.markers import first_quick
from helpers.partitioned_graphs import NODES, WIDTH, graph_features, random_graph, start
from helpers.ranks import run_ranks

WORLDS = pytest.mark.parametrize("world", [2, 4])


def test_rank_exchange_sends_ids_in_32_bits_where_the_graph_allows_it():
    def run(rank: int) -> tuple:
        start()
        exchange = RankExchange(torch.tensor([0, 5, 9]), 20)
        request = exchange.request(torch.arange(9))
        counts = torch.full_like(request.ids, 2)
        found = exchange.respond_ids(request, counts, request.ids.repeat_interleave(2))
        return request.ids, found, exchange.sent_bytes

    header = 2 * 8
    for rank, (asked, (counts, ids), sent) in enumerate(run_ranks(2, run)):
        own, other = (5, 4) if rank == 0 else (4, 5)
        assert asked.dtype == ids.dtype == counts.dtype == torch.int64
        assert len(asked) == own and counts.tolist() == [2] * other and len(ids) == 2 * other
        assert sent == header + 4 * other + 4 * own + 4 * 2 * own


@pytest.mark.parametrize(
    "offsets", [torch.tensor([1, 5, 9]), torch.tensor([0, 5, 4]), torch.zeros(3), torch.zeros(1, 3)]
)
def test_rank_exchange_damaged_offsets_are_refused(offsets):
    def run(rank: int) -> None:
        start()
        RankExchange(offsets)

    assert all(isinstance(error, ConfigurationError) and "offsets" in str(error) for error in run_ranks(2, run))


def test_rank_exchange_partitions_that_differ_are_named_on_every_rank():
    def run(rank: int) -> None:
        start()
        RankExchange(torch.tensor([0, 5 + rank, 12]), 20)

    for error in run_ranks(2, run):
        assert "different offsets of the partition: [0, 5, 12] on rank 0, [0, 6, 12] on rank 1" in str(error)


def test_rank_exchange_partitions_of_equal_sizes_that_differ_are_refused_on_every_rank():
    def run(rank: int) -> None:
        start()
        RankExchange(torch.tensor([0, 5, 9]), 20, torch.arange(9).roll(rank))

    assert all("different old ids of the partition (checksums)" in str(error) for error in run_ranks(2, run))


def fetched(rank: int, world: int, ids_of, dtype=torch.float32) -> torch.Tensor:
    start()
    partition = partition_graph(*random_graph(), world, "ranges")
    first, end = partition.bounds(rank)
    local = graph_features(torch.arange(first, end)).to(dtype)
    return RemoteFeatures(InMemoryFeatures(local), RankExchange(partition.offsets, 20)).rows(ids_of(rank))


@pytest.mark.parametrize(
    "ids_of",
    [
        lambda rank: torch.tensor([239, 0, 100, 0, 121])[rank:],
        lambda rank: torch.arange(5),  # nothing from the last rank
        lambda rank: torch.empty(0, dtype=torch.int64) if rank == 0 else torch.arange(NODES),
        lambda rank: torch.empty(0, dtype=torch.int64),
    ],
)
@WORLDS
def test_remote_features_any_requests_are_answered(world, ids_of):
    for rank, rows in enumerate(run_ranks(world, fetched, world, ids_of)):
        assert rows.shape == (len(ids_of(rank)), WIDTH) and torch.equal(rows, graph_features(ids_of(rank)))


@pytest.mark.parametrize("dtype", first_quick([torch.bfloat16, torch.float64, torch.uint8]))
def test_remote_features_any_dtype_is_exchanged(dtype):
    ids = torch.tensor([239, 3, 120])
    for rows in run_ranks(2, fetched, 2, lambda rank: ids, dtype):
        assert torch.equal(rows, graph_features(ids).to(dtype))


def test_remote_features_other_number_of_rows_than_own_nodes_is_refused():
    def run(rank: int) -> None:
        start()
        exchange = RankExchange(torch.tensor([0, 5, 9]), 20)
        RemoteFeatures(InMemoryFeatures(torch.zeros(6, 2)), exchange)

    first, second = run_ranks(2, run)
    assert "rank 0 owns 5 nodes (0 to 5, exclusive), but its features have 6 rows" in str(first)
    assert "rank 1 owns 4 nodes" in str(second)


@pytest.mark.parametrize(
    ("width", "dtype", "text"),
    [
        (3, torch.float32, "different widths of features: 2 on rank 0, 3 on rank 1"),
        (2, torch.int32, "different dtypes of features: 'torch.float32' on rank 0, 'torch.int32' on rank 1"),
    ],
)
def test_remote_features_of_different_kinds_are_refused(width, dtype, text):
    def run(rank: int) -> None:
        start()
        exchange = RankExchange(torch.tensor([0, 5, 10]), 20)
        RemoteFeatures(InMemoryFeatures(torch.zeros(5, width, dtype=dtype) if rank else torch.zeros(5, 2)), exchange)

    assert all(text in str(error) for error in run_ranks(2, run))


def test_rank_exchange_partition_for_another_number_of_ranks_is_refused():
    def run(rank: int) -> None:
        start()
        RankExchange(torch.tensor([0, 5, 9, 12]))

    assert all("has 3 parts, but there are 2 ranks" in str(error) for error in run_ranks(2, run))


def test_rank_exchange_without_a_process_group_is_refused():
    with pytest.raises(ConfigurationError, match="require a process group; call torch"):
        RankExchange(torch.tensor([0, 5]))


def test_vanilla_sampler_edges_of_another_part_are_refused():
    def run(rank: int) -> None:
        start()
        exchange = RankExchange(torch.tensor([0, 5, 9]), 20)
        VanillaSampler(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int64), exchange, [2])

    assert "rank 0 owns 5 nodes, but got edges of 3; pass the result of take_part" in str(run_ranks(2, run)[0])


@pytest.mark.parametrize(
    ("indptr", "indices", "text"),
    [
        ([0, 0, 0, 0, 1], [0.0], "indices must be a tensor of int64"),
        ([0, 0, 0, 0, 2], [0], "indptr must ascend from 0 to the number of edges, which is 1"),
        ([0, 0, 0, 0, 1], [9], r"indices must be in [0, 9), the ids of the nodes; got 9"),
        ([0, 0, 0, 0, 1], [-1], r"indices must be in [0, 9), the ids of the nodes; got -1"),
    ],
)
def test_vanilla_sampler_damaged_edges_of_one_rank_are_refused_on_every_rank(indptr, indices, text):
    def run(rank: int) -> None:
        start()
        own = torch.tensor(indptr), torch.tensor(indices)
        good = torch.zeros(6, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        VanillaSampler(*(own if rank else good), RankExchange(torch.tensor([0, 5, 9]), 20), [2])

    first, second = run_ranks(2, run)
    assert text in str(second) and str(first) == f"rank 1 failed: {second}"


def test_vanilla_sampler_seed_that_is_no_integer_is_refused_on_every_rank():
    def run(rank: int) -> None:
        start()
        own = torch.zeros(6 - rank, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        VanillaSampler(*own, RankExchange(torch.tensor([0, 5, 9]), 20), [2], seed="1")

    assert all("seed must be an integer; got '1'" in str(error) for error in run_ranks(2, run))


def test_vanilla_sampler_seeds_of_another_rank_are_refused():
    def run(rank: int) -> None:
        start()
        partition = partition_graph(*random_graph(), 2, "ranges")
        sampler = VanillaSampler(
            *take_part(partition, *random_graph(), rank), RankExchange(partition.offsets, 20), (4,)
        )
        sampler.sample(torch.tensor([119, 120]))

    assert "must be its own, 0 to 120 (exclusive)" in str(run_ranks(2, run)[0])
