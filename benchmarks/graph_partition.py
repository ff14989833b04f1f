"""Training on a partitioned graph: hybrid partitioning against the vanilla one, over 1 Gbit/s and 1 ms each way.

Every rank owns a part of the features and labels of a generated graph with communities, and trains GraphSAGE on batches
around its own nodes. Hybrid: the graph is on every rank, a batch takes 2 rounds of communication. Vanilla: a rank has
the edges into its own nodes only, a batch of L layers takes 2L rounds. Both fetch a batch during the training on the
one before, and draw the same samples, so their losses must be equal to the last bit. The ranks live in a network
namespace (``network_emulation.py``); all their traffic together gets 1 Gbit/s for each rank and direction. Epochs of
both sides take turns in the same processes. Requires root and iproute2.

Figure: 2 rounds against 2L, the same losses, and at least 1.5x per epoch with 2 and with 4 ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from _common import finish, interval, parser, print_line, print_progress, show
from torch import Tensor, nn

from hasten.distributed.collectives import all_reduce_gradients
from hasten.graph.features import InMemoryFeatures
from hasten.graph.partitions.exchange import RankExchange
from hasten.graph.partitions.loader import PartitionedLoader
from hasten.graph.partitions.partition import GraphPartition, edge_cut, partition_graph, relabel_graph, take_part
from hasten.graph.partitions.remote_features import RemoteFeatures
from hasten.graph.partitions.sampler import HybridSampler, VanillaSampler

WANTED = 1.5
MEGABITS, MILLISECONDS = 1000, 1
FANOUTS = (15, 10, 5)
WIDTH, HIDDEN, CLASSES = 100, 32, 16
COMMUNITY, INSIDE = 250, 0.8  # nodes of a community, fraction of edges inside it
SCHEMES = ("hybrid", "vanilla")
HERE = Path(__file__).parent


def generated_graph(nodes: int, mean_degree: int) -> tuple[Tensor, Tensor]:
    """Indptr and indices of a graph with communities, whose nodes are in random order."""
    random = numpy.random.default_rng(0)
    degrees = random.poisson(mean_degree, nodes)
    targets = numpy.repeat(numpy.arange(nodes), degrees)
    near = targets // COMMUNITY * COMMUNITY + random.integers(0, COMMUNITY, len(targets))
    sources = numpy.where(random.random(len(targets)) < INSIDE, near % nodes, random.integers(0, nodes, len(targets)))
    shuffled = random.permutation(nodes)
    order = numpy.argsort(shuffled[targets], kind="stable")
    indptr = numpy.concatenate([[0], numpy.bincount(shuffled[targets], minlength=nodes).cumsum()])
    return torch.from_numpy(indptr), torch.from_numpy(shuffled[sources][order])


class Sage(nn.Module):
    """GraphSAGE with mean aggregation; layer by layer the outermost hop is left out, as ``trim_to_layer`` does."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, *[HIDDEN] * (len(FANOUTS) - 1), CLASSES]
        self.layers = nn.ModuleList([nn.Linear(2 * a, b) for a, b in pairwise(widths)])

    def forward(self, x: Tensor, edge_index: Tensor, nodes: list[int], edges: list[int]) -> Tensor:
        for number, layer in enumerate(self.layers):
            hops = len(edges) - number
            source, target = edge_index[:, : sum(edges[:hops])]
            inner = sum(nodes[:hops])
            degree = torch.bincount(target, minlength=inner).clamp(min=1)[:, None]
            mean = x.new_zeros(inner, x.shape[1]).index_add(0, target, x[source]) / degree
            x = layer(torch.cat([x[:inner], mean], 1))
            x = x.relu() if hops > 1 else x
        return x


def loader_of(
    scheme: str, batch_size: int, partition: GraphPartition, graph: tuple[Tensor, Tensor], batches: int
) -> PartitionedLoader:
    exchange = RankExchange(partition.offsets, timeout=120, old_ids=partition.old_ids)
    first, end = partition.bounds(exchange.rank)
    own = partition.old_ids[first:end]
    features = RemoteFeatures(InMemoryFeatures(torch.sin(own[:, None] * torch.arange(1.0, WIDTH + 1))), exchange)
    if scheme == "hybrid":
        sampler = HybridSampler(*graph, FANOUTS)
    else:
        sampler = VanillaSampler(*take_part(partition, *graph, exchange.rank), exchange, FANOUTS)
    seeds = torch.arange(first, end)[: batches * batch_size]
    return PartitionedLoader(sampler, features, own % CLASSES, seeds, batch_size, uneven="drop")


