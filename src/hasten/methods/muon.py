"""Muon: updates the hidden weight matrices by the orthogonalized momentum of their gradients."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from hasten import Card, Exactness, Method, NoEffectError, RunContext, StepFn, WrapOrder, option
from hasten._torch_compat import in_place_version
from hasten.utils.op_recorder import NOT_CHECKED
from hasten.utils.optimizers import OptimizerList
from hasten.utils.search_range import SearchRange
from hasten.utils.tensor_list import TensorList

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a x + b x^3 + c x^5, which moves singular values near 1 (Jordan et al.)
ITERATIONS = 5
AS_ADAM = 0.2  # root mean square of Adam's updates, in units of the learning rate (Liu et al., section 2.2)
STACKED_NUMBERS = 2**24  # of equal matrices that are updated together: small ones cost more calls than computation
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)
NAMED_LAYERS = ("Linear", "Conv1D")  # of libraries such as PyTorch Geometric and Transformers


@dataclass(frozen=True)
class Muon(Method):
    """W <- W - lr (0.2 sqrt(max(m, n)) O + weight_decay W), with O near U V^T of the momentum U S V^T, m x n.

    The momentum is Nesterov's, B <- momentum B + (1 - momentum) g. The factor of O gives an update the size of one of
    Adam, so that the learning rates, schedule and weight decay of the task hold, whose optimizer is Adam or AdamW. The
    weights of convolutions count as matrices with a row for each output channel. All other parameters (embeddings, the
    output layer, biases, normalization, parameters of layers that torch does not know) are updated by the task's own
    optimizer.
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
        if any(group.get("maximize") for group in run.optimizer.param_groups):
            return run.report_no_effect(self, "the optimizer maximizes", optimizer_step)
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

        run.observe_effect(self, partial(_observe, matrices, run.optimizer))
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
    """The weights that Muon updates: those of linear, recurrent and attention layers and of convolutions, except for
    the output layer, which is the last one that is trained, and for weights that an embedding shares.
    """
    trained = {weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad}
    layers: list[list[nn.Parameter]] = []
    for module in model.modules():
        if isinstance(module, LAYERS) or type(module).__name__ in NAMED_LAYERS:
            weights = [weight for weight in module.parameters(recurse=False) if weight.ndim > 1 and weight in trained]
            layers += [weights] if weights else []
    left_out = {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    left_out.update(layers[-1] if layers else ())
    found = dict.fromkeys(weight for layer in layers for weight in layer if weight not in left_out)
    return [weight for weight in found if weight.is_floating_point() and min(weight.flatten(1).shape) > 1]


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
    x = x / (x.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(stack.dtype)


def _observe(matrices: list[nn.Parameter], optimizer: Any) -> Generator[None, None, str]:
    """Evidence that a step moved the matrices, and that Adam did not."""

    def state_of(weight: nn.Parameter) -> tuple[int, float]:
        steps = optimizer.state.get(weight, {}).get("step", 0.0)  # those of Adam, which may have trained it before
        return in_place_version(weight), float(steps)

    before = [state_of(weight) for weight in matrices]
    yield
    after = [state_of(weight) for weight in matrices]
    moved = sum(new[0] > old[0] and new[1] == old[1] for old, new in zip(before, after, strict=True))
    if not moved and not any(new > old for old, new in zip(before, after, strict=True)):
        return f"{NOT_CHECKED}: the step changed none of the {len(matrices)} hidden matrices"
    if not moved:
        raise NoEffectError(f"the optimizer itself moved the {len(matrices)} hidden matrices")
    return f"{moved} of {len(matrices)} hidden matrices moved along an orthogonal matrix"
