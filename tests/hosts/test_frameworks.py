"""Scripts of Lightning, Transformers and Keras, run untouched: watched, and trained under methods."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hasten.core.recipe import Recipe
from hasten.hosts.arm import ScriptArm
from hasten.hosts.process import ScriptProcess
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import ScriptDescription, ScriptTrial, watch_script
from hasten.hosts.site_map import known_sites
from hasten.hosts.whole_run import metric_of_run

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
SCRIPTS = Path(__file__).with_name("scripts")
RUNS = {  # script -> argument, steps, metric, direction, its values, line of the loader for training, of the optimizer
    "lightning_cnn": ("2", 96, "val_acc", "max", 2, "train = DataLoader", "torch.optim.AdamW"),
    "lightning_manual": ("2", 128, "val_mse", "min", 2, "train = DataLoader", "torch.optim.Adam("),
    "lightning_data": ("2", 64, "val/rmse", "min", 3, "DataLoader(self.train", "torch.optim.Adam("),
    "transformers_classifier": ("1", 64, "eval_accuracy", "max", 1, "trainer.train()", "trainer.train()"),
    "transformers_gpt2": ("60", 60, "eval_loss", "min", 2, ").train()", ").train()"),
    "transformers_accumulation": ("2", 64, "eval_mse", "min", 2, "trainer.train()", "trainer.train()"),
    "keras_dense": ("2", 224, "val_accuracy", "max", 2, "model.fit(", "model.fit("),
    "keras_lstm": ("1", 32, "val_mae", "min", 1, "model.fit(", "model.fit("),
    "keras_conv": ("2", 52, "val_sparse_categorical_accuracy", "max", 2, "model.fit(", "model.fit("),
}


def needs(name: str) -> None:
    framework = name.partition("_")[0]
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install hasten[frameworks]")


def script(name: str, *arguments: str) -> ScriptRef:
    needs(name)
    return ScriptRef.of_command([sys.executable, f"{name}.py", *arguments], directory=str(SCRIPTS))


def arm(ref: ScriptRef, recipe: str) -> ScriptArm:
    return ScriptArm(ref, methods=Recipe.coerce(recipe).methods, device="cpu", seed=0, timeout=200.0)


def checked(ref: ScriptRef, recipe: str, exactness: str) -> dict:
    return ScriptTrial(ref, methods=Recipe.coerce(recipe).methods).check_exactness({}, exactness, 60.0)


@pytest.mark.parametrize("name", RUNS)
def test_watching_a_framework_changes_nothing_and_finds_all(name, tmp_path):
    needs(name)
    argument, steps, metric, direction, values, loader, optimizer = RUNS[name]
    text = (SCRIPTS / f"{name}.py").read_text().splitlines()
    command = [sys.executable, str(SCRIPTS.parent / "hashed.py"), str(SCRIPTS / f"{name}.py"), argument]
    alone = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    ref = ScriptRef.of_command(command, directory=str(tmp_path))
    with ScriptProcess(ref, {}) as process:
        answer = process.wait_until_trained(300.0, None)
        assert process.ask("describe")["expected_steps"] == steps
        if not answer.get("ended"):
            answer = process.ask("train", 300.0, None, count=10_000)
        described = process.ask("describe")
        found = metric_of_run(ref, process, described)
        watched = process.output()
    assert answer["ended"] and answer["steps"] == steps
    assert alone.stdout.splitlines()[-1].startswith("weights ")
    assert watched.splitlines()[-1] == alone.stdout.splitlines()[-1]
    assert (found.name, found.direction, len(found.values)) == (metric, direction, values)
    sites = described["sites"]
    assert len(sites["models"]) == 1 and sites["models"][0]["called"] and sites["evaluations"]
    assert described["evaluation_every"] > 0 and described["evaluation_seconds"] > 0
    assert sum(mark[3] for mark in described["marks"]) == values, "each evaluation has its step"
    for kind, part in (("loaders", loader), ("optimizers", optimizer)):
        site = next(entry["site"] for entry in sites[kind] if entry.get("role", "training") == "training")
        line = int(site.partition(":")[2].partition("#")[0])
        assert f"{name}.py" in site and part in text[line - 1], site


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("lightning_cnn", "in_memory_batches"),
        ("transformers_accumulation", "skip_loss_nan_filter"),
        ("keras_dense", "lazy_keras_metrics + direct_keras_calls + direct_keras_loss"),
    ],
)
def test_exact_methods_keep_every_bit(name, recipe):
    ref = script(name, "3")
    watch_script(ref)
    check = checked(ref, recipe, "BIT_EXACT")
    assert check["passed"] and not check["statistics"], check
    with arm(ref, recipe) as trained:
        assert set(trained.build()["effects"]) == set(Recipe.coerce(recipe).methods)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("keras_lstm", "fused_rnn"),
        (
            "keras_lstm",
            "fused_rnn + fused_keras_optimizer + lazy_keras_metrics + direct_keras_calls + direct_keras_loss",
        ),
        ("keras_dense", "fused_keras_optimizer"),
        ("keras_conv", "fused_keras_optimizer"),
        ("lightning_manual", "fused_optimizer"),
    ],
)
def test_methods_of_the_same_formula_only_round_in_float64(name, recipe):
    ref = script(name, "3")
    watch_script(ref)
    check = checked(ref, recipe, "EQUIVALENT_MATH")
    assert check["passed"] and 0 < check["number"] < 1e-10 and check["why"].startswith("in float64"), check


def test_another_formula_in_keras_is_refused_in_float64():
    ref = script("keras_conv", "3")
    watch_script(ref)
    check = checked(ref, "gradient_clipping:max_norm=0.1", "EQUIVALENT_MATH")
    assert not check["passed"] and check["number"] > 1e-6 and check["why"].startswith("in float64"), check


def test_lower_precision_in_keras_is_compared_with_float64_from_the_same_weights():
    ref = script("keras_dense", "3")
    watch_script(ref)
    check = checked(ref, "bfloat16", "REDUCED_PRECISION")
    assert check["passed"] and check["number"] < 80 and "against float64" in check["why"], check


def test_a_keras_model_with_a_variable_below_float64_is_judged_in_float32(tmp_path):
    needs("keras_dense")
    text = (SCRIPTS / "keras_dense.py").read_text()
    (tmp_path / "lora.py").write_text(text.replace("model.compile(", "model.layers[0].enable_lora(2)\nmodel.compile("))
    ref = ScriptRef.of_command([sys.executable, "lora.py", "3"], directory=str(tmp_path))
    watch_script(ref)
    check = checked(ref, "fused_keras_optimizer", "EQUIVALENT_MATH")
    assert check["why"].startswith("in float32"), check


@pytest.mark.parametrize(
    ("name", "recipe", "reason"),
    [
        ("transformers_classifier", "fused_optimizer", "fused already"),
        ("keras_dense", "fused_optimizer", "not a torch.optim.Optimizer"),
        ("keras_dense", "fused_rnn", "no LSTM or GRU"),
        ("lightning_cnn", "skip_loss_nan_filter", "no Trainer of Transformers"),
    ],
)
def test_what_a_framework_has_or_lacks_is_no_effect(name, recipe, reason):
    ref = script(name, "3")
    watch_script(ref)
    with arm(ref, recipe) as trained, pytest.raises(Exception, match=reason):
        trained.build()


def changed(name: str, directory: Path, *changes: tuple[str, str]) -> ScriptRef:
    """The script with other text."""
    needs(name)
    text = (SCRIPTS / f"{name}.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (directory / "changed.py").write_text(text)
    return ScriptRef.of_command([sys.executable, "changed.py", "3"], directory=str(directory))


MIXED = ('accelerator="cpu",', 'accelerator="cpu", precision="bf16-mixed", gradient_clip_val=1.0,')


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("lightning_cnn", MIXED, "under torch.autocast already"),
        (
            "transformers_classifier",
            ("use_cpu=True,", "use_cpu=True, bf16=True,"),
            "accelerate calls the model",
        ),
    ],
)
def test_lower_precision_of_the_script_itself_is_seen(name, change, reason, tmp_path):
    ref = changed(name, tmp_path, change)
    watch_script(ref)
    with arm(ref, "bfloat16") as trained, pytest.raises(Exception, match=reason):
        trained.build()


def test_fused_optimizer_leaves_lightning_to_clip_under_mixed_precision(tmp_path):
    ref = changed("lightning_cnn", tmp_path, MIXED)
    watch_script(ref)
    with arm(ref, "fused_optimizer") as trained:
        assert "fused_optimizer" in trained.build()["effects"]


def test_gradients_of_lightnings_closure_are_those_of_its_batch(tmp_path):
    """Under an optimizer that is not one of torch, which might call a closure at other weights."""
    own = "class Own(torch.optim.Adam):\n    def step(self, closure=None):\n        return super().step(closure)\n\n\n"
    changes = ("class ", f"{own}class "), ("torch.optim.Adam(", "Own(")
    text = (SCRIPTS / "lightning_manual.py").read_text()
    ref = changed("lightning_manual", tmp_path, (text, text.replace(changes[0][0], changes[0][1], 1)), changes[1])
    watch_script(ref)
    with arm(ref, "gradient_clipping:max_norm=0.001") as trained:
        assert "gradient_clipping" in trained.build()["effects"]


def test_decorated_training_step_gets_the_arguments_that_it_takes(tmp_path):
    decorated = """
    @decorated
    def training_step(self, batch):"""
    decorator = """
def decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call


class Classifier("""
    changes = ("\n    def training_step(self, batch, _):", decorated), ("class Classifier(", decorator)
    ref = changed("lightning_cnn", tmp_path, *changes, ("import sys\n", "import functools\nimport sys\n"))
    assert watch_script(ref)["watched_steps"] >= 48


@pytest.mark.parametrize(
    ("callbacks", "metric"),
    [
        ("ModelCheckpoint('m.keras'), ReduceLROnPlateau(), EarlyStopping('val_accuracy')", ["val_accuracy", "max"]),
        ("ModelCheckpoint('m.keras'), ReduceLROnPlateau()", None),
    ],
)
def test_keras_callback_that_chooses_nothing_names_no_metric(callbacks, metric, tmp_path):
    uses = f"verbose=2, callbacks=[{callbacks}])"
    imports = "import keras\nfrom keras.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau\n"
    ref = changed("keras_dense", tmp_path, ("verbose=2)", uses), ("import keras\n", imports))
    assert run_of(ref)["monitor"] == metric


def test_each_fold_of_keras_has_its_evaluations(tmp_path):
    fold = """
for fold in range(3):
    model = keras.models.clone_model(model)
    model.compile("""
    ref = changed(
        "keras_dense",
        tmp_path,
        ("model.compile(", fold),
        ("\nepochs = ", "\n    epochs = "),
        ("\nmodel.fit(", "\n    model.fit("),
        ("sys.argv[1]", "1"),
    )
    described = run_of(ref)
    assert len({mark[1] for mark in described["marks"] if mark[3]}) == 3


def run_of(ref: ScriptRef) -> dict:
    """What the session of a run to its end describes."""
    with ScriptProcess(ref, {}) as process:
        if not process.wait_until_trained(300.0, None).get("ended"):
            process.ask("train", 300.0, None, count=10_000)
        return process.ask("describe")


def test_methods_on_gradients_act_after_lightnings_closure():
    ref = script("lightning_cnn", "3")
    watch_script(ref)
    check = checked(ref, "gradient_clipping:max_norm=1e-9", "CHANGES_TRAINING")
    assert check["passed"], check
    with arm(ref, "gradient_clipping:max_norm=0.001") as trained:
        assert "gradient_clipping" in trained.build()["effects"]


@pytest.mark.parametrize(
    ("name", "own", "other", "steps", "call"),
    [
        ("lightning_cnn", {"max_epochs": 2}, {"max_epochs": 1}, 48, "L.Trainer("),
        (
            "transformers_classifier",
            {"num_train_epochs": 2.0, "learning_rate": 0.001},
            {"num_train_epochs": 1.0, "learning_rate": 0.002},
            64,
            "TrainingArguments(",
        ),
        (
            "keras_dense",
            {"epochs": 2, "learning_rate": 0.001},
            {"epochs": 1, "learning_rate": 0.002},
            112,
            "model.fit(",
        ),
    ],
)
def test_numbers_that_a_script_passes_to_its_framework_can_be_varied(name, own, other, steps, call):
    needs(name)
    argv = [sys.executable, f"{name}.py", "2"]
    ref = ScriptRef.of_command(argv, directory=str(SCRIPTS), vary=tuple(own))
    assert ScriptDescription(ref).facts(processes=1)["varied"] == own
    places = known_sites(ref)["framework_arguments"]
    site = next(place["site"] for place in places if next(iter(own)) in place["names"])
    line = int(site.partition(":")[2].partition("#")[0])
    assert call in (SCRIPTS / f"{name}.py").read_text().splitlines()[line - 1]
    run = ScriptTrial(ref, methods={"script_arguments": other}, device="cpu", seed=0).run()
    assert run["steps"] == steps and len(run["evaluations"]) == 1


def test_arguments_that_transformers_parses_can_be_varied(tmp_path):
    needs("transformers_classifier")
    text = (
        (SCRIPTS / "transformers_classifier.py").read_text().replace("import Bert", "import HfArgumentParser, Bert", 1)
    )
    begin, end = text.index("    arguments = "), text.index("    trainer = ")
    parsed = "    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    (tmp_path / "train.py").write_text(text[:begin] + parsed + text[end:])
    options = ["--output_dir=out", "--use_cpu=true", "--report_to=none", "--eval_strategy=epoch"]
    options += ["--num_train_epochs=2"]
    argv, vary = [sys.executable, "train.py", *options], ("learning_rate", "num_train_epochs")
    ref = ScriptRef.of_command(argv, directory=str(tmp_path), vary=vary)
    assert ScriptDescription(ref).facts(processes=1)["varied"] == {"learning_rate": 5e-5, "num_train_epochs": 2.0}
    assert known_sites(ref)["framework_arguments"] == []
    other = {"script_arguments": {"learning_rate": 1e-4, "num_train_epochs": 1.0}}
    assert ScriptTrial(ref, methods=other, device="cpu", seed=0).run()["steps"] == 128


LATER_METRICS = {  # script -> (text in it, its replacement), so that the last report lacks the monitored metric
    "keras_dense": (
        "verbose=2)",
        "verbose=2, validation_freq=2, callbacks=[keras.callbacks.EarlyStopping('val_accuracy', patience=9)])",
    ),
    "transformers_classifier": (
        "trainer.train()",
        "trainer.train()\n    trainer.evaluate(Sentences(64, 3), metric_key_prefix='test')",
    ),
    "lightning_manual": (
        "trainer.fit(Autoencoder(), train, val)",
        "trainer.callbacks.append(pl.callbacks.EarlyStopping('val_mse', patience=9))\n"
        "trainer.fit(model := Autoencoder(), train, val)\n"
        "pl.Trainer(accelerator='cpu', logger=False, enable_checkpointing=False).validate(model, val)",
    ),
}


@pytest.mark.parametrize("name", LATER_METRICS)
def test_metric_that_a_framework_monitors_outlasts_reports_without_it(name, tmp_path):
    needs(name)
    (tmp_path / "train.py").write_text((SCRIPTS / f"{name}.py").read_text().replace(*LATER_METRICS[name]))
    epochs = "3" if name == "keras_dense" else "1"
    ref = ScriptRef.of_command([sys.executable, "train.py", epochs], directory=str(tmp_path))
    with ScriptProcess(ref, {}) as process:
        process.wait_until_trained(300.0, None)
        assert process.ask("train", 300.0, None, count=10_000)["ended"]
        monitor = process.ask("describe", 60.0, None)["monitor"]
    assert monitor == list(RUNS[name][2:4])
