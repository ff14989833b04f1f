"""Tasks with unreadable rows."""

import os
import signal
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from hasten import Task
from hasten.data import Pipeline, Source
from hasten.data.source import BadRow

ROWS, BATCH, EPOCHS = 64, 8, 2
BAD, BAD_VALIDATION = (3, 17, 40), (5,)
NUMBERS = torch.linspace(-1, 1, ROWS * 4).view(ROWS, 4)
LABELS = torch.arange(ROWS) % 3
KILL_AT, CALLS = ROWS // BATCH * EPOCHS - 2, count()  # the last batch but one
FLAG = "HASTEN_TEST_KILL"


class Patchy(Source):
    """Rows of which some cannot be read."""

    def __init__(self, bad):
        self.bad = set(bad)

    def __len__(self):
        return ROWS

    def read(self, rows):
        for row in rows.tolist():
            if row in self.bad:
                raise BadRow(row, f"patchy.txt line {row + 1}", "no number")
        index = torch.from_numpy(rows)
        return NUMBERS[index], LABELS[index]

    def fingerprint(self):
        return {"bad": sorted(self.bad)}


def rows(bad=BAD):
    return Pipeline(Patchy(bad)).shuffle(seed=1).batch(BATCH)


def killing(batch):
    """Kills its process near the end of the training, once: a file records that it has happened."""
    flag = Path(os.environ.get(FLAG, "nowhere"))
    if next(CALLS) == KILL_AT and flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def task(train_data) -> Task:
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)),
        train_data=train_data,
        validation_data=Pipeline(Patchy(BAD_VALIDATION)).batch(BATCH),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
        metric="accuracy",
        epochs=EPOCHS,
        batch_size=BATCH,
    )


def here():
    return task(rows())


def threads():
    return task(rows().prefetch(2, threads=2))


def processes():
    return task(rows().prefetch(2, processes=2))


def made_later():
    return task(rows)


def killed():
    return task(rows().map(killing))


def by_itself():
    """Its training pipeline allows bad rows itself; its validation pipeline has none."""
    made = task(rows().skip_bad_rows(3))
    return Task(**(vars(made) | {"validation_data": rows(())}))


def no_pipeline():
    return task(TensorDataset(NUMBERS, LABELS))


def no_pipeline_later():
    return task(lambda: TensorDataset(NUMBERS, LABELS))
