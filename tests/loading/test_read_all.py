"""All samples, read once by several processes: the same bits as in one, and only where that is safe."""

import os
import socket
import subprocess
import time

import pytest
import torch
from torch.utils.data import DataLoader

from hasten.core.errors import RunError
from hasten.engine.loaders import from_loader
from hasten.loading import read_all as module
from hasten.loading.read_all import read_all

SAMPLES = 600


@pytest.fixture(autouse=True)
def _however_few(monkeypatch):
    monkeypatch.setattr(module, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "_has_children", lambda: False)  # of other tests


class Noted(torch.utils.data.Dataset):
    """Leaves a file for each process that reads samples."""

    def __init__(self, directory):
        self.directory = directory

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        (self.directory / str(os.getpid())).touch()
        return {"x": (torch.arange(3.0) + index, index % 2 == 0), "y": index}

    def processes(self):
        return len({*map(int, os.listdir(self.directory))} - {os.getpid()})


def spec_of(dataset):
    return from_loader(DataLoader(dataset, batch_size=4), None, 4, 0, training=True).spec


def is_whole(fields):
    index = torch.arange(SAMPLES)
    x, even = fields["x"]
    return torch.equal(x, index[:, None] + torch.arange(3.0)) and torch.equal(even, index % 2 == 0)


@pytest.mark.parametrize("cpus", [1, 2, 3])
def test_every_process_reads_a_part(cpus, tmp_path):
    dataset = Noted(tmp_path)
    fields = read_all(spec_of(dataset), cpus)
    assert is_whole(fields) and torch.equal(fields["y"], torch.arange(SAMPLES))
    assert dataset.processes() == (cpus if cpus > 1 else 0)


class FromOneFile(Noted):
    """Its file is open before any process begins: all share its position."""

    def __init__(self, directory):
        super().__init__(directory)
        path = directory.parent / "rows"
        path.write_bytes(bytes(index % 251 for index in range(SAMPLES)))
        self.file, self.next = path.open("rb", buffering=0), 0

    def __getitem__(self, index):
        self.seek(index)
        return {**super().__getitem__(index), "y": self.file.read(1)[0]}

    def seek(self, index):
        self.file.seek(index)


class InSequence(FromOneFile):
    """Reads on without a seek where the next sample is asked for: the position has to be what this process left."""

    def seek(self, index):
        if index != self.next:
            super().seek(index)
        self.next = index + 1


@pytest.mark.parametrize("kind", [FromOneFile, InSequence])
def test_samples_of_a_shared_file_are_read_again_in_one_process(kind, tmp_path):
    (tmp_path / "pids").mkdir()
    dataset = kind(tmp_path / "pids")
    fields = read_all(spec_of(dataset), 2)
    dataset.file.close()
    assert dataset.processes() == 2 and torch.equal(fields["y"], torch.arange(SAMPLES) % 251)


def test_open_connection_leaves_the_dataset_to_one_process(tmp_path):
    dataset = Noted(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert is_whole(read_all(spec_of(dataset), 2))
    assert dataset.processes() == 0


def test_process_with_children_reads_alone(tmp_path, monkeypatch):
    """A dataset may ask one of them for its samples, by pipes that all processes would share."""
    monkeypatch.undo()
    monkeypatch.setattr(module, "MIN_SECONDS", 0.0)
    dataset = Noted(tmp_path)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert is_whole(read_all(spec_of(dataset), 2))
        child.stdin.close()
    assert dataset.processes() == 0


class Stuck(Noted):
    def __init__(self, directory):
        super().__init__(directory)
        self.owner = os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.owner:
            time.sleep(600)
        return super().__getitem__(index)


def test_processes_that_hang_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    began = time.monotonic()
    assert is_whole(read_all(spec_of(Stuck(tmp_path)), 2)) and time.monotonic() - began < 60


class PerProcess(Noted):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "y": os.getpid()}


def test_samples_that_depend_on_the_process_are_those_of_this_one(tmp_path):
    fields = read_all(spec_of(PerProcess(tmp_path)), 2)
    assert is_whole(fields) and {*fields["y"].tolist()} == {os.getpid()}


class Broken(Noted):
    def __getitem__(self, index):
        if index == 500:
            raise ValueError("no such picture")
        return super().__getitem__(index)


def test_sample_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(RunError, match=r"sample 500: .*no such picture"):
        read_all(spec_of(Broken(tmp_path)), 2)
