"""Methods for Keras on torch: the same outputs, gradients and weights as Keras's own code."""

import copy
import os
from importlib.util import find_spec
from itertools import product

import numpy
import pytest
import torch

from hasten.benchmarking.equivalence_runs import RunConditions
from hasten.core.errors import NoEffectError, RunError
from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.engine.registry import make_methods

if find_spec("keras") is None:
    pytest.skip("keras is not installed: pip install hasten[frameworks]", allow_module_level=True)
h5py = pytest.importorskip("h5py")  # which Keras requires
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Keras's own warnings
METHODS = "fused_rnn", "fused_keras_optimizer", "lazy_keras_metrics", "direct_keras_calls", "direct_keras_loss"


@pytest.fixture
def keras(monkeypatch):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    from keras.src import backend

    if keras.backend.backend() != "torch":
        pytest.skip("Keras runs on another backend here")
    for owner, name in (
        (backend, "lstm"),
        (backend, "gru"),
        (keras.callbacks.CallbackList, "on_train_batch_end"),
        (keras.callbacks.CallbackList, "on_test_batch_end"),
        (keras.Layer, "__call__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    keras.utils.set_random_seed(1)
    return keras


def applied(recipe: str, model) -> RunContext:
    run = RunContext(torch.device("cpu"), None)
    for method in make_methods(Recipe.coerce(recipe)):
        assert method.model(model, run) is model
    return run


def outputs_and_gradients(keras, cls, fused: bool, options: dict) -> list[torch.Tensor]:
    keras.utils.set_random_seed(1)
    layer = cls(6, bias_initializer="random_normal", **options)
    layer.build((4, 7, 5))
    run = applied("fused_rnn", layer) if fused else None
    inputs = numpy.random.default_rng(0).normal(size=(4, 7, 5)).astype("float32")
    outputs = layer(inputs, training=True)
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    sum(output.square().sum() for output in outputs).backward()
    if run is not None:
        assert "one kernel each" in run.effect_checks["fused_rnn"]()
    return [output.detach() for output in outputs] + [variable.value.grad for variable in layer.trainable_weights]


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_fused_rnn_gives_keras_own_outputs_and_gradients(keras, name):
    names = ("return_sequences", "return_state", "go_backwards", "use_bias", "dropout")
    for values in product((False, True), (False, True), (False, True), (False, True), (0.0, 0.3)):
        options = dict(zip(names, values, strict=True))
        loop, kernel = (outputs_and_gradients(keras, getattr(keras.layers, name), fused, options) for fused in (0, 1))
        assert len(loop) == len(kernel)
        for a, b in zip(loop, kernel, strict=True):
            torch.testing.assert_close(a, b, atol=3e-6, rtol=1e-5, msg=str(options))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("LSTM", {"activation": "relu"}, "tanh and sigmoid"),
        ("LSTM", {"unroll": True}, "unrolled"),
        ("GRU", {"reset_after": False}, "reset_after"),
        ("LSTM", {"use_cudnn": False}, "no LSTM or GRU that has a kernel"),
    ],
)
def test_fused_rnn_leaves_other_formulas_to_keras(keras, name, options, reason):
    layer = getattr(keras.layers, name)(6, **options)
    run = applied("fused_rnn", layer)
    layer(numpy.zeros((2, 3, 5), "float32"))
    with pytest.raises(NoEffectError, match=reason):
        run.effect_checks["fused_rnn"]()


def test_fused_rnn_leaves_masks_to_keras(keras):
    def outputs(fused: bool) -> torch.Tensor:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.layers.Input((5,)), keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.LSTM(3)]
        )
        run = applied("fused_rnn", model) if fused else None
        result = model(numpy.array([[3, 4, 0, 0, 0], [1, 2, 3, 4, 5]]))
        if run is not None:
            with pytest.raises(NoEffectError, match="mask"):
                run.effect_checks["fused_rnn"]()
        return result

    assert torch.equal(outputs(False), outputs(True))


def trained(keras, recipe: str, optimizer, callbacks=()) -> tuple[list[numpy.ndarray], dict, RunContext]:
    keras.utils.set_random_seed(3)
    x = numpy.random.default_rng(0).normal(size=(256, 20)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    inputs = keras.Input((20,))
    hidden = keras.layers.Dense(32, activation="relu")(inputs)
    hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(hidden))
    hidden = keras.layers.Add()([hidden, keras.layers.Dense(32)(inputs)])  # a layer that is called as before
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(hidden))
    model.compile(optimizer(keras.optimizers), "sparse_categorical_crossentropy", metrics=["accuracy"])
    run = applied(recipe, model)
    history = model.fit(
        x, y, batch_size=32, epochs=2, validation_split=0.25, verbose=0, callbacks=[make(keras) for make in callbacks]
    ).history
    return model.get_weights(), history, run


