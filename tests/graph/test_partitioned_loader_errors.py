"""Wrong arguments and failing ranks of loaders of partitioned graphs: real ranks over gloo."""

import os
import subprocess
import sys
import time

import pytest
import torch

from hasten.core.errors import CollectiveTimeout, ConfigurationError, PeerFailure
from hasten.graph.features import InMemoryFeatures
from hasten.graph.partitions.exchange import RankExchange
from hasten.graph.partitions.loader import PartitionedLoader
from hasten.graph.partitions.partition import partition_graph, take_part
from hasten.graph.partitions.remote_features import RemoteFeatures
from hasten.graph.partitions.sampler import HybridSampler, VanillaSampler
from helpers.markers import first_quick
from helpers.partitioned_graphs import NODES, partitioned_loader, random_graph, start
from helpers.process import FORK
from helpers.ranks import free_port, run_ranks

SILENCE_S = 3.0


@pytest.fixture(scope="module", autouse=True)
def kernels_loaded():
    """Loads the compiled kernels into this process, of which ranks are forked."""
    HybridSampler(*random_graph(), (2,)).sample(torch.tensor([0, 1]))


@pytest.mark.parametrize("seed", [None, 1.0, True])
def test_hybrid_sampler_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(ConfigurationError, match="seed must be an integer; got"):
        HybridSampler(*random_graph(), (2,), seed=seed)


@pytest.mark.parametrize(
    ("scheme", "options_of", "text"),
    [
        ("hybrid", {"fanouts": lambda rank: (4, 3 + rank)}, "different fanouts: (4, 3) on rank 0, (4, 4) on rank 1"),
        ("vanilla", {"fanouts": lambda rank: (4,) * (1 + rank)}, "different fanouts: (4,) on rank 0, (4, 4) on rank 1"),
        (
            "hybrid",
            {"uneven": ["repeat", "keep"].__getitem__},
            "uneven: 'repeat' on rank 0, 'keep' on rank 1",
        ),
        ("hybrid", {"prefetch_factor": [1, 0].__getitem__}, "different values of prefetch_factor: 1 on rank 0"),
        ("hybrid", {"batch_size": [10, 0].__getitem__}, "batch_size must be at least 1 and prefetch_factor at least 0"),
    ],
)
def test_loader_arguments_that_differ_or_are_wrong_on_one_rank_are_named_on_every_rank(scheme, options_of, text):
    def run(rank: int) -> None:
        start()
        partitioned_loader(rank, 2, scheme, **{name: choose(rank) for name, choose in options_of.items()})

    for error in run_ranks(2, run):
        assert isinstance(error, ConfigurationError) and text in str(error) and "\n" not in str(error)


def test_loader_graphs_that_differ_are_named_on_every_rank():
    def run(rank: int) -> None:
        start()
        exchange = RankExchange(torch.tensor([0, 120, NODES]), 20)
        features = RemoteFeatures(InMemoryFeatures(torch.zeros(120, 2)), exchange)
        sampler = HybridSampler(*random_graph(seed=rank), (4,))
        PartitionedLoader(sampler, features, torch.zeros(120), torch.arange(*exchange.bounds), 10)

    assert all("the ranks have different graphs (checksums)" in str(error) for error in run_ranks(2, run))


def test_loader_sampler_with_an_exchange_of_its_own_is_refused():
    def run(rank: int) -> None:
        start()
        partition = partition_graph(*random_graph(), 2, "ranges")
        exchange, other = (RankExchange(partition.offsets, 20) for _ in range(2))
        features = RemoteFeatures(InMemoryFeatures(torch.zeros(120, 2)), exchange)
        sampler = VanillaSampler(*take_part(partition, *random_graph(), rank), other, (4,))
        PartitionedLoader(sampler, features, torch.zeros(120), torch.arange(*exchange.bounds), 10)

    assert all("must have the same RankExchange" in str(error) for error in run_ranks(2, run))


