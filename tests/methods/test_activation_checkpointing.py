"""activation_checkpointing: fewer activations are saved, and the results are bit-identical."""

import copy

import pytest
import torch
from torch import nn

from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.methods.activation_checkpointing import _is_cache
from hasten.testing.tasks import CLASSES
from hasten.utils.blocks import repeated_blocks


def test_dropout_is_recomputed_identically(transformer, trained):
    usual, less = (trained(transformer(dropout=0.3), recipe) for recipe in ("baseline", "activation_checkpointing"))
    assert usual.same_bits(less)


def test_batch_norm_counts_each_batch_once(convolutional, trained):
    usual, less = (trained(convolutional(), recipe) for recipe in ("baseline", "activation_checkpointing"))
    assert less.run.no_effect == [] and usual.same_bits(less)
    assert less.weights["0.1.num_batches_tracked"] == 12


def saved_bytes(task, recipe: str) -> int:
    """Returns the bytes that autograd saves between forward and backward, without the weights."""
    program = build(task, make_methods(Recipe.coerce(recipe)))
    weights, saved = {parameter.data_ptr() for parameter in program.run.model.parameters()}, {}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        program.forward(next(iter(program.train)))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_saved_activations_are_fewer(transformer):
    assert saved_bytes(transformer(), "activation_checkpointing") < 0.5 * saved_bytes(transformer(), "baseline")


def test_blocks_are_the_outermost_repeated_ones(transformer, convolutional, perceptron):
    model = transformer().model()
    assert repeated_blocks(model) == list(model.blocks)
    images = convolutional().model()
    assert repeated_blocks(images) == [images[0], images[1]]
    assert repeated_blocks(perceptron().model()) == []


def test_copied_model_uses_its_own_weights(transformer, trained):
    model = trained(transformer(), "activation_checkpointing", 1).run.model
    copied, letters = copy.deepcopy(model), torch.zeros(1, 8, dtype=torch.long)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model(letters).abs().max() == 0 and copied(letters).abs().max() > 0


def test_model_without_blocks_has_no_effect(perceptron, trained):
    assert trained(perceptron(), "activation_checkpointing", 1).run.no_effect == [
        ("activation_checkpointing", "the model has no sequence of blocks of one type")
    ]


def stateful(layer):
    """A model of two blocks, each with the layer."""

    def model():
        blocks = [nn.Sequential(layer(), nn.ReLU()) for _ in range(2)]
        return nn.Sequential(nn.Conv2d(1, 4, 1), *blocks, nn.Flatten(), nn.Linear(256, CLASSES))

    return model


STATEFUL = {
    "spectral normalization": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)),
    "spectral normalization of old": lambda: nn.utils.spectral_norm(nn.Conv2d(4, 4, 1)),
    "instance normalization": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
}


@pytest.mark.parametrize("recipe", ["activation_checkpointing", "gradient_accumulation"])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_that_a_forward_pass_updates_is_updated_once_a_step(name, recipe, convolutional, trained):
    task = convolutional(model=stateful(STATEFUL[name]))
    usual, less = trained(task, number=4), trained(task, recipe, 4)
    assert usual.same_bits(less)
    assert name.removesuffix(" of old") in dict(less.run.no_effect)[recipe]


def test_other_blocks_are_recomputed_beside_one_with_state(convolutional, trained):
    def model():
        like = stateful(lambda: nn.Conv2d(4, 4, 1))()
        like[1].append(nn.InstanceNorm2d(4, track_running_stats=True))
        return like

    usual, less = (trained(convolutional(model=model), recipe) for recipe in ("baseline", "activation_checkpointing"))
    assert usual.same_bits(less)
    assert less.program.effects.evidence["activation_checkpointing"].startswith("1 of 1 blocks")


def test_language_model_of_transformers_is_recomputed_without_its_cache():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))
    letters, gradients = torch.arange(16).view(2, 8) % 11, []
    for recipe in ("baseline", "activation_checkpointing"):
        for method in make_methods(Recipe.coerce(recipe)):
            method.model(model, RunContext(torch.device("cpu"), None))
        model.train().zero_grad()
        model(input_ids=letters, labels=letters).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_shared_states_of_transformers_are_no_cache():
    utils = pytest.importorskip("transformers.cache_utils")
    assert _is_cache(utils.DynamicCache()) and not _is_cache(getattr(utils, "KVSharingDict", dict)())
