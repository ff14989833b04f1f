"""Neighbor sampling by ``hasten.graph.NeighborSampler`` against DGL's fused kernel and against plain PyTorch.

All arms sample the same batches of seeds with the fanouts 15, 10 and 5 and the same number of threads, in one process,
in turns whose order is reversed in every other round. DGL samples new edges for all nodes of a block in every layer,
the others only for nodes that the hop before found: so the arms are compared by the time for each sampled edge, and
the seconds of a batch stand beside it. DGL uses the kernel of FastSample (``fused=True``) where it has more than one
thread, on node ids of 64 bits.

The bound: a sampled edge takes at least one cache line of 64 bytes from the graph, where the graph does not fit the
cache; the bandwidth of such reads at random places is measured with as many threads.

Figures: at least twice as fast as DGL in every row, and 50 times as fast as plain PyTorch in every row.
Needs DGL 1.1.3 (its newer releases do not start), ``pip install dgl==1.1.3 "setuptools<70"``; without it, its columns
stay empty.
"""

from __future__ import annotations

import gzip
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from _common import finish, in_turns, installed, interval, parser, print_line, print_progress, show
from torch_geometric.data import Data

from hasten.graph import NeighborSampler

FANOUTS = [15, 10, 5]
CHUNK = 2**20  # edges of a generated graph drawn at a time
WANTED_DGL, WANTED_TORCH = 2.0, 50.0
TWITTER = "graph-ego-twitter/ego-twitter-undirected.jlg"
LINE = 64  # bytes


def twitter() -> Data:
    """The largest real graph: 81,306 nodes, 1,342,310 undirected edges."""
    with gzip.open(Path(os.environ["HASTEN_DATA"]) / TWITTER, "rt") as file:
        nodes = int(file.readline().split(",")[0])
        pairs = numpy.loadtxt(file, delimiter=",", dtype=numpy.int64) - 1
    edges = torch.from_numpy(numpy.concatenate([pairs, pairs[:, ::-1]]).T.copy())
    return Data(edge_index=edges, num_nodes=nodes)


def generated(nodes: int, edges: int) -> Data:
    """An R-MAT graph (Chakrabarti, Zhan and Faloutsos 2004) with that many nodes and directed edges, no self loops.

    Each edge falls into a quadrant of the adjacency matrix, then into a quadrant of that, until one cell is left.
    """
    upper, right = 0.57 + 0.19, numpy.array([0.19 / 0.76, 0.05 / 0.24], numpy.float32)  # as in the Graph 500 benchmark
    rng, done, found = numpy.random.default_rng(0), 0, numpy.empty((2, edges), numpy.int64)
    while done < edges:
        count = min(CHUNK, edges - done)
        source, target = numpy.zeros(count, numpy.int64), numpy.zeros(count, numpy.int64)
        for _ in range((nodes - 1).bit_length()):
            is_lower = rng.random(count, numpy.float32) >= upper
            is_right = rng.random(count, numpy.float32) < right[is_lower.view(numpy.uint8)]
            source += source + is_lower
            target += target + is_right
        valid = (source < nodes) & (target < nodes) & (source != target)
        drawn = numpy.stack([source[valid], target[valid]])
        found[:, done : done + drawn.shape[1]] = drawn
        done += drawn.shape[1]
    names = rng.permutation(nodes)  # else the nodes of high degree would have the lowest numbers
    return Data(edge_index=torch.from_numpy(names[found]), num_nodes=nodes)


def hasten_arm(graph: Data, threads: int):
    sampler = NeighborSampler(graph, FANOUTS, seed=0, num_threads=threads)

    def sample(seeds: torch.Tensor) -> int:
        return len(sampler._sample(seeds).row)

    return sample


def dgl_arm(graph: Data, threads: int):
    import dgl

    dgl.utils.set_num_threads(threads)
    source, target = graph.edge_index  # with ids of 32 bits DGL 1.1.3 returns a third of the edges
    matrix = dgl.graph((source, target), num_nodes=graph.num_nodes).formats(["csc"])
    sampler = dgl.dataloading.NeighborSampler(FANOUTS[::-1], fused=True)

    def sample(seeds: torch.Tensor) -> int:
        return sum(block.num_edges() for block in sampler.sample_blocks(matrix, seeds)[2])

    return sample


def torch_arm(graph: Data, threads: int):
    """The vectorized sampler that a user writes: random keys for all edges of the frontier, sorted by node and key."""
    row, col = graph.edge_index
    target, order = col.sort(stable=True)
    source = row[order]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(target).cumsum(0)])
    indptr = torch.nn.functional.pad(indptr, (0, (graph.num_nodes or 0) + 1 - len(indptr)), value=len(source))

    def sample(seeds: torch.Tensor) -> int:
        frontier, known, drawn = seeds, seeds, 0
        for fanout in FANOUTS:
            degree = indptr[frontier + 1] - indptr[frontier]
            owner = torch.repeat_interleave(torch.arange(len(frontier)), degree)
            first = degree.cumsum(0) - degree
            edge = indptr[frontier][owner] + torch.arange(len(owner)) - first[owner]
            order = (owner + torch.rand(len(owner), dtype=torch.float64)).argsort()
            chosen = edge[order[torch.arange(len(owner)) - first[owner] < fanout]]
            drawn += len(chosen)
            found = torch.unique(source[chosen])
            frontier = found[~torch.isin(found, known)]
            known = torch.cat([known, frontier])
        return drawn

    return sample


