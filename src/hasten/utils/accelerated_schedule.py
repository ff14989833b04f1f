"""A learning-rate schedule of a long run, compressed into a shorter one."""

from typing import Any

from hasten._torch_compat import chained_schedulers


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
        while self.advanced < round(self.step_count / self.factor):
            self.schedule.step()
            self.advanced += 1

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict(), "step_count": self.step_count, "advanced": self.advanced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.step_count, self.advanced = state["step_count"], state["advanced"]
