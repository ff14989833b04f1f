"""Cora and CiteSeer in the form of Planetoid (Yang, Cohen and Salakhutdinov 2016): citations between papers.

The task is that of Kipf and Welling (2017): the class of a paper, from the words in it and its citations, with 20
labeled papers a class, by a graph convolutional network of two layers. The published accuracies on the 1,000 test
papers, 81.5 % for Cora and 70.3 % for CiteSeer, are those that ``validation_data`` measures; the 500 papers after the
training papers, with which the authors chose their settings, are not used.
"""

import io
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from hasten import ConfigurationError, Task
from hasten.workloads._data import File, download

ADDRESS = "https://github.com/kimiyoung/planetoid/raw/master/data/"
LABELED_PER_CLASS = 20


def citation_task(name: str, sha256: dict[str, str], target: float) -> Task:
    """The task of the citation graph in the files ``ind.NAME.*``, which are downloaded if they are missing.

    ``sha256``: file name -> checksum. ``target``: accuracy from 0 to 1.

    Features of a paper sum to 1. Papers without a row have no words, class 0, and belong to no split.
    """
    from torch_geometric.data import Data

    from hasten.graph.full_graph import FullGraph

    paths = {end: download(File(f"planetoid/{end}", f"{ADDRESS}{end}", sha256[end])) for end in sha256}
    allx, tx, ally, ty, links = (
        load_restricted(paths[f"ind.{name}.{end}"]) for end in ("allx", "tx", "ally", "ty", "graph")
    )
    test = numpy.array([int(line) for line in paths[f"ind.{name}.test.index"].read_text().split()])
    papers, words, classes = max(len(links), test.max() + 1), allx.shape[1], ally.shape[1]
    features = numpy.zeros((papers, words), numpy.float32)
    labels = numpy.zeros(papers, numpy.int64)
    features[: allx.shape[0]], features[test] = allx.toarray(), tx.toarray()
    labels[: len(ally)], labels[test] = ally.argmax(axis=1), ty.argmax(axis=1)
    features /= numpy.maximum(features.sum(axis=1, keepdims=True), 1)
    data = Data(torch.from_numpy(features), _edges(links, papers), y=torch.from_numpy(labels))
    return Task(
        model=lambda: gcn(words, classes),
        train_data=FullGraph(data, torch.arange(LABELED_PER_CLASS * classes)),
        validation_data=FullGraph(data, torch.from_numpy(test)),
        loss=nn.functional.cross_entropy,
        optimizer=adam,
        metric="accuracy",
        target=target,
        epochs=200,
    )


def gcn(words: int, classes: int) -> nn.Module:
    """Two graph convolutions with 16 hidden units; dropout before each."""
    from torch_geometric.nn import GCNConv

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)
            self.conv1 = GCNConv(words, 16)
            self.conv2 = GCNConv(16, classes)

        def forward(self, x, edge_index):
            x = self.conv1(self.dropout(x), edge_index).relu()
            return self.conv2(self.dropout(x), edge_index)

    return GCN()


def adam(model: Any) -> torch.optim.Optimizer:
    """Adam; weight decay for the first layer only, as in the paper."""
    first, second = model.conv1, model.conv2
    groups = [{"params": first.parameters(), "weight_decay": 5e-4}, {"params": second.parameters(), "weight_decay": 0}]
    return torch.optim.Adam(groups, lr=0.01)


def _edges(links: dict[int, list[int]], papers: int) -> torch.Tensor:
    """The links in both directions, each once, sorted by target and without self loops; shape (2, links), int64."""
    from torch_geometric.utils import to_undirected

    pairs = [(a, b) for a, others in links.items() for b in others if a != b]
    return to_undirected(torch.tensor(pairs).T, num_nodes=papers).flip(0)


def load_restricted(path: Path) -> Any:
    """The object in a pickle of Python 2 that holds arrays, sparse matrices, lists and dicts only.

    ConfigurationError if it is damaged, or names anything else, which is neither imported nor called.
    """
    try:
        return _RestrictedUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}; replace it with {ADDRESS}{path.name}") from None


class SparseRows:
    """Stands in for ``scipy.sparse.csr_matrix``, of which the pickle holds the attributes."""

    indptr: numpy.ndarray
    indices: numpy.ndarray
    data: numpy.ndarray
    _shape: tuple[int, int]
    shape = property(lambda self: self._shape)

    def toarray(self) -> numpy.ndarray:
        """The dense matrix."""
        dense = numpy.zeros(self.shape, self.data.dtype)
        dense[numpy.repeat(numpy.arange(self.shape[0]), numpy.diff(self.indptr)), self.indices] = self.data
        return dense


_RECONSTRUCT: Any = numpy.empty(0).__reduce__()[0]  # numpy's function for unpickling an array; its module moves
ALLOWED = {
    ("numpy", "ndarray"): numpy.ndarray,
    ("numpy", "dtype"): numpy.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("scipy.sparse.csr", "csr_matrix"): SparseRows,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,  # the default of that dict, as Python 2 and 3 name it
    ("builtins", "list"): list,
}


class _RestrictedUnpickler(pickle.Unpickler):
    """Raises UnpicklingError for every class or function that is not in ``ALLOWED``."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which these data do not need")
        return ALLOWED[module_name, global_name]
