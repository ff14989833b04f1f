"""Keras on torch, without importing it: its models are torch modules."""

from torch import nn

NO_KERAS = "the model is none of Keras"


def is_keras(module: object) -> bool:
    """Whether a module is a layer or model of Keras, or of a class that is derived from one."""
    return isinstance(module, nn.Module) and any(
        cls.__module__.startswith("keras.src.") for cls in type(module).__mro__
    )
