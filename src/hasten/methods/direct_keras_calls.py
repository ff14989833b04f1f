"""The layers of a Keras model are called directly, without Keras's preparation of every call."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext
from hasten._torch_compat import has_forward_hooks
from hasten.utils.keras_models import NO_KERAS, computes_in, is_builtin, is_keras, is_stateless, replace_method

DIRECT = {  # layers of Keras whose output depends on their inputs, weights and ``training`` alone
    *("Dense", "Dropout", "Activation", "ReLU", "LeakyReLU", "ELU", "Softmax", "PReLU"),
    *("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D", "SeparableConv2D", "Conv2DTranspose"),
    *("BatchNormalization", "LayerNormalization", "GroupNormalization"),
    *("MaxPooling1D", "MaxPooling2D", "AveragePooling1D", "AveragePooling2D"),
    *("GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalAveragePooling1D", "GlobalAveragePooling2D"),
    *("Flatten", "Reshape", "Permute", "ZeroPadding2D", "UpSampling2D"),
    *("LSTM", "GRU", "SimpleRNN"),
}
CONTAINERS = "InputLayer", "Functional", "Sequential", "LSTMCell", "GRUCell", "SimpleRNNCell"  # within a model


@dataclass(frozen=True)
class DirectKerasCalls(Method):
    """Calls ``layer.call`` of built-in layers of a Sequential or functional model, in the order of the model.

    Keras checks and converts the arguments of every call of every layer, which costs more than a small layer itself. In
    a model that is built, with one dtype and without masks, all of that does nothing. Any other layer, and a layer
    with hooks, a regularizer of its activity or another dtype, is called as before. If all layers are called directly,
    so is the model; ``keras.Layer.__call__`` is replaced for that until the process ends.
    """

    card = Card(
        summary="call the layers of a Keras model without Keras's checks of every call",
        exactness=Exactness.BIT_EXACT,
        source="https://keras.io/api/layers/base_layer/",
        gain=(1.0, 1.6),
        gain_when="a Keras model has small layers, most on the CPU",
        accelerates={"forward", "evaluation", "logging"},
        applies_to={"keras"},
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not is_keras(model):
            return run.report_no_effect(self, NO_KERAS, model)
        functional: Any = getattr(model, "_functional", None) or model
        if not hasattr(functional, "_nodes_by_depth") or not is_builtin(model):
            return run.report_no_effect(self, f"{type(model).__name__} is no Sequential or functional model", model)
        nodes = _nodes(functional)
        direct = {id(node): call for node in nodes if (call := _direct_call(node, functional)) is not None}
        if not direct or getattr(model, "jit_compile", False):
            why = "jit_compile compiles the step" if direct else "no layer can be called directly"
            return run.report_no_effect(self, why, model)
        calls = [0]
        replace_method(functional, "call", _direct_functional_call(functional, nodes, direct, calls))
        if len(direct) == len(nodes):
            _call_model_directly(model, functional)

        def observe() -> str:
            if not calls[0]:
                raise NoEffectError("the model was not called with tensors")
            return f"{len(direct)} of {len(nodes)} layers were called directly"

        run.observe_effect(self, observe)
        return model


def _nodes(functional: Any) -> list[Any]:
    """The calls of layers, in the order in which Keras makes them."""
    by_depth = functional._nodes_by_depth
    ordered = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in ordered if node.operation and not node.is_input]


def _direct_call(node: Any, functional: Any) -> Callable[[Any, bool], Any] | None:
    """A function (input, training) -> output of the node's layer if it may be called directly; else None."""
    layer = node.operation
    if type(layer).__name__ not in DIRECT or not is_builtin(layer) or not layer.built or "call" in layer.__dict__:
        return None
    arguments = node.arguments
    if arguments.kwargs.keys() - {"training", "mask"} or arguments.kwargs.get("mask") is not None:
        return None
    if len(arguments.args) != 1 or len(node.input_tensors) != 1 or len(node.outputs) != 1:
        return None
    dtypes = {layer.compute_dtype, layer.variable_dtype, functional.compute_dtype, functional.variable_dtype}
    if len(dtypes) > 1 or not computes_in(layer.compute_dtype) or has_forward_hooks(layer) or layer._remat_mode:
        return None
    if layer.activity_regularizer is not None or getattr(layer, "quantization_mode", None):
        return None
    if type(layer).__name__ == "Dense" and not layer.lora_enabled:
        return _dense(layer)
    if "training" in inspect.signature(layer.call).parameters:
        return lambda x, training: layer.call(x, training=training)
    return lambda x, training: layer.call(x)


