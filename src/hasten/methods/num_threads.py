"""The number of threads inside torch's CPU operations."""

import os
from dataclasses import dataclass

import torch

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext, option
from hasten.utils.process_setting import with_setting


@dataclass(frozen=True)
class NumThreads(Method):
    """Calls ``torch.set_num_threads(count)`` for the run.

    Small tensors are often faster on fewer threads, shared machines always. Threads split sums among them, so another
    count may round differently.
    """

    card = Card(
        summary="choose the number of threads inside operations",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html",
        gain_when="small tensors, cores that other processes use, too, or fewer threads than cores (OMP_NUM_THREADS=1)",
        accelerates={"forward", "backward", "optimizer_step"},
        applies_to={"cpu"},
        remedy_for={"idle_cores": {}},
        presets=({"count": 1}, {"count": 2}, {"count": 4}, {"count": 8}),
        script_edit={"process": "torch.set_num_threads({count})"},
    )

    count: int = option(1, at_least=1)  # threads, at most the number of cores

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        cores = len(os.sched_getaffinity(0))
        if self.count == torch.get_num_threads():
            return run.report_no_effect(self, f"torch computes with {self.count} threads already", context)
        if self.count > cores:
            return run.report_no_effect(self, f"there are only {cores} cores for {self.count} threads", context)

        run.observe_effect(self, self._describe)
        return with_setting(context, torch.set_num_threads, self.count, torch.get_num_threads)

    def _describe(self) -> str:
        if torch.get_num_threads() != self.count:
            raise NoEffectError(f"torch computes with {torch.get_num_threads()} threads: something else has set them")
        return f"torch computes with {self.count} thread{'s' * (self.count > 1)}"