def rank_main(rank: int, options, port: int, partition: GraphPartition, graph: tuple[Tensor, Tensor]) -> None:
    """One rank: trains an epoch with each scheme, in turns; rank 0 writes seconds, rounds, bytes and losses."""
    job = {"RANK": rank, "WORLD_SIZE": options.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in job.items()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arms = [(scheme, batch_size) for batch_size in options.batch_sizes for scheme in SCHEMES]
    loaders = [loader_of(*arm, partition, graph, options.batches) for arm in arms]
    epochs: list[list[dict]] = [[] for _ in arms]
    for number in range(options.rounds + 1):  # the first warms up
        for arm in range(len(arms)) if number % 2 else reversed(range(len(arms))):
            epochs[arm].append(train_epoch(loaders[arm], number))
    if rank == 0:
        options.out.write_text(json.dumps([each[1:] for each in epochs]))
    dist.barrier()
    dist.destroy_process_group()


def train_epoch(loader: PartitionedLoader, number: int) -> dict:
    torch.manual_seed(number)
    model = Sage()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader.set_epoch(number)
    before = loader.exchange.rounds, loader.exchange.calls, loader.exchange.sent_bytes
    losses = []
    dist.barrier()
    start = time.perf_counter()
    for batch in loader:
        output = model(batch.x, batch.edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)
        loss = nn.functional.cross_entropy(output, batch.y)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(list(model.parameters()))
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    exchange, batches = loader.exchange, len(loader)
    return {
        "seconds": time.perf_counter() - start,
        "rounds": (exchange.rounds - before[0]) / batches,
        "calls": (exchange.calls - before[1]) / batches,
        "megabytes": (exchange.sent_bytes - before[2]) / batches / 1e6,
        "losses": losses,
    }


def run_ranks(options) -> int:
    """Starts the ranks; called inside the namespace."""
    graph = generated_graph(options.nodes, options.mean_degree)
    partition = partition_graph(*graph, options.ranks)
    graph = relabel_graph(partition, *graph)[:2]
    print_progress(f"{partition.algorithm}: {edge_cut(partition, *graph):.0%} of the edges between parts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    HybridSampler(*graph, FANOUTS).sample(torch.tensor([0]))  # compiles the kernels before the ranks are forked
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=rank_main, args=(rank, options, port, partition, graph)) for rank in range(options.ranks)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return max(abs(each.exitcode) for each in ranks)


def run_on_network(options, ranks: int) -> list[list[dict]]:
    """Runs this script in a namespace with the emulated network.

    Returns the epochs of each pair of batch size and scheme, as rank 0 measured them.
    """
    megabits = MEGABITS * ranks / 2  # the emulation gives all traffic together twice this rate
    passed = [f"--{name}={getattr(options, name)}" for name in ("rounds", "batches", "nodes")]
    passed += ["--batch-sizes", *map(str, options.batch_sizes), f"--mean-degree={options.mean_degree}"]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "epochs.json"
        inner = [sys.executable, __file__, f"--ranks={ranks}", f"--out={out}", *passed]
        emulation = [sys.executable, str(HERE / "network_emulation.py"), str(megabits), str(MILLISECONDS)]
        if subprocess.run([*emulation, *inner]).returncode or not out.exists():
            sys.exit(f"the ranks of the job of {ranks} failed; network namespaces require root and iproute2")
        return json.loads(out.read_text())


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    options.add_argument("--rounds", type=int, default=7, help="epochs of each side, after one for warm-up")
    options.add_argument("--batches", type=int, default=20, help="per epoch and rank")
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32, 128], help="seeds per batch and rank")
    options.add_argument("--nodes", type=int, default=100_000)
    options.add_argument("--mean-degree", type=int, default=20)
    options.add_argument("--ranks", type=int, help="used by the script itself")
    options.add_argument("--out", type=Path, help="used by the script itself")
    options = options.parse_args()
    return run_ranks(options) if options.out else print_result(options)


def print_result(options) -> int:
    rows, numbers, reached = [], {}, []
    for ranks in options.worlds:
        print_progress(f"{ranks} ranks")
        arms = iter(run_on_network(options, ranks))
        for batch_size, hybrid, vanilla in zip(options.batch_sizes, arms, arms, strict=True):
            numbers[f"{ranks} ranks, batches of {batch_size}"] = {"hybrid": hybrid, "vanilla": vanilla}
            ratio = interval(v["seconds"] / h["seconds"] for h, v in zip(hybrid, vanilla, strict=True))
            equal = all(h["losses"] == v["losses"] for h, v in zip(hybrid, vanilla, strict=True))
            rows += [row(ranks, batch_size, "hybrid", hybrid, f"{ratio:.2f}", equal)]
            rows += [row(ranks, batch_size, "vanilla", vanilla, "", equal)]
            rounds = {each["rounds"] for each in hybrid}, {each["rounds"] for each in vanilla}
            reached.append(equal and rounds == ({2}, {2 * len(FANOUTS)}) and ratio.median >= WANTED)
    show(("ranks", "batch", "scheme", "rounds", "calls", "MB", "s/epoch", "vanilla/hybrid", "losses"), rows)
    what = f"{options.nodes} nodes of mean degree {options.mean_degree}, {WIDTH} features, fanouts {FANOUTS}"
    print_line(f"\n{what}; {options.batches} batches an epoch.")
    print_line("Rounds, collective calls and MB sent are those of a batch, MB of rank 0.")
    figure = f"2 rounds against {2 * len(FANOUTS)}, the same losses, at least {WANTED:g}x per epoch in every row"
    return finish(options, figure, all(reached), {"epochs": numbers})


def row(ranks: int, batch_size: int, scheme: str, epochs: list[dict], ratio: str, equal: bool) -> tuple:
    cost = f"{epochs[0]['rounds']:g}", f"{epochs[0]['calls']:g}", f"{epochs[0]['megabytes']:.2f}"
    seconds = interval(each["seconds"] for each in epochs)
    return ranks, batch_size, scheme, *cost, f"{seconds:.2f}", ratio, "the same" if equal else "DIFFERENT"


if __name__ == "__main__":
    sys.exit(main())
