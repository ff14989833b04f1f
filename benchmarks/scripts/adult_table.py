"""Own loop: a network with embeddings learns who earns more from UCI Adult: adult_table.py DIR [EPOCHS] [SEED].

DIR holds adult.data and adult.test. Written as tutorials write it: a Dataset that returns one row, and its defaults.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUMBERS, WORDS = [0, 2, 4, 10, 11, 12], [1, 3, 5, 6, 7, 8, 9, 13]


def read(path):
    with open(path) as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file) if len(row) == 15]
    return rows


class Adult(Dataset):
    def __init__(self, rows, words, mean, std):
        self.numbers = (np.array([[float(row[i]) for i in NUMBERS] for row in rows]) - mean) / std
        self.words = np.array([[words[i].get(row[i], 0) for i in WORDS] for row in rows])
        self.labels = np.array([row[14].startswith(">50K") for row in rows])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        numbers = torch.tensor(self.numbers[index], dtype=torch.float32)
        words = torch.tensor(self.words[index], dtype=torch.long)
        return numbers, words, torch.tensor(self.labels[index], dtype=torch.float32)


class Network(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 8) for size in sizes)
        self.layers = nn.Sequential(
            nn.Linear(len(NUMBERS) + 8 * len(sizes), 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 1),
        )

    def forward(self, numbers, words):
        embedded = [embedding(words[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *embedded], dim=1)).squeeze(1)


place = Path(sys.argv[1])
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 10
torch.manual_seed(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
train_rows, test_rows = read(place / "adult.data"), read(place / "adult.test")
words = {i: {word: n for n, word in enumerate(sorted({row[i] for row in train_rows}), 1)} for i in WORDS}
values = np.array([[float(row[i]) for i in NUMBERS] for row in train_rows])
train_set = Adult(train_rows, words, values.mean(0), values.std(0))
test_set = Adult(test_rows, words, values.mean(0), values.std(0))
train_loader = DataLoader(train_set, batch_size=128, shuffle=True)
test_loader = DataLoader(test_set, batch_size=512)
model = Network([len(words[i]) + 1 for i in WORDS])
loss_function = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)

for epoch in range(epochs):
    model.train()
    for numbers, categories, labels in train_loader:
        optimizer.zero_grad()
        loss = loss_function(model(numbers, categories), labels)
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for numbers, categories, labels in test_loader:
            correct += ((model(numbers, categories) > 0) == (labels > 0.5)).sum().item()
    print(f"epoch {epoch + 1}: accuracy {correct / len(test_set):.4f}", flush=True)
