"""PowerSGD: sends the gradient of a matrix as two thin factors (Vogels et al. 2019, arXiv 1905.13727).

For a gradient g of shape (rows, columns), the error e that earlier steps left on this rank, and a basis Q of shape
(columns, ``matrix_approximation_rank``) from the step before:

    m = g + e;  P = mean over ranks of m Q, orthonormalized;  Q = mean over ranks of m' P;  g <- P Q';  e <- m - P Q'

so that the approximation error is sent later (error feedback). All other gradients are sent in full. Householder's QR
replaces the paper's Gram-Schmidt, because it also works if the columns are linearly dependent: for a gradient of rank
1, or of zeros. Its result then depends on rounding, which may differ between machines, so rank 0 broadcasts its P.

torch's powerSGD_hook starts collectives in callbacks of DistributedDataParallel's buckets; gloo runs those in several
threads, so with two buckets the ranks send in different orders and the job hangs. Here all gradients are sent after the
backward pass, in three rounds, in the same order on every backend. Nothing overlaps with the backward pass, but little
is left to overlap.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from hasten import Card, Exactness, Method, RunContext, StepFn, WrapOrder, option
from hasten.distributed import collectives
from hasten.distributed.collectives import GradientBucket
from hasten.utils.observe_step import observe_collectives
from hasten.utils.tensor_list import TensorList


@dataclass(frozen=True)
class PowerSGD(Method):
    """Exchanges gradients after the backward pass, those of matrices as two factors."""

    card = Card(
        summary="sends gradients of matrices as two thin factors, with error feedback",
        exactness=Exactness.CHANGES_TRAINING,
        source="Vogels et al. 2019, arXiv 1905.13727",
        gain_when="the network is slow and the model has large matrices; if quality suffers, start after 1,000 steps",
        accelerates={"backward"},
        applies_to={"distributed", "matrix_weights"},
        order=WrapOrder.FIRST,
        after=("float16",),  # which scales the gradients that the error feedback stores
        replaces={"parallelize"},
        presets=({"matrix_approximation_rank": 4}, {"matrix_approximation_rank": 2}, {"matrix_approximation_rank": 1}),
        trial_priority=3,
    )
    matrix_approximation_rank: int = option(2, at_least=1)  # columns of the factors
    start_powerSGD_iter: int = option(0, at_least=0)  # steps at the start that send full gradients  # noqa: N815
    min_compression_rate: float = option(2.0, above=0)  # matrices that would shrink by less are sent in full

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        assert run.parallel is not None
        if not any(self._is_compressible(weight) for weight in model.parameters()):
            rate, rank = self.min_compression_rate, self.matrix_approximation_rank
            run.report_no_effect(
                self, f"no matrix of the model shrinks by a factor of {rate:g} with matrix_approximation_rank={rank}"
            )
        start, steps = self.start_powerSGD_iter, run.plan.steps
        if steps is not None and start >= steps:
            run.report_no_effect(self, f"it begins after {start} steps, and the run has {steps}")
        collectives.check_no_sparse_gradients(model, self.name)
        collectives.warn_local_batch_norm(model, remedy="; sync_batch_norm gives that")
        collectives.broadcast_module(model)
        run.parallel.warmup_steps = start
        run.observe_effect(self, partial(observe_collectives, "allreduce_"))
        return model

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        assert run.parallel is not None
        weights, progress = [p for p in run.unwrapped_model.parameters() if p.requires_grad], run.progress
        compressed = [index for index, weight in enumerate(weights) if self._is_compressible(weight)]
        bases = run.checkpoint_state[self.name] = TensorList(
            _basis(weights[index], self.matrix_approximation_rank, run.seed + index) for index in compressed
        )
        errors = run.parallel.rank_state[self.name] = TensorList(
            torch.zeros_like(_as_matrix(weights[index])) for index in compressed
        )

        def exchange_gradients() -> None:
            grad_transform()
            if progress.step < self.start_powerSGD_iter or not compressed:
                collectives.all_reduce_gradients(weights)
            else:
                _all_reduce_compressed(GradientBucket(weights), compressed, bases, errors)

        return exchange_gradients

    def _is_compressible(self, weight: torch.Tensor) -> bool:
        if weight.ndim < 2 or not weight.numel() or not weight.requires_grad or weight.is_complex():
            return False
        rows, columns = len(weight), weight.numel() // len(weight)
        rank = min(self.matrix_approximation_rank, rows, columns)
        return rows * columns >= self.min_compression_rate * rank * (rows + columns)


@torch.no_grad()
def _all_reduce_compressed(
    gradients: GradientBucket, compressed: list[int], bases: TensorList, errors: TensorList
) -> None:
    """Averages the gradients over all ranks in place; those with an index in ``compressed`` as two factors."""
    chosen = [gradients.tensors[index] for index in compressed]
    others = [gradient for index, gradient in enumerate(gradients.tensors) if index not in set(compressed)]
    matrices = [_as_matrix(gradient) + error for gradient, error in zip(chosen, errors, strict=True)]
    products = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
    collectives.all_reduce_mean([*others, gradients.shares, *products])
    if not all(product.isfinite().all() for product in products):  # on every rank; must not enter the error feedback
        collectives.all_reduce_mean(chosen)
        return gradients.write_back()
    qr = cast(Any, torch.linalg).qr
    spans: list[torch.Tensor] = [qr(product).Q if dist.get_rank() == 0 else product for product in products]
    collectives.coalesced(spans, lambda numbers: collectives.broadcast_tensors([numbers]))
    bases[:] = [matrix.T @ span for matrix, span in zip(matrices, spans, strict=True)]
    collectives.all_reduce_mean(bases)
    has_gradient = [gradients.shares[index] > 0 for index in compressed]
    for exists, gradient, matrix, span, basis, error in zip(
        has_gradient, chosen, matrices, spans, bases, errors, strict=True
    ):
        if not exists:
            continue  # no rank has a gradient to which the error could be added
        sent = span @ basis.T
        torch.sub(matrix, sent, out=error)
        gradient.copy_(sent.view_as(gradient))
    gradients.write_back()


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with shape (first dimension, all others), in float32 or wider: QR supports no narrower dtype."""
    return tensor.detach().reshape(len(tensor), -1).to(torch.promote_types(tensor.dtype, torch.float32))


def _basis(weight: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """Initial basis for a weight's gradient: ``rank`` random columns from ``seed``, the same on all ranks."""
    matrix, generator = _as_matrix(weight), torch.Generator().manual_seed(seed)
    shape = matrix.shape[1], min(rank, *matrix.shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(matrix)
