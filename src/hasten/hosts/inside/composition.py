"""The methods of a recipe in a script: each hook is asked once, at the seam where its subject appears.

The order is that of the engine: process, data, model, optimizer, then the functions of a step. A script hands its parts
over one by one, so ``run.model`` is there from the first call of the model on, ``run.optimizer`` from the first update.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, proxy

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten._torch_compat import foreach_mul_
from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, hooks_of
from hasten.core.run_context import EngineServices, RunContext, TrainPlan
from hasten.engine.composition import applicable_methods, fold_hook
from hasten.engine.data_adapters import apply_data_hook
from hasten.engine.effects import EffectObserver
from hasten.engine.loaders import from_loader
from hasten.engine.resources import available_cpus, free_memory
from hasten.hosts.host import check_supported
from hasten.utils.batch import batch_tensors, map_tensors
from hasten.utils.optimizers import follow_strides
from hasten.utils.rng import preserve_rng_state

MODEL_HOOKS = {"model", "forward", "batch_transform"}
OPTIMIZER_HOOKS = {"optimizer", "grad_transform", "optimizer_step"}
STEP_HOOKS = {"backward", "grad_transform", "optimizer_step"}
HALVES = (torch.bfloat16, torch.float16)


class Composition:
    """The methods of one recipe in this process.

    ``device`` is assumed until the model is there; ``owner`` is the name of the script, for messages. ``steps``: those
    that the process trains at most, as in ``ScriptProcess``.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        device: str,
        seed: int,
        evaluation_records_gradients: bool,
        owner: str,
        steps: int | None = None,
    ):
        services = EngineServices(
            available_cpus=available_cpus,
            free_memory=free_memory,
            eval_records_gradients=lambda: evaluation_records_gradients,
            in_script=True,
        )
        self.run = RunContext(torch.device(device), SimpleNamespace(name=owner), seed=seed, services=services)
        self.owner, self.plan = owner, TrainPlan(batch_size=1, epochs=math.inf, steps=steps)
        self.run.plan = replace(self.plan)
        check_supported(methods, owner)
        self.methods = applicable_methods(methods, self.run)
        self.fold = partial(fold_hook, self.methods, self.run)  # (hook, thing) -> the thing, wrapped by the methods
        self.hooks = {hook for method in self.methods for hook in hooks_of(method)}
        self.context = ExitStack()  # never closed: the process ends with the run
        self.sets_threads = False  # to another number than the script
        self.updates: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()  # what an optimizer's step calls
        self.update: Callable[[], Any] = lambda: None  # the optimizer's own step that is called now
        self.changed: WeakSet[nn.Module] = WeakSet()  # the roots on which the ``model`` hooks have acted
        self.has_trained = self.is_later = False  # whether roots are searched no more; whether run.model came later
        self.expected: Optimizer | None = None  # was made later, and has not been checked
        self.gave_up = self.changed_loss = False  # to act on gradients; whether the last backward pass was changed
        self.refuse: Callable[[Exception], None] = lambda error: None  # what happens where it gives up

    def enter_process(self, own_threads: int | None = None) -> None:
        """Enters the process contexts of the methods until the process ends: threads, allocator, precision.

        Sets ``own_threads`` before, if the script is known to set a number: methods must know what they change.
        """
        if own_threads is not None:
            torch.set_num_threads(own_threads)
        self.context.enter_context(self.fold("process_context", nullcontext)())
        self.sets_threads = own_threads not in (None, torch.get_num_threads())

    def source_of(self, loader: Any, training: bool, is_read: bool = False) -> BatchSource | None:
        """The batches of a DataLoader of the script under the methods; None if no method changes them.

        If the script reads the loader now, effects are not checked: they come with the next epoch.
        """
        checks = dict(self.run.effect_checks)
        self._note_device()
        source = plain = self._plain_source(loader, training)
        with preserve_rng_state(*source.generators):  # a method may read samples to inspect them
            for method in self.methods:
                if "data" in hooks_of(method):
                    source = apply_data_hook(method, source, self.run)
        if is_read:
            self.run.effect_checks = checks
        return None if source is plain else source

    def _plain_source(self, loader: Any, training: bool) -> BatchSource:
        if not isinstance(loader, DataLoader):
            return loader.source
        # weakly: a script may make a loader for each epoch, and what methods keep of it must end with it at once
        return from_loader(proxy(loader), None, loader.batch_size or 1, self.run.seed, training)

    def wrap_call(self, root: nn.Module, call_of_root: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The call of a root under the methods, which may also change the root in place.

        Called once for each root, and again if it is trained after another one.

        ConfigurationError if a method replaces the root, edits the plan, or needs to know which of several it acts on.
        """
        run, is_new = self.run, root not in self.changed
        is_other = run.model is not None and all(part is not run.model for part in root.modules())
        if is_other and STEP_HOOKS & self.hooks and not self.has_trained:
            raise self._several_models(root)
        if self.has_trained:  # the one before is that of an earlier fold; what was made for it must not keep it alive
            earlier: Any = run
            self.is_later, earlier.optimizer = True, None
            self.updates.clear()
        run.model = run.unwrapped_model = root
        self.changed.add(root)
        self._note_device()
        if is_new and self.fold("model", root) is not root:
            raise ConfigurationError(f"a method replaces the model, which {self.owner} holds; omit that method")
        if run.plan != self.plan:
            raise ConfigurationError(
                f"a method edits the plan of the run, but {self.owner} owns its loop; leave that method out"
            )
        call = call_of_root()  # which a method may have set to a compiled one
        if not {"forward", "batch_transform"} & self.hooks:
            return call

        def plain(inputs: tuple[Any, Any]) -> Any:
            return call(*inputs[0], **inputs[1])

        def folded() -> tuple[Callable[..., Any], Callable[..., Any], str]:
            return self.fold("batch_transform", lambda inputs: inputs), self.fold("forward", plain), run.device.type

        transform, forward, device = folded()
        is_lower = any("uniform_precision" in method.card.invalidates for method in self.methods)
        weights = [weight for weight in root.parameters() if weight.ndim == 4]
        is_strided = "model" in self.hooks and not all(weight.is_contiguous() for weight in weights)  # channels last

        def under_methods(*args: Any, **kwargs: Any) -> Any:
            """The outputs as the model gave them before: the loss is the script's, and expects them so."""
            nonlocal transform, forward, device
            if not self.has_trained and run.model is root and self._note_device():
                transform, forward, device = folded()
            outputs = forward(transform((args, kwargs)))
            if is_lower and not torch.is_autocast_enabled(device):
                outputs = map_tensors(_to_float32, outputs)
            if is_strided and not all(tensor.is_contiguous() for tensor in batch_tensors(outputs)):
                outputs = map_tensors(torch.Tensor.contiguous, outputs)
            return outputs

        return under_methods

    def _note_device(self) -> bool:
        """Reads the device of the model, which a script may move after its first call; returns whether it did."""
        before = self.run.device
        if self.run.model is not None:
            self.run.device = next((parameter.device for parameter in self.run.model.parameters()), before)
        return self.run.device != before

    def wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``Tensor.backward`` under the methods."""
        if "backward" not in self.hooks:
            return original
        options: dict[str, Any] = {}
        model: Any = self  # for which the methods were asked; None is one that is not called as a whole
        under_methods = original

        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            nonlocal model, under_methods
            self.changed_loss = not args and self._acts_on_gradients()
            if not self.changed_loss:
                return original(loss, *args, **kwargs)
            if model is not self.run.model:
                model = self.run.model
                under_methods = self.fold("backward", lambda loss: original(loss, **options))
            options.clear()
            options.update(kwargs)
            return under_methods(loss)

        return backward

    def first_step(self, optimizer: Optimizer) -> None:
        """Called before the first update of each optimizer of the script: methods may change the optimizer in place."""
        self._note_device()
        self.run.optimizer = optimizer
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        if self.fold("optimizer", lambda model: optimizer)(self.run.model) is not optimizer:
            raise ConfigurationError(f"a method replaces the optimizer, which {self.owner} holds; omit that method")
        if is_fused and "model" in self.hooks:
            follow_strides(optimizer)  # a method may have changed the memory format of the weights

    def note_no_torch_optimizer(self, why: str) -> None:
        """Before the first update of an optimizer that is not a ``torch.optim.Optimizer``: methods cannot change it."""
        for method in self.methods:
            if "optimizer" in hooks_of(method):
                self.run.report_no_effect(method, why)

    @property
    def in_float64(self) -> bool:
        """Whether an exactness check runs the script in float64."""
        return any(getattr(method, "double", False) for method in self.methods)

    @property
    def wraps_updates(self) -> bool:
        """Whether some method acts between the backward pass and the update."""
        return bool({"grad_transform", "optimizer_step"} & self.hooks)

    def update_with(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        """Runs the update of an optimizer under the methods, and returns its result; ``update`` is its own step."""
        if self.run.model is None:  # not called as a whole: there is nothing that the methods were built for
            return update()
        if optimizer not in self.updates and (self.is_later or _trains_none_of(optimizer, self.run.model)):
            self.expected = optimizer
        if not self._acts_on_gradients():  # gradients of a changed loss are left out, as those that overflow
            return None if self.changed_loss else update()
        if optimizer not in self.updates:
            self.run.optimizer = optimizer
            transform = self.fold("grad_transform", lambda: None)
            step = self.fold("optimizer_step", lambda: self.update())

            def transform_and_step() -> None:
                transform()
                step()

            self.updates[optimizer] = transform_and_step
        results = list[Any]()  # none if a method skips the update
        self.update = lambda: results.append(update())
        _unscale(optimizer)
        self.updates[optimizer]()
        return results[-1] if results else None

    def _acts_on_gradients(self) -> bool:
        """Whether the hooks of a step act; False for good, after ``refuse``, once an optimizer trains another model."""
        optimizer, self.expected = self.expected, None
        if not self.gave_up and optimizer is not None and not _trains_only(optimizer, self.run.model):
            self.gave_up = True
            self.refuse(self._several_models())
        return not self.gave_up

    def _several_models(self, other: nn.Module | None = None) -> ConfigurationError:
        names = ", ".join(type(one).__name__ for one in (self.run.model, other) if one is not None)
        return ConfigurationError(
            f"{self.owner} trains several models, such as {names}, and a method that changes gradients needs to know "
            "which of them; leave that method out"
        )

    def without_effect(self, has_loader: bool, has_optimizer: bool) -> list[tuple[str, str]]:
        """(method, reason) of each that has no effect after the first step: nothing came to the seam that it needs.

        A method that acted on one of several models or loaders has an effect.
        """
        known = [(name, why) for name, why in self.run.no_effect if name not in self.run.effect_checks]
        absent = [
            (self.run.model is None, MODEL_HOOKS, f"{self.owner} does not call its model as a whole"),
            (not has_loader, {"data"}, f"{self.owner} reads no DataLoader"),
            (not has_optimizer, OPTIMIZER_HOOKS, f"{self.owner} updates its weights without an optimizer"),
        ]
        for is_absent, hooks, why in absent:
            reported = {name for name, _ in known}
            needing = [method.name for method in self.methods if hooks & set(hooks_of(method))]
            known += [(name, why) for name in needing if is_absent and name not in reported]
        return known

    def observer(self, has_loader: bool, has_optimizer: bool) -> EffectObserver:
        """An observer of the effects of the methods in one step; ``run.no_effect`` lists those that cannot have one."""
        self.run.no_effect = self.without_effect(has_loader, has_optimizer)
        return EffectObserver(self.run, self.methods)


@torch.no_grad()
def _unscale(optimizer: Optimizer) -> None:
    """Divides the gradients by the scale that a GradScaler leaves to a fused optimizer, which then does not.

    Where some gradient is not finite, the optimizer still skips its update, as ``found_inf`` tells it.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for device in {gradient.device for gradient in gradients}:
        foreach_mul_([one for one in gradients if one.device == device], scale.to(device).reciprocal())
    vars(optimizer)["grad_scale"] = None


def _trains_only(optimizer: Optimizer, model: nn.Module | None) -> bool:
    """Whether all parameters of an optimizer belong to the model; it is None where methods were built for none."""
    own = None if model is None else {id(parameter) for parameter in model.parameters()}
    groups = getattr(optimizer, "param_groups", ())  # not of an optimizer of Keras
    return own is None or all(id(parameter) in own for group in groups for parameter in group["params"])


def _trains_none_of(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer has parameters, none of which belongs to the model."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [id(weight) for group in getattr(optimizer, "param_groups", ()) for weight in group["params"]]
    return bool(held) and own.isdisjoint(held)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor
