"""Lightning's way to a bucket, as its documentation says ("Remote Filesystems", "Checkpointing"):
ModelCheckpoint(dirpath="s3://...", save_last=True) by fsspec and s3fs, and fit(ckpt_path="s3://...").

ckpt_path="last" does not find a checkpoint in S3 (2.6.6), so the address of last.ckpt is given.
"""

from __future__ import annotations

import warnings
from typing import Any

import fsspec
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from peers.bucket_sessions import BATCH, SAVE_EVERY, Session, serve
from peers.problem import SEED, Points, build_model, build_optimizer


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(0.0)  # Lightning restores no state of dropout's generator

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        features, classes, _ = batch
        return torch.nn.functional.cross_entropy(self.model(features), classes)

    def configure_optimizers(self) -> Any:
        return build_optimizer(self.model)


class Noted(ModelCheckpoint):
    """Notes when last.ckpt was written."""

    session: Session

    def _save_last_checkpoint(self, trainer: Any, *arguments: Any) -> None:
        super()._save_last_checkpoint(trainer, *arguments)
        self.session.note("saved", trainer.global_step)


class Start(Callback):
    def __init__(self, session: Session):
        self.session = session

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.session.note("began", trainer.global_step)


def train(session: Session) -> None:
    warnings.filterwarnings("ignore")
    seed_everything(SEED, workers=True)
    checkpoints = Noted(session.address, every_n_train_steps=SAVE_EVERY, save_last=True)
    checkpoints.session = session
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        max_epochs=1,  # at the end of one, a resumed loader is empty (torchdata 0.11.0)
        callbacks=[checkpoints, Start(session)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    dataset = Points("train")
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(SEED))
    loader = StatefulDataLoader(dataset, BATCH, sampler=sampler, drop_last=True)
    module = Module()
    last = f"{session.address}/last.ckpt"
    is_there = fsspec.filesystem("s3").exists(last)
    trainer.fit(module, loader, ckpt_path=last if is_there else None, weights_only=False)
    session.finish(module.model)


if __name__ == "__main__":
    serve(train)
