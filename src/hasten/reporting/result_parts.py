"""The parts of the results in ``result_schema.py``: numbers and texts, which metadata names in errors, and objects."""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypedDict

# The metadata is the name of the type in error messages; ``coerce`` distinguishes the types by it.
Number = Annotated[float | None, "a number"]
Amount = Annotated[float | None, "a number from 0 up"]
Text = Annotated[str, "a text"]
Boolean = Annotated[bool | None, "true or false"]
Option = Annotated[float | bool | str | None, "a number or a text"]
Fact = Annotated[float | bool | str | None, "a fact"]  # lists and objects are dropped
Recipe = Mapping[str, Mapping[str, Option]]  # options by method


class Interval(TypedDict):
    """A ratio of times. A file may hold a bare number instead, which is read as the median."""

    median: Amount
    low: Amount
    high: Amount


class Metric(TypedDict, total=False):
    """The metric of the task; ``target`` is the value that counts as trained."""

    name: Text
    higher_is_better: Boolean
    target: Number
    unit: Text


class Difference(TypedDict, total=False):
    """Mean and confidence interval of tuned minus baseline; positive is better."""

    mean: Number
    low: Number
    high: Number


class Quality(TypedDict, total=False):
    """The quality gate: metrics of both arms, margin and verdict."""

    baseline: Number
    tuned: Number
    margin: Amount
    difference: Difference | None
    seeds: Sequence[Number]
    passed: Boolean


class SamplesCompared(TypedDict, total=False):
    """Samples of the runs to the target: (until the evaluation that counts, since the one before), a row a run."""

    baseline: Sequence[Sequence[Amount]]
    tuned: Sequence[Sequence[Amount]]
    paired: Boolean


class Point(TypedDict, total=False):
    """An evaluation on the validation data, in seconds, samples and (of ``train``) optimizer steps since the start."""

    seconds: Amount
    samples: Amount
    step: Amount
    metric: Number


class Curve(TypedDict, total=False):
    """The learning curve of one run: its seed and its evaluations."""

    seed: Number
    points: Sequence[Point]


class Contribution(TypedDict, total=False):
    """How many times as slow the recipe is without a method (ratio of times)."""

    method: Text
    speedup: Interval | None


class TrialRecord(TypedDict, total=False):
    """One trial of a search. ``ratio``: time of the best recipe so far divided by its time."""

    what: Text
    stage: Text
    verdict: Text
    ratio: Interval | None
    seconds: Amount
    why: Text


EVIDENCE_LEVELS = {  # strongest first
    "exact": "bit-exact or the same formula, checked on this task",
    "precision checked": "lower precision; gradients and loss checked on real steps",
    "proven": "the quality gate over seeds was passed",
    "estimated": "promising, but not enough evidence yet",
}


class FrontierRecipe(TypedDict, total=False):
    """A non-dominated recipe, the baseline or the strong baseline.

    ``evidence`` is one of EVIDENCE_LEVELS, or "" where nothing is claimed; ``role`` is "baseline", "strong baseline",
    "recommended" or "".
    ``speedup`` is over the baseline: of the time to the target where whole runs were made, else of the whole training.
    ``quality`` is None where none was measured.
    """

    recipe: Recipe
    text: Text
    role: Text
    evidence: Text
    speedup: Interval | None
    training_speedup: Interval | None
    quality: Difference | None
    why: Text
    to_prove: Text  # what is missing, such as "5 more seeds, about 12 min: --budget +12m"


class TrainingSeconds(TypedDict, total=False):
    """Seconds of the whole training, start-up and evaluation included; ``low`` and ``high`` are those of ``tuned``."""

    baseline: Amount
    tuned: Amount
    low: Amount
    high: Amount


class TrainingPrice(TypedDict, total=False):
    """The price of one whole training, in the currency of ``price_per_hour``."""

    baseline: Amount
    tuned: Amount


class OfferedMethod(TypedDict, total=False):
    """Outcome of a method that the user added with ``--with``."""

    method: Text
    accepted: Boolean
    why: Text


class NotAdvised(TypedDict):
    """A method that cannot pay in this run, with the reason."""

    method: Text
    why: Text


class Advice(NotAdvised):
    """A method that could pay; ``bound`` is its largest possible speed-up."""

    bound: Amount


class Flops(TypedDict, total=False):
    """Floating-point operations per second; ``share``: fraction of the measured peak of ``format``.

    ``best_format`` is the number format with the highest peak here. ``copy_gb_per_second``, 10**9 bytes read and
    written, bounds what is no matrix product.
    """

    achieved_gflops: Amount
    peak_gflops: Amount
    share: Amount
    format: Text
    best_format: Text
    best_peak_gflops: Amount
    copy_gb_per_second: Amount


