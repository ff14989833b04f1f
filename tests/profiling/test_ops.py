"""The view of operations: a model of which every operation and its precision is known, and the loss scale."""

import pytest
import torch
from torch import nn

from hasten.cli.main import main
from hasten.core.errors import ConfigurationError
from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.profiling import ops
from hasten.profiling.diagnose import diagnose
from hasten.reporting.result_schema import Operations
from hasten.reporting.validation import validate
from hasten.testing.tasks import CLASSES, Labeled, perceptron
from hasten.tuning.budget import Budget
from hasten.tuning.study import Study
from hasten.tuning.trial_store import TrialStore

WARMUP_STEPS = 15  # of an arm

# The norm reads the inputs, which are float32; the linear layer and its gradients run in bfloat16, the loss in float32.
FORWARD = {("native_layer_norm", "float32"): 1, ("addmm", "bfloat16"): 1}
LOSS = {("_log_softmax", "float32"): 1, ("nll_loss_forward", "float32"): 1}
BACKWARD = {
    ("nll_loss_backward", "float32"): 1,
    ("_log_softmax_backward_data", "float32"): 1,
    ("mm", "bfloat16"): 2,  # the gradients of the input and of the weight
    ("sum", "bfloat16"): 1,  # the gradient of the bias
    ("native_layer_norm_backward", "float32"): 1,
}
CONVERSIONS = {
    ("_to_copy to bfloat16", "float32"): 4,  # input, weight, bias; the gradient of the logits
    ("_to_copy to float32", "bfloat16"): 4,  # the logits; the gradients of input, weight, bias
}
UPDATE = {("add_", "float32"): 4}  # one for each parameter
KNOWN = FORWARD | LOSS | BACKWARD | CONVERSIONS | UPDATE


def normed(**changes):
    return perceptron(
        model=lambda: nn.Sequential(nn.LayerNorm(12), nn.Linear(12, CLASSES)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-5),
        **changes,
    )


def observed(task, recipe: str) -> Operations:
    return ops.measure_operations(TaskRef.of(task), Recipe.coerce(recipe), device="cpu", seed=0)


@pytest.fixture(scope="module")
def in_bfloat16() -> Operations:
    return observed(normed(), "bfloat16")


def test_every_operation_has_its_precision_and_its_calls_of_a_step(in_bfloat16):
    calls = {(row["op"], row["dtype"]): row["calls_per_step"] for row in in_bfloat16["rows"]}
    assert {key: calls.get(key) for key in KNOWN} == KNOWN
    assert calls.keys() - KNOWN.keys() <= {("ones_like", "float32")}, "the first gradient; nothing of the data loader"


def test_the_shares_are_those_of_all_operations(in_bfloat16):
    rows = in_bfloat16["rows"]
    assert sum(row["time_share"] for row in rows) == pytest.approx(1)
    assert [row["time_share"] for row in rows] == sorted((row["time_share"] for row in rows), reverse=True)
    flops = {row["op"]: row["flops_share"] for row in rows if row["flops_share"]}
    assert flops == pytest.approx({"addmm": 1 / 3, "mm": 2 / 3})
    assert (in_bfloat16["steps"], in_bfloat16["loss_scale"], in_bfloat16["note"]) == (ops.OBSERVED_STEPS, [], "")


def exploding(output, target):
    """Its gradients overflow in float16 until the scale has fallen to about 2**7."""
    return 100 * nn.functional.mse_loss(output[:, 0], target.float())


def test_the_loss_scale_falls_with_each_overflow():
    history = observed(normed(loss=exploding), "float16")["loss_scale"]
    assert len(history) == WARMUP_STEPS + ops.OBSERVED_STEPS
    assert history[0] == {"value": 2.0**15, "overflow": True}
    values = [2.0**16, *(step["value"] or 0.0 for step in history)]
    assert all(
        after == (before / 2 if step["overflow"] else before)
        for before, after, step in zip(values[:-1], values[1:], history, strict=True)
    )
    assert 2.0**4 < values[-1] < 2.0**11 and not history[-1]["overflow"], "the scale found its level"


@pytest.mark.slow
def test_a_compiled_run_names_what_is_not_visible():
    seen = observed(normed(), "bfloat16 + compile:backend=aot_eager")
    assert seen["note"] == ops.COMPILED and seen["rows"]


def test_a_replayed_graph_shows_nothing(monkeypatch):
    monkeypatch.setattr(ops, "start_workers", lambda *_, **__: pytest.fail("there is nothing to observe"))
    seen = observed(normed(), "bfloat16 + cuda_graph")
    assert seen["rows"] == [] and "nothing is visible: cuda_graph" in seen["note"]


def test_a_recipe_without_lower_precision_is_refused_before_anything_is_measured(capfd, monkeypatch):
    monkeypatch.setattr("hasten.profiling.diagnose.profile_steps", lambda *_, **__: pytest.fail("measured"))
    for words, needed in (
        ([], "(baseline) lowers it; add --with bfloat16 or --with float16"),
        (["--with", "ema"], "(ema) lowers it"),
        (["--with", "bfloat16", "--processes", "2"], "leave --processes out"),
    ):
        assert main(["diagnose", "digits", "--ops", "--quiet", *words]) == 2
        out, err = capfd.readouterr()
        assert not out and err.count("\n") == 1 and needed in err
    with pytest.raises(ConfigurationError, match="leave --processes out"):
        diagnose(normed(), recipe="bfloat16", processes=2, ops=True)


@pytest.mark.slow
def test_diagnose_returns_the_operations_as_its_schema_has_them():
    result = diagnose(normed(), recipe="bfloat16", device="cpu", budget=1.0, ops=True)
    operations = result.get("operations")
    assert operations and validate(result)["operations"] == operations
    assert {(row["op"], row["dtype"]) for row in operations["rows"]} >= KNOWN.keys()


def test_a_search_observes_the_operations_of_a_recipe_with_lower_precision_only(tmp_path):
    study = Study(TaskRef.of(normed()), "cpu", TrialStore(tmp_path, {}), Budget(60.0), no_progress)
    assert study.operations(Recipe.parse("ema")) is None and not study.store.outcomes
    seen = study.operations(Recipe.parse("bfloat16"))
    assert seen and {(row["op"], row["dtype"]) for row in seen["rows"]} >= KNOWN.keys()
    study.processes = 2
    assert study.operations(Recipe.parse("bfloat16")) is None


def test_loading_is_not_an_operation_of_the_step():
    class Computed(Labeled):
        def __getitem__(self, index):
            inputs, label = super().__getitem__(index)
            return inputs.cosh(), label

    seen = observed(normed(train_data=Computed((12,))), "bfloat16")
    assert not [row for row in seen["rows"] if row["op"] in ("cosh", "stack")]
