"""The step seam: counts the training steps of a loop that others wrote, from torch's own hooks.

A step ends with the update of an optimizer. With several optimizers the longest count is that of the steps, as in
torch's profiler. Where no optimizer exists, such as with a hand-written update, it ends with the outermost backward
pass. Several backward passes before an update are gradient accumulation; an update that a GradScaler skips is a step.
Within one ``step(closure)`` of very many backward passes, as of LBFGS, each of them is a step.
"""

import functools
import operator
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hasten.hosts.inside.replace import replaces
from hasten.hosts.inside.sites import Sites
from hasten.utils.phase_timer import PhaseTimer

MAX_BACKWARDS = 256  # after which an optimizer that has not updated counts as unused, and one that is updating as long


class StepSeam:
    """Calls ``on_stop`` at the end of the step at which ``remaining`` reaches 0.

    Args:
        sites: Receives each optimizer with its site.
        phases: Receives the time of backward passes and updates.

    Attributes:
        count: Steps so far.
        leading: Ids of the optimizers whose updates are the steps, where the script names them; else empty.
        remaining: Steps until ``on_stop`` is called.
        losses: Of the backward passes since ``keep_losses`` was set; numbers, or tensors of another device.
    """

    def __init__(self, sites: Sites, phases: PhaseTimer):
        self.sites, self.phases = sites, phases
        self.count, self.remaining = 0, 1
        self.active, self.keep_losses, self.losses = True, False, list[float | torch.Tensor]()
        self.scaled: tuple[Any, Any] = None, None  # (result, loss) of what a GradScaler has scaled last
        self.leading: set[int] = set()
        self.counts: dict[int, int] = {}  # updates by id of the optimizer; a dictionary with weak keys is slow
        self.optimizers: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()  # that have updated, in this order
        self.has_optimizer = False  # that may be used
        self.updating: int | None = None  # id of the optimizer whose step runs now
        self.long: set[int] = set()  # ids of optimizers in whose step each backward pass is one
        self.inside, self.passes, self.began, self.times_updates = False, 0, None, False
        self.has_begun = False  # the training: a gradient was computed
        self.last_ended: float | None = None  # time of the end of the last step
        self.on_first_backward: Callable[[], None] = lambda: None
        self.on_backward: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self.on_optimizer: Callable[[Optimizer], None] = lambda optimizer: None  # that the script has made
        # before ``step(closure)`` of an optimizer that is not one of torch, under methods that change gradients
        self.on_foreign_closure: Callable[[Optimizer], None] = lambda optimizer: None
        self.on_step: Callable[[], None] | None = None  # called after every step, while there is something to do
        self.wrap_backward: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda backward: backward
        self.wrap_update: Callable[[Optimizer, Callable[[], Any]], Any] | None = None
        torch.Tensor.backward = self._counted(torch.Tensor.backward)
        torch.autograd.backward = self._counted_functional(torch.autograd.backward)
        replaces(Optimizer, "__init__")(self._note)
        replaces(torch.amp.GradScaler, "scale")(self._note_scaled)  # pyright: ignore[reportPrivateImportUsage]
        torch.amp.GradScaler.step = self._watched(torch.amp.GradScaler.step)  # pyright: ignore[reportPrivateImportUsage]
        register_optimizer_step_pre_hook(self._enter_update)
        register_optimizer_step_post_hook(self._after_update)

    def _note_scaled(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        result = original(scaler, outputs)
        if self.keep_losses:
            self.scaled = result, outputs
        return result

    def before_first_update(self, call: Callable[[Optimizer], None]) -> None:
        """Calls a function with each optimizer before its first update."""
        called = WeakSet[Optimizer]()

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self.active and optimizer not in called:
                called.add(optimizer)
                if id(optimizer) not in self.counts:  # else a GradScaler has skipped its first updates
                    self._register(optimizer)
                call(optimizer)

        register_optimizer_step_pre_hook(check)

    def time_updates(self) -> None:
        """Records the time of updates from here on, while the phases are recorded."""
        if not self.times_updates:
            self.times_updates = True
            register_optimizer_step_pre_hook(self._begin_update)

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        under_methods: Callable[..., Any] | None = None

        @functools.wraps(original)
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal under_methods
            if self.inside or not (self._begin() if not self.has_begun else self.active):
                return original(loss, *args, **kwargs)
            if under_methods is None:
                under_methods = self.wrap_backward(original)
            self.inside = True
            began = self.phases.now() if self.phases.running else None
            try:
                result = under_methods(loss, *args, **kwargs)
            finally:
                self.inside = False
            if began is not None:
                self.phases.record("backward", began)
                if self.began is not None:  # inside of ``step(closure)``, whose update begins now
                    self.began = self.phases.now()
            if self.keep_losses and loss.numel() == 1:
                plain = self.scaled[1] if self.scaled[0] is loss else loss
                # reading would wait for a GPU, and a recorded step may write the next loss to the same place
                self.losses.append(plain.item() if plain.is_cpu else plain.detach().clone())
                self.scaled = None, None
            self.passes += 1
            self.on_backward()
            if self.passes >= MAX_BACKWARDS and self.updating is not None:
                self.long.add(self.updating)
            elif self.passes >= MAX_BACKWARDS and not self.counts:
                self.has_optimizer = False
            if not self.has_optimizer or self.updating in self.long:
                self.end_step()
            return result

        return backward

    def _counted_functional(self, original: Callable[..., None]) -> Callable[..., None]:
        """``torch.autograd.backward``, which a script may call in place of ``Tensor.backward``."""

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self.inside:  # of a backward pass that is counted already
                return original(tensors, grad_tensors, *args, **kwargs)
            losses, gradients = _listed(tensors), _listed(grad_tensors)
            of_several = len(losses) > 1 and (gradients or any(loss.numel() != 1 for loss in losses))
            if args or of_several or "grad_variables" in kwargs:
                return original(tensors, grad_tensors, *args, **kwargs)
            return functools.reduce(operator.add, losses).backward(*gradients, **kwargs)

        return backward

    def _begin(self) -> bool:
        """Begins the training at the first gradient. Returns whether the steps of this process are counted."""
        if self.active and not self.has_begun:
            self.has_begun = True
            self.on_first_backward()
        return self.active

    def _note(self, original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self.counts.pop(id(optimizer), None)  # of an optimizer that is gone
        self.long.discard(id(optimizer))
        self.has_optimizer = True
        if self.sites.note("optimizers", optimizer) is not None:
            self.on_optimizer(optimizer)
        step = type(optimizer).step
        if self.wrap_update is not None and not hasattr(step, "under_methods"):
            type(optimizer).step = self._updating(step, self.wrap_update)

    def _updating(
        self, original: Callable[..., Any], update: Callable[[Optimizer, Callable[[], Any]], Any]
    ) -> Callable[..., Any]:
        """``Optimizer.step`` of a class under the methods that act between backward pass and update."""

        @functools.wraps(original)  # schedules and torch's own wrapper find what they look for
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(optimizer, *args, **kwargs)
            closure = kwargs.get("closure", args[0] if args else None)
            if closure is None or isinstance(optimizer, torch.optim.LBFGS):
                return update(optimizer, lambda: original(optimizer, *args, **kwargs))
            if self.passes > 0 and not _is_of_torch(original):  # the gradients are there before it is called
                kwargs["closure"] = self._without_gradients(closure, optimizer)
                return update(optimizer, lambda: original(optimizer, *args[1:], **kwargs))
            with torch.enable_grad():  # the gradients must be there before methods act on them
                losses = [closure()]

            def first_then_again() -> Any:
                if losses:
                    return losses.pop()
                self.on_foreign_closure(optimizer)  # which calls it at other weights
                return closure()

            kwargs["closure"] = first_then_again
            return update(optimizer, lambda: original(optimizer, *args[1:], **kwargs))

        vars(step)["under_methods"] = True
        return step

    def _without_gradients(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """A closure that calls ``on_foreign_closure`` if it computes gradients, as that of SAM at other weights.

        The closure that Lightning passes where the script optimizes by hand does nothing.
        """

        def call() -> Any:
            before = self.passes
            result = closure()
            if self.passes != before:
                self.on_foreign_closure(optimizer)
            return result

        return call

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self.counts.get(id(optimizer), 0)
            result = original(scaler, optimizer, *args, **kwargs)
            if self.active and self.counts.get(id(optimizer), 0) == before:
                self._after_update(optimizer, (), {})
            return result

        return step

    def _register(self, optimizer: Optimizer) -> int:
        """Begins to count an optimizer's updates, one below the steps so far, and returns that count: an optimizer that
        comes later than the first does not end steps of its own.
        """
        self.optimizers[optimizer] = None
        self.has_optimizer = True
        if record := self.sites.of(optimizer):
            record["step"] = self.sites.line()
        count = self.counts[id(optimizer)] = max(0, self.count - 1)
        return count

    def _enter_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.updating, self.passes = id(optimizer), 0

    def _begin_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.active and self.phases.running:
            self.began = self.phases.now()

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.updating = None
        if not self.active:
            return
        # some scripts call step() once before the training, to begin a schedule
        if not self.has_begun and not (_has_gradient(optimizer) and self._begin()):
            return
        if self.began is not None:
            self.phases.record("optimizer_step", self.began)
            self.began = None
        key = id(optimizer)
        count = self.counts.get(key)
        if key in self.long:  # its steps are counted; the next update of any optimizer is one again
            if count is None:
                self._register(optimizer)
            self.counts = dict.fromkeys(self.counts, self.count)
            return
        self.counts[key] = count = (self._register(optimizer) if count is None else count) + 1
        if count > self.count and (not self.leading or key in self.leading):
            self.end_step()

    def end_step(self) -> None:
        """Counts a step as ended; calls ``on_step``, and ``on_stop`` after the last step that was asked for.

        Called by this seam, or by that of a framework whose optimizers are not torch's.
        """
        self.count += 1
        self.passes = 0
        self.last_ended = time.perf_counter()
        if self.on_step is not None:
            self.on_step()
        self.remaining -= 1
        if not self.remaining:
            self.on_stop()


def _is_of_torch(step: Callable[..., Any]) -> bool:
    return step.__module__.startswith("torch.optim.")


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _listed(tensors: Any) -> list[Any]:
    """A tensor, several of them or None as a list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [] if tensors is None else list(tensors)
