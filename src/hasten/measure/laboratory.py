"""Two arms of a proof, run one after the other from one seed: what they exported, and their first gradients.

Where several processes train together, all of them run both arms, and end where anybody's time is over.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice

import torch
from torch.utils.data import DataLoader

from hasten.contract.batch import map_tensors, tensors
from hasten.contract.card import Card, Exactness, WrapOrder
from hasten.contract.errors import Failure
from hasten.contract.method import Method
from hasten.contract.ranks import SINGLE_PROCESS, ProcessGroupInfo
from hasten.contract.recipe import Recipe
from hasten.contract.run_context import RunContext, TrainPlan
from hasten.contract.sharded import own_part
from hasten.contract.types import BatchFn
from hasten.engine.checkpoint import gathered
from hasten.engine.find import make_methods
from hasten.engine.loop import steps as training_steps
from hasten.engine.plan import Program, build
from hasten.engine.seeds import undisturbed
from hasten.engine.train import with_strategy

GRADIENT_BATCHES = 3
FEWEST_STEPS = 3  # after one step of Adam every rescaling of the gradients is invisible
LOOKS = "samples between evaluations"


class Case:
    """What is held against what, and how much time it may take."""

    def __init__(self, task, base, candidate, exactness, device, seed, steps, seconds, ranks: ProcessGroupInfo = SINGLE_PROCESS):
        self.task, self.base, self.candidate, self.exactness = task, base, candidate, exactness
        self.device, self.seed, self.steps, self.seconds, self.ranks = device, seed, steps, seconds, ranks
        self.new = {name for name, settings in candidate.methods.items() if base.methods.get(name) != settings}
        loaders = [data for data in (task.train_data, task.validation_data) if isinstance(data, DataLoader)]
        generators = [owner.generator for loader in loaders for owner in (loader, loader.sampler) if getattr(owner, "generator", None)]
        self.generators = [(generator, generator.get_state()) for generator in generators]

    def program(self, recipe: Recipe, *extra: Method) -> Program:
        for generator, state in self.generators:  # a ready DataLoader would go on where the other arm stopped
            generator.set_state(state)
        methods = with_strategy([*make_methods(recipe), *extra], self.ranks)
        return build(self.task, methods, device=self.device, seed=self.seed, ranks=self.ranks)

    def over(self, deadline: float) -> bool:
        """Whether somebody's time is over: all ranks have to do the same."""
        return self.ranks.any(time.monotonic() >= deadline)

    def refuse_idle(self, program: Program) -> None:
        for name, why in program.run.no_effect:
            if name in self.new:
                raise Failure(f"{name} has nothing to act on: {why}")


@dataclass(frozen=True)
class Laboratory(Method):
    """Takes what is random out of the model and, if asked, runs it in float64."""

    card = Card(summary="no dropout, float64", exactness=Exactness.CHANGES_TRAINING, order=WrapOrder.FIRST)
    double: bool

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or isinstance(module, torch.nn.modules.dropout._DropoutNd)):
                    setattr(module, name, 0.0)
        return model.double() if self.double else model

    def batch_transform(self, to_device: BatchFn, run: RunContext) -> BatchFn:
        if not self.double:
            return to_device
        return lambda batch: map_tensors(lambda t: t.double() if t.is_floating_point() else t, to_device(batch))


@dataclass(frozen=True)
class Arm:
    """One run: how far it came, its exported weights before and after, its plan and a digest of its validation data."""

    steps: int
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    plan: dict[str, object]
    validation: list[tuple[int, str]] | None
    dropout: list[float]
    in_time: bool


def both_arms(case: Case, *extra: Method, steps: int | None = None) -> tuple[Arm, Arm]:
    a = _run(case, case.base, extra, min(case.steps, steps or case.steps))
    b = _run(case, case.candidate, extra, a.steps)
    if not b.in_time and b.steps < a.steps:
        a = _run(case, case.base, extra, b.steps)
    return a, b


