"""Converted public loops, with carried state, two optimizers, a schedule per epoch: each verb works on such a task."""

import pytest
from torch.utils.data import DataLoader

import hasten
from hasten.testing.tasks import perceptron
from helpers import public_loops

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(300)]
MAKERS = pytest.mark.parametrize(
    "make", [public_loops.language_model, public_loops.gan, public_loops.classifier], ids=lambda make: make.__name__
)


@MAKERS
def test_diagnose_divides_the_step_into_its_phases(make):
    result = hasten.diagnose(make, budget="8s", device="cpu")
    assert sum(result["phases"].values()) == pytest.approx(1.0)
    assert min(result["phases"][phase] for phase in ("input", "forward", "backward", "optimizer_step")) > 0
    refused = {entry["method"]: entry["why"] for entry in result["not_advised"]}
    advised = {entry["method"] for entry in result["advice"]}
    assert "num_threads" in advised | refused.keys()


def test_diagnose_of_a_loader_of_ready_batches_knows_their_size():
    """As nanoGPT reads its data."""

    def task():
        samples = perceptron().train_data
        batches = [(samples.inputs[i : i + 16], samples.labels[i : i + 16]) for i in range(0, 64, 16)]
        loader = DataLoader(batches, batch_size=None)
        return perceptron(train_data=loader, validation_data=loader, batch_size=None)

    result = hasten.diagnose(task, budget="8s", device="cpu")
    assert result["batch_size"] == 16 and result["phases"]["input"] > 0
    assert "batch size" in result["not_measured"].get("larger_batch", "batch size")


@MAKERS
def test_compare_with_itself_finds_no_difference(make):
    result = hasten.compare(make, "baseline", "baseline", budget="15s", device="cpu")
    assert result["verdict"] in ("no difference", "unsure")


@MAKERS
def test_tune_measures_checks_and_refuses(make, tmp_path):
    result = hasten.tune(make, budget="30s", device="cpu", out=tmp_path / "tuned")
    reasons = [str(trial.get("why")) for trial in result["trials"]]
    assert reasons and not [why for why in reasons if "Error" in why]
    trained = hasten.train(make(), tmp_path / "tuned" / "recipe.toml", device="cpu")
    assert trained["metric"] is not None
