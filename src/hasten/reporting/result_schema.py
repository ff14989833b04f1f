"""The schema of the results that tune, compare, diagnose, train and quantize write, and that report and terminal read.

One TypedDict per command, after those of its parts. A type checker checks what is written, ``validation.py`` the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypedDict

# The metadata is the name of the type in error messages; ``coerce`` distinguishes the types by it.
Number = Annotated[float | None, "a number"]
Amount = Annotated[float | None, "a number from 0 up"]
Text = Annotated[str, "a text"]
Command = Annotated[str, "a command or a path"]  # to be typed: neither shortened nor changed
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
    """Mean and confidence interval of the metric's change from baseline to tuned; positive is better."""

    mean: Number
    low: Number
    high: Number


class Quality(TypedDict, total=False):
    """The quality gate: mean final metrics of both arms, margin, difference, paired seeds and verdict."""

    baseline: Number
    tuned: Number
    margin: Amount
    difference: Difference | None
    seeds: Sequence[Number]
    passed: Boolean


class SamplesCompared(TypedDict, total=False):
    """Training samples of each run to the target: (until the evaluation that counts, since the one before that)."""

    baseline: Sequence[Sequence[Amount]]
    tuned: Sequence[Sequence[Amount]]


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
    """One trial of a search: what was tried, ``ratio`` (speed-up over what it was compared with), seconds it took."""

    what: Text
    stage: Text
    verdict: Text
    ratio: Interval | None
    seconds: Amount
    why: Text


EVIDENCE_LEVELS = {  # strongest first
    "exact": "the same bits, or the same formula rounded otherwise; checked on this task",
    "precision checked": "lower precision; gradients and loss checked on real steps",
    "proven": "the quality gate over seeds was passed",
    "estimated": "promising, but not enough evidence yet",
}


class FrontierRecipe(TypedDict, total=False):
    """A non-dominated recipe, the baseline or the strong baseline.

    ``evidence``: one of EVIDENCE_LEVELS, or "". ``role``: "baseline", "strong baseline", "recommended" or "".
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
    """An operation of a training step in one precision; shares are of the sums over all operations."""

    op: Text  # a conversion is named with its target: ``_to_copy to bfloat16``
    dtype: Text  # of the first floating-point input; "" without one
    calls_per_step: Amount
    flops_share: Amount
    time_share: Amount


class DriftRow(TypedDict, total=False):
    """A stretch of the training: its last step, seconds per step, number of denormal values and of all values by kind
    of tensor ("weights", "exp_avg"), and bytes of memory of the process (``rss``).
    """

    step: Amount
    seconds_per_step: Amount
    denormal: Mapping[str, Amount]
    values: Mapping[str, Amount]
    rss: Amount


class DriftResult(TypedDict, total=False):
    """How the training changes in the course of the run, in words (``text``, "" if it does not), and ``slow_from``: the
    step from which steps take longer than at the start; None if they do not.
    """

    rows: Sequence[DriftRow]
    slow_from: Amount
    text: Text


class LossScaleStep(TypedDict):
    """The loss scale after a step, and whether the gradients of the step overflowed."""

    value: Amount
    overflow: Boolean


class Operations(TypedDict):
    """The operations of a training step in each precision, and the loss scale."""

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
    """Time of a / time of b of the training steps that begin at ``step`` of the training."""

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
    """An int8 model; ``loss`` is a fraction of the float model's metric, ``speedup`` is over it, by batch size."""

    name: Text
    passed: Boolean  # whether the loss is allowed
    metric: Number
    loss: Number
    bytes: Amount
    in_float: Sequence[Text]  # the nodes that are not int8
    speedup: Mapping[str, Interval]
    seconds: Mapping[str, Amount]  # by batch size


class FloatModel(TypedDict):
    """The model that int8 models are compared with: its metric, its bytes, and its seconds by batch size."""

    metric: Number
    bytes: Amount
    seconds: Mapping[str, Amount]


class NotTried(TypedDict):
    """An int8 model that could not be made, with the reason."""

    name: Text
    why: Text


class Result(TypedDict, total=False):
    """Keys of every kind of result. A result without ``kind`` is recognized by its other keys."""

    kind: Text
    task: Text
    processes: Amount
    verdict: Text
    why: Text
    machine: Mapping[str, Fact]
    versions: Mapping[str, Fact]
    system_noise: Mapping[str, Fact]
    seed: Number


