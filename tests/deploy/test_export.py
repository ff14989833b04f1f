"""Export of a trained run: same outputs, any batch size, and one clear line where that is impossible."""

import importlib
import json
import shutil
import sys
from argparse import Namespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hasten
from hasten import ConfigurationError, RunError, Task
from helpers.deployed import relative_difference, train_run
from helpers.process import run_hasten

pytest.importorskip("onnxruntime")

from hasten.deploy import export as export_module
from hasten.deploy.export import export_model
from hasten.deploy.onnx_model import OnnxModel, publish
from hasten.deploy.signature import read_signature
from hasten.deploy.trained_model import load_trained_model, predictor_of


def test_exported_model_equals_the_trained_one_for_any_batch(digits_run, tmp_path):
    result = export_model(digits_run, out=tmp_path)
    trained, exported = load_trained_model(digits_run), OnnxModel(tmp_path / "model.onnx")
    for size in (1, 3, 100):
        inputs = [torch.rand(size, 64)]
        with torch.inference_mode():
            assert relative_difference(predictor_of(exported)(inputs), trained.model(*inputs)) < 1e-5
    assert result["difference"] < 1e-5 and result["metric"]["exported"] == result["metric"]["trained"] > 0.9
    signature = read_signature(tmp_path)
    assert [(spec.name, spec.dtype, spec.shape) for spec in signature.inputs] == [("input", "float32", ("batch", 64))]
    assert signature.outputs[0].shape == ("batch", 10) and signature.metric.value == result["metric"]["trained"]


class TwoInputs(nn.Module):
    """Takes numbers and categories by name, as models for dict batches do, and returns its own loss."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, ids, mask, labels=None):
        pooled = (self.embedding(ids) * mask.unsqueeze(-1)).sum(1)
        logits = self.head(pooled)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class Sentences(torch.utils.data.Dataset):
    """Dicts of ids, mask and labels; batches differ in length."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 3 + index // 8
        ids = torch.randint(5, (length,), generator=generator)
        return {"ids": ids, "mask": torch.ones(length), "labels": int(ids[0]) % 3}


def sentences() -> Task:
    return Task(
        model=TwoInputs,
        train_data=Sentences(),
        validation_data=Sentences(),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
        metric="accuracy",
        batch_size=1,
        epochs=1,
    )


@pytest.mark.slow
def test_model_that_returns_its_loss_is_exported_with_named_inputs_of_any_length(tmp_path):
    run = train_run(sentences(), tmp_path / "run")
    result = export_model(run, sentences)
    exported = OnnxModel(run / "model.onnx")
    assert exported.inputs == ["ids", "mask"] and result["metric"]["exported"] == result["metric"]["trained"]
    assert predictor_of(exported)([torch.randint(5, (2, 11)), torch.ones(2, 11)]).shape == (2, 3)
    assert read_signature(run).inputs[0].shape == ("batch", "ids_1")


def test_weights_alone_need_no_onnx(digits_run, tmp_path):
    result = export_model(digits_run, onnx=False, out=tmp_path)
    assert sorted(result["files"]) == ["model.safetensors", "signature.json"] and result["difference"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "signature.json"]


def test_model_that_differs_is_refused(digits_run, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "TOLERANCE", -1.0)  # on some processors both models give the same bits
    with pytest.raises(RunError, match="differs from the trained one"):
        export_model(digits_run, out=tmp_path)


