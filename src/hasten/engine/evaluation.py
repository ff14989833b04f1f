"""The evaluation: the metric over the validation data, by one rank or shared out over all of them."""

import torch

from hasten.distributed.batch_sharding import EvaluationShards
from hasten.distributed.collectives import buffers_of_main_process
from hasten.engine.forward import own_loss
from hasten.engine.metrics import EvaluationResult, MetricAccumulator, SumOverRanks, own_result
from hasten.engine.plan import Program
from hasten.utils.batch import batch_size, call_model, copy_to_device
from hasten.utils.rng import preserve_rng_state


def evaluate(program: Program) -> EvaluationResult:
    """Metric and loss of the exported model over the validation data, equal on all ranks. Changes no state; collective.

    The ranks share the batches where they can, with the buffers of rank 0. Otherwise rank 0 evaluates all batches; all
    ranks do if the model computes only if all ranks call it.
    """
    model, ranks, shards = program.export(), program.run.ranks, _shards(program)
    result = None
    if shards is not None:
        with shards.activated(), buffers_of_main_process(model):
            result = _measure(program, model, ranks.all_reduce_sum)
    elif ranks.is_main_process or _all_ranks_evaluate(program):
        result = _measure(program, model)
    return ranks.broadcast(result)


def evaluated_batches(program: Program) -> int | None:
    """Number of validation batches that a rank evaluates at most; None if it is unknown."""
    batches, shards = program.validation.length if program.validation is not None else None, _shards(program)
    return batches if shards is None else batches and -(-batches // shards.ranks.world_size)


def _shards(program: Program) -> EvaluationShards | None:
    return None if _all_ranks_evaluate(program) else program.evaluation_shards


def _all_ranks_evaluate(program: Program) -> bool:
    parallel = program.run.parallel
    return parallel is not None and parallel.eval_needs_all_ranks


def _measure(program: Program, model: torch.nn.Module, sum_over_ranks: SumOverRanks | None = None) -> EvaluationResult:
    """The metric over the validation batches; with ``sum_over_ranks`` also over those that other ranks read."""
    task, validation = program.task, program.validation
    assert validation is not None, "only a task with validation data is evaluated"
    own = task.loss is None
    modes = [(module, module.training) for module in model.modules()]  # parts may be frozen in evaluation mode
    loss_of, device = task.loss or own_loss, program.run.device

    model.eval()
    try:
        # not inference_mode: a model may differentiate in its forward pass, or cache tensors with which it trains on
        with preserve_rng_state(*validation.generators), torch.no_grad():
            # not program.to_device, which may augment
            batches = (copy_to_device(batch, device) for batch in validation.epoch(0, 0))
            if task.evaluate is not None:
                return own_result(task.evaluate(model, batches))
            metric = MetricAccumulator(task)
            for batch in batches:
                output, target = call_model(model, batch, own)
                metric.update(output, target, loss_of(output, target), batch_size(batch))
            return metric.result(sum_over_ranks)
    finally:
        for module, training in modes:
            module.training = training
