"""Lightning: manual optimization, two optimizers that share the work of a small autoencoder; argument: epochs."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, _):
        (x,) = batch
        encoder, decoder = self.optimizers()
        loss = nn.functional.mse_loss(self(x), x)
        encoder.zero_grad()
        decoder.zero_grad()
        self.manual_backward(loss)
        encoder.step()
        decoder.step()
        self.log("train_mse", loss)

    def validation_step(self, batch, _):
        (x,) = batch
        self.log("val_mse", nn.functional.mse_loss(self(x), x))

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.encoder.parameters(), lr=1e-3),
            torch.optim.SGD(self.decoder.parameters(), lr=1e-2, momentum=0.9),
        ]


torch.manual_seed(3)
low = torch.randn(2304, 4)
data = torch.tanh(low @ torch.randn(4, 32))
train = DataLoader(TensorDataset(data[:2048]), batch_size=32, shuffle=True)
val = DataLoader(TensorDataset(data[2048:]), batch_size=256)
trainer = pl.Trainer(
    max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Autoencoder(), train, val)
