"""Drift: what is said of measured stretches, what a real run shows, and that a steady training shows nothing."""

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from hasten.benchmarking.ratio import Ratio
from hasten.core.errors import RunError
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.tasks import TaskRef
from hasten.profiling import drift as drift_module
from hasten.profiling.advise import advise
from hasten.profiling.diagnose import _denormals_ceiling, diagnose
from hasten.profiling.drift import Drift, DriftProbe, Stretch, describe, measure_drift
from hasten.testing.tasks import perceptron
from hasten.utils.denormals import count_denormals, flushes_denormals, set_flush_denormals, smallest_denormals

MIB = 1 << 20
CPU = {"device": "cpu", "seed": 0}


def stretch(step: int, denormal: int = 0, rss: int = 100) -> Stretch:
    counts = {"weights": 0, "exp_avg": denormal}
    values = {"weights": 283_000, "exp_avg": 283_000}
    return Stretch(step=step, seconds_per_step=0.003, denormal=counts, values=values, rss=rss * MIB)


def test_describe_steady_training_is_none():
    assert describe(Drift([stretch(100), stretch(200), stretch(300)])) is None


def test_describe_slow_training_with_denormals_names_them():
    rows = [stretch(400), stretch(900, 12_000), stretch(1300, 16_000)]
    text = describe(Drift(rows, 800, Ratio(2.6, 2.4, 2.8), Ratio(1.0, 0.9, 1.1)))
    assert text == (
        "From about step 800 on, 16,000 of 283,000 values of the optimizer's first moment (exp_avg) are denormal; "
        "steps take 2.6 times as long as at the start."
    )


@pytest.mark.parametrize("flushed", [None, Ratio(2.5, 2.3, 2.7)])
def test_describe_slow_training_beside_denormals_that_cost_nothing_names_no_cause(flushed):
    rows = [stretch(400, 12_000), stretch(900, 16_000)]
    found = Drift(rows, 800, Ratio(2.6, 2.4, 2.8), flushed)
    assert describe(found) == (
        "From about step 400 on, 16,000 of 283,000 values of the optimizer's first moment (exp_avg) are denormal; "
        "from about step 800 on, steps take 2.6 times as long as at the start."
    )
    assert _denormals_ceiling(found, 900) == {}


def test_describe_slow_training_without_denormals_names_no_cause():
    text = describe(Drift([stretch(400), stretch(900)], 500, Ratio(1.5, 1.4, 1.6)))
    assert text == "From about step 500 on, steps take 1.5 times as long as at the start."


def test_describe_denormals_that_cost_nothing():
    text = describe(Drift([stretch(400), stretch(900, 12_000)]))
    assert text is not None and text.startswith("From about step 900 on, 12,000 of 283,000")
    assert text.endswith("steps take no longer than at the start.")


def test_describe_few_denormals_is_none():
    assert describe(Drift([stretch(400, 10), stretch(900, 200)])) is None


