"""Accelerate, with the settings that its documentation recommends for each check.

- split_batches=True: the batch is the same "regardless of the number of processes" (the class
  DataLoaderConfiguration), and the schedule steps once a step; use_seedable_sampler=True
- `accelerator.accumulate(model)`: "Performing gradient accumulation"
- `gather(loss)` for the loss, `gather_for_metrics` for evaluation: "Quick tour"
- save_state and load_state, register_for_checkpointing, `skip_first_batches`: "Checkpointing"
- a generator for the loader ("Reproducibility" of torch): without it a resumed loader draws once
  more from the generator of dropout, and the final weights differ
"""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader

from peers.problem import (
    BATCH,
    EPOCHS,
    SEED,
    Points,
    Recorder,
    Settings,
    build_model,
    build_optimizer,
    build_schedule,
)


class Progress:
    """Progress that Accelerate saves and loads together with its own state."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def main() -> None:
    settings = Settings.from_environment()
    recorder = Recorder(settings)
    set_seed(SEED)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=settings.accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=settings.timeout_s))],
    )
    model = build_model(settings.dropout)
    optimizer = build_optimizer(model)
    train = DataLoader(
        Points("train", settings.fault),
        BATCH // settings.accumulation,
        shuffle=True,
        drop_last=settings.drop_last,
        generator=torch.Generator().manual_seed(SEED),
    )
    steps = EPOCHS * -(-len(train) // settings.accumulation)
    schedule = build_schedule(optimizer, steps)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(
        model, optimizer, train, DataLoader(Points("eval"), BATCH), schedule
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoints = settings.path / "checkpoints"
    if settings.resume and (saved := sorted(checkpoints.glob("step-*"))):
        accelerator.load_state(str(saved[-1]))
    for epoch in range(progress.epoch, EPOCHS):
        train.set_epoch(epoch)
        first = progress.batches
        loader = accelerator.skip_first_batches(train, first) if first else train
        for batch, (features, classes, indices) in enumerate(loader, first + 1):
            with accelerator.accumulate(model):
                losses = recorder.losses(progress.step, model(features), classes, indices)
                accelerator.backward(losses.mean())
                rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            mean = accelerator.gather(losses.mean()).mean().item()
            if accelerator.is_main_process:
                recorder.log(progress.step, mean, rate)
            progress.step += 1
            is_last = batch == len(train)
            progress.epoch = epoch + is_last
            progress.batches = 0 if is_last else batch
            if progress.step % settings.save_every == 0:
                accelerator.save_state(str(checkpoints / f"step-{progress.step:04d}"))
    model.eval()
    hits = []
    for features, classes, _ in evaluation:
        with torch.no_grad():
            is_right = model(features).argmax(1) == classes
        hits.append(accelerator.gather_for_metrics(is_right))
    found = torch.cat(hits)
    if accelerator.is_main_process:
        accuracy = found.double().mean().item()
        recorder.finish(accelerator.unwrap_model(model), accuracy, len(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
