"""Keras's LSTM and GRU as one kernel for all time steps, where Keras on torch runs a Python loop: on the CPU."""

from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext
from hasten._torch_compat import gru_kernel, lstm_kernel
from hasten.utils.keras_models import NO_KERAS, is_keras


@dataclass(frozen=True)
class FusedRNN(Method):
    """Computes recurrent layers of Keras on the CPU by the kernels of ``torch.nn.LSTM`` and ``torch.nn.GRU``.

    It replaces ``lstm`` and ``gru`` of ``keras.src.backend``, for all models of the process and until its end.
    A layer with a mask, an activation other than tanh and sigmoid, ``recurrent_dropout``, ``unroll``, or a GRU with
    ``reset_after=False`` keeps Keras's loop, because the kernels compute something else.
    """

    card = Card(
        summary="Keras's LSTM and GRU as one kernel instead of a Python loop over time",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html",
        gain=(1.5, 5.0),
        gain_when="a Keras model runs on the CPU, with sequences of a few dozen time steps or more",
        accelerates={"forward", "backward"},
        applies_to={"keras_rnn", "cpu"},
        trial_priority=1,
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not is_keras(model):
            return run.report_no_effect(self, NO_KERAS, model)
        backend: Any = import_module("keras.src.backend")
        counts: Counter[str] = Counter()
        backend.lstm = _by_kernel(backend.lstm, _lstm, counts)
        backend.gru = _by_kernel(backend.gru, _gru, counts)

        def observe() -> str:
            if not counts["kernel"]:
                why = "; ".join(reason for reason in counts) or "the model called no LSTM or GRU that has a kernel"
                raise NoEffectError(why)
            return f"{counts['kernel']} calls of recurrent layers were one kernel each"

        run.observe_effect(self, observe)
        return model


def _by_kernel(original: Any, kernel: Any, counts: Counter[str]) -> Any:
    """Keras's function of a recurrent layer, by ``kernel`` where that computes the same, else ``original``.

    ``counts``: calls by "kernel", or the reason for Keras's loop.
    """

    def rnn(inputs: Any, *args: Any, **options: Any) -> Any:
        obstacle = _obstacle(inputs, args[-1], options)
        if obstacle:
            counts[obstacle] += 1
            return original(inputs, *args, **options)
        counts["kernel"] += 1
        weights = [_tensor(options[name]) for name in ("kernel", "recurrent_kernel")]
        bias = None if options["bias"] is None else _tensor(options["bias"])
        inputs = inputs.to(weights[0].dtype)
        states = [_tensor(state).to(inputs.dtype).unsqueeze(0) for state in args[:-1]]
        outputs, *last = kernel(inputs.flip(1) if options.get("go_backwards") else inputs, states, *weights, bias)
        final = outputs[:, -1]
        return final, outputs if options.get("return_sequences") else final.unsqueeze(1), [s.squeeze(0) for s in last]

    return rnn


def _obstacle(inputs: Any, mask: Any, options: dict[str, Any]) -> str:
    """Why the kernel would compute something else; empty if it computes the same."""
    activations: Any = import_module("keras.activations")
    if not isinstance(inputs, torch.Tensor) or inputs.device.type != "cpu":
        return "Keras has kernels of its own on this device"
    if mask is not None:
        return "the sequences have a mask"
    if options["activation"] is not activations.tanh or options["recurrent_activation"] is not activations.sigmoid:
        return "the activations are not tanh and sigmoid"
    if options.get("unroll"):
        return "the layer is unrolled"
    return "" if options.get("reset_after", True) else "a GRU with reset_after=False has another formula"


def _lstm(inputs: torch.Tensor, states: list[torch.Tensor], kernel: Any, recurrent: Any, bias: Any) -> Any:
    bias = kernel.new_zeros(kernel.shape[1]) if bias is None else bias
    weights = [kernel.T.contiguous(), recurrent.T.contiguous(), bias, torch.zeros_like(bias)]
    return lstm_kernel(inputs, (states[0], states[1]), weights)


def _gru(inputs: torch.Tensor, states: list[torch.Tensor], kernel: Any, recurrent: Any, bias: Any) -> Any:
    def reordered(gates: torch.Tensor) -> torch.Tensor:
        update, reset, new = (gates.T if gates.ndim == 2 else gates).chunk(3)  # as Keras orders them
        return torch.cat([reset, update, new])

    biases = kernel.new_zeros(2, kernel.shape[1]) if bias is None else bias
    return gru_kernel(inputs, states[0], [reordered(kernel), reordered(recurrent), *map(reordered, biases)])


def _tensor(variable: Any) -> torch.Tensor:
    return import_module("keras.ops").convert_to_tensor(variable)
