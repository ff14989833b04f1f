"""An exponential moving average of the parameters, which is often as good as a lower learning rate."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext, StepFn, WrapOrder, option
from hasten._torch_compat import foreach_copy_, foreach_lerp_, in_place_version
from hasten.utils.copy_model import copy_model
from hasten.utils.op_recorder import NOT_CHECKED
from hasten.utils.optimizers import OptimizerList
from hasten.utils.tensor_list import TensorList


@dataclass(frozen=True)
class Ema(Method):
    """Evaluates and saves the average: after each step, average <- d * average + (1 - d) * parameters.

    d = min(decay, (1 + t) / (10 + t)) after t averaged steps, so that the first parameters do not dominate a short run.
    The average is in float32 at least: in bfloat16 a thousandth of a difference is mostly lost. Buffers, such as the
    running statistics of batch normalization, are those of the trained model.
    """

    card = Card(
        summary="average the parameters over the last steps; evaluate and save the average",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://doi.org/10.1137/0330046",  # Polyak and Juditsky 1992
        gain_when="the learning rate stays high to the end, so that the last steps only add noise",
        accelerates={"steps"},
        requires={"full_weights", "replicated_weights"},
        order=WrapOrder.LATE,
        after=("compile", "float16"),
        presets=({"decay": 0.99}, {"decay": 0.999}),
    )

    decay: float = option(0.999, above=0, below=1)  # d in the formula above
    start: int = option(0, at_least=0)  # first step that is averaged

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        if run.plan.steps is not None and self.start >= run.plan.steps:
            run.report_no_effect(self, f"the run ends after {run.plan.steps} steps, before the average starts")
            return optimizer_step
        parameters: list[torch.Tensor] = list(run.model.parameters())
        progress, optimizers = run.progress, run.optimizer
        wide = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
        average = run.checkpoint_state[self.name] = TensorList(
            parameter.detach().to(dtype, copy=True) for parameter, dtype in zip(parameters, wide, strict=True)
        )

        def step_and_average() -> None:
            optimizer_step()
            if isinstance(optimizers, OptimizerList) and not optimizers.is_last:
                return  # a step is over once every optimizer has updated
            t = progress.step - self.start
            decay = min(self.decay, (1 + t) / (10 + t)) if t >= 0 else 0.0
            with torch.no_grad():
                foreach_lerp_(average, [p.to(dtype) for p, dtype in zip(parameters, wide, strict=True)], 1 - decay)

        run.observe_effect(self, partial(self._observe, average, run))
        return step_and_average

    def _observe(self, average: TensorList, run: RunContext) -> Generator[None, None, str]:
        pairs = zip(run.model.parameters(), average, strict=True)
        trained = [tensor for parameter, tensor in pairs if parameter.requires_grad]
        step, before = run.progress.step, [in_place_version(tensor) for tensor in trained]
        yield
        changed = sum(in_place_version(t) > version for t, version in zip(trained, before, strict=True))
        if not changed:
            raise NoEffectError("the step changed no average")
        if step < self.start:
            return f"{NOT_CHECKED}: the average starts at step {self.start + 1}"
        return f"the step changed the averages of {changed} parameters"

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if self.name not in run.checkpoint_state:
            return model
        averaged = copy_model(model)
        with torch.no_grad():
            foreach_copy_(list(averaged.parameters()), run.checkpoint_state[self.name])
        return averaged
