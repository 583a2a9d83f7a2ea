"""Lightning's Trainer, with the settings that its documentation recommends for each check.

- seed_everything(workers=True) and Trainer(deterministic=True): "Reproducibility"
- self.log(..., sync_dist=True) for the loss; a torchmetrics object for the accuracy: "Logging"
- the schedule with interval "step": "LightningModule"
- accumulate_grad_batches: "Effective training techniques"
- ModelCheckpoint(every_n_train_steps=, save_on_exception=True) and fit(ckpt_path=): "Checkpointing"
- torchdata's loader and sampler with a state, which the loops save and load: changes of 2.2
  (#19361). With the sampler that Lightning inserts, or if `configure_optimizers` reads
  `estimated_stepping_batches`, a resume did not find the position (2.6.6), so neither is used.
- detect_anomaly=True for non-finite values: "Debugging"
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from peers.problem import (
    BATCH,
    CLASSES,
    EPOCHS,
    SEED,
    Points,
    Recorder,
    Settings,
    build_model,
    build_optimizer,
    build_schedule,
)


class Module(LightningModule):
    def __init__(self, settings: Settings, recorder: Recorder, num_steps: int):
        super().__init__()
        self.num_steps = num_steps
        self.model = build_model(settings.dropout)
        self.recorder = recorder
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        self.counted = torchmetrics.SumMetric()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        features, classes, indices = batch
        losses = self.recorder.losses(self.global_step, self.model(features), classes, indices)
        loss = losses.mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        features, classes, _ = batch
        self.accuracy(self.model(features), classes)
        self.counted(torch.tensor(float(len(classes))))
        self.log("accuracy", self.accuracy)
        self.log("counted", self.counted)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.model)
        schedule = build_schedule(optimizer, self.num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Log(Callback):
    """Record the logged value at each optimizer step, as a logger receives it."""

    def on_train_batch_start(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self.step = trainer.global_step
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        loss = trainer.callback_metrics["loss"].item()
        if trainer.is_global_zero and trainer.global_step > self.step:
            module.recorder.log(self.step, loss, self.rate)


def main() -> None:
    warnings.filterwarnings("ignore")
    settings = Settings.from_environment()
    recorder = Recorder(settings)
    seed_everything(SEED, workers=True)
    checkpoints = ModelCheckpoint(
        settings.path / "checkpoints",
        every_n_train_steps=settings.save_every,
        save_last=True,
        save_top_k=-1,
        save_on_exception=True,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(timeout=timedelta(seconds=settings.timeout_s)),
        precision="64-true",
        deterministic=True,
        max_epochs=EPOCHS,
        accumulate_grad_batches=settings.accumulation,
        detect_anomaly=settings.fault == "nan",
        callbacks=[checkpoints, Log()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    rows = BATCH // settings.accumulation // trainer.world_size
    dataset = Points("train", settings.fault)
    sampler = StatefulDistributedSampler(
        dataset, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), seed=SEED
    )
    loader = StatefulDataLoader(dataset, rows, sampler=sampler, drop_last=settings.drop_last)
    num_steps = EPOCHS * -(-len(loader) // settings.accumulation)
    module = Module(settings, recorder, num_steps)
    trainer.fit(
        module,
        loader,
        DataLoader(Points("eval"), 8),
        ckpt_path="last" if settings.resume else None,
    )
    found = {"accuracy": torch.nan, "counted": 0, **trainer.callback_metrics}
    if trainer.is_global_zero:  # there are no metrics if a resumed loader ended too early
        recorder.finish(module.model, float(found["accuracy"]), int(found["counted"]))


if __name__ == "__main__":
    main()
