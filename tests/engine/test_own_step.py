"""Tasks with a step of their own, several optimizers, and schedules per epoch and on a plateau."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import hasten
from hasten import ConfigurationError, Exactness, RunError, Task
from hasten.benchmarking.exactness import check_exactness
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.testing.tasks import perceptron
from hasten.utils.optimizers import OptimizerList
from helpers import public_loops

LOOPS = public_loops.language_model, public_loops.gan, public_loops.classifier
ENDS = ("model.safetensors", "log.jsonl")


def weights_of(task: Task, out, recipe=None) -> dict[str, torch.Tensor]:
    hasten.train(task, recipe, out=out, device="cpu")
    return load_file(out / "model.safetensors")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_language_model_has_the_bits_of_the_loop_by_hand(tmp_path):
    weights, rates = public_loops.language_model_by_hand()
    assert_equal(weights_of(public_loops.language_model(), tmp_path / "r"), weights)
    assert rates[0] > rates[-1], "else the plateau is not tested"


@pytest.mark.parametrize("name", ["gan", "classifier"])
def test_other_loop_has_the_bits_of_the_loop_by_hand(name, tmp_path):
    by_engine = weights_of(getattr(public_loops, name)(), tmp_path / "r")
    assert_equal(by_engine, getattr(public_loops, f"{name}_by_hand")())


@pytest.mark.parametrize("make", LOOPS, ids=lambda make: make.__name__)
def test_resume_from_every_step_is_bit_identical(make, tmp_path):
    copies = []

    def copy(records):
        copies.append(tmp_path / f"copy{len(copies)}")
        shutil.copytree(tmp_path / "whole", copies[-1])

    hasten.train(make(), out=tmp_path / "whole", checkpoint_seconds=0, observers=[copy], device="cpu")
    assert len(copies) >= 12
    for directory in copies:
        hasten.train(make(), out=directory, resume=True, device="cpu")
        for name in ENDS:
            assert (directory / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (directory.name, name)


def test_state_is_empty_at_the_first_batch_of_every_epoch():
    seen = []

    def step(model, batch, context):
        seen.append((context.progress.epoch, context.progress.batch, len(context.state)))
        context.state["output"] = output = model(batch[0])
        return torch.nn.functional.cross_entropy(output, batch[1])

    program = build(perceptron(step=step))
    list(train_steps(program))
    assert seen == [(epoch, batch, int(batch > 0)) for epoch in range(2) for batch in range(6)]
    assert not program.run.checkpoint_state["step"].context.state["output"].requires_grad


def test_schedule_per_epoch_under_fewer_epochs_keeps_its_shape():
    """Three epochs of it are compressed into the steps of half as many."""
    program = build(public_loops.classifier(), hasten_methods("budgeted_schedule:factor=0.5"))
    rates = []
    for _ in train_steps(program):
        rates.append(program.run.optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


def hasten_methods(recipe: str):
    from hasten.engine.registry import make_methods

    return make_methods(hasten.Recipe.coerce(recipe))


def test_clip_grad_norm_limits_the_gradients_that_the_update_uses():
    program = build(perceptron(clip_grad_norm=1e-3, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1)))
    before = [weight.detach().clone() for weight in program.run.model.parameters()]
    next(train_steps(program))
    change = [now.detach() - weight for now, weight in zip(program.run.model.parameters(), before, strict=True)]
    assert float(torch.nn.utils.get_total_norm(change)) == pytest.approx(1e-3, rel=1e-4)


def test_clip_grad_norm_of_a_gan_counts_only_the_parameters_of_the_current_optimizer():
    def sgd(model):
        return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (model.discriminator, model.generator)]

    program = build(dataclasses.replace(public_loops.gan(), clip_grad_norm=1e-3, optimizer=sgd))
    model = program.run.model
    before = [weight.detach().clone() for weight in model.parameters()]
    next(train_steps(program))
    change = [now.detach() - weight for now, weight in zip(model.parameters(), before, strict=True)]
    count = len(list(model.generator.parameters()))
    for part in (change[:count], change[count:]):
        assert float(torch.nn.utils.get_total_norm(part)) == pytest.approx(1e-3, rel=1e-3)


def test_state_of_several_optimizers_is_that_of_each():
    model = public_loops.Networks()
    optimizers = public_loops.two_adams(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    state = OptimizerList(optimizers).state_dict()
    assert sorted(state["state"]) == list(range(len(list(model.parameters()))))
    others = public_loops.two_adams(public_loops.Networks())
    OptimizerList(others).load_state_dict(state)
    for optimizer, other in zip(optimizers, others, strict=True):
        one, same = optimizer.state_dict(), other.state_dict()
        assert one["param_groups"] == same["param_groups"]
        assert all(torch.equal(one["state"][i]["exp_avg"], same["state"][i]["exp_avg"]) for i in one["state"])


RECIPES = ["fused_optimizer", "ema", "bfloat16", "gradient_clipping", "in_memory_batches"]
BY_INDEX = {"in_memory_batches"}  # the language model's ready batches are not read by index


@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (loop, name)
        for loop in LOOPS
        for name in RECIPES
        if loop is not public_loops.language_model or name not in BY_INDEX
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_method_trains_the_task(make, recipe, tmp_path):
    result = hasten.train(make(), recipe, out=tmp_path / "r", device="cpu")
    assert result["steps"] == 3 * (8 if make is public_loops.language_model else 4)
    if recipe != "fused_optimizer" or make is public_loops.gan:  # torch has no fused Adadelta; SGD is fused
        assert not [why for _, why in result["no_effect"] if "which this CPU cannot compute" not in why]
    lines = [json.loads(line) for line in (tmp_path / "r" / "log.jsonl").read_text().splitlines()]
    assert sum("loss" in line for line in lines) == result["steps"]


@pytest.mark.parametrize(
    ("make", "changes", "recipe", "message"),
    [
        (
            public_loops.language_model,
            {},
            "cuda_graph",
            r"Task\(step=\) requires python_between_kernels, which cuda_graph",
        ),
        (public_loops.language_model, {}, "znorm", r"Task\(clip_grad_norm=\) requires gradient_norm, which znorm"),
        (
            public_loops.language_model,
            {},
            "budgeted_schedule",
            "budgeted_schedule cannot be used: .* follows the metric",
        ),
        (public_loops.language_model, {}, "batch_size", "batch size cannot be changed: the training data are ready"),
        (public_loops.gan, {"step": None}, None, "the task has 2 optimizers; give Task"),
    ],
)
def test_method_that_cannot_work_with_the_task_is_refused(make, changes, recipe, message):
    with pytest.raises(ConfigurationError, match=message):
        hasten.train(dataclasses.replace(make(), **changes), recipe, device="cpu")


def test_gradient_accumulation_has_no_effect_on_a_step_that_may_carry_a_state():
    with pytest.raises(
        RunError, match="gradient_accumulation has no effect: the task's own step would carry its state"
    ):
        hasten.train(public_loops.language_model(), "gradient_accumulation", device="cpu", require_effect=True)


@pytest.mark.parametrize(
    ("make", "recipe", "exactness"),
    [
        (public_loops.language_model, "fused_optimizer", Exactness.EQUIVALENT_MATH),
        (public_loops.gan, "fused_optimizer + channels_last", Exactness.EQUIVALENT_MATH),
        (public_loops.gan, "in_memory_batches", Exactness.BIT_EXACT),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_exactness_of_a_method_is_checked_on_the_task(make, recipe, exactness):
    """The noise of the GAN and the first state of the language model are float64 tensors where the weights are."""
    check = check_exactness(make(), hasten.Recipe(), hasten.Recipe.coerce(recipe), exactness, device="cpu")
    assert check.passed, check.why


def test_lower_precision_is_measured_on_the_task():
    """Whether it passes depends on how the processor rounds: 14 dB with units for bfloat16, 20 dB and more without."""
    check = check_exactness(
        public_loops.gan(), hasten.Recipe(), hasten.Recipe.coerce("bfloat16"), Exactness.REDUCED_PRECISION, device="cpu"
    )
    assert check.number > 10 and "dB above its error against float64" in check.why


def yields(count):
    def step(model, batch, context):
        for _ in range(count):
            yield model.discriminator(batch[0]).mean() + model.generator(torch.randn(4, 6, 1, 1)).mean()

    return step


@pytest.mark.parametrize(
    ("make", "step", "message"),
    [
        (public_loops.gan, yields(1), r"Task\(step=\) yielded 1 losses; the task has 2 optimizers"),
        (public_loops.gan, yields(3), "yields more losses than the task has optimizers"),
        (public_loops.gan, lambda model, batch, context: 0.0, "must be a generator that yields a loss for each"),
        (public_loops.gan, lambda model, batch, context: iter("ab"), "must be a generator that yields a loss for each"),
        (public_loops.language_model, yields(1), "is a generator, which is for several optimizers; return the loss"),
        (public_loops.language_model, lambda model, batch, context: 1.0, "must return a tensor with a gradient"),
    ],
)
def test_step_that_gives_no_loss_for_each_optimizer_raises_run_error(make, step, message):
    with pytest.raises(RunError, match=message):
        hasten.train(dataclasses.replace(make(), step=step), device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "train"}, r"Task\(step=\) must be a function \(model, batch, context\) -> loss or None, not a str"),
        ({"evaluate": 1}, r"Task\(evaluate=\) must be a function \(model, batches\) -> number or None, not a int"),
        ({"evaluate": len, "validation_data": None}, r"requires Task\(validation_data=\), and the name"),
        ({"evaluate": len, "metric": len}, r"and the name of what it returns as Task\(metric=\)"),
        ({"schedule_interval": "week"}, 'must be "step" or "epoch", not .week.'),
        ({"schedule_interval": "epoch", "optimizer": lambda model, steps: None}, "choose one of them"),
        ({"clip_grad_norm": 0}, r"Task\(clip_grad_norm=\) must be a positive number, not 0"),
        ({"clip_grad_norm": True}, "must be a positive number, not True"),
        ({"metric": "score", "evaluate": lambda model, batches: 1}, "unknown whether a higher score is better"),
    ],
)
def test_wrong_field_of_a_task_is_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        hasten.train(perceptron(**changes), device="cpu")


@pytest.mark.parametrize("value", ["0.5", None, torch.zeros(2)])
def test_evaluation_that_returns_no_number_raises_run_error(value):
    with pytest.raises(RunError, match=r"Task\(evaluate=\) must return one number; it returned"):
        hasten.train(perceptron(evaluate=lambda model, batches: value), device="cpu")


def test_evaluation_is_in_evaluation_mode_without_gradients_and_leaves_the_random_numbers(tmp_path):
    def score(model, batches):
        assert not model.training and not torch.is_grad_enabled()
        assert sum(len(x) for x, _ in batches) == 48
        return torch.rand(1)

    scored = perceptron(evaluate=score, metric="score", higher_is_better=True)
    assert_equal(weights_of(scored, tmp_path / "a"), weights_of(perceptron(), tmp_path / "b"))


# ---- data that come in ready batches, as the get_batch of nanoGPT


def ready_batches(kind: str):
    """The same four batches of 16 samples as a DataLoader without batch size, a dataset, and a plain iterable."""
    samples = perceptron().train_data
    batches = [(samples.inputs[i : i + 16], samples.labels[i : i + 16]) for i in range(0, 64, 16)]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(batches)

    class Iterable:
        def __len__(self):
            return len(batches)

        def __iter__(self):
            return iter(batches)

    return {
        "loader": lambda: DataLoader(batches, batch_size=None),
        "stream_in_loader": lambda: DataLoader(Stream(), batch_size=None),
        "stream": Stream,
        "iterable": Iterable,
        "function": lambda: lambda: Iterable(),
    }[kind]()


KINDS = "loader", "stream_in_loader", "stream", "iterable", "function"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the training data have no length")
def test_ready_batches_are_the_batches_of_the_training(kind, tmp_path):
    result = hasten.train(perceptron(train_data=ready_batches(kind), batch_size=None, validation_data=None))
    assert (result["steps"], result["samples"]) == (8, 128)


def test_ready_batches_are_validation_data_too():
    ready = perceptron(train_data=ready_batches("iterable"), validation_data=ready_batches("iterable"), batch_size=None)
    samples = perceptron(train_data=ready_batches("iterable"), validation_data=ready_batches("loader"), batch_size=None)
    assert hasten.train(ready, device="cpu")["metric"] == hasten.train(samples, device="cpu")["metric"]


def test_samples_without_batch_size_are_refused():
    with pytest.raises(
        ConfigurationError, match=r"Task\(batch_size=\) is missing for .* train_data; only .* iterable of batches"
    ):
        hasten.train(perceptron(batch_size=None), device="cpu")
