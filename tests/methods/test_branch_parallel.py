"""branch_parallel: branches are found by data flow, never by names."""

import pytest
import torch
from torch import nn

from hasten.distributed.fx.branch_finder import assign_branches, find_branch_blocks, graphs_of


class Uses(nn.Module):
    """Layers of one size, and a function that uses them."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.scale, self.norm, self.how = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4, affine=False), forward

    def forward(self, x):
        return self.how(self, x)


def layers_of(model: nn.Module, processes: int = 2, drawing=()) -> list[list[str]]:
    """Returns the layers and weights of each branch of each block."""
    blocks, _ = find_branch_blocks(model, dict(graphs_of(model)), set(drawing), processes)
    return [["".join(_named(node) for node in branch) for branch in block.branches] for block in blocks]


def _named(node) -> str:
    used = [each.target[0] for each in node.all_input_nodes if each.op == "get_attr"]
    return "".join([node.target[0], *used] if node.op == "call_module" else used)


BY_USE = {
    "a sum": (lambda m, x: m.a(x) + m.b(x), [["a", "b"]]),
    "a sum of three, added two by two": (lambda m, x: (m.a(x) + m.b(x)) + m.c(x), [["a", "b", "c"]]),
    "a mean of a list": (lambda m, x: sum(each(x) for each in (m.a, m.b, m.c)) / 3, [["a", "b", "c"]]),
    "two outputs": (lambda m, x: (m.b(h := m.a(x)), m.c(h)), [["b", "c"]]),
    "one block after the other": (lambda m, x: m.c(h := m.a(x) + m.b(x)) * m.d(h), [["a", "b"], ["c", "d"]]),
    "a function before all branches": (lambda m, x: m.a(h := x.relu()) + m.b(h) + m.c(x), [["a", "b", "c"]]),
    "sizes of what all are given": (lambda m, x: m.a(x).view(n := x.shape[0], -1) + m.b(x).view(n, -1), [["a", "b"]]),
    "a weight of its own": (lambda m, x: m.a(x) + x * m.scale, [["a", "s"]]),
    "a way past the branches": (lambda m, x: torch.cat([m.a(x), m.b(x), x, x.relu()]), [["a", "b"]]),
    "a way past a layer inside": (lambda m, x: m.a(h := x.relu()) + h + m.b(x), [["a", "b"]]),
    "layers in a row in a branch": (lambda m, x: m.b(m.a(x).relu()) + m.c(x), [["ab", "c"]]),
    "a block in a branch, which shares out no more": (lambda m, x: m.a(h := m.b(x)) * m.c(h) + m.d(x), [["bac", "d"]]),
    "one layer and a way past it": (lambda m, x: x + m.a(x), []),
    "layers in a row": (lambda m, x: m.b(m.a(x)), []),
    "a branch that reads the other": (lambda m, x: (h := m.a(x)) + m.b(x + h), []),
    "a layer used twice": (lambda m, x: m.a(x) + m.a(x + 1), []),
    "a layer used again later": (lambda m, x: m.a(m.a(x) + m.b(x)), []),
    "statistics that both count": (lambda m, x: m.norm(m.a(x)) + m.norm(m.b(x)), []),
    "a way that depends on numbers": (lambda m, x: m.a(x) + m.b(x) if x.sum() > 0 else x, []),
}


@pytest.mark.parametrize("use", BY_USE)
def test_branches_are_found_by_data_flow(use):
    forward, expected = BY_USE[use]
    assert layers_of(Uses(forward)) == expected


def test_nested_blocks_use_the_level_that_balances_best():
    model = Uses(lambda m, x: m.a(h := m.b(x)) * m.c(h) + m.d(x))
    model.a, model.c = nn.Linear(4, 40), nn.Linear(4, 40)
    assert layers_of(model) == [["a", "c"]]


def test_random_operations_run_on_all_ranks():
    model = Uses(lambda m, x: m.a(x) + nn.functional.relu(m.b(x)) + m.c(x))
    assert layers_of(model, drawing={":relu"}) == [["a", "c"]]


def test_untraceable_model_uses_its_traceable_parts():
    class Untraceable(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Uses(lambda m, x: m.a(x) + m.b(x))

        def forward(self, x):
            return self.inner(x) if x.sum() > 0 else x

    model = Untraceable()
    assert layers_of(model) == [["a", "b"]]
    (block,), _ = find_branch_blocks(model, dict(graphs_of(model)), set(), 2)
    assert [block.describe(branch) for branch in block.branches] == ["inner.a", "inner.b"]


def test_assignment_gives_the_largest_branch_to_the_least_loaded_rank():
    assert assign_branches([[1.0, 5.0, 2.0, 2.0]], 2) == [[1, 0, 1, 1]]
    assert assign_branches([[3.0, 1.0], [3.0, 1.0]], 2) == [[0, 1], [1, 0]], (
        "of two equal blocks no rank has both expensive branches"
    )
    assert assign_branches([[0.0, 0.0]], 2) == [[0, 1]]
