"""The probe: an arm, in a worker process, that also measures the phases, operations, facts and input of its run."""

import dataclasses
import gc
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from hasten._torch_compat import host_read_op
from hasten.benchmarking.arm import Arm
from hasten.engine.metrics import higher_is_better, name_of
from hasten.engine.plan import Program, build
from hasten.engine.resources import has_idle_cores
from hasten.engine.run_dir import to_json_lines
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import LARGER_BATCH, LargerBatch, disabled_phases, import_path
from hasten.profiling.flops import best_format, copy_bytes_per_second, flops_per_sample, peak_flops
from hasten.profiling.input_benchmark import measure_input
from hasten.reporting.result_schema import InputThroughput
from hasten.utils.op_recorder import OpRecorder
from hasten.utils.optimizers import fused_step_obstacle
from hasten.utils.run_facts import hardware_facts, model_facts


class Probe(Arm):
    """An arm whose recipe holds TimePhases and the ablations that can be switched on and off.

    ``operations``, ``flops`` and ``input`` disturb the run: call them last.
    """

    def block(self, count: int, disabled: str | None = None) -> dict:
        """Trains ``count`` steps without phase ``disabled`` ("larger_batch": in larger batches), see ``Arm.train``."""
        if disabled == LARGER_BATCH:
            return self.larger.train(count)
        phases = disabled_phases(self.program.run)
        phases.update({disabled} if disabled else ())
        try:
            return self.train(count)
        finally:
            phases.clear()

    def timed_block(self, count: int) -> dict:
        """Trains ``count`` steps: the result of ``Arm.train``, and ``phases``: seconds by phase."""
        timer = self.program.run.checkpoint_state["phase_timer"]
        timer.start()
        block = self.train(count)
        return {**block, "phases": timer.stop()}

    def metric(self, seconds: float) -> dict[str, Any]:
        """The metric of the task: ``name`` and ``direction``; empty if it has none. ``seconds`` are for scripts."""
        task = self.program.run.task
        if task.validation_data is None:
            return {}
        return {"name": name_of(task), "direction": "max" if higher_is_better(task) else "min"}

    def facts(self) -> list[str]:
        """The facts (keys of FACTS, such as "cuda") that hold for the run, sorted."""
        return sorted(facts_of(self.program))

    def operations(self, count: int) -> dict:
        """Trains ``count`` steps and counts values read by the host, and matrix products by dtype.

        Reads by the optimizer count on a GPU only: on the CPU torch's optimizers keep their step counts in tensors.

        Returns:
            ``host_reads_per_step``: values that the host reads, on a GPU calls that make it wait; ``dtype``: of most
            matrix products.
        """
        vars(self).pop("larger", None)  # its blocks are over, and ``flops`` builds another model
        gc.collect()
        program, recorder, waits, steps = self.program, OpRecorder(), 0, 0
        on_gpu = program.run.device.type == "cuda"
        for batch in islice(self.source.epoch(program.run.progress.epoch, 0), count):
            batch = program.to_device(batch)
            with _cuda_syncs() if on_gpu else nullcontext([]) as syncs:
                with recorder:
                    program.forward_backward(batch)
                    program.grad_transform()
                program.optimizer_step()
            waits += len(syncs)
            program.zero_grad()
            steps += 1
        reads = waits if on_gpu else recorder.count(host_read_op().overloadpacket.__name__)
        products = Counter[torch.dtype]()
        for (_, kind), stats in recorder.ops.items():
            products[kind or torch.float32] += stats.count if stats.flops else 0
        dtype = products.most_common(1)[0][0] if products.total() else next(program.run.model.parameters()).dtype
        return {"host_reads_per_step": reads / max(1, steps), "dtype": str(dtype).removeprefix("torch.")}

    def flops(self, dtype: str) -> dict:
        """``flops_per_sample`` of the model without methods; of the machine: ``peak_flops`` in a dtype (``format``),
        ``best_format`` with ``best_peak_flops``, and ``copy_bytes_per_second`` within the memory of the device.
        """
        plain = build(self.program.run.task, [], device=self.device, seed=self.seed)
        peak = peak_flops(self.device, getattr(torch, dtype))
        best, best_peak = best_format(self.device, frozenset(self.facts()))
        return {
            "flops_per_sample": flops_per_sample(plain),
            "peak_flops": peak,
            "format": dtype,
            "best_format": best,
            "best_peak_flops": best_peak,
            "copy_bytes_per_second": copy_bytes_per_second(self.device),
        }

    def input(self, budget: float) -> InputThroughput:
        """Throughput of the input pipeline and of the training step. Ends the run."""
        self.steps.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator; ends the loader's workers
        return measure_input(dataclasses.replace(self.program, train=self.source), budget)

    @cached_property
    def log(self) -> Any:
        """An open, unnamed temporary file for a step log like log.jsonl of a run directory."""
        return tempfile.TemporaryFile(buffering=0)

    @cached_property
    def larger(self) -> Arm:
        """A second arm of the same task, with larger batches, in this process; built at the first use."""
        task = TaskRef.of(dataclasses.replace(self.program.run.task, validation_data=None))
        methods = self.recipe.with_method(import_path(LargerBatch)).methods
        arm = Arm(task, methods, self.device, self.seed, self.ranks)
        arm.build()
        return arm

    def _read_losses(self) -> list[float]:
        """Reads the losses and writes them to the log, as a run does, unless "logging" is disabled."""
        if "logging" in disabled_phases(self.program.run):
            self.unread.clear()
            return []
        losses = super()._read_losses()
        first = self.program.run.progress.step - len(losses) + 1
        self.log.write(to_json_lines([{"step": first + i, "loss": loss} for i, loss in enumerate(losses)]).encode())
        return losses


def facts_of(program: Program) -> frozenset[str]:
    """The facts (keys of ``hasten.core.card.FACTS``) that hold for a built run."""
    run, plan, source = program.run, program.plan, program.train
    has_samples = source.spec is not None and not isinstance(source.spec.dataset, range)  # numbers hold no data
    optimizers = getattr(run.optimizer, "optimizers", [run.optimizer])  # several, in an OptimizerList
    facts = {
        "unfused_optimizer": not any(fused_step_obstacle(one, run.unwrapped_model) for one in optimizers),
        "indexed_samples": has_samples or (run.device.type == "cuda" and source.on_device is not None),
        "workers": source.spec is not None or source.with_workers is not None,
        "multiple_epochs": plan.epochs > 1,
        "distributed": not run.ranks.is_single_process,
        "idle_cores": run.device.type == "cpu" and has_idle_cores(),
        "evaluations": program.validation is not None and _evaluation_count(program) > 1,
    }
    return hardware_facts(run.device) | model_facts(run.model) | {fact for fact, holds in facts.items() if holds}


def _evaluation_count(program: Program) -> float:
    """Number of evaluations in a whole run: one per epoch, or one per ``evaluate_every`` training samples."""
    plan, length = program.plan, program.train.length
    if plan.evaluate_every is None or length is None:
        return plan.epochs
    return plan.epochs * length * plan.batch_size / plan.evaluate_every


SYNC_WARNING = "called a synchronizing CUDA operation"  # torch's first one, about the mode itself, is worded otherwise


@contextmanager
def _cuda_syncs() -> Iterator[list[str]]:
    """Context manager: at its end the list holds a message for each call that made the host wait for the GPU."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found += [str(warning.message) for warning in caught if SYNC_WARNING in str(warning.message)]