def adam(optimizers):
    return optimizers.Adam(1e-2)


@pytest.mark.parametrize(
    "recipe",
    [
        "lazy_keras_metrics",
        "direct_keras_calls",
        "direct_keras_loss",
        "lazy_keras_metrics + direct_keras_calls + direct_keras_loss",
    ],
)
def test_exact_keras_methods_keep_weights_and_history(keras, recipe):
    weights, history, _ = trained(keras, "baseline", adam)
    others, other_history, run = trained(keras, recipe, adam)
    assert all(numpy.array_equal(a, b) for a, b in zip(weights, others, strict=True)) and history == other_history
    assert all(check() for check in run.effect_checks.values()) and not run.no_effect


@pytest.mark.parametrize(
    "optimizer",
    [
        adam,
        lambda optimizers: optimizers.AdamW(1e-2, clipnorm=1.0),
        lambda optimizers: optimizers.Adam(
            optimizers.schedules.ExponentialDecay(1e-2, 5, 0.9), amsgrad=True, epsilon=0.1
        ),
    ],
    ids=["adam", "adamw", "amsgrad"],
)
def test_fused_keras_optimizer_only_rounds(keras, optimizer):
    weights, _, _ = trained(keras, "baseline", optimizer)
    others, _, run = trained(keras, "fused_keras_optimizer", optimizer)
    assert "fused kernel" in run.effect_checks["fused_keras_optimizer"]()
    for a, b in zip(weights, others, strict=True):
        numpy.testing.assert_allclose(a, b, atol=1e-4)


def test_fused_keras_optimizer_without_a_kernel_has_no_effect(keras):
    _, _, run = trained(keras, "fused_keras_optimizer", lambda optimizers: optimizers.SGD(0.1))
    assert run.no_effect == [("fused_keras_optimizer", "the kernel computes Adam and AdamW, not SGD")]


def test_lazy_keras_metrics_serve_a_callback_that_reads_them(keras):
    seen = []

    def reader(keras):
        return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))

    trained(keras, "lazy_keras_metrics", adam, [reader])
    lazily, seen = seen, []
    trained(keras, "baseline", adam, [reader])
    assert len(lazily) == 12 and all(isinstance(value, float) for value in lazily)
    assert lazily == seen


def test_the_conditions_of_an_exactness_check_disable_dropout_and_refuse_float32(keras):
    layers = keras.layers
    model = keras.Sequential([layers.Input((4, 5)), layers.LSTM(3, dropout=0.2), layers.Dropout(0.3), layers.Dense(1)])
    run = RunContext(torch.device("cpu"), None)
    assert RunConditions(double=False).model(model, run) is model
    assert model.layers[0].dropout == 0 and model.layers[1].rate == 0
    with pytest.raises(RunError, match="kernel and the computations with it in a lower precision"):
        RunConditions(double=True).model(model, run)


def test_lazy_keras_metrics_return_those_of_a_single_batch(keras):
    model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(1)])
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    for one in (model, plain):
        one.compile("sgd", "mse", metrics=["mae"])
    applied("lazy_keras_metrics", model)
    x = numpy.ones((8, 20), "float32")
    for name in ("train_on_batch", "test_on_batch"):
        values, expected = (getattr(one, name)(x, x[:, :1]) for one in (model, plain))
        assert len(values) == 2 and values == pytest.approx(expected, rel=1e-5)


def test_direct_keras_calls_follow_a_layer_that_is_changed_later(keras):
    model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(3)])
    applied("direct_keras_calls", model)
    x = torch.ones(8, 20)
    model(x, training=False)
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(numpy.ones((2, 3)))
    expected = x @ model.layers[0].kernel + model.layers[0].bias.value
    torch.testing.assert_close(model(x, training=False), expected)


def history_of(keras, recipe: str, layers, loss, labels, **fit) -> tuple[list[numpy.ndarray], dict, RunContext]:
    """Trains a Sequential model of three inputs: (weights, history, context of the methods)."""
    keras.utils.set_random_seed(3)
    random = numpy.random.default_rng(0)
    x = random.normal(size=(96, 3)).astype("float32")
    model = keras.Sequential([keras.layers.Input((3,)), *layers(keras.layers)])
    model.compile("sgd", loss, metrics=["accuracy", keras.metrics.MeanAbsoluteError()])
    run = applied(recipe, model)
    options = {"epochs": 2, "batch_size": 20, "validation_split": 0.25, "verbose": 0}  # the last batches are smaller
    history = model.fit(x, labels(random), **options, **fit).history
    return model.get_weights(), history, run


def binary(random) -> numpy.ndarray:
    return random.integers(0, 2, size=(96, 1))


def sigmoid(layers) -> list:
    return [layers.Dense(8, activation="relu"), layers.Dropout(0.3), layers.Dense(1, activation="sigmoid")]


