"""Batches from partitioned graphs: real ranks over gloo."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from hasten.core.errors import ConfigurationError
from hasten.distributed.collectives import all_reduce_gradients
from hasten.graph import NeighborSampler
from hasten.graph.partitions.background import BackgroundProducer
from hasten.graph.partitions.loader import PartitionedLoader
from hasten.graph.partitions.partition import partition_graph
from hasten.graph.partitions.sampler import HybridSampler
from helpers.markers import slow
from helpers.partitioned_graphs import (
    NODES,
    SmallGraphSage,
    graph_features,
    partitioned_loader,
    random_graph,
    start,
)
from helpers.ranks import run_ranks

WORLDS = pytest.mark.parametrize("world", [2, 4])
SCHEMES = pytest.mark.parametrize("scheme", ["hybrid", "vanilla"])
HOPS = 3


@pytest.fixture(scope="module", autouse=True)
def kernels_loaded():
    """Loads the compiled kernels into this process, of which ranks are forked."""
    HybridSampler(*random_graph(), (2,)).sample(torch.tensor([0, 1]))


def contents(batch) -> tuple:
    tensors = (batch.x, batch.y, batch.edge_index, batch.n_id)
    return (*(tensor.clone() for tensor in tensors), batch.num_sampled_nodes, batch.num_sampled_edges)


def same(first: tuple, second: tuple) -> bool:
    tensors = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first[:4], second[:4], strict=True))
    return tensors and first[4:] == second[4:]


def epoch(rank: int, world: int, scheme: str, **options) -> dict:
    """An epoch: its batches, and what it cost."""
    start()
    loader = partitioned_loader(rank, world, scheme, **options)
    before = loader.exchange.rounds, loader.exchange.calls
    batches = [contents(batch) for batch in loader]
    loader.close()
    rounds, calls = loader.exchange.rounds - before[0], loader.exchange.calls - before[1]
    return {"batches": batches, "rounds": rounds, "calls": calls, "length": len(loader)}


@pytest.mark.parametrize(("world", "prefetch_factor"), [(2, 1), (4, 1), slow(2, 0), slow(4, 0)])
def test_loader_hybrid_batch_takes_2_rounds_and_vanilla_2_per_layer(world, prefetch_factor):
    def run(rank: int, scheme: str) -> dict:
        return epoch(rank, world, scheme, prefetch_factor=prefetch_factor)

    hybrid, vanilla = run_ranks(world, run, "hybrid"), run_ranks(world, run, "vanilla")
    assert [each["rounds"] for each in hybrid] == [2 * 4] * world
    assert [each["rounds"] for each in vanilla] == [2 * HOPS * 4] * world
    assert hybrid[0]["calls"] == 3 * 4 and vanilla[0]["calls"] == (3 + 4 * (HOPS - 1)) * 4


@WORLDS
def test_loader_both_schemes_give_the_same_batches(world):
    for hybrid, vanilla in zip(
        run_ranks(world, epoch, world, "hybrid"), run_ranks(world, epoch, world, "vanilla"), strict=True
    ):
        assert len(hybrid["batches"]) == len(vanilla["batches"]) == 4
        assert all(map(same, hybrid["batches"], vanilla["batches"]))


def test_loader_without_replacement_draws_distinct_edges_of_the_graph():
    """A batch has exactly min(degree, fanout) edges into each node that a hop found, and all are of the graph."""
    partition = partition_graph(*random_graph(), 2, "metis")
    indptr, indices = random_graph()
    degrees = indptr.diff()[partition.old_ids]
    for rank_batches in run_ranks(2, epoch, 2, "vanilla"):
        for _, _, edge_index, n_id, by_hop, edges_by_hop in rank_batches["batches"]:
            expected = torch.zeros(len(n_id), dtype=torch.int64)
            first = 0
            for number, fanout in zip(by_hop, (4, 3, 2), strict=False):
                expected[first : first + number] = degrees[n_id[first : first + number]].clamp(max=fanout)
                first += number
            assert torch.equal(torch.bincount(edge_index[1], minlength=len(n_id)), expected)
            assert sum(edges_by_hop) == edge_index.shape[1] and sum(by_hop) == len(n_id)
            old = partition.old_ids[n_id]
            for source, target in old[edge_index].T.tolist():
                assert source in indices[indptr[target] : indptr[target + 1]]


@WORLDS
def test_loader_features_and_labels_equal_those_of_one_process(world):
    partition = partition_graph(*random_graph(), world, "metis")
    everything = graph_features(partition.old_ids)
    for answer in run_ranks(world, epoch, world, "hybrid"):
        for x, y, _, n_id, *_ in answer["batches"]:
            assert torch.equal(x, everything[n_id]) and torch.equal(y, partition.old_ids[n_id[: len(y)]] % 3)


def losses(rank: int, world: int, scheme: str, prefetch_factor: int) -> list[float]:
    """Loss by step of a small GraphSAGE, its gradients averaged over the ranks."""
    start()
    torch.manual_seed(0)
    loader = partitioned_loader(rank, world, scheme, prefetch_factor=prefetch_factor)
    model = SmallGraphSage()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    curve = []
    for _ in range(3):
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y)
            optimizer.zero_grad()
            loss.backward()
            all_reduce_gradients(list(model.parameters()))
            optimizer.step()
            curve.append(loss.item())
    return curve


@pytest.mark.parametrize("world", [2, slow(4)])
def test_training_loss_curve_is_the_same_for_both_schemes_and_with_overlap(world):
    hybrid = run_ranks(world, losses, world, "hybrid", 1)
    assert hybrid == run_ranks(world, losses, world, "vanilla", 1)
    assert hybrid == run_ranks(world, losses, world, "hybrid", 0)
    assert all(len(set(curve)) == 12 for curve in hybrid)  # a training, not a constant


def overlapped(rank: int) -> list[int]:
    """Rounds that were made when the training of each batch ends, while it waits without asking for more."""
    start()
    loader = partitioned_loader(rank, 2, "hybrid")
    before, seen = loader.exchange.rounds, []
    for number, _ in enumerate(loader):
        wanted = 2 * min(number + 2, 4)
        deadline = time.monotonic() + 10
        while loader.exchange.rounds - before < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        seen.append(loader.exchange.rounds - before)
    return seen


def test_loader_fetches_the_next_batch_during_the_training_and_no_further():
    assert run_ranks(2, overlapped) == [[4, 6, 8, 8]] * 2


def test_loader_epochs_differ_and_a_resumed_epoch_is_the_same():
    def two_epochs(rank: int) -> tuple:
        start()
        loader = partitioned_loader(rank, 2, "hybrid")
        first, second = [[contents(batch) for batch in loader] for _ in range(2)]
        loader.set_epoch(1)
        again = [contents(batch) for batch in loader]
        with pytest.raises(ConfigurationError, match="epoch must be an integer from 0"):
            loader.set_epoch(1.5)
        return first, second, again

    for first, second, again in run_ranks(2, two_epochs):
        assert all(map(same, second, again)) and not any(map(same, first, second))


def uneven_seeds(rank: int, first: int, end: int) -> torch.Tensor:
    return torch.arange(first, first + 10 * (rank + 1) + 3)


@pytest.mark.parametrize(
    ("uneven", "lengths", "exchanged"), [("repeat", [3, 3], 3), ("drop", [2, 2], 2), ("keep", [2, 3], 3)]
)
@SCHEMES
def test_loader_uneven_numbers_of_batches_are_exchanged_to_the_end(uneven, lengths, exchanged, scheme):
    def run(rank: int) -> dict:
        return epoch(rank, 2, scheme, seeds_of=uneven_seeds, uneven=uneven, shuffle=False)

    answers = run_ranks(2, run)
    assert [each["length"] for each in answers] == [len(each["batches"]) for each in answers] == lengths
    rounds = 2 if scheme == "hybrid" else 2 * HOPS
    assert [each["rounds"] for each in answers] == [rounds * exchanged] * 2
    if uneven == "repeat":
        assert same(answers[0]["batches"][0], answers[0]["batches"][2])


def test_loader_rank_without_seeds_answers_the_others():
    def run(rank: int) -> int:
        return len(epoch(rank, 2, "vanilla", seeds_of=seeds_of_rank_0, uneven="keep")["batches"])

    assert run_ranks(2, run) == [3, 0]


def seeds_of_rank_0(rank: int, first: int, end: int) -> torch.Tensor:
    return torch.arange(first, first + 30 * (1 - rank))


@pytest.mark.parametrize("uneven", ["repeat", "drop"])
@pytest.mark.parametrize(
    ("seeds_of", "text"),
    [
        (seeds_of_rank_0, "rank 1 has no seed nodes"),
        (lambda rank, first, end: torch.arange(0), "rank 0 has no seed nodes"),
    ],
)
def test_loader_rank_without_seeds_is_refused_where_batches_must_be_equal(uneven, seeds_of, text):
    def run(rank: int) -> None:
        start()
        partitioned_loader(rank, 2, "hybrid", seeds_of=seeds_of, uneven=uneven)

    assert all(isinstance(error, ConfigurationError) and text in str(error) for error in run_ranks(2, run))


def test_loader_left_early_by_all_ranks_can_be_iterated_again():
    def run(rank: int) -> tuple:
        start()
        loader = partitioned_loader(rank, 2, "hybrid")
        next(iter(loader))
        loader.set_epoch(0)
        return [contents(batch) for batch in loader], len(loader)

    for (batches, length), complete in zip(run_ranks(2, run), run_ranks(2, epoch, 2, "hybrid"), strict=True):
        assert len(batches) == length and all(map(same, batches, complete["batches"]))


def second_loader(loader, **options):
    """Another loader over the exchange of ``loader``."""
    return PartitionedLoader(loader.sampler, loader.features, loader.labels, loader.seeds, 10, **options)


@SCHEMES
def test_loader_two_loaders_on_one_exchange_take_turns_or_are_refused(scheme):
    def run(rank: int) -> tuple:
        start()
        loader = partitioned_loader(rank, 2, scheme)
        other = second_loader(loader)
        for number, _ in enumerate(loader):
            if number == 1:
                with pytest.raises(ConfigurationError) as refused:
                    next(iter(other))
        complete = [contents(batch) for batch in other]
        next(iter(loader))  # left early: the other waits for it
        other.set_epoch(0)
        return number + 1, complete, [contents(batch) for batch in other], str(refused.value)

    for batches, complete, again, text in run_ranks(2, run):
        assert batches == len(complete) == 4 and all(map(same, complete, again))
        assert text.startswith("a loader still exchanges data over this RankExchange; end its loop")


def test_loader_two_loaders_without_prefetch_alternate():
    def run(rank: int) -> tuple:
        start()
        loader = partitioned_loader(rank, 2, "vanilla", prefetch_factor=0)
        pairs = zip(loader, second_loader(loader, prefetch_factor=0), strict=True)
        return [(contents(first), contents(second)) for first, second in pairs]

    for pairs in run_ranks(2, run):
        assert len(pairs) == 4 and all(same(first, second) for first, second in pairs)


def test_loader_left_early_leaves_no_thread():
    def run(rank: int) -> list[str]:
        start()
        loader = partitioned_loader(rank, 2, "hybrid")
        for _ in loader:
            break
        del loader
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "hasten-graph-exchange":
                thread.join(10)
        return [thread.name for thread in threading.enumerate()]

    assert all("hasten-graph-exchange" not in names for names in run_ranks(2, run))


def test_loader_iterator_of_a_closed_loader_ends_with_an_error():
    def run(rank: int) -> str:
        start()
        loader = partitioned_loader(rank, 2, "hybrid")
        batches = iter(loader)
        next(batches)
        loader.close()
        with pytest.raises(ConfigurationError) as ended:
            list(batches)
        return str(ended.value)

    assert all("its loader was closed" in text for text in run_ranks(2, run))


def test_loader_own_error_that_no_batch_reported_is_raised_at_exit():
    def run(rank: int) -> tuple:
        start()
        loader = partitioned_loader(rank, 1, "hybrid")
        original = loader._make

        def make(seeds, epoch):
            if loader.exchange.rounds >= 2:  # the second batch
                raise RuntimeError("an error of this rank")
            return original(seeds, epoch)

        loader._make = make
        next(iter(loader))
        with pytest.raises(RuntimeError) as error:
            loader.close_at_exit()
        loader.close()  # it is reported once
        return str(error.value)

    assert run_ranks(1, run) == ["an error of this rank"]


def test_background_producer_raises_its_error_once():
    def produce(index: int) -> int:
        if index == 1:
            raise RuntimeError("failed")
        return index

    producer = BackgroundProducer(produce, 3, 2)
    producer.thread.start()
    assert producer.get() == 0
    with pytest.raises(RuntimeError, match="failed"):
        producer.get()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="this iterator has ended"):
            producer.get()
    producer.stop()
    producer.join()


def test_hybrid_sampler_used_by_several_threads_draws_the_same():
    graph = random_graph(20_000, 10)
    sampler = HybridSampler(*graph, (5, 5, 5), seed=3)
    seeds = torch.arange(20_000).split(1_000)
    expected = [sampler.sample(part) for part in seeds]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(sampler.sample, seeds))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.n_id, other.n_id) and torch.equal(one.edge_index, other.edge_index)


@pytest.mark.parametrize("fanouts", [(0, 3), (-1, -1)])
def test_loader_fanouts_0_and_all_give_the_same_batches_in_both_schemes(fanouts):
    def run(rank: int, scheme: str) -> list:
        return epoch(rank, 2, scheme, fanouts=fanouts)["batches"]

    for hybrid, vanilla in zip(run_ranks(2, run, "hybrid"), run_ranks(2, run, "vanilla"), strict=True):
        assert all(map(same, hybrid, vanilla))
        assert (hybrid[0][2].shape[1] == 0) == (fanouts[0] == 0)


def test_hybrid_sampler_draws_what_neighbor_sampler_draws():
    indptr, indices = random_graph()
    targets = torch.arange(NODES).repeat_interleave(indptr.diff())
    data = Data(edge_index=torch.stack([indices, targets]), num_nodes=NODES)
    seeds = torch.tensor([3, 200, 17])
    sampler = NeighborSampler(data, [4, 3, 2], seed=7, is_sorted=True)  # else edges of a node change their order
    expected = sampler.sample_from_nodes(NodeSamplerInput(None, seeds))
    found = HybridSampler(indptr, indices, [4, 3, 2], seed=7).sample(seeds)
    assert torch.equal(found.n_id, expected.node)
    assert torch.equal(found.edge_index, torch.stack([expected.row, expected.col]))
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
