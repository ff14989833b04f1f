"""Mixed precision with float16 and loss scaling (Micikevicius et al. 2018)."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten import Card, Exactness, Method, RunContext, RunError, WrapOrder, option
from hasten._torch_compat import amp_update_scale_, foreach_mul_, skips_overflows
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.types import BackwardFn, Batch, ForwardFn, StepFn
from hasten.utils.autocast import autocast_obstacle
from hasten.utils.observe_step import observe_precision
from hasten.utils.optimizers import sparse_gradients_layer

INITIAL_SCALE, BACKOFF, GROWTH = 2.0**16, 0.5, 2.0
GROWTH_INTERVAL = 2000  # consecutive steps without overflow until the scale grows
MAX_OVERFLOWS = 30  # consecutive; the scale has then fallen from 2**16 far below 1, so it is not the cause
NEVER_FINITE = (
    "float16: the gradients overflowed {} steps in a row; use bfloat16, or check the data and the loss for NaN"
)


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
        obstacle = autocast_obstacle(run.model, run.device, torch.float16)
        if layer := sparse_gradients_layer(run.model):
            obstacle = f"the gradients of {layer} are sparse (sparse=True), and an overflow cannot be found in these"
        if obstacle:
            return run.report_no_effect(self, obstacle, forward)
        on_device = run.parallel is None and skips_overflows(run.optimizer)
        # without it, the hooks below do nothing
        run.checkpoint_state[self.name] = LossScale(self.scale, run.device, on_device)
        device = run.device.type
        run.observe_effect(self, partial(observe_precision, run, torch.float16))

        def forward_in_float16(batch: Batch) -> torch.Tensor:
            with torch.autocast(device, torch.float16):
                return forward(batch)

        return forward_in_float16

    def backward(self, backward: BackwardFn, run: RunContext) -> BackwardFn:
        scale: LossScale | None = run.checkpoint_state.get(self.name)
        return backward if scale is None else lambda loss: backward(loss * scale.tensor)

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        scale: LossScale | None = run.checkpoint_state.get(self.name)
        if scale is None:
            return grad_transform
        optimizer, model = run.optimizer, run.model

        def trained() -> Iterable[torch.Tensor]:
            if run.parallel:  # whose optimizer may have a shard of the model
                return model.parameters()
            return (weight for group in optimizer.param_groups for weight in group["params"])

        def unscale_gradients() -> None:
            grad_transform()
            held = {id(weight): weight for weight in trained()}
            # others are never cleared, so that an overflow would stay; in a script another optimizer may have them
            others = [] if run.services.in_script else [one for one in model.parameters() if id(one) not in held]
            for weight in others:
                if weight.grad is not None:
                    weight.grad.mul_(scale.tensor.reciprocal()).nan_to_num_(0.0, 0.0, 0.0)
            scale.unscale([weight.grad for weight in held.values() if weight.grad is not None], run.ranks)

        return unscale_gradients

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        scale: LossScale | None = run.checkpoint_state.get(self.name)
        return optimizer_step if scale is None else partial(scale.step, optimizer_step, run.optimizer)


class LossScale:
    """The loss scale, in tensors on the device; part of the checkpoint. ``hasten diagnose --ops`` shows ``value`` and
    ``overflow``. With ``on_device`` the optimizer reads there whether to skip its step, and nothing waits for it.
    """

    def __init__(self, scale: str | float, device: torch.device, on_device: bool = False):
        dynamic = scale == "dynamic"
        self.factors = (GROWTH, BACKOFF) if dynamic else (1.0, 1.0)
        self.on_device, self.skips, self.steps = on_device, False, 0
        self.tensor = torch.tensor(INITIAL_SCALE if dynamic else float(scale), device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)  # consecutive steps without overflow
        self.bad = torch.zeros((), device=device)  # consecutive steps with overflow
        self.found = torch.zeros((), device=device)  # 1 if the gradients of the current step overflowed on any rank

    value = property(lambda self: self.tensor.item())
    overflow = property(lambda self: bool(self.found.item()))

    def unscale(self, gradients: list[torch.Tensor], ranks: ProcessGroupInfo) -> None:
        """Divides the gradients by the scale and notes whether those of any rank overflowed."""
        foreach_mul_(gradients, self.tensor.reciprocal())
        overflow = ~torch.nn.utils.get_total_norm(gradients).isfinite()
        if self.on_device:
            self.found.copy_(overflow)
        else:
            self.skips = ranks.any(bool(overflow.item()))
            self.found.fill_(self.skips)

    def step(self, optimizer_step: StepFn, optimizer: torch.optim.Optimizer) -> None:
        """Updates the weights unless the gradients overflowed, then the scale. RunError after MAX_OVERFLOWS."""
        if self.on_device:
            vars(optimizer)["found_inf"] = self.found  # as under ``torch.amp.GradScaler``
            try:
                optimizer_step()
            finally:
                del vars(optimizer)["found_inf"]
        elif not self.skips:
            optimizer_step()
        self.bad.add_(1.0).mul_(self.found)
        amp_update_scale_(self.tensor, self.good, self.found, *self.factors, GROWTH_INTERVAL)
        self.steps += 1
        is_due = self.steps % MAX_OVERFLOWS == 0 if self.on_device else self.skips
        if is_due and self.bad >= MAX_OVERFLOWS:
            raise RunError(NEVER_FINITE.format(int(self.bad)))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": int(self.good), "overflows": int(self.bad)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for tensor, name in ((self.tensor, "value"), (self.good, "good_steps"), (self.bad, "overflows")):
            tensor.fill_(state[name])
