"""A neighbor sampler for PyTorch Geometric that needs neither pyg-lib nor torch-sparse, and is reproducible.

The sample of a batch is a function of (seed, epoch, its nodes), for any number of threads and in any worker process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy
import torch
import torch_geometric.typing
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric import sampler as pyg
from torch_geometric.sampler.base import SubgraphType

from hasten.core.errors import ConfigurationError
from hasten.graph.sampling import checks, kernels
from hasten.graph.sampling.hops import DrawOptions, EdgeMatrix, EdgeType, SampledEdges, induce, sample
from hasten.graph.sampling.numbering import DisjointNumbering, Ids, NodeTable, Numbering

NODE = ""  # the type of the nodes of a homogeneous graph
EDGE = (NODE, "", NODE)


class NeighborSampler(pyg.NeighborSampler):
    """Samples neighbors for ``NodeLoader``, ``NeighborLoader`` and ``LinkNeighborLoader`` of PyTorch Geometric.

    ``NodeLoader(data, NeighborSampler(data, [15, 10, 5]), batch_size=1024, shuffle=True)``, or
    ``NeighborLoader(data, num_neighbors, neighbor_sampler=NeighborSampler(data, num_neighbors))``.

    Args:
        data: a graph with nodes of one or several types, or (feature store, graph store).
        num_neighbors: edges to draw into each node that a hop found, by hop; -1 takes all. Also a dict by type of edge.
        *args: as for PyTorch Geometric's class.
        seed: of the random numbers; by default from PyTorch's generator, which ``torch.manual_seed`` seeds.
        num_threads: by default those of PyTorch in the calling process, which in a worker of a DataLoader is one.
        **options: as for PyTorch Geometric's class: ``replace``, ``subgraph_type``, ``disjoint``,
            ``temporal_strategy``, ``time_attr``, ``weight_attr``, ``is_sorted``, ``share_memory`` and
            ``sample_direction``.

    Raises:
        ConfigurationError: the edges are not integers, name nodes that do not exist, or are not sorted as claimed; a
            number of neighbors is below -1; weights are negative or not finite; disjoint samples of induced subgraphs.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        *args: Any,
        seed: int | None = None,
        num_threads: int | None = None,
        **options: Any,
    ):
        checks.check_graph(data, options.get("is_sorted", False))
        with _as_with_pyg_lib():
            super().__init__(data, num_neighbors, *args, **options)
        if self.disjoint and self.subgraph_type == SubgraphType.induced:
            raise ConfigurationError("subgraph_type='induced' cannot be combined with disjoint samples")
        if self.is_hetero and self.edge_weight is not None and self.sample_direction == "backward":
            raise ConfigurationError(
                "weights cannot be combined with sample_direction='backward' for several edge types"
            )
        self.seed = int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed
        self.num_threads = num_threads
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # workers that live on see a new epoch
        self._tables: list[dict[str, NodeTable]] = []
        self._expected: dict[EdgeType, int] = {}  # edges of the next sample, about
        self._cached: dict[EdgeType, EdgeMatrix] | None = None
        self._matrices()  # refuses a damaged graph now
        self._fanouts()

    def set_epoch(self, epoch: int) -> None:
        """Makes the samples of the same batches differ from those of other epochs, also in workers that are running.

        A loader that shuffles has other batches in each epoch and does not need it.
        """
        self._epoch[0] = epoch

    @property
    def edge_permutation(self) -> Any:
        """The positions of edges in the given graph, by those in the CSC matrix; a dict where edges have types.

        PyTorch Geometric's class names the types of backward samples by their reverse, where loaders do not find them.
        """
        if self.is_hetero and self.sample_direction == "backward":
            orders: Any = self.perm
            return {self.to_restored_edge_type[kind]: order for kind, order in orders.items()}
        return self.perm

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": [], "_cached": None}  # NumPy views and tables, which each process makes

    def _sample(
        self, seed: Tensor | Mapping[str, Tensor], seed_time: Any = None, **kwargs: Any
    ) -> pyg.SamplerOutput | pyg.HeteroSamplerOutput:
        """Samples around seed nodes, by type where there are several. The hook of PyTorch Geometric's class."""
        seeds = {NODE: seed} if isinstance(seed, Tensor) else dict(seed)
        times = {NODE: seed_time} if isinstance(seed_time, Tensor) else seed_time
        ids = {kind: self._checked(kind, nodes) for kind, nodes in seeds.items()}
        matrices, latest = self._matrices(), self.temporal_strategy == "last"
        options = DrawOptions(bool(self.replace), latest, self.num_threads or torch.get_num_threads())
        with self._numberings(ids) as numberings:
            times = self._seed_times(ids, times)
            found = sample(matrices, numberings, self._fanouts(), self._key(ids), times, options, self._expected)
            self._expected = {kind: len(edges.row) * 9 // 8 for kind, edges in found.items()}
            if self.subgraph_type == SubgraphType.induced:
                found = induce(matrices, numberings, options)
            output = self._output(numberings, found)
        return _homogeneous(output) if isinstance(seed, Tensor) else output

    def _key(self, seeds: Mapping[str, Ids]) -> int:
        """What the sample is a function of, as a 64-bit hash."""
        key = kernels.key_of(numpy.uint64(self.seed % 2**64), self._epoch.numpy())
        for nodes in seeds.values():
            key = kernels.key_of(numpy.uint64(key), nodes)
        return int(key)

    def _checked(self, kind: str, nodes: Tensor) -> Ids:
        checks.check_seeds(nodes, self._sizes()[kind], kind)
        return nodes.to("cpu", torch.int64).contiguous().numpy()

    @contextmanager
    def _numberings(self, seeds: Mapping[str, Ids]) -> Iterator[dict[str, Numbering]]:
        """Numberings of all types of nodes, with the seeds. Threads that sample at once have tables of their own."""
        none = numpy.empty(0, numpy.int64)
        sizes = self._sizes()
        if self.disjoint:
            trees = 0
            disjoint: dict[str, Numbering] = {}
            for kind in [*seeds, *(kind for kind in sizes if kind not in seeds)]:
                disjoint[kind] = DisjointNumbering(seeds.get(kind, none), sizes[kind], trees)
                trees += len(seeds.get(kind, none))
            yield disjoint
            return
        tables = self._tables.pop() if self._tables else {kind: NodeTable(size) for kind, size in sizes.items()}
        yield {kind: Numbering(seeds.get(kind, none), table) for kind, table in tables.items()}
        self._tables.append(tables)

    def _seed_times(self, seeds: Mapping[str, Ids], times: Mapping[str, Tensor] | None) -> NDArray | None:
        """The time of each tree: those given, else the times of the seed nodes."""
        if not self.is_temporal:
            return None
        if times is None:
            if self.node_time is None:
                raise ConfigurationError("edges have times, so each seed needs one: pass input_time to the loader")
            own = self.node_time if isinstance(self.node_time, dict) else {NODE: self.node_time}
            return numpy.concatenate([own[kind].numpy()[nodes] for kind, nodes in seeds.items()])
        return numpy.concatenate([times[kind].numpy() for kind in seeds])

    def _sizes(self) -> dict[str, int]:
        sizes: Any = self.num_nodes
        return sizes if isinstance(sizes, dict) else {NODE: sizes}

    def _fanouts(self) -> dict[EdgeType, list[int]]:
        """The numbers of neighbors by type of edge and hop."""
        values: Any = self.num_neighbors.get_mapped_values(self.edge_types if self.is_hetero else None)
        fanouts = {self.to_edge_type[name]: v for name, v in values.items()} if self.is_hetero else {EDGE: values}
        for by_hop in fanouts.values():
            checks.check_fanouts(by_hop)
        return fanouts

    def _matrices(self) -> dict[EdgeType, EdgeMatrix]:
        """The graph as NumPy arrays that share the memory of the tensors, made once in each process."""
        if self._cached is None:
            kinds = {kind: self.to_rel_type[kind] for kind in self.edge_types} if self.is_hetero else {EDGE: None}
            self._cached = {kind: self._matrix(kind, name) for kind, name in kinds.items()}
        return self._cached

    def _matrix(self, kind: EdgeType, name: str | None) -> EdgeMatrix:
        """The edges of one type; ``name`` is that of the type in PyTorch Geometric's dicts, None without types."""
        graph: tuple[Any, Any] = (self.colptr, self.row) if name is None else (self.colptr_dict, self.row_dict)
        indptr, indices = (_of(part, name).contiguous() for part in graph)
        label = "the graph" if name is None else f"the edges {kind}"
        checks.check_matrix(label, indptr, indices, self._sizes()[kind[0]])
        weights, times = _of(self.edge_weight, name), _of(self.edge_time, name)
        node_times = _of(self.node_time, None if name is None else kind[0])
        if weights is not None:
            checks.check_weights(label, weights, len(indices))
        if node_times is not None:
            times = node_times[indices]
        weights, times = (None if tensor is None else tensor.numpy() for tensor in (weights, times))
        sources = _narrow(indices, self._sizes()[kind[0]])
        if not indices.is_shared():  # frees PyTorch Geometric's own copy
            if name is None:
                self.row = torch.from_numpy(sources)
            else:
                self.row_dict[name] = torch.from_numpy(sources)
        return EdgeMatrix(indptr.to(torch.int64).numpy(), sources, weights, times)

    def _output(
        self, numberings: Mapping[str, Numbering], found: Mapping[EdgeType, SampledEdges]
    ) -> pyg.HeteroSamplerOutput:
        backward = self.sample_direction == "backward"
        names = {kind: self.to_restored_edge_type[kind] if backward and self.is_hetero else kind for kind in found}
        row = {names[kind]: torch.from_numpy(edges.row) for kind, edges in found.items()}
        col = {names[kind]: torch.from_numpy(edges.col) for kind, edges in found.items()}
        by_hop: Any = {names[kind]: edges.by_hop for kind, edges in found.items()}
        trees = {kind: numbering.all_trees() for kind, numbering in numberings.items()}
        return pyg.HeteroSamplerOutput(
            node={kind: torch.from_numpy(numbering.nodes()) for kind, numbering in numberings.items()},
            row=col if backward else row,
            col=row if backward else col,
            edge={names[kind]: torch.from_numpy(edges.edges) for kind, edges in found.items()},
            batch={k: torch.from_numpy(ids) for k, ids in trees.items() if ids is not None} if self.disjoint else None,
            num_sampled_nodes={kind: [len(nodes) for nodes in n.by_hop] for kind, n in numberings.items()},
            num_sampled_edges=None if self.subgraph_type == SubgraphType.induced else by_hop,
        )


def _of(values: Any, name: str | None) -> Any:
    """The value of one type; without types there is one value."""
    return values if name is None or values is None else values.get(name)


def _narrow(ids: Tensor, size: int) -> NDArray:
    """Ids for reads at random places: 32 bits where they suffice, and NumPy's memory, which has huge pages."""
    return numpy.asarray(ids.numpy(), dtype=numpy.int32 if size < 2**31 else numpy.int64)


def _homogeneous(output: pyg.HeteroSamplerOutput) -> pyg.SamplerOutput:
    """The same sample, without the dicts by type."""
    names = ("node", "row", "col", "edge", "batch", "num_sampled_nodes", "num_sampled_edges")
    values: dict[str, Any] = {name: next(iter((getattr(output, name) or {"": None}).values())) for name in names}
    return pyg.SamplerOutput(**values)


@contextmanager
def _as_with_pyg_lib() -> Iterator[None]:
    """Lets PyTorch Geometric's constructor accept weights and times, which without pyg-lib it refuses."""
    names = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")
    with mock.patch.multiple(torch_geometric.typing, **dict.fromkeys(names, True)):
        yield
