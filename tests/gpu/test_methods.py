"""Methods that are for NVIDIA GPUs: they act, and say by what; docs/gpu.md lists the steps that these tests are."""

import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch

import hasten
from hasten._torch_compat_compile import compile_in_place
from hasten.benchmarking.exactness import check_exactness
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.data import arrays, normalize, random_crop
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.testing import tasks

pytestmark = pytest.mark.gpu


def evidence(task, recipe: str) -> dict[str, str]:
    program = build(task, make_methods(Recipe.coerce(recipe)), device="cuda")
    with program.process_context():
        for _ in islice(program.effects.observed(train_steps(program)), 4):
            pass
    return program.effects.evidence | dict(program.run.no_effect)


@pytest.mark.parametrize(
    ("recipe", "task", "text"),
    [
        ("cudnn_benchmark", tasks.convolutional, "convolutions by measurement"),
        ("in_memory_batches:place=device", tasks.perceptron, "samples in memory of the GPU"),
        ("sdpa:kernel=efficient", tasks.transformer, "_scaled_dot_product_efficient_attention"),
        ("bfloat16 + sdpa:kernel=flash", tasks.transformer, "_scaled_dot_product_flash_attention"),
        ("bfloat16 + sdpa:kernel=cudnn", tasks.transformer, "_scaled_dot_product_cudnn_attention"),
        ("cuda_graph", tasks.perceptron, "1 CUDA graph captured"),
    ],
)
def test_method_shows_its_effect(recipe, task, text):
    found = evidence(task(), recipe)
    assert text in " ".join(found.values()), found


EXPANDABLE = """
import hasten
from hasten.testing import tasks
print(hasten.train(tasks.perceptron(), "expandable_segments", device="cuda")["effects"])
"""


def test_segments_of_gpu_memory_grow():
    """In a process of its own: what a process has allocated before stays as it is."""
    done = subprocess.run([sys.executable, "-c", EXPANDABLE], capture_output=True, text=True)
    assert "segments of GPU memory can grow" in done.stdout, done.stdout + done.stderr


def augmented():
    """Images of a pipeline, cropped, mirrored and normalized."""
    images = torch.randint(0, 256, (160, 3, 24, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pipeline = arrays((images, torch.arange(160) % 4)).shuffle(seed=1).batch(32)
    return pipeline.map(random_crop(4, mirror=True)).map(normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))


def test_augmentation_on_the_gpu_draws_as_on_the_host():
    """The same crops and flips; normalizing rounds in another order at most. Resumed in the middle of an epoch, too."""
    host = augmented().batches(32, seed=2, training=True)
    device = host.on_device[1](torch.device("cuda"))
    for epoch, start in ((0, 0), (1, 3)):
        for ours, theirs in zip(device.epoch(epoch, start), host.epoch(epoch, start), strict=True):
            assert ours[0].is_cuda and torch.equal(ours[1].cpu(), theirs[1])
            torch.testing.assert_close(ours[0].cpu(), theirs[0], rtol=1e-6, atol=1e-6)


def test_samples_of_a_pipeline_lie_on_the_gpu():
    task = replace(tasks.convolutional(), model=pooled, train_data=augmented(), validation_data=None, batch_size=None)
    assert "made on the GPU" in " ".join(evidence(task, "in_memory_batches:place=device").values())


def test_switches_are_restored():
    evidence(tasks.convolutional(), "cudnn_benchmark")
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash"])
def test_choice_of_the_attention_kernel_keeps_the_formula(kernel):
    recipe = Recipe.coerce(f"sdpa:kernel={kernel}")
    found = check_exactness(tasks.transformer(), Recipe(), recipe, Exactness.REDUCED_PRECISION, device="cuda")
    assert found.passed or "no effect" in found.why, found.why


class WithFlag(torch.utils.data.Dataset):
    """A batch holds a number that is no tensor, by which the model scales its output: 1 in even batches, 2 in odd."""

    def __init__(self):
        self.rows = tasks.Labeled((12,))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return *self.rows[index], index


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(12, tasks.CLASSES)

    def forward(self, x, scale=1):
        return self.layer(x) * scale


def with_flag(samples):
    inputs, labels, numbers = zip(*samples, strict=True)
    return {"x": torch.stack(inputs), "scale": 1 + numbers[0] % 2, "labels": torch.stack(labels)}


def test_number_in_a_batch_is_not_frozen_into_a_graph():
    """F13: replays used the number of the batch that was captured."""
    loader = torch.utils.data.DataLoader(WithFlag(), batch_size=11, collate_fn=with_flag, drop_last=True)
    task = tasks.perceptron(model=Scaled, train_data=loader, batch_size=None, validation_data=None, epochs=4)

    def weights(recipe):
        program = build(task, make_methods(Recipe.coerce(recipe)), device="cuda")
        with program.process_context():
            for _ in train_steps(program):
                pass
        return [value.cpu() for value in program.run.model.parameters()]

    for usual, graph in zip(weights("baseline"), weights("cuda_graph"), strict=True):
        torch.testing.assert_close(graph, usual, rtol=1e-4, atol=1e-5)


class Images(torch.utils.data.Dataset):
    """Images of 0.6 MB, so that the thread that pins batches allocates while a graph is captured."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.full((3, 224, 224), float(index % 7)), index % 4


def pooled() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(32, 4),
    )  # fmt: skip


@pytest.mark.slow
def test_graph_is_captured_beside_a_thread_that_pins_batches():
    """Step 10: 50 of 50."""
    task = tasks.convolutional(model=pooled, train_data=Images(), validation_data=None, batch_size=8, epochs=1)
    for _ in range(50):
        result = hasten.train(task, "cuda_graph + loader_workers:num_workers=4", device="cuda")
        assert "captured" in result["effects"]["cuda_graph"], result["effects"]


@pytest.mark.slow
def test_compiled_model_keeps_static_kernels_after_a_short_batch():
    """Step 17, without its price."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(12, 4)).cuda()
    compile_in_place([model], backend)
    for _ in range(5):
        for size in (20, 20, 10):
            model(torch.randn(size, 12, device="cuda")).sum().backward()
    assert graphs == [False, False]


def test_float16_beside_a_graph_trains(tmp_path):
    task = replace(tasks.perceptron(), epochs=3)
    result = hasten.train(task, "float16 + cuda_graph", device="cuda", out=tmp_path / "run")
    assert result["steps"] == 3 * 6
