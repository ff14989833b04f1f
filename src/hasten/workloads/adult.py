"""Adult, also called Census Income (Becker and Kohavi 1996): does a person earn more than 50,000 dollars a year?

The two official files: 32,561 people for training, 16,281 for validation; six numbers and eight categories each.
"""

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import Task
from hasten.workloads._data import File, download

ADDRESS = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
FILES = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
NUMBERS = {"age": 0, "fnlwgt": 2, "education-num": 4, "capital-gain": 10, "capital-loss": 11, "hours-per-week": 12}
CATEGORIES = {
    "workclass": 1,
    "education": 3,
    "marital-status": 5,
    "occupation": 6,
    "relationship": 7,
    "race": 8,
    "sex": 9,
    "native-country": 13,
}
LABEL = 14


def adult() -> Task:
    """Whether the income is above $50,000 (Adult), by a multilayer perceptron with embedded categories."""
    train, test = _rows("adult.data"), _rows("adult.test")
    numbers = numpy.array([[float(row[column]) for column in NUMBERS.values()] for row in train])
    scale = numbers.mean(axis=0), numbers.std(axis=0)
    categories = [sorted({row[column] for row in train}) for column in CATEGORIES.values()]
    return Task(
        model=lambda: Tabular([len(values) for values in categories]),
        train_data=People(train, scale, categories),
        validation_data=People(test, scale, categories),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-5),
        metric="accuracy",
        target=0.853,
        batch_size=64,
        epochs=12,
    )


class People(Dataset):
    """Sample: (6 standardized numbers, float32; 8 category codes, int64; 1 for more than 50,000 dollars, else 0).

    ``rows``: the fields of each person; ``scale``: mean and standard deviation of each number; ``categories``: the
    values of each category in the order of their codes. Any other value has code 0.
    """

    def __init__(self, rows: list[list[str]], scale: tuple[numpy.ndarray, numpy.ndarray], categories: list[list[str]]):
        self.rows, (self.mean, self.std) = rows, scale
        self.codes = [{value: code for code, value in enumerate(values)} for values in categories]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        numbers = (numpy.array([float(row[column]) for column in NUMBERS.values()]) - self.mean) / self.std
        categories = [codes.get(row[column], 0) for codes, column in zip(self.codes, CATEGORIES.values(), strict=True)]
        return torch.tensor(numbers, dtype=torch.float32), torch.tensor(categories), int(row[LABEL].startswith(">50K"))


class Tabular(nn.Module):
    """Embeds each category in 8 dimensions, concatenates the numbers, and applies two hidden layers."""

    def __init__(self, sizes: list[int]):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 8) for size in sizes)
        self.layers = nn.Sequential(
            nn.Linear(len(NUMBERS) + 8 * len(sizes), 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2)
        )

    def forward(self, numbers, categories):
        embedded = [embedding(column) for embedding, column in zip(self.embeddings, categories.unbind(1), strict=True)]
        return self.layers(torch.cat([numbers, *embedded], dim=1))


def _rows(name: str) -> list[list[str]]:
    """The fields of every person in file ``name``; skips the first line of adult.test, which is no person."""
    text = download(File(f"adult/{name}", ADDRESS + name, FILES[name])).read_text(encoding="ascii")
    rows = [line.split(", ") for line in text.splitlines()]
    return [row for row in rows if len(row) == LABEL + 1]
