"""Tasks that train in milliseconds, one for each usual make of a model: what a method must act on, or refuse.

``MODEL_MAKES`` holds them by name. Each is a function that returns a new ``Task``; keyword arguments replace fields of
the task.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hasten.core.task import Task
from hasten.testing.tasks import CLASSES, LETTERS, Labeled, SmallTransformer, Text, adamw, small_task

WIDTH, WINDOW = 16, 8


def sequential() -> nn.Module:
    """A ``nn.Sequential`` of convolutions."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))


class ResidualBlock(nn.Module):
    """A residual block with one convolution, on shape (samples, channels, height, width)."""

    def __init__(self, channels: int):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.norm(self.convolution(x))).relu()


class ResidualNetwork(nn.Sequential):
    """Images, shape (samples, 3, height, width), to logits, shape (samples, CLASSES)."""

    def __init__(self) -> None:
        blocks = (ResidualBlock(8), ResidualBlock(8))
        super().__init__(nn.Conv2d(3, 8, 1), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))


def frozen_part() -> nn.Module:
    """A residual network of which only the second block and the head are trained; the optimizer gets all parameters."""
    made = ResidualNetwork()
    for layer in [*made][:2]:
        layer.requires_grad_(False)
    return made


class LetterModel(nn.Module):
    """Letters, shape (samples, positions), to logits, shape (samples, LETTERS, positions), with any layers between."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(LETTERS, WIDTH), layers, nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        output = self.layers(self.embedding(letters))
        return self.head(output[0] if isinstance(output, tuple) else output).transpose(1, 2)  # an LSTM gives its state


def transformer_encoder() -> nn.Module:
    """A ``nn.TransformerEncoder`` with dropout; its evaluation uses torch's fused fast path."""
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=32, batch_first=True)
    return LetterModel(nn.TransformerEncoder(layer, num_layers=2))


def lstm() -> nn.Module:
    """A ``nn.LSTM`` of two layers."""
    return LetterModel(nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True))


def tied_weights() -> nn.Module:
    """A transformer whose embedding and output layer share their weights."""
    made = SmallTransformer(width=WIDTH)
    made.head.weight = made.embedding.weight
    return made


def forward_hook() -> nn.Module:
    """A transformer with a forward hook in every block, which halves what the block computes."""
    made = SmallTransformer()
    for block in made.blocks:
        block.register_forward_hook(_halve)
    return made


def _halve(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


class LookUp(nn.Module):
    """A table of embeddings and nothing else: the scores of the next letter, looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(LETTERS, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.scores(letters).transpose(1, 2)


def bert() -> nn.Module:
    """A BERT of the package ``transformers`` that gets its batch as a dictionary and returns its own loss."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=LETTERS, max_position_embeddings=WINDOW, hidden_size=WIDTH, **sizes)
    config.num_labels = CLASSES
    return BertForSequenceClassification(config)


class NamedText(Text):
    """Windows of letters as dictionaries, as models of ``transformers`` take them; the label is a class."""

    def __getitem__(self, index: int) -> Any:
        letters, targets = super().__getitem__(index)
        return {"input_ids": letters, "labels": targets[-1] % CLASSES}


def gpt2() -> nn.Module:
    """A GPT-2 of the package ``transformers``; the task computes the loss from its output object."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=LETTERS, n_positions=WINDOW, n_embd=WIDTH, n_layer=2, n_head=2))


def _loss_of_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.transpose(1, 2), target)


def _make(name: str, model: Callable[[], nn.Module], data: Callable[..., Any], fields: Any, **changes: Any) -> Task:
    splits = {"train_data": data(), "validation_data": data(length=48, seed=1)}
    return small_task(fields | changes, name=name, model=model, optimizer=adamw, batch_size=8, **splits)


_IMAGES = partial(Labeled, (3, 8, 8))
MODEL_MAKES: dict[str, Callable[..., Task]] = {
    name: partial(_make, name, model, data, fields)
    for name, model, data, fields in (
        ("sequential", sequential, _IMAGES, {}),
        ("sequential_subclass", ResidualNetwork, _IMAGES, {}),  # with the forward of nn.Sequential
        ("own_class", SmallTransformer, Text, {}),  # with a forward of its own
        ("transformer_encoder", transformer_encoder, Text, {}),
        ("lstm", lstm, Text, {}),
        ("transformers_own_loss", bert, NamedText, {"loss": None, "metric": "loss"}),
        ("transformers_task_loss", gpt2, Text, {"loss": _loss_of_logits, "metric": "loss"}),
        ("tied_weights", tied_weights, Text, {}),
        ("frozen_part", frozen_part, _IMAGES, {}),
        ("forward_hook", forward_hook, Text, {}),
        ("embeddings_only", LookUp, Text, {}),
    )
}


def available_makes() -> dict[str, Callable[..., Task]]:
    """``MODEL_MAKES`` without those that need a package that is not installed."""
    missing = not find_spec("transformers")
    return {name: make for name, make in MODEL_MAKES.items() if not (missing and name.startswith("transformers"))}
