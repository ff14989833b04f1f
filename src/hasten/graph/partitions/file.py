"""Stores a partition in a directory: ``partition.json`` describes it, ``partition.safetensors`` has the ids."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hasten.core.errors import ConfigurationError
from hasten.graph.partitions.partition import GraphPartition, check_partition

DESCRIPTION, IDS = "partition.json", "partition.safetensors"
FORMAT = 1
FIELDS = {"num_nodes": int, "num_parts": int, "num_edges": int, "checksum": int, "algorithm": str}


def save_partition(partition: GraphPartition, directory: str | Path) -> None:
    """Writes the two files; a partition that lies there is replaced."""
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
