"""Every method shows that it acted on a model of each make, or says why it does not."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from hasten.core.recipe import Recipe
from hasten.engine.registry import method_class, method_names
from hasten.testing import Subject
from hasten.testing.checks import shows_its_effect
from hasten.testing.effects import observe_effect
from hasten.testing.models import MODEL_MAKES, available_makes
from helpers.markers import slow
from helpers.small_tasks import SETTINGS

TABLE = Path(__file__).resolve().parents[2] / "docs" / "data" / "effects.json"
SAME_ON_ALL_MODELS = {"loader_workers", "num_threads", "budgeted_schedule", "batch_size"}  # their presets act alike
PROCESSES_AND_THREADS = ("loader_workers", "num_threads")  # which take long to start


def recipes() -> list[tuple[str, dict]]:
    """(method, options) of every preset that differs in what acts; compilation without a C++ compiler."""
    found = []
    for name in method_names():
        presets = () if "distributed" in method_class(name).card.applies_to else method_class(name).card.presets
        for preset in presets[:1] if name in SAME_ON_ALL_MODELS else presets:
            if "mode" not in preset:  # of the compiler that is not used here
                found.append((name, {**preset, **SETTINGS.get(name, {})}))
    return [case for index, case in enumerate(found) if case not in found[:index]]


def case(name: str, options: dict):
    """A test case; slow if all makes take long: other tests have the usual ones."""
    case = slow if method_class(name).card.high_setup_cost or name in PROCESSES_AND_THREADS else pytest.param
    return case(name, options, id=str(Recipe({name: options})))


@pytest.fixture(autouse=True)
def quiet():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(("name", "options"), [case(*pair) for pair in recipes()])
def test_method_shows_its_effect_on_every_make(name, options):
    shows_its_effect(Subject(name, **options))


def test_table_of_the_documentation_has_every_pair():
    pairs = json.loads(TABLE.read_text(encoding="utf-8"))["pairs"]
    assert [(pair["method"], pair["make"]) for pair in pairs] == [
        (name, make)
        for name in method_names()
        if "distributed" not in method_class(name).card.applies_to
        for make in MODEL_MAKES
    ], "run docs/make_effects.py"
    assert all(pair["text"] and not pair["text"].startswith("effect not checked") for pair in pairs)


def test_makes_of_transformers_are_there():
    """They are left out where the package is missing, which this test reports."""
    pytest.importorskip("transformers")
    assert available_makes().keys() == MODEL_MAKES.keys()


@pytest.mark.slow
def test_compiler_with_its_own_autograd_acts():
    effect = observe_effect(MODEL_MAKES["sequential_subclass"](), Recipe.parse("compile:backend=aot_eager"))
    assert effect.acts and effect.text.startswith("1 graph compiled")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiler_compiles_around_a_recurrent_layer_or_says_why_not(backend):
    """From torch 2.15 on, it compiles what is before and after the layer."""
    effect = observe_effect(MODEL_MAKES["lstm"](), Recipe.parse(f"compile:backend={backend}"))
    if effect.acts:
        assert "1 graph break (models.py:" in effect.text
    else:
        assert effect.text.startswith(f"torch.compile {torch.__version__} compiled")
        assert "does not support RNN, GRU, or LSTM" in effect.text


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("make", ["sequential_subclass", "own_class"])
def test_inductor_compiles_a_graph_of_each_scope(make, scope):
    effect = observe_effect(MODEL_MAKES[make](), Recipe.parse(f"compile:scope={scope}"))
    assert effect.acts and "graph" in effect.text, effect


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("make", MODEL_MAKES)
def test_autograd_of_the_compiler_acts_or_says_why(make, scope):
    effect = observe_effect(MODEL_MAKES[make](), Recipe.parse(f"compile:scope={scope},backend=aot_eager"))
    assert effect.text and not effect.text.startswith("effect not checked"), effect


@pytest.mark.parametrize(
    ("make", "recipe", "reason"),
    [
        ("embeddings_only", "bfloat16", "the step has no matrix product or convolution"),
        ("sequential", "activation_checkpointing", "no sequence of blocks of one type"),
        ("own_class", "channels_last", "no two-dimensional convolution"),
        ("frozen_part", "gradient_accumulation", "normalize each microbatch separately"),
    ],
)
def test_method_without_effect_on_a_model_states_its_reason(make, recipe, reason):
    effect = observe_effect(MODEL_MAKES[make](), Recipe.parse(recipe))
    assert not effect.acts and reason in effect.text


@pytest.mark.parametrize(
    ("recipe", "evidence"),
    [
        ("activation_checkpointing", "1 of 2 blocks were recomputed"),  # the frozen one needs no gradient
        ("ema", "the averages of 6 parameters"),
        ("zero_init_residual", "1 normalization started"),
        ("gradient_centralization", "2 of 6 gradients"),
    ],
)
def test_frozen_part_is_left_alone(recipe, evidence):
    effect = observe_effect(MODEL_MAKES["frozen_part"](), Recipe.parse(recipe))
    assert effect.acts and evidence in effect.text
