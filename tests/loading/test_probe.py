"""Probes of samples: where they are read, and of which loaders there are any."""

import pytest
import torch
from torch.utils.data import DataLoader

from hasten.engine.loaders import from_loader
from hasten.loading.probe import is_deterministic, probe_samples


def test_empty_dataset_has_no_samples_to_probe():
    spec = from_loader(DataLoader([], batch_size=2), None, 2, 0, training=False).spec
    assert probe_samples(spec) == [] and is_deterministic(spec)


class Opened(torch.utils.data.Dataset):
    """Samples of a file that is opened when the first is read, as is usual for workers: each has its own position."""

    file = None

    def __init__(self, path):
        self.path = path
        path.write_bytes(bytes(range(200)))

    def __len__(self):
        return 200

    def __getitem__(self, index):
        self.file = self.file or self.path.open("rb")
        self.file.seek(index)
        return torch.tensor(self.file.read(1)[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_probe_opens_no_file_that_workers_would_share(workers, tmp_path):
    dataset = Opened(tmp_path / "samples")
    spec = from_loader(DataLoader(dataset, batch_size=4, num_workers=workers), None, 4, 0, training=True).spec
    assert is_deterministic(spec) and (dataset.file is None) == (workers > 0)
    assert probe_samples(spec, [7, 3], in_worker=True) == [torch.tensor(7), torch.tensor(3)]


class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(8))


def test_loader_with_a_batch_sampler_of_unknown_length_is_not_read_by_index():
    batches = torch.utils.data.BatchSampler(Endless(), 2, drop_last=True)
    source = from_loader(DataLoader(range(8), batch_sampler=batches), None, 1, 0, training=False)
    assert source.spec is None and source.length is None and len(list(source)) == 4
