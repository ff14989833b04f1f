"""Checks on a few samples that a partitioned model computes the same outputs and gradients as the original."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hasten.core.errors import ConfigurationError, format_error
from hasten.core.run_context import RunContext
from hasten.core.types import Batch
from hasten.distributed.dtensor_state import gather_full_state
from hasten.utils import batch as batches

SAMPLES = 8
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative to the original; DEFAULT_TOLERANCE for other dtypes
DEFAULT_TOLERANCE = 3e-2

Tensors = dict[str, torch.Tensor]


class PartitionPlan(NamedTuple):
    """``partition(model, blocks)`` partitions a model in place.

    With ``everywhere`` each process must get the gradients of all parameters, else only of some.
    """

    partition: Callable[[torch.nn.Module, list[Any]], None]
    everywhere: bool = True


def verify_partition(
    model: torch.nn.Module, found: list[Any], plans: Sequence[PartitionPlan], name: str, run: RunContext
) -> tuple[list[Any], list[str]]:
    """The blocks that compute the same after each of the ``plans``, and reasons against the others. A collective.

    Partitions copies of the model: all blocks together first, and one by one if that fails. ConfigurationError that
    names the method ``name`` if each block is correct by itself, but all together are not.
    """
    if not found:
        return [], []
    batch, whole_batch = run.services.peek_batch(), run.task.loss is None
    samples = batches.chunk_batch(batch, max(1, batches.batch_size(batch) // SAMPLES))[0]
    expected = outputs_and_grads(copy.deepcopy(model), samples, whole_batch)

    def problem_of(blocks: list[Any]) -> str | None:
        for plan in plans:
            partitioned = copy.deepcopy(model)
            try:
                plan.partition(partitioned, blocks)
                actual = gather_full_state(outputs_and_grads(partitioned, samples, whole_batch))
                problem = _difference(actual, expected, plan.everywhere)
            except Exception as error:
                problem = f"it cannot be partitioned ({format_error(error, 100)})"
            if run.ranks.any(problem is not None):
                return problem or "it fails on another rank"
        return None

    if problem_of(found) is None:
        return found, []
    problems = {block: problem_of([block]) for block in found}
    correct = [block for block, problem in problems.items() if problem is None]
    if correct and (problem := problem_of(correct)):
        reason = f"each block is correct by itself, but all together are not: {problem}"
        raise ConfigurationError(f"{name}: {reason}; leave {name} out")
    return correct, [f"{block}: {problem}" for block, problem in problems.items() if problem]


def _difference(actual: tuple[Tensors, Tensors], expected: tuple[Tensors, Tensors], everywhere: bool) -> str | None:
    """The first output or gradient that differs, as text; None if none does. ``everywhere``: of ``PartitionPlan``."""
    (outputs, gradients), (expected_outputs, of_all) = actual, expected
    if name := first_mismatch(outputs, expected_outputs):
        return f"{name} differs"
    local = of_all if everywhere else {name: of_all[name] for name in gradients if name in of_all}
    if name := first_mismatch(gradients, local):
        return f"the gradient of {name} differs"
    return None


def outputs_and_grads(model: torch.nn.Module, batch: Batch, whole_batch: bool) -> tuple[Tensors, Tensors]:
    """(outputs for a batch, gradients of the sum of their mean squares by parameter), both name -> tensor.

    Leaves ``model`` in evaluation mode, with these gradients.
    """
    model.eval()
    outputs = batches.batch_tensors(batches.call_model(model, batch, whole_batch)[0])
    outputs = [tensor for tensor in outputs if tensor.is_floating_point()]
    terms = [tensor.square().mean() for tensor in outputs if tensor.requires_grad]
    if not terms:
        effect = "no partition can be verified; take another strategy"
        raise ConfigurationError(f"the model returns no tensor that depends on its parameters, so {effect}")
    sum(terms[1:], terms[0]).backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {f"output {index}": tensor.detach() for index, tensor in enumerate(outputs)}, gradients


def first_mismatch(actual: Tensors, expected: Tensors) -> str | None:
    """Name of the first tensor that differs by more than rounding of the largest value of all; None if none."""
    if names := actual.keys() ^ expected.keys():
        return min(names)
    largest = max((tensor.abs().max() for tensor in expected.values()), default=0.0)
    for name, tensor in expected.items():
        tolerance = TOLERANCE.get(tensor.dtype, DEFAULT_TOLERANCE) * largest
        if actual[name].shape != tensor.shape or not (actual[name] - tensor).abs().max() <= tolerance:  # NaN differs
            return name
    return None
