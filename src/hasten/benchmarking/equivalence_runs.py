"""Runs the two arms of an exactness check from one seed, for their exported weights and their first gradients.

With several ranks, all of them run both arms, and all stop as soon as one of them is out of time.
"""

import math
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hasten._torch_compat import Dropout
from hasten.benchmarking.captured_gradients import CapturedGradients
from hasten.benchmarking.own_step_in_double import OwnStepInDouble
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import RunError
from hasten.core.method import Method
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext, TrainPlan
from hasten.core.task import Task
from hasten.core.types import BatchFn, ContextFactory
from hasten.distributed.dtensor_state import to_local
from hasten.engine.checkpoint import gather_weights
from hasten.engine.effects import NO_EFFECT
from hasten.engine.loop import train_steps as training_steps
from hasten.engine.plan import Program, build
from hasten.engine.registry import make_methods
from hasten.engine.train import with_strategy
from hasten.utils.batch import batch_size, batch_tensors, map_tensors
from hasten.utils.keras_models import is_keras_dropout, modules_of, variables_below_float64
from hasten.utils.rng import preserve_rng_state

GRADIENT_BATCHES = 3
STEPS = 30  # of each arm at most
MIN_STEPS = 3  # after one step of Adam every rescaling of the gradients is invisible
ROUNDING = 1e-9  # of the largest gradient; what rounding leaves in float64 is 1e-16 to 1e-12 of it
EVALUATION_INTERVAL = "samples between evaluations"  # key of EquivalenceRun.plan

ValidationDigest: TypeAlias = list[tuple[int, str]]  # (rows, SHA-256) of each field of the validation data


