"""Graphs of PyTorch Geometric as batches: the only module of the engine that knows of them.

A batch is a ``Data`` or ``HeteroData`` object, as ``NodeLoader`` and ``NeighborLoader`` return them. Its samples are
its seed nodes, the nodes whose labels are trained on: the first ``batch_size`` nodes of a sampled graph, the nodes
``seed_nodes`` (int64) of a full one, otherwise all nodes; of a ``Batch`` of whole graphs, the graphs.

PyTorch Geometric is not imported here. A process that has not imported it has none of its objects.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch

from hasten.core.errors import RunError

USUAL_FIELDS = ("x", "edge_index")  # what a model gets whose parameters cannot be read
FIELD_OF_PARAMETER = {  # where a parameter of PyG's models has another name than the field of a sampled graph
    "num_sampled_nodes_per_hop": "num_sampled_nodes",
    "num_sampled_edges_per_hop": "num_sampled_edges",
}
WRAPPED = ("_orig_mod", "module")  # where a compiled or otherwise wrapped model has the model itself


def is_graph(value: Any) -> bool:
    """Whether a value is a ``Data``, ``HeteroData`` or ``Batch`` of PyTorch Geometric."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and isinstance(value, module.BaseData)


def map_graph(function: Callable[[Any], Any], graph: Any) -> Any:
    """A copy of the graph with ``function`` applied to every field; the graph itself stays as it is."""
    mapped = copy.copy(graph)
    for store in mapped.stores:
        for key, value in list(store.items()):
            store[key] = function(value)
    return mapped


def num_seeds(graph: Any) -> int:
    """Number of samples of a batch: its seed nodes, or its graphs."""
    if hasattr(graph, "num_graphs"):
        return graph.num_graphs
    for store in graph.stores:
        if "seed_nodes" in store:
            return len(store["seed_nodes"])
        if "batch_size" in store:
            return int(store["batch_size"])
    return graph.num_nodes


def inputs_and_target(model: torch.nn.Module, graph: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(positional inputs, keyword inputs, labels of the seed nodes) of a graph, for a task with a loss.

    A model whose ``forward`` has one parameter gets the graph; any other gets the fields that its parameters name.
    RunError if the graph has no such field, no labels ``y``, or several types of nodes.
    """
    if not hasattr(graph, "y") or graph.y is None or len(graph.stores) != 1:
        advice = "Task(step=) and Task(evaluate=) can train on any graph"
        raise RunError(f"a task with a loss requires a graph with one type of nodes and their labels y; {advice}")
    parameters = _parameters(model)
    target = of_seeds(graph.y, graph)
    if parameters is not None and len(parameters) == 1:
        return (graph,), {}, target
    return (), dict(_fields(graph, parameters or dict.fromkeys(USUAL_FIELDS, True))), target


def of_seeds(output: Any, graph: Any) -> Any:
    """The rows of the seed nodes, of a tensor with a row for each node; anything else as it is.

    A model that is given the numbers of sampled nodes may leave out the last ones, but never seed nodes.
    """
    if not isinstance(output, torch.Tensor) or not output.ndim or hasattr(graph, "num_graphs"):
        return output
    if "seed_nodes" in graph:
        return output[graph.seed_nodes] if output.shape[0] == graph.num_nodes else output
    return output[: num_seeds(graph)]


def collate_of(loader: Any) -> Callable[[list[Any]], Any]:
    """``(list of samples) -> batch`` of a DataLoader.

    The loaders of PyTorch Geometric sample in ``collate_fn`` and fetch features after it; called they do both.
    """
    return loader if graph_sampler(loader) is not None else loader.collate_fn


def sampling_and_fetch(collate: Any) -> tuple[Callable[[list[Any]], Any], Callable[[Any], Any]] | None:
    """(node indices -> sampled nodes, sampled nodes -> graph with features and labels): the two parts of what a loader
    of sampled nodes does as a collate function. None for any other collate function.
    """
    sampler = getattr(collate, "node_sampler", None)
    if sampler is None:
        return None
    return (lambda indices: sampler.sample_from_nodes(collate.input_data[indices])), collate.filter_fn


def set_epoch(loader: Any, epoch: int) -> None:
    """Calls ``set_epoch(epoch)`` of the graph sampler of a DataLoader, or of its collate function, if it has one."""
    for owner in (loader, getattr(loader, "collate_fn", None)):
        sampler = graph_sampler(owner)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def graph_sampler(loader: Any) -> Any:
    """The sampler of a loader of PyTorch Geometric; None for any other."""
    return getattr(loader, "node_sampler", None) or getattr(loader, "link_sampler", None)


def _fields(graph: Any, parameters: dict[str, bool]) -> Iterator[tuple[str, Any]]:
    """Yields (parameter, value) of the parameters (name -> whether it is required) that name a field of the graph;
    RunError if it lacks one that is required.
    """
    for name, required in parameters.items():
        field = FIELD_OF_PARAMETER.get(name, name)
        value = graph.stores[0].get(field)
        if value is not None:
            yield name, value
        elif required:
            fields = ", ".join(sorted(graph.keys())) + "; add the field, or give the parameter a default"
            raise RunError(f"the model's forward requires {name}, but the graph has only {fields}")


def _parameters(model: torch.nn.Module) -> dict[str, bool] | None:
    """Parameters of a model's ``forward``: name -> whether it is required. None if it accepts any."""
    found = _parameters_of(type(model).forward)
    for name in WRAPPED:
        inner = getattr(model, name, None)
        if found is None and isinstance(inner, torch.nn.Module):
            return _parameters(inner)
    return found


@cache
def _parameters_of(forward: Callable[..., Any]) -> dict[str, bool] | None:
    parameters = list(signature(forward).parameters.values())[1:]  # without self
    if any(p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for p in parameters):
        return None
    return {p.name: p.default is Parameter.empty for p in parameters}
