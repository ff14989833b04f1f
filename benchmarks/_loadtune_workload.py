"""Presents a hasten workload to loadtune, which calls ``get_workload()``.

``HASTEN_BENCHMARK_TASK`` names the workload. Dataset, model, optimizer and batch size are passed unchanged; the step is
that of the baseline.
"""

import os

from loadtune import Workload

from hasten.engine.forward import own_loss
from hasten.engine.tasks import load_task
from hasten.utils.batch import call_model, map_tensors
from hasten.utils.optimizers import optimizer_and_schedule, takes_steps


def get_workload() -> Workload:
    task = load_task(os.environ["HASTEN_BENCHMARK_TASK"])
    data = task.train_data
    dataset = data() if callable(data) else data
    steps = round(task.epochs * len(dataset) / task.batch_size)

    def make_optimizer(model):
        made = task.optimizer(model, steps) if takes_steps(task.optimizer) else task.optimizer(model)
        return optimizer_and_schedule(made)[0]

    def train_step(model, optimizer, batch, device):
        batch = map_tensors(lambda tensor: tensor.to(device), batch)
        output, target = call_model(model, batch, own=task.loss is None)
        loss = (task.loss or own_loss)(output, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Workload(
        name=task.name,
        make_dataset=lambda: dataset,
        make_model=task.model,
        train_step=train_step,
        make_optimizer=make_optimizer,
        default_batch_size=task.batch_size,
    )
