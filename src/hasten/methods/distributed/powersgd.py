"""Gradients of matrices as products of two thin ones, which is all that travels (PowerSGD, Vogels et al. 2019, arXiv 1905.13727).

For a gradient g of shape (rows, columns) with the rest e that earlier steps left on this rank, and a basis Q of ``rank`` columns from the step before,

    m = g + e;    P = mean over ranks of m Q, made orthonormal;    Q = mean over ranks of m' P;    g <- P Q';    e <- m - P Q'

so that what is cut off is sent later (error feedback). Everything else travels whole. Orthonormal by Householder's QR, which, unlike the paper's Gram-Schmidt,
also holds where the columns depend on each other: of a gradient of rank 1, or of zeros. There, what comes out is a matter of rounding, and machines of two kinds
would each get a P of their own; so the first rank's is everybody's.

torch's powerSGD_hook starts collectives from the callbacks of DistributedDataParallel's buckets; gloo runs those in several threads, so that with two buckets the
ranks' messages meet in different orders and the job hangs. Here all gradients go after the backward pass, in three rounds, in the same order on any
backend. That hides nothing behind the backward pass, and there is little left to hide.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn
from hasten.distributed.collectives import (
    GradientBucket,
    all_reduce_gradients,
    all_reduce_mean,
    broadcast_module,
    broadcast_tensors,
    check_no_sparse_gradients,
    coalesced,
    warn_local_batch_norm,
)


@dataclass(frozen=True)
class PowerSGD(Method):
    card = Card(
        summary="gradients of matrices sent as products of two thin ones, what is cut off is sent later",
        exactness=Exactness.CHANGES_TRAINING,
        source="Vogels et al. 2019, arXiv 1905.13727",
        gain_when="the network is slow and the model has large matrices; start after the first thousand steps if quality suffers",
        accelerates={"backward"},
        applies_to={"distributed", "matrix_weights"},
        order=WrapOrder.FIRST,
        after=("float16",),  # which changes the scale of the gradients that are remembered
        replaces={"parallelize"},
        presets=({"rank": 4}, {"rank": 2}, {"rank": 1}),
        trial_priority=3,
    )
    matrix_approximation_rank: int = option(2, at_least=1)
    start_powerSGD_iter: int = option(0, at_least=0)  # so many steps at first send whole gradients
    min_compression_rate: float = option(
        2.0, above=0
    )  # a matrix that would not become so many times shorter travels whole

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not any(self._shortens(weight) for weight in model.parameters()):
            run.report_no_effect(
                self,
                f"no matrix of the model becomes {self.min_compression_rate:g} times shorter by rank {self.matrix_approximation_rank}",
            )
        if run.plan.steps is not None and self.start_powerSGD_iter >= run.plan.steps:
            run.report_no_effect(
                self, f"it begins after {self.start_powerSGD_iter} steps, and the run has {run.plan.steps}"
            )
        check_no_sparse_gradients(model, self.name)
        warn_local_batch_norm(model, remedy="; sync_batch_norm gives that")
        broadcast_module(model)
        run.parallel.warmup_steps = self.start_powerSGD_iter
        return model

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        weights, progress = (
            [weight for weight in run.unwrapped_model.parameters() if weight.requires_grad],
            run.progress,
        )
        short = [number for number, weight in enumerate(weights) if self._shortens(weight)]
        bases = run.checkpoint_state[self.name] = Tensors(
            [_basis(weights[number], self.matrix_approximation_rank, run.seed + number) for number in short]
        )
        rests = run.parallel.rank_state[self.name] = Tensors(
            [torch.zeros_like(_matrix(weights[number])) for number in short]
        )

        def exchanged():
            grad_transform()
            if progress.step < self.start_powerSGD_iter or not short:
                all_reduce_gradients(weights)
            else:
                _exchange(GradientBucket(weights), short, bases, rests)

        return exchanged

    def _shortens(self, weight: torch.Tensor) -> bool:
        if weight.ndim < 2 or not weight.numel() or not weight.requires_grad or weight.is_complex():
            return False
        rows, columns = len(weight), weight.numel() // len(weight)
        return rows * columns >= self.min_compression_rate * min(self.matrix_approximation_rank, rows, columns) * (
            rows + columns
        )


@torch.no_grad()
def _exchange(gradients: GradientBucket, short: list[int], bases: "Tensors", rests: "Tensors") -> None:
    """Averages the gradients of all ranks, those of the ``short`` ones approximately."""
    chosen = [gradients.tensors[number] for number in short]
    whole = [gradient for number, gradient in enumerate(gradients.tensors) if number not in set(short)]
    matrices = [_matrix(gradient) + rest for gradient, rest in zip(chosen, rests.tensors, strict=True)]
    seen = [matrix @ basis for matrix, basis in zip(matrices, bases.tensors, strict=True)]
    all_reduce_mean([*whole, gradients.shares, *seen])
    if not all(columns.isfinite().all() for columns in seen):  # on every rank, and never to be remembered
        all_reduce_mean(chosen)
        return gradients.write_back()
    spans = [_orthonormal(columns) if dist.get_rank() == 0 else columns for columns in seen]
    coalesced(spans, lambda numbers: broadcast_tensors([numbers]))
    bases.tensors = [matrix.T @ span for matrix, span in zip(matrices, spans, strict=True)]
    all_reduce_mean(bases.tensors)
    used = [gradients.shares[number] > 0 for number in short]
    for has_one, gradient, matrix, span, basis, rest in zip(
        used, chosen, matrices, spans, bases.tensors, rests.tensors, strict=True
    ):
        if not has_one:
            continue  # nobody has a gradient that the rest could travel with
        sent = span @ basis.T
        torch.sub(matrix, sent, out=rest)
        gradient.copy_(sent.view_as(gradient))
    gradients.write_back()


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(columns).Q


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """With its first dimension as rows, in float32 at least: nothing factors shorter numbers."""
    return tensor.detach().reshape(len(tensor), -1).to(torch.promote_types(tensor.dtype, torch.float32))


def _basis(weight: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """Columns that all ranks draw alike."""
    matrix = _matrix(weight)
    columns = torch.randn(
        matrix.shape[1], min(rank, *matrix.shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return columns.to(matrix)


class Tensors:
    """Tensors that travel in checkpoints."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors

    def state_dict(self) -> dict:
        return {str(number): tensor for number, tensor in enumerate(self.tensors)}

    def load_state_dict(self, state: dict) -> None:
        self.tensors = [state[name].to(tensor) for name, tensor in self.state_dict().items()]
