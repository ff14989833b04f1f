"""Measurements on an NVIDIA GPU: processes, phases, self-comparisons; docs/gpu.md lists the steps that these are."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from hasten.benchmarking.arm import Arm
from hasten.benchmarking.compare import compare
from hasten.benchmarking.gpu_state import gpu_summary
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import import_path
from hasten.profiling.diagnose import diagnose
from hasten.profiling.probe import Probe
from hasten.profiling.time_phases import TimePhases
from hasten.testing import tasks
from hasten.tuning.largest_batch import fitting_factor

pytestmark = pytest.mark.gpu

LIBRARIES = (
    "torchvision",
    "transformers",
    "timm",
    "peft",
    "torchmetrics",
    "lightning",
    "torch_geometric",
    "bitsandbytes",
)
MAY_TOUCH_CUDA = ("cupy", "jax", "numba.cuda")
FORKED = """
import sys
try:
    __import__(sys.argv[1])
except Exception:
    sys.exit(77)
from hasten.benchmarking.fork_server import Worker
from hasten.engine.tasks import TaskRef
task = TaskRef.of("digits").to_json()
with Worker("hasten.benchmarking.arm:Arm", task=task, methods={}, device="cuda", seed=0) as arm:
    print(arm.call("build")["step"])
"""
STEPS = 10  # all of their operations fit into the queue of a GPU, about a thousand
CYCLES_PER_MS = 1_000_000  # of torch.cuda._sleep, about; the test measures it


@pytest.mark.slow
@pytest.mark.parametrize("library", [*LIBRARIES, *MAY_TOUCH_CUDA])
def test_measuring_process_uses_the_gpu_whatever_the_asking_process_has_imported(library):
    """Step 3."""
    done = subprocess.run([sys.executable, "-c", FORKED, library], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"{library} is not installed")
    assert done.returncode == 0, done.stderr


class Sleeping(torch.nn.Module):
    """A perceptron whose forward pass keeps the GPU busy for some milliseconds."""

    def __init__(self, cycles: int):
        super().__init__()
        self.layers = tasks.perceptron().model()
        self.cycles = cycles

    def forward(self, x):
        torch.cuda._sleep(self.cycles)
        return self.layers(x)


def cycles_per_ms() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(50 * CYCLES_PER_MS)
    end.record()
    end.synchronize()
    return 50 * CYCLES_PER_MS / begin.elapsed_time(end)


def test_phase_timer_finds_a_planted_forward_pass():
    """Step 7: 10 ms of 10 ms and a little."""
    # in an epoch that is longer than the block: the host reads the losses at its end
    data = tasks.Labeled((12,), 16_000)
    task = tasks.perceptron(model=lambda: Sleeping(round(10 * cycles_per_ms())), train_data=data)
    probe = Probe(TaskRef.of(task), {import_path(TimePhases): {}}, "cuda", 0)
    probe.build()
    block = probe.timed_block(STEPS)
    assert block["phases"]["forward"] / STEPS == pytest.approx(0.010, rel=0.05)
    assert block["issue_seconds"] < 0.5 * block["seconds"], "the host is far ahead of the GPU"


def test_host_has_queued_a_launch_bound_step_only_when_it_is_over():
    """Step 15: many small layers."""
    layers = [torch.nn.Linear(12, 12) for _ in range(200)]
    arm = Arm(
        TaskRef.of(tasks.perceptron(model=lambda: torch.nn.Sequential(*layers, torch.nn.Linear(12, 4)))), {}, "cuda", 0
    )
    arm.build()
    block = arm.train(50)
    assert block["issue_seconds"] > 0.8 * block["seconds"]


class Reads(torch.nn.Module):
    """Makes the host wait three times a step, in ways that are no ``item``."""

    def __init__(self):
        super().__init__()
        self.layers = tasks.perceptron().model()

    def forward(self, x):
        x.nonzero()
        x[x > 0]
        x.cpu()
        return self.layers(x)


def test_waits_for_the_gpu_are_counted_whatever_causes_them():
    """F8."""
    probe = Probe(TaskRef.of(tasks.perceptron(model=Reads)), {}, "cuda", 0)
    probe.build()
    assert probe.operations(3)["host_reads_per_step"] >= 3


@pytest.mark.slow
@pytest.mark.timing
def test_self_comparison_gives_no_verdict():
    """Step 4."""
    result = compare("digits", "baseline", "baseline", device="cuda", budget=60.0)
    assert result["verdict"] not in ("faster", "slower"), result["why"]


@pytest.mark.slow
@pytest.mark.timing
def test_diagnosis_of_a_gpu_run_measures_the_copy_and_no_allocator():
    """Step 16, in small; F9a."""
    result = diagnose(replace(tasks.convolutional(), epochs=1000), device="cuda", budget=30.0)
    assert "copy" in result["ceilings"] and "system_time" not in result["ceilings"]
    assert result["flops"]["best_peak_gflops"] >= result["flops"]["peak_gflops"]


def test_clock_and_throttling_are_noted_beside_a_block():
    """F20. They take nvidia-ml-py."""
    pytest.importorskip("pynvml")
    arm = Arm(TaskRef.of(tasks.perceptron()), {}, "cuda", 0)
    arm.build()
    found = gpu_summary([arm.train(50) for _ in range(3)])
    assert 100 < found["lowest_gpu_clock_mhz"] <= found["highest_gpu_clock_mhz"] < 10_000
    assert 5 < found["highest_gpu_power_w"] < 2000 and 10 < found["highest_gpu_temperature_c"] < 110


def test_recomputed_activations_let_a_larger_batch_fit():
    """F19. `gpu_steps.py largest_batch` trains with the batches that are estimated."""
    task = replace(tasks.transformer(), batch_size=64)
    factors = {}
    for recipe in ({}, {"activation_checkpointing": {}}):
        plan = Arm(TaskRef.of(task), recipe, "cuda", 0).build(with_evaluation=False)
        factors[len(recipe)] = fitting_factor(plan["batch_size"], plan["peak_memory"], float("inf"))
    assert 1 < factors[0] <= factors[1], factors
