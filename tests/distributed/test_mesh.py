"""The device mesh: replicas of the model, pipeline stages of a replica, tensor-parallel shards of a stage."""

from types import SimpleNamespace

import pytest
import torch

from hasten.core.errors import ConfigurationError
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.run_context import ParallelContext, RunContext
from hasten.distributed.mesh import assign_mesh_dim


def mesh_shape(world: int, shards: int | None, stages: int | None, stages_first: bool = False) -> tuple[int, int, int]:
    run = RunContext(torch.device("cpu"), None, parallel=ParallelContext(ProcessGroupInfo(world_size=world)))
    asked = [("tp", "cut", shards), ("pp", "row", stages)]
    for dimension, name, degree in asked[::-1] if stages_first else asked:
        if degree is not None:
            assign_mesh_dim(SimpleNamespace(name=name, degree=degree), run, dimension)
    return world // run.parallel.model_parallel_size, run.parallel.pp_size, run.parallel.tp_size


@pytest.mark.parametrize(
    ("world", "shards", "stages", "expected"),
    [
        (4, None, None, (4, 1, 1)),
        (4, 0, None, (1, 1, 4)),
        (4, 2, None, (2, 1, 2)),
        (6, None, 3, (2, 3, 1)),
        (6, None, 0, (1, 6, 1)),
        (4, 2, 2, (1, 2, 2)),
        (4, 2, 0, (1, 2, 2)),
        (8, 0, 2, (1, 2, 4)),
        (8, 2, 2, (2, 2, 2)),
        (6, 2, 0, (1, 3, 2)),
        (12, 3, 2, (2, 2, 3)),
    ],
)
def test_mesh_has_the_requested_sizes(world, shards, stages, expected):
    assert mesh_shape(world, shards, stages) == mesh_shape(world, shards, stages, stages_first=True) == expected


@pytest.mark.parametrize(
    ("world", "shards", "stages", "message"),
    [
        (4, 0, 0, "cut and row would each take all 4 processes; give one of them a degree, such as row:degree=2"),
        (4, 4, 0, "cut:degree=4 and row do not fit 4 processes"),
        (
            8,
            4,
            4,
            "cut:degree=4 and row:degree=4 do not fit 8 processes: each takes 2 or more, and their product"
            " has to divide the number of processes",
        ),
        (12, 2, 4, "cut:degree=2 and row:degree=4 do not fit 12 processes"),
        (4, 3, 0, "cut:degree=3 does not divide 4 processes; take 2 or 4"),
        (4, 2, 1, "cut:degree=2 and row:degree=1 do not fit 4 processes"),
    ],
)
def test_mesh_sizes_that_do_not_fit_raise(world, shards, stages, message):
    with pytest.raises(ConfigurationError, match=message):
        mesh_shape(world, shards, stages)
