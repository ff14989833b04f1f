"""A stage that is made slow is the one that is found slow."""

import time

import faulty_tasks
import pytest
import torch
from storages import ROWS, damage, pictures, written
from tar_files import pack, png
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hasten import Failure, Refusal, Task
from hasten.data import arrays, bench, images, shards, tfrecord
from hasten.data.faults import Faults
from hasten.data.formats.example_messages import encoded
from hasten.data.formats.records import framed
from hasten.data.source import BadRow
from hasten.data.storing import stages
from hasten.data.storing.kinds import kind_of
from hasten.data.storing.readings import Reading
from hasten.data.storing.stages import pace, paces, reading_pace

BUDGET, NAP = 0.8, 0.005


class Naps:
    """Sleeps, and notes for how long: a busy machine wakes nobody on time."""

    def __init__(self):
        self.samples, self.seconds = 0, 0.0

    def take(self, samples):
        began = time.perf_counter()
        time.sleep(samples * NAP)
        self.samples, self.seconds = self.samples + samples, self.seconds + time.perf_counter() - began

    @property
    def rate(self):
        """Samples per second, if there were nothing else to do."""
        return self.samples / self.seconds


naps = Naps()


@pytest.fixture(autouse=True)
def awake():
    naps.__init__()


class Samples(Dataset):
    def __init__(self, nap=False):
        self.nap = nap

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.nap:
            naps.take(1)
        return torch.full((2,), index / 64), index % 2


class Napping(nn.Linear):
    def forward(self, x):
        naps.take(8)
        return super().forward(x)


def napping(samples):
    naps.take(8)
    return torch.utils.data.default_collate(samples)


def task(data, model=nn.Linear):
    return Task(
        model=lambda: model(2, 2), train_data=data, loss=nn.functional.cross_entropy, batch_size=8, epochs=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip


def pipeline():
    return arrays(torch.zeros(64, 2), torch.arange(64) % 2).shuffle()


def nap_a_sample(sample):
    naps.take(1)
    return sample


def nap_a_batch(batch):
    naps.take(8)
    return batch


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (Samples(nap=True), "read"),
        (DataLoader(Samples(nap=True), batch_size=8), "read"),
        (DataLoader(Samples(), batch_size=8, collate_fn=napping), "batch"),
        (pipeline().map(nap_a_sample).batch(8), "transform"),
        (pipeline().batch(8).map(nap_a_batch), "transform"),
        (pipeline().batch(8).map(nap_a_batch).prefetch(2, threads=2), "transform"),
        (pipeline().batch(8, collate=napping), "batch"),
    ],
)
def test_the_slow_stage_is_named(data, limit):
    result = bench(task(data), budget=BUDGET, device="cpu")
    assert result["limit"] == limit and result["batch_size"] == 8
    assert result["stages"][limit] == min(rate for rate in result["stages"].values() if rate)
    assert 0.2 < result["stages"][limit] / naps.rate < 1.5
    assert result["waits"] > 0.5 and result["together"] < result["appetite"]
    assert result["stages"]["copy"] is result["stages"]["decode"] is None


@pytest.mark.parametrize("data", [Samples(), pipeline().batch(8), pipeline().batch(8).prefetch(2, threads=1)])
def test_a_slow_step_waits_for_nothing(data):
    result = bench(task(data, Napping), budget=BUDGET, device="cpu")
    assert result["limit"] == "step" and result["waits"] < 0.3
    assert 0.2 < result["appetite"] / naps.rate < 1.5


def as_features(batch):
    pictures, labels = batch
    return pictures.flatten(1)[:, :2] / 255.0, labels.flatten()


def from_pictures(folder, size=(60, 80)):
    return images(str(pictures(folder, sizes=(size,)) / "*" / "*.jpg"), resize=8)


def from_shards(folder):
    folder.mkdir()
    pack(folder / "a.tar", [file for number in range(12) for file in ((f"{number}.png", png(number)[0]), (f"{number}.cls", b"1"))])
    return shards(folder, target="cls", resize=8)


def from_examples(folder):
    folder.mkdir()
    (folder / "a.tfrecord").write_bytes(framed(encoded({"x": [number / 7] * 2, "y": number % 2}) for number in range(12)))
    return tfrecord(folder, target="y")


@pytest.mark.parametrize(("made", "fetch"), [(from_pictures, "_content"), (from_shards, "raw"), (from_examples, "raw")])
def test_reading_is_told_from_decoding(made, fetch, tmp_path, monkeypatch):
    data = made(tmp_path / "in").batch(4).map(as_features)
    fetched = getattr(type(data.source), fetch)
    monkeypatch.setattr(type(data.source), fetch, lambda *arguments: (naps.take(4), fetched(*arguments))[1])
    result = bench(task(data), budget=BUDGET, device="cpu")
    assert result["limit"] == "read" and 2 * result["stages"]["read"] < result["stages"]["decode"]
    assert result["stages"]["read"] < 1.5 * naps.rate


def test_big_pictures_are_limited_by_decoding(tmp_path):
    result = bench(task(from_pictures(tmp_path / "in", size=(600, 800)).batch(4).map(as_features)), budget=BUDGET, device="cpu")
    assert result["limit"] == "decode" and result["stages"]["read"] > 2 * result["stages"]["decode"]


