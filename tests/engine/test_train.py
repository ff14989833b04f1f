"""``train``: its result, its files, and its messages when the run cannot continue."""

import dataclasses
import json
import math
import signal
import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hasten
from hasten import ConfigurationError, RunError, Task
from hasten.core.errors import HastenWarning
from hasten.engine import signals
from hasten.utils.targets import first_sustained_target
from helpers import engine_tasks

x, y = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


def train(task, recipe=None, **options):
    return hasten.train(task, recipe, device="cpu", **options)


def test_result_agrees_with_the_run_directory(tmp_path):
    result = train(engine_tasks.evaluated_often(), out=tmp_path / "r")
    assert json.loads((tmp_path / "r" / "result.json").read_text()) == result
    log = [json.loads(line) for line in (tmp_path / "r" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log if "loss" in record] == list(range(1, 13))
    seen = [record["samples"] for record in log if "metric" in record]
    assert seen == [8, 16, 24, 28, 36, 44, 48]  # the steps at which multiples of 7 are crossed, and the last step
    assert [each["samples"] for each in result["evaluations"]] == seen
    assert result["metric"] == log[-1]["metric"]
    assert sum(result["split"].values()) == pytest.approx(result["seconds"])
    assert all(math.isfinite(part) and part >= 0 for part in result["split"].values())
    environment = json.loads((tmp_path / "r" / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert (tmp_path / "r" / "recipe.toml").read_text().strip() in ("", "[methods]")


def test_unnamed_metric_function_is_named_in_the_result():
    assert train(engine_tasks.map_style())["metric_name"] == "accuracy"


def test_torchmetrics_metric_equals_metric_by_name():
    """It is reset for every evaluation."""
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")
    by_name, by_torchmetrics = (
        train(engine_tasks.evaluated_often()),
        train(dataclasses.replace(engine_tasks.evaluated_often(), metric=metric)),
    )
    assert by_torchmetrics["metric_name"] == "MulticlassAccuracy"
    assert [e["metric"] for e in by_torchmetrics["evaluations"]] == pytest.approx(
        [e["metric"] for e in by_name["evaluations"]], abs=1e-6
    )
    assert by_torchmetrics["reached"] == by_name["reached"] and by_torchmetrics["best_metric"] == pytest.approx(
        by_name["best_metric"], abs=1e-6
    )


def test_log_of_a_run_failing_at_step_1_is_empty(tmp_path):
    with pytest.raises(RunError, match="the loss is nan at step 1"):
        train(engine_tasks.task(TensorDataset(x * math.nan, y)), out=tmp_path / "r")
    assert (tmp_path / "r" / "log.jsonl").read_bytes() == b""


def test_losses_waiting_for_the_log_keep_no_graph():
    """The graph of a loss is freed with the next loss, not when the log is written."""
    remembered = []

    class Remembering(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            ctx.activations = torch.zeros(3)
            remembered.append(weakref.ref(ctx.activations))
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            assert sum(each() is not None for each in remembered) <= 2
            return gradient

    def loss(output, target):
        return Remembering.apply(torch.nn.functional.cross_entropy(output, target))

    for recipe in ("baseline", "gradient_accumulation"):
        task = engine_tasks.task(TensorDataset(x, y), validation_data=None)
        assert train(dataclasses.replace(task, loss=loss, model=lambda: torch.nn.Linear(6, 3)), recipe)["steps"] == 12


def test_train_without_out_gives_the_same_and_writes_nothing(tmp_path, monkeypatch):
    with_directory = train(engine_tasks.map_style(), out=tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    without = train(engine_tasks.map_style())
    assert sorted(tmp_path.rglob("*")) == before
    assert without["out"] is None
    assert [e["metric"] for e in without["evaluations"]] == [e["metric"] for e in with_directory["evaluations"]]


def test_stream_of_unknown_length_is_evaluated_after_each_epoch():
    assert [e["samples"] for e in train(engine_tasks.stream())["evaluations"]] == [24, 48]


def test_exported_weights_are_those_of_the_model(tmp_path):
    def tied():
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 3))
        model[1].weight = model[0].weight
        return model

    task = Task(
        model=tied,
        train_data=TensorDataset(x, y),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1),
        batch_size=4,
    )
    result = train(task, out=tmp_path / "r")
    weights = load_file(tmp_path / "r" / "model.safetensors")
    assert "0.weight" in weights
    assert "1.weight" not in weights
    assert result["metric"] is None  # no validation data
    from safetensors.torch import load_model

    assert load_model(tied(), tmp_path / "r" / "model.safetensors") == (set(), [])


@pytest.mark.parametrize(
    ("metrics", "target", "higher", "at"),
    [
        ([0.5, 0.9, 0.8, 0.9, 0.91], 0.9, True, 3),
        ([0.5, 0.8, 0.9], 0.9, True, 2),
        ([0.9, 0.5], 0.9, True, None),
        ([2.0, 0.9, 0.8], 1.0, False, 1),
        ([None, 1.0, None, 1.0], 1.0, True, 3),
        ([1.0, 1.0], None, True, None),
        ([], 0.5, True, None),
    ],
)
def test_target_reached_and_held(metrics, target, higher, at):
    assert first_sustained_target(metrics, target, higher) == at


def test_target_never_reached_is_a_result():
    result = train(engine_tasks.task(engine_tasks.Augmented(), target=2.0))
    assert result["reached"] is False
    assert result["seconds_to_target"] is None


def test_observers_get_plain_numbers_and_one_record_per_step():
    records = []
    train(engine_tasks.map_style(), observers=[records.extend])
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 13))
    assert all(type(value) in (int, float) for record in records for value in record.values())


