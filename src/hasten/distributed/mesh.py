"""The device mesh of a run: model replicas ("dp"), pipeline stages of a replica ("pp"), shards of a stage ("tp")."""

import math
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hasten.core.errors import ConfigurationError
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn
from hasten.distributed.collectives import all_reduce_gradients


def assign_mesh_dim(method: Method, run: RunContext, dimension: str) -> None:
    """Gives a mesh dimension ("pp" or "tp") to a method, whose ``degree`` is its size; 0: all ranks that others leave.

    Sets model_parallel_size and pp_size. ConfigurationError if the degrees do not fit the ranks, or two request all.
    """
    parallel = run.parallel
    assert parallel is not None
    parallel.mesh_dim_owner[dimension] = method
    world_size = parallel.ranks.world_size
    owners: Any = parallel.mesh_dim_owner.values()
    requested: dict[str, int] = {owner.name: owner.degree for owner in owners}
    if len(requested) == 1:
        name, degrees = method.name, [requested[method.name] or world_size]
        if degrees == [1]:
            effect = "leaves every process a whole copy: take a degree of 2 or more"
            raise ConfigurationError(f"{name}:degree=1 {effect}, or leave {name} out")
        if world_size % degrees[0]:
            divisors = " or ".join(str(size) for size in range(2, world_size + 1) if world_size % size == 0)
            effect = f"does not divide {world_size} processes; take {divisors}"
            raise ConfigurationError(f"{name}:degree={degrees[0]} {effect}")
    else:
        left = world_size // math.prod(degree for degree in requested.values() if degree)
        degrees = [degree or left for degree in requested.values()]
        names = " and ".join(f"{name}:degree={degree}" if degree else name for name, degree in requested.items())
        if not any(requested.values()):
            remedy = f"give one of them a degree, such as {method.name}:degree=2"
            raise ConfigurationError(f"{names} would each take all {world_size} processes; {remedy}")
        if min(degrees) < 2 or world_size % math.prod(degrees):
            rule = "each takes 2 or more, and their product has to divide the number of processes"
            raise ConfigurationError(f"{names} do not fit {world_size} processes: {rule}")
    parallel.model_parallel_size = math.prod(degrees)
    parallel.pp_size = dict(zip(parallel.mesh_dim_owner, degrees, strict=True)).get("pp", 1)


def get_device_mesh(run: RunContext) -> DeviceMesh:
    """The mesh with the dimensions "dp", "pp" and "tp"; built at the first call, by all ranks."""
    parallel = run.parallel
    assert parallel is not None
    if parallel.device_mesh is None:
        shape = (parallel.ranks.world_size // parallel.model_parallel_size, parallel.pp_size, parallel.tp_size)
        parallel.device_mesh = init_device_mesh(run.device.type, shape, mesh_dim_names=("dp", "pp", "tp"))
    return parallel.device_mesh


def reduce_over_replicas(grad_transform: StepFn, run: RunContext) -> StepFn:
    """``grad_transform``, followed by averaging the gradients over the model replicas, if there are several."""
    parallel = run.parallel
    assert parallel is not None
    if parallel.model_parallel_size == run.ranks.world_size:
        return grad_transform
    params = [param for param in run.unwrapped_model.parameters() if param.requires_grad and not param.is_meta]
    replicated = [param for param in params if param in parallel.replicated_params]
    local = [param for param in params if param not in parallel.replicated_params]
    replicas = get_device_mesh(run)["dp"].get_group()

    def reduce() -> None:
        grad_transform()
        # separately: the position of a gradient in a message determines the order of its summation
        all_reduce_gradients(replicated, replicas)
        all_reduce_gradients(local, replicas)

    return reduce
