"""The diagnosis of one process in a sentence: the largest cause, and what removing it could give."""

from collections.abc import Mapping
from typing import Any

from hasten.engine.registry import remedies
from hasten.profiling.ablations import BATCH_FACTOR, LARGER_BATCH
from hasten.profiling.advise import amdahl
from hasten.profiling.step_profile import StepProfile
from hasten.reporting.result_schema import Flops

MIN_GAIN = 1.1  # a cause with a smaller gain is not named first
DOMINANT_GAIN = 2.0  # a phase with this gain is the cause even if a larger batch, which would hide it, gives more

# of a step, that a GPU still computes when the host has queued the last operation of a block. A share of the time would
# not tell: the queue holds about a thousand operations, and a host that is ahead by as many waits while it queues more
LAUNCH_BOUND = 0.1
MAX_INPUT_SHARE = 0.1  # of the time; beyond, the host waits for data
MAX_READ_SHARE = 0.2  # of the time that the host waits for values of the GPU; beyond, the GPU is the slower one
MIN_FORMAT_GAIN = 1.3  # peak of the best format / peak of the used one, from which it is named

CAUSES = {
    "input": "waiting for the next batch takes {input:.0%} of the time; if batches came for free, training would be "
    "{gain:.2f}x as fast",
    "copy": "moving the batches to the GPU costs time that nothing hides; if it were free, training would be "
    "{gain:.2f}x as fast",
    "optimizer_step": "the optimizer's update takes {optimizer_step:.0%} of the time; if it were free, training would "
    "be {gain:.2f}x as fast",
    "evaluation": "measuring the metric takes {evaluation:.0%} of the time; without it, training would be "
    "{gain:.2f}x as fast",
    "logging": "the loop and its log take {logging:.0%} of the time; without the log, training would be "
    "{gain:.2f}x as fast",
    "loop": "what the loop does besides the model, the optimizer and the loader (loss, copies, metrics, callbacks of a "
    "framework) takes {loop:.0%} of the time; if it were free, training would be {gain:.2f}x as fast",
    "own_code": "the script's own {function} ({site}) takes {share:.0%} of the time; if it were free, training would "
    "be {gain:.2f}x as fast",
    "system_time": "the operating system takes {system:.0%} of the CPU time, with {faults:.0f} page faults a step: "
    "memory is returned and fetched again; keeping it would make training {gain:.2f}x as fast at most",
    "larger_batch": "the batch of {batch} is small: much of the cost of a step does not depend on its size; with "
    "{factor} times the batch, samples would pass {gain:.2f}x as fast (whether they teach as much, training shows)",
}
ARITHMETIC = (
    "the model's own arithmetic, forward and backward, takes {compute:.0%} of the time{rate}; "
    "only faster arithmetic or fewer steps can help"
)
LAUNCHES = (
    "the GPU waits for Python: the host needs {issue:.0%} of the time to queue the operations of the steps; a recorded "
    "or compiled step has fewer of them, and in a larger batch each has more to do"
)
HOST_READS = "; the step also reads values back from the device ({reads:.0f} a step{where}), and {cost}"
HOST_READ_COST = {
    "cuda": "each time the CPU waits for the GPU",
    "cpu": "on the CPU that costs little (on a GPU it would make the CPU wait)",
}


