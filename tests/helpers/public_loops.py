"""Three kinds of public training loops as tasks, each beside the loop as people write it.

The language model carries its hidden state from batch to batch and reduces the learning rate on a plateau, the GAN has
two optimizers, the image classifier has a schedule that counts epochs. The functions ``*_by_hand`` return the weights.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import StepContext, Task

WORDS, BATCH, WINDOW, EPOCHS = 12, 4, 5, 3


# ---- a recurrent language model, as word_language_model of pytorch/examples


class Slices:
    """Consecutive windows of a text of shape (positions, batch): ready batches (data, target) in their order."""

    def __init__(self, windows: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 3, (windows * WINDOW + 1, BATCH), generator=generator)
        self.text, self.windows = steps.cumsum(0) % WORDS, windows

    def __len__(self) -> int:
        return self.windows

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, self.windows * WINDOW, WINDOW):
            yield self.text[start : start + WINDOW], self.text[start + 1 : start + 1 + WINDOW].flatten()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, 2), nn.Linear(8, WORDS)

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def init_hidden(self):
        weight = next(self.parameters())
        return weight.new_zeros(2, BATCH, 8), weight.new_zeros(2, BATCH, 8)


def language_model_step(model: Recurrent, batch, context: StepContext) -> torch.Tensor:
    data, target = batch
    hidden = context.state.get("hidden") or model.init_hidden()
    output, context.state["hidden"] = model(data, hidden)
    return nn.functional.cross_entropy(output, target)


def validation_loss(model: Recurrent, batches) -> float:
    hidden, losses = model.init_hidden(), []
    for data, target in batches:
        output, hidden = model(data, hidden)
        losses.append(nn.functional.cross_entropy(output, target).item())
    return sum(losses) / len(losses)


def sgd_on_a_plateau(model: nn.Module):
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0.3)


def language_model() -> Task:
    return Task(
        name="language_model",
        model=Recurrent,
        train_data=Slices(8, seed=0),
        validation_data=Slices(3, seed=1),
        step=language_model_step,
        evaluate=validation_loss,
        optimizer=sgd_on_a_plateau,
        clip_grad_norm=0.25,
        epochs=EPOCHS,
    )


def language_model_by_hand() -> tuple[dict[str, torch.Tensor], list[float]]:
    """(weights, learning rate of each epoch)."""
    torch.manual_seed(0)
    model, train, validation, rates = Recurrent(), Slices(8, seed=0), Slices(3, seed=1), list[float]()
    optimizer, schedule = sgd_on_a_plateau(model)
    for _ in range(EPOCHS):
        rates.append(optimizer.param_groups[0]["lr"])
        model.train()
        hidden = model.init_hidden()
        for data, target in train:
            hidden = tuple(state.detach() for state in hidden)
            output, hidden = model(data, hidden)
            nn.functional.cross_entropy(output, target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            schedule.step(validation_loss(model, validation))
    return model.state_dict(), rates


# ---- a GAN, as dcgan of pytorch/examples


def images(samples: int, seed: int) -> TensorDataset:
    """Images of shape (1, 8, 8) with a bright square, and the quadrant in which it is."""
    generator = torch.Generator().manual_seed(seed)
    pixels, quadrants = torch.randn(samples, 1, 8, 8, generator=generator), torch.arange(samples) % 4
    for image, quadrant in zip(pixels, quadrants.tolist(), strict=True):
        row, column = divmod(quadrant, 2)
        image[0, 4 * row : 4 * row + 3, 4 * column : 4 * column + 3] += 2.0
    return TensorDataset(pixels, quadrants)


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten(0)
        )


def bce(scores: torch.Tensor, target: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def gan_step(model: Networks, batch, context: StepContext) -> Iterator[torch.Tensor]:
    real, _ = batch
    fake = model.generator(torch.randn(len(real), 6, 1, 1))
    yield bce(model.discriminator(real), 1.0) + bce(model.discriminator(fake.detach()), 0.0)
    yield bce(model.discriminator(fake), 1.0)


def two_adams(model: Networks) -> list[torch.optim.Optimizer]:
    parts = model.discriminator, model.generator
    return [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in parts]


def score_of_noise(model: Networks, batches) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    weight = next(model.parameters())
    noise = torch.randn(8, 6, 1, 1, generator=generator).to(weight)
    real = torch.stack([model.discriminator(pixels).mean() for pixels, _ in batches]).mean()
    return (real - model.discriminator(model.generator(noise)).mean()).abs()


def gan() -> Task:
    return Task(
        name="gan",
        model=Networks,
        train_data=DataLoader(images(32, seed=0), batch_size=8, shuffle=True),
        validation_data=DataLoader(images(16, seed=1), batch_size=8),
        step=gan_step,
        optimizer=two_adams,
        metric="gap of the scores",
        higher_is_better=False,
        evaluate=score_of_noise,
        epochs=EPOCHS,
    )


def gan_by_hand() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, loader = Networks(), DataLoader(images(32, seed=0), batch_size=8, shuffle=True)
    discriminator_optimizer, generator_optimizer = two_adams(model)
    for _ in range(EPOCHS):
        for real, _ in loader:
            model.discriminator.zero_grad()
            fake = model.generator(torch.randn(len(real), 6, 1, 1))
            loss = bce(model.discriminator(real), 1.0) + bce(model.discriminator(fake.detach()), 0.0)
            loss.backward()
            discriminator_optimizer.step()
            model.generator.zero_grad()
            bce(model.discriminator(fake), 1.0).backward()
            generator_optimizer.step()
    return model.state_dict()


# ---- an image classifier, as mnist of pytorch/examples


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4))


def adadelta_by_epoch(model: nn.Module):
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def classifier() -> Task:
    return Task(
        name="classifier",
        model=small_cnn,
        train_data=DataLoader(images(32, seed=0), batch_size=8, shuffle=True),
        validation_data=DataLoader(images(16, seed=1), batch_size=8),
        loss=nn.functional.cross_entropy,
        optimizer=adadelta_by_epoch,
        schedule_interval="epoch",
        metric="accuracy",
        epochs=EPOCHS,
    )


def classifier_by_hand() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, loader = small_cnn(), DataLoader(images(32, seed=0), batch_size=8, shuffle=True)
    optimizer, schedule = adadelta_by_epoch(model)
    for _ in range(EPOCHS):
        for pixels, quadrants in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels), quadrants).backward()
            optimizer.step()
        schedule.step()
    return model.state_dict()
