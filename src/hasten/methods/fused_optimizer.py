"""Fused optimizers: one kernel updates all parameters, instead of a dozen small operations for each of them."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten import Card, Exactness, Method, NoEffectError, OptimizerFactory, RunContext
from hasten._torch_compat import mark_fused
from hasten.utils.op_recorder import NOT_CHECKED, OpRecorder
from hasten.utils.optimizers import (
    follow_strides,
    fused_step_obstacle,
    optimizer_and_schedule,
    start_late_momentum,
)


@dataclass(frozen=True)
class FusedOptimizer(Method):
    """Switches the task's optimizer to torch's fused kernels.

    The optimizer object stays the same, so that a schedule that refers to it keeps working.
    """

    card = Card(
        summary="the optimizer step as one fused kernel",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/optim.html, the fused implementations",
        gain=(1.0, 1.3),
        gain_when="steps of a few milliseconds with many parameters (1.25 to 1.3 for a small language model on a CPU)",
        accelerates={"optimizer_step"},
        applies_to={"unfused_optimizer"},
        strong_baseline=True,
        script_edit={"optimizer": "fused=True"},
    )

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        def make_fused(model: torch.nn.Module) -> Any:
            made = make(model)
            optimizer, _ = optimizer_and_schedule(made)
            optimizers = getattr(optimizer, "optimizers", [optimizer])  # several, in an OptimizerList
            if obstacle := next(filter(None, (fused_step_obstacle(one, model) for one in optimizers)), None):
                run.report_no_effect(self, obstacle)
            else:
                for one in optimizers:
                    _fuse(one, leaves_scale=not run.services.in_script)
                run.observe_effect(self, partial(_observe, optimizer))
            return made

        return make_fused


def _observe(optimizer: torch.optim.Optimizer) -> Generator[None, None, str]:
    """Effect check: the operations of the optimizer alone, because other methods call ``_foreach_`` kernels, too."""
    inside = OpRecorder()

    def begin(*_: Any) -> None:
        recorder.ops = {}

    def end(*_: Any) -> None:
        inside.ops, recorder.ops = recorder.ops, {}

    handles = [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
    try:
        with OpRecorder() as recorder:
            yield
    finally:
        for handle in handles:
            handle.remove()
    if calls := inside.count("_fused_"):
        return f"the step called {calls} fused kernel{'s' * (calls > 1)} of the optimizer"
    if inside.ops:
        raise NoEffectError("the optimizer updated the parameters without a fused kernel")
    return f"{NOT_CHECKED}: the optimizer did not update the parameters in this step"


def _fuse(optimizer: torch.optim.Optimizer, leaves_scale: bool = True) -> None:
    """Switches to the fused kernels, also after a checkpoint is loaded. What is saved holds the options of the task.

    ``leaves_scale``: the kernel divides by the scale of the loss, which a script's own loop does before.
    """
    own = [{name: group[name] for name in ("fused", "foreach")} for group in optimizer.param_groups]

    def restore_options(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        options = [*own, *[own[-1]] * (len(saved["param_groups"]) - len(own))]  # of groups that were added later
        groups = [group | before for group, before in zip(saved["param_groups"], options, strict=True)]
        return {**saved, "param_groups": groups}

    switch_on = partial(_switch_on, leaves_scale=leaves_scale)
    switch_on(optimizer)
    optimizer.register_load_state_dict_post_hook(switch_on)
    optimizer.register_state_dict_post_hook(restore_options)
    follow_strides(optimizer)
    if type(optimizer) is torch.optim.SGD:
        optimizer.register_step_pre_hook(start_late_momentum)


def _switch_on(optimizer: torch.optim.Optimizer, leaves_scale: bool) -> None:
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"], group["foreach"] = True, False
    if leaves_scale:  # Lightning refuses to clip the gradients of such an optimizer
        mark_fused(optimizer)
    for parameter, state in optimizer.state.items():  # Adagrad creates its state in the constructor
        if "step" in state:
            state["step"] = state["step"].to(parameter.device, torch.float32)  # as the fused kernel requires