def possible_gains(profile: StepProfile, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Cause -> factor by which the run would be faster without it (1.0: no gain), measured or an upper bound."""
    bounds = {phase: amdahl(profile.phases[phase]) for phase in ("input", "optimizer_step", "evaluation")}
    bounds["own_code"] = amdahl(_hottest(profile)["share"])
    if "cpu" in profile.facts and "logging" not in ceilings:  # a script's, which cannot be switched off
        bounds["loop"] = amdahl(_share_of_loop(profile))
    return bounds | {"system_time": amdahl(profile.wasted_share)} | dict(ceilings)


def is_launch_bound(
    facts: frozenset[str],
    queued_steps: float,
    input_share: float,
    host_reads: float | None,
    read_share: float | None = None,
) -> bool:
    """Whether a GPU waits for Python: the host queues operations all the time, and waits neither for data nor for it.

    ``queued_steps`` is how much of a step's time the GPU still computes when the host has queued the last operation of
    a block of steps. Where the GPU is the slower one, the queue is full of operations then. A host that reads
    ``host_reads`` values a step empties the queue itself: there, the ``read_share`` of the time that it waits for them
    decides, if it was measured.
    """
    reads = (host_reads or 0.0) >= 0.5 and (read_share is None or read_share > MAX_READ_SHARE)
    return "cuda" in facts and queued_steps <= LAUNCH_BOUND and input_share < MAX_INPUT_SHARE and not reads


def describe_diagnosis(profile: StepProfile, gains: Mapping[str, float]) -> str:
    """One sentence that names the largest cause and its gain; ``gains`` are those of ``possible_gains``."""
    phases = profile.phases
    cause = _largest_cause(gains)
    reads, synchronizations = profile.host_reads_per_step, profile.code["synchronizations"]
    waited = sum(read["seconds_per_step"] for read in synchronizations) if synchronizations else None
    read_share = waited / profile.step if waited is not None else None
    launches = is_launch_bound(profile.facts, profile.queued_steps, phases["input"], reads, read_share)
    if launches and (cause == LARGER_BATCH or gains[cause] < MIN_GAIN):
        sentence = LAUNCHES.format(issue=profile.issue_share - (read_share or 0.0))
    elif gains[cause] >= MIN_GAIN:
        sentence = CAUSES[cause].format(
            **phases,
            gain=gains[cause],
            system=profile.system_share,
            faults=profile.faults_per_step,
            batch=profile.plan["batch_size"],
            factor=BATCH_FACTOR,
            loop=_share_of_loop(profile),
            **_hottest(profile),
        )
    else:
        compute = phases["forward"] + phases["backward"]
        sentence = ARITHMETIC.format(compute=compute, rate=_rate(profile.flops) if profile.flops else "")
    if (reads := reads or 0) >= 0.5:
        cost = HOST_READ_COST["cuda" if "cuda" in profile.facts else "cpu"]
        sites = sorted(profile.code["synchronizations"], key=lambda read: -read["per_step"])
        where = f", {_places(sites, reads)}" if sites else ""
        sentence += HOST_READS.format(reads=reads, where=where, cost=cost)
    return sentence[0].upper() + sentence[1:] + "."


def _places(sites: list[dict[str, Any]], reads: float) -> str:
    """Where a script reads values, the line with the most reads first; ``reads``: of all sites, a step."""
    first = sites[0]["site"]
    if not sites[1:]:
        return f"at {first}"
    if 2 * sites[0]["per_step"] > reads:
        return f"most of them at {first}"
    return f"at {first} and {sites[1]['site']}" + (" among others" if sites[2:] else "")


def _share_of_loop(profile: StepProfile) -> float:
    """The share of what is neither a phase nor in a function of the script's own that has a row of its own."""
    own = sum(one["share"] for one in profile.code["functions"] if one["phase"] == "logging")
    return max(0.0, profile.phases["logging"] - own)


def _hottest(profile: StepProfile) -> dict[str, Any]:
    """``function``, ``site`` and ``share`` of the time of a script's function that takes most outside of the phases.

    A GPU computes meanwhile what is queued, so there its share is at most that of the time between the phases.
    """
    functions = [one for one in profile.code["functions"] if one["phase"] == "logging"]
    found = max(functions, key=lambda one: one["share"], default={"function": "", "site": "", "share": 0.0})
    return found | {"share": min(found["share"], profile.phases["logging"])} if "cuda" in profile.facts else found


def memory_sentence(batch_size: int, largest: int | None) -> str:
    """What the largest batch that fits, by estimate, makes possible; "" where it is unknown."""
    if largest is None:
        return ""
    if largest == batch_size:
        return f"a larger batch fits with {remedies('out_of_memory')}"
    if batch_size == 1:  # also that of a script which takes its batches from no loader: their size is unknown
        return f"about {largest} times the batch fit; more with {remedies('out_of_memory')}"
    rounded = largest - largest % batch_size if largest >= 2 * batch_size else largest
    return f"a batch of about {rounded} fits instead of {batch_size}; a larger one with {remedies('out_of_memory')}"


def _rate(flops: Flops) -> str:
    """The share of the machine's peak as text, in the format that is used and in the fastest one."""
    share, peak, best = flops.get("share"), flops.get("peak_gflops"), flops.get("best_peak_gflops")
    if share is None:
        return ""
    text = f" and reaches {share:.0%} of the machine's peak"
    if peak and best and best > MIN_FORMAT_GAIN * peak:
        text += f" in {flops.get('format')}, {share * peak / best:.0%} of that in {flops.get('best_format')}"
    return text


def _largest_cause(gains: Mapping[str, float]) -> str:
    phases = {name: gain for name, gain in gains.items() if name != LARGER_BATCH}
    largest = max(phases, key=phases.__getitem__)
    return largest if phases[largest] >= DOMINANT_GAIN else max(gains, key=gains.__getitem__)
