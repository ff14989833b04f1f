"""What a training that does not repeat itself does repeat, and the operation that is to blame.

Some operations give other bits in every run: on a GPU, those that add atomically, in the order in which their threads
arrive. Two runs of one recipe from one seed then end with different weights, and different weights accuse no method.
What repeats are the batches, to the bit, and the size of the difference between two runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Any

import torch

from hasten._torch_compat import TorchDispatchMode
from hasten.benchmarking.equivalence_runs import EquivalenceCase, EquivalenceRun, run_arm
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method, hooks_of
from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.core.types import Batch, BatchFn
from hasten.engine.loop import train_steps
from hasten.engine.plan import Program
from hasten.engine.registry import make_method, method_class, method_names
from hasten.utils.batch import batch_tensors
from hasten.utils.tree import tree_leaves

WATCHED_STEPS = 3
UNINITIALIZED = ("empty", "new_empty", "resize_")  # operations whose output is whatever the memory held
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclass(frozen=True)
class FingerprintBatches(Method):
    """A method that notes the SHA-256 of every batch as the model gets it, in ``fingerprints``."""

    card = Card(
        summary="notes a fingerprint of every batch",
        exactness=Exactness.BIT_EXACT,
        order=WrapOrder.LAST,
        after=tuple(method_names()),  # outermost: the batch after all transforms
    )
    fingerprints: list[str] = field(default_factory=list[str])

    def batch_transform(self, to_device: BatchFn, run: RunContext) -> BatchFn:
        def transform_and_note(batch: Batch) -> Batch:
            batch, digest = to_device(batch), sha256()
            for tensor in batch_tensors(batch):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self.fingerprints.append(digest.hexdigest())
            return batch

        return transform_and_note


@dataclass(frozen=True)
class Control:
    """The second run of an exactness check's base, and what else shows whether the candidate is to blame.

    Attributes:
        base: The second run of the base.
        same_batches: Whether all batches of base and candidate are identical to the bit, on every rank.
        data_only: Whether the methods that only the candidate has wrap the hook ``data`` and nothing else.
        nondeterministic_op: As ``find_nondeterministic_op``.
    """

    base: EquivalenceRun
    same_batches: bool
    data_only: bool
    nondeterministic_op: str | None


def run_control(case: EquivalenceCase, first: EquivalenceRun) -> Control:
    """Runs both arms of a check again, for as many steps as the ``first`` run of the base. All ranks must call it."""
    observers = FingerprintBatches(), FingerprintBatches()
    again = run_arm(case, case.base, (observers[0],), first.steps)
    run_arm(case, case.candidate, (observers[1],), first.steps)
    fingerprints = [observer.fingerprints for observer in observers]
    added = [make_method(name, case.candidate.methods[name]) for name in case.added]
    data_only = all(set(hooks_of(method)) <= {"data"} for method in added)
    count = min(map(len, fingerprints))
    base, candidate = (run[:count] for run in fingerprints)
    differs = any(not torch.equal(first.weights[name], again.weights[name]) for name in first.weights)
    blame = None
    if case.ranks.any(differs):
        blame = find_nondeterministic_op(partial(case.program, _watchable(case.base)))
    batches_differ = case.ranks.any(count < first.steps or base != candidate)
    return Control(again, not batches_differ, data_only, blame)


def _watchable(recipe: Recipe) -> Recipe:
    """The recipe without methods that replay a recorded step: its operations pass no recorder, nor do checksums."""
    replaying = [name for name in recipe.methods if "python_between_kernels" in method_class(name).card.invalidates]
    return recipe.drop(*replaying)


def find_nondeterministic_op(build: Callable[[], Program]) -> str | None:
    """The first operation, such as ``aten.index_add_``, that gives two outputs for the same inputs.

    Trains the first WATCHED_STEPS steps of two equal programs, each built just before: building sets the seeds. None
    where all their operations repeat: the difference comes from a value that no operation of PyTorch has computed, or
    shows in few steps only.
    """
    for (name, inputs, outputs), (other_name, *other) in zip(_record(build()), _record(build()), strict=False):
        if name != other_name:
            return None  # another path through the model
        if inputs == other[0] and outputs != other[1] and not name.partition(".")[2].startswith(UNINITIALIZED):
            return name
    return None


def _record(program: Program) -> list[tuple[str, list[int], list[int]]]:
    with program.process_context(), _CallRecorder() as recorder:
        for _ in islice(train_steps(program), WATCHED_STEPS):
            pass
    return recorder.calls


class _CallRecorder(TorchDispatchMode):
    """Records (operation, checksums of its inputs, checksums of its outputs and of what it may have written to)."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int], list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _checksums([*args, kwargs])
        output = func(*args, **kwargs)
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)  # of higher order
        self.calls.append((f"{func.namespace}.{name}", inputs, _checksums([output, *args, kwargs])))
        return output


def _checksums(tree: Any) -> list[int]:
    """Of each tensor the sum of the elements' bits as integers, computed on the tensor's device."""
    sums: list[int] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            values = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            bits = values.detach().contiguous().reshape(-1).view(INTEGERS[values.element_size()])
            sums.append(int(bits.sum(dtype=torch.int64)))
    return sums
