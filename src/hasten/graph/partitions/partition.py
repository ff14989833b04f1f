"""Partitions of a graph: which rank owns which node. Nodes are renumbered, so that each part is a range of ids.

METIS (Karypis and Kumar 1998) finds parts of equal size with few edges between them; contiguous ranges of the old ids
are the fallback, and suffice where neighbors have ids near each other. A saved partition is a directory with two files:
``partition.json`` describes it, ``partition.safetensors`` has the ids.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hasten.core.errors import ConfigurationError
from hasten.graph.sampling.checks import check_csc, check_integer

Algorithm = Literal["auto", "metis", "ranges"]
CHECKSUM_CHUNK = 1 << 22  # ids converted to int64 at once
DESCRIPTION, IDS = "partition.json", "partition.safetensors"
FORMAT = 1
FIELDS = {"num_nodes": int, "num_parts": int, "num_edges": int, "checksum": int, "algorithm": str}


@dataclass(frozen=True)
class GraphPartition:
    """Part ``p`` owns the new ids ``offsets[p]`` to ``offsets[p + 1]`` (exclusive).

    Attributes:
        offsets: int64, of shape (parts + 1,).
        old_ids: int64, of shape (nodes,): the old id of each new id.
        num_edges: of the graph.
        checksum: of indptr and indices with their old ids, from ``array_checksum``.
        algorithm: "metis" or "ranges".
    """

    offsets: Tensor
    old_ids: Tensor
    num_edges: int
    checksum: int
    algorithm: str

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.old_ids)

    def bounds(self, part: int) -> tuple[int, int]:
        """The first new id of a part, and the id after its last. ConfigurationError if there is no such part."""
        check_integer("part", part, 0, self.num_parts - 1)
        return int(self.offsets[part]), int(self.offsets[part + 1])

    def new_ids(self) -> Tensor:
        """The new id of each old id: int64, of shape (nodes,)."""
        new_ids = torch.empty_like(self.old_ids)
        new_ids[self.old_ids] = torch.arange(len(new_ids))
        return new_ids


def partition_graph(
    indptr: Tensor, indices: Tensor, num_parts: int, algorithm: Algorithm = "auto", seed: int = 0
) -> GraphPartition:
    """Divides the nodes of a graph among ``num_parts`` ranks.

    Args:
        indptr: int64, of shape (nodes + 1,): the edges into node n are ``indptr[n]`` to ``indptr[n + 1]`` (exclusive).
        indices: int64, of shape (edges,): their sources.
        num_parts: number of ranks.
        algorithm: "metis" takes pymetis; "ranges" makes contiguous ranges of old ids; "auto" takes METIS where pymetis
            is installed, and ranges otherwise.
        seed: of METIS.

    Raises:
        ConfigurationError: the arrays are no graph, there are fewer nodes than parts, or pymetis is missing.
    """
    check_graph(indptr, indices)
    num_nodes = len(indptr) - 1
    check_integer(f"num_parts of a graph of {num_nodes} nodes", num_parts, 1, max(num_nodes, 1))
    check_integer("seed", seed)
    if algorithm not in ("auto", "metis", "ranges"):
        raise ConfigurationError(f"algorithm must be auto, metis or ranges; got {algorithm!r}")
    if algorithm == "auto":
        algorithm = "metis" if _can_import_metis() else "ranges"
    if algorithm == "metis" and num_parts > 1:
        parts = _metis(indptr, indices, num_parts, seed)
        old_ids = torch.argsort(parts, stable=True)
        sizes = torch.bincount(parts, minlength=num_parts)
    else:
        old_ids = torch.arange(num_nodes)
        sizes = (torch.arange(num_parts + 1) * num_nodes // num_parts).diff()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return GraphPartition(offsets, old_ids, len(indices), array_checksum(indptr, indices), algorithm)


def relabel_graph(partition: GraphPartition, indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The graph with the new ids.

    Returns:
        indptr and indices in the new order of the nodes, and for each edge its old position. The edges of a node keep
        their order.

    Raises:
        ConfigurationError: the partition is of another graph.
    """
    check_partition(partition, indptr, indices)
    degrees = indptr.diff()[partition.old_ids]
    new_indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    shifts = indptr[:-1][partition.old_ids] - new_indptr[:-1]
    old_positions = torch.arange(len(indices)) + torch.repeat_interleave(shifts, degrees)
    return new_indptr, partition.new_ids()[indices[old_positions]], old_positions


