"""Keras on torch, without importing it: its models are torch modules."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

NO_KERAS = "the model is not a Keras model"


def is_keras(module: object) -> bool:
    """Whether a module is a layer or model of Keras, or of a class that is derived from one."""
    return isinstance(module, nn.Module) and any(
        cls.__module__.startswith("keras.src.") for cls in type(module).__mro__
    )


def is_builtin(thing: object) -> bool:
    """Whether the class of a layer or model is one of Keras itself, not derived from one."""
    return type(thing).__module__.startswith("keras.src.")


def is_keras_dropout(module: object) -> bool:
    """Whether a module is a layer of Keras that drops out a fraction ``rate`` of its inputs."""
    return is_keras(module) and "Dropout" in type(module).__name__


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, including the layers of a Keras model, which torch does not register as children."""
    keras_model: Any = model
    return [*model.modules(), *(keras_model._flatten_layers() if is_keras(model) else ())]


def variables_below_float64(model: nn.Module) -> list[str]:
    """Paths of the floating-point variables that a Keras model declares in a lower precision than float64."""
    keras_model: Any = model
    variables = keras_model.variables if is_keras(model) else ()
    return [variable.path for variable in variables if "float" in variable.dtype and variable.dtype != "float64"]


def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Calls ``function`` in place of a method of one object; a deep copy of the object has the method of its class."""

    def call(called: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if called is owner else getattr(type(called), name)(called, *args, **kwargs)

    owner.__dict__[name] = partial(call, owner)  # Keras saves lists and objects that it finds here, but no functions


def computes_in(dtype: str) -> bool:
    """Whether Keras's operations compute in the dtype of their arguments: float32, and float64 in an exactness check.

    Else Keras limits float64 to float32, and computes in float32 what the CPU has no kernel for in lower precision.
    """
    dtypes: Any = import_module("keras.src.backend.common.dtypes")
    return dtype == "float32" or (dtype == "float64" and dtypes.result_type(dtype, dtype) == dtype)


def is_stateless() -> bool:
    """Whether Keras redirects reads and updates of variables, as within ``stateless_call``."""
    scope: Any = import_module("keras.src.backend.common.stateless_scope")
    return scope.in_stateless_scope()