class Operation(TypedDict):
    """An operation of a training step in one precision; shares of the FLOPs and of the time of all operations."""

    op: Text  # a conversion is named with its target: ``_to_copy to bfloat16``
    dtype: Text  # of the first floating-point input; "" without one
    calls_per_step: Amount
    flops_share: Amount
    time_share: Amount


class DriftRow(TypedDict, total=False):
    """A stretch of the training: its last step, and numbers of values by kind of tensor ("weights", "exp_avg")."""

    step: Amount
    seconds_per_step: Amount
    denormal: Mapping[str, Amount]
    values: Mapping[str, Amount]
    rss: Amount


class DriftResult(TypedDict, total=False):
    """How the training changes in the course of the run; ``text`` is empty if nothing of note does.

    ``slow_from``: the step from which steps take longer than at the start; None if they do not.
    """

    rows: Sequence[DriftRow]
    slow_from: Amount
    text: Text


class LossScaleStep(TypedDict):
    """The loss scale after a step, and whether the gradients of the step overflowed."""

    value: Amount
    overflow: Boolean


class Operations(TypedDict):
    """The view of operations."""

    steps: Amount  # how many were recorded
    rows: Sequence[Operation]  # the longest first
    loss_scale: Sequence[LossScaleStep]  # after each step of the run, warm-up included
    note: Text  # what is not visible


class SkippedRow(TypedDict, total=False):
    """A row of the data that could not be read and was skipped."""

    row: Amount
    where: Text
    why: Text


class InputThroughput(TypedDict, total=False):
    """Rates in samples per second; None for what does not exist or cannot be measured."""

    stages: Mapping[str, Amount]  # read (includes decode if that is None), decode, map, batch in one thread; copy
    step_throughput: Amount  # what the training step consumes when the next batch is always ready
    end_to_end: Amount  # the whole input pipeline, workers included
    first_batch_seconds: Amount
    prefetched: Boolean  # whether batches are computed while the step runs
    data_wait_fraction: Amount  # of the time, 0 to 1, that the step waits for data
    bottleneck: Text  # the slowest stage, "input" if the stages are not known, or "step"
    skipped_rows: Sequence[SkippedRow]  # those that could not be read
    not_measured: Mapping[str, Text]  # name of a stage or key -> reason


class MemoryPeak(TypedDict, total=False):
    """Peak memory of one rank in bytes: ``allocated`` and ``reserved`` on a GPU, ``resident`` on the CPU.

    ``current`` is what it held when the peak was read, ``available`` that and what was free on the device.
    """

    device: Text
    allocated: Amount
    reserved: Amount
    resident: Amount
    current: Amount
    available: Amount


class PositionRatio(TypedDict, total=False):
    """The ratio of the training steps from a step of the training on."""

    step: Amount
    ratio: Interval


class MetricCandidate(TypedDict, total=False):
    """A number that a script prints or logs; ``direction`` is "min", "max" or "" (unknown)."""

    name: Text
    direction: Text
    values: Sequence[Number]


class DetectedMetric(MetricCandidate, total=False):
    """The metric of a run. Where it is not clear, ``name`` is "", ``candidates`` could be it, and ``why`` says more."""

    candidates: Sequence[MetricCandidate]
    why: Text


class Synchronization(TypedDict):
    """A line of a script that reads a tensor on the host, as by ``.item()``: on a GPU, the CPU waits there."""

    site: Text
    call: Text
    per_step: Amount
    seconds_per_step: Amount


class HotFunction(TypedDict):
    """A function of the script's own, with the line at which it is most often; ``share``: of the training's time.

    ``phase`` is "input" in a DataLoader, "loop" for the function that calls the backward pass, else "logging".
    """

    function: Text
    site: Text
    phase: Text
    share: Amount


class QuantizedTrial(TypedDict):
    """An int8 model: whether its loss is allowed, and its speed over the float model by batch size."""

    name: Text
    passed: Boolean
    metric: Number
    loss: Number
    bytes: Amount
    in_float: Sequence[Text]
    speedup: Mapping[str, Interval]
    seconds: Mapping[str, Amount]


class FloatModel(TypedDict):
    """The model that int8 models are compared with."""

    metric: Number
    bytes: Amount
    seconds: Mapping[str, Amount]


class NotTried(TypedDict):
    """A candidate that was not made."""

    name: Text
    why: Text
