"""float16 with loss scaling: the recipe of Mixed Precision Training.

1. Master weights. The parameters stay in float32 and the optimizer updates them; ``torch.autocast`` makes
   the float16 copies that the forward and backward pass use.
2. Loss scaling. The loss is multiplied by a scale before the backward pass, so that small gradients do not
   vanish below 2**-24, and the gradients are divided by it before anybody looks at them. A step whose
   gradients overflowed is skipped. ``dynamic``: it starts at 2**16, halves after an overflow and doubles after
   2000 good steps; a number keeps the scale constant.
3. Arithmetic by torch's own lists (https://docs.pytorch.org/docs/stable/amp.html), used as they are:
   float16   matmul, mm, mv, bmm, addmm and their kin, linear, conv1d to conv3d and their transposes, prelu,
             GRUCell, LSTMCell, RNNCell
   float32   losses, softmax, log_softmax, layer_norm, group_norm, norm, exp, log, pow, sum, prod, cumsum, cosine
             similarity and distances
   widest    addcdiv, addcmul, atan2, bilinear, cross, dot, grid_sample, index_put, scatter_add, tensordot
   refused   binary_cross_entropy (use the one with logits)
"""

from dataclasses import dataclass

import torch

from hasten._torch_compat import foreach_mul_
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import RunError
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import BackwardFn, ForwardFn, StepFn

BACKOFF, GROWTH, GOOD_STEPS = 0.5, 2.0, 2000
GIVE_UP_AFTER = 30  # overflows in a row: from 2**16 far below 1, so it is not the scale


@dataclass(frozen=True)
class Float16(Method):
    card = Card(
        summary="matrix products and convolutions in float16 with loss scaling, master weights in float32",
        exactness=Exactness.REDUCED_PRECISION,
        source="Micikevicius et al. 2018, arXiv 1710.03740; torch.autocast",
        gain_when="GPUs with float16 units and without bfloat16 ones; where there is bfloat16, it needs no loss scaling",
        accelerates={"forward", "backward"},
        applies_to={"matrix_weights", "float16_hardware"},
        requires={"uniform_precision", "full_weights", "replicated_weights"},
        invalidates={"uniform_precision"},
        order=WrapOrder.EARLY,
        presets=({}, {"scale": 1024}),
    )
    scale: str | float = option("dynamic", one_of=("dynamic",), above=0)

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        if all(parameter.ndim < 2 or parameter.dtype != torch.float32 for parameter in run.model.parameters()):
            run.report_no_effect(self, "the model has no float32 matrix that could be multiplied in float16")
            return forward
        run.checkpoint_state[self.name] = Scale(
            self.scale, run.device
        )  # the hooks below, asked later, act if it is there
        device = run.device.type

        def in_float16(batch):
            with torch.autocast(device, torch.float16):
                return forward(batch)

        return in_float16

    def backward(self, backward: BackwardFn, run: RunContext) -> BackwardFn:
        scale = run.checkpoint_state.get(self.name)
        return (lambda loss: backward(loss * scale.tensor)) if scale else backward

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        scale, parameters = run.checkpoint_state.get(self.name), list(run.model.parameters())
        if scale is None:
            return grad_transform

        def unscaled():
            grad_transform()
            present = [parameter.grad for parameter in parameters if parameter.grad is not None]
            foreach_mul_(present, 1.0 / scale.value)
            scale.overflow = run.any_rank(not torch.nn.utils.get_total_norm(present).isfinite().item())

        return unscaled

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        scale = run.checkpoint_state.get(self.name)
        if scale is None:
            return optimizer_step

        def unless_overflown():
            if not scale.overflow:
                optimizer_step()
            scale.adapt()

        return unless_overflown


class Scale:
    """The loss scale: its value, and how long it has been good or bad."""

    def __init__(self, scale: str | float, device: torch.device):
        self.dynamic = scale == "dynamic"
        self.value = 2.0**16 if self.dynamic else float(scale)
        self.tensor = torch.tensor(self.value, device=device)  # what the loss is multiplied by, at a fixed address
        self.good = self.bad = 0  # steps in a row
        self.overflow = False

    def adapt(self) -> None:
        """After every step: halve after an overflow, double after a long time without one."""
        self.good, self.bad = (0, self.bad + 1) if self.overflow else (self.good + 1, 0)
        if self.bad == GIVE_UP_AFTER:
            raise RunError(
                f"float16: the gradients overflowed {self.bad} steps in a row; use bfloat16, or check the data and the loss for NaN"
            )
        if self.dynamic and self.overflow:
            self._set(self.value * BACKOFF)
        elif self.dynamic and self.good == GOOD_STEPS:
            self.good = 0
            self._set(self.value * GROWTH)

    def _set(self, value: float) -> None:
        self.value = value
        self.tensor.fill_(value)

    def state_dict(self) -> dict:
        return {"value": self.value, "good": self.good, "bad": self.bad}

    def load_state_dict(self, state: dict) -> None:
        self.good, self.bad = state["good"], state["bad"]
        self._set(state["value"])
