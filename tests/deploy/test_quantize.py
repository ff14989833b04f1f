"""Quantization: what loses too much is refused with its loss, and what passes is what was measured."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from hasten import ConfigurationError
from hasten.core.progress import no_progress
from helpers.deployed import depthwise_digits, plant_outliers
from helpers.process import run_hasten

pytest.importorskip("onnxruntime")

from hasten.benchmarking.ratio import Ratio
from hasten.deploy import candidates
from hasten.deploy import quantize as quantize_module
from hasten.deploy.onnx_model import OnnxModel
from hasten.deploy.quantize import quantize
from hasten.deploy.signature import read_signature
from hasten.deploy.trained_model import load_trained_model, predictor_of

BUDGET_S = 20.0


@pytest.fixture(scope="module")
def outliers(depthwise_run, tmp_path_factory):
    """The result of quantizing the depthwise network with an outlier channel, and its directory."""
    run = tmp_path_factory.mktemp("outliers") / "run"
    shutil.copytree(depthwise_run, run)
    plant_outliers(run)
    return quantize(run, depthwise_digits, budget=BUDGET_S), run


@pytest.mark.slow
def test_planted_outliers_are_refused_per_tensor_and_taken_per_channel(outliers):
    result, _ = outliers
    trials = {trial["name"]: trial for trial in result["trials"]}
    assert not trials["static per tensor, minmax"]["passed"] and trials["static per tensor, minmax"]["loss"] > 0.02
    assert not trials["dynamic per tensor"]["passed"]
    assert trials["static per channel, minmax"]["passed"] and "per tensor" not in result["chosen"]["name"]


@pytest.mark.slow
def test_chosen_model_has_the_metric_and_size_of_its_trial(outliers):
    result, run = outliers
    model = OnnxModel(run / "int8" / "model.onnx")
    trained = load_trained_model(run, depthwise_digits)
    assert (
        trained.evaluate(predictor_of(model)) == result["chosen"]["metric"] == read_signature(run / "int8").metric.value
    )
    assert model.bytes == result["chosen"]["bytes"] < 0.5 * result["float"]["bytes"]
    stored = json.loads((run / "int8" / "result.json").read_text())
    assert stored["chosen"] == result["chosen"] and min(result["peak_memory_bytes"].values()) > 0


def depthwise_node(trained, directory):
    """The name of the depthwise convolution in the model that is quantized."""
    quantize_module.export_onnx(trained, directory / "float.onnx")
    candidates.prepare(directory / "float.onnx", directory / "prepared.onnx")
    nodes = pytest.importorskip("onnx").load(directory / "prepared.onnx").graph.node
    return next(node.name for node in nodes for value in node.attribute if value.name == "group" and value.i == 16)


@pytest.mark.slow
def test_layer_that_hurts_is_found_and_kept_in_float(outliers, monkeypatch, tmp_path):
    per_tensor = [one for one in candidates.CANDIDATES if one.kind == "static" and not one.per_channel]
    monkeypatch.setitem(quantize_module.TARGETS, "cpu", tuple(per_tensor))
    _, run = outliers
    found = quantize(run, depthwise_digits, budget=BUDGET_S, out=run / "mixed")
    worst = max(found["layers"], key=found["layers"].get)
    model = load_trained_model(run, depthwise_digits)
    assert found["layers"][worst] > 0.02 and found["chosen"]["passed"]
    assert found["chosen"]["in_float"][0] == worst == depthwise_node(model, tmp_path)
    assert model.evaluate(predictor_of(OnnxModel(run / "mixed" / "model.onnx"))) == found["chosen"]["metric"]


@pytest.mark.slow
def test_loss_that_no_candidate_meets_shows_all_and_exits_with_1(outliers, monkeypatch):
    _, run = outliers
    monkeypatch.setattr(quantize_module, "TARGETS", {"cpu": candidates.CANDIDATES[3:4], "dsp": ()})
    monkeypatch.setattr(quantize_module, "SEARCH_SHARE", 0.0)
    result = quantize(run, depthwise_digits, budget=BUDGET_S, max_loss=0.0, out=run / "none")
    assert result["verdict"] == "no improvement" and result["chosen"] is None and len(result["trials"]) >= 1
    assert not (run / "none" / "model.onnx").exists() and (run / "none" / "result.json").exists()


@pytest.mark.slow
def test_integer_code_of_a_run_has_the_metric_that_is_stated(depthwise_run, tmp_path):
    result = quantize(depthwise_run, depthwise_digits, target="dsp", budget=BUDGET_S, out=tmp_path)
    assert result["verdict"] == "smaller" and result["chosen"]["loss"] <= 0.01
    assert result["chosen"]["bytes"] < 0.3 * result["float"]["bytes"]
    assert {"model.h", "model.c", "signature.json", "result.json"} == {path.name for path in tmp_path.iterdir()}


def test_weights_are_within_half_a_step(digits_run, tmp_path):
    onnx = pytest.importorskip("onnx")
    quantize_module.export_onnx(load_trained_model(digits_run), tmp_path / "float.onnx")
    candidates.prepare(tmp_path / "float.onnx", tmp_path / "prepared.onnx")
    candidates.quantize_weights(tmp_path / "prepared.onnx", tmp_path / "int8.onnx")
    before = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "prepared.onnx").graph.initializer}
    after = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    names = [name for name in before if f"{name}_int8" in after]
    assert len(names) == 2
    for name in names:
        scale = after[f"{name}_scale"]
        assert (abs(after[f"{name}_int8"] * scale - before[name]) <= 0.5001 * scale).all()


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ([Ratio(2.0, 1.8, 2.2), Ratio(1.0, 0.9, 1.1)], True),
        ([Ratio(1.1, 0.9, 1.3), Ratio(1.0, 0.9, 1.1)], False),
        ([Ratio(2.0, 1.8, 2.2), Ratio(0.8, 0.7, 0.9)], False),
        ([], False),
    ],
)
def test_faster_is_surely_faster_somewhere_and_slower_nowhere(speedups, expected):
    assert quantize_module._is_faster(speedups) is expected
    search = quantize_module._Search(None, 1.0, "cpu", 0.01, no_progress)
    search.float_bytes = 1000
    by_batch = dict(zip((1, 64), speedups, strict=False))
    search.trials = [quantize_module.QuantizationTrial(candidates.CANDIDATES[0], None, 0.9, 0.0, 300, by_batch)]
    assert search.choose()[1] == ("faster" if expected else "smaller")


def test_wrong_requests_are_one_line(digits_run):
    with pytest.raises(ConfigurationError, match="max_loss is a fraction"):
        quantize(digits_run, max_loss=2.0)
    with pytest.raises(ConfigurationError, match="target is one of cpu, dsp, not 'gpu'"):
        quantize(digits_run, target="gpu")
    with pytest.raises(ConfigurationError, match="is the run itself, whose files would be replaced"):
        quantize(digits_run, out=digits_run / ".." / digits_run.name)


@pytest.mark.parametrize("files", [{"model.c": "int x;"}, {"result.json": '{"kind": "train"}'}, {"result.json": "[]"}])
def test_files_of_others_are_not_replaced(files, digits_run, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=rf"holds {next(iter(files))}, which .* did not write"):
        quantize(digits_run, out=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
    (tmp_path / "result.json").write_text('{"kind": "quantize"}')
    quantize_module._check_out(tmp_path, digits_run)


def test_model_without_weights_keeps_no_layer_in_float(monkeypatch):
    monkeypatch.setattr(quantize_module, "quantizable_nodes", lambda model: [])
    search = quantize_module._Search(None, 1.0, "cpu", 0.01, no_progress)
    search.prepared = None
    search.trials = [quantize_module.QuantizationTrial(candidates.CANDIDATES[0], None, 0.5, 0.5, 300)]
    search.keep_layers_in_float()
    assert len(search.trials) == 1


@pytest.mark.parametrize(("kind", "vnni"), [("static", True), ("static", False), ("dynamic", True)])
def test_signature_states_whether_sums_saturate_elsewhere(kind, vnni, digits_run, tmp_path, monkeypatch):
    monkeypatch.setattr(quantize_module, "has_vnni", lambda: vnni)
    search = quantize_module._Search(load_trained_model(digits_run), 1.0, "cpu", 0.01, no_progress)
    search.directory = tmp_path
    quantize_module.export_onnx(search.trained, tmp_path / "any.onnx")
    candidate = next(one for one in candidates.CANDIDATES if one.kind == kind)
    search.write(quantize_module.QuantizationTrial(candidate, OnnxModel(tmp_path / "any.onnx"), 0.9, 0.0, 300))
    signature = read_signature(tmp_path / "finished")
    assert signature.needs_vnni is (kind == "static" and vnni)
    assert signature.max_batch == (1 if kind == "dynamic" else None)


@pytest.mark.slow
def test_all_models_are_timed_at_the_same_batch_sizes(digits_run, monkeypatch, tmp_path):
    ways = [one for one in candidates.CANDIDATES if one.kind in ("dynamic", "weights")]
    monkeypatch.setitem(quantize_module.TARGETS, "cpu", tuple(ways))
    result = quantize(digits_run, budget=5.0, max_loss=0.5, out=tmp_path)
    passed = {trial["name"]: trial for trial in result["trials"] if trial["passed"]}
    assert {"dynamic per tensor", "weights per channel"} <= set(passed)
    assert all(list(trial["speedup"]) == list(trial["seconds"]) == ["1", "64"] for trial in passed.values())
    dynamic = passed["dynamic per tensor"]["seconds"]
    assert dynamic["64"] > 20 * dynamic["1"]  # as many calls as samples


@pytest.fixture(scope="module")
def exported_search(digits_run, tmp_path_factory):
    """A search that has exported its float model."""
    search = quantize_module._Search(load_trained_model(digits_run), 1.0, "cpu", 0.01, no_progress)
    search.prepared = tmp_path_factory.mktemp("exported") / "float.onnx"
    quantize_module.export_onnx(search.trained, search.prepared)
    search.float_model = OnnxModel(search.prepared)
    return search


@pytest.mark.parametrize(("max_batch", "expected"), [(1, [1] * 64), (None, [64]), (48, [48, 16])])
def test_batch_is_timed_in_the_parts_that_are_served(max_batch, expected, exported_search, monkeypatch):
    call, sizes = OnnxModel.run, []
    monkeypatch.setattr(OnnxModel, "run", lambda self, arrays: sizes.append(len(arrays[0])) or call(self, arrays))
    arrays = [tensor.numpy() for tensor in exported_search._inputs(64)]
    scores = quantize_module._run_as_served(exported_search.float_model, max_batch, arrays)
    assert sizes == expected and len(scores) == 64


@pytest.mark.parametrize(("kind", "is_single"), [("dynamic", True), ("static", False)])
def test_candidate_is_judged_in_the_parts_that_are_served(kind, is_single, exported_search, tmp_path, monkeypatch):
    call, sizes = OnnxModel.run, []
    monkeypatch.setattr(OnnxModel, "run", lambda self, arrays: sizes.append(len(arrays[0])) or call(self, arrays))
    monkeypatch.setattr(quantize_module, "quantize_model", lambda model, out, *_: shutil.copyfile(model, out))
    monkeypatch.setattr(exported_search, "directory", tmp_path, raising=False)
    monkeypatch.setattr(exported_search, "batches", [], raising=False)
    monkeypatch.setattr(exported_search, "value", 0.9, raising=False)
    exported_search._try(next(one for one in candidates.CANDIDATES if one.kind == kind))
    assert (set(sizes) == {1}) is is_single


@pytest.mark.parametrize(("kind", "samples"), [("dynamic", 1), ("static", 64)])
def test_memory_is_that_of_the_largest_batch_that_is_served(kind, samples, exported_search, monkeypatch):
    monkeypatch.setattr(quantize_module, "peak_memory", lambda path, inputs: len(next(iter(inputs.values()))))
    candidate = next(one for one in candidates.CANDIDATES if one.kind == kind)
    trial = quantize_module.QuantizationTrial(candidate, exported_search.float_model, 0.9, 0.0, 300)
    assert exported_search.peak_memory(trial) == {"float": 64, "int8": samples}


def test_task_without_validation_data_is_refused(digits_run):
    from helpers.deployed import few_epochs

    with pytest.raises(ConfigurationError, match="has no validation data"):
        quantize(digits_run, replace(few_epochs(), validation_data=None, metric="loss", target=None))


@pytest.mark.slow
def test_command_quantizes(digits_run, tmp_path):
    done = run_hasten("quantize", str(digits_run), "--budget", "20s", "--out", ".", cwd=tmp_path)
    assert done.returncode == 0 and "int8" in done.stdout and "Result: " in done.stdout, done.stderr
    refused = run_hasten("quantize", str(digits_run), "--target", "gpu", cwd=tmp_path)
    assert refused.returncode == 2 and "must be cpu or dsp" in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert OnnxModel(tmp_path / "model.onnx").run([torch.rand(2, 64).numpy()]).shape == (2, 10)


def test_model_without_a_signature_is_refused_before_the_search(digits_run, tmp_path, monkeypatch):
    def refuse(*args):
        raise ConfigurationError("no signature")

    monkeypatch.setattr(quantize_module, "signature_of", refuse)
    monkeypatch.setattr(quantize_module._Search, "try_candidates", lambda self: pytest.fail("it searched"))
    with pytest.raises(ConfigurationError, match="no signature"):
        quantize(digits_run, out=tmp_path / "int8")


@pytest.mark.parametrize("calibration", ["percentile", "entropy"])
def test_calibration_batches_may_differ_in_size(calibration, exported_search, tmp_path):
    candidates.prepare(exported_search.prepared, tmp_path / "prepared.onnx")
    batches = [{"input": torch.rand(size, 64).numpy()} for size in (32, 32, 7)]
    candidate = candidates.QuantizationCandidate("static", True, calibration)
    candidates.quantize_model(tmp_path / "prepared.onnx", tmp_path / "int8.onnx", candidate, batches)
    assert OnnxModel(tmp_path / "int8.onnx").run([torch.rand(2, 64).numpy()]).shape == (2, 10)