def test_a_stream_is_timed_as_a_whole():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(2), 0)] * 64)

    result = bench(task(Stream()), budget=BUDGET, device="cpu")
    assert result["stages"]["read"] is None and result["together"] > 0


def test_the_random_state_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    bench(task(Samples()), budget=0.2, device="cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_paces(tmp_path):
    kind, files = kind_of(written(tmp_path / "in"))
    speed = pace(Reading(kind, files, files), 0.2)
    assert speed["batches"] < min(speed["decode"], speed["copy"])
    assert speed["decode"] > ROWS
    assert min(reading_pace(files)["page_cache"]) > 0


def test_readings_share_the_time_and_the_files(tmp_path, monkeypatch):
    """What is read from the disk is read once, in parts of as many bytes; small files are no part for themselves."""
    for number in range(30):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes(10))
    (tmp_path / "big.bin").write_bytes(bytes(6 * stages.BLOCK))
    files = sorted(map(str, tmp_path.iterdir()))
    read, blocks = [], stages._blocks
    monkeypatch.setattr(stages, "_blocks", lambda *arguments: (read.append(block) or block for block in blocks(*arguments)))
    rates = stages._bytes_a_second(files, 5.0)
    assert len(rates) == stages.READINGS and min(rates) > 0 and sum(read) == 300 + 6 * stages.BLOCK
    assert len(stages._bytes_a_second(files[:1], 5.0)) == 1 and stages._bytes_a_second([], 5.0) == [0.0]


def test_a_reading_that_takes_long_is_the_only_one(tmp_path, monkeypatch):
    kind, files = kind_of(written(tmp_path / "in"))
    reading = Reading(kind, files, files)
    assert {name: len(each) for name, each in paces(reading, 3.0).items()} == dict.fromkeys(("decode", "copy", "batches"), stages.READINGS)
    opened = Reading.opened
    monkeypatch.setattr(Reading, "opened", lambda each: (time.sleep(0.5), opened(each))[1])
    assert {len(each) for each in paces(reading, 0.1).values()} == {1}


def test_decoding_only_some_rows_takes_no_longer_for_more_files(tmp_path):
    """Reading.most holds for the stages, too: the rows of one run are decoded, not of twenty."""
    kind, files = kind_of(written(tmp_path / "in", runs=ROWS // 20))
    reading = Reading(kind, files, files, most=10)
    assert reading.rows == 10 and pace(reading, 5.0)["decode"] > 0


def test_paces_without_the_runs_that_cannot_be_read(tmp_path):
    """The last one among them, which would be held while copying is timed."""
    data = written(tmp_path / "in", runs=ROWS // 4)
    for run in (1, 3):
        damage(data / "train.parquet", run)
    kind, files = kind_of(data)
    with pytest.raises(BadRow, match="row group 1"):
        pace(Reading(kind, files, files), 5.0)
    reading = Reading(kind, files, files, faults=Faults(ROWS))
    speed = pace(reading, 5.0)
    assert 0 < speed["batches"] < min(speed["decode"], speed["copy"])
    assert {fault.where for fault in reading.faults.found.values()} == {f"{files[0]}, row group {run}" for run in (1, 3)}


def test_bad_rows_are_left_out_and_listed():
    with pytest.raises(Failure, match=r"patchy.txt line \d+"):
        bench(faulty_tasks.here(), budget=BUDGET, device="cpu")
    result = bench(faulty_tasks.here(), skip_bad=3, budget=BUDGET, device="cpu")
    assert [each["row"] for each in result["left_out"]] == [*faulty_tasks.BAD] and result["together"] > 0
    with pytest.raises(Refusal, match=r"only a pipeline of hasten.data can leave bad rows out"):
        bench(task(Samples()), skip_bad=3, budget=BUDGET, device="cpu")


class Failing(nn.Linear):
    def forward(self, x):
        raise KeyError("my own mistake")


def gone(sample):
    raise FileNotFoundError("a file is gone")


def refused():
    raise ImportError("a part of it is missing")


@pytest.mark.parametrize(
    ("data", "model", "told"),
    [
        (Samples(), Failing, r"the training step failed: KeyError: 'my own mistake' \(test_stages.py line \d+\)"),
        (pipeline().batch(8), lambda *sizes: nn.Linear(3, 2), r"the training step failed: RuntimeError: (addmm: )?mat1 and mat2"),
        (pipeline().batch(8), lambda *sizes: refused(), "building the run failed: ImportError: a part of it is missing"),
        (pipeline().map(gone).batch(8), nn.Linear, "reading the first batch failed: FileNotFoundError: a file is gone"),
        (DataLoader(Samples(), batch_size=8, collate_fn=gone), nn.Linear, "a file is gone"),
    ],
)
def test_what_the_task_raises_is_told_in_one_line(data, model, told):
    with pytest.raises(Failure, match=told) as raised:
        bench(task(data, model), budget=BUDGET, device="cpu")
    assert "appetite.py" not in str(raised.value) and "\n" not in str(raised.value)
