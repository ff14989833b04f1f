"""A recurrent language model without DataLoader and optimizer: hidden state, clipping, an update by hand."""

import sys

import torch
from torch import nn

torch.manual_seed(1111)
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000


class Model(nn.Module):
    def __init__(self, words=50, size=24):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(words, size)
        self.rnn = nn.LSTM(size, size, 2, dropout=0.2)
        self.decoder = nn.Linear(size, words)

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(data)), hidden)
        return self.decoder(self.drop(output)).view(-1, 50), hidden

    def init_hidden(self, batch):
        weight = next(self.parameters())
        return weight.new_zeros(2, batch, 24), weight.new_zeros(2, batch, 24)


text = torch.randint(0, 50, (2000, 8))
model, criterion, lr = Model(), nn.CrossEntropyLoss(), 1.0
done, epoch = 0, 0
while done < STEPS:
    epoch += 1
    model.train()
    hidden = model.init_hidden(8)
    for start in range(0, 1900, 20):
        data, target = text[start : start + 20], text[start + 1 : start + 21].view(-1)
        model.zero_grad()
        hidden = tuple(state.detach() for state in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        done += 1
        if done == STEPS:
            break
    model.eval()
    with torch.no_grad():
        output, _ = model(text[:20], model.init_hidden(8))
        valid = criterion(output, text[1:21].view(-1)).item()
    print(f"| end of epoch {epoch:3d} | valid loss {valid:5.2f}", flush=True)
