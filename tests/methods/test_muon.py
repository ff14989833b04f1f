"""muon: hidden matrices move as torch.optim.Muon moves them, everything else as without it."""

import pytest
import torch
from torch import nn

from hasten.core.recipe import Recipe
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.methods.muon import hidden_matrices, orthogonalized
from hasten.testing import tasks


class Reader(nn.Module):
    """Has one matrix of each kind, of which only ``hidden`` and ``filters`` are Muon's."""

    def __init__(self):
        super().__init__()
        self.words, self.position = nn.Embedding(10, 6), nn.Parameter(torch.randn(4, 6))
        self.hidden, self.filters, self.norm = nn.Linear(6, 8), nn.Conv1d(2, 4, 3), nn.LayerNorm((4, 6))
        self.gate, self.head = nn.Linear(6, 1), nn.Linear(8, 10)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)  # is not trained, and so not the output layer


def test_only_hidden_matrices_are_updated():
    model = Reader()
    found = hidden_matrices(model, torch.optim.Adam(model.parameters()))
    assert [*map(id, found)] == [id(model.hidden.weight), id(model.filters.weight)]
    model.hidden.requires_grad_(False)
    found = hidden_matrices(model, torch.optim.Adam([*model.filters.parameters(), *model.head.parameters()]))
    assert [*map(id, found)] == [id(model.filters.weight)]


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5)])
def test_singular_values_end_near_one(shape):
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) * scale for scale in (1e-3, 1.0, 1e3)]
    results = orthogonalized([*matrices, torch.randn(3, 9, generator=generator)])
    for matrix, result in zip(matrices, results, strict=False):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        values = torch.linalg.svdvals(result)
        assert result.shape == matrix.shape and values.min() > 0.6 and values.max() < 1.25
        assert torch.trace(left.mT @ result @ right.mT) > 0.6 * min(shape), "its directions are those of the matrix"


@pytest.mark.parametrize(("kind", "decay"), [(torch.optim.AdamW, 0.1), (torch.optim.Adam, 0.0)])
def test_steps_are_those_of_torch(kind, decay, transformer):
    """With torch's own Muon for the matrices, and the task's optimizer for the rest; it computes in bfloat16."""

    def optimizer(model):
        return kind(model.parameters(), lr=0.01, weight_decay=decay)

    task = transformer(optimizer=optimizer)
    tested = build(task, make_methods(Recipe.parse("muon")))
    model = build(task).run.model
    matrices = hidden_matrices(model, optimizer(model))
    rest = [weight for weight in model.parameters() if not any(weight is one for one in matrices)]
    adam = kind(rest, lr=0.01, weight_decay=decay)
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    for _, batch in zip(range(4), tested.train.epoch(0, 0), strict=False):
        tested.zero_grad()
        tested.forward_backward(batch)
        tested.grad_transform()
        tested.optimizer_step()
        model.zero_grad()
        task.loss(model(batch[0]), batch[1]).backward()
        adam.step()
        muon.step()
    names = {name for name, weight in model.named_parameters() if any(weight is one for one in matrices)}
    assert names
    for (name, expected), weight in zip(model.named_parameters(), tested.run.model.parameters(), strict=True):
        error = (weight - expected).norm() / expected.norm()
        assert error < 5e-3, name


def test_another_optimizer_is_left_alone(trained):
    task = tasks.transformer(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    run = trained(task, "muon", number=2).run
    assert [(name, "is a SGD" in why) for name, why in run.no_effect] == [("muon", True)]
