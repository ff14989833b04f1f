"""Functions mapped over nested batches."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import InitVar, dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from hasten.utils.batch import batch_tensors, map_tensors
from hasten.utils.tree import bitwise_equal, tree_leaves, tree_map


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass
class Sample:
    x: torch.Tensor
    name: str = "one"


class Items(list):
    pass


ONE = torch.tensor(1.0)
OPAQUE = SimpleNamespace(x=ONE)


@pytest.mark.parametrize(
    ("batch", "expected", "count"),
    [
        ((ONE, ONE), (-ONE, -ONE), 2),
        ([ONE, "a", None], [-ONE, "a", None], 1),
        (Pair(ONE, "a"), Pair(-ONE, "a"), 1),
        (Items([ONE]), Items([-ONE]), 1),
        ({"x": ONE, "more": ({"y": ONE}, 3)}, {"x": -ONE, "more": ({"y": -ONE}, 3)}, 2),
        (OrderedDict(x=ONE), OrderedDict(x=-ONE), 1),
        (defaultdict(list, x=ONE), defaultdict(list, x=-ONE), 1),
        (UserDict(x=ONE), UserDict(x=-ONE), 1),  # as transformers.BatchEncoding
        (Sample(ONE), Sample(-ONE), 1),
        (Sample, Sample, 0),
        (ONE, -ONE, 1),
        ((OPAQUE, 5), (OPAQUE, 5), 0),
        ((), (), 0),
    ],
)
def test_map_tensors_keeps_containers_and_everything_else(batch, expected, count):
    mapped = map_tensors(torch.neg, batch)
    assert type(mapped) is type(expected) and mapped == expected
    assert [tensor.item() for tensor in batch_tensors(batch)] == [1.0] * count


def test_tree_map_stops_at_leaves():
    columns = {"a": [ONE, ONE], "b": (ONE, "text")}
    is_list = lambda node: isinstance(node, list)  # noqa: E731
    assert tree_map(lambda leaf: type(leaf).__name__, columns, is_list) == {"a": "list", "b": ("Tensor", "str")}
    assert tree_leaves(columns, is_list) == [[ONE, ONE], ONE, "text"]
    assert tree_leaves(columns) == [ONE, ONE, ONE, "text"]


NAN = torch.tensor([float("nan"), 1.0])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Sample(NAN), Sample(NAN.clone()), True),
        (Sample(NAN), Sample(-NAN), False),
        (Sample(NAN), Sample(NAN.clone(), "two"), False),
        ([Sample(ONE)], [Pair(ONE, "one")], False),
        ((NAN, float("nan")), (NAN.clone(), float("nan")), True),
        (NAN, NAN.double(), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2).to_sparse(), torch.eye(2), False),
        (Sample, Sample, True),
        (Sample, Items, False),
    ],
)
def test_trees_are_equal_by_their_bits(a, b, expected):
    assert bitwise_equal(a, b) is expected


def test_graphs_are_compared_by_their_fields():
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=torch.ones(3, 2), y=torch.tensor([1, 2, last])) for last in (3, 3, 4)]
    assert bitwise_equal(graphs[0], graphs[1]) and not bitwise_equal(graphs[0], graphs[2])


@dataclass(frozen=True)
class Masked:
    x: torch.Tensor
    mask: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "mask", self.x > 0)


@dataclass
class Scaled:
    x: torch.Tensor
    scale: InitVar[float]

    def __post_init__(self, scale):
        self.x = scale * self.x


def test_dataclass_whose_init_takes_other_arguments_than_its_fields_is_mapped():
    masked = map_tensors(torch.logical_not, Masked(torch.tensor([1.0, 0.0])))
    assert masked.x.tolist() == [False, True] and masked.mask.tolist() == [False, True]
    scaled = Scaled(ONE, 3.0)
    mapped = map_tensors(torch.neg, scaled)
    assert type(mapped) is Scaled and mapped.x.item() == -3 and scaled.x.item() == 3