def _run(case: Case, recipe: Recipe, extra: tuple[Method, ...], steps: int) -> Arm:
    dropout = _dropout(case.program(recipe))  # as it is outside the laboratory
    program = case.program(recipe, *extra)
    deadline = math.inf  # counts from the first step on: a start may be long, and be worth it
    done, in_time = 0, True
    with program.process_context():
        start = _weights(program)
        validation = _digest(program)
        for _ in training_steps(program):
            done += 1
            deadline = min(deadline, time.monotonic() + case.seconds / 2)
            in_time = not case.over(deadline)
            if done == steps or not in_time:
                break
        weights = _weights(program)
    if done < min(steps, FEWEST_STEPS) and not in_time:
        raise Failure(f"only {done} steps could be done in the time, too few to tell; it needs {FEWEST_STEPS}")
    if case.exactness is not Exactness.REDUCED_PRECISION:  # which has nothing to act on in float64, and is asked elsewhere
        case.refuse_idle(program)
    if bad := [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise Failure(f"{bad[0]} is not finite after {done} steps of {recipe}")
    return Arm(done, start, weights, _plan(program.plan), validation, dropout, in_time)


def _weights(program: Program) -> dict[str, torch.Tensor]:
    """What would be exported, on the first rank, whose answer counts. Another has what it holds of it."""
    return _copied(gathered(program.export().state_dict(), program.run))


def _copied(held: dict[str, torch.Tensor | None], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """On the CPU, what there is of it: DistributedDataParallel writes the next gradients where the last ones are."""
    there = {name: value.detach() for name, value in held.items() if value is not None and not value.is_meta}
    return {name: value.to("cpu", dtype or value.dtype, copy=True) for name, value in there.items()}


def _digest(program: Program) -> list[tuple[int, str]] | None:
    """Rows and fingerprint of every field of all validation data, however they are cut into batches."""
    if program.validation is None:
        return None
    rows, prints = Counter(), {}
    with undisturbed():
        for batch in program.validation.epoch(0, 0):
            for field, tensor in enumerate(tensors(batch)):
                rows[field] += tensor.shape[0] if tensor.ndim else 1
                prints.setdefault(field, sha256()).update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
    return [(rows[field], prints[field].hexdigest()) for field in sorted(rows)]


def _dropout(program: Program) -> list[float]:
    return [module.p for module in program.run.model.modules() if isinstance(module, torch.nn.modules.dropout._DropoutNd)]


def _plan(plan: TrainPlan) -> dict[str, object]:
    return {
        "samples a step": plan.batch_size, "passes": plan.epochs, "steps": plan.steps,
        "stops early": plan.stop is not None, LOOKS: plan.evaluate_every,
    }  # fmt: skip


def told(plan: dict, usual: dict) -> str:
    return ", ".join(f"{name}: {plan[name]} instead of {usual[name]}" for name in plan if plan[name] != usual[name])


def other_run(a: Arm, b: Arm) -> str | None:
    """Why two runs that should train the same thing are not the same run; None if they are."""
    if a.plan != b.plan:
        return f"the plan of steps is another: {told(b.plan, a.plan)}"
    if a.weights.keys() != b.weights.keys():
        return f"other weights are exported, such as {min(a.weights.keys() ^ b.weights.keys())}"
    if a.steps != b.steps:
        return f"the data ended after {b.steps} steps instead of {a.steps}"
    if a.dropout != b.dropout:
        return "the model's dropout is another"
    return other_validation(a, b)


def other_validation(a: Arm, b: Arm) -> str | None:
    """Why the two would be judged by different data, or at other times; None if alike."""
    if a.validation != b.validation:
        return "the validation data are not the same"
    if a.plan[LOOKS] != b.plan[LOOKS]:
        return f"it is judged at other times: {told({LOOKS: b.plan[LOOKS]}, {LOOKS: a.plan[LOOKS]})}"
    return None


def first_gradients(case: Case, recipe: Recipe, laboratory: Method, batches: int) -> tuple[list[dict | None], int]:
    """Each parameter's gradient on the first batches, always at the initial weights, and how many batches count.

    None stands for a batch whose gradients overflowed and were not used: loss scaling at work. Ends early
    when enough batches count.
    """
    program = case.program(recipe, laboratory)
    model, found, good = program.run.model, [], 0
    start = {name: value.clone() for name, value in model.state_dict().items()}
    own = {name: weight for name, weight in model.named_parameters() if not weight.is_meta}
    deadline = time.monotonic() + case.seconds / 4
    passes = chain.from_iterable(program.train.epoch(number, 0) for number in range(batches))
    with program.process_context():
        for batch in islice(passes, batches):
            program.forward_backward(program.to_device(batch))
            program.grad_transform()
            made = {name: weight.grad for name, weight in own.items() if weight.grad is not None}
            finite = not case.ranks.any(any(not own_part(gradient).isfinite().all() for gradient in made.values()))
            gradients = _copied(gathered({_plain(name): gradient for name, gradient in made.items()}, program.run), torch.float64)
            program.optimizer_step()
            used = case.ranks.any(any(not torch.equal(own_part(weight), own_part(start[name])) for name, weight in own.items()))
            program.zero_grad()
            model.load_state_dict(start)
            found.append(gradients if finite or used else None)
            good += found[-1] is not None
            if good == GRADIENT_BATCHES or (good and case.over(deadline)):
                break
    case.refuse_idle(program)
    if not good:
        raise Failure(f"no batch of the first {len(found)} gave finite gradients")
    return found, good


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")
