"""Muon: updates the hidden weight matrices by the orthogonalized momentum of their gradients."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from hasten import Card, Exactness, Method, NoEffectError, RunContext, StepFn, WrapOrder, option
from hasten.utils.op_recorder import NOT_CHECKED
from hasten.utils.optimizers import OptimizerList
from hasten.utils.search_range import SearchRange
from hasten.utils.tensor_list import TensorList

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a x + b x^3 + c x^5, which moves singular values near 1 (Jordan et al.)
ITERATIONS = 5
AS_ADAM = 0.2  # root mean square of Adam's updates, in units of the learning rate (Liu et al., section 2.2)
STACKED_NUMBERS = 2**24  # of equal matrices that are updated together: small ones cost more calls than computation
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Muon(Method):
    """W <- W - lr (0.2 sqrt(max(m, n)) O + weight_decay W), with O near U V^T of the momentum U S V^T, m x n.

    The momentum is Nesterov's, B <- momentum B + (1 - momentum) g. The factor of O gives an update the size of one of
    Adam, so that the learning rates, schedule and weight decay of the task hold, whose optimizer is Adam or AdamW. The
    weights of convolutions count as matrices with a row for each output channel. All other parameters (embeddings, the
    output layer, biases, normalization) are updated by the task's own optimizer.
    """

    card = Card(
        summary="update hidden weight matrices by their orthogonalized momentum, in place of Adam",
        exactness=Exactness.CHANGES_TRAINING,
        source="Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, arXiv 2502.16982",
        gain_when="transformers trained by Adam or AdamW, with many samples in a batch: a step takes longer",
        accelerates={"steps"},
        applies_to={"matrix_weights"},
        requires={"full_weights", "replicated_weights"},
        order=WrapOrder.FIRST,  # whatever skips a step, such as a loss scale, skips this, too
        search_space={"momentum": SearchRange.switch(0.95)},  # it allows other lengths and learning rates
        trial_priority=1,
    )

    momentum: float = option(0.95, at_least=0, below=1)

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        if not isinstance(run.optimizer, torch.optim.Adam) or isinstance(run.optimizer, OptimizerList):
            kind = type(run.optimizer).__name__
            return run.report_no_effect(self, f"the optimizer is a {kind}, not Adam or AdamW", optimizer_step)
        matrices = hidden_matrices(run.unwrapped_model, run.optimizer)
        if not matrices:
            return run.report_no_effect(self, "the optimizer trains no hidden weight matrix", optimizer_step)
        average = run.checkpoint_state[self.name] = TensorList(torch.zeros_like(weight) for weight in matrices)

        def step() -> None:
            gradients = [weight.grad for weight in matrices]
            try:
                for weight in matrices:
                    weight.grad = None  # which Adam then leaves as it is
                optimizer_step()
            finally:
                for weight, gradient in zip(matrices, gradients, strict=True):
                    weight.grad = gradient
            self._update(matrices, average, run.optimizer)

        run.observe_effect(self, partial(_observe, matrices, run))
        return step

    @torch.no_grad()
    def _update(self, matrices: list[nn.Parameter], average: list[torch.Tensor], optimizer: Any) -> None:
        scale, overflow = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))  # of a loss scale
        if overflow is not None and bool(overflow.item()):
            return
        groups = {weight: group for group in optimizer.param_groups for weight in group["params"]}
        updated, directions = list[nn.Parameter](), list[torch.Tensor]()
        for weight, momentum in zip(matrices, average, strict=True):
            if weight.grad is None:
                continue
            group, gradient = groups[weight], weight.grad if scale is None else weight.grad / scale
            decay, rate = group["weight_decay"], group["lr"]
            if decay and group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
                weight.mul_(1 - rate * decay)
            elif decay:
                gradient = gradient.add(weight, alpha=decay)
            momentum.lerp_(gradient, 1 - self.momentum)
            updated.append(weight)
            directions.append(gradient.lerp(momentum, self.momentum).flatten(1))
        for weight, direction in zip(updated, orthogonalized(directions), strict=True):
            size = AS_ADAM * max(direction.shape) ** 0.5
            weight.sub_(direction.view_as(weight) * (size * groups[weight]["lr"]))


def hidden_matrices(model: nn.Module, optimizer: Any) -> list[nn.Parameter]:
    """The weights that Muon updates: matrices and convolutions, but those of embeddings and of the output layer."""
    trained = {weight for group in optimizer.param_groups for weight in group["params"]}
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, *CONVOLUTIONS))]
    left_out = {layer.weight for layer in layers[-1:]}  # the output layer, by the order of registration
    left_out |= {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    filters = {layer.weight for layer in layers if isinstance(layer, CONVOLUTIONS)}
    return [
        weight
        for name, weight in model.named_parameters()
        if weight in trained - left_out
        and (weight.ndim == 2 or weight in filters)
        and min(weight.flatten(1).shape) > 1
        and not any(word in name.lower() for word in ("embed", "pos"))  # as a bare parameter, such as positions
    ]


def orthogonalized(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Near U V^T of each matrix U S V^T: the singular values end between about 0.7 and 1.2.

    By Newton and Schulz's iteration, in bfloat16 on a GPU, where it needs no more precision. Matrices of one shape are
    computed together.
    """
    results = [*matrices]
    for indices in _equal(matrices):
        stack = torch.stack([matrices[index] for index in indices])
        for index, result in zip(indices, _orthogonalized(stack), strict=True):
            results[index] = result
    return results


def _equal(matrices: list[torch.Tensor]) -> Iterator[list[int]]:
    """Indices of matrices of one shape, dtype and device, of limited size together."""

    def kind(index: int) -> tuple[Any, ...]:
        matrix = matrices[index]
        return (*matrix.shape, str(matrix.dtype), str(matrix.device))

    for _, group in groupby(sorted(range(len(matrices)), key=kind), kind):
        indices = [*group]
        step = max(1, STACKED_NUMBERS // matrices[indices[0]].numel())
        yield from (indices[first : first + step] for first in range(0, len(indices), step))


def _orthogonalized(stack: torch.Tensor) -> torch.Tensor:
    """The same for a stack of matrices, shape (matrices, m, n)."""
    a, b, c = COEFFICIENTS
    x = stack.bfloat16() if stack.is_cuda else stack.float()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(stack.dtype)


def _observe(matrices: list[nn.Parameter], run: RunContext) -> Generator[None, None, str]:
    """Evidence that a step moved the matrices along orthogonal matrices: by their size, as Adam moves none."""
    before = [weight.detach().clone() for weight in matrices]
    rates = {weight: float(group["lr"]) for group in run.optimizer.param_groups for weight in group["params"]}
    decays = {weight: group["weight_decay"] for group in run.optimizer.param_groups for weight in group["params"]}
    yield
    done = seen = 0
    for weight, old in zip(matrices, before, strict=True):
        rows, columns = old.flatten(1).shape
        expected = rates[weight] * AS_ADAM * (max(rows, columns) * min(rows, columns)) ** 0.5
        change = weight.detach() - old * (1 - rates[weight] * decays[weight])
        seen += bool(change.any())
        done += expected > 0 and 0.5 < float(change.norm()) / expected < 1.5
    if not seen:
        return f"{NOT_CHECKED}: the step changed no weight"
    if not done:
        raise NoEffectError(f"none of {len(matrices)} matrices moved along an orthogonal matrix")
    return f"{done} of {len(matrices)} hidden matrices moved along an orthogonal matrix"
