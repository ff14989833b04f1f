"""Models whose output is no plain tensor of one shape, and names of classes in data of any kind."""

from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hasten
from hasten import ConfigurationError, RunError, Task
from helpers import faulty_tasks

pytest.importorskip("onnxruntime")

from hasten.deploy.export import export_model, signature_of
from hasten.deploy.trained_model import load_trained_model
from hasten.serving.batcher import measure_batches
from hasten.serving.models import ServedModel

NAMES = ("red", "green", "blue")


def points():
    """16 points of 4 numbers in 3 classes, with their names."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(16, 4, generator=generator), torch.arange(16) % 3)
    data.classes, data.image = numpy.array(NAMES), {"height": 2, "width": 2, "channels": 1}
    return data


class Returning(nn.Module):
    """A linear layer whose scores are returned in another form."""

    def __init__(self, form):
        super().__init__()
        self.head, self.form = nn.Linear(4, 3), form

    def forward(self, x):
        return self.form(self.head(x))


class NeedsTarget(nn.Linear):
    def forward(self, x, labels):
        return super().forward(x) + labels.sum()


def task_of(model, **options):
    """A task on the points."""
    defaults = {"train_data": points(), "validation_data": points(), "loss": nn.functional.cross_entropy}
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    return Task(model=model, optimizer=optimizer, batch_size=4, name="points", **(defaults | options))


def run_of(task, directory):
    """A run directory with random weights of the task's model."""
    directory.mkdir(exist_ok=True)
    torch.manual_seed(0)
    save_file(task.model().state_dict(), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    "validation",
    [
        points(),
        lambda: points(),
        Subset(points(), range(8)),
        DataLoader(points(), 4),
        lambda: DataLoader(Subset(points(), range(8)), 4),
    ],
    ids=["dataset", "function", "subset", "loader", "function of a loader of a subset"],
)
def test_classes_and_image_are_those_of_the_dataset(validation, tmp_path):
    task = task_of(lambda: nn.Linear(4, 3), validation_data=validation)
    signature = signature_of(load_trained_model(run_of(task, tmp_path), lambda: task), 0.5)
    assert signature.classes == NAMES and signature.image.height == 2


@pytest.mark.parametrize(
    "form", [lambda scores: scores.softmax(0), lambda scores: scores - scores.mean(0)], ids=["softmax", "mean"]
)
def test_model_that_mixes_the_samples_of_a_batch_is_refused(form, tmp_path):
    task = task_of(lambda: Returning(form))
    with pytest.raises(ConfigurationError, match="points gives a sample other scores if it is alone in the batch"):
        export_model(run_of(task, tmp_path), lambda: task)


def test_squeeze_that_removes_the_batch_is_named(tmp_path):
    form = lambda scores: scores[:, :1].squeeze()  # noqa: E731
    task = task_of(lambda: Returning(form), loss=lambda output, target: output.square().mean(), metric="loss")
    with pytest.raises(ConfigurationError, match=r"scores of shape \(\) for one sample; .* use squeeze\(-1\)"):
        export_model(run_of(task, tmp_path), lambda: task)


def one_by_one(scores):
    """Fails for a single sample, as a view after ``squeeze()`` does."""
    return scores.squeeze() @ torch.ones(3 if len(scores) > 1 else 4, 3)


def test_model_that_fails_for_one_sample_is_one_line(tmp_path):
    task = task_of(lambda: Returning(one_by_one))
    with pytest.raises(ConfigurationError, match=r"points cannot compute one sample: RuntimeError: .*squeeze\(-1\)"):
        export_model(run_of(task, tmp_path), lambda: task)


class OfDirection(nn.Linear):
    def forward(self, x):
        return super().forward(x / x.norm(dim=1, keepdim=True))


def test_model_without_finite_scores_for_zeros_is_served(tmp_path):
    task = task_of(lambda: OfDirection(4, 3))
    export_model(run_of(task, tmp_path), lambda: task)
    assert ServedModel(tmp_path).run([numpy.ones((1, 4), numpy.float32)]).shape == (1, 3)


def loss_of_fields(output, target):
    return nn.functional.cross_entropy(output.logits, target)


def loss_of_entries(output, target):
    return nn.functional.cross_entropy(output["logits"], target)


def loss_with_another_entry(output, target):
    return loss_of_entries(output, target) + output["aux"].square().mean()


def metric_of_two_outputs(output, target):
    scores, _ = output.values()
    return (scores.argmax(1) == target).float().mean()


def accuracy_of_entries(output, target):
    return (output["logits"].argmax(1) == target).float().mean()


