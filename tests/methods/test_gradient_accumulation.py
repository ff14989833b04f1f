"""gradient_accumulation: microbatches are smaller, and weighted by their samples."""

import pytest
import torch


def test_batch_is_split_and_makes_one_step(perceptron, trained):
    sizes, model = [], perceptron().model()
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    run = trained(perceptron(model=lambda: model), "gradient_accumulation:accumulation_steps=3", 2).run
    assert sizes == [5, 5, 6, 5, 5, 6]
    assert run.progress.step == 2 and run.progress.samples == 32


def test_unequal_microbatches_give_the_gradient_of_the_batch(perceptron, trained):
    undivided, cut = (
        trained(perceptron(batch_size=7), recipe, 20)
        for recipe in ("baseline", "gradient_accumulation:accumulation_steps=3")
    )
    for name in undivided.weights:
        torch.testing.assert_close(cut.weights[name], undivided.weights[name], rtol=1e-4, atol=1e-5)
    assert cut.losses == pytest.approx(undivided.losses, rel=1e-4)


def test_model_with_batch_norm_is_not_split(convolutional, trained):
    usual, cut = trained(convolutional()), trained(convolutional(), "gradient_accumulation")
    ((name, why),) = cut.run.no_effect
    assert name == "gradient_accumulation" and "batch normalization" in why
    assert cut.program.plan.microbatches == 1 and usual.same_bits(cut)


def test_one_microbatch_has_no_effect(perceptron, trained):
    assert trained(perceptron(), "gradient_accumulation:accumulation_steps=1", 1).run.no_effect == [
        ("gradient_accumulation", "each batch is a single microbatch")
    ]


def test_ready_batches_of_unknown_size_are_split(perceptron, trained):
    batches = [(torch.randn(6, 12), torch.randint(3, (6,))) for _ in range(4)]
    data = torch.utils.data.DataLoader(batches, batch_size=None)
    run = trained(perceptron(train_data=data, validation_data=None, batch_size=None), "gradient_accumulation", 2).run
    assert run.plan.microbatches == 2 and not run.no_effect


@pytest.mark.parametrize("options", [{"weight": torch.arange(1.0, 5.0)}, {"reduction": "sum"}, {"ignore_index": 0}])
def test_loss_in_which_samples_do_not_count_alike_is_not_split(perceptron, trained, options):
    run = trained(perceptron(loss=torch.nn.CrossEntropyLoss(**options)), "gradient_accumulation", 1).run
    assert "weighted by their samples" in run.no_effect[0][1] and run.plan.microbatches == 1
