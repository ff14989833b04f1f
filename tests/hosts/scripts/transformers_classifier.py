"""Transformers: a tiny BERT, made from its configuration, learns to classify; argument: epochs."""

import sys
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Sentences(Dataset):
    """The label says which of two words comes more often."""

    def __init__(self, count, seed):
        self.words = torch.randint(3, 100, (count, 32), generator=torch.Generator().manual_seed(seed))
        self.labels = ((self.words < 50).sum(1) > 15).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


def compute_metrics(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


set_seed(5)
config = BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=2
)
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory,
        num_train_epochs=float(sys.argv[1]) if len(sys.argv) > 1 else 2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=20,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=Sentences(1024, 1),
        eval_dataset=Sentences(256, 2),
        compute_metrics=compute_metrics,
    )
    trainer.train()