class Unknown(nn.Module):
    """Computes something that ONNX has no operator for."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.linalg.qr(self.linear(x).unsqueeze(-1) + torch.eye(4))[0][:, :, 0]


def unknown() -> Task:
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4))
    return Task(
        model=Unknown,
        train_data=data,
        validation_data=data,
        loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
        batch_size=4,
    )


def test_operation_without_onnx_is_named(tmp_path):
    run = train_run(unknown(), tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"cannot be exported.*linalg_qr"):
        export_model(run, unknown)
    assert not (run / "model.onnx").exists()


def test_run_of_a_users_file_needs_the_task(tmp_path):
    run = train_run(sentences(), tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"does not name an installed workload; add --task TASK$"):
        export_model(run)


def test_weights_of_another_model_are_refused(digits_run, tmp_path):
    with pytest.raises(ConfigurationError, match="does not fit the model of sentences"):
        export_model(digits_run, hasten.engine.tasks.TaskRef("sentences", obj=sentences), out=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "model.safetensors").unlink(), "has no model.safetensors; train one with"),
        (lambda run: (run / "model.safetensors").write_bytes(b"\x80\x04pickle"), "no complete safetensors file"),
        (lambda run: (run / "environment.json").write_text("{}"), "does not name an installed workload"),
        (lambda run: (run / "environment.json").write_text('{"task": "a.py:task"}'), "such as a.py:task if you trust"),
    ],
    ids=["no weights", "a pickle", "no task", "a task in a file"],
)
def test_damaged_run_is_one_line(change, message, digits_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    change(run)
    with pytest.raises(ConfigurationError, match=message) as refused:
        export_model(run)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("{", "the file"),
        ('{"format": 2, "task": "a", "inputs": [], "outputs": []}', "format"),
        ('{"task": "a", "inputs": [{"name": "x", "dtype": "object", "shape": [1]}], "outputs": []}', "inputs.0.dtype"),
        ('{"task": "a", "inputs": [{"name": "x", "dtype": "int64", "shape": [-1]}], "outputs": []}', "inputs.0.shape"),
    ],
)
def test_signature_that_is_none_is_one_line(content, where, tmp_path):
    (tmp_path / "signature.json").write_text(content)
    with pytest.raises(ConfigurationError, match=rf"signature.json: {where}") as refused:
        read_signature(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_command_exports(digits_run, tmp_path):
    done = run_hasten("export", str(digits_run), "--onnx", "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["files"]["model.onnx"] > 19_000, done.stderr
    refused = run_hasten("export", "nothing", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.startswith("hasten: there is no run directory")


def test_missing_package_is_named_with_its_extra(digits_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigurationError, match=r"^onnxscript is not installed; pip install 'hasten\[deploy\]'$"):
        export_model(digits_run, out=tmp_path)


@pytest.mark.parametrize("verb", ["export", "quantize"])
def test_command_names_the_extra_before_it_imports(verb, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(ConfigurationError, match=r"pydantic is not installed; pip install 'hasten\[deploy\]'"):
        importlib.import_module(f"hasten.cli.{verb}").run(Namespace(onnx=True), None)


@pytest.mark.parametrize("names", [["environment.json", "signature.json"], []], ids=["a run", "a project"])
def test_weights_of_others_are_not_replaced(names, digits_run, tmp_path):
    for name in ("model.safetensors", *names):
        (tmp_path / name).write_text("theirs")
    with pytest.raises(ConfigurationError, match="which would be replaced; choose another --out"):
        export_model(digits_run, onnx=False, out=tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "theirs"


def test_model_of_an_earlier_export_gets_no_newer_signature(digits_run, tmp_path):
    export_model(digits_run, out=tmp_path)
    before = (tmp_path / "signature.json").stat().st_ino
    with pytest.raises(ConfigurationError, match=r"is of an earlier export .* add --onnx"):
        export_model(digits_run, onnx=False, out=tmp_path)
    assert (tmp_path / "signature.json").stat().st_ino == before
    assert export_model(digits_run, out=tmp_path)["files"], "the same export again"


def test_files_that_cannot_all_be_written_replace_none(tmp_path):
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "signature.json").write_text(name)
    with pytest.raises(OSError, match=r"model\.onnx"):
        publish([tmp_path / "new" / "signature.json", tmp_path / "new" / "model.onnx"], tmp_path / "out")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"signature.json": "out"}
