"""Film reviews (Large Movie Review Dataset, Maas et al. 2011): is a review positive?

A fixed subset of the official archive: reviews with a number below 5000 in the two training directories and below 2500
in the two test directories; 10,000 for training, 5,000 for validation. If ``imdb-subset/aclImdb-subset.tar.gz`` is
missing, the official archive is downloaded and the subset is written once.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import Dataset

from hasten import ConfigurationError, Task
from hasten.workloads._data import File, create_file, download, find_file, import_package, members, pack

OFFICIAL = File(
    "imdb-official/aclImdb_v1.tar.gz",
    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
SUBSET = "imdb-subset/aclImdb-subset.tar.gz"
LIMITS = {"train": 5000, "test": 2500}  # reviews of a directory with a lower number belong to the subset
REVIEW = re.compile(r"aclImdb/(train|test)/(?:neg|pos)/(\d+)_\d+\.txt")
LENGTH = 128  # words of a review that the model reads
WORDS = 10_000  # size of the vocabulary
PADDING, UNKNOWN = 0, 1
TRANSFORMERS = "transformers", "imdb", "transformers", "text"  # for import_package


def imdb() -> Task:
    """Sentiment of IMDb reviews, by a transformer of two layers and width 64, built from a ``transformers`` config."""
    import_package(*TRANSFORMERS)
    reviews = _reviews()
    counts = Counter(word for text, _ in reviews["train"] for word in words_of(text))
    vocabulary = {word: 2 + index for index, (word, _) in enumerate(counts.most_common(WORDS - 2))}
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
    """Sample: {"input_ids": 128 word indices, "attention_mask": 0 for padding, else 1, "labels": 1 if positive}."""

    def __init__(self, reviews: list[tuple[str, int]], vocabulary: dict[str, int]):
        self.reviews, self.vocabulary = reviews, vocabulary

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, index):
        text, label = self.reviews[index]
        input_ids = [self.vocabulary.get(word, UNKNOWN) for word in islice(words_of(text), LENGTH)]
        padding = LENGTH - len(input_ids)
        return {
            "input_ids": torch.tensor(input_ids + [PADDING] * padding),
            "attention_mask": torch.tensor([1] * len(input_ids) + [0] * padding),
            "labels": label,
        }


def classifier():
    """A randomly initialized BertForSequenceClassification."""
    transformers = import_package(*TRANSFORMERS)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PADDING,
        num_labels=2,  # pyright: ignore[reportCallIssue]  # an option of the base class
    )
    return transformers.BertForSequenceClassification(config)


def words_of(text: str) -> Iterator[str]:
    """The words of a review in order, in lower case."""
    return (match.group() for match in re.finditer(r"[a-z']+", text.lower().replace("<br />", " ")))


def _reviews() -> dict[str, list[tuple[str, int]]]:
    """(text, 1 if positive, else 0) of the subset's reviews, by split; ConfigurationError if any is missing."""
    path = find_file(SUBSET) or create_file(SUBSET, lambda partial: pack(_subset(download(OFFICIAL)), partial))
    reviews = {split: [] for split in LIMITS}
    for name, content in _subset(path):
        _, split, directory, _ = name.split("/")
        reviews[split].append((content.decode(), int(directory == "pos")))
    if any(len(reviews[split]) != 2 * LIMITS[split] for split in LIMITS):
        problem = f"{path} holds {len(reviews['train'])} and {len(reviews['test'])} reviews, expected 10000 and 5000"
        raise ConfigurationError(f"{problem}; remove it to create it again")
    return reviews


def _subset(archive: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the reviews in a tar.gz that belong to the subset, in its order."""
    for name, content in members(archive):
        if (match := REVIEW.fullmatch(name)) and int(match[2]) < LIMITS[match[1]]:
            yield name, content
