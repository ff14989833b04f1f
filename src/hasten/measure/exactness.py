"""Proves, by running it, that a recipe changes the numbers no more than its cards say.

=============  ============================================================================================
BIT_EXACT      both runs from one seed, every exported weight the same to the bit
SAME_MATHS     both runs in float64, the weights within a relative difference of 1e-10
FEWER_BITS     every parameter's gradient at least 20 dB above its error against float64; and since a method that
               only rounds does nothing else, in float64 the weights must move as they do without it
OTHER_MATHS    in float64 the weights or the plan of steps must differ, or the method has no effect
=============  ============================================================================================

For all but the last the validation data must be the same too. A proof that cannot be run has failed: whatever
raises, gives a NaN or has nothing to act on is not passed. Methods from outside run here, so call this in a process
of its own; it restores all it knows of, but a method may do anything.

What is compared in float64 is the formula: dropout is switched off in both arms, because pieces of a batch or a
compiler draw other random numbers, rightly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch.utils.data import DataLoader

from hasten.contract.batch import map_tensors, tensors
from hasten.contract.card import Card, Exactness, Order
from hasten.contract.errors import Failure, Refusal, one_line
from hasten.contract.method import Loop, Method
from hasten.contract.recipe import Recipe
from hasten.contract.task import Task
from hasten.engine.devices import pick_device
from hasten.engine.find import make_methods
from hasten.engine.loop import steps as training_steps
from hasten.engine.plan import Program, build
from hasten.engine.seeds import undisturbed
from hasten.measure.process_state import restored

SAME = 1e-10  # relative difference of all weights together
CLEAN_GRADIENT, SAME_MOVEMENT = 20.0, 10.0  # decibels
GRADIENT_BATCHES, TRIED_BATCHES = 3, 25  # a loss scale may need 16 overflows to find its level
NEGLIGIBLE = 1e-6  # a gradient this much smaller than the rest is zero in exact arithmetic, such as a bias before batch norm


@dataclass(frozen=True)
class Proof:
    """Whether it holds, and by what number.

    Attributes:
        passed: False also where nothing could be measured.
        number: BIT_EXACT: weights (tensors) that differ; SAME_MATHS and OTHER_MATHS: relative difference in float64;
            FEWER_BITS: signal-to-noise of the worst gradient in dB. NaN where nothing could be measured.
        why: one sentence with the number in it.
    """

    passed: bool
    number: float
    why: str


def prove(
    task: Task,
    base: Recipe,
    candidate: Recipe,
    exactness: Exactness,
    *,
    device: str | None = None,
    seed: int = 0,
    steps: int = 30,
    seconds: float = 60.0,
) -> Proof:
    """Holds ``candidate`` against ``base`` as its exactness demands.

    Args:
        steps: optimizer steps that each arm does at most.
        seconds: after about this long the arms are compared where they are; a step once begun is finished.
    """
    case = _Case(task, base, candidate, exactness, pick_device(device), seed, steps, seconds)
    try:
        with restored():
            if case.device != "cpu":
                torch.use_deterministic_algorithms(True, warn_only=True)  # so that a run can repeat itself at all
            return _PROOFS[exactness](case)
    except (Failure, Refusal) as error:
        return Proof(False, math.nan, str(error))
    except Exception as error:
        return Proof(False, math.nan, f"the proof could not be run: {one_line(error)}")


class _Case:
    """What is held against what, and how much time it may take."""

    def __init__(self, task, base, candidate, exactness, device, seed, steps, seconds):
        self.task, self.base, self.candidate, self.exactness = task, base, candidate, exactness
        self.device, self.seed, self.steps, self.seconds = device, seed, steps, seconds
        self.new = {name for name, settings in candidate.methods.items() if base.methods.get(name) != settings}
        loaders = [data for data in (task.train_data, task.validation_data) if isinstance(data, DataLoader)]
        generators = [owner.generator for loader in loaders for owner in (loader, loader.sampler) if getattr(owner, "generator", None)]
        self.generators = [(generator, generator.get_state()) for generator in generators]

    def program(self, recipe: Recipe, *extra: Method) -> Program:
        for generator, state in self.generators:  # a ready DataLoader would go on where the other arm stopped
            generator.set_state(state)
        return build(self.task, [*make_methods(recipe), *extra], device=self.device, seed=self.seed)

    def refuse_idle(self, program: Program) -> None:
        for name, why in program.run.idle:
            if name in self.new:
                raise Failure(f"{name} has nothing to act on: {why}")


def _bit_exact(case: _Case) -> Proof:
    a, b = _both_arms(case)
    if why := _other_run(a, b):
        return Proof(False, math.nan, why)
    different = [name for name in a.weights if not torch.equal(a.weights[name], b.weights[name])]
    if different:
        return Proof(False, len(different), f"{len(different)} of {len(a.weights)} weights differ after {a.steps} steps, first {different[0]}")
    return Proof(True, 0, f"all {len(a.weights)} weights are the same to the bit after {a.steps} steps")


def _same_maths(case: _Case) -> Proof:
    a, b = _both_arms(case, _Laboratory(double=True))
    if why := _other_run(a, b):
        return Proof(False, math.nan, why)
    number = _relative_difference(a.weights, b.weights)
    verdict = "below" if number < SAME else "not below"
    return Proof(number < SAME, number, f"in float64 the weights differ by {number:.1e} after {a.steps} steps, {verdict} {SAME:.0e}")


def _fewer_bits(case: _Case) -> Proof:
    noisy, share = _first_gradients(case, case.candidate, _Laboratory(double=False), TRIED_BATCHES)
    clean, _ = _first_gradients(case, case.base, _Laboratory(double=True), len(noisy))
    name, worst = _worst_gradient(clean, noisy)
    if not worst >= CLEAN_GRADIENT:
        return Proof(False, worst, f"the gradient of {name} stands only {worst:.1f} dB above its error against float64, not {CLEAN_GRADIENT:.0f}")
    a, b = _both_arms(case, _Laboratory(double=True), steps=5)
    if why := _other_run(a, b):
        return Proof(False, math.nan, why)
    movement = _decibels(_moved(a), _moved(a).sub(_moved(b)))
    if not movement >= SAME_MOVEMENT:
        return Proof(False, movement, f"it does more than round: in float64 the weights move otherwise ({movement:.1f} dB after {a.steps} steps)")
    return Proof(True, worst, f"every gradient stands at least {worst:.1f} dB above its error against float64, over {share} batches")


def _other_maths(case: _Case) -> Proof:
    a, b = _both_arms(case, _Laboratory(double=True))
    same_names = a.weights.keys() == b.weights.keys()
    number = _relative_difference(a.weights, b.weights) if same_names else math.inf
    if number >= SAME:
        return Proof(True, number, f"in float64 the weights differ by {number:.1e} after {b.steps} steps")
    if a.plan != b.plan:
        return Proof(True, number, f"the weights are the same after {b.steps} steps, but the plan is another: {_told(b.plan, a.plan)}")
    return Proof(False, number, f"it has no effect: in float64 the weights differ by {number:.1e} after {b.steps} steps")


_PROOFS: dict[Exactness, Callable[[_Case], Proof]] = {
    Exactness.BIT_EXACT: _bit_exact,
    Exactness.SAME_MATHS: _same_maths,
    Exactness.FEWER_BITS: _fewer_bits,
    Exactness.OTHER_MATHS: _other_maths,
}


@dataclass(frozen=True)
class _Laboratory(Method):
    """Takes what is random out of the model and, if asked, runs it in float64."""

    card = Card(summary="no dropout, float64", exactness=Exactness.OTHER_MATHS, order=Order.FIRST)
    double: bool

    def model(self, model, run):
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or isinstance(module, torch.nn.modules.dropout._DropoutNd)):
                    setattr(module, name, 0.0)
        return model.double() if self.double else model

    def batch(self, move, run):
        if not self.double:
            return move
        return lambda batch: map_tensors(lambda t: t.double() if t.is_floating_point() else t, move(batch))


@dataclass(frozen=True)
class _Arm:
    """One run: how far it came, its exported weights before and after, its plan and its first validation batches."""

    steps: int
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    plan: dict[str, object]
    validation: list[list[torch.Tensor]]
    in_time: bool


def _both_arms(case: _Case, *extra: Method, steps: int | None = None) -> tuple[_Arm, _Arm]:
    a = _run(case, case.base, extra, min(case.steps, steps or case.steps))
    b = _run(case, case.candidate, extra, a.steps)
    if not b.in_time and b.steps < a.steps:
        a = _run(case, case.base, extra, b.steps)
    return a, b


def _run(case: _Case, recipe: Recipe, extra: tuple[Method, ...], steps: int) -> _Arm:
    program = case.program(recipe, *extra)
    deadline = time.monotonic() + case.seconds / 2
    done, in_time = 0, True
    with program.process():
        start = _weights(program)
        validation = _first_batches(program)
        for _ in training_steps(program):
            done += 1
            in_time = time.monotonic() < deadline
            if done == steps or not in_time:
                break
        weights = _weights(program)
    if case.exactness is not Exactness.FEWER_BITS:  # which has nothing to act on in float64, and is asked elsewhere
        case.refuse_idle(program)
    if bad := [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise Failure(f"{bad[0]} is not finite after {done} steps of {recipe}")
    return _Arm(done, start, weights, _plan(program.loop), validation, in_time)


def _weights(program: Program) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in program.export().state_dict().items()}


def _first_batches(program: Program) -> list[list[torch.Tensor]]:
    if program.validation is None:
        return []
    with undisturbed():
        return [[tensor.to("cpu", copy=True) for tensor in tensors(batch)] for batch in islice(program.validation.epoch(0, 0), 2)]


def _plan(loop: Loop) -> dict[str, object]:
    return {"samples a step": loop.batch_size, "passes": loop.epochs, "steps": loop.steps, "stops early": loop.stop is not None}


def _told(plan: dict, usual: dict) -> str:
    return ", ".join(f"{name}: {plan[name]} instead of {usual[name]}" for name in plan if plan[name] != usual[name])


def _other_run(a: _Arm, b: _Arm) -> str | None:
    """Why two runs that should train the same thing are not the same run; None if they are."""
    if a.plan != b.plan:
        return f"the plan of steps is another: {_told(b.plan, a.plan)}"
    if a.weights.keys() != b.weights.keys():
        return f"other weights are exported, such as {min(a.weights.keys() ^ b.weights.keys())}"
    if a.steps != b.steps:
        return f"the data ended after {b.steps} steps instead of {a.steps}"
    pairs = ((one, other) for x, y in zip(a.validation, b.validation, strict=True) for one, other in zip(x, y, strict=True))
    if any(one.shape != other.shape or not torch.equal(one.double(), other.double()) for one, other in pairs):
        return "the validation data are not the same"
    return None


def _relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    one, other = _flat(a), _flat(b)
    return (one - other).norm().item() / (one.norm().item() or 1.0) if one.shape == other.shape else math.inf


def _flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.double().flatten() for name, value in sorted(weights.items()) if value.is_floating_point()])


def _moved(arm: _Arm) -> torch.Tensor:
    return _flat(arm.weights) - _flat(arm.start)


def _first_gradients(case: _Case, recipe: Recipe, laboratory: Method, batches: int) -> tuple[list[dict | None], int]:
    """Each parameter's gradient on the first batches, always at the initial weights, and how many batches count.

    None stands for a batch whose gradients overflowed and were not used: loss scaling at work. Ends early
    when enough batches count.
    """
    program = case.program(recipe, laboratory)
    model, found, good = program.run.model, [], 0
    start = {name: value.clone() for name, value in model.state_dict().items()}
    deadline = time.monotonic() + case.seconds / 4
    passes = chain.from_iterable(program.train.epoch(number, 0) for number in range(batches))
    with program.process():
        for batch in islice(passes, batches):
            program.micro(program.move(batch))
            program.gradients()
            gradients = {_plain(name): p.grad.detach().double().cpu() for name, p in model.named_parameters() if p.grad is not None}
            finite = all(gradient.isfinite().all() for gradient in gradients.values())
            program.update()
            used = any(not torch.equal(value, start[name]) for name, value in model.named_parameters())
            program.clear()
            model.load_state_dict(start)
            found.append(gradients if finite or used else None)
            good += found[-1] is not None
            if good == GRADIENT_BATCHES or (good and time.monotonic() > deadline):
                break
    case.refuse_idle(program)
    if not good:
        raise Failure(f"no batch of the first {len(found)} gave finite gradients")
    return found, good


def _worst_gradient(clean: list[dict], noisy: list[dict | None]) -> tuple[str, float]:
    """(parameter, dB) of the gradient with the least signal-to-noise over all the batches that count."""
    pairs = [(reference, gradients) for reference, gradients in zip(clean, noisy, strict=True) if gradients is not None]
    signal = {name: torch.cat([reference[name].flatten() for reference, _ in pairs]) for name in pairs[0][0]}
    usual = torch.cat(list(signal.values())).square().mean().sqrt()
    worst = ("nothing", math.inf)
    for name, value in signal.items():
        if value.square().mean().sqrt() < NEGLIGIBLE * usual:
            continue
        got = torch.cat([gradients.get(name, torch.zeros_like(reference[name])).flatten() for reference, gradients in pairs])
        decibels = _decibels(value, value - got)
        if not decibels >= worst[1]:  # a NaN is the worst of all
            worst = (name, decibels)
    return worst


def _decibels(signal: torch.Tensor, noise: torch.Tensor) -> float:
    power, error = signal.square().sum().item(), noise.square().sum().item()
    if error == 0.0:
        return math.inf
    return 10 * math.log10(power / error) if power else -math.inf


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")
