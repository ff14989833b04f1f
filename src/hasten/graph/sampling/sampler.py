"""A neighbor sampler for PyTorch Geometric that needs neither pyg-lib nor torch-sparse, and is reproducible.

The sample of a batch is a function of (seed, epoch, its nodes), for any number of threads and in any worker process.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
from hasten.graph.sampling.numbering import DisjointNumbering, Ids, NodeTablePool, Numbering

NODE = ""  # the type of the nodes of a homogeneous graph
EDGE = (NODE, "", NODE)
_flags_lock = threading.Lock()  # held while flags of PyTorch Geometric have other values


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

    A number of neighbors draws edges in proportion to their weights, so none of weight 0. -1 and induced subgraphs take
    all edges, those of weight 0 too, as PyTorch Geometric does. With ``is_sorted`` and a time, the edges into a node
    must ascend in time.

    Raises:
        ConfigurationError: the edges are not integers, name nodes that do not exist, or are not sorted as claimed; a
            number of neighbors is no integer from -1 on; the seed or the number of threads is no integer; an attribute,
            the temporal strategy or the direction is unknown; weights are negative or their sum is not finite; times
            are NaN or do not ascend; disjoint samples of induced subgraphs.
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
        if seed is not None:
            checks.check_integer("seed", seed)
        if num_threads is not None:
            checks.check_integer("num_threads", num_threads, 1)
        given = inspect.signature(super().__init__).bind(data, num_neighbors, *args, **options)
        given.apply_defaults()
        chosen = given.arguments
        checks.check_graph(data, chosen["is_sorted"], chosen["sample_direction"] == "backward")
        checks.check_attributes(data, chosen["time_attr"], chosen["weight_attr"])
        for option, known in (
            ("temporal_strategy", ("uniform", "last")),
            ("sample_direction", ("forward", "backward")),
        ):
            if chosen[option] not in known:
                raise ConfigurationError(f"{option} must be {' or '.join(known)}, not {chosen[option]!r}")
        try:
            with _as_with_pyg_lib():
                super().__init__(data, num_neighbors, *args, **options)
        except (ValueError, NotImplementedError) as error:  # combinations of options that the class refuses
            raise ConfigurationError(" ".join(str(error).split())) from None
        if self.disjoint and self.subgraph_type == SubgraphType.induced:
            raise ConfigurationError("subgraph_type='induced' cannot be combined with disjoint samples")
        if self.is_hetero and self.edge_weight is not None and self.sample_direction == "backward":
            combination = "weights cannot be combined with sample_direction='backward'"
            raise ConfigurationError(f"{combination} for several edge types")
        self.seed = int(torch.empty((), dtype=torch.int64).random_()) if seed is None else int(seed)
        self.num_threads = num_threads
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # workers that live on see a new epoch
        self._tables = NodeTablePool(self._sizes())
        self._expected: dict[EdgeType, int] = {}  # edges of the next sample, about
        self._cached: dict[EdgeType, EdgeMatrix] | None = None
        for edge_type, name in self._edge_names().items():
            self._check_edges(edge_type, name)  # here only, not in each process that receives the sampler
        self._matrices()
        self._fanouts()

    def set_epoch(self, epoch: int) -> None:
        """Makes the samples of the same batches differ from those of other epochs, also in workers that are running.

        A loader that shuffles has other batches in each epoch and does not need it.
        """
        self._epoch[0] = checks.check_integer("epoch", epoch, 0, 2**63 - 1)

    @property
    def edge_permutation(self) -> Any:
        """The positions of edges in the given graph, by those in the CSC matrix; a dict where edges have types.

        PyTorch Geometric's class names the types of backward samples by their reverse, where loaders do not find them.
        """
        if self.is_hetero and self.sample_direction == "backward":
            orders: Any = self.perm
            return {self.to_restored_edge_type[edge_type]: order for edge_type, order in orders.items()}
        return self.perm

    def __getstate__(self) -> dict[str, Any]:
        tables = NodeTablePool(self._sizes())
        return {**self.__dict__, "_tables": tables, "_cached": None}  # each process makes its tables and NumPy views

    def _sample(
        self, seed: Tensor | Mapping[str, Tensor], seed_time: Any = None, **kwargs: Any
    ) -> pyg.SamplerOutput | pyg.HeteroSamplerOutput:
        """Samples around seed nodes, by type where there are several. The hook of PyTorch Geometric's class."""
        seeds = {NODE: seed} if isinstance(seed, Tensor) else dict(seed)
        times = {NODE: seed_time} if isinstance(seed_time, Tensor) else seed_time
        ids = {node_type: self._checked(node_type, nodes) for node_type, nodes in seeds.items()}
        matrices, latest = self._matrices(), self.temporal_strategy == "last"
        options = DrawOptions(bool(self.replace), latest, self.num_threads or torch.get_num_threads())
        with self._numberings(ids) as numberings:
            times = self._seed_times(ids, times)
            found = sample(matrices, numberings, self._fanouts(), self._key(ids), times, options, self._expected)
            self._expected = {edge_type: len(edges.row) * 9 // 8 for edge_type, edges in found.items()}
            if self.subgraph_type == SubgraphType.induced:
                found = induce(matrices, numberings, options)
            output = self._output(numberings, found)
        return _homogeneous(output) if isinstance(seed, Tensor) else output

    def _key(self, seeds: Mapping[str, Ids]) -> int:
        """A 64-bit hash of (seed, epoch, ids of the seed nodes), from which the random numbers of the sample follow."""
        key = numpy.uint64(self.seed % 2**64)
        for numbers in (self._epoch.numpy(), *seeds.values()):
            key = kernels.key_of(numpy.uint64(key), numbers)
        return int(key)

    def _checked(self, node_type: str, nodes: Tensor) -> Ids:
        if node_type not in self._sizes():
            known = ", ".join(self._sizes())
            raise ConfigurationError(f"the graph has no nodes of type {node_type!r}; it has {known}")
        checks.check_seeds(nodes, self._sizes()[node_type], node_type)
        return nodes.to("cpu", torch.int64).contiguous().numpy()

    @contextmanager
    def _numberings(self, seeds: Mapping[str, Ids]) -> Iterator[dict[str, Numbering]]:
        """Numberings by type of node, with the seeds; valid within the ``with`` block."""
        none = numpy.empty(0, numpy.int64)
        if not self.disjoint:
            with self._tables.borrow() as tables:
                yield {node_type: Numbering(seeds.get(node_type, none), table) for node_type, table in tables.items()}
            return
        sizes, first_seed = self._sizes(), 0
        disjoint: dict[str, Numbering] = {}
        for node_type in dict.fromkeys([*seeds, *sizes]):
            own = seeds.get(node_type, none)
            disjoint[node_type] = DisjointNumbering(own, sizes[node_type], first_seed)
            first_seed += len(own)
        yield disjoint

    def _seed_times(self, seeds: Mapping[str, Ids], times: Mapping[str, Tensor] | None) -> NDArray | None:
        """The time of each seed, over all types: ``times``, else that of the seed node; None if edges have no times."""
        if not self.is_temporal:
            return None
        if times is None:
            own: dict[str, Any] = self.node_time if isinstance(self.node_time, dict) else {NODE: self.node_time}
            if any(own.get(node_type) is None for node_type in seeds):
                raise ConfigurationError("edges have times, so each seed needs one: pass input_time to the loader")
            return numpy.concatenate([_array(own[node_type])[nodes] for node_type, nodes in seeds.items()])
        return numpy.concatenate([_array(times[node_type]) for node_type in seeds])

    def _sizes(self) -> dict[str, int]:
        """The number of nodes of each type, sorted: PyTorch Geometric lists types of a graph store in random order."""
        sizes: Any = self.num_nodes
        return dict(sorted(sizes.items())) if isinstance(sizes, dict) else {NODE: sizes}

    def _fanouts(self) -> dict[EdgeType, list[int]]:
        """The numbers of neighbors by type of edge and hop."""
        values: Any = self.num_neighbors.values
        if isinstance(values, dict) and not self.is_hetero:
            raise ConfigurationError("num_neighbors is a dict, but the graph has one type of edges; pass a list")
        for by_hop in values.values() if isinstance(values, dict) else [values]:
            checks.check_fanouts(by_hop)
        try:
            values = self.num_neighbors.get_mapped_values(self.edge_types if self.is_hetero else None)
        except ValueError as error:  # of types that do not exist, or have no or too few numbers
            raise ConfigurationError(f"num_neighbors: {error}") from None
        return {self.to_edge_type[name]: v for name, v in values.items()} if self.is_hetero else {EDGE: values}

    def _edge_names(self) -> dict[EdgeType, str | None]:
        """The name of each type of edge in PyTorch Geometric's dicts, None without types.

        Sorted by type of edge: their order is part of the sample, and that of a graph store is random.
        """
        return {kind: self.to_rel_type[kind] for kind in sorted(self.edge_types)} if self.is_hetero else {EDGE: None}

    def _matrices(self) -> dict[EdgeType, EdgeMatrix]:
        """Type of edge -> its ``EdgeMatrix``, made once in each process.

        Copies only what a kernel cannot use as it is; narrowed ids replace ``row``.
        """
        if self._cached is None:
            self._cached = {edge_type: self._matrix(edge_type, name) for edge_type, name in self._edge_names().items()}
        return self._cached

    def _check_edges(self, edge_type: EdgeType, name: str | None) -> None:
        """ConfigurationError if the edges of one type or their times are damaged."""
        indptr, indices = self._csc(name)
        num_sources, num_targets = self._sizes()[edge_type[0]], self._sizes()[edge_type[2]]
        label = "the graph" if name is None else f"the edges {edge_type}"
        checks.check_csc(label, indptr, indices, num_targets, num_sources)
        times, node_times = self._times(edge_type, name)
        if node_times is not None:
            if node_times.shape != (num_sources,):
                shape = tuple(node_times.shape)
                raise ConfigurationError(f"{label} has times of the shape {shape} for {num_sources} nodes")
            times = node_times[indices]
        if times is not None:
            checks.check_times(label, times, indptr)

    def _matrix(self, edge_type: EdgeType, name: str | None) -> EdgeMatrix:
        """The edges of one type; replaces ``row`` or ``row_dict[name]`` by the ids in the dtype for kernels."""
        indptr, indices = self._csc(name)
        sources = _narrow(indices, self._sizes()[edge_type[0]])
        if name is None:  # in place of PyTorch Geometric's own copy
            self.row = sources
        else:
            self.row_dict[name] = sources
        values = _of(self.edge_weight, name), *self._times(edge_type, name)
        arrays = (None if tensor is None else _array(tensor) for tensor in values)
        return EdgeMatrix(indptr.to(torch.int64).numpy(), sources.numpy(), *arrays)

    def _csc(self, name: str | None) -> tuple[Tensor, Tensor]:
        """Column pointers and sources of the edges of one type."""
        graph: tuple[Any, Any] = (self.colptr, self.row) if name is None else (self.colptr_dict, self.row_dict)
        indptr, indices = (_of(part, name).contiguous() for part in graph)
        return indptr, indices

    def _times(self, edge_type: EdgeType, name: str | None) -> tuple[Tensor | None, Tensor | None]:
        """(times of the edges of one type, times of the nodes of its source type); None for what is not given."""
        return _of(self.edge_time, name), _of(self.node_time, None if name is None else edge_type[0])

    def _output(
        self, numberings: Mapping[str, Numbering], found: Mapping[EdgeType, SampledEdges]
    ) -> pyg.HeteroSamplerOutput:
        backward = self.sample_direction == "backward"
        names = {
            edge_type: self.to_restored_edge_type[edge_type] if backward and self.is_hetero else edge_type
            for edge_type in found
        }
        parts: Any = (
            {names[edge_type]: torch.from_numpy(getattr(edges, part)) for edge_type, edges in found.items()}
            for part in ("row", "col", "edges")
        )
        row, col, edge = parts
        by_hop: Any = {names[edge_type]: edges.by_hop for edge_type, edges in found.items()}
        batch = {kind: one.batch() for kind, one in numberings.items() if isinstance(one, DisjointNumbering)}
        return pyg.HeteroSamplerOutput(
            node={node_type: torch.from_numpy(numbering.nodes()) for node_type, numbering in numberings.items()},
            row=col if backward else row,
            col=row if backward else col,
            edge=edge,
            batch={kind: torch.from_numpy(ids) for kind, ids in batch.items()} or None,
            num_sampled_nodes={node_type: [len(nodes) for nodes in n.by_hop] for node_type, n in numberings.items()},
            num_sampled_edges=None if self.subgraph_type == SubgraphType.induced else by_hop,
        )


def _of(values: Any, name: str | None) -> Any:
    """The value of one type; without types there is one value."""
    return values if name is None or values is None else values.get(name)


def _array(values: Tensor) -> NDArray:
    """Weights or times for a kernel: the same memory, but a copy if not contiguous or to turn 16-bit floats to 32."""
    values = values.detach().contiguous()
    return (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).numpy()


def _narrow(ids: Tensor, size: int) -> Tensor:
    """Node ids below ``size`` as int32, or as int64 if ``size`` exceeds 2**31 - 1; a copy if ``ids`` has another dtype.

    The copy is in NumPy's memory, which has huge pages, or in shared memory if ``ids`` is.
    """
    dtype = numpy.int32 if size < 2**31 else numpy.int64
    if ids.numpy().dtype == dtype:
        return ids
    narrow = torch.from_numpy(ids.numpy().astype(dtype))
    return narrow.share_memory_() if ids.is_shared() else narrow


def _homogeneous(output: pyg.HeteroSamplerOutput) -> pyg.SamplerOutput:
    """The same sample, without the dicts by type."""
    names = ("node", "row", "col", "edge", "batch", "num_sampled_nodes", "num_sampled_edges")
    values: dict[str, Any] = {name: next(iter((getattr(output, name) or {"": None}).values())) for name in names}
    return pyg.SamplerOutput(**values)


@contextmanager
def _as_with_pyg_lib() -> Iterator[None]:
    """Sets flags of ``torch_geometric.typing`` meanwhile, so that the constructor accepts weights and times without
    pyg-lib. Threads wait for each other here.
    """
    names = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")
    flags: dict[str, Any] = torch_geometric.typing.__dict__
    with _flags_lock:
        before = {name: flags[name] for name in names}
        flags.update(dict.fromkeys(names, True))
        try:
            yield
        finally:
            flags.update(before)