def timed(sample, graph: Data, batch: int, batches: int, seed: int) -> tuple[float, int]:
    """Seconds and sampled edges for some batches of random seeds, which depend on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    seeds = [torch.randperm(graph.num_nodes, generator=generator)[:batch] for _ in range(batches)]
    start = time.perf_counter()
    edges = sum(sample(nodes) for nodes in seeds)
    return time.perf_counter() - start, edges


def random_reads(graph: Data, threads: int) -> float:
    """Reads of one number each at random places of an array as large as the edges, per second."""
    array = torch.zeros(graph.num_edges, dtype=torch.int64)
    places = torch.randint(graph.num_edges, (4_000_000,))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    start = time.perf_counter()
    for _ in range(3):
        array[places]
    seconds = time.perf_counter() - start
    torch.set_num_threads(before)
    return 3 * len(places) / seconds


def measured(name: str, graph: Data, batch: int, options) -> tuple[tuple, dict]:
    """A row of the table and its numbers."""
    makers = {"hasten": hasten_arm, "torch": torch_arm}
    if not installed("dgl"):
        makers["dgl"] = dgl_arm
    samplers = {arm: make(graph, options.threads) for arm, make in makers.items()}
    batches = max(1, 20_000 // batch)
    counts = {arm: 1 if arm == "torch" else batches for arm in samplers}
    for sample in samplers.values():
        timed(sample, graph, batch, 1, seed=-1)

    def rounds_of(arm: str) -> Callable[[], tuple[float, int]]:
        seeds = itertools.count()  # every arm samples the same batches in the same round
        return lambda: timed(samplers[arm], graph, batch, counts[arm], next(seeds))

    numbers = in_turns({arm: rounds_of(arm) for arm in samplers}, options.rounds)
    by_edge = {arm: [seconds / edges for seconds, edges in taken] for arm, taken in numbers.items()}
    ratios = {
        arm: interval(other / own for other, own in zip(by_edge[arm], by_edge["hasten"], strict=True))
        for arm in by_edge
        if arm != "hasten"
    }
    million = interval(1e-6 / seconds for seconds in by_edge["hasten"])
    row = (
        name,
        f"{batch:,}",
        f"{million:.1f}",
        f"{random_reads(graph, options.threads) / 1e6:.0f}",
        *(f"{ratios[arm]:.2f}" if arm in ratios else "" for arm in ("dgl", "torch")),
        *(_milliseconds(numbers, counts, arm) for arm in ("hasten", "dgl", "torch")),
    )
    return row, {"seconds and edges": numbers, "times as fast": ratios}


def _milliseconds(numbers: dict[str, list], counts: dict[str, int], arm: str) -> str:
    """The time of one batch; empty for an arm that did not run."""
    if arm not in numbers:
        return ""
    return f"{1e3 * interval(seconds for seconds, _ in numbers[arm]).median / counts[arm]:.1f}"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--nodes", type=int, default=1_000_000, help="of the generated graph")
    options.add_argument("--edges", type=int, default=50_000_000, help="of the generated graph")
    options.add_argument("--batches", type=int, nargs="+", default=[1_024, 5_000, 20_000])
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    if reason := installed("dgl"):
        print_progress(f"DGL {reason}")
    graphs = {"ego-twitter": twitter, "R-MAT": lambda: generated(options.nodes, options.edges)}
    rows, numbers = [], {}
    for name, make in graphs.items():
        graph = make()
        for batch in options.batches:
            print_progress(f"{name}, {batch} seeds")
            row, numbers[f"{name}, {batch}"] = measured(name, graph, batch, options)
            rows.append(row)
    headings = ("graph", "seeds", "million edges/s", "random reads/s (million)", "over DGL", "over PyTorch",
                "ms a batch", "DGL", "PyTorch")  # fmt: skip
    show(headings, rows)
    print_line(f"{options.threads} threads; ratios are of the time for each sampled edge")
    ratios = [each["times as fast"] for each in numbers.values()]
    over_dgl = min((row["dgl"].median for row in ratios if "dgl" in row), default=None)
    over_torch = min(row["torch"].median for row in ratios)
    figure = f"at least {WANTED_DGL:g}x as fast as DGL and {WANTED_TORCH:g}x as plain PyTorch; the smallest ratios are "
    figure += f"{'unknown' if over_dgl is None else f'{over_dgl:.2f}'} and {over_torch:.1f}"
    reached = None if over_dgl is None else over_dgl >= WANTED_DGL and over_torch >= WANTED_TORCH
    return finish(options, figure, reached, numbers)


if __name__ == "__main__":
    sys.exit(main())
