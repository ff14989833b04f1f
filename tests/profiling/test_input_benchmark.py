"""The input benchmark of ``diagnose``: a stage that is made slow is found to be the bottleneck."""

import io
import tarfile
import time

import numpy
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hasten import Recipe, Task
from hasten.data import Pipeline, Source, arrays, images, tfrecord, webdataset
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import frame_records
from hasten.data.source import BadRow
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.engine.tasks import TaskRef
from hasten.profiling.diagnose import diagnose
from hasten.profiling.input_benchmark import STAGES, measure_input
from hasten.reporting.terminal import diagnose_answer
from helpers.markers import slow

BUDGET_S, SLEEP_S = 0.8, 0.005


class SleepMeter:
    """Sleeps and measures for how long: a busy machine sleeps longer than requested."""

    def __init__(self):
        self.samples, self.seconds = 0, 0.0

    def sleep(self, samples):
        began = time.perf_counter()
        time.sleep(samples * SLEEP_S)
        self.samples, self.seconds = self.samples + samples, self.seconds + time.perf_counter() - began

    @property
    def rate(self):
        """Samples per second without any other cost."""
        return self.samples / self.seconds


meter = SleepMeter()


@pytest.fixture(autouse=True)
def reset_meter():
    meter.__init__()


class Samples(Dataset):
    def __init__(self, slow=False):
        self.slow = slow

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.slow:
            meter.sleep(1)
        return torch.full((2,), index / 64), index % 2


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), 0)] * 64)


class SlowLinear(nn.Linear):
    def forward(self, x):
        meter.sleep(8)
        return super().forward(x)


def slow_collate(samples):
    meter.sleep(8)
    return torch.utils.data.default_collate(samples)


