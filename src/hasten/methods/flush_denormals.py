"""Computes with zero instead of denormal numbers, which CPUs compute with tens to hundreds of times slower."""

from dataclasses import dataclass

import torch

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext
from hasten.utils.denormals import flushes_denormals, nonzero_values, set_flush_denormals, smallest_denormals
from hasten.utils.process_setting import with_setting

VALUES_PER_THREAD = 1 << 16  # torch divides an operation among threads from 2 ** 15 values on


@dataclass(frozen=True)
class FlushDenormals(Method):
    """Calls ``torch.set_flush_denormal(True)`` for every thread and worker process of the run.

    The moving averages of an optimizer decay towards zero wherever a gradient stays zero, and pass through the denormal
    numbers (float32: below 1.2e-38) after some hundred steps. The differences are as small. Only a formula that divides
    by such a value can tell, such as Adam with ``eps=0``.

    The mode belongs to a thread, and a new thread has that of the thread that starts it. Intra-op threads that run
    already are ended, so that the next operation starts them anew, and once more after the run. Autograd computes on
    the CPU in the thread that calls it. Forked processes inherit the mode; in those that a data loader spawns the
    engine sets it.
    """

    card = Card(
        summary="compute with zero instead of denormal numbers",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://docs.pytorch.org/docs/stable/generated/torch.set_flush_denormal.html",
        gain_when="Adam, RMSprop or momentum on the CPU, once some gradients have stayed zero for hundreds of steps",
        accelerates={"forward", "backward", "optimizer_step"},
        applies_to={"cpu"},
        after=("num_threads",),  # the threads to end are those that the run will use
        remedy_for={"denormals": {}},
        trial_priority=6,
        ceiling="denormals",
        script_edit={"process": "torch.set_flush_denormal(True)"},
    )

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        if run.device.type != "cpu":
            return run.report_no_effect(self, f"the tensors of this run are on the GPU ({run.device})", context)
        if not torch.set_flush_denormal(flushes_denormals()):  # as it is
            return run.report_no_effect(self, "this CPU cannot flush denormal numbers", context)

        run.observe_effect(self, _describe)
        return with_setting(context, set_flush_denormals, True, flushes_denormals)


def _describe() -> str:
    """The effect as text: computes with denormals, also in a backward pass; NoEffectError if one stays nonzero."""
    threads = torch.get_num_threads()
    planted = smallest_denormals(threads * VALUES_PER_THREAD)
    weight = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(weight * planted[:1], weight)
    if not flushes_denormals() or nonzero_values(gradient):
        raise NoEffectError("denormal numbers are not flushed: something else has called torch.set_flush_denormal")
    if remaining := nonzero_values(planted * 1.0):
        raise NoEffectError(f"{remaining} of {len(planted)} denormal numbers were not flushed by the intra-op threads")
    return f"planted denormal numbers became zero in {threads} intra-op thread{'s' * (threads > 1)} and in autograd"