def test_train_reports_progress():
    reports = []
    train(engine_tasks.longer(), on_progress=lambda what, done, left: reports.append((what, done)))
    assert reports
    assert all(what == "training" and 0 <= done <= 1 for what, done in reports)
    assert reports == sorted(reports)


class Bad(Dataset):
    """Sample 10 is bad in the given way."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index != 10:
            return x[index], y[index]
        if self.how == "raises":
            raise KeyError("missing.png")
        return (x[index] * math.nan, y[index]) if self.how == "nan" else (x[index], torch.tensor(7))


def in_workers(how):
    return DataLoader(Bad(how), batch_size=4, num_workers=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            lambda: DataLoader(Bad("nan"), batch_size=4),
            r"the loss is nan at step 3 \(epoch 1, batch 3\): the batch itself holds NaN",
        ),
        (
            lambda: DataLoader(Bad("label"), batch_size=4),
            r"step 3 \(epoch 1, batch 3\).*Target 7 is out of bounds.*label outside",
        ),
        (lambda: Bad("nan"), r"the loss is nan at step \d+ \(epoch 1, batch \d+\): the batch itself holds NaN"),
        (lambda: Bad("raises"), r"sample 10: KeyError: 'missing.png'"),
        (lambda: in_workers("raises"), r"missing.png"),
    ],
)
def test_bad_data_are_one_error_line(data, message):
    with pytest.raises(RunError, match=message) as caught:
        train(engine_tasks.task(data(), validation_data=TensorDataset(x, y)))
    assert "\n" not in str(caught.value)


def test_raising_dataset_in_a_worker_names_the_index():
    with pytest.raises(RunError, match=r"sample 10: KeyError: 'missing.png'"):
        train(engine_tasks.task(Bad("raises"), validation_data=TensorDataset(x, y)), "loader_workers:num_workers=1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"validation_data": Bad("nan"), "metric": "loss"},
            "the metric is nan after step 6: batch 3 of the validation data holds NaN",
        ),
        (
            {"metric": lambda output, target: math.nan, "higher_is_better": True},
            "the metric is nan after step 6: the validation data are finite",
        ),
    ],
)
def test_nan_metric_ends_the_run(changes, message):
    with pytest.raises(RunError, match=message):
        train(engine_tasks.task(TensorDataset(x, y), **({"validation_data": TensorDataset(x, y)} | changes)))


def test_infinite_metric_is_accepted():
    task = engine_tasks.task(TensorDataset(x, y), metric=lambda output, target: math.inf, higher_is_better=False)
    assert train(task)["metric"] is None


def test_infinite_frozen_weights_are_accepted(tmp_path):
    class Masked(torch.nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.mask = torch.nn.Parameter(torch.full((3,), -math.inf), requires_grad=False)

    task = Task(**{**vars(engine_tasks.map_style()), "model": Masked})
    assert train(task, out=tmp_path / "r", checkpoint_seconds=0)["steps"] == 12
    assert len(list((tmp_path / "r" / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("target", [math.nan, math.inf, True, "0.9"])
def test_target_that_is_not_finite_is_refused(target):
    with pytest.raises(ConfigurationError, match=r"Task\(target=\) must be a finite number"):
        engine_tasks.task(TensorDataset(x, y), target=target)


def test_divergence_is_not_blamed_on_the_data(tmp_path):
    task = engine_tasks.task(TensorDataset(x, y))
    wild = Task(
        **{
            **vars(task),
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e38),
            "model": lambda: torch.nn.Linear(6, 3),
        }
    )
    with pytest.raises(RunError, match="the training diverged"):
        train(wild, out=tmp_path / "r", checkpoint_seconds=0)
    from hasten.engine.checkpoint import load_checkpoint

    for path in (tmp_path / "r" / "checkpoints").iterdir():
        assert all(bool(value.isfinite().all()) for value in load_checkpoint(path)["model"].values())


def test_wrong_shapes_are_one_error_line():
    task = engine_tasks.task(TensorDataset(x[:, :5], y))
    with pytest.raises(
        RunError, match=r"step 1 \(epoch 1, batch 1\) failed: RuntimeError: .*shapes cannot be multiplied"
    ):
        train(task)


def test_out_of_memory_names_remedies():
    def out_of_memory(output, target):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RunError, match=r"out of memory at step 1 .* batches of 4.*gradient_accumulation"):
        train(Task(**{**vars(engine_tasks.map_style()), "loss": out_of_memory}))


def pairs():
    yield from TensorDataset(x, y)


def test_generator_function_is_called_for_each_epoch():
    result = train(engine_tasks.task(pairs, validation_data=pairs))
    assert result["steps"] == 2 * -(-len(x) // 4) and len(result["evaluations"]) == 2


class OwnLoss(torch.nn.Linear):
    """Returns its scores and its loss, in one order or the other."""

    def __init__(self, loss_first):
        super().__init__(6, 3)
        self.loss_first = loss_first

    def forward(self, x, y):
        scores = super().forward(x)
        both = scores, torch.nn.functional.cross_entropy(scores, y)
        return both[::-1] if self.loss_first else both


def test_loss_and_scores_of_a_model_may_come_in_either_order():
    data = TensorDataset(x, y)
    results = [
        train(engine_tasks.task(data, validation_data=data, model=partial(OwnLoss, first), loss=None))
        for first in (True, False)
    ]
    metrics = [[row["metric"] for row in result["evaluations"]] for result in results]
    assert metrics[0] == metrics[1] and len(set(metrics[0])) == 2


def test_dropout_of_a_model_that_is_left_in_evaluation_mode_is_named():
    with pytest.warns(HastenWarning, match="Sequential of the model is in evaluation mode.*its dropout does nothing"):
        train(engine_tasks.task(engine_tasks.Augmented(), model=lambda: engine_tasks.model().eval()))


def with_a_bare_schedule(model):
    return torch.optim.SGD(model.parameters(), lr=0.1), SimpleNamespace(step=lambda: None)


def test_schedule_without_a_state_is_refused_where_a_checkpoint_needs_it(tmp_path):
    task = engine_tasks.task(engine_tasks.Augmented(), optimizer=with_a_bare_schedule)
    assert train(task)["steps"] == 12
    with pytest.raises(ConfigurationError, match="a SimpleNamespace, has no state_dict and load_state_dict"):
        train(task, out=tmp_path / "run")


def test_exhausted_generator_is_reported():
    task = engine_tasks.task(pair for pair in TensorDataset(x, y))
    with pytest.raises(RunError, match=r"no batch in epoch 2; a generator can be read only once"):
        train(task)


class NoSamples(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


def test_empty_stream_is_reported():
    with pytest.raises(RunError, match="the training data gave no batch: they are empty"):
        train(engine_tasks.task(NoSamples()))


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 3)])
def test_stop_request_saves_and_states_how_to_resume(number, times, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "DEBOUNCE_S", 60.0)  # otherwise the third request may arrive late on a busy machine

    def request_stop(records):
        if records[-1]["step"] == 50 and "loss" in records[-1]:
            for _ in range(times):  # repeated Ctrl-C
                signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(RunError, match=r"stopped at step 5\d of 72; resume with --out \S+ --resume"):
        train(engine_tasks.longer(), out=tmp_path / "r", observers=[request_stop])
    assert signal.getsignal(number) == before
    assert train(engine_tasks.longer(), out=tmp_path / "r", resume=True)["steps"] == 72
    train(engine_tasks.longer(), out=tmp_path / "undisturbed")
    for name in ("model.safetensors", "log.jsonl"):
        assert (tmp_path / "r" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_second_stop_request_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "DEBOUNCE_S", 0.0)

    def request_stop(records):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunError, match="stopped at once; resume from the newest checkpoint"):
        train(engine_tasks.longer(), out=tmp_path / "r", observers=[request_stop])


def test_invalid_methods_are_reported_before_an_existing_directory(tmp_path):
    (tmp_path / "something").write_text("")
    with pytest.raises(ConfigurationError, match="holds no run"):
        train(engine_tasks.map_style(), "ema", out=tmp_path)
    with pytest.raises(ConfigurationError, match="did you mean bfloat16"):
        train(engine_tasks.map_style(), "bfloat61", out=tmp_path)
    with pytest.raises(ConfigurationError, match="both replace data"):
        train(engine_tasks.map_style(), "in_memory_batches + cache_dataset", out=tmp_path)


def test_begun_callback_is_called_after_the_directory_holds_the_run(tmp_path):
    """Otherwise a launcher that restarts a lost rank would resume another run."""
    reports = []
    train(
        engine_tasks.map_style(),
        out=tmp_path / "r",
        begun=lambda out: reports.append((tmp_path / "r/environment.json").exists()),
    )
    assert reports == [True]
    with pytest.raises(ConfigurationError, match="already holds a run"):
        train(engine_tasks.map_style(), out=tmp_path / "r", begun=lambda out: reports.append("again"))
    assert reports == [True]


def test_unknown_metric_is_refused_before_writing(tmp_path):
    with pytest.raises(ConfigurationError, match="did you mean accuracy"):
        train(engine_tasks.task(TensorDataset(x, y), metric="acuracy"), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_metric_that_returns_text_is_refused():
    task = engine_tasks.task(TensorDataset(x, y), metric=lambda output, target: "good", higher_is_better=True)
    with pytest.raises(ConfigurationError, match="must return one number"):
        train(task)


def test_observer_that_fails_is_named():
    def counting(records):
        return records[0]["losss"]

    with pytest.raises(KeyError, match="losss") as raised:
        train(engine_tasks.map_style(), observers=[counting])
    (note,) = raised.value.__notes__
    assert note.startswith("raised by the observer") and note.endswith("counting")


@pytest.mark.parametrize("observers", [print, ["print"]])
def test_observers_that_are_no_list_of_functions_are_refused(observers):
    with pytest.raises(ConfigurationError, match=r"write observers=\[function\]"):
        train(engine_tasks.map_style(), observers=observers)