@pytest.mark.parametrize(
    ("sizes", "grows"), [([100, 110, 120, 130, 140], True), ([100, 300, 300, 300, 300], False), ([100] * 5, False)]
)
def test_describe_memory_that_grows_in_every_stretch(sizes, grows):
    text = describe(Drift([stretch(100 * (i + 1), rss=rss) for i, rss in enumerate(sizes)]))
    assert text == (
        "The memory of the process grows from 110 MiB at step 200 to 140 MiB at step 500." if grows else None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_count_denormals_counts_cpu_floats_below_the_smallest_normal(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.tensor([0.0, -0.0, tiny, -tiny, tiny / 2, -tiny / 4, 1.0, float("nan"), float("inf")], dtype=dtype)
    elsewhere = torch.ones(3, dtype=dtype, device="meta")  # as on a GPU, which computes with them at full speed
    assert count_denormals([values, torch.ones(3, dtype=torch.int64), elsewhere]) == (2, 9)


def test_count_denormals_of_many_values_is_about_right():
    many = torch.cat([smallest_denormals(1 << 20), torch.ones(1 << 20)])
    assert count_denormals([many]) == (pytest.approx(1 << 20, rel=1e-4), 1 << 21)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_count_denormals_of_a_sparse_gradient_counts_the_stored_values():
    table = nn.Embedding(10, 4, sparse=True)
    (table(torch.tensor([3, 3, 5])) * smallest_denormals(1)).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert count_denormals([table.weight.grad, torch.ones(2, 2).to_sparse_csr()]) == (8, 8)


@pytest.mark.parametrize("column", range(2))
def test_count_denormals_of_a_column_in_rows_of_a_power_of_two_is_about_right(column):
    table = torch.ones(1 << 14, 1 << 7)
    table[:, column] = smallest_denormals(1)
    found, values = count_denormals([table])
    assert found == pytest.approx(1 << 14, rel=0.01) and values == 1 << 21


def test_count_denormals_of_many_short_tensors_is_about_right():
    short = torch.cat([smallest_denormals(1), torch.ones(20)])
    found, _ = count_denormals([torch.ones(1 << 21), *[short] * 100])
    assert found == pytest.approx(100, abs=10), "only the first value of each is denormal"


def test_advice_begins_with_the_remedy_of_a_problem():
    from hasten.engine.registry import cards_that_state

    cards = cards_that_state("applies_to")
    phases = {"forward": 0.3, "backward": 0.5, "optimizer_step": 0.2}
    remedy = next(name for name, card in cards.items() if "denormals" in card.remedy_for)
    found, _ = advise(phases, {"denormals": 1.1}, frozenset({"cpu"}), cards, frozenset({"denormals"}))
    assert found[0]["method"] == remedy and found[0]["why"].startswith("values of the training state are denormal")
    others, not_advised = advise(phases, {"denormals": 1.0}, frozenset({"cpu"}), cards)
    assert remedy not in [entry["method"] for entry in others]
    assert remedy in [entry["method"] for entry in not_advised]


@pytest.mark.parametrize(("steps", "ceiling"), [(400, {"denormals": 1.0}), (10_000, {}), (None, {})])
def test_denormals_ceiling_of_rows_without_denormals_is_known_at_the_end_only(steps, ceiling):
    assert _denormals_ceiling(Drift([stretch(200), stretch(390)]), steps) == ceiling
    assert _denormals_ceiling(Drift(), steps) == {}


class Planted(torch.optim.SGD):
    """An optimizer with denormal numbers in its state."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = smallest_denormals(parameter.numel()).view_as(parameter)
        return super().step(closure)


def with_planted_denormals() -> Task:
    return perceptron(optimizer=lambda model: Planted(model.parameters(), lr=0.1), epochs=1000)


@pytest.mark.slow
def test_measure_drift_counts_planted_denormals():
    drift = measure_drift(TaskRef.of(with_planted_denormals()), Recipe(), seconds=0.6, **CPU)
    assert drift.has_denormals and "(exp_avg) are denormal" in (describe(drift) or "")
    assert all(row.denormal["exp_avg"] == row.values["exp_avg"] == row.values["gradients"] for row in drift.rows)
    assert [row.step for row in drift.rows] == sorted({row.step for row in drift.rows})


def test_measure_drift_ends_with_the_training():
    task = perceptron(epochs=100)
    last = 100 * len(task.train_data) // task.batch_size
    drift = measure_drift(TaskRef.of(task), Recipe(), seconds=60.0, **CPU)
    assert len(drift.rows) > 3 and last / 2 < drift.rows[-1].step <= last + 1


class PlantedTraining:
    """A worker that imitates a training whose steps take the seconds of ``seconds_of(step)``, on a clock of its own.

    ``drift.start_workers`` and ``drift.time`` in one. The next worker is a fresh training on the same clock, or fails.
    """

    def __init__(
        self, seconds_of, steps: int | None = None, *, denormal_from: float = math.inf, flushed=None, failure: str = ""
    ):
        self.seconds_of, self.flushed, self.steps = seconds_of, flushed, steps
        self.denormal_from, self.failure = denormal_from, failure
        self.step, self.now, self.started = 0, [0.0], []

    def monotonic(self) -> float:
        return self.now[0]

    def start(self, processes, service, timeout=None, deadline=None, /, **arguments):
        self.started.append(deadline)
        return self if len(self.started) == 1 else self._fresh()

    def _fresh(self) -> "PlantedTraining":
        if self.failure:
            raise RunError(self.failure)
        self.fresh = PlantedTraining(self.seconds_of, self.steps)
        self.fresh.now = self.now
        return self.fresh

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def suspend(self) -> None:
        pass

    def call(self, method, **arguments):
        return getattr(self, method)(**arguments)

    def build(self):
        self.train(15)
        return {"step": self.seconds_of(0), "steps": self.steps}

    def peak_memory(self):
        return []

    def flush(self):
        self.seconds_of = self.flushed or self.seconds_of
        return self.flushed is not None

    def train(self, count):
        seconds = sum(map(self.seconds_of, range(self.step, self.step + count)))
        self.step, self.now[0] = self.step + count, self.now[0] + seconds
        return {"seconds": seconds}

    def state(self):
        self.train(1)
        denormal = 500 * (self.step >= self.denormal_from)
        return {"step": self.step, "denormal": {"exp_avg": denormal}, "values": {"exp_avg": 1000}, "rss": 0}


@pytest.fixture
def measure(monkeypatch):
    """``measure_drift`` of a planted training."""

    def measure(training: PlantedTraining, **limits) -> Drift:
        monkeypatch.setattr(drift_module, "start_workers", training.start)
        monkeypatch.setattr(drift_module, "time", training)
        return measure_drift(TaskRef.of(perceptron()), Recipe(), **CPU, **{"seconds": 10.0, **limits})

    return measure


def slower_from(step: int, ratio: float = 2.0):
    """Steps of 3 ms, which take ``ratio`` times as long from ``step`` on."""
    return lambda at: 0.003 * (ratio if at >= step else 1.0)


def test_measure_drift_passes_the_deadline_to_both_runs(measure):
    training = PlantedTraining(slower_from(800))
    assert measure(training, deadline=1e9).ratio is not None
    assert training.started == [1e9, 1e9]


def test_measure_drift_whose_fresh_run_fails_keeps_the_rows(measure):
    found = measure(PlantedTraining(slower_from(800), denormal_from=900, failure="out of memory"))
    assert len(found.rows) > 3 and found.ratio is None
    assert found.not_measured == "steps seem slower, but no fresh run confirms it: out of memory"
    assert (describe(found) or "").endswith("are denormal."), "it is not known whether steps take longer"


def test_measure_drift_without_memory_for_two_runs_builds_one(measure, monkeypatch):
    monkeypatch.setattr(drift_module, "fit_together", lambda *runs: False)
    training = PlantedTraining(slower_from(800))
    found = measure(training)
    assert len(found.rows) > 3 and "memory does not suffice" in found.not_measured and len(training.started) == 1


@pytest.mark.parametrize(("flushed", "gain"), [(lambda at: 0.003, 2.0), (slower_from(800), None), (None, None)])
def test_measure_drift_of_denormals_compares_with_zeros(measure, flushed, gain):
    found = measure(PlantedTraining(slower_from(800), denormal_from=900, flushed=flushed))
    assert found.denormals_gain == (gain and pytest.approx(gain))
    assert (describe(found) or "").endswith("steps take 2.0 times as long as at the start.")
    assert ("are denormal; steps take" in (describe(found) or "")) == (gain == 2.0)


def test_measure_drift_interval_contains_the_spread_of_processes(measure):
    ratio = measure(PlantedTraining(slower_from(800))).ratio
    assert ratio.low < 2.0 * 0.95 and ratio.high > 2.0 * 1.05


@pytest.mark.parametrize("seconds", [10.0, 1000.0])
def test_measure_drift_with_any_budget_finds_what_begins_early(measure, seconds):
    training = PlantedTraining(slower_from(800), denormal_from=900, flushed=slower_from(800))
    found = measure(training, seconds=seconds)
    assert found.ratio is not None and 700 < (found.slow_from or 0) < 900
    assert training.fresh.step <= 15 + 300, "the fresh run must not become slow itself"


def test_measure_drift_of_equal_steps_needs_no_fresh_run(measure):
    training = PlantedTraining(slower_from(800, ratio=1.0))
    assert measure(training).ratio is None and len(training.started) == 1


def test_seconds_of_steps_of_rows_that_slow_down_extend_the_last_one():
    rows = [replace(stretch(1000), seconds_per_step=0.003), replace(stretch(2000), seconds_per_step=0.006)]
    assert Drift(rows).seconds_of_steps(10_000) == pytest.approx(3.0 + 54.0)
    assert Drift(rows).seconds_of_steps(500) == pytest.approx(1.5)
    assert Drift(rows).seconds_of_steps(None) is None and Drift().seconds_of_steps(500) is None


@pytest.mark.parametrize("slow_from", [800, 2000, 100_000])
def test_seconds_of_steps_of_a_planted_training_are_right_within_10_percent(measure, slow_from):
    seconds_of, steps = slower_from(slow_from), 20_000
    predicted = measure(PlantedTraining(seconds_of, steps)).seconds_of_steps(steps)
    assert predicted == pytest.approx(sum(map(seconds_of, range(steps))), rel=0.1)


@pytest.mark.slow
def test_diagnose_begins_its_advice_with_the_denormals():
    result = diagnose(with_planted_denormals(), budget=5.0)
    assert "denormal" in result["drift"]["text"] and len(result["drift"]["rows"]) > 2
    # first where tests have one thread each
    others = [one for one in result["advice"] if one["method"] != "num_threads"]
    assert others[0]["why"].startswith("values of the training state are denormal")


class Slept(nn.Module):
    """A network whose forward pass takes 2 ms longer from step 500 on."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = perceptron().model(), 0

    def forward(self, x):
        self.calls += self.training
        if self.calls > 500:
            time.sleep(0.002)
        return self.net(x)


class Grown(Slept):
    """A network that keeps a tensor of every step, and reads all of them."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        if self.training:
            self.kept.append(torch.ones(50_000))
        return self.net(x) + 0 * sum(float(kept[0]) for kept in self.kept)


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize(("model", "words"), [(Slept, "From about step"), (Grown, "the memory of the process grows")])
def test_measure_drift_of_a_planted_drift(model, words):
    drift = measure_drift(TaskRef.of(perceptron(model=model, epochs=10_000)), Recipe(), seconds=8.0, **CPU)
    assert words in (describe(drift) or "") and drift.ratio is not None and "denormal" not in (describe(drift) or "")
    assert model is Grown or 400 <= (drift.slow_from or 0) <= 700


def test_drift_probe_that_flushes_computes_with_zeros():
    probe = DriftProbe(TaskRef.of(perceptron()), methods={}, **CPU)
    try:
        assert probe.flush() and flushes_denormals()
    finally:
        set_flush_denormals(False)


@pytest.mark.timing
@pytest.mark.slow
def test_measure_drift_of_a_sleep_beside_planted_denormals_names_no_cause():
    task = perceptron(model=Slept, optimizer=lambda model: Planted(model.parameters(), lr=0.1), epochs=10_000)
    found = measure_drift(TaskRef.of(task), Recipe(), seconds=8.0, **CPU)
    assert found.ratio is not None and found.flushed is not None and found.denormals_gain is None
    assert "are denormal; from about step" in (describe(found) or "")


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_measure_drift_of_a_steady_training_finds_none(seed):
    drift = measure_drift(TaskRef.of(perceptron(epochs=10_000)), Recipe(), device="cpu", seed=seed, seconds=6.0)
    assert describe(drift) is None


def test_progress_of_a_diagnosis_never_goes_back():
    seen = []
    diagnose(perceptron(), budget=4.0, device="cpu", on_progress=lambda what, done, left: seen.append(done))
    assert len(seen) > 3 and seen == sorted(seen)
