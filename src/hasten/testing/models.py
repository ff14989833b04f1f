"""Tasks that train in milliseconds, one for each usual make of a model: what a method must act on, or refuse.

``MODEL_MAKES`` names them all. Each is a function that returns a new ``Task``; keyword arguments replace fields of the
task.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hasten.core.task import Task
from hasten.testing.tasks import CLASSES, LETTERS, Labeled, SmallTransformer, Text, adamw, small_task

WIDTH, WINDOW = 16, 8


def sequential(**changes: Any) -> Task:
    """A ``nn.Sequential`` of convolutions."""

    def model() -> nn.Module:
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))

    return _images("sequential", model, changes)


def sequential_subclass(**changes: Any) -> Task:
    """A residual network with batch normalization that inherits its ``forward`` from ``nn.Sequential``."""
    return _images("sequential_subclass", ResidualNetwork, changes)


def own_class(**changes: Any) -> Task:
    """A transformer with a ``forward`` of its own."""
    return _letters("own_class", SmallTransformer, changes)


def transformer_encoder(**changes: Any) -> Task:
    """A ``nn.TransformerEncoder`` with dropout; its evaluation uses torch's fused fast path."""
    return _letters("transformer_encoder", EncoderOfLetters, changes)


def lstm(**changes: Any) -> Task:
    """A ``nn.LSTM`` of two layers."""
    return _letters("lstm", LstmOfLetters, changes)


def transformers_own_loss(**changes: Any) -> Task:
    """A BERT of the package ``transformers`` that gets its batch as a dictionary and returns its own loss."""

    def model() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes: dict[str, Any] = {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        config = BertConfig(vocab_size=LETTERS, max_position_embeddings=WINDOW, **sizes)
        config.num_labels = CLASSES
        return BertForSequenceClassification(config)

    data = {"train_data": NamedText(), "validation_data": NamedText(length=48, seed=1)}
    return _task("transformers_own_loss", model, {**data, "loss": None, "metric": "loss", **changes})


def transformers_task_loss(**changes: Any) -> Task:
    """A GPT-2 of the package ``transformers``; the task computes the loss from its output object."""

    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(vocab_size=LETTERS, n_positions=WINDOW, n_embd=WIDTH, n_layer=2, n_head=2))

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.transpose(1, 2), target)

    return _letters("transformers_task_loss", model, {"loss": loss, "metric": "loss", **changes})


def tied_weights(**changes: Any) -> Task:
    """A transformer whose embedding and output layer share their weights."""

    def model() -> nn.Module:
        made = SmallTransformer(width=WIDTH)
        made.head.weight = made.embedding.weight
        return made

    return _letters("tied_weights", model, changes)


def frozen_part(**changes: Any) -> Task:
    """A residual network of which only the second block and the head are trained; the optimizer gets everything."""

    def model() -> nn.Module:
        made = ResidualNetwork()
        for layer in [*made][:2]:
            layer.requires_grad_(False)
        return made

    return _images("frozen_part", model, changes)


def forward_hook(**changes: Any) -> Task:
    """A transformer with a forward hook in every block, which halves what the block computes."""

    def model() -> nn.Module:
        made = SmallTransformer()
        for block in made.blocks:
            block.register_forward_hook(_halve)
        return made

    return _letters("forward_hook", model, changes)


def embeddings_only(**changes: Any) -> Task:
    """A table of embeddings and nothing else: the scores of the next letter, looked up."""
    return _letters("embeddings_only", LookUp, changes)


MODEL_MAKES: dict[str, Callable[..., Task]] = {
    make.__name__: make
    for make in (
        sequential,
        sequential_subclass,
        own_class,
        transformer_encoder,
        lstm,
        transformers_own_loss,
        transformers_task_loss,
        tied_weights,
        frozen_part,
        forward_hook,
        embeddings_only,
    )
}


def available_makes() -> dict[str, Callable[..., Task]]:
    """``MODEL_MAKES`` without those that need a package that is not installed."""
    missing = not find_spec("transformers")
    return {name: make for name, make in MODEL_MAKES.items() if not (missing and name.startswith("transformers"))}


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


class EncoderOfLetters(nn.Module):
    """Letters, shape (samples, positions), to logits, shape (samples, LETTERS, positions)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=32, batch_first=True)
        self.embedding, self.head = nn.Embedding(LETTERS, WIDTH), nn.Linear(WIDTH, LETTERS)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(letters))).transpose(1, 2)


class LstmOfLetters(nn.Module):
    """Shapes as for ``EncoderOfLetters``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(LETTERS, WIDTH), nn.Linear(WIDTH, LETTERS)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(letters))[0]).transpose(1, 2)


class LookUp(nn.Module):
    """Shapes as for ``EncoderOfLetters``."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(LETTERS, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.scores(letters).transpose(1, 2)


class NamedText(Text):
    """Windows of letters as dictionaries, as models of ``transformers`` take them; the label is a class."""

    def __getitem__(self, index: int) -> Any:
        letters, targets = super().__getitem__(index)
        return {"input_ids": letters, "labels": targets[-1] % CLASSES}


def _halve(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


def _images(name: str, model: Callable[[], nn.Module], changes: dict[str, Any]) -> Task:
    data = {"train_data": Labeled((3, 8, 8)), "validation_data": Labeled((3, 8, 8), length=48, seed=1)}
    return _task(name, model, {**data, **changes})


def _letters(name: str, model: Callable[[], nn.Module], changes: dict[str, Any]) -> Task:
    return _task(name, model, {"train_data": Text(), "validation_data": Text(length=48, seed=1), **changes})


def _task(name: str, model: Callable[[], nn.Module], changes: dict[str, Any]) -> Task:
    return small_task(changes, name=name, model=model, optimizer=adamw, batch_size=8)
