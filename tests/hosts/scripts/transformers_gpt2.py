"""Transformers: a tiny GPT-2, made from its configuration, learns a made-up language; argument: steps."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Text(Dataset):
    """Each token follows from the two before it, but for some noise."""

    def __init__(self, count, seed):
        random = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(64, (count, 48), generator=random)
        for i in range(2, 48):
            follows = (self.tokens[:, i - 1] + 3 * self.tokens[:, i - 2] + 1) % 64
            self.tokens[:, i] = torch.where(torch.rand(count, generator=random) < 0.9, follows, self.tokens[:, i])

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


set_seed(5)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=48, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory,
        max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 120,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=30,
        save_strategy="no",
        logging_steps=10,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=Text(960, 1), eval_dataset=Text(128, 2)).train()
