"""No test sees a GPU, whatever the machine has, and no process that a test starts."""

import os
import subprocess
import sys

import pytest
import torch

from helpers.ranks import run_ranks

SEEN = "import os; import torch; print([os.environ.get('CUDA_VISIBLE_DEVICES'), torch.cuda.is_available()])"


class Seen(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return seen(0)


def seen(rank: int) -> tuple[str | None, bool]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()


def test_this_process_sees_no_gpu():
    assert seen(0) == ("", False)


def test_ranks_and_loader_workers_see_no_gpu():
    assert run_ranks(2, seen) == [("", False)] * 2
    loader = torch.utils.data.DataLoader(Seen(), batch_size=None, num_workers=1)
    assert list(map(tuple, loader)) == [("", False)] * 2


@pytest.mark.slow
def test_commands_see_no_gpu():
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True)
    assert done.stdout.strip() == "['', False]", done.stderr