def take_part(partition: GraphPartition, indptr: Tensor, indices: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """(indptr, indices) of the edges into the nodes of one part of a relabeled graph; copies.

    ``indptr`` starts at 0 and has an entry per node of the part; ``indices`` has the ids of the whole graph.
    """
    first, end = partition.bounds(part)
    own = indptr[first : end + 1]
    # a copy: a view would keep all edges in memory, and change with them
    return own - own[0], indices[int(own[0]) : int(own[-1])].clone()


def edge_cut(partition: GraphPartition, indptr: Tensor, indices: Tensor) -> float:
    """The fraction of the edges of a relabeled graph whose ends belong to different parts."""
    targets = torch.repeat_interleave(torch.arange(partition.num_nodes), indptr.diff())
    ends = partition.offsets[1:]
    differ = torch.bucketize(targets, ends, right=True) != torch.bucketize(indices, ends, right=True)
    return float(differ.double().mean()) if len(indices) else 0.0


def save_partition(partition: GraphPartition, directory: str | Path) -> None:
    """Writes ``partition.json`` and ``partition.safetensors``, or replaces them, in ``directory``; creates it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    description = {"format": FORMAT} | {name: getattr(partition, name) for name in FIELDS}
    save_file({"offsets": partition.offsets, "old_ids": partition.old_ids}, directory / f"{IDS}.new")
    (directory / f"{DESCRIPTION}.new").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    for name in (IDS, DESCRIPTION):  # the description comes last: with it the partition is complete
        os.replace(directory / f"{name}.new", directory / name)


def load_partition(directory: str | Path, indptr: Tensor, indices: Tensor, num_parts: int) -> GraphPartition:
    """Reads a partition of the graph ``indptr``, ``indices`` (with its old ids) for ``num_parts`` ranks.

    Raises:
        ConfigurationError: there is no partition, it is damaged, it is of another graph or for another number of ranks.
    """
    directory = Path(directory)
    try:
        described = json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
        arrays = load_file(directory / IDS)
    except FileNotFoundError as error:
        advice = "write one with save_partition"
        raise ConfigurationError(f"{directory} has no {Path(error.filename or IDS).name}; {advice}") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigurationError(f"the partition in {directory} is damaged ({error}); make a new one") from None
    _check_files(directory, described, arrays)
    partition = GraphPartition(
        arrays["offsets"], arrays["old_ids"], described["num_edges"], described["checksum"], described["algorithm"]
    )
    if partition.num_parts != num_parts:
        advice = f"start {partition.num_parts} ranks, or make a partition for {num_parts}"
        raise ConfigurationError(f"the partition in {directory} has {partition.num_parts} parts; {advice}")
    check_partition(partition, indptr, indices)
    return partition


def _check_files(directory: Path, described: Any, arrays: dict[str, Tensor]) -> None:
    """Raises ConfigurationError unless the two files are complete and belong together."""
    complete = isinstance(described, dict) and all(isinstance(described.get(k), type_) for k, type_ in FIELDS.items())
    if not complete or described.get("format") != FORMAT or arrays.keys() != {"offsets", "old_ids"}:
        raise ConfigurationError(f"{directory} has no partition that this version of hasten reads; make a new one")
    offsets, old_ids = arrays["offsets"], arrays["old_ids"]
    are_ids = all(array.dtype == torch.int64 and array.ndim == 1 and len(array) for array in (offsets, old_ids))
    belongs = are_ids and len(offsets) == described["num_parts"] + 1 and len(old_ids) == described["num_nodes"]
    ranges = belongs and offsets[0] == 0 and offsets[-1] == len(old_ids) and bool((offsets.diff() >= 0).all())
    if not ranges or not old_ids.sort().values.equal(torch.arange(len(old_ids))):
        raise ConfigurationError(f"the partition in {directory} is damaged: its files do not fit; make a new one")


def check_partition(partition: GraphPartition, indptr: Tensor, indices: Tensor) -> None:
    """Raises ConfigurationError unless the partition was made of this graph."""
    check_graph(indptr, indices)
    made_of, given = (partition.num_nodes, partition.num_edges), (len(indptr) - 1, len(indices))
    difference = ""
    if made_of != given:
        counts = f"{made_of[0]} nodes and {made_of[1]} edges"
        difference = f": it has {counts}, this graph has {given[0]} and {given[1]}"
    elif partition.checksum != array_checksum(indptr, indices):
        difference = f", of as many nodes ({given[0]}) and edges ({given[1]})"
    if difference:
        advice = "make a partition of this graph with partition_graph"
        raise ConfigurationError(f"the partition is of another graph{difference}; {advice}")


def check_graph(indptr: Tensor, indices: Tensor, num_sources: int | None = None) -> None:
    """Raises ConfigurationError unless the arrays are a graph in CSC form.

    ``num_sources``: nodes of the whole graph, where ``indptr`` has those of a part.
    """
    for name, array in (("indptr", indptr), ("indices", indices)):
        if not isinstance(array, Tensor) or array.dtype != torch.int64:
            given = f"{type(array).__name__} of {getattr(array, 'dtype', 'no type')}"
            advice = f"pass torch.as_tensor({name}, dtype=torch.int64)"
            raise ConfigurationError(f"the graph: {name} must be a tensor of int64; got {given}; {advice}")
    num_targets = max(indptr.numel() - 1, 0)
    check_csc("the graph", indptr, indices, num_targets, num_targets if num_sources is None else num_sources)


def array_checksum(*arrays: Tensor) -> int:
    """CRC-32 of the arrays as int64, little-endian."""
    checksum = 0
    for array in arrays:
        for chunk in array.split(CHECKSUM_CHUNK):
            checksum = crc32(chunk.numpy().astype("<i8", copy=False).tobytes(), checksum)
    return checksum


def _can_import_metis() -> bool:
    try:
        import pymetis  # noqa: F401
    except ImportError:
        return False
    return True


def _metis(indptr: Tensor, indices: Tensor, num_parts: int, seed: int) -> Tensor:
    """The part of each node, int64, of shape (nodes,)."""
    try:
        import pymetis
    except ImportError:
        advice = "pip install 'hasten[graph]', or choose algorithm='ranges'"
        raise ConfigurationError(f"a partition by METIS requires pymetis; {advice}") from None
    from scipy.sparse import csr_array

    num_nodes = len(indptr) - 1
    ones = numpy.ones(len(indices), bool)
    matrix = csr_array((ones, indices.numpy(), indptr.numpy()), shape=(num_nodes, num_nodes))
    both = (matrix + matrix.T).tocoo()  # as METIS requires: every edge in both directions, once, without self loops
    keep = both.row != both.col
    clean: Any = csr_array((both.data[keep], (both.row[keep], both.col[keep])), shape=both.shape)
    graph = pymetis.CSRAdjacency(clean.indptr.astype(numpy.int64), clean.indices.astype(numpy.int64))
    _, parts = pymetis.part_graph(num_parts, adjacency=graph, options=pymetis.Options(seed=seed))
    return torch.tensor(parts, dtype=torch.int64)
