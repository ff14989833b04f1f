"""Transformers: a small BERT learns the sentiment of sentences (SST-2): bert_sst2.py DIR [EPOCHS].

DIR holds train.tsv and dev.tsv: a sentence, a tab, 0 or 1. Words are tokens, and the 8,000 most frequent have a number.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

LENGTH, WORDS = 48, 8000


def read(path):
    lines = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(text.split(), int(label)) for text, label in lines if label in ("0", "1")]


class Sentences(torch.utils.data.Dataset):
    def __init__(self, rows, numbers):
        self.rows = [([2] + [numbers.get(word, 1) for word in text])[:LENGTH] for text, _ in rows]
        self.labels = [label for _, label in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        padding = LENGTH - len(row)
        mask = [1] * len(row) + [0] * padding
        return {"input_ids": row + [0] * padding, "attention_mask": mask, "labels": self.labels[index]}


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


set_seed(5)
place = Path(sys.argv[1])
train, dev = read(place / "train.tsv")[:3200], read(place / "dev.tsv")
common = Counter(word for text, _ in train for word in text).most_common(WORDS - 3)
numbers = {word: number for number, (word, _) in enumerate(common, 3)}
config = BertConfig(
    vocab_size=WORDS, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
)
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory,
        num_train_epochs=float(sys.argv[2]) if len(sys.argv) > 2 else 2,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=3e-4,
        warmup_steps=20,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=20,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=Sentences(train, numbers),
        eval_dataset=Sentences(dev, numbers),
        compute_metrics=accuracy,
    )
    trainer.train()