def accuracy_on_device(model, batches):
    """An evaluation that looks for the device and leaves the model in training mode."""
    device, hits, samples = next(model.parameters()).device, 0.0, 0
    for x, target in batches:
        model.eval()
        output = model(x.to(device))
        scores = output.logits if hasattr(output, "logits") else output
        hits, samples = hits + float((scores.argmax(1) == target).sum()), samples + len(target)
        model.train()
    return hits / samples


@pytest.mark.parametrize(
    ("form", "options"),
    [
        (lambda scores: SimpleNamespace(logits=scores), {"loss": loss_of_fields}),
        (lambda scores: {"logits": scores, "x": scores}, {"loss": loss_of_entries, "metric": accuracy_of_entries}),
        (lambda scores: {"logits": scores, "aux": scores}, {"loss": loss_with_another_entry, "metric": "accuracy"}),
        (lambda scores: {"logits": scores}, {"evaluate": accuracy_on_device, "metric": "hits"}),
        (lambda scores: scores, {"evaluate": accuracy_on_device, "metric": "hits"}),
    ],
    ids=[
        "loss of an object",
        "metric of a dict",
        "loss of another entry",
        "evaluation of a dict",
        "evaluation of a tensor",
    ],
)
def test_loss_metric_and_evaluation_get_what_the_model_returned(form, options, tmp_path):
    task = task_of(lambda: Returning(form), higher_is_better=True, **options)
    run = run_of(task, tmp_path)
    result = export_model(run, lambda: task)
    assert result["metric"]["exported"] == result["metric"]["trained"]


def test_evaluation_does_not_put_the_model_in_training_mode(tmp_path):
    task = task_of(lambda: nn.Linear(4, 3), evaluate=accuracy_on_device, metric="hits", higher_is_better=True)
    trained = load_trained_model(run_of(task, tmp_path), lambda: task)
    trained.evaluate(lambda inputs: trained.model(*inputs))
    assert not trained.model.model.training


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: Returning(lambda s: (s, s)), {}, "the model of points returns a tuple, which cannot be exported"),
        (lambda: NeedsTarget(4, 3), {}, "the inputs of a batch alone, without the target: TypeError: .*'labels'"),
        (
            lambda: Returning(lambda s: SimpleNamespace(logits=s, hidden=s)),
            {"metric": lambda output, y: output.hidden.mean(), "higher_is_better": True, "loss": loss_of_fields},
            r"metric of points from logits alone, .*, failed: AttributeError: .*'hidden' \(test_outputs.py line \d+\)",
        ),
        (
            lambda: Returning(lambda s: {"logits": s, "aux": s}),
            {"metric": metric_of_two_outputs, "higher_is_better": True, "loss": loss_with_another_entry},
            r"metric of points from logits alone, .*, failed: ValueError: .* \(test_outputs.py line \d+\)",
        ),
        (
            lambda: Returning(lambda s: {"logits": s, "aux": s}),
            {"metric": "loss", "loss": loss_with_another_entry},
            r"loss of points from logits alone, .*, failed: KeyError: 'aux' \(test_outputs.py line \d+\)",
        ),
        (
            lambda: Returning(lambda s: {"logits": s, "loss": s.mean()}),
            {"metric": "loss", "loss": None, "validation_data": [{"x": torch.ones(4), "labels": 0}] * 4},
            "metric loss of points is a loss that the model computes itself; an exported model returns logits",
        ),
        (
            lambda: Returning(lambda s: {"logits": s}["labels"]),
            {},
            "cannot be called with the inputs of a batch alone, without the target: KeyError: 'labels'",
        ),
        (
            lambda: nn.Linear(4, 3),
            {"evaluate": lambda model, batches: model.missing, "metric": "hits", "higher_is_better": True},
            r"metric of points from logits alone, .*, failed: AttributeError: .*'missing'",
        ),
        (
            lambda: nn.Linear(4, 3),
            {"validation_data": lambda: [(torch.ones(2, 4), {"y": 0})], "metric": "accuracy"},
            "metric of points from logits alone, .*, failed: AttributeError: 'dict' object has no attribute 'ndim'$",
        ),
    ],
    ids=[
        "tuple",
        "target",
        "another field",
        "two outputs",
        "loss of another entry",
        "own loss",
        "another error",
        "evaluation",
        "targets",
    ],
)
def test_model_that_cannot_be_exported_is_one_line(model, options, message, tmp_path):
    task = task_of(model, **options)
    with pytest.raises(RunError, match=message) as refused:
        export_model(run_of(task, tmp_path), lambda: task)
    assert "\n" not in str(refused.value)


