"""A learning-rate schedule of a long run, compressed into a shorter one."""

from typing import Any

from torch.optim.lr_scheduler import OneCycleLR, SequentialLR

from hasten._torch_compat import chained_schedulers
from hasten.core.run_context import RunContext
from hasten.utils.optimizers import takes_steps


def accelerate_schedule(schedule: Any, factor: float, run: RunContext) -> Any:
    """Returns the schedule of a run's task, compressed into ``factor`` times the epochs.

    A schedule that counts epochs is then advanced by steps (``run.plan.schedule_interval`` becomes "step"), because a
    short run may have a single epoch. One that follows the metric, or that the task has built for the steps of this
    run, is returned unchanged.
    """
    plan = run.plan
    if schedule is None or plan.schedule_interval == "evaluation" or takes_steps(run.task.optimizer):
        return schedule
    if plan.schedule_interval == "epoch" and plan.steps is not None:
        factor, plan.schedule_interval = factor * plan.steps / plan.epochs, "step"
    return AcceleratedSchedule(schedule, factor)


class AcceleratedSchedule:
    """Advances a schedule by 1 / ``factor`` of its steps for every step of the run."""

    def __init__(self, schedule: Any, factor: float):
        self.schedule, self.factor = schedule, factor
        self.step_count = self.advanced = 0  # steps of the run; steps of the schedule

    @property
    def _schedulers(self) -> list[Any]:  # as torch's ChainedScheduler, so that scale_learning_rates finds them
        return [self.schedule, *chained_schedulers(self.schedule)]

    def step(self) -> None:
        """Advances the task's schedule by as many of its steps as one step of the run stands for."""
        self.step_count += 1
        due = self.step_count / self.factor
        due = round(due) if self.factor < 1 else int(due + 1e-9)  # an epoch ends with its last step
        # the run's steps are rounded, and OneCycleLR refuses to go beyond its end
        members = [self.schedule] if isinstance(self.schedule, SequentialLR) else self._schedulers
        last = min((one.total_steps for one in members if isinstance(one, OneCycleLR)), default=due)
        while self.advanced < min(due, last):
            self.schedule.step()
            self.advanced += 1

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict(), "step_count": self.step_count, "advanced": self.advanced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.step_count, self.advanced = state["step_count"], state["advanced"]
