"""Training from pipelines: the same bits with any runner and after any kill, and with other trainers."""

import time

import pytest
import torch

import hasten
from hasten import ConfigurationError, RunError
from hasten.data import arrays, convert, csv, webdataset
from hasten.engine import data_adapters
from hasten.engine.plan import build
from helpers import pipeline_tasks
from helpers.process import join_process, start_process, wait_until_it_trains


def weights(directory):
    return (directory / "model.safetensors").read_bytes(), (directory / "log.jsonl").read_bytes()


def test_train_every_runner_gives_the_same_bits(tmp_path):
    for name in ("here", "threads", "processes"):
        result = hasten.train(f"{pipeline_tasks.__file__}:{name}", out=tmp_path / name, device="cpu")
        assert result["steps"] == 24
    assert weights(tmp_path / "here") == weights(tmp_path / "threads") == weights(tmp_path / "processes")


def run(out, end):
    def wait(records):  # near the end, for a test that kills the run
        if records[-1]["step"] >= 140 and end == "to be killed":
            time.sleep(60)

    hasten.train(pipeline_tasks.longer(), out=out, resume=True, device="cpu", checkpoint_seconds=0, observers=[wait])


def test_train_killed_run_resumes_to_the_same_bits(tmp_path):
    for pause in (0.3, 0.25):
        process = start_process(run, tmp_path / "killed", "to be killed")
        wait_until_it_trains(process, tmp_path / "killed")
        time.sleep(pause)
        assert process.is_alive(), "the run was over before it could be killed"
        process.kill()
        process.join()
    for directory in ("killed", "undisturbed"):
        assert join_process(start_process(run, tmp_path / directory, "not killed")) == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "undisturbed")


def test_train_validation_is_unshuffled_and_constant():
    task = data_adapters.load_data(pipeline_tasks.here())
    for seed in (0, 1):
        (labels,) = [torch.cat([labels for _, labels in data_adapters.validation(task, 8, seed).epoch(0, 0)])]
        assert torch.equal(labels, pipeline_tasks.LABELS)
    first, second = (list(data_adapters.validation(task, 8, seed).epoch(0, 0)) for seed in (0, 1))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True)), (
        "random maps draw the same at every evaluation"
    )


def test_train_plan_of_a_pipeline():
    plan = data_adapters.initial_plan(data_adapters.load_data(pipeline_tasks.here()))
    assert (plan.batch_size, plan.samples) == (8, pipeline_tasks.ROWS)
    bare = arrays(pipeline_tasks.NUMBERS, pipeline_tasks.LABELS).shuffle()
    program = build(pipeline_tasks.task(bare, batch_size=12))
    assert (program.plan.batch_size, program.plan.steps) == (12, 16)
    with pytest.raises(ConfigurationError, match=r"batch_size=\) is missing"):
        build(pipeline_tasks.task(bare))


def table_of(path, words):
    path.write_text("x,word\n" + "".join(f"{number},{word}\n" for number, word in enumerate(words)))
    return path


@pytest.mark.parametrize("where", [None, "memory", "disk"])
def test_train_text_targets_numbered_differently_are_refused(tmp_path, monkeypatch, where):
    """Each table numbers the values in its own files: one that is missing would shift all later numbers."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))

    def loaded(train, validation, **options):
        files = table_of(tmp_path / "a.csv", train), table_of(tmp_path / "b.csv", validation)
        pipelines = [csv(file, target="word", **options) for file in files]
        if where is not None:
            pipelines = [pipeline.map(lambda sample: sample).cache(where) for pipeline in pipelines]
        data_adapters.load_data(pipeline_tasks.task(pipelines[0], validation_data=pipelines[1]))
        return pipelines[1].classes

    with pytest.raises(ConfigurationError, match=r"classes differently: c is 2 and 1; .* the same classes="):
        loaded("abc", "ac")
    assert loaded("abc", "ab") == ["a", "b"]
    assert loaded("abc", "ac", classes=["a", "b", "c"]) == ["a", "b", "c"]


def test_train_classes_that_cannot_be_read_fail_when_the_rows_are_read(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
    pipelines = [csv(table_of(tmp_path / name, "ab"), target="word").batch(2) for name in ("a.csv", "b.csv")]
    table_of(tmp_path / "b.csv", "abc")
    task = data_adapters.load_data(pipeline_tasks.task(pipelines[0], validation_data=pipelines[1]))
    with pytest.raises(RunError, match=r"b\.csv changed while it was being read"):
        next(data_adapters.validation(task, 2, 0).epoch(0, 0))


def test_train_without_validation_data_does_not_read_the_classes(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
    pipeline = csv(table_of(tmp_path / "a.csv", "ab"), target="word").batch(2)
    data_adapters.load_data(pipeline_tasks.task(pipeline, validation_data=None))
    assert "classes" not in vars(pipeline.source)


def test_train_columns_in_another_order_are_refused(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
    (tmp_path / "a.csv").write_text("age,income,y\n1,2,0\n")
    (tmp_path / "b.csv").write_text("income,age,y\n2,1,0\n")
    train, validation = (csv(tmp_path / name, target="y") for name in ("a.csv", "b.csv"))
    with pytest.raises(ConfigurationError, match="'age' and 'income' in one place"):
        data_adapters.load_data(pipeline_tasks.task(train.batch(1), validation_data=validation))
    chosen = csv(tmp_path / "b.csv", columns=["age", "income"], target="y")
    data_adapters.load_data(pipeline_tasks.task(train.batch(1), validation_data=chosen))


@pytest.mark.parametrize("to", ["rows", "webdataset"])
def test_converted_data_that_number_classes_differently_are_refused(tmp_path, to):
    images_of = pytest.importorskip("PIL.Image", reason="Pillow is not installed: no images")
    for part, names in {"a": ("cat", "dog", "eel"), "b": ("cat", "eel")}.items():
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            images_of.new("RGB", (8, 8)).save(tmp_path / part / name / "x.png")
        convert(tmp_path / part, tmp_path / f"{part}-out", to=to)
    outs = tmp_path / "a-out", tmp_path / "b-out"
    if to == "webdataset":
        train, validation = (webdataset(out, target="cls") for out in outs)
    else:
        train, validation = (arrays(out / "images.npy", out / "labels.npy") for out in outs)
    with pytest.raises(ConfigurationError, match="classes differently: eel is 2 and 1"):
        data_adapters.load_data(pipeline_tasks.task(train.batch(2), validation_data=validation))
