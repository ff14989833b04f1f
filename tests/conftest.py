"""What every test relies on: where the real data are, and one thread, so that tests do not fight for the machine."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, and before torch reads it

import torch

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"

if "HASTEN_DATA" not in os.environ and BESIDE.is_dir():
    os.environ["HASTEN_DATA"] = str(BESIDE)

torch.set_num_threads(1)
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # a loader found in a circle cannot tell its workers to end, and waits 5 s for each
