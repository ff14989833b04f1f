"""The diagnosis in a sentence: the largest cause, and what it could give."""

from __future__ import annotations

from collections.abc import Mapping

from hasten.profiling.ablations import BATCH_FACTOR, LARGER_BATCH
from hasten.profiling.advise import amdahl
from hasten.profiling.step_profile import StepProfile

LEAST_GAIN = 1.1  # below it a cause is not worth naming first
MOST_OF_THE_TIME = (
    2.0  # the gain from which on a phase is the cause, even if a larger batch would hide it and give more
)

CAUSES = {
    "input": "waiting for the next batch takes {input:.0%} of the time; if batches came for free, training would be {gain:.2f}x as fast",
    "optimizer_step": "the optimizer's update takes {optimizer_step:.0%} of the time; if it were free, training would be {gain:.2f}x as fast",
    "evaluation": "measuring the metric takes {evaluation:.0%} of the time; without it, training would be {gain:.2f}x as fast",
    "logging": "the loop and its log take {logging:.0%} of the time; without the log, training would be {gain:.2f}x as fast",
    "system_time": "the operating system takes {system:.0%} of the processors' time, with {faults:.0f} page faults a step: "
    "memory is returned and fetched again; keeping it would make training {gain:.2f}x as fast",
    "larger_batch": "the batch of {batch} is small: much of what a step costs does not depend on its size; with {factor} times the batch "
    "the samples would pass {gain:.2f}x as fast (whether they teach as much, only training can tell)",
}
ARITHMETIC = "the model's own arithmetic, forward and backward, takes {compute:.0%} of the time{rate}; only faster arithmetic or fewer steps can help"
HOST_READS = "; the step also reads values back from the device ({reads:.0f} a step), and {cost}"
COST_OF_READING = {
    "cuda": "each time the processor waits for the GPU",
    "cpu": "on the CPU that costs little (on a GPU it would make the processor wait)",
}


def gains(anatomy: StepProfile, headroom: Mapping[str, float]) -> dict[str, float]:
    """What every possible cause could give: as measured, or else as the timeline and the system time bound it."""
    bounds = {phase: amdahl(anatomy.phases[phase]) for phase in ("input", "optimizer_step", "evaluation")}
    return bounds | {"system_time": amdahl(anatomy.system_share) if anatomy.faults_show else 1.0} | dict(headroom)


def verdict_of(anatomy: StepProfile, possible: Mapping[str, float]) -> str:
    """One sentence that names the largest cause and what it could give.

    Args:
        possible: as ``gains`` tells.
    """
    phases = anatomy.phases
    cause = _largest(possible)
    if possible[cause] >= LEAST_GAIN:
        sentence = CAUSES[cause].format(
            **phases,
            gain=possible[cause],
            system=anatomy.system_share,
            faults=anatomy.faults_per_step,
            batch=anatomy.plan["batch_size"],
            factor=BATCH_FACTOR,
        )
    else:
        rate = f" and reaches {anatomy.flops['share']:.0%} of the machine's peak" if anatomy.flops else ""
        sentence = ARITHMETIC.format(compute=phases["forward"] + phases["backward"], rate=rate)
    if (reads := anatomy.host_reads_per_step or 0) >= 0.5:
        sentence += HOST_READS.format(reads=reads, cost=COST_OF_READING["cuda" if "cuda" in anatomy.facts else "cpu"])
    return sentence[0].upper() + sentence[1:] + "."


def _largest(possible: Mapping[str, float]) -> str:
    phases = {name: gain for name, gain in possible.items() if name != LARGER_BATCH}
    first = max(phases, key=phases.get)
    return first if phases[first] >= MOST_OF_THE_TIME else max(possible, key=possible.get)
