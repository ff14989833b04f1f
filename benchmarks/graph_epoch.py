"""Training of GraphSAGE on sampled neighborhoods: with ``hasten.graph.NeighborSampler``, all of DGL, and plain PyTorch.

All arms train three layers of GraphSAGE (mean of the neighbors, 64 hidden values) with Adam on the same graph, with the
fanouts 15, 10 and 5 and the same batches of seeds, in one process, in turns. What differs is how:

hasten    PyTorch Geometric's ``NodeLoader`` and ``SAGEConv``, with hasten's sampler and ``fuse_aggregation``
sampler   the same without ``fuse_aggregation``: what the sampler does by itself
DGL       DGL's fused sampler, its ``DataLoader`` and ``SAGEConv``
PyTorch   PyTorch Geometric with a vectorized sampler that a user writes: pyg-lib and torch-sparse are not in the index

The bound: features, matrix products and the optimizer take the same time in all arms; a table row shows the share of
hasten's epoch that the sampling takes.

Figure: an epoch at least 1.5 times as fast as DGL's and as PyTorch's. Needs DGL 1.1.3, see ``graph_sampling.py``;
without it, its columns stay empty.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from _common import finish, in_turns, installed, interval, parser, print_line, print_progress, show
from graph_sampling import FANOUTS, generated, twitter
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from hasten.graph import NeighborSampler, fuse_aggregation

WANTED = 1.5
FEATURES, HIDDEN, CLASSES = 128, 64, 16
OTHERS = ("dgl", "torch", "sampler")


class TorchSampler(BaseSampler):
    """Neighbor sampling in plain PyTorch: random keys for all edges of the frontier, sorted by node and key."""

    def __init__(self, graph: Data):
        source, target = graph.edge_index
        order = target.argsort(stable=True)
        self.source = source[order]
        counts = torch.bincount(target, minlength=graph.num_nodes or 0)
        self.indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.number = torch.full((graph.num_nodes or 0,), -1)

    def sample_from_nodes(self, inputs: NodeSamplerInput, **_) -> SamplerOutput:
        nodes = frontier = inputs.node
        self.number[nodes] = torch.arange(len(nodes))
        rows, cols, num_nodes, num_edges = [], [], [len(nodes)], []
        for fanout in FANOUTS:
            degree = self.indptr[frontier + 1] - self.indptr[frontier]
            owner = torch.repeat_interleave(torch.arange(len(frontier)), degree)
            rank = torch.arange(len(owner)) - (degree.cumsum(0) - degree)[owner]
            order = (owner + torch.rand(len(owner), dtype=torch.float64)).argsort()
            chosen = order[rank < fanout]
            sources = self.source[self.indptr[frontier][owner] + rank][chosen]
            cols.append(self.number[frontier][owner[chosen]])
            frontier = torch.unique(sources[self.number[sources] < 0])
            self.number[frontier] = torch.arange(len(nodes), len(nodes) + len(frontier))
            nodes = torch.cat([nodes, frontier])
            rows.append(self.number[sources])
            num_nodes.append(len(frontier))
            num_edges.append(len(sources))
        self.number[nodes] = -1
        return SamplerOutput(
            nodes, torch.cat(rows), torch.cat(cols), None, num_sampled_nodes=num_nodes, num_sampled_edges=num_edges,
            metadata=(inputs.input_id, inputs.time),
        )  # fmt: skip

    def sample_from_edges(self, *_, **__) -> SamplerOutput:
        raise NotImplementedError("this benchmark samples from nodes")


class Sage(nn.Module):
    """GraphSAGE on a batch of ``NodeLoader``: each layer computes the nodes that the next one reads, as in DGL."""

    def __init__(self) -> None:
        super().__init__()
        widths = [FEATURES, *[HIDDEN] * (len(FANOUTS) - 1), CLASSES]
        self.layers = nn.ModuleList(SAGEConv(*pair) for pair in pairwise(widths))

    def forward(self, batch: Data) -> torch.Tensor:
        x = batch.x
        for index, layer in enumerate(self.layers):
            hops = len(self.layers) - index
            targets, edges = sum(batch.num_sampled_nodes[:hops]), sum(batch.num_sampled_edges[:hops])
            x = layer((x, x[:targets]), batch.edge_index[:, :edges])
            x = x.relu() if index + 1 < len(self.layers) else x
        return x


def pyg_arm(graph: Data, sampler: BaseSampler, batch_size: int, fuses: bool = False) -> Callable[[torch.Tensor], None]:
    """Trains on seeds with PyTorch Geometric."""
    model = Sage()
    if fuses:
        fuse_aggregation(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(seeds: torch.Tensor) -> None:
        for batch in NodeLoader(graph, sampler, seeds, batch_size=batch_size):
            outputs = model(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, batch.y[: batch.batch_size]).backward()
            optimizer.step()

    return train


def dgl_arm(graph: Data, threads: int, batch_size: int) -> Callable[[torch.Tensor], None]:
    """Trains on seeds with DGL, as its own example of GraphSAGE does."""
    import dgl
    from dgl.nn import SAGEConv as DglConv

    dgl.utils.set_num_threads(threads)
    source, target = graph.edge_index  # ids of 64 bits: the backward pass of DGL 1.1.3 crashes with fewer
    matrix = dgl.graph((source, target), num_nodes=graph.num_nodes).formats(["csc"])
    sampler = dgl.dataloading.NeighborSampler(FANOUTS[::-1], fused=True)
    widths = [FEATURES, HIDDEN, HIDDEN, CLASSES]
    layers = nn.ModuleList(DglConv(widths[i], widths[i + 1], "mean") for i in range(len(FANOUTS)))
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)

    def train(seeds: torch.Tensor) -> None:
        for begin in range(0, len(seeds), batch_size):
            inputs, outputs, blocks = sampler.sample_blocks(matrix, seeds[begin : begin + batch_size])
            x = graph.x.index_select(0, inputs)  # as DGL's DataLoader fetches features
            for index, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
                x = layer(block, x)
                x = x.relu() if index + 1 < len(layers) else x
            optimizer.zero_grad()
            nn.functional.cross_entropy(x, graph.y[outputs]).backward()
            optimizer.step()

    return train


def measured(name: str, graph: Data, options) -> tuple[tuple, dict]:
    """A row of the table and its numbers."""
    nodes = int(graph.num_nodes or 0)
    graph.x = torch.randn(nodes, FEATURES, generator=torch.Generator().manual_seed(0))
    graph.y = torch.randint(CLASSES, (nodes,), generator=torch.Generator().manual_seed(0))
    own, size = NeighborSampler(graph, FANOUTS, seed=0, num_threads=options.threads), options.batch_size
    arms = {
        "hasten": pyg_arm(graph, own, size, fuses=True),
        "sampler": pyg_arm(graph, own, size),
        "torch": pyg_arm(graph, TorchSampler(graph), size),
    }
    if not installed("dgl"):
        arms["dgl"] = dgl_arm(graph, options.threads, size)
    seeds = torch.randperm(nodes, generator=torch.Generator().manual_seed(1))[: options.batches * size]

    def seconds(train: Callable[[torch.Tensor], None]) -> float:
        start = time.perf_counter()
        train(seeds)
        return time.perf_counter() - start

    def sampling_alone() -> float:
        start = time.perf_counter()
        for begin in range(0, len(seeds), size):
            own._sample(seeds[begin : begin + size])
        return time.perf_counter() - start

    for train in arms.values():
        train(seeds[:size])
    turns = {arm: lambda train=train: seconds(train) for arm, train in arms.items()} | {"sampling": sampling_alone}
    numbers = in_turns(turns, options.rounds)
    ratios = {
        arm: interval(other / mine for other, mine in zip(numbers[arm], numbers["hasten"], strict=True))
        for arm in OTHERS
        if arm in numbers
    }
    share = interval(part / whole for part, whole in zip(numbers["sampling"], numbers["hasten"], strict=True))
    texts = [f"{ratios[arm]:.2f}" if arm in ratios else "" for arm in OTHERS]
    times = [f"{interval(numbers[arm]).median:.2f}" if arm in numbers else "" for arm in ("hasten", *OTHERS)]
    return (name, *texts, *times, f"{share.median:.0%}"), {"seconds": numbers, "times as fast": ratios}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--batch-size", type=int, default=1_024, help="seeds of a batch")
    options.add_argument("--batches", type=int, default=6, help="of a turn, instead of a whole epoch")
    options.add_argument("--nodes", type=int, default=1_000_000, help="of the generated graph")
    options.add_argument("--edges", type=int, default=50_000_000, help="of the generated graph")
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    if reason := installed("dgl"):
        print_progress(f"DGL {reason}")
    rows, numbers = [], {}
    graphs = {"ego-twitter": twitter, "R-MAT": lambda: generated(options.nodes, options.edges)}
    for name, make in graphs.items():
        print_progress(name)
        row, numbers[name] = measured(name, make(), options)
        rows.append(row)
    names = "DGL", "PyTorch", "sampler"
    titles = [f"over {name}" for name in names], [f"{name}, s" for name in ("hasten", *names)]
    show(("graph", *titles[0], *titles[1], "sampling alone"), rows)
    print_line(f"{options.batches} batches of {options.batch_size} seeds, {options.threads} threads")
    smallest = {
        arm: min(
            (each["times as fast"][arm].median for each in numbers.values() if arm in each["times as fast"]),
            default=None,
        )
        for arm in OTHERS
    }
    reached = None if smallest["dgl"] is None else min(smallest["dgl"], smallest["torch"]) >= WANTED
    ratios = ", ".join(f"{arm} {'unknown' if ratio is None else f'{ratio:.2f}'}" for arm, ratio in smallest.items())
    return finish(
        options, f"at least {WANTED:g}x as fast as DGL and as PyTorch; the smallest ratios: {ratios}", reached, numbers
    )


if __name__ == "__main__":
    sys.exit(main())
