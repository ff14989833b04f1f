"""Pipeline stages: the split points, and the microbatches of a batch."""

from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from hasten.core.errors import ConfigurationError
from hasten.distributed.fx.pipeline_split import extract_stage, find_split_points
from hasten.distributed.fx.stage_balance import balance_stages, estimate_segment_memory
from hasten.methods.distributed.pipeline import _row_indices


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_stages_are_balanced_by_time(stages):
    costs = torch.rand(6, generator=torch.Generator().manual_seed(stages)).tolist()

    def dearest(ends):
        return max(sum(costs[first:end]) for first, end in pairwise([0, *ends]))

    ways = [(*inner, 6) for inner in combinations(range(1, 6), stages - 1)]
    ends = balance_stages([costs] * stages)
    assert dearest(ends) == min(map(dearest, ways)) and tuple(ends) in ways


def test_stages_account_for_lower_cost_of_later_members():
    assert balance_stages([[3, 3, 3, 3], [1, 1, 1, 1]]) == [1, 4]


def test_memory_of_a_segment_is_estimated_without_weights():
    """Weights with gradients and Adam count four times; inputs of a layer once for each microbatch in flight."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 500), nn.Linear(500, 10))
    model[1].requires_grad_(False)
    model[1].register_buffer("unused", torch.zeros(3))
    graph, members = model_and_members = find_split_points(model, 1)
    assert len(members) == 1, model_and_members
    members = [[node] for node in members[0] if node.op == "call_module"]
    held = estimate_segment_memory(
        model, graph, members, (torch.ones(8, 1000), torch.ones(8)), pieces=4, in_flight=[2, 1]
    )
    first, last = 4 * 4 * (1000 * 500 + 500), 4 * (500 * 10 + 10) + 4 * 3
    assert held == [[first + 2 * 4 * 2 * 1000, last], [first + 4 * 2 * 1000, last]]


@pytest.mark.parametrize(("rows", "pieces"), [(10, 4), (8, 4), (7, 4), (2, 4), (1, 3)])
def test_microbatches_contain_every_row_once(rows, pieces):
    places = _row_indices(rows, pieces)
    assert places[places >= 0].tolist() == list(range(rows))
    assert len(places) == pieces * -(-rows // pieces)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.relu() * self.scale


def test_chain_is_split_where_one_tensor_is_passed_on():
    model = Residual()
    graph, members = find_split_points(model, 4)
    assert [[node.name for node in member] for member in members] == [
        ["layers_0", "add"],
        ["layers_1", "add_1"],
        ["layers_2", "add_2", "relu"],
        ["mul"],
    ]
    x = torch.randn(3, 4)
    value = x
    for member in members:
        value = extract_stage(model, graph, [member])(value)
    assert torch.equal(value, model(x))


def test_skip_over_all_layers_leaves_no_split_point():
    class Skipping(Residual):
        def forward(self, x):
            return super().forward(x) + x

    with pytest.raises(ConfigurationError, match="2 stages to fill and found a chain of 1 that have weights"):
        find_split_points(Skipping(), 2)


def test_model_that_differs_in_evaluation_is_refused():
    class DiffersInEvaluation(Residual):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    with pytest.raises(ConfigurationError, match="found no such chain in this model; it looked for"):
        find_split_points(DiffersInEvaluation(), 2)
