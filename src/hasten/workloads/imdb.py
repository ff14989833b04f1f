"""Film reviews (Large Movie Review Dataset, Maas et al. 2011): does the writer like the film?

A fixed part of the official archive: the reviews with a number below 5000 in the two training folders,
below 2500 in the two test folders; 10,000 to learn from, 5,000 to be judged by. Looked for as
``imdb-subset/aclImdb-subset.tar.gz``; where this is not, the official archive is fetched and the part
written, once.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import Dataset

from hasten import ConfigurationError, Task
from hasten.workloads._data import File, fetched, found, made_once, members, pack

OFFICIAL = File(
    "imdb-official/aclImdb_v1.tar.gz",
    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
PART = "imdb-subset/aclImdb-subset.tar.gz"
BELOW = {"train": 5000, "test": 2500}  # the numbers of the reviews that are used
REVIEW = re.compile(r"aclImdb/(train|test)/(?:neg|pos)/(\d+)_\d+\.txt")
LENGTH = 128  # words of a review that are read
WORDS = 10_000  # that have a number of their own
PADDING, UNKNOWN = 0, 1


def imdb() -> Task:
    """A Transformer of two layers, 64 wide, on film reviews. It is made from a ``transformers`` config: nothing is downloaded."""
    _transformers()
    reviews = _reviews()
    counts = Counter(word for text, _ in reviews["train"] for word in words_of(text))
    vocabulary = {word: 2 + place for place, (word, _) in enumerate(counts.most_common(WORDS - 2))}
    return Task(
        model=classifier,
        train_data=Reviews(reviews["train"], vocabulary),
        validation_data=Reviews(reviews["test"], vocabulary),
        loss=None,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-4),
        metric="accuracy",
        target=0.78,
        batch_size=32,
        epochs=3,
    )


class Reviews(Dataset):
    """Sample: {"input_ids": 128 words as whole numbers, "attention_mask": 1 where there is a word, "labels": 1 if liked, else 0}."""

    def __init__(self, reviews: list[tuple[str, int]], vocabulary: dict[str, int]):
        self.reviews, self.vocabulary = reviews, vocabulary

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, index):
        text, liked = self.reviews[index]
        numbers = [self.vocabulary.get(word, UNKNOWN) for word in islice(words_of(text), LENGTH)]
        padding = LENGTH - len(numbers)
        return {
            "input_ids": torch.tensor(numbers + [PADDING] * padding),
            "attention_mask": torch.tensor([1] * len(numbers) + [0] * padding),
            "labels": liked,
        }


def classifier():
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PADDING,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


def words_of(text: str) -> Iterator[str]:
    """The words of a review, in small letters, one after the other."""
    return (match.group() for match in re.finditer(r"[a-z']+", text.lower().replace("<br />", " ")))


def _transformers():
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            "the workload imdb needs the package transformers; pip install 'hasten[text]'"
        ) from None
    return transformers


def _reviews() -> dict[str, list[tuple[str, int]]]:
    """(text, 1 if liked) of every review used, by split."""
    path = found(PART) or made_once(PART, lambda unfinished: pack(_used(fetched(OFFICIAL)), unfinished))
    reviews = {split: [] for split in BELOW}
    for name, content in _used(path):
        _, split, folder, _ = name.split("/")
        reviews[split].append((content.decode(), int(folder == "pos")))
    if any(len(reviews[split]) != 2 * BELOW[split] for split in BELOW):
        raise ConfigurationError(
            f"{path} holds {len(reviews['train'])} and {len(reviews['test'])} reviews, not 10000 and 5000; remove it, and it is made anew"
        )
    return reviews


def _used(archive: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the reviews that are used."""
    for name, content in members(archive):
        if (match := REVIEW.fullmatch(name)) and int(match[2]) < BELOW[match[1]]:
            yield name, content
