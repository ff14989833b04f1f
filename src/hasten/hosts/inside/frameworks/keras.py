"""Keras on torch: its optimizers are not those of torch, and it calls a model with symbolic tensors to build it.

A step ends with ``optimizer.apply``. A call with symbolic tensors computes nothing and is ignored. A check in float64
needs more than a conversion of the model, because each object of Keras has a dtype from its constructor on.
"""

from __future__ import annotations

import functools
import inspect
import math
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hasten.hosts.inside.replace import replaces

if TYPE_CHECKING:
    from hasten.hosts.inside.frameworks import FrameworkLoop

FLOATS = {"float32", "float16", "bfloat16"}  # dtypes that a check in float64 replaces
DRAWS = ("normal", "truncated_normal", "uniform")  # random functions of the backend, from which weights are initialized


def watch(module: Any, loop: FrameworkLoop) -> None:
    """Patches the classes of Keras so that ``loop`` gets steps, metrics and arguments.

    ``module`` is ``keras.src.backend.torch.trainer``, which is imported before a script can build anything.
    """
    if loop.in_float64:
        _compute_in_float64()
    common, src = "keras.src.backend.common", "keras.src"
    any_symbolic_tensors: Any = import_module(f"{common}.keras_tensor").any_symbolic_tensors
    in_stateless_scope: Any = import_module(f"{common}.stateless_scope").in_stateless_scope
    lists: Any = import_module(f"{src}.callbacks.callback_list").CallbackList
    optimizer: Any = import_module(f"{src}.optimizers.base_optimizer").BaseOptimizer
    loop.models.is_symbolic = lambda args, kwargs: in_stateless_scope() or any_symbolic_tensors(args, kwargs)
    trainer = module.TorchTrainer
    optimizer.apply = _counted(optimizer.apply, loop)
    replaces(lists, "on_train_begin")(partial(_note_length, loop))
    replaces(lists, "on_epoch_end")(partial(_report_epoch, loop))
    replaces(trainer, "fit")(partial(_note_fit, loop))
    optimizer.__init__ = _taken(optimizer.__init__, None, loop)
    trainer.fit = _taken(trainer.fit, "fit", loop)


def _compute_in_float64() -> None:
    """Makes everything that a script builds from here on compute in float64, from the same initial weights.

    Keras converts inputs to the dtype of a layer by itself. What would stay below float64: layers with a dtype or a
    mixed policy of their own, and the result of every operation on several tensors, which Keras limits to 32 bits as
    JAX does.
    """
    src = "keras.src"
    policy: Any = import_module(f"{src}.dtype_policies.dtype_policy").DTypePolicy
    random: Any = import_module(f"{src}.backend.torch.random")
    parse = policy._parse_name
    import_module(f"{src}.backend.config").set_floatx("float64")
    import_module(f"{src}.backend.common.dtypes").BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    policy._parse_name = lambda self, name: tuple("float64" if d in FLOATS else d for d in parse(self, name))
    for name in DRAWS:
        replaces(random, name)(_draw_in_float32)


def _draw_in_float32(original: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Float64 tensors of the numbers that a random function draws in a run in float32."""
    return original(*args, dtype="float32", **kwargs).double()


def _note_fit(loop: FrameworkLoop, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    loop.trainer = model
    loop.facts.add("keras")
    loop.steps.has_optimizer = True  # so that a backward pass ends no step
    if any(hasattr(layer, "cell") for layer in model._flatten_layers()):
        loop.facts.add("keras_rnn")
    if all(model is not root for root in loop.models.roots):
        loop.new_model()
    return original(model, *args, **kwargs)


def _taken(original: Any, name: str | None, loop: FrameworkLoop) -> Any:
    """A method whose arguments that are numbers can be varied; ``name`` is None for a constructor."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def take(*args: Any, **kwargs: Any) -> Any:
        with suppress(TypeError):  # the function itself reports wrong arguments
            bound = signature.bind(*args, **kwargs)
            bound.arguments |= loop.take(name or type(args[0]).__name__, bound.arguments)
            args, kwargs = bound.args, bound.kwargs
        return original(*args, **kwargs)

    return take


def _counted(original: Any, loop: FrameworkLoop) -> Any:
    """``optimizer.apply`` as the end of a step; with several optimizers, of the one with the most updates."""
    steps, counts = loop.steps, WeakKeyDictionary[Any, int]()
    inside = False

    @functools.wraps(original)
    def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not steps.active:  # an optimizer that scales the loss calls another one
            return original(optimizer, *args, **kwargs)
        if optimizer not in counts:
            counts[optimizer] = max(0, steps.count - 1)
            steps.has_optimizer = loop.has_optimizer = True
            steps.sites.note("optimizers", optimizer)
            loop.no_torch_optimizer(f"Keras's {type(optimizer).__name__} is not a torch.optim.Optimizer")
        began = steps.phases.now() if steps.phases.running else None
        inside = True
        try:
            if steps.wrap_update is None:
                result = original(optimizer, *args, **kwargs)
            else:
                result = steps.wrap_update(optimizer, lambda: original(optimizer, *args, **kwargs))
        finally:
            inside = False
        if began is not None:
            steps.phases.record("optimizer_step", began)
        counts[optimizer] += 1
        if counts[optimizer] > steps.count:
            steps.end_step()
        return result

    return apply


def _note_length(loop: FrameworkLoop, original: Any, callbacks: Any, *args: Any, **kwargs: Any) -> Any:
    steps, epochs = (callbacks.params.get(name) for name in ("steps", "epochs"))
    loop.length = int(steps * epochs) if steps and epochs and steps * epochs < math.inf else None
    return original(callbacks, *args, **kwargs)


def _report_epoch(loop: FrameworkLoop, original: Any, callbacks: Any, epoch: int, logs: Any = None) -> Any:
    """``CallbackList.on_epoch_end``, whose logs hold the metrics of the validation."""
    held_out = [name for name in logs or () if name.startswith("val_")]
    for name in held_out:
        loop.report(name, logs[name])
    result = original(callbacks, epoch, logs)
    # not sooner: a callback finds its direction here
    loop.monitor = _monitor(callbacks.callbacks, held_out) or loop.monitor
    return result


def _monitor(callbacks: list[Any], held_out: list[str]) -> tuple[str, str] | None:
    """(metric by which a callback chooses weights or stops, "max" or "min"); None if none of ``held_out``.

    A checkpoint of every epoch, and one that lowers the learning rate, have a monitor by default and choose nothing.
    """
    for callback in callbacks:
        is_better = getattr(callback, "monitor_op", None)
        chooses = getattr(callback, "save_best_only", hasattr(callback, "restore_best_weights"))
        if chooses and getattr(callback, "monitor", None) in held_out and is_better is not None:
            return callback.monitor, "max" if is_better(1.0, 0.0) else "min"
    return None
