"""A hasten.data pipeline in a hand-written loop, interrupted inside an epoch and resumed at the next batch."""

import numpy
import torch

from hasten.data import arrays


def pipeline():
    generator = numpy.random.default_rng(0)
    inputs, targets = generator.standard_normal((1000, 4)).astype("float32"), generator.integers(0, 2, 1000)
    return arrays(inputs, targets).shuffle(seed=0).batch(100)


def train(batches, model, optimizer, limit=None):
    """Trains on the rest of an epoch, or on ``limit`` batches of it; returns the losses."""
    losses = []
    for inputs, targets in batches:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == limit:
            break
    return losses


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


if __name__ == "__main__":
    uninterrupted = train(pipeline(), *make_model())

    model, optimizer = make_model()
    batches = pipeline()
    first = train(batches, model, optimizer, limit=4)
    position = batches.state_dict()  # three integers

    resumed = pipeline()
    resumed.load_state_dict(position)
    rest = train(resumed, model, optimizer)
    print("resumed losses equal the uninterrupted ones:", first + rest == uninterrupted)
