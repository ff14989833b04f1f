"""``init=meta`` and ``balance=memory``: the same training, and no rank ever holds the full model."""

import os
import subprocess
import sys
import warnings

import pytest
from torch import nn

from hasten.core.errors import ConfigurationError, ProgressWarning
from hasten.distributed.process_group import init_process_group
from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.engine.train import train
from helpers import rank_tasks, tower_tasks
from helpers.assertions import CLOSE, farthest, losses
from helpers.markers import first_quick
from helpers.ranks import free_port, interrupted_early, resumed_run, run_ranks, training_of

MEGABYTE = 2**20


def initialised_tower():
    """Weights that are initialized twice, and random numbers that are drawn before the data order."""

    def model():
        made = tower_tasks.Tower(dropout=0.0)
        made.apply(lambda part: nn.init.trunc_normal_(part.weight, std=0.3) if isinstance(part, nn.Linear) else None)
        return made.double()

    return tower_tasks.tower(model=model)


STRATEGIES = [
    ("pipeline:balance=memory", 2),
    ("zero:stage=3,init=meta", 2),
    ("pipeline:balance=memory", 4),
    ("pipeline:balance=memory,degree=2,split_sizes=2-3", 4),
    ("pipeline:balance=memory,schedule=interleaved", 2),
    ("zero:stage=2,hybrid_shard_size=2,init=meta", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), first_quick(STRATEGIES, 2))
def test_meta_init_trains_like_one_process(tmp_path, strategy, world):
    train(initialised_tower(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, training_of, initialised_tower, strategy, tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "single"), rel=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("then", ["ddp", "pipeline:balance=memory"])
def test_run_resumes_from_a_sharded_checkpoint(tmp_path, then):
    make = tower_tasks.tower_with_a_mask
    train(make(), device="cpu", out=tmp_path / "single")
    run_ranks(2, interrupted_early, make, tmp_path / "shared", "pipeline:balance=memory")
    answers = run_ranks(2, resumed_run, make, tmp_path / "shared", then)
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
def test_methods_change_a_model_on_the_meta_device(tmp_path):
    recipe = "activation_checkpointing + gradient_clipping:max_norm=0.1"
    train(tower_tasks.tower(), recipe, device="cpu", out=tmp_path / "single")
    answers = run_ranks(2, training_of, tower_tasks.tower, f"pipeline:balance=memory + {recipe}", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


def test_memory_of_each_stage_is_reported():
    lines, others = run_ranks(2, messages_while_building)
    assert len(lines) == 2 and not others
    assert all(
        "% of the weights, " in line and " MB with gradients, Adam state and activations" in line for line in lines
    )


def messages_while_building(rank: int) -> list[str]:
    with init_process_group("cpu") as ranks, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(tower_tasks.tower(), [make_method("pipeline", {"balance": "memory"})], ranks=ranks)
    return [str(each.message) for each in caught if isinstance(each.message, ProgressWarning)]


def looking_tower():
    def model():
        made = tower_tasks.Tower().double()
        assert made.first.weight.norm() > 0
        return made

    return tower_tasks.tower(model=model)


@pytest.mark.parametrize(
    ("strategy", "make", "message"),
    [
        ("pipeline:balance=memory", looking_tower, "the model reads values while it is built"),
        ("pipeline:balance=memory", rank_tasks.tied, "stages 1 and 2 both use 0.weight; untie it"),
        (
            "pipeline:balance=memory,split_sizes=3-3",
            tower_tasks.tower,
            "split_sizes=3-3 must be 2 lengths that make up the chain of 5",
        ),
        ("pipeline:balance=banana", tower_tasks.tower, "balance must be one of time, memory"),
        ("zero:stage=3,init=meta", looking_tower, "the model reads values while it is built"),
        ("zero:stage=1,init=meta", tower_tasks.tower, "zero:init=meta is for stages 2 and 3"),
    ],
)
def test_model_that_cannot_be_initialized_on_meta_is_refused(strategy, make, message):
    answers = run_ranks(2, training_of, make, strategy, None)
    assert all(isinstance(answer, ConfigurationError) and message in str(answer) for answer in answers), answers


LAYERS, WIDTH = 8, 2048  # of 16 MB each

MEASURED = f"""
import re, sys, threading, time
import torch, torch.distributed.pipelining, torch.distributed.tensor, torch.fx  # what a run would import
from torch import nn
from hasten import Task
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_methods
from hasten.engine.plan import build
from hasten.distributed.process_group import init_process_group

def allocated():  # resident, without the pages of libraries, which come and go with what other processes need
    return int(re.search(r"RssAnon:\\s*(\\d+) kB", open("/proc/self/status").read()).group(1)) >> 10

def on_progress():
    while True:
        sizes.append(allocated())
        time.sleep(0.001)

task = Task(
    model=lambda: nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))),
    train_data=[(torch.zeros({WIDTH}), torch.zeros({WIDTH}))] * 8, batch_size=8, loss=nn.functional.mse_loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
methods = make_methods(Recipe.coerce(sys.argv[1]))
with init_process_group("cpu", 60) as ranks:
    sizes = [allocated()]
    threading.Thread(target=on_progress, daemon=True).start()
    build(task, methods, ranks=ranks)
    ranks.any(False)  # all end together
print(max(sizes) - sizes[0])
"""


def most_while_building(strategy: str, world: int) -> list[int]:
    """Returns the largest additional memory in MB of each of that many fresh processes while a run is built."""
    usual = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", MEASURED, strategy],
            env=os.environ
            # freed tensors, as those above 32 MB, are returned to the system at once
            | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(MEGABYTE)}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | {name: str(value) for name, value in usual.items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return [int(each) for each in outputs]


@pytest.mark.slow
def test_no_process_holds_the_full_model():
    layer = WIDTH**2 * 4 / MEGABYTE
    model_megabytes, slack = LAYERS * layer, 30
    own = most_while_building("pipeline:balance=memory", 4)
    assert max(own) < model_megabytes / 4 + layer + slack, own
    everything = most_while_building("pipeline:split_sizes=2-2-2-2", 4)
    assert min(everything) > 0.95 * model_megabytes, everything  # 128.0 MB of weights are seen as 128 MB or 129
    shares = most_while_building("zero:stage=3,init=meta", 4)
    assert max(shares) < model_megabytes / 4 + layer + slack, shares