def task(data, model=nn.Linear):
    return Task(
        model=lambda: model(2, 2),
        train_data=data,
        loss=nn.functional.cross_entropy,
        batch_size=8,
        epochs=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def measure(task, methods=(), budget=BUDGET_S):
    return measure_input(build(task, list(methods)), budget)


def pipeline():
    return arrays(torch.zeros(64, 2), torch.arange(64) % 2).shuffle()


def slow_sample(sample):
    meter.sleep(1)
    return sample


def slow_batch(batch):
    meter.sleep(8)
    return batch


@pytest.mark.parametrize(
    ("data", "stage", "prefetched"),
    [
        (DataLoader(Samples(slow=True), batch_size=8), "read", False),
        (pipeline().batch(8).map(slow_batch).prefetch(2, threads=2), "map", True),
        (pipeline().batch(8, collate=slow_collate), "batch", False),
        slow(Samples(slow=True), "read", False),
        slow(DataLoader(Samples(), batch_size=8, collate_fn=slow_collate), "batch", False),
        slow(pipeline().map(slow_sample).batch(8), "map", False),
        slow(pipeline().batch(8).map(slow_batch), "map", False),
    ],
)
def test_input_with_a_slow_stage_names_it_as_bottleneck(data, stage, prefetched):
    result = measure(task(data))
    stages = result["stages"]
    assert result["bottleneck"] == stage and set(stages) == set(STAGES)
    assert stages[stage] == min(rate for rate in stages.values() if rate)
    assert 0.2 < stages[stage] / meter.rate < 1.5
    assert result["data_wait_fraction"] > 0.5 and result["end_to_end"] < result["step_throughput"]
    assert stages["copy"] is stages["decode"] is None and "read includes it" in result["not_measured"]["decode"]
    assert result["prefetched"] is prefetched


@pytest.mark.parametrize(
    "data", [pipeline().batch(8).prefetch(2, threads=1), slow(Samples()), slow(pipeline().batch(8))]
)
def test_input_with_a_slow_step_waits_for_nothing(data):
    result = measure(task(data, SlowLinear))
    assert result["bottleneck"] == "step" and result["data_wait_fraction"] < 0.3
    assert 0.2 < result["step_throughput"] / meter.rate < 1.5


def as_features(batch):
    pictures, labels = batch
    return pictures.flatten(1)[:, :2] / 255.0, labels.flatten()


def image_bytes(kind, size=(60, 80)):
    file = io.BytesIO()
    noise = numpy.random.default_rng(0).integers(0, 256, (*size, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


def image_folder(directory, size=(60, 80)):
    for index in range(12):
        path = directory / "ab"[index % 2] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes("JPEG", size))
    return images(directory, resize=8)


def tar_shards(directory):
    directory.mkdir()
    with tarfile.open(directory / "a.tar", "w") as tar:
        for index in range(12):
            for name, content in ((f"{index}.png", image_bytes("PNG")), (f"{index}.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return webdataset(directory, target="cls", resize=8)


def examples(directory):
    directory.mkdir()
    (directory / "a.tfrecord").write_bytes(
        frame_records(encode_example({"x": [i / 7] * 2, "y": i % 2}) for i in range(12))
    )
    return tfrecord(directory, target="y")


@pytest.mark.parametrize(("make", "fetch"), [(image_folder, "_read_file"), (tar_shards, "raw"), (examples, "raw")])
def test_input_whose_source_fetches_slowly_separates_read_from_decode(make, fetch, tmp_path, monkeypatch):
    data = make(tmp_path / "in").batch(4).map(as_features)
    fetched = getattr(type(data.source), fetch)
    monkeypatch.setattr(type(data.source), fetch, lambda *args: (meter.sleep(4), fetched(*args))[1])
    result = measure(task(data))
    assert result["bottleneck"] == "read" and 2 * result["stages"]["read"] < result["stages"]["decode"]
    assert result["stages"]["read"] < 1.5 * meter.rate


def test_input_of_large_images_is_limited_by_decode(tmp_path):
    result = measure(task(image_folder(tmp_path / "in", size=(600, 800)).batch(4).map(as_features)))
    assert result["bottleneck"] == "decode" and result["stages"]["read"] > 2 * result["stages"]["decode"]


def test_input_from_a_stream_is_measured_end_to_end_only():
    result = measure(task(Stream()))
    assert set(result["stages"].values()) == {None} and "map-style" in result["not_measured"]["stages"]
    assert result["end_to_end"] > 0 and result["bottleneck"] in ("input", "step") and result["prefetched"] is False


def test_input_read_by_a_method_in_its_own_way_reports_no_wait_fraction():
    result = measure(task(Samples()), make_methods(Recipe({"in_memory_batches": {}})))
    assert result["prefetched"] is result["data_wait_fraction"] is None
    assert (
        "method of the recipe" in result["not_measured"]["prefetched"]
        and "map-style" in result["not_measured"]["stages"]
    )
    assert result["end_to_end"] > 0 and result["step_throughput"] > 0


class BadRows(Source):
    """64 rows, of which rows 3 and 17 cannot be read."""

    def __len__(self):
        return 64

    def read(self, rows):
        for row in sorted({3, 17} & {*rows.tolist()}):
            raise BadRow(row, f"numbers.txt line {row + 1}", "no number")
        return torch.zeros(len(rows), 2), torch.from_numpy(rows) % 2

    def fingerprint(self):
        return {}


def test_input_with_bad_rows_lists_the_skipped_ones():
    result = measure(task(Pipeline(BadRows()).skip_bad_rows(3).batch(8)))
    assert [row["row"] for row in result["skipped_rows"]] == [3, 17] and result["end_to_end"] > 0
    assert result["skipped_rows"][0]["where"] == "numbers.txt line 4"


class FailingLinear(nn.Linear):
    def forward(self, x):
        raise KeyError("my own error")


def fail(sample):
    raise FileNotFoundError("a file is gone")


@pytest.mark.parametrize(
    ("data", "model", "name", "reason"),
    [
        (Samples(), FailingLinear, "step_throughput", "KeyError: 'my own error' (test_input_benchmark.py line"),
        (
            pipeline().batch(8),
            lambda *sizes: nn.Linear(3, 2),
            "step_throughput",
            "mat1 and mat2 shapes cannot be multiplied",
        ),
        (pipeline().map(fail).batch(8), nn.Linear, "first_batch", "FileNotFoundError: a file is gone"),
        (DataLoader(Samples(), batch_size=8, collate_fn=fail), nn.Linear, "first_batch", "a file is gone"),
        (Pipeline(BadRows()).batch(8), nn.Linear, "first_batch", "numbers.txt line 4"),
    ],
)
def test_input_that_cannot_be_measured_is_one_line_with_the_reason(data, model, name, reason):
    result = measure(task(data, model))
    assert reason in result["not_measured"][name] and "\n" not in result["not_measured"][name]
    assert result["data_wait_fraction"] is result["bottleneck"] is None
    if name == "step_throughput":
        assert result["end_to_end"] > 0, "the input pipeline is measured all the same"


def page(result):
    console = Console(width=120, file=io.StringIO())
    console.print(diagnose_answer(result))
    return console.file.getvalue()


@pytest.mark.timing
@pytest.mark.slow
def test_diagnose_states_the_throughput_of_the_input_pipeline_beside_the_phases():
    result = diagnose(task(DataLoader(Samples(slow=True), batch_size=8)), budget=4.0, device="cpu")
    measured = result["input"]
    assert {"step_throughput", "data_wait_fraction", "prefetched", "end_to_end", "skipped_rows"} <= measured.keys()
    assert measured["bottleneck"] == "read" and measured["data_wait_fraction"] > 0.5
    assert measured["data_wait_fraction"] == pytest.approx(result["phases"]["input"], abs=0.2)
    assert "the bottleneck is its stage 'read'" in page(result) and "training step" in page(result)


@pytest.mark.slow
def test_diagnose_of_a_run_whose_input_cannot_be_measured_still_answers(monkeypatch):
    class Dying(Samples):
        """Fails only while the input benchmark reads."""

        armed = False

        def __getitem__(self, index):
            import inspect

            if any(frame.function == "measure_input" for frame in inspect.stack(context=0)):
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    result = diagnose(TaskRef.of(task(Dying())), budget=2.0, device="cpu")
    assert result["phases"] and "the disk is gone" in result["input"]["not_measured"]["first_batch"]
    assert "the disk is gone" in page(result)
