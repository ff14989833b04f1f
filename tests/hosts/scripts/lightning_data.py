"""Lightning: a LightningDataModule, gradient accumulation, a schedule, and a checkpoint of the least loss."""

import sys
import tempfile

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Waves(L.LightningDataModule):
    def setup(self, stage):
        phase = torch.rand(2304, 1) * 6.28
        x = torch.sin(torch.linspace(0, 12, 49) + phase) + 0.05 * torch.randn(2304, 49)
        whole = TensorDataset(x[:, :-1], x[:, -1:])
        self.train, self.val = random_split(whole, [2048, 256], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64)


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val/rmse", nn.functional.mse_loss(self.net(x), y).sqrt())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


L.seed_everything(11)
with tempfile.TemporaryDirectory() as directory:
    trainer = L.Trainer(
        max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 4,
        accumulate_grad_batches=2,
        accelerator="cpu",
        callbacks=[ModelCheckpoint(directory, monitor="val/rmse", mode="min")],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Forecast(), datamodule=Waves())
    trainer.validate(ckpt_path="best", datamodule=Waves(), weights_only=True)
