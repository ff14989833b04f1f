"""channels_last: weights, inputs and activations have the channels innermost."""

import torch


def test_inputs_and_activations_have_the_channels_innermost(convolutional, trained):
    task, innermost = convolutional(), []
    model = task.model()
    model[1].register_forward_hook(
        lambda module, inputs, output: innermost.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    run = trained(convolutional(model=lambda: model), "channels_last", 2).run
    assert innermost == [True, True]
    assert run.model[1][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not run.no_effect


def test_tensors_that_are_not_images_are_unchanged(convolutional):
    from hasten.methods.channels_last import ChannelsLast

    labels, flat = torch.arange(4), torch.randn(4, 3)
    moved = ChannelsLast().batch_transform(lambda batch: batch, run=None)(
        {"x": torch.randn(4, 3, 2, 2), "flat": flat, "labels": labels}
    )
    assert moved["labels"] is labels and moved["flat"] is flat
    assert moved["x"].is_contiguous(memory_format=torch.channels_last)


def test_model_without_convolutions_has_no_effect(perceptron, trained):
    assert trained(perceptron(), "channels_last", 1).run.no_effect == [
        ("channels_last", "the model has no two-dimensional convolution")
    ]
