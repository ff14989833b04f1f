"""Mixed precision with float16 and loss scaling (Micikevicius et al. 2018)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten import Card, Exactness, Method, RunContext, RunError, WrapOrder, option
from hasten._torch_compat import foreach_mul_, skips_overflows
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.types import BackwardFn, Batch, ForwardFn, StepFn
from hasten.utils.autocast import autocast_obstacle
from hasten.utils.observe_step import observe_precision

INITIAL_SCALE, BACKOFF, GROWTH = 2.0**16, 0.5, 2.0
GROWTH_INTERVAL = 2000  # consecutive steps without overflow until the scale grows
MAX_OVERFLOWS = 30  # consecutive; the scale has then fallen from 2**16 far below 1, so it is not the cause


@dataclass(frozen=True)
class Float16(Method):
    """Runs matrix products and convolutions in float16, with master weights in float32 and a scaled loss.

    Arithmetic: ``torch.autocast`` chooses the precision of each operation by its own lists
    (https://docs.pytorch.org/docs/stable/amp.html). The parameters stay in float32, and the optimizer updates them.

    Loss scaling: the loss is multiplied by a scale before the backward pass, so that small gradients do not vanish
    below 2**-24, and the gradients are divided by it before any other method reads them. A step whose gradients
    overflowed is skipped. The dynamic scale starts at 2**16, halves after an overflow and doubles after 2000 steps
    without one. In one process, a fused Adam skips the step by itself, and a GPU is waited for only every 30 steps.
    """

    card = Card(
        summary="matrix products and convolutions in float16 with loss scaling, master weights in float32",
        exactness=Exactness.REDUCED_PRECISION,
        source="Micikevicius et al. 2018, arXiv 1710.03740; torch.autocast",
        gain_when="GPUs with float16 units but without bfloat16 units; bfloat16 needs no loss scaling",
        accelerates={"forward", "backward"},
        applies_to={"matrix_weights", "float16_hardware"},
        requires={"uniform_precision", "full_weights", "replicated_weights"},
        invalidates={"uniform_precision"},
        order=WrapOrder.EARLY,
        presets=({}, {"scale": 1024}),
        script_edit={
            "by_hand": "call model and loss under torch.autocast(device_type, dtype=torch.float16), and step through a"
            " torch.amp.GradScaler",
        },
    )

    scale: str | float = option("dynamic", one_of=("dynamic",), above=0)  # a number is a constant scale

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        if obstacle := autocast_obstacle(run.model, run.device, torch.float16):
            run.report_no_effect(self, obstacle)
            return forward
        on_device = run.parallel is None and skips_overflows(run.optimizer)
        # without it, the hooks below do nothing
        run.checkpoint_state[self.name] = (DeviceLossScale if on_device else LossScale)(self.scale, run.device)
        device = run.device.type
        run.observe_effect(self, partial(observe_precision, run, torch.float16))

        def forward_in_float16(batch: Batch) -> torch.Tensor:
            with torch.autocast(device, torch.float16):
                return forward(batch)

        return forward_in_float16

    def backward(self, backward: BackwardFn, run: RunContext) -> BackwardFn:
        scale: LossScale | DeviceLossScale | None = run.checkpoint_state.get(self.name)
        return backward if scale is None else lambda loss: backward(loss * scale.tensor)

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        scale: LossScale | DeviceLossScale | None = run.checkpoint_state.get(self.name)
        if scale is None:
            return grad_transform
        parameters = list(run.model.parameters())

        def unscale_gradients() -> None:
            grad_transform()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            scale.unscale(gradients, run.ranks)

        return unscale_gradients

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        scale: LossScale | DeviceLossScale | None = run.checkpoint_state.get(self.name)
        if scale is None:
            return optimizer_step

        return partial(scale.step, optimizer_step, run.optimizer)


NEVER_FINITE = (
    "float16: the gradients overflowed {} steps in a row; use bfloat16, or check the data and the loss for NaN"
)


class LossScale:
    """The loss scale; part of the checkpoint. ``hasten diagnose --ops`` shows its ``value`` and ``overflow``."""

    def __init__(self, scale: str | float, device: torch.device):
        self.dynamic = scale == "dynamic"
        self.value = INITIAL_SCALE if self.dynamic else float(scale)
        self.tensor = torch.tensor(self.value, device=device)  # at a fixed address; the loss is multiplied by it
        self.good_steps = self.overflows = 0  # consecutive steps without, and with overflow
        self.overflow = False  # whether the gradients of the current step overflowed on any rank

    def unscale(self, gradients: list[torch.Tensor], ranks: ProcessGroupInfo) -> None:
        """Divides the gradients by the scale and notes whether those of any rank overflowed."""
        foreach_mul_(gradients, 1.0 / self.value)
        self.overflow = ranks.any(not torch.nn.utils.get_total_norm(gradients).isfinite().item())

    def step(self, optimizer_step: StepFn, optimizer: torch.optim.Optimizer) -> None:
        """Updates the weights unless the gradients overflowed, then the scale."""
        if not self.overflow:
            optimizer_step()
        self.update()

    def update(self) -> None:
        """Halves the scale after an overflow, doubles it after GROWTH_INTERVAL steps. RunError after MAX_OVERFLOWS."""
        if self.overflow:
            self.good_steps, self.overflows = 0, self.overflows + 1
        else:
            self.good_steps, self.overflows = self.good_steps + 1, 0
        if self.overflows == MAX_OVERFLOWS:
            raise RunError(NEVER_FINITE.format(self.overflows))
        if self.dynamic and self.overflow:
            self._set(self.value * BACKOFF)
        elif self.dynamic and self.good_steps == GROWTH_INTERVAL:
            self.good_steps = 0
            self._set(self.value * GROWTH)

    def _set(self, value: float) -> None:
        self.value = value
        self.tensor.fill_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.good_steps, self.overflows = state["good_steps"], state["overflows"]
        self._set(state["value"])


class DeviceLossScale:
    """The loss scale in tensors on the device, for an optimizer that skips a step by itself: nothing waits for them."""

    def __init__(self, scale: str | float, device: torch.device):
        self.dynamic, self.steps = scale == "dynamic", 0
        self.tensor = torch.tensor(INITIAL_SCALE if self.dynamic else float(scale), device=device)
        self.good, self.bad, self.found = (torch.zeros((), device=device) for _ in range(3))  # as good_steps, overflows

    value = property(lambda self: self.tensor.item())
    overflow = property(lambda self: bool(self.found.item()))

    def unscale(self, gradients: list[torch.Tensor], ranks: ProcessGroupInfo) -> None:
        """Divides the gradients by the scale and notes whether they overflowed."""
        foreach_mul_(gradients, self.tensor.reciprocal())
        self.found.copy_(~torch.nn.utils.get_total_norm(gradients).isfinite())

    def step(self, optimizer_step: StepFn, optimizer: torch.optim.Optimizer) -> None:
        """Updates weights and scale. The optimizer reads ``found_inf``, as under ``torch.amp.GradScaler``."""
        vars(optimizer)["found_inf"] = self.found
        try:
            optimizer_step()
        finally:
            del vars(optimizer)["found_inf"]
        self.bad.add_(1.0).mul_(self.found)
        self.good.add_(1.0).mul_(1.0 - self.found)
        if self.dynamic:
            grows = self.good == GROWTH_INTERVAL
            self.good.masked_fill_(grows, 0.0)
            self.tensor.mul_(1.0 - self.found * (1.0 - BACKOFF) + grows * (GROWTH - 1.0))
        self.steps += 1
        if self.steps % MAX_OVERFLOWS == 0 and self.bad >= MAX_OVERFLOWS:
            raise RunError(NEVER_FINITE.format(int(self.bad)))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": int(self.good), "overflows": int(self.bad)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for tensor, name in ((self.tensor, "value"), (self.good, "good_steps"), (self.bad, "overflows")):
            tensor.fill_(state[name])
