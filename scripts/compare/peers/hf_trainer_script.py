"""Hugging Face's Trainer, with the settings that its documentation recommends for each check.

- `compute_loss_func`, the sum divided by `num_items_in_batch`: "Trainer features", "Custom loss
  function", and "Gradient accumulation", "Loss scaling"
- full_determinism, seed and use_seedable_sampler (the default): "TrainingArguments"
- accelerator_config split_batches: the batch is the same on any number of processes
- `get_last_checkpoint` and train(resume_from_checkpoint=): "Checkpointing" and the example scripts
- `compute_metrics` for evaluation, whose predictions are gathered without repeated examples
- enable_jit_checkpoint for SIGTERM: "TrainingArguments"
- the time limit in the state, with use_configured_state: "TrainingArguments" has ddp_timeout, but
  does not pass it on with use_cpu (5.23.0)
- debug="underflow_overflow" for non-finite values: "Debugging"
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.nn import functional as F
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from peers.problem import (
    BATCH,
    EPOCHS,
    MOMENTUM,
    RATE,
    SEED,
    Points,
    Recorder,
    Settings,
    build_model,
)


class Model(nn.Module):
    """The model with the arguments and the outputs that the Trainer expects."""

    def __init__(self, dropout: float):
        super().__init__()
        self.layers = build_model(dropout)

    def forward(
        self, features: torch.Tensor, indices: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(features), "indices": indices}


class Watch(TrainerCallback):
    """Know the step for the recorder, and record the logged values as a logger receives them."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            self.recorder.log(state.global_step - 1, logs["loss"], logs["learning_rate"])

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        logits = outputs["logits"]
        if logits.requires_grad:
            losses = self.recorder.losses(self.step, logits, labels, outputs["indices"])
        else:  # evaluation
            losses = F.cross_entropy(logits, labels, reduction="none")
        return losses.sum() / num_items_in_batch


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    features, classes, indices = torch.utils.data.default_collate(rows)
    return {"features": features, "labels": classes, "indices": indices}


def compute_metrics(found: EvalPrediction) -> dict[str, float]:
    is_right = found.predictions[0].argmax(1) == found.label_ids
    return {"accuracy": is_right.mean().item(), "counted": len(is_right)}


def build_arguments(settings: Settings) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(settings.path / "checkpoints"),
        use_cpu=True,
        seed=SEED,
        full_determinism=True,
        accelerator_config={"split_batches": True, "use_configured_state": True},
        per_device_train_batch_size=BATCH // settings.accumulation,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=settings.accumulation,
        dataloader_drop_last=settings.drop_last,
        num_train_epochs=EPOCHS,
        optim="sgd",
        optim_args=f"momentum={MOMENTUM}",
        learning_rate=RATE,
        lr_scheduler_type="linear",
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=settings.save_every,
        enable_jit_checkpoint=settings.fault == "pause",
        debug="underflow_overflow" if settings.fault == "nan" else "",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    settings = Settings.from_environment()
    watch = Watch(Recorder(settings))
    PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=settings.timeout_s))
    arguments = build_arguments(settings)
    set_seed(SEED)
    model = Model(settings.dropout)
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=Points("train", settings.fault),
        eval_dataset=Points("eval"),
        compute_loss_func=watch.loss,
        compute_metrics=compute_metrics,
        callbacks=[watch],
    )
    last = get_last_checkpoint(arguments.output_dir) if settings.resume else None
    trainer.train(resume_from_checkpoint=last)
    arguments.dataloader_drop_last = False  # it would drop examples of the evaluation too
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        watch.recorder.finish(model.layers, found["eval_accuracy"], int(found["eval_counted"]))


if __name__ == "__main__":
    main()
