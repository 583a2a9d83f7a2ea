"""A regression with Lightning's Trainer, as in its documentation's first example."""

import argparse
import os
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(LightningModule):
    def __init__(self, clip):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        self.clip = clip

    def training_step(self, batch, number):
        features, targets = batch
        loss = nn.functional.mse_loss(self.layers(features), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        features, targets = batch
        self.log("val", nn.functional.mse_loss(self.layers(features), targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def main():
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--validation", type=int, default=16)
    options = parser.parse_args()
    seed_everything(3, workers=True)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(options.size + options.validation, 5, generator=generator)
    data = TensorDataset(features, features.sum(1, keepdim=True))
    train, validation = torch.utils.data.random_split(data, [options.size, options.validation])
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy="ddp",
        max_epochs=4,
        accumulate_grad_batches=options.accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # the sampler that Lightning would insert shuffles in another way than the loader of one rank
    loader = DataLoader(train, options.batch_size)
    trainer.fit(Module(1.0), loader, DataLoader(validation, options.batch_size))


if __name__ == "__main__":
    main()
