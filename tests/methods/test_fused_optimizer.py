"""fused_optimizer: the same optimizer object with torch's fused kernels; the same formula."""

from copy import deepcopy

import pytest
import torch

from hasten.methods.fused_optimizer import _fuse
from hasten.profiling.probe import facts_of
from hasten.testing.models import LookUp
from hasten.utils.optimizers import align_state, fused_step_obstacle

OPTIMIZERS = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_fused_optimizer_of_torch_gives_the_same_weights(name, perceptron, trained):
    usual, fused = (
        trained(perceptron(optimizer=OPTIMIZERS[name]), recipe) for recipe in ("baseline", "fused_optimizer")
    )
    assert fused.run.no_effect == [] and all(group["fused"] for group in fused.run.optimizer.param_groups)
    for key in usual.weights:
        torch.testing.assert_close(fused.weights[key], usual.weights[key], rtol=1e-4, atol=1e-6)


def test_scheduler_keeps_its_optimizer(perceptron, trained):
    def optimizer(model, number):
        adam = torch.optim.Adam(model.parameters(), lr=1.0)
        return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1e-3 * (step + 1))

    run = trained(perceptron(optimizer=optimizer), "fused_optimizer", 3)
    assert run.program.schedule.optimizer is run.run.optimizer
    assert run.run.optimizer.param_groups[0]["lr"] == pytest.approx(4e-3)  # learning rate of the fourth step


def test_state_is_loaded_into_a_fused_optimizer(perceptron, trained):
    first, second = (trained(perceptron(), "fused_optimizer", number) for number in (3, 1))
    second.run.optimizer.load_state_dict(first.run.optimizer.state_dict())
    second.program.forward_backward(next(iter(second.program.train)))
    second.program.optimizer_step()
    assert next(iter(second.run.optimizer.state.values()))["step"].item() == 4


def stepped(optimizer, parameter, times=1):
    for number in range(times):
        gradient = 0.1 * (number + 1) * torch.arange(parameter.numel()).view(parameter.shape)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step()


@pytest.mark.parametrize("is_loaded_late", [False, True])
def test_state_of_another_memory_format_is_brought_into_that_of_the_weights(is_loaded_late):
    """torch's fused kernel on the CPU would update each weight by the moments of another one."""
    start = torch.linspace(-1, 1, 48).reshape(4, 3, 2, 2)
    plain = torch.nn.Parameter(start.clone())
    usual = torch.optim.Adam([plain], lr=0.1)
    stepped(usual, plain, 2)
    checkpoint, weights = deepcopy(usual.state_dict()), plain.detach().clone()
    stepped(usual, plain)
    resumed = torch.nn.Parameter(weights.contiguous(memory_format=torch.channels_last))
    fused = torch.optim.Adam([resumed], lr=0.1)
    if is_loaded_late:
        _fuse(fused)
        fused.load_state_dict(checkpoint)
    else:
        fused.load_state_dict(checkpoint)
        _fuse(fused)
    assert fused.param_groups[0]["fused"]
    stepped(fused, resumed)
    torch.testing.assert_close(resumed.detach(), plain.detach())


def test_checkpoint_of_a_fused_run_holds_the_options_and_the_memory_format_of_the_task():
    parameter = torch.nn.Parameter(torch.ones(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    _fuse(optimizer)
    stepped(optimizer, parameter)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    saved = optimizer.state_dict()
    assert [group["fused"] for group in saved["param_groups"]] == [None, None]
    assert saved["state"][0]["exp_avg"].is_contiguous() and not optimizer.state[parameter]["exp_avg"].is_contiguous()
    assert all(group["fused"] for group in optimizer.param_groups), "the run itself continues with the fused kernels"


def test_weight_with_gaps_in_memory_is_left_as_it_is():
    """As of a first layer that was cut down to one channel: torch's fused kernel on the CPU checks no strides."""
    layer = torch.nn.Conv2d(3, 8, 3)
    layer.weight = torch.nn.Parameter(layer.weight.detach()[:, :1])
    assert "slice of a larger tensor" in fused_step_obstacle(torch.optim.Adam(layer.parameters()))
    layer.weight = torch.nn.Parameter(layer.weight.detach().contiguous())
    assert fused_step_obstacle(torch.optim.Adam(layer.parameters())) is None
    transposed = torch.nn.Parameter(torch.randn(4, 6).t())
    assert fused_step_obstacle(torch.optim.Adam([transposed])) is None


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_momentum_is_resumed():
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    align_state(optimizer)
    assert optimizer.state[table.weight]["momentum_buffer"].is_sparse


class AdamSubclass(torch.optim.Adam):
    """A subclass may have its own step."""


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3), "torch has no fused RMSprop"),
        (lambda model: AdamSubclass(model.parameters(), lr=1e-3), "torch has no fused AdamSubclass"),
        (lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), "the task's Adam is fused already"),
    ],
)
def test_unsupported_optimizer_has_no_effect(optimizer, why, perceptron, trained):
    ((name, reason),) = trained(perceptron(optimizer=optimizer), "fused_optimizer", 1).run.no_effect
    assert name == "fused_optimizer" and why in reason


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1, "maximize": True}])
def test_weight_that_gets_its_first_gradient_later_has_the_momentum_that_it_has_unfused(options):
    def trained(fuse):
        early, late = (torch.nn.Parameter(torch.linspace(0.1, 1.0, 12)) for _ in range(2))
        optimizer = torch.optim.SGD([early, late], lr=0.1, momentum=0.9, **options)
        if fuse:
            _fuse(optimizer)
        for step in range(6):
            early.grad = torch.linspace(-1.0, 1.0, 12)
            late.grad = torch.linspace(1.0, 2.0, 12) if step > 2 else None
            optimizer.step()
        return early, late

    for fused, unfused in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(fused, unfused, rtol=1e-6, atol=1e-7)


def test_sgd_with_dampening_is_left_as_it_is(perceptron, trained):
    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)

    ((name, why),) = trained(perceptron(optimizer=optimizer), "fused_optimizer", 1).run.no_effect
    assert name == "fused_optimizer" and "dampening" in why


def sparse_table():
    model = LookUp()
    model.scores.sparse = True
    return model


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_optimizer_of_sparse_gradients_is_left_as_it_is(optimizer, transformer, trained):
    task = transformer(model=sparse_table, optimizer=lambda model: optimizer(model.parameters()))
    run = trained(task, "fused_optimizer", 2)
    assert dict(run.run.no_effect)["fused_optimizer"].startswith("the gradients of scores are sparse")
    assert "unfused_optimizer" not in facts_of(run.program)


def test_optimizer_of_the_other_weights_is_fused():
    """Sparse gradients that another optimizer updates are no obstacle, nor are those of frozen weights."""
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 2))
    dense, every = (torch.optim.SGD(part.parameters()) for part in (model[1], model))
    assert fused_step_obstacle(dense, model) is None and "gradients of 0" in fused_step_obstacle(every, model)
    model[0].requires_grad_(False)
    assert fused_step_obstacle(every, model) is None
