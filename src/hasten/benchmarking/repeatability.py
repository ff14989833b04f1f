"""What a training that does not repeat itself does repeat, and the operations that may be to blame.

Some operations give other bits in every run: on a GPU, those that add atomically, in the order in which their threads
arrive. Two runs of one recipe from one seed then end with different weights, and different weights accuse no method.
What repeats are the batches, to the bit, and the size of the difference between two runs.
"""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256

import torch

from hasten.benchmarking.equivalence_runs import MIN_STEPS, EquivalenceCase, EquivalenceRun, run_arm
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import RunError
from hasten.core.method import Method, hooks_of
from hasten.core.run_context import RunContext
from hasten.core.types import Batch, BatchFn
from hasten.engine.registry import make_method, method_names
from hasten.utils.batch import batch_tensors

ALERT = re.compile(r"(\w+) does not have a deterministic implementation")  # a warning of torch


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
        alerts: As ``nondeterministic_ops``.
    """

    base: EquivalenceRun
    same_batches: bool
    data_only: bool
    alerts: list[str]


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
    alerts = nondeterministic_ops(case) if case.ranks.any(differs) else []
    batches_differ = case.ranks.any(count < first.steps or base != candidate)
    return Control(again, not batches_differ, data_only, alerts)


def nondeterministic_ops(case: EquivalenceCase) -> list[str]:
    """The operations in the first steps of the base of which torch has no deterministic implementation, as it warns.

    All ranks must call it. The caller restores the mode of torch.
    """
    with warnings.catch_warnings(record=True) as shown, suppress(RunError):
        warnings.filterwarnings("always", f".*{ALERT.pattern}")
        torch.use_deterministic_algorithms(True, warn_only=True)
        run_arm(case, case.base, (), MIN_STEPS)
    return list(dict.fromkeys(name for one in shown for name in ALERT.findall(str(one.message))))
