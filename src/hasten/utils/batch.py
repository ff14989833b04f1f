"""Batches of any nesting: tuples, lists, mappings and dataclasses of tensors, and graphs (see ``graph_batch``).

How a batch is passed to the model and the loss::

    (x, y)                      model(x),          loss(output, y)
    (a, b, ..., y)              model(a, b, ...),  loss(output, y)
    {"labels": y, **inputs}     model(**inputs),   loss(output, y)    for a task with a loss
    {...} and loss=None         model(**batch)     the model returns its own loss, as in Transformers
    dataclass                   as the dict of its fields; with loss=None the model gets the object
    graph of PyG                model(data), or model(x=..., edge_index=..., ...) by the names of its parameters;
                                loss(output and y of the seed nodes); with loss=None the model gets the object
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from hasten.core.errors import RunError
from hasten.core.types import Batch
from hasten.utils.graph_batch import inputs_and_target, is_graph, num_seeds, of_seeds
from hasten.utils.tree import tree_leaves, tree_map

SMALL_COPY_BYTES = 2**16  # CUDA stages a smaller copy from pageable memory without waiting for the stream
TARGET_NAMES = ("labels", "label", "target", "targets", "y")


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """Returns ``batch`` with ``function`` applied to every tensor in it; other leaves stay as they are. Of a
    PackedSequence it is applied to the data.
    """
    kind = type(batch)
    if kind is tuple or kind is list:  # the usual batches in half the time of tree_map
        return kind([function(item) if type(item) is torch.Tensor else map_tensors(function, item) for item in batch])
    if kind is dict:
        return {
            key: function(item) if type(item) is torch.Tensor else map_tensors(function, item)
            for key, item in batch.items()
        }

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):  # its batch_sizes stay on the CPU, its indices lie where its data does
            data = function(leaf.data)
            indices = (index if index is None else index.to(data.device, non_blocking=True) for index in leaf[2:])
            return PackedSequence(data, leaf.batch_sizes, *indices)
        return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(map_leaf, batch)


def batch_tensors(batch: Batch) -> list[torch.Tensor]:
    """Every tensor in the batch, in order; of a PackedSequence its data."""
    items = batch.values() if type(batch) is dict else batch
    if type(batch) in (tuple, list, dict) and all(type(item) is torch.Tensor for item in items):  # fast
        return list(items)
    leaves = (leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in tree_leaves(batch))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def batch_size(batch: Batch) -> int:
    """Number of samples: the first dimension of the first tensor that is not a scalar, or the number of sequences of a
    PackedSequence; 1 without one. Of a graph, the number of its seed nodes. Tensors in lists of the batch come last:
    these may be samples.
    """
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor and (shape := batch[0].shape):
        labels = batch[-1].shape if type(batch[-1]) is torch.Tensor else ()
        if len(labels) != 1 or labels[0] == shape[0]:
            return shape[0]  # the usual case, fast
        # one label for each sample, and before them time comes first, or the tokens of all samples lie in one row
        is_time_first = shape[0] > 1 and labels == shape[1:2]
        is_bag = any(getattr(item, "shape", ())[:1] == labels for item in batch[1:-1])
        return labels[0] if is_time_first or is_bag else shape[0]
    if is_graph(batch):
        return num_seeds(batch)
    is_sequence = isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence)
    items = batch.values() if isinstance(batch, Mapping) else batch if is_sequence else [batch]
    if is_sequence and all(isinstance(item, (list, tuple)) for item in items):  # as of detection: (images, targets)
        for item in items:
            if item and all(isinstance(sample, Mapping) for sample in item):
                return len(item)
    outside_lists = (size for item in items if type(item) is not list for size in _sizes(item, _is_list))
    return next(chain(outside_lists, _sizes(batch)), 1)


def _is_list(node: Any) -> bool:
    return type(node) is list


def _sizes(batch: Batch, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[int]:
    """The first dimension of each tensor that is not a scalar, in order; of a PackedSequence, its sequences. What is
    inside of a leaf does not count.
    """
    for leaf in tree_leaves(batch, is_leaf):
        if isinstance(leaf, PackedSequence):
            yield int(leaf.batch_sizes[0])
        elif isinstance(leaf, torch.Tensor) and leaf.ndim:
            yield leaf.shape[0]


def copy_to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device. A GPU copies it while the host continues, whatever memory it lies in.

    A copy from pageable memory would wait for the steps that are queued on the GPU, unless it is small.
    """
    if device.type != "cuda":
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        is_pageable = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_pinned()
        source = tensor.pin_memory() if is_pageable and tensor.nbytes > SMALL_COPY_BYTES else tensor
        return source.to(device, non_blocking=True)  # torch keeps the pinned memory until the copy is done

    return map_tensors(copy, batch)


