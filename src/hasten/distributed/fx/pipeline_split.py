"""Splits a model into consecutive segments, between which exactly one tensor is passed on.

torch.fx finds the split points; ``stage_balance.py`` chooses among them. A stage shares the modules of the model that
it consists of. What a rank does not need of the model is on the meta device.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from hasten._torch_compat import is_view
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.run_context import RunContext
from hasten.core.types import Batch
from hasten.distributed.deferred_init import module_tensors, replace_tensors
from hasten.distributed.dtensor_state import to_local
from hasten.distributed.fx.tracing import eval_mode, is_random_op, is_shape_value, try_trace
from hasten.utils import batch as batches

EXPECTED = "an nn.Sequential, or a forward() that torch.fx can trace, with places where exactly one tensor is passed on"
Segment = list[Node]


def find_split_points(
    model: nn.Module, stages: int, peek_batch: Callable[[], Batch] | None = None
) -> tuple[torch.fx.Graph, list[Segment]]:
    """The graph of a model and its segments: lists of nodes with parameters, between which one tensor is passed on.

    With ``peek_batch`` a batch is run through sharded layers, because DTensors between them cannot be passed on; then
    all ranks must call this. ConfigurationError if there are fewer segments than ``stages``.
    """
    longest: list[Segment] = []
    for is_leaf in (lambda module: type(module) is not nn.Sequential, None):
        graph = try_trace(model, is_leaf)
        if graph is None or any(map(is_random_op, graph.nodes)):
            continue
        inputs = [node for node in graph.nodes if node.op == "placeholder" and node.users]
        if len(inputs) == 1:
            segments = _segments(model, graph, _sharded_values(model, graph, peek_batch))
            if len(segments) >= stages:
                return graph, segments
            longest = max(longest, segments, key=len)
    found = f"a chain of {len(longest)} that have weights" if longest else "no such chain"
    hint = f"it looked for {EXPECTED}; other strategies shard any model"
    raise ConfigurationError(f"pipeline has {stages} stages to fill and found {found} in this model; {hint}")


def extract_stage(model: nn.Module, graph: torch.fx.Graph, segments: list[Segment]) -> torch.fx.GraphModule:
    """A module that computes the given consecutive segments and shares the model's submodules."""
    nodes = [node for segment in segments for node in segment]
    stage, copies = torch.fx.Graph(), dict[Node, Node]()
    stage_input = stage.placeholder("stage_input")

    def copy_of(node: Node) -> Node:
        if node not in copies:
            copies[node] = stage.node_copy(node) if node.op == "get_attr" else stage_input
        return copies[node]

    for node in nodes:
        copies[node] = stage.node_copy(node, copy_of)
    stage.output(stage.call_function(_contiguous_non_view, (copies[nodes[-1]],)))
    return torch.fx.GraphModule(model, stage)


def _contiguous_non_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that is no view: the zero-bubble schedule cannot free the autograd graph of a view."""
    return tensor.clone(memory_format=torch.contiguous_format) if is_view(tensor) else tensor.contiguous()


def _sharded_values(model: nn.Module, graph: torch.fx.Graph, peek_batch: Callable[[], Batch] | None) -> set[Node]:
    """The nodes whose values are DTensors, which stages cannot pass on; found by running a batch."""
    found: set[Node] = set()

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if to_local(value) is not value:
                found.add(n)
            return value

    if peek_batch is not None and any(to_local(param) is not param for param in model.parameters()):
        args, kwargs, _ = batches.split_inputs_target(peek_batch())
        value = single_tensor_input(args, kwargs)
        inputs: dict[Node, Any] = {node: value for node in graph.nodes if node.op == "placeholder"}
        with eval_mode(model), torch.no_grad():
            Recorder(model, graph=graph).run(initial_env=inputs)
    return found


def _segments(model: nn.Module, graph: torch.fx.Graph, sharded: set[Node]) -> list[Segment]:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    outputs = [node for node in graph.nodes if node.op == "output"]
    position = {node: index for index, node in enumerate([*nodes, *outputs])}
    trained = {name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.users][:1]
    segments: list[Segment] = []
    first = 0
    for index, node in enumerate(nodes):
        computed = [*inputs, *nodes[: index + 1]]
        live = {each for each in computed if any(position.get(user, -1) > index for user in each.users)}
        can_split = live == {node} and not is_shape_value(node) and node not in sharded
        if can_split or index + 1 == len(nodes):
            segment = nodes[first : index + 1]
            if segments and not (_has_params(segment, trained) and _has_params(segments[-1], trained)):
                segments[-1] += segment  # every stage has parameters to train
            else:
                segments.append(segment)
            first = index + 1
    return segments


def _has_params(nodes: Segment, trained: set[str]) -> bool:
    modules = [node.target for node in nodes if node.op == "call_module"]
    attributes = {source.target for node in nodes for source in node.all_input_nodes if source.op == "get_attr"}
    return bool(attributes & trained) or any(name.startswith(f"{module}.") for module in modules for name in trained)


def check_no_shared_weights(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Raises ``ConfigurationError`` if two stages use the same parameter."""
    owner: dict[int, int] = {}
    names = {id(param): name for name, param in model.named_parameters()}
    for index, stage in enumerate(stages, 1):
        for param in stage.parameters():
            if (other := owner.setdefault(id(param), index)) != index:
                users = f"{other} and {index} both use {names[id(param)]}; untie it"
                raise ConfigurationError(f"pipeline cannot split this model: stages {users}")


def materialize_local_stages(
    model: nn.Module, local: Sequence[nn.Module], stages: Sequence[nn.Module], keeps_unused: bool, run: RunContext
) -> list[torch.Tensor]:
    """Initializes the parameters and buffers of the ``local`` stages on the device; moves those of others to meta.

    Returns the initialized ones. Plain tensor attributes stay on every rank. With ``keeps_unused`` this rank also holds
    what no stage uses.
    """
    assert run.parallel is not None
    of_local = _registered_ids(local)
    registered = _registered_ids([model])
    wanted_ids = of_local | (registered - _registered_ids(stages)) if keeps_unused else of_local
    tensors = {id(tensor): tensor for *_, tensor in module_tensors(model)}
    wanted = [tensor for key, tensor in tensors.items() if key in wanted_ids or key not in registered]
    made = {
        id(wanted[index]): tensor.to(run.device) if id(wanted[index]) in wanted_ids else tensor
        for index, tensor in run.parallel.materialize(wanted)
    }
    replace_tensors(
        nn.ModuleList([model, *local]), lambda tensor: made[id(tensor)] if id(tensor) in made else _meta_like(tensor)
    )
    return [made[id(tensor)] for tensor in wanted if id(tensor) in wanted_ids]


def _registered_ids(modules: Sequence[nn.Module]) -> set[int]:
    return {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the full shape, even of a DTensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def single_tensor_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The only input of a model. Raises ``RunError`` if it is not exactly one tensor."""
    inputs = [*args, *kwargs.values()]
    if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
        found = f"{len(inputs)} inputs; take another strategy"
        raise RunError(f"pipeline passes one tensor through its stages, but this model has {found}")
    return inputs[0]
