"""Learning rates are scaled in every schedule, however deep."""

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from hasten.utils.accelerated_schedule import AcceleratedSchedule
from hasten.utils.optimizers import OptimizerList, ScheduleList, scale_learning_rates


def warm_up_then_decay(optimizer):
    parts = [schedules.LinearLR(optimizer, 0.25, total_iters=3), schedules.LambdaLR(optimizer, lambda step: 0.5**step)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


def chain_in_a_sequence(optimizer):
    chain = schedules.ChainedScheduler([schedules.LambdaLR(optimizer, lambda step: 0.9**step)], optimizer)
    sequence = schedules.SequentialLR(optimizer, [warm_up_then_decay(optimizer)], milestones=[])
    return ScheduleList([ScheduleList([sequence]), chain])


def two_optimizers(make):
    def optimizer_and_schedule():
        optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate) for rate in (0.1, 0.02)]
        return OptimizerList(optimizers), ScheduleList([make(one) for one in optimizers])

    return optimizer_and_schedule


@pytest.mark.parametrize(
    "make", [warm_up_then_decay, chain_in_a_sequence, lambda one: AcceleratedSchedule(warm_up_then_decay(one), 0.5)]
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_rates_of_nested_schedules_are_scaled_once(make):
    rates = {1: [], 8: []}
    for factor, seen in rates.items():
        optimizer, schedule = two_optimizers(make)()
        scale_learning_rates(optimizer, schedule, factor)
        for _ in range(8):
            seen.append([group["lr"] / factor for group in optimizer.param_groups])
            schedule.step()
    torch.testing.assert_close(torch.tensor(rates[8]), torch.tensor(rates[1]))
