"""The schema of the results that tune, compare, diagnose, train and quantize write, and that report and terminal read.

There is one TypedDict per command. The functions that compute results return it, so that a type checker compares their
keys with it; ``validation.py`` checks what is read.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from hasten.reporting.result_parts import (
    Advice,
    Amount,
    Boolean,
    Contribution,
    Curve,
    DetectedMetric,
    DriftResult,
    Fact,
    FloatModel,
    Flops,
    FrontierRecipe,
    HotFunction,
    InputThroughput,
    Interval,
    MemoryPeak,
    Metric,
    NotAdvised,
    NotTried,
    Number,
    OfferedMethod,
    Operations,
    Point,
    PositionRatio,
    Quality,
    QuantizedTrial,
    Recipe,
    SamplesCompared,
    Synchronization,
    Text,
    TrainingPrice,
    TrainingSeconds,
    TrialRecord,
)


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

    ``command`` is the user's own command, "" for a task. ``evidence`` is the level (of EVIDENCE_LEVELS) of the
    recommended recipe, "" without one. ``training_measured`` is False where ``training_seconds`` is predicted from
    steps. ``confirmed_recipes`` holds each recipe of which whole trainings were judged, as often as they were.
    ``is_partial`` is True while the search is running.
    """

    command: Text
    evidence: Text
    frontier: Sequence[FrontierRecipe]
    training_seconds: TrainingSeconds | None
    training_measured: Boolean
    price_per_hour: Amount
    money: TrainingPrice | None
    is_partial: Boolean
    margin_why: Text
    metric: Metric
    recipe: Recipe
    recipe_file: Text
    out: Text
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
    """Result of ``compare``. ``ratio``: time of a divided by time of b. ``losses``: of each block, and ``samples``.

    ``interleaved`` is False where memory did not suffice for both arms at once, and each ran alone, in turns.
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
    """Result of ``train``. ``split``: seconds by activity."""

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
    out: Text
    device: Text
    split: Mapping[str, Amount]
    no_effect: Sequence[Sequence[Text]]
    effects: Mapping[str, Text]
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
    out: Text
    machine: Mapping[str, Fact]
    versions: Mapping[str, Fact]
    system_noise: Mapping[str, Fact]


SCHEMAS = {
    "tune": TuneResult,
    "compare": CompareResult,
    "diagnose": DiagnoseResult,
    "train": TrainResult,
    "quantize": QuantizeResult,
}
