"""Lightning: a small CNN on generated images, with checkpoints and early stopping; argument: epochs."""

import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(32, 4),
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, _):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        images, labels = batch
        logits = self(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def images(count):
    labels = torch.randint(4, (count,))
    pixels = torch.randn(count, 1, 16, 16)
    for index, label in enumerate(labels.tolist()):  # each class is bright in another quarter
        pixels[index, 0, 8 * (label // 2) :, 8 * (label % 2) :] += 0.8
    return TensorDataset(pixels, labels)


L.seed_everything(7)
train = DataLoader(images(1536), batch_size=32, shuffle=True)
val = DataLoader(images(256), batch_size=128)
trainer = L.Trainer(
    max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 3,
    accelerator="cpu",
    callbacks=[
        ModelCheckpoint(monitor="val_acc", mode="max"),
        EarlyStopping(monitor="val_acc", mode="max", patience=50),
    ],
    logger=False,
    enable_progress_bar=False,
)
model = Classifier()
trainer.fit(model, train, val)
