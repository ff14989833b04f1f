"""The update of Keras's Adam and AdamW as one fused kernel of torch."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext
from hasten._torch_compat import fused_adam_step
from hasten.utils.keras_models import NO_KERAS, is_keras, replace_method

PACKAGE = "keras.src.backend.torch.optimizers"


@dataclass(frozen=True)
class FusedKerasOptimizer(Method):
    """Updates the variables, momentums and velocities of Keras's optimizer by the kernel of ``torch.optim.Adam``.

    The optimizer stays the object that it was: schedules, weight decay, clipping and averages are those of Keras.
    Keras divides by the square root of the velocity plus epsilon before it corrects the bias, torch after it; epsilon
    is scaled so that the formula stays Keras's.
    """

    card = Card(
        summary="the update of Keras's Adam or AdamW as one fused kernel",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/optim.html, the fused implementations",
        gain=(1.0, 1.3),
        gain_when="the steps of a Keras model take a few milliseconds",
        accelerates={"optimizer_step"},
        applies_to={"keras"},
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not is_keras(model):
            return run.report_no_effect(self, NO_KERAS, model)
        supported = [getattr(import_module(f"{PACKAGE}.torch_{name.lower()}"), name) for name in ("Adam", "AdamW")]
        optimizer: Any = getattr(model, "optimizer", None)
        if type(optimizer) not in supported:
            run.report_no_effect(self, f"the kernel computes Adam and AdamW, not {type(optimizer).__name__}")
            return model
        updates, keras_model = [0], cast(Any, model)
        compile_model = keras_model.compile

        def fuse(optimizer: Any) -> None:
            if type(optimizer) in supported and "_backend_update_step" not in vars(optimizer):
                update = _fused_update(optimizer, optimizer._backend_update_step, updates)
                replace_method(optimizer, "_backend_update_step", update)

        def compile_again(*args: Any, **kwargs: Any) -> None:  # as before layers are unfrozen: with another optimizer
            compile_model(*args, **kwargs)
            fuse(keras_model.optimizer)

        fuse(optimizer)
        replace_method(model, "compile", compile_again)

        def observe() -> str:
            if not updates[0]:
                raise NoEffectError("the optimizer did not update the variables by the kernel")
            return "the variables were updated by a fused kernel"

        run.observe_effect(self, observe)
        return model


def _fused_update(optimizer: Any, original: Any, updates: list[int]) -> Any:
    known: dict[tuple[int, ...], tuple[list[torch.Tensor], ...]] = {}

    @torch.no_grad()
    def update(grads: list[Any], variables: list[Any], learning_rate: Any) -> None:
        key = tuple(map(id, variables))
        if key not in known:
            known[key] = _tensors(optimizer, variables)
        params, momentums, velocities, largest = known[key]
        dtype = params[0].dtype
        if any(not isinstance(grad, torch.Tensor) or grad.dtype != dtype or grad.is_sparse for grad in grads):
            return original(grads, variables, learning_rate)
        number = int(optimizer.iterations) + 1
        options: dict[str, Any] = {
            "lr": float(learning_rate),
            "beta1": optimizer.beta_1,
            "beta2": optimizer.beta_2,
            "eps": optimizer.epsilon / (1 - optimizer.beta_2**number) ** 0.5,
            "amsgrad": optimizer.amsgrad,
        }
        step = torch.tensor(float(number), device=params[0].device)
        fused_adam_step(params, grads, momentums, velocities, largest, [step] * len(params), **options)
        updates[0] += 1

    return update


def _tensors(optimizer: Any, variables: list[Any]) -> tuple[list[torch.Tensor], ...]:
    """Parameters, momentums, velocities and, with amsgrad, their largest values: Keras keeps these tensors."""
    indices = [optimizer._get_variable_index(variable) for variable in variables]

    params = [variable.value.detach() for variable in variables]

    def of(slots: list[Any]) -> list[torch.Tensor]:
        values = [slots[index].value for index in indices]
        for value, weight in zip(values, params, strict=True):
            if value.stride() != weight.stride():  # the kernel on the CPU walks through memory and checks no strides
                value.data = torch.empty_like(weight).copy_(value)
        return [value.detach() for value in values]

    largest = of(optimizer._velocity_hats) if optimizer.amsgrad else []
    return params, of(optimizer._momentums), of(optimizer._velocities), largest
