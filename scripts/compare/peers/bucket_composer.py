"""Composer's way to a bucket, as its documentation says ("Checkpointing", "Auto Resumption"):
Trainer(save_folder="s3://...", autoresume=True), whose files a process of its own uploads."""

from __future__ import annotations

from typing import Any

import torch
from composer import Callback, Time, Trainer
from composer.models import ComposerModel
from torch.utils.data import DataLoader

from peers.bucket_sessions import BATCH, SAVE_EVERY, Session, serve
from peers.problem import SEED, Points, build_model, build_optimizer


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(0.0)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, *arguments: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


class Start(Callback):
    def __init__(self, session: Session):
        self.session = session

    def fit_start(self, state: Any, logger: Any) -> None:
        self.session.note("began", state.timestamp.batch.value)


def train(session: Session) -> None:
    torch.manual_seed(SEED)
    model = Model()
    optimizer = build_optimizer(model.model)
    loader = DataLoader(Points("train"), BATCH, drop_last=True)  # in order: resumes skip batches
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=optimizer,
        max_duration="1ep",
        device="cpu",
        precision="fp32",  # of its autocast; the model has fp64
        seed=SEED,
        run_name="run",
        save_folder=session.address,
        save_interval=Time(SAVE_EVERY, "ba"),
        save_overwrite=True,  # else a start from step 0 ends with FileExistsError
        save_num_checkpoints_to_keep=1,
        autoresume=True,
        callbacks=[Start(session)],
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    session.finish(model.model)


if __name__ == "__main__":
    serve(train)