def test_loader_exchange_used_by_two_threads_is_refused():
    def run(rank: int) -> str:
        start()
        loader = partitioned_loader(rank, 2, "hybrid")
        for _ in loader:
            with pytest.raises(ConfigurationError) as refused:
                loader.features.rows(torch.tensor([0]))
            break
        loader.close()
        loader.features.rows(torch.tensor([0]))  # now it may be used again
        return str(refused.value)

    assert all("a loader still exchanges data" in text for text in run_ranks(2, run))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seeds_of": lambda rank, first, end: torch.tensor([first, first])}, "occurs twice"),
        ({"seeds_of": lambda rank, first, end: torch.tensor([(end + 1) % NODES])}, "must be its own"),
        ({"seeds_of": lambda rank, first, end: torch.tensor([NODES])}, "seed nodes must be in"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"uneven": "pad"}, "uneven must be repeat, drop or keep; got 'pad'"),
        ({"fanouts": (3, -2)}, "fanouts must be"),
        ({"fanouts": ()}, "fanouts must be"),
    ],
)
def test_loader_wrong_arguments_are_refused(options, text):
    def run(rank: int) -> None:
        start()
        partitioned_loader(rank, 2, "hybrid", **options)

    assert all(isinstance(error, ConfigurationError) and text in str(error) for error in run_ranks(2, run))


END_EARLY = """
import sys, time
import torch.distributed as dist
from helpers.partitioned_graphs import partitioned_loader
dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
for number, _ in enumerate(partitioned_loader(rank, 2, "vanilla", timeout=60)):
    if number == 1 and how == "break":
        break
    if number == 1 and rank == 1:
        sys.exit("an error of rank 1")
    time.sleep(0.3 * (rank == 0))  # rank 1 waits in an exchange when it ends
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("break", 0), ("error", 1)])
def test_loader_process_that_ends_early_is_not_aborted_in_an_exchange(how, code):
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", END_EARLY, how],
            env=os.environ | job | {"RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = ranks[1].communicate(timeout=120)[1]
        ranks[0].communicate(timeout=120)
    finally:
        for each in ranks:
            each.kill()
    assert ranks[1].returncode == code and ("an error of rank 1" in output) == (how == "error")
    assert "terminate called" not in output


def lives_or_fails(rank: int, world: int, port: int, scheme: str, how: str, answers) -> None:
    """Rank 1 ends or falls silent in its second batch; the others report the error that ends them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    start()
    loader = partitioned_loader(rank, world, scheme, timeout=SILENCE_S)
    try:
        for number, _ in enumerate(loader):
            if rank == 1 and number == 1:
                if how == "dies":
                    os._exit(1)
                time.sleep(60)
    except PeerFailure as error:
        if rank != 1:
            answers.send((rank, type(error), str(error)))
    time.sleep(60)  # until it is killed: the end of this rank is not what the others shall notice


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("dies", PeerFailure, "another rank ended during an exchange of graph data"),
        ("is silent", CollectiveTimeout, "another rank has not answered for 3 s"),
    ],
)
@pytest.mark.parametrize("scheme", first_quick(["hybrid", "vanilla"]))
def test_loader_rank_that_fails_ends_the_others_with_one_line(scheme, how, kind, text):
    ours, theirs = FORK.Pipe()
    arguments = (3, free_port(), scheme, how, theirs)
    ranks = [FORK.Process(target=lives_or_fails, args=(rank, *arguments)) for rank in range(3)]
    for each in ranks:
        each.start()
    try:
        reports = [ours.recv() if ours.poll(30) else None for _ in range(2)]
    finally:
        for each in ranks:
            each.kill()
            each.join()
    assert None not in reports and sorted(rank for rank, *_ in reports) == [0, 2]
    assert any(reported is kind and text in line for _, reported, line in reports)
    assert all("\n" not in line for *_, line in reports)