@pytest.mark.parametrize(
    ("layers", "loss", "labels"),
    [
        (sigmoid, "binary_crossentropy", binary),
        (lambda layers: [layers.Dense(4)], "mse", lambda random: random.normal(size=(96, 4))),
        (lambda layers: [layers.Dense(1)], "huber", lambda random: random.normal(size=96)),
    ],
    ids=["binary", "regression", "one column"],
)
def test_direct_keras_loss_keeps_weights_and_history(keras, layers, loss, labels):
    recipe = "direct_keras_loss + direct_keras_calls + lazy_keras_metrics"
    weights, history, _ = history_of(keras, "baseline", layers, loss, labels)
    others, other_history, run = history_of(keras, recipe, layers, loss, labels)
    assert all(numpy.array_equal(a, b) for a, b in zip(weights, others, strict=True)) and history == other_history
    assert "losses were computed directly" in run.effect_checks["direct_keras_loss"]()


@pytest.mark.parametrize(
    ("layers", "loss", "fit", "reason"),
    [
        (lambda layers: [layers.Dense(1, kernel_regularizer="l2")], "mse", {}, "may add losses"),
        (lambda layers: [layers.Dense(1, activity_regularizer="l2")], "mse", {}, "may add losses"),
        (sigmoid, "mse", {"sample_weight": numpy.linspace(0, 1, 96)}, "samples have weights"),
    ],
    ids=["regularizer", "activity", "sample weights"],
)
def test_direct_keras_loss_leaves_other_losses_to_keras(keras, layers, loss, fit, reason):
    weights, history, _ = history_of(keras, "baseline", layers, loss, binary, **fit)
    others, other_history, run = history_of(keras, "direct_keras_loss", layers, loss, binary, **fit)
    assert all(numpy.array_equal(a, b) for a, b in zip(weights, others, strict=True)) and history == other_history
    with pytest.raises(NoEffectError, match=reason):
        run.effect_checks["direct_keras_loss"]()


def test_direct_keras_loss_leaves_class_weights_to_keras(keras):
    weights, history, _ = history_of(keras, "baseline", sigmoid, "mse", binary, class_weight={0: 1.0, 1: 3.0})
    others, same, run = history_of(keras, "direct_keras_loss", sigmoid, "mse", binary, class_weight={0: 1.0, 1: 3.0})
    assert all(numpy.array_equal(a, b) for a, b in zip(weights, others, strict=True)) and history == same
    assert run.effect_checks["direct_keras_loss"]() == "4 losses were computed directly"  # of the validation


@pytest.mark.parametrize("recipe", ["direct_keras_loss", "direct_keras_loss + lazy_keras_metrics + direct_keras_calls"])
def test_keras_methods_follow_a_model_that_is_compiled_again(keras, recipe):
    def weights(recipe: str) -> list[numpy.ndarray]:
        keras.utils.set_random_seed(3)
        x = numpy.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        applied(recipe, model)
        model.fit(x, x, epochs=1, verbose=0)
        model.compile("sgd", "mae", metrics=["mse"])
        history = model.fit(x, x, epochs=1, verbose=0).history
        return [*model.get_weights(), *history["loss"], *history["mse"]]

    assert all(numpy.array_equal(a, b) for a, b in zip(weights("baseline"), weights(recipe), strict=True))


def own_loss(y_true, y_pred):
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)  # the values are float64, the loss of Keras is float32
    return ((y_pred - y_true).square() * weights).mean(1)


def test_loss_function_of_the_user_is_left_to_keras(keras):
    def layers(of):
        return [of.Dense(4)]

    labels = lambda random: random.normal(size=(96, 4))  # noqa: E731
    weights, history, _ = history_of(keras, "baseline", layers, own_loss, labels)
    others, same, run = history_of(keras, "direct_keras_loss", layers, own_loss, labels)
    assert all(numpy.array_equal(a, b) for a, b in zip(weights, others, strict=True)) and history == same
    with pytest.raises(NoEffectError, match="own_loss is no built-in loss that is a mean over the batch"):
        run.effect_checks["direct_keras_loss"]()


