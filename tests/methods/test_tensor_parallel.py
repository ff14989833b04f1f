"""tensor_parallel: pairs of layers are found by data flow, never by names."""

import pytest
import torch
from torch import nn

from hasten.methods.distributed.tensor_parallel import ShardedBlock, find_blocks


class Uses(nn.Module):
    """Two layers and the operations between and around them."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(8)
        self.how = forward

    def forward(self, x):
        return self.how(self, x)


PAIR = ShardedBlock(("first",), "last", elementwise=True)
BY_USE = {
    "an activation": (lambda m, x: m.last(m.first(x).relu()), [PAIR]),
    "nothing": (lambda m, x: m.last(m.first(x)), [PAIR]),
    "numbers": (lambda m, x: m.last(2 * nn.functional.gelu(m.first(x)) + 1), [PAIR]),
    "a size of another tensor": (lambda m, x: m.last(m.first(x) * x.shape[0]), [PAIR]),
    "its own size": (lambda m, x: m.last((h := m.first(x)) * h.shape[1]), []),
    "a function over the units": (
        lambda m, x: m.last(m.first(x).softmax(-1)),
        [ShardedBlock(("first",), "last", elementwise=False)],
    ),
    "a layer with weights": (lambda m, x: m.last(m.norm(m.first(x))), []),
    "random numbers": (lambda m, x: m.last(nn.functional.dropout(m.first(x), 0.5)), []),
    "another tensor": (lambda m, x: m.last(m.first(x) + x.sum()), []),
    "a second use of what is between": (lambda m, x: m.last(h := m.first(x)).sum() + h.sum(), []),
    "a second use of a layer": (lambda m, x: m.last(m.first(m.last(m.first(x)))), []),
    "a way that depends on numbers": (lambda m, x: m.last(m.first(x)) if x.sum() > 0 else x, []),
}


@pytest.mark.parametrize("between", BY_USE)
def test_layer_pairs_are_found_by_data_flow(between):
    forward, expected = BY_USE[between]
    assert find_blocks(Uses(forward), 2)[0] == expected


@pytest.mark.parametrize("drawing", [nn.AlphaDropout, nn.Dropout1d, nn.FeatureAlphaDropout, nn.RReLU])
def test_random_operations_of_unknown_kind_are_not_split(drawing):
    assert find_blocks(nn.Sequential(nn.Linear(4, 8), drawing(), nn.Linear(8, 4)), 2)[0] == []


def test_untraceable_model_uses_its_traceable_parts():
    class Untraceable(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))

        def forward(self, x):
            return self.inner(x) if x.sum() > 0 else x

    assert find_blocks(Untraceable(), 2)[0] == [
        ShardedBlock(("inner.0",), "inner.2", elementwise=True, dropouts=("inner.1",))
    ]


def test_sizes_that_do_not_divide_have_no_effect():
    blocks, doubts = find_blocks(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)), 2)
    assert not blocks and doubts == ["0 by columns, 2 by rows: 2 does not divide 9"]


def test_tracing_leaves_torch_and_the_model_unchanged():
    model, arange = Uses(lambda m, x: m.last(m.first(x) + torch.arange(x.shape[1]))), torch.arange
    model.norm.eval()
    find_blocks(model, 2)
    assert torch.arange is arange and model.training and not model.norm.training


def test_consecutive_layers_are_split_in_pairs():
    """The middle one of three layers ends one block and cannot begin another."""
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    found, doubts = find_blocks(model, 2)
    assert [str(block) for block in found] == ["0 by columns, 2 by rows"]
    assert doubts == ["2 by columns, 4 by rows: 2 is in the block before it"]
