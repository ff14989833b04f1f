"""One kernel that updates all the weights, instead of a dozen small operations for each of them.

The optimizer object is kept and only told to use torch's fused kernels, so that a schedule which holds on
to it goes on working.
"""

from dataclasses import dataclass

import torch

from hasten.core.card import Card, Exactness
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.task import optimizer_and_schedule
from hasten.core.types import OptimizerFactory

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@dataclass(frozen=True)
class FusedOptimizer(Method):
    card = Card(
        summary="the optimizer's update as one fused kernel",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/optim.html, the fused implementations",
        gain=(1.0, 1.3),
        gain_when="steps of a few milliseconds with many weight tensors (1.25 to 1.3 for a small language model on a CPU)",
        accelerates={"optimizer_step"},
        strong_baseline=True,
    )

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        def fused(model):
            made = make(model)
            optimizer, _ = optimizer_and_schedule(made)
            if why := _cannot(optimizer):
                run.report_no_effect(self, why)
            else:
                _fuse(optimizer)
            return made

        return fused


def _cannot(optimizer) -> str | None:
    """Why torch has no fused update for this optimizer; None if it has."""
    name = type(optimizer).__name__
    if type(optimizer) not in FUSED:  # exactly: a subclass may have a step of its own
        return f"torch has no fused {name} (only {', '.join(cls.__name__ for cls in FUSED)})"
    if all(group["fused"] for group in optimizer.param_groups):
        return f"the task's {name} is fused already"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"a differentiable {name} cannot be fused"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "some weights are complex numbers, which the fused update does not take"
    if type(optimizer) is torch.optim.Adagrad and any(parameter.device.type != "cpu" for parameter in parameters):
        return "torch has a fused Adagrad for the CPU only"
    return None


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"], group["foreach"] = True, False
    for (
        parameter,
        state,
    ) in optimizer.state.items():  # Adagrad makes its state at once; the fused kernel counts in float32
        if "step" in state:
            state["step"] = state["step"].to(parameter.device, torch.float32)
