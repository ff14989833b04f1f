"""channels_last: weights, inputs and activations have the channels innermost."""

from types import SimpleNamespace

import torch
from torch import nn

from hasten.methods.channels_last import ChannelsLast
from hasten.testing.tasks import Labeled


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
    labels, flat = torch.arange(4), torch.randn(4, 3)
    moved = ChannelsLast().batch_transform(lambda batch: batch, SimpleNamespace(model=nn.Conv2d(3, 1, 1)))(
        {"x": torch.randn(4, 3, 2, 2), "flat": flat, "labels": labels}
    )
    assert moved["labels"] is labels and moved["flat"] is flat
    assert moved["x"].is_contiguous(memory_format=torch.channels_last)


def test_model_without_convolutions_has_no_effect(perceptron, trained):
    assert trained(perceptron(), "channels_last", 1).run.no_effect == [
        ("channels_last", "the model has no two-dimensional convolution")
    ]


class FlattensByView(nn.Module):
    """A perceptron on images, whose flattening needs the default memory format."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 4)

    def forward(self, images):
        return self.layer(images.view(len(images), -1))


def test_images_of_a_model_without_convolutions_stay_as_they_are(perceptron, trained):
    images = {"train_data": Labeled((3, 4, 4)), "validation_data": None}
    task = perceptron(model=FlattensByView, **images)
    run = trained(task, "channels_last")
    assert dict(run.run.no_effect) == {"channels_last": "the model has no two-dimensional convolution"}
    assert run.same_bits(trained(task))


class FlatAndDeep(nn.Module):
    """Convolutions in two and three dimensions, the first two with one weight; two names of one mask."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.volume = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 1)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.rand(1, 2, 4, 4))
        self.register_buffer("same_mask", self.mask)


def test_three_dimensional_convolutions_and_tied_tensors_stay_as_they_are():
    run = SimpleNamespace(observe_effect=lambda *_: None)
    model = ChannelsLast().model(FlatAndDeep(), run)
    assert model.second.weight is model.first.weight and model.same_mask is model.mask
    for tensor in (model.first.weight, model.mask):
        assert tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    assert model.volume.weight.is_contiguous()