class TuneResult(Result, total=False):
    """Result of ``tune``. Times to the target are in seconds.

    ``command`` is the user's own, "" for a task. ``evidence`` is the level of the recommended recipe (EVIDENCE_LEVELS),
    "" without one. ``training_measured`` is False where ``training_seconds`` is predicted; ``start_seconds`` end with
    the first step. ``confirmed_recipes``: of which whole trainings were judged. ``is_partial``: the search runs on.
    """

    command: Command
    evidence: Text
    frontier: Sequence[FrontierRecipe]
    training_seconds: TrainingSeconds | None
    training_measured: Boolean
    start_seconds: Mapping[str, Amount]
    price_per_hour: Amount
    money: Mapping[str, Amount] | None  # price of a whole training, in the currency of ``price_per_hour``
    is_partial: Boolean
    margin_why: Text
    metric: Metric
    recipe: Recipe
    recipe_file: Command
    out: Command
    strong_baseline_recipe: Recipe
    speedup: Interval | None
    speedup_over_strong_baseline: Interval | None
    one_process: Interval | None
    winner_in_one_process: Interval | None
    measured_speedup: Interval | None
    time_to_target: Mapping[str, Amount] | None
    samples_compared: SamplesCompared | None
    samples_to_target: Mapping[str, Sequence[Amount]]
    seconds_to_target: Mapping[str, Sequence[Amount]]
    quality: Quality
    curves: Mapping[str, Sequence[Curve]]
    step_profile: Mapping[str, Mapping[str, Amount]]
    peak_memory_bytes: Mapping[str, Sequence[MemoryPeak]]
    operations: Operations | None
    contributions: Sequence[Contribution]
    effects: Mapping[str, Text]
    confirmed_recipes: Sequence[Recipe]
    offered: Sequence[OfferedMethod]
    trials: Sequence[TrialRecord]
    remembered_trials: Amount
    ceilings: Mapping[str, Interval]
    phases: Mapping[str, Amount]
    facts: Sequence[Text]
    search_seconds: Amount
    budget_seconds: Amount
    baseline_seconds: Amount
    break_even_runs: Amount
    expected_runs: Amount


class CompareResult(Result, total=False):
    """Result of ``compare``. ``ratio``: time of a / time of b. ``losses``: mean training loss of each block, by arm,
    and the ``samples`` trained by its end. ``interleaved``: False if memory did not suffice for both arms at once.
    """

    a: Text
    b: Text
    device: Text
    interleaved: Boolean
    peak_memory_bytes: Mapping[str, Sequence[MemoryPeak]]
    ratio: Interval
    by_position: Sequence[PositionRatio]
    losses: Mapping[str, Sequence[Number]]
    cpu_ratio: Interval | Amount
    rounds: Amount
    blocks: Amount
    seconds_per_1000_samples: Mapping[str, Amount]
    evaluation_seconds: Mapping[str, Amount]
    start_seconds: Mapping[str, Amount]
    effects: Mapping[str, Mapping[str, Text]]
    seconds: Amount


class DiagnoseResult(Result, total=False):
    """Result of ``diagnose``. ``phases``: fractions of the step; ``ceilings``: speed-up if the phase cost nothing.

    A ceiling without an interval is a bound from the share of the phase, not measured by taking the phase away.
    ``memory``: a sentence about the largest batch that fits, "" where that is unknown.
    """

    recipe: Text
    device: Text
    phases: Mapping[str, Amount]
    ceilings: Mapping[str, Interval]
    not_measured: Mapping[str, Text]
    advice: Sequence[Advice]
    facts: Sequence[Text]
    batch_size: Amount
    seconds_per_step: Amount
    seconds_per_run: Amount
    samples_per_second: Amount
    start_seconds: Amount
    evaluation_seconds: Amount
    seconds: Amount
    peak_memory_bytes: Sequence[MemoryPeak]
    memory: Text
    flops: Flops | None
    input: InputThroughput
    not_advised: Sequence[NotAdvised]
    causes: Mapping[str, Fact]
    operations: Operations | None
    drift: DriftResult
    sites: Mapping[str, Sequence[Mapping[str, Fact]]]
    metric: DetectedMetric
    synchronizations: Sequence[Synchronization]
    functions: Sequence[HotFunction]


class TrainResult(Result, total=False):
    """Result of ``train``. ``split``: seconds by activity. ``processes``: None if they ran on several machines."""

    metric: Number
    best_metric: Number
    metric_name: Text
    higher_is_better: Boolean
    target: Number
    reached: Boolean
    steps: Amount
    samples: Amount
    seconds: Amount
    seconds_to_target: Amount
    samples_to_target: Amount
    stopped: Fact
    skipped_rows: Amount
    tuned_settings: Recipe
    out: Command
    device: Text
    split: Mapping[str, Amount]
    no_effect: Sequence[Sequence[Text]]
    effects: Mapping[str, Text]
    processes: Amount
    peak_memory_bytes: Sequence[MemoryPeak]
    recipe: Text
    evaluations: Sequence[Point]


class QuantizeResult(TypedDict):
    """The result of ``hasten quantize``; a loss is a fraction of the float model's metric."""

    kind: Text
    task: Text
    target: Text
    verdict: Text
    metric: Metric
    max_loss: Amount
    float: FloatModel
    chosen: QuantizedTrial | None
    torch_speedup: Mapping[str, Interval]
    trials: Sequence[QuantizedTrial]
    layers: Mapping[str, Number]
    not_tried: Sequence[NotTried]
    peak_memory_bytes: Mapping[str, Amount] | None
    threads: Amount
    validation_samples: Amount
    seconds: Amount
    out: Command
    machine: Mapping[str, Fact]
    versions: Mapping[str, Fact]
    system_noise: Mapping[str, Fact]
