"""The arm that looks at itself: a run in a process of its own that tells its anatomy, its arithmetic and its facts."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from contextlib import nullcontext
from functools import cached_property
from itertools import islice

import torch
from torch.utils.flop_counter import flop_registry

from hasten._torch_compat import TorchDispatchMode, host_read_op
from hasten.benchmarking.arm import Arm
from hasten.core.errors import RunError
from hasten.engine.plan import build
from hasten.engine.run_dir import to_json_lines
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import LARGER_BATCH, LargerBatch, disabled_phases, outside_name
from hasten.profiling.facts import facts_of
from hasten.profiling.flops import flops_a_sample, peak_flops
from hasten.profiling.input_benchmark import measure_input


class Probe(Arm):
    """An arm whose recipe holds the Timeline and the replacements that can be switched.

    ``operations``, ``arithmetic`` and ``input`` disturb the run: they are the last calls.
    """

    def block(self, count: int, away: str | None = None) -> dict:
        """A block of steps as ``train`` gives it; ``away``: without that phase, or (larger_batch) of the run with larger batches."""
        if away == LARGER_BATCH:
            return self.larger.train(count)
        switched_off = disabled_phases(self.program.run)
        switched_off.update({away} if away else ())
        block = self.train(count)
        switched_off.clear()
        if not block["samples"]:
            raise RunError("an earlier experiment ended the run")
        return block

    @cached_property
    def log(self):
        """A step log like that of a run's folder; it has no name, so nothing stays of it."""
        return tempfile.TemporaryFile(buffering=0)

    def _read_losses(self) -> list[float]:
        """And writes them down, as a run does, unless that is what is taken away."""
        if "logging" in disabled_phases(self.program.run):
            self.unread.clear()
            return []
        losses = super()._read_losses()
        first = self.program.run.progress.step - len(losses) + 1
        self.log.write(
            to_json_lines([{"step": first + number, "loss": loss} for number, loss in enumerate(losses)]).encode()
        )
        return losses

    @cached_property
    def larger(self) -> Arm:
        """The same run with larger batches, in the same process: the task need not be loaded again."""
        task = TaskRef.of(dataclasses.replace(self.program.run.task, validation_data=None))
        arm = Arm(task, self.recipe.with_method(outside_name(LargerBatch)).methods, self.device, self.seed, self.ranks)
        arm.build()
        return arm

    def anatomy(self, count: int) -> dict:
        """A block of steps with the seconds of each of its ``phases``."""
        tape = self.program.run.checkpoint_state["timeline"]
        tape.start()
        block = self.train(count)
        return {**block, "phases": tape.stop()}

    def facts(self) -> list[str]:
        return sorted(facts_of(self.program))

    def operations(self, count: int) -> dict:
        """How often the host reads a value back from the device in a step, and in which number format the products are made.

        What the optimizer reads counts on a GPU only: on the CPU torch's optimizers keep their step counts in tensors.
        """
        program, taken = self.program, 0
        device = program.run.device.type
        watched = _Operations(device)
        for batch in islice(self.source.epoch(program.run.progress.epoch, 0), count):
            batch = program.to_device(batch)
            with watched:
                program.forward_backward(batch)
                program.grad_transform()
            with watched if device == "cuda" else nullcontext():
                program.optimizer_step()
            program.zero_grad()
            taken += 1
        dtype = watched.dtypes.most_common(1)[0][0] if watched.dtypes else next(program.run.model.parameters()).dtype
        return {"host_reads_per_step": watched.reads / max(1, taken), "dtype": str(dtype).removeprefix("torch.")}

    def arithmetic(self, dtype: str) -> dict:
        """Operations for a sample of the plain model, and the machine's peak in a number format, both in FLOP (per second)."""
        plain = build(self.program.run.task, [], device=self.device, seed=self.seed)
        return {"flops_a_sample": flops_a_sample(plain), "peak_flops": peak_flops(self.device, getattr(torch, dtype))}

    def input(self, budget: float) -> dict:
        """Throughput of the input pipeline and of the training step, as of ``measure_input``. Ends the run."""
        self.steps.close()  # ends the worker processes of the epoch in progress
        return measure_input(dataclasses.replace(self.program, train=self.source), budget)


HOST_READ = host_read_op()


class _Operations(TorchDispatchMode):
    """Counts what passes the dispatcher: values that the host reads, and matrix products by number format."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.reads, self.dtypes = device, 0, Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function is HOST_READ:
            self.reads += arguments[0].device.type == self.device
        elif function.overloadpacket in flop_registry:
            self.dtypes[arguments[0].dtype] += 1
        return function(*arguments, **(named or {}))
