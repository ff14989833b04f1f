"""Whole runs on an NVIDIA GPU: killed and resumed, and with a process group of one; docs/gpu.md lists the steps."""

import os
import random
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import hasten
from hasten.core.errors import RunInterrupted
from hasten.testing import tasks
from helpers.ranks import free_port

pytestmark = pytest.mark.gpu

RECIPE = "float16 + cuda_graph + prefetch_to_device"
RESUMED = """
import sys, warnings, torch
torch.use_deterministic_algorithms(True, warn_only=True)
warnings.simplefilter("ignore")
import hasten
from hasten.testing import tasks
hasten.train(tasks.transformer(dropout=0.1, epochs=40), sys.argv[1], out=sys.argv[2], resume=True, device="cuda",
             checkpoint_seconds=0)
"""


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """Step 18: 10 kills."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rng, command = random.Random(0), [sys.executable, "-c", RESUMED, RECIPE]
    assert subprocess.run([*command, str(tmp_path / "whole")]).returncode == 0
    for _ in range(10):
        process = subprocess.Popen([*command, str(tmp_path / "killed")])
        time.sleep(6 + 4 * rng.random())  # a process needs seconds until it trains
        process.kill()
        process.wait()
    assert subprocess.run([*command, str(tmp_path / "killed")]).returncode == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]


def test_checkpoint_of_a_gpu_holds_the_weights_of_its_step(tmp_path):
    """The copy runs on a side stream while the next gradients are computed."""
    task = tasks.transformer(epochs=3)
    hasten.train(task, out=tmp_path / "whole", device="cuda", checkpoint_seconds=0)

    def stop(records):
        if records[-1]["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        hasten.train(task, out=tmp_path / "stopped", device="cuda", checkpoint_seconds=0, observers=[stop])
    hasten.train(task, out=tmp_path / "stopped", device="cuda", resume=True, checkpoint_seconds=0)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert files[0] == files[1]


def test_process_group_of_one_gpu_serves_all_strategies(monkeypatch):
    """Step 20. What takes two GPUs is in docs/gpu.md."""
    for name, value in {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        dist.new_group(backend="gloo")
        mesh = init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
        assert mesh.size() == 1
        batch = torch.randn(8, 4, device="cuda")
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda())
        ddp(batch).sum().backward()
        sharded = nn.Linear(4, 2)
        fully_shard(sharded, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
        sharded(batch).sum().backward()
        assert all(weight.grad is not None for weight in (*ddp.parameters(), *sharded.parameters()))
    finally:
        dist.destroy_process_group()


FAILS_WITH_NCCL = """
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
raise RuntimeError("the rank fails")
"""


def test_process_that_fails_with_a_live_nccl_group_ends_by_itself():
    """F25: after an error the group is not destroyed, because NCCL would wait for ranks that wait for this one."""
    variables = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", FAILS_WITH_NCCL]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the rank fails" in done.stderr, done.stderr
