"""What a server refuses: requests that would exhaust the memory, numbers that JSON cannot hold, models of elsewhere."""

import asyncio
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from fastapi import FastAPI

from hasten import ConfigurationError
from hasten.deploy.export import export_model
from hasten.deploy.onnx_model import OnnxModel
from hasten.deploy.signature import Signature
from hasten.serving import app, batcher, models, server
from hasten.serving.app import MIN_BODY_LIMIT, body_limit
from hasten.serving.inputs import RequestError, parse_json, zero_inputs


def signature_for(dtype="float32", shape=("batch", 2), sizes=None):
    """The signature of a model with one input."""
    of_input = {"name": "x", "dtype": dtype, "shape": shape}
    scores = {"name": "scores", "dtype": "float32", "shape": ("batch", 3)}
    return Signature(task="a", inputs=(of_input,), outputs=(scores,), sizes=sizes or {})


def body_of(value):
    return json.dumps({"inputs": value}).encode()


@pytest.mark.parametrize("number", [2**53, 2**63 - 1, 2**63, -(2**53)])
def test_whole_number_that_would_be_rounded_is_refused(number):
    with pytest.raises(RequestError, match=r"int64|beyond 9007199254740991") as refused:
        parse_json(body_of([[number, 1]]), signature_for("int64"))
    assert refused.value.status == 422


@pytest.mark.parametrize("value", [-10000.0, 0.3, 2])
def test_number_in_the_place_of_true_or_false_is_refused(value):
    with pytest.raises(RequestError, match="x must be true or false"):
        parse_json(body_of([[0, value]]), signature_for("bool"))
    assert parse_json(body_of([[True, 0]]), signature_for("bool"))[0].tolist() == [[True, False]]


def test_largest_exact_whole_number_arrives():
    (array,) = parse_json(body_of([[2**53 - 1, 1 - 2**53]]), signature_for("int64"))
    assert array.tolist() == [[2**53 - 1, 1 - 2**53]]


def test_sample_much_larger_than_those_of_the_validation_is_refused():
    signature = signature_for(shape=("batch", "x_1", 2), sizes={"x_1": 10})
    assert parse_json(body_of([[[0.0, 0.0]] * 40]), signature)[0].shape == (1, 40, 2)
    with pytest.raises(
        RequestError, match=r"82 values; at most 80 are computed; .* sizes in its signature\.json"
    ) as refused:
        parse_json(body_of([[[0.0, 0.0]] * 41]), signature)
    assert refused.value.status == 413
    assert parse_json(body_of([[[0.0, 0.0]] * 41]), signature_for(shape=("batch", "x_1", 2)))[0].size == 82


def test_one_sample_as_json_fits_into_a_body():
    shape = (3, 512, 512)
    limit = body_limit(signature_for(shape=("batch", *shape)))
    sample = numpy.random.default_rng(0).standard_normal(shape, dtype=numpy.float32).astype(float)
    assert len(body_of([sample.tolist()])) <= limit < 40_000_000
    assert body_limit(signature_for()) == body_limit(signature_for(shape=("batch", "x_1"))) == MIN_BODY_LIMIT


@pytest.mark.parametrize(("samples", "in_event_loop"), [(2, True), (1024, False)])
def test_large_bodies_are_parsed_in_a_thread(samples, in_event_loop, monkeypatch):
    body = body_of([[0.12345678901234567] * 64] * samples)
    threads, parse = [], app.parse_json
    monkeypatch.setattr(app, "parse_json", lambda *args: threads.append(threading.current_thread()) or parse(*args))
    (array,) = asyncio.run(app._parse({}, body, signature_for(shape=("batch", 64)), asyncio.Semaphore(1)))
    assert array.shape == (samples, 64)
    assert (threads == [threading.main_thread()]) is in_event_loop