def test_regularizer_of_a_layer_that_is_trained_later_counts(keras):
    def trained_twice(recipe: str) -> list[numpy.ndarray]:
        keras.utils.set_random_seed(3)
        x = numpy.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        frozen = keras.layers.Dense(3, kernel_regularizer="l2", trainable=False)
        model = keras.Sequential([keras.layers.Input((3,)), frozen, keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        model.optimizer.build(model.variables)  # those that are trained later, too
        applied(recipe, model)
        model.fit(x, x, epochs=1, verbose=0)
        frozen.trainable = True
        model.fit(x, x, epochs=1, verbose=0)
        return model.get_weights()

    one, other = trained_twice("baseline"), trained_twice("direct_keras_loss + direct_keras_calls")
    assert all(numpy.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_own_compute_loss_of_the_object_is_called(keras):
    x = numpy.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    run = applied("direct_keras_loss", model)
    called, original = [], model.compute_loss
    model.__dict__["compute_loss"] = lambda *args, **kwargs: called.append(1) or original(*args, **kwargs)
    model.fit(x, x, epochs=1, verbose=0)
    assert len(called) >= 2 and not run.no_effect  # Keras also calls it once to build
    other = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3)])
    other.compile("sgd", "mse")
    other.__dict__["compute_loss"] = other.compute_loss
    ((_, why),) = applied("direct_keras_loss", other).no_effect
    assert why == "Sequential has its own compute_loss"


def test_stateless_call_uses_the_weights_that_it_is_given(keras):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    applied("direct_keras_calls", model)
    zeros = [torch.zeros_like(variable.value) for variable in model.trainable_variables]
    outputs, _ = model.stateless_call(zeros, [], torch.ones(4, 3), training=True)
    assert not outputs.any() and model(torch.ones(4, 3), training=True).any()


def test_direct_call_of_a_model_ends_when_a_layer_is_added(keras):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    applied("direct_keras_calls", model)
    model.add(keras.layers.Dense(5))
    assert model(torch.ones(4, 3), training=True).shape == (4, 5)


def test_saved_model_shows_no_trace_of_the_methods(keras, tmp_path):
    recipe = "lazy_keras_metrics + direct_keras_calls + direct_keras_loss + fused_keras_optimizer"
    names = []
    x = numpy.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    for each in ("baseline", recipe):
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3)])
        model.compile("adam", "mse", metrics=["mae"])
        applied(each, model)
        model.fit(x, x, epochs=1, verbose=0)
        model.save_weights(tmp_path / "model.weights.h5")
        groups: list[str] = []
        h5py.File(tmp_path / "model.weights.h5").visit(groups.append)
        names.append(groups)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert all(numpy.array_equal(*pair) for pair in zip(loaded.get_weights(), model.get_weights(), strict=True))
    assert names[0] == names[1] and "layers/dense/vars/0" in names[0]


def test_copy_of_a_model_trains_its_own_weights(keras):
    recipe = "lazy_keras_metrics + direct_keras_calls + direct_keras_loss + fused_keras_optimizer"
    x = numpy.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"])
    run = applied(recipe, model)
    model.fit(x, x, epochs=1, verbose=0)
    before, twin = model.get_weights(), copy.deepcopy(model)
    history = twin.fit(x, x, epochs=1, verbose=0, shuffle=False).history
    assert all(numpy.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert not any(numpy.array_equal(a, b) for a, b in zip(before, twin.get_weights(), strict=True))
    assert history == model.fit(x, x, epochs=1, verbose=0, shuffle=False).history
    assert all(check() for check in run.effect_checks.values())


def test_direct_call_of_the_model_leaves_errors_of_shape_and_symbolic_calls_to_keras(keras):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    applied("direct_keras_calls", model)
    with pytest.raises(ValueError, match="incompatible with the layer"):
        model(torch.zeros(4, 5), training=True)
    outer = keras.Input((3,))
    assert keras.Model(outer, model(outer, training=False)).output_shape == (None, 2)
    assert torch.equal(model(torch.ones(1, 3), training=True), model(torch.ones(1, 3)))


@pytest.mark.parametrize("recipe", METHODS)
def test_methods_of_keras_have_no_effect_on_other_models(recipe):
    run = applied(recipe, torch.nn.Linear(2, 2))
    assert [name for name, _ in run.no_effect] == [recipe] and not run.effect_checks


def test_fused_keras_optimizer_keeps_the_momentum_of_each_weight(keras):
    def momentum(recipe):
        keras.utils.set_random_seed(3)
        x = numpy.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        dense = keras.layers.Dense(3, kernel_initializer="orthogonal")
        model = keras.Sequential([keras.layers.Input((4,)), dense])
        model.compile("adam", "mse")
        applied(recipe, model)
        model.fit(x, x[:, :3], epochs=1, shuffle=False, verbose=0)
        assert not dense.kernel.value.is_contiguous()
        return model.optimizer._momentums[0].numpy()

    numpy.testing.assert_allclose(momentum("baseline"), momentum("fused_keras_optimizer"), atol=1e-6)


def test_fused_keras_optimizer_follows_a_model_that_is_compiled_again(keras):
    x = numpy.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    applied("fused_keras_optimizer", model)
    model.fit(x, x, epochs=1, verbose=0)
    model.compile("adam", "mse")
    model.fit(x, x, epochs=1, verbose=0)
    assert "_backend_update_step" in vars(model.optimizer)
