"""A transformer trained as nanoGPT is: get_batch, accumulation, GradScaler, evaluation at the start, a checkpoint."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

MAX_ITERS = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
OUT = sys.argv[2] if len(sys.argv) > 2 else ""
torch.manual_seed(1337)
data = torch.randint(0, 40, (5000,))


def get_batch():
    index = torch.randint(len(data) - 17, (8,))
    x = torch.stack([data[i : i + 16] for i in index])
    y = torch.stack([data[i + 1 : i + 17] for i in index])
    return x, y


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(size), nn.Linear(size, 3 * size)
        self.mlp = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x):
        q, k, v = self.attention(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, size), nn.ModuleList([Block(size) for _ in range(2)])
        self.head = nn.Linear(size, 40)

    def forward(self, idx, targets):
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, 40), targets.view(-1))


model = GPT()
first = 0
if OUT and os.path.exists(OUT):
    checkpoint = torch.load(OUT)
    model.load_state_dict(checkpoint["model"])
    first = checkpoint["step"]
    print(f"resuming from step {first}", flush=True)
scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=64.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.stack([model(*get_batch())[1] for _ in range(3)])
    model.train()
    return losses.mean()


X, Y = get_batch()
for step in range(first, MAX_ITERS):
    if step % 25 == 0:
        print(f"step {step}: val loss {estimate_loss():.4f}", flush=True)
        if OUT:
            torch.save({"model": model.state_dict(), "step": step}, OUT)
    for _ in range(2):
        _, loss = model(X, Y)
        X, Y = get_batch()
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
