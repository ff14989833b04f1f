"""The diagnosis in a sentence: the largest cause, and what it could give."""

from __future__ import annotations

from collections.abc import Mapping

from hasten.diagnosis.advise import amdahl
from hasten.diagnosis.anatomy import Anatomy
from hasten.diagnosis.headroom import BATCH_FACTOR

LEAST_GAIN = 1.1  # below it a cause is not worth naming first

CAUSES = {
    "input": "waiting for the next batch takes {input:.0%} of the time; if batches came for free, training would be {gain:.2f}x as fast",
    "update": "the optimizer's update takes {update:.0%} of the time; if it were free, training would be {gain:.2f}x as fast",
    "evaluation": "measuring the metric takes {evaluation:.0%} of the time; without it, training would be {gain:.2f}x as fast",
    "allocator": "the operating system takes {system:.0%} of the processors' time, with {faults:.0f} page faults a step: "
    "memory is returned and fetched again; keeping it would make training {gain:.2f}x as fast",
    "batch_size": "the batch of {batch} is small: much of what a step costs does not depend on its size; with {factor} times the batch "
    "the samples would pass {gain:.2f}x as fast (whether they teach as much, only training can tell)",
}
ARITHMETIC = "the model's own arithmetic, forward and backward, takes {compute:.0%} of the time{rate}; only faster arithmetic or fewer steps can help"
HOST_READS = "; the step also reads a value back from the device {reads:.0f} times, and {cost}"
COST_OF_READING = {
    "cuda": "each time the processor waits for the GPU",
    "cpu": "on the CPU that costs little (on a GPU it would make the processor wait)",
}


def gains(anatomy: Anatomy, ceilings: Mapping[str, float]) -> dict[str, float]:
    """What every possible cause could give: as measured, or else as the timeline bounds it."""
    possible = {phase: amdahl(anatomy.phases[phase]) for phase in ("input", "update", "evaluation")}
    possible["allocator"] = amdahl(anatomy.system_share) if anatomy.faults_show else 1.0
    return possible | {name: gain for name, gain in ceilings.items() if name != "allocator" or anatomy.faults_show}


def verdict_of(anatomy: Anatomy, ceilings: Mapping[str, float]) -> str:
    """One sentence that names the largest cause and what it could give."""
    possible, phases = gains(anatomy, ceilings), anatomy.phases
    cause = max(possible, key=possible.get)
    if possible[cause] >= LEAST_GAIN:
        sentence = CAUSES[cause].format(
            **phases, gain=possible[cause], system=anatomy.system_share, faults=anatomy.faults_per_step,
            batch=anatomy.plan["batch_size"], factor=BATCH_FACTOR,
        )  # fmt: skip
    else:
        rate = f" and reaches {anatomy.flops['share']:.0%} of the machine's peak" if anatomy.flops else ""
        sentence = ARITHMETIC.format(compute=phases["forward"] + phases["backward"], rate=rate)
    if (reads := anatomy.host_reads_per_step or 0) >= 0.5:
        sentence += HOST_READS.format(reads=reads, cost=COST_OF_READING["cuda" if "cuda" in anatomy.facts else "cpu"])
    return sentence[0].upper() + sentence[1:] + "."