@pytest.mark.parametrize(("length", "is_shown"), [(10, True), (160_000, False)])
def test_example_is_shown_if_it_is_short(length, is_shown):
    signature = signature_for(shape=("batch", "x_1"), sizes={"x_1": length})
    assert app.example_inputs(signature) == ([[0.0] * length] if is_shown else None)
    page = server.make_page(SimpleNamespace(signature=signature), False)
    described = app._describe(FastAPI(), signature)["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert ("example" in described["application/json"]) is ("0.0, 0.0" in page) is is_shown
    assert len(page) < 10_000 and len(json.dumps(described)) < 1000


def test_batches_that_take_long_are_not_measured_further(monkeypatch):
    monkeypatch.setattr(batcher, "MAX_BATCH_S", 0.0)
    monkeypatch.setattr(batcher, "SECONDS_PER_SIZE", 0.0)
    signature, seen = signature_for(shape=("batch", "x_1"), sizes={"x_1": 7}), []
    assert list(batcher.measure_batches(lambda inputs: seen.append(inputs[0].shape), signature)) == [1]
    assert set(seen) == {(1, 7)}


def copied(exported, directory, **changes):
    """A copy of an exported model whose signature is changed."""
    directory.mkdir()
    shutil.copyfile(exported / "model.onnx", directory / "model.onnx")
    signature = json.loads((exported / "signature.json").read_text()) | changes
    (directory / "signature.json").write_text(json.dumps(signature))
    return directory


def test_int8_model_whose_sums_would_saturate_is_refused(exported, tmp_path, monkeypatch):
    directory = copied(exported, tmp_path / "int8", needs_vnni=True)
    monkeypatch.setattr(models, "has_vnni", lambda: True)
    models.ServedModel(directory)
    monkeypatch.setattr(models, "has_vnni", lambda: False)
    with pytest.raises(ConfigurationError, match="which has no VNNI; quantize the run on such a machine"):
        models.ServedModel(directory)


def test_model_computes_no_larger_batch_than_its_own_limit(exported, tmp_path, monkeypatch):
    model = models.ServedModel(copied(exported, tmp_path / "dynamic", max_batch=2))
    expected = OnnxModel(exported / "model.onnx").run(zero_inputs(model.signature, 5))
    run, sizes = OnnxModel.run, []
    monkeypatch.setattr(OnnxModel, "run", lambda self, arrays: sizes.append(len(arrays[0])) or run(self, arrays))
    assert numpy.allclose(model.run(zero_inputs(model.signature, 5)), expected) and sizes == [2, 2, 1]


def test_error_of_any_class_does_not_end_the_reload(exported, monkeypatch):
    def fail(*args):
        raise ValueError("a\nb")

    lines = []
    holder = models.ModelHolder(models.ServedModel(exported), lines.append)
    monkeypatch.setattr(models, "ServedModel", fail)
    holder._reload((None, None))
    assert holder.failures == 1 and lines[0].endswith("still answers: ValueError: a b")


def test_files_of_an_export_are_not_taken_for_a_run(exported, tmp_path):
    export_model(exported, out=tmp_path)
    weights, model = (tmp_path / name for name in ("model.safetensors", "model.onnx"))
    assert weights.stat().st_mtime_ns <= model.stat().st_mtime_ns
    os.utime(weights, (model.stat().st_mtime + 10,) * 2)
    lines = []
    assert server.model_directory(tmp_path, lines.append) == tmp_path and not lines


SHOW = """
const shown = [];
const document = {createElement: () => ({style: {}, cells: [], append(...cells) { this.cells = cells; }})};
const $ = () => ({replaceChildren: (...rows) => shown.push(rows.map(row => row.cells.map(cell => cell.textContent)))});
const classes = null;
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here")
@pytest.mark.parametrize(
    ("scores", "shares"),
    [("2.5", ["2.500"]), ("[2.5]", ["2.500"]), ("[0, 0]", ["50.0 %"] * 2), ("[[1, 2], [3, 4]]", None)],
)
def test_page_shows_shares_of_classes_only(scores, shares):
    page = (Path(server.__file__).parent / "page.html.j2").read_text()
    show = page[page.index("function show") : page.index('$("send")')]
    script = f"{SHOW}{show}show({scores}); console.log(JSON.stringify(shown[0]))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert [row[2] for row in json.loads(done.stdout)] == (shares or ["1.000", "2.000", "3.000", "4.000"])
