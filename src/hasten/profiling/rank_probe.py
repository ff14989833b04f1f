"""A rank's part of a profiled job: real steps whose gradient exchange and input can be disabled, block by block.

``BLOCK_KINDS`` states what is disabled in each kind of block:

* "plain": the steps as they are;
* "no_exchange": the gradients are not averaged;
* "barrier": the same, with a barrier after every backward pass, whose seconds are the wait for the latest rank;
* "no_input": one batch is replayed on every rank.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hasten._torch_compat import ddp_bucket_sizes
from hasten.benchmarking.arm import Arm
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.core.types import Batch
from hasten.engine.plan import Program
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import ReplayedBatch, disabled_phases, import_path
from hasten.profiling.time_phases import TimePhases

EXCHANGE, BARRIER, INPUT = "exchange", "barrier", "input"
BLOCK_KINDS = {"plain": (), "barrier": (EXCHANGE, BARRIER), "no_exchange": (EXCHANGE,), "no_input": (INPUT,)}


class RankProbe(Arm):
    """This rank's part of a run whose gradient exchange and input can be disabled, block by block, on all ranks."""

    def __init__(self, task: TaskRef, recipe: Recipe, device: str, seed: int, ranks: ProcessGroupInfo):
        self.plain_recipe = recipe
        self.waited, self.wait_seconds = 0.0, []  # seconds in collectives since the last barrier; of every step
        self.steps = (step for step in ())
        methods = {**recipe.methods, import_path(TimePhases): {}}
        timed_ranks = dataclasses.replace(ranks, all_reduce_max=self._add_wait(ranks.all_reduce_max))
        super().__init__(task, methods, device, seed, timed_ranks)

    def build_program(self, task: Task) -> Program:
        """The program with switchable exchange and input.

        The input is wrapped outermost, so that the communication of the ranks about their batches is disabled with it.
        """
        program = super().build_program(task)
        model = program.run.model
        self.ddp_model = model if isinstance(model, DistributedDataParallel) else None
        train = ReplayedBatch().data(program.train, program.run)
        return dataclasses.replace(program, train=train, forward_backward=self._switchable(program))

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """The kinds of blocks that this run allows, and what is disabled in each."""
        exchanges = self.ddp_model is not None
        return {kind: phases for kind, phases in BLOCK_KINDS.items() if exchanges or EXCHANGE not in phases}

    def block(self, count: int, phases: Sequence[str]) -> dict:
        """Trains ``count`` steps with some phases disabled.

        Returns:
            seconds_per_sample (of the global batch); per step: seconds_per_step, cpu (seconds of this rank), phases
            (seconds by phase) and the list wait_seconds; switches (involuntary, in the whole block, of all ranks).
        """
        run = self.program.run
        timer, disabled = run.checkpoint_state["phase_timer"], disabled_phases(run)
        weights = list(run.unwrapped_model.parameters()) if EXCHANGE in phases else []
        before = [weight.detach().clone() for weight in weights]
        run.ranks.any(False)  # a barrier
        self.wait_seconds, self.waited = [], 0.0
        disabled.update(phases)
        timer.start()
        before_cpu = time.process_time()
        block = self.train(count)
        cpu = time.process_time() - before_cpu  # of this rank; the usage in block is summed over all ranks
        seconds = timer.stop()
        disabled.clear()
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):  # equal again on all ranks
                weight.copy_(value)
        return {
            "seconds_per_sample": block["seconds"] / block["samples"],
            "seconds_per_step": block["seconds"] / count,
            "cpu": cpu / count,
            "switches": block["switches"],
            "phases": {phase: value / count for phase, value in seconds.items()},
            "wait_seconds": self.wait_seconds,
        }

    def buckets(self) -> list[int] | None:
        """Bytes of each gradient bucket; None where the model is not wrapped by DistributedDataParallel."""
        return None if self.ddp_model is None else ddp_bucket_sizes(self.ddp_model)

    def exchange(self) -> Callable[[], None] | None:
        """A function that runs one step's all-reduces alone; None if the sizes of the buckets are unknown."""
        sizes = self.buckets()
        if self.ddp_model is None or sizes is None:
            return None
        weight, group = next(self.ddp_model.parameters()), self.ddp_model.process_group
        lengths = [size // weight.element_size() for size in sizes]
        buckets = [torch.zeros(length, dtype=weight.dtype, device=weight.device) for length in lengths]

        def call() -> None:
            for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
                if work is not None:
                    work.wait()

        return call

    def _barrier(self) -> None:
        pass  # the waits between ranks are what is measured

    def _switchable(self, program: Program) -> Callable[[Batch], Any]:
        forward_backward, ranks = program.forward_backward, program.run.ranks
        disabled, ddp_model = disabled_phases(program.run), self.ddp_model

        def switchable(batch: Batch) -> Any:
            if ddp_model is None or EXCHANGE not in disabled:
                return forward_backward(batch)
            with ddp_model.no_sync():
                loss = forward_backward(batch)
            if BARRIER in disabled:
                self._synchronize()
                ranks.any(False)
                self.wait_seconds.append(self.waited)
                self.waited = 0.0
            return loss

        return switchable

    def _add_wait(self, all_reduce_max: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """Wraps ``all_reduce_max`` so that its seconds count as waiting for other ranks."""

        def timed(numbers: Sequence[float]) -> list[float]:
            began = time.perf_counter()
            result = all_reduce_max(numbers)
            self.waited += time.perf_counter() - began
            return result

        return timed