@dataclass
class EquivalenceCase:
    """The arguments of ``check_exactness``; ``added``: methods that only ``candidate`` has, or with other options."""

    task: Task
    base: Recipe
    candidate: Recipe
    exactness: Exactness
    device: str
    seed: int
    seconds: float
    ranks: ProcessGroupInfo = SINGLE_PROCESS
    added: set[str] = field(init=False)
    known: dict[str, tuple[list[float], ValidationDigest | None]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        base, candidate = self.base.methods, self.candidate.methods
        self.added = {name for name, options in candidate.items() if base.get(name) != options}
        loaders = [data for data in (self.task.train_data, self.task.validation_data) if isinstance(data, DataLoader)]
        samplers = [sampler for one in loaders for sampler in (one.sampler, one.batch_sampler)]
        owners = [*loaders, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
        generators = [generator for owner in owners if (generator := getattr(owner, "generator", None))]
        self._generator_states = [(generator, generator.get_state()) for generator in generators]

    def program(self, recipe: Recipe, *extra: Method) -> Program:
        for generator, state in self._generator_states:  # or a DataLoader would continue where the other arm stopped
            generator.set_state(state)
        if self.task.step is not None and any(getattr(method, "double", False) for method in extra):
            extra = (*extra, OwnStepInDouble())
        methods = with_strategy([*make_methods(recipe), *extra], self.ranks)
        return build(self.task, methods, device=self.device, seed=self.seed, ranks=self.ranks)

    def dropout_and_validation(self, recipe: Recipe) -> tuple[list[float], ValidationDigest | None]:
        """(probabilities of the dropout layers, digest of the validation data) under ``recipe``, computed once.

        A program of its own is built for it. The one that trains must be built after that: building resets the seeds
        and the generators of the data.
        """
        if str(recipe) not in self.known:
            program = self.program(recipe)
            dropout = [layer.p for layer in program.run.model.modules() if isinstance(layer, Dropout)]
            with program.process_context():
                self.known[str(recipe)] = dropout, _digest(program)
        return self.known[str(recipe)]

    def is_over(self, deadline: float) -> bool:
        """Whether ``deadline`` (a time of ``time.monotonic``) has passed on any rank. All ranks must call it."""
        return self.ranks.any(time.monotonic() >= deadline)

    def check_has_effect(self, program: Program) -> None:
        """Raises RunError if a method in ``added`` reported "no effect" in the built program."""
        for name, why in program.run.no_effect:
            if name in self.added:
                raise RunError(f"{name} {NO_EFFECT}: {why}")


@dataclass(frozen=True)
class RunConditions(Method):
    """A method that disables dropout, runs the model in float64 if ``double``, and reverses each batch if ``reverse``.

    The order of the rows of a batch changes nothing but the rounding. In float64 gradients that are rounding alone are
    zero, see ``drop_rounding``.
    """

    card = Card(summary="no dropout, float64", exactness=Exactness.CHANGES_TRAINING, order=WrapOrder.FIRST)
    double: bool
    reverse: bool = False

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        @contextmanager
        def without_rounding() -> Generator[None]:
            hook = register_optimizer_step_pre_hook(drop_rounding)
            try:
                with context():
                    yield
            finally:
                hook.remove()

        return without_rounding if self.double else context

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        for module in modules_of(model):
            is_dropout = isinstance(module, Dropout) or is_keras_dropout(module)
            for name, value in vars(module).items():
                if isinstance(value, float) and (is_dropout or "drop" in name):
                    setattr(module, name, 0.0)
        if self.double and (below := variables_below_float64(model)):
            raise RunError(f"Keras keeps {below[0]} and the computations with it in a lower precision than float64")
        return model.double() if self.double else model

    def batch_transform(self, batch_transform: BatchFn, run: RunContext) -> BatchFn:
        def transform(batch: Any) -> Any:
            batch = batch_transform(batch)
            rows = batch_size(batch)

            def change(t: torch.Tensor) -> torch.Tensor:
                t = t.flip(0) if self.reverse and t.ndim and t.shape[0] == rows else t
                return t.double() if self.double and t.is_floating_point() else t

            return map_tensors(change, batch)

        return transform if self.double or self.reverse else batch_transform


def drop_rounding(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Sets gradients to zero whose root mean square is below ROUNDING of the largest one: a hook before each update.

    They are zero in exact arithmetic, such as that of a bias before batch normalization or of the keys of an attention.
    Adam would divide what rounding leaves of them by its own size, and so move the weight by another order of a sum.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in weights if type(weight.grad) is torch.Tensor and weight.grad.numel()]
    gradients = [gradient for gradient in gradients if gradient.dtype == torch.float64 and not gradient.is_sparse]
    if len({gradient.device for gradient in gradients}) == 1:
        sizes = torch.stack([gradient.square().mean().sqrt() for gradient in gradients])
        for gradient, is_signal in zip(gradients, sizes >= ROUNDING * sizes.max(), strict=True):
            gradient.mul_(is_signal)  # without waiting for the device


@dataclass(frozen=True)
class EquivalenceRun:
    """The result of one arm: its steps, exported weights before and after, plan, and validation data."""

    steps: int  # optimizer steps done
    start: dict[str, torch.Tensor]  # exported weights before the first step, on the CPU
    weights: dict[str, torch.Tensor]  # exported weights after the last step, on the CPU
    plan: dict[str, object]  # settings of the run's plan, by description
    validation: ValidationDigest | None
    dropout: list[float]  # probabilities of the dropout layers, without RunConditions
    in_time: bool  # whether all steps were done before the deadline


def both_arms(case: EquivalenceCase, *extra: Method, steps: int = STEPS) -> tuple[EquivalenceRun, EquivalenceRun]:
    """Runs base and candidate for as many steps as the slower one can do in time: (base, candidate)."""
    a = run_arm(case, case.base, extra, steps)
    b = run_arm(case, case.candidate, extra, a.steps)
    if not b.in_time and b.steps < a.steps:
        a = run_arm(case, case.base, extra, b.steps)
    return a, b


def run_arm(case: EquivalenceCase, recipe: Recipe, extra: tuple[Method, ...], steps: int) -> EquivalenceRun:
    """Runs ``recipe`` for ``steps`` steps, or for ``case.seconds`` / 2 if that is less, with the methods ``extra``.

    A collective. RunError if it was less than MIN_STEPS steps, a method has no effect, or a weight is not finite.
    """
    dropout, validation = case.dropout_and_validation(recipe)
    program = case.program(recipe, *extra)
    deadline = math.inf  # counts from the first step: compilation must not use it up
    done, in_time = 0, True
    with program.process_context():
        start = _exported_weights(program)
        for _ in training_steps(program):
            done += 1
            deadline = min(deadline, time.monotonic() + case.seconds / 2)
            in_time = not case.is_over(deadline)
            if done == steps or not in_time:
                break
        weights = _exported_weights(program)
    if done < min(steps, MIN_STEPS) and not in_time:
        needed = f"the check needs {MIN_STEPS}; give it more time"
        raise RunError(f"only {done} steps were possible in the time, and {needed}")
    if case.exactness is not Exactness.REDUCED_PRECISION:  # has no effect in float64; ``first_gradients`` checks it
        case.check_has_effect(program)
    if bad := [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise RunError(f"{bad[0]} is not finite after {done} steps of {recipe}")
    return EquivalenceRun(done, start, weights, _plan(program.plan), validation, dropout, in_time)


def _exported_weights(program: Program) -> dict[str, torch.Tensor]:
    """Exported weights on the CPU: all of them on rank 0, on other ranks those that they hold. A collective."""
    return _to_cpu(gather_weights(program.export().state_dict(), program.run))


def _to_cpu(state: dict[str, torch.Tensor | None], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """CPU copies, in ``dtype`` if given, of the tensors that this rank holds (not None)."""
    held = {name: value.detach() for name, value in state.items() if value is not None and not value.is_meta}
    return {name: value.to("cpu", dtype or value.dtype, copy=True) for name, value in held.items()}


def _digest(program: Program) -> ValidationDigest | None:
    """(rows, SHA-256) of each field of the validation data, independent of the batch size."""
    if program.validation is None:
        return None
    rows: Counter[int] = Counter()
    hashes: dict[int, Any] = {}
    with preserve_rng_state():
        for batch in program.validation.epoch(0, 0):
            for index, tensor in enumerate(batch_tensors(batch)):
                rows[index] += tensor.shape[0] if tensor.ndim else 1
                values = tensor.detach().cpu().float().contiguous().numpy()
                hashes.setdefault(index, sha256()).update(values.tobytes())
    return [(rows[index], hashes[index].hexdigest()) for index in sorted(rows)]


def _plan(plan: TrainPlan) -> dict[str, object]:
    return {
        "samples per step": plan.batch_size,
        "epochs": plan.epochs,
        "steps": plan.steps,
        "stops early": plan.stop is not None,
        EVALUATION_INTERVAL: plan.evaluate_every,
    }


def plan_differences(plan: dict[str, object], base: dict[str, object]) -> str:
    """The entries of ``plan`` that differ from ``base``, as "NAME: VALUE instead of VALUE"; empty if none."""
    return ", ".join(f"{name}: {plan[name]} instead of {base[name]}" for name in plan if plan[name] != base[name])


def plan_mismatch(a: EquivalenceRun, b: EquivalenceRun) -> str | None:
    """How the plans, weight names, steps, dropout or validation data of two runs differ; None if they are equal."""
    if a.plan != b.plan:
        return f"the plan differs: {plan_differences(b.plan, a.plan)}"
    if a.weights.keys() != b.weights.keys():
        return f"the names of the exported weights differ, such as {min(a.weights.keys() ^ b.weights.keys())}"
    if a.steps != b.steps:
        return f"the data ended after {b.steps} steps instead of {a.steps}"
    if a.dropout != b.dropout:
        return "the dropout probabilities differ"
    return validation_mismatch(a, b)


def validation_mismatch(a: EquivalenceRun, b: EquivalenceRun) -> str | None:
    """Why two runs are evaluated on different data or at different times; None if they are not."""
    if a.validation != b.validation:
        return "the validation data differ"
    intervals = [{EVALUATION_INTERVAL: run.plan[EVALUATION_INTERVAL]} for run in (b, a)]
    if intervals[0] != intervals[1]:
        return f"the evaluations are at different times: {plan_differences(*intervals)}"
    return None


def first_gradients(
    case: EquivalenceCase, recipe: Recipe, conditions: RunConditions, wanted: list[bool]
) -> list[dict[str, torch.Tensor] | None]:
    """Gradients of the first batches, as many as ``wanted`` has items, always at the initial weights.

    Gradients are float64 tensors by parameter name; None for a batch that is not ``wanted``, or whose gradients
    overflowed and were not used (loss scaling). Ends early after GRADIENT_BATCHES batches with gradients, or after
    ``case.seconds`` / 4. RunError if there are none.
    """
    captured = CapturedGradients()
    program = case.program(recipe, conditions, captured)
    model, used_batches = program.run.model, 0
    found: list[dict[str, torch.Tensor] | None] = []
    start = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name: weight for name, weight in model.named_parameters() if not weight.is_meta}
    deadline = time.monotonic() + case.seconds / 4
    epochs = chain.from_iterable(program.train.epoch(index, 0) for index in range(len(wanted)))
    with program.process_context():
        for is_wanted, batch in zip(wanted, epochs, strict=False):
            batch = program.to_device(batch)  # also where it is skipped: it may draw random numbers
            if not is_wanted:
                found.append(None)
                continue
            program.forward_backward(batch)
            program.grad_transform()
            gradients, captured.gradients = captured.gradients, {}
            overflowed = case.ranks.any(any(not to_local(grad).isfinite().all() for grad in gradients.values()))
            # without the prefixes of DDP and torch.compile
            names = {name: name.removeprefix("module.").replace("_orig_mod.", "") for name in gradients}
            gradients = {names[name]: gradient for name, gradient in gradients.items()}
            full_gradients = _to_cpu(gather_weights(gradients, program.run), torch.float64)
            program.optimizer_step()
            changed = (not torch.equal(to_local(weight), to_local(start[name])) for name, weight in parameters.items())
            was_used = case.ranks.any(any(changed))
            program.zero_grad()
            model.load_state_dict(start)
            counts = was_used or not overflowed
            found.append(full_gradients if counts else None)
            used_batches += counts
            if used_batches == GRADIENT_BATCHES or (used_batches and case.is_over(deadline)):
                break
    case.check_has_effect(program)
    if not used_batches:
        raise RunError(f"no batch of the first {len(found)} gave finite gradients")
    return found
