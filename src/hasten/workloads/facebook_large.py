"""Facebook Large Page-Page (Rozemberczki, Allen and Sarkar 2021): which kind of page is it?

22,470 verified pages with 171,002 mutual likes and four classes: government, company, politician, television show. A
page has a set of 4,714 features, on average 14; they are multiplied with a random Gaussian matrix of 4,714 x 128, drawn
with seed 0. There is no official split: the first 18,000 nodes of the permutation that NumPy's ``default_rng(0)`` draws
are for training, the other 4,470 for validation. Validation uses all neighbors of a node.
"""

import csv
import io
import json
from typing import Any

import numpy
import torch
from torch import nn

from hasten import ConfigurationError, Task
from hasten.workloads._data import File, download

ADDRESS = "https://raw.githubusercontent.com/benedekrozemberczki/datasets/"
FOLDER = "ca6ad595ef93473106b3909e087be364032ce56b/facebook_large/"  # a later commit removed it
FILES = {
    "facebook_edges.csv": "7c50d8f02a75cc0829577814a1fc14535164daa38d79c3612340c9e9cdbd4022",
    "facebook_features.json": "ea870537646a93642a0008d38aa9bfeff02018070ba97b1f3f469d9622626436",
    "facebook_target.csv": "7bd96eafea3c2ca40f44bfa9e73642194696c21e38c7b29ed409c32ad14075cd",
}
REDUCED = {"facebook_target.csv": "66fde7f7336119f7dd0cf8bff01f862e905937c9901af273004ac0fd55328dfe"}  # without names
CLASSES = ("government", "company", "politician", "tvshow")
FEATURES, WIDTH = 4714, 128
TRAINING_NODES = 18_000
NUM_NEIGHBORS = (10, 5)
BATCH_SIZE = 512


def facebook_large() -> Task:
    """The class of a page from its neighbors' features, by GraphSAGE on sampled neighborhoods."""
    from torch_geometric.loader import NodeLoader
    from torch_geometric.nn import GraphSAGE

    from hasten.graph import NeighborSampler
    from hasten.graph.full_graph import FullGraph

    data, train_nodes, validation_nodes = page_graph()
    sampler = NeighborSampler(data, NUM_NEIGHBORS, seed=0)
    return Task(
        model=lambda: GraphSAGE(WIDTH, 64, num_layers=2, out_channels=len(CLASSES), dropout=0.5),
        train_data=NodeLoader(data, sampler, train_nodes, batch_size=BATCH_SIZE, shuffle=True),
        validation_data=FullGraph(data, validation_nodes),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        metric="accuracy",
        target=0.92,
        epochs=10,
    )


def page_graph() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(``Data`` with ``x``, ``edge_index`` and ``y``, ids of the nodes for training, of those for validation)."""
    from torch_geometric.data import Data

    labels = _labels()
    order = torch.from_numpy(numpy.random.default_rng(0).permutation(len(labels)))
    return Data(_features(len(labels)), _edges(), y=labels), order[:TRAINING_NODES], order[TRAINING_NODES:]


def _labels() -> torch.Tensor:
    """Class of each page, shape (22470,), int64."""
    rows = csv.DictReader(io.StringIO(_read("facebook_target.csv")))
    return torch.tensor([CLASSES.index(row["page_type"]) for row in rows])


def _edges() -> torch.Tensor:
    """Each edge in both directions, shape (2, edges), int64; the 179 self loops are left out."""
    pairs = numpy.array([line.split(",") for line in _read("facebook_edges.csv").split()[1:]], numpy.int64)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    return torch.from_numpy(numpy.concatenate([pairs, pairs[:, ::-1]]).T.copy())


def _features(pages: int) -> torch.Tensor:
    """The projected features of each page, shape (pages, 128), float32."""
    by_page = json.loads(_read("facebook_features.json"))
    if len(by_page) != pages:
        raise ConfigurationError(f"facebook_features.json has {len(by_page)} pages, facebook_target.csv has {pages}")
    features = [torch.tensor(by_page[str(page)]) for page in range(pages)]
    offsets = torch.tensor([0, *map(len, features[:-1])]).cumsum(0)
    matrix = numpy.random.default_rng(0).standard_normal((FEATURES, WIDTH), numpy.float32) / WIDTH**0.5
    return nn.functional.embedding_bag(torch.cat(features), torch.from_numpy(matrix), offsets, mode="sum")


def _read(name: str) -> str:
    file = File(f"graph-facebook-large/{name}", ADDRESS + FOLDER + name, FILES[name], REDUCED.get(name, ""))
    return download(file).read_text(encoding="utf-8")
