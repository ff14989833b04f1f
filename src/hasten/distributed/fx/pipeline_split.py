"""A model as a chain: members one after the other, between which one tensor goes on and nothing else.

It can be cut where torch.fx sees it so (``cuts.py`` chooses). A stage shares the parts of the model that it is made of, and of the model that it does not
need nothing is left but names: the rest is on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx
from torch import nn

from hasten._torch_compat import is_view
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.run_context import RunContext
from hasten.distributed.deferred_init import module_tensors, replace_tensors
from hasten.distributed.dtensor_state import to_local
from hasten.distributed.fx.tracing import eval_mode, is_random_op, is_shape_value, try_trace
from hasten.utils import batch as batches

NO_CHAIN = (
    "an nn.Sequential, or a forward() that torch.fx can trace, with places where one tensor goes on and nothing else"
)


def find_split_points(model: nn.Module, stages: int, sample: Callable | None = None) -> tuple[torch.fx.Graph, list]:
    """The graph of a model, and its members: lists of nodes, each with weights, between which one tensor goes on.

    Args:
        sample: gives a batch, to see what is shared out between layers that were cut; all ranks have to ask at once.

    Raises:
        Refusal: there are fewer than stages.
    """
    found = []
    for is_leaf in (lambda part: type(part) is not nn.Sequential, None):
        graph = try_trace(model, is_leaf)
        if graph is None or any(map(is_random_op, graph.nodes)):
            continue
        given = [node for node in graph.nodes if node.op == "placeholder" and node.users]
        if len(given) == 1:
            found = max(found, members := _segments(model, graph, _shared_out(model, graph, sample)), key=len)
            if len(members) >= stages:
                return graph, members
    told = f"a chain of {len(found)} that have weights" if found else "no such chain"
    raise ConfigurationError(
        f"pipeline has {stages} stages to fill and found {told} in this model; it looked for {NO_CHAIN}; other strategies shard any model"
    )


def extract_stage(model: nn.Module, graph: torch.fx.Graph, members: list) -> torch.fx.GraphModule:
    """Some neighbouring members as a module of their own, which shares the model's parts."""
    nodes = [node for member in members for node in member]
    copied, new = torch.fx.Graph(), {}
    given = copied.placeholder("given")

    def known(node: torch.fx.Node) -> torch.fx.Node:
        if node not in new:
            new[node] = copied.node_copy(node) if node.op == "get_attr" else given
        return new[node]

    for node in nodes:
        new[node] = copied.node_copy(node, known)
    result = new[nodes[-1]]
    copied.output(copied.call_function(_handed_on, (result,)))
    return torch.fx.GraphModule(model, copied)


def _handed_on(tensor: torch.Tensor) -> torch.Tensor:
    """As it has to be to be sent, and no view: zero_bubble cannot let go of the graph of one."""
    return tensor.clone(memory_format=torch.contiguous_format) if is_view(tensor) else tensor.contiguous()


def _shared_out(model: nn.Module, graph: torch.fx.Graph, sample: Callable | None) -> set[torch.fx.Node]:
    """The nodes whose tensors no rank has whole, nor as a tensor of its own: no stage can hand them on."""
    found: set[torch.fx.Node] = set()

    class Watching(torch.fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            if to_local(value) is not value:
                found.add(node)
            return value

    if sample is not None and any(to_local(weight) is not weight for weight in model.parameters()):
        inputs, named, _ = batches.split_inputs_target(sample())
        given = dict.fromkeys(
            (node for node in graph.nodes if node.op == "placeholder"), single_tensor_input(inputs, named)
        )
        with eval_mode(model), torch.no_grad():
            Watching(model, graph=graph).run(initial_env=given)
    return found


def _segments(model: nn.Module, graph: torch.fx.Graph, shared_out: set[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    after = {node: place for place, node in enumerate([*nodes, *(node for node in graph.nodes if node.op == "output")])}
    trained = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad}
    start = next((node for node in graph.nodes if node.op == "placeholder" and node.users), None)
    members, begun = [], 0
    for place, node in enumerate(nodes):
        living = {
            each
            for each in (start, *nodes[: place + 1])
            if any(after[user] > place for user in each.users if user in after)
        }
        if place + 1 == len(nodes) or (living == {node} and not is_shape_value(node) and node not in shared_out):
            member = nodes[begun : place + 1]
            if members and not (_weights_of(member, trained) and _weights_of(members[-1], trained)):
                members[-1] += member  # a stage has something to train
            else:
                members.append(member)
            begun = place + 1
    return members


def _weights_of(nodes, trained: set[str]) -> bool:
    used = [node.target for node in nodes if node.op == "call_module"]
    used_directly = {each.target for node in nodes for each in node.all_input_nodes if each.op == "get_attr"}
    return bool(used_directly & trained) or any(name.startswith(f"{target}.") for target in used for name in trained)


def check_no_shared_weights(model: nn.Module, parts: list) -> None:
    owner: dict[int, int] = {}
    names = {id(weight): name for name, weight in model.named_parameters()}
    for number, part in enumerate(parts):
        for weight in part.parameters():
            if (other := owner.setdefault(id(weight), number)) != number:
                raise ConfigurationError(
                    f"pipeline cannot cut this model: stages {other + 1} and {number + 1} both use {names[id(weight)]}; untie it"
                )


def materialize_local_stages(
    model: nn.Module, own: list, parts: list, keeps_unused: bool, run: RunContext
) -> list[torch.Tensor]:
    """Leaves in a model the weights and buffers of our own parts, on our device, and what no part uses where ``keeps_unused``; returns them.

    The others are on the meta device, which holds nothing. Tensors that are neither weights nor buffers stay with all.
    """
    of_own, used = (
        {id(tensor) for part in some for tensor in (*part.parameters(), *part.buffers())} for some in (own, parts)
    )
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept = of_own | (registered - used) if keeps_unused else of_own
    wanted = list(
        {
            id(tensor): tensor
            for *_, tensor in module_tensors(model)
            if id(tensor) in kept or id(tensor) not in registered
        }.values()
    )
    made = {
        id(wanted[number]): tensor.to(run.device) if id(wanted[number]) in kept else tensor
        for number, tensor in run.parallel.materialize(wanted)
    }
    replace_tensors(
        nn.ModuleList([model, *own]), lambda tensor: made[id(tensor)] if id(tensor) in made else _nothing_like(tensor)
    )
    return [made[id(tensor)] for tensor in wanted if id(tensor) in kept]


def _nothing_like(tensor: torch.Tensor) -> torch.Tensor:
    """On the meta device and whole, even of a tensor that is shared out."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def single_tensor_input(inputs: tuple, named: dict) -> torch.Tensor:
    given = [*inputs, *named.values()]
    if len(given) != 1 or not isinstance(given[0], torch.Tensor):
        raise RunError(
            f"pipeline passes one tensor through its stages, and this model is given {len(given)} things; take another strategy"
        )
    return given[0]