def chunk_batch(batch: Batch, count: int) -> list[Batch]:
    """The batch cut along its first dimension into at most ``count`` views of nearly equal size, none empty. Lists of
    samples are cut, too; tensors of another length and other values are in each as they are. RunError for a graph,
    whose samples share their neighbors, and for a PackedSequence, whose samples are interleaved.
    """
    total = batch_size(batch)
    count = max(1, min(count, total))
    if is_graph(batch) and count > 1:
        advice = "leave out the method that requires this"
        raise RunError(f"a graph cannot be cut into microbatches, because its nodes share their neighbors; {advice}")
    if count > 1 and any(isinstance(leaf, PackedSequence) for leaf in tree_leaves(batch)):
        advice = "pack them in the model, or leave out the method that requires this"
        raise RunError(f"a batch of packed sequences (PackedSequence) cannot be cut into microbatches; {advice}")
    edges = [total * i // count for i in range(count + 1)]

    def has_all(item: Any) -> bool:
        return isinstance(item, torch.Tensor) and item.ndim > 0 and item.shape[0] == total

    def is_list_of_samples(node: Any) -> bool:
        """Images of different sizes, or targets of detection; not the inputs of a model with several."""
        if type(node) not in (list, tuple) or len(node) != total or node is batch:
            return False
        if all(map(has_all, node)):  # inputs, unless they are as many images as each has channels
            return len({item.shape for item in node}) > 1 and node[0].ndim == 3
        return all(isinstance(item, (torch.Tensor, Mapping, str, bytes)) for item in node)

    def cut(low: int, high: int) -> Batch:
        def of_part(node: Any) -> Any:
            return node[low:high] if has_all(node) or is_list_of_samples(node) else node

        return tree_map(of_part, batch, is_list_of_samples)

    return [cut(low, high) for low, high in pairwise(edges) if high > low]


def split_inputs_target(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(positional inputs, keyword inputs, target) of a batch, for a task with a loss. RunError if the batch is no
    tuple or list of at least two items, mapping or dataclass, or has no field with one of TARGET_NAMES.
    """
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), {}, batch[-1]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise RunError(f"cannot tell input from target in a batch of type {kind}; give (input, target) or a dict")
    for name in TARGET_NAMES:
        if name in batch:
            return (), {key: value for key, value in batch.items() if key != name}, batch[name]
    names = ", ".join(map(str, batch))
    raise RunError(f"the batch has no target among {names}; name it one of {', '.join(TARGET_NAMES)}")


def call_model(model: torch.nn.Module, batch: Batch, own: bool) -> tuple[Any, Any]:
    """(output, target) of a batch; with ``own`` the model gets the target, too, and its output holds the loss."""
    if is_graph(batch):
        return _call_with_graph(model, batch, own)
    if not own:
        args, kwargs, target = split_inputs_target(batch)
        return model(*args, **kwargs), target
    if hasattr(batch, "keys"):
        return model(**batch), target_of(batch)
    return (model(*batch) if isinstance(batch, (tuple, list)) else model(batch)), target_of(batch)


def _call_with_graph(model: torch.nn.Module, graph: Any, own: bool) -> tuple[Any, Any]:
    """As ``call_model``; output and target are those of the seed nodes."""
    if own:
        return model(graph), of_seeds(getattr(graph, "y", None), graph)
    args, kwargs, target = inputs_and_target(model, graph)
    return of_seeds(model(*args, **kwargs), graph), target


def target_of(batch: Batch) -> Any:
    """The target of a batch by its name (see TARGET_NAMES); None where the batch has no such field."""
    try:
        return split_inputs_target(batch)[2]
    except RunError:
        return None