def _dense(layer: Any) -> Callable[[Any, bool], Any]:
    """``Dense.call`` as the operations of torch that it comes to; the activation stays Keras's, which marks logits."""
    kernel, bias, activation = layer.kernel.value, layer.bias.value if layer.use_bias else None, layer.activation

    def call(x: torch.Tensor, training: bool) -> torch.Tensor:
        if x.dtype != kernel.dtype or layer.lora_enabled or layer.quantization_mode:  # may be set at any time
            return layer(x, training=training)
        x = torch.matmul(x, kernel)
        x = x if bias is None else torch.add(x, bias)
        return x if activation is None else activation(x)

    return call


def _direct_functional_call(functional: Any, nodes: list[Any], direct: dict[int, Any], calls: list[int]) -> Any:
    """``Functional.call`` as a straight sequence of calls, which it counts in ``calls[0]``.

    Keras's own ``call`` serves calls with a mask, other arguments or anything but tensors.
    """
    tree: Any = import_module("keras.tree")
    original, shapes = functional.call, [x.shape for x in functional.inputs]
    sources = [id(node.input_tensors[0]) if node.input_tensors else 0 for node in nodes]
    program = [
        (direct.get(id(node)), node, source, [*map(id, node.outputs)])
        for node, source in zip(nodes, sources, strict=True)
    ]

    def call(inputs: Any, training: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        given = tree.flatten(inputs)
        is_usual = mask is None and not kwargs and isinstance(training, bool) and all(map(_is_plain, given))
        if not is_usual or is_stateless() or not all(map(_fits, given, shapes)):
            return original(inputs, training=training, mask=mask, **kwargs)
        calls[0] += 1
        values = dict(zip(map(id, functional.inputs), functional._standardize_inputs(inputs), strict=True))
        for layer, node, source, targets in program:
            if layer is not None and _is_plain(values[source]):
                values[targets[0]] = layer(values[source], training)
                continue
            args, options = node.arguments.fill_in(values)
            if getattr(node.operation, "_call_has_training_arg", False):
                options["training"] = training
            outputs = node.operation(*args, **options)
            values.update(zip(targets, tree.flatten(outputs), strict=True))
        packed: Any = tree.pack_sequence_as(functional._outputs_struct, [values[id(y)] for y in functional.outputs])
        is_single = type(functional._outputs_struct) in (list, tuple) and len(packed) == 1
        return packed[0] if is_single else packed

    return call


def _call_model_directly(model: Any, functional: Any) -> None:
    """Spares the model's own call Keras's preparation, for one tensor of the shape and dtype that it was built for.

    ``__call__`` is looked up in the class, so that of all layers is replaced, once, until the process ends.
    """
    known = {*DIRECT, *CONTAINERS, type(model).__name__}  # others may read what Keras keeps for the layers of a call
    layers = model._flatten_layers()
    if len(functional.inputs) != 1 or not all(is_builtin(one) and type(one).__name__ in known for one in layers):
        return
    if model.activity_regularizer is None and not model._remat_mode:
        model.__dict__["_hasten_accepts"] = partial(_accepts(model, functional), model)
        base: Any = import_module("keras.src.layers.layer").Layer
        if not hasattr(base.__call__, "hasten"):
            base.__call__ = _call_of(base.__call__)


def _accepts(model: Any, functional: Any) -> Callable[[Any, Any], bool]:
    """A function (model, argument) -> whether the model, which may be a copy, may be called directly."""
    shape, dtype = functional.inputs[0].shape, getattr(torch, str(model.compute_dtype))

    def accepts(called: Any, x: Any) -> bool:
        is_same = called is functional or called.__dict__.get("_functional") is functional  # no copy, no layer added
        return is_same and model.built and _is_plain(x) and x.dtype == dtype and _fits(x, shape) and not is_stateless()

    return accepts


def _call_of(original: Any) -> Any:
    """``Layer.__call__`` that calls the models directly that have the attribute ``_hasten_accepts``."""

    @wraps(original)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        accepts = layer.__dict__.get("_hasten_accepts")
        if accepts is None or len(args) != 1 or kwargs.keys() != {"training"}:
            return original(layer, *args, **kwargs)
        if type(kwargs["training"]) is not bool or not accepts(args[0]):
            return original(layer, *args, **kwargs)
        return torch.nn.Module.__call__(layer, args[0], training=kwargs["training"])

    vars(call)["hasten"] = True
    return call


def _fits(x: torch.Tensor, shape: Sequence[int | None]) -> bool:
    """Whether a batch has the shape of an input, whose unknown sizes are None."""
    return x.ndim == len(shape) and all(b is None or a == b for a, b in zip(x.shape[1:], shape[1:], strict=True))


def _is_plain(x: Any) -> bool:
    """Whether ``x`` is a tensor without a Keras mask."""
    return isinstance(x, torch.Tensor) and getattr(x, "_keras_mask", None) is None
