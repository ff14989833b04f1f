"""Transformers: gradient accumulation, clipping and a mean squared error as the metric; argument: epochs."""

import sys
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 1))

    def forward(self, x, labels=None):
        out = self.net(x).squeeze(-1)
        loss = None if labels is None else nn.functional.mse_loss(out, labels)
        return {"loss": loss, "logits": out}


class Table(Dataset):
    def __init__(self, count, seed):
        random = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 20, generator=random)
        self.y = self.x[:, 0] * self.x[:, 1] + self.x[:, 2]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


def compute_metrics(prediction):
    return {"mse": float(np.mean((prediction.predictions - prediction.label_ids) ** 2))}


set_seed(9)
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory,
        num_train_epochs=float(sys.argv[1]) if len(sys.argv) > 1 else 3,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="no",
        metric_for_best_model="mse",
        greater_is_better=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        Regression(),
        arguments,
        train_dataset=Table(2048, 1),
        eval_dataset=Table(256, 2),
        compute_metrics=compute_metrics,
    )
    trainer.train()