class Padded(TensorDataset):
    """Samples whose length grows from batch to batch of two."""

    def __init__(self, make, lengths):
        super().__init__(torch.arange(2 * len(lengths)))
        self.make, self.lengths = make, lengths

    def __getitem__(self, index):
        return self.make(self.lengths[index // 2])


def token_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_output_with_a_free_dimension_is_served(tmp_path):
    data = Padded(
        lambda length: (torch.ones(length, dtype=torch.int64), torch.zeros(length, dtype=torch.int64)), range(5, 9)
    )
    task = task_of(
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 10)),
        train_data=data, validation_data=data, loss=token_loss, metric="loss",
    )  # fmt: skip
    task = Task(**{**vars(task), "batch_size": 2})
    export_model(run_of(task, tmp_path), lambda: task)
    signature = ServedModel(tmp_path).signature
    assert signature.outputs[0].shape == ("batch", "scores_1", 10)
    assert signature.sizes == {signature.inputs[0].shape[1]: 8} and signature.max_elements == 32


def test_model_that_needs_long_inputs_is_served(tmp_path):
    data = Padded(lambda length: (torch.ones(1, length), 0), (50, 90, 70))
    task = task_of(
        lambda: nn.Sequential(nn.Conv1d(1, 4, 10, stride=5), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        train_data=data, validation_data=data,
    )  # fmt: skip
    task = Task(**{**vars(task), "batch_size": 2})
    export_model(run_of(task, tmp_path), lambda: task)
    model = ServedModel(tmp_path)
    assert list(model.signature.sizes.values()) == [90] and model.signature.max_elements == 360
    assert len(measure_batches(model.run, model.signature)) > 1


def test_output_whose_free_size_is_equal_for_all_samples_is_served(tmp_path):
    data = Padded(lambda length: (torch.ones(1, length), torch.zeros(9, dtype=torch.int64)), range(50, 55))
    task = task_of(lambda: nn.Conv1d(1, 4, 10, stride=5), train_data=data, validation_data=data, metric="loss")
    task = Task(**{**vars(task), "batch_size": 2})
    export_model(run_of(task, tmp_path), lambda: task)
    model = ServedModel(tmp_path)
    assert model.signature.outputs[0].shape == ("batch", 4, 9)
    assert model.run([torch.ones(1, 1, 60).numpy()]).shape == (1, 4, 11)


def test_model_that_was_trained_in_this_process_is_exported(tmp_path):
    model = nn.Linear(4, 3)
    task = task_of(lambda: model, epochs=1)
    hasten.train(task, out=tmp_path, device="cpu")
    assert export_model(tmp_path, lambda: task, onnx=False)["files"]


def test_model_into_which_trained_weights_were_loaded_is_not_trained(tmp_path):
    model = nn.Linear(4, 3)
    task = task_of(lambda: model)
    export_model(run_of(task, tmp_path), lambda: task, onnx=False)
    with pytest.raises(ConfigurationError, match="the same object again"):
        hasten.train(task, device="cpu")


def drawn():
    return TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)


def test_validation_data_are_those_that_the_seed_of_the_run_drew(tmp_path):
    task = task_of(lambda: nn.Linear(4, 3), train_data=drawn, validation_data=drawn, epochs=1)
    metric = hasten.train(task, out=tmp_path, seed=5, device="cpu")["metric"]
    trained = load_trained_model(tmp_path, lambda: task)
    assert trained.evaluate(lambda inputs: trained.model(*inputs)) == pytest.approx(metric)


def test_run_that_skipped_bad_rows_is_exported(tmp_path):
    task = f"{faulty_tasks.__file__}:here"  # one of its validation rows is bad
    metric = hasten.train(task, out=tmp_path, device="cpu", max_bad_rows=4)["metric"]
    assert export_model(tmp_path, task, onnx=False)["metric"]["trained"] == pytest.approx(metric)


def test_scores_that_are_nan_are_one_line(tmp_path):
    data = points()
    data.tensors[0][0] = torch.nan
    task = task_of(lambda: nn.Linear(4, 3), validation_data=data, metric="accuracy")
    run = run_of(task, tmp_path)
    assert export_model(run, lambda: task, onnx=False)["files"]
    with pytest.raises(RunError, match="not all finite numbers"):
        export_model(run, lambda: task)


@pytest.mark.parametrize("classes", [set(NAMES), {"green": 1, "red": 0, "blue": 2}], ids=["set", "dict"])
def test_classes_without_an_order_are_no_names(classes, tmp_path):
    data = points()
    data.classes = classes
    task = task_of(lambda: nn.Linear(4, 3), validation_data=data)
    assert signature_of(load_trained_model(run_of(task, tmp_path), lambda: task), 0.5).classes is None
