"""TRL's SFTTrainer, with the settings that its documentation recommends.

It runs with the Python of a venv that has TRL. `packing=True` with its default strategy, which
needs no padding ("Reducing memory usage"); the default average over the tokens of all devices
(`average_tokens_across_devices`); adapters by `peft_config`, or a PeftModel; a restart by
`train(resume_from_checkpoint=True)`. Its defaults bf16 and gradient checkpointing are switched off,
because both contestants compute in one precision and keep their activations; so is the search for
unused parameters, which costs time and finds none.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from peers.lm_problem import Instrument, Settings

DTYPES = {"fp32": "float32", "fp64": "float64"}
OPTIMIZERS = {"sgd": "sgd", "adamw": "adamw_torch"}


class Watch(TrainerCallback):
    def __init__(self, trainer: Watched):
        self.trainer = trainer

    def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
        self.trainer.instrument.end_step(state.global_step - 1, self.trainer.tokens)
        self.trainer.tokens = 0


class Watched(SFTTrainer):
    instrument: Instrument
    tokens = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if "position_ids" in inputs:
            tokens = inputs["position_ids"] > 0
        else:
            tokens = inputs["attention_mask"][:, 1:]
        self.tokens += int(tokens.sum())
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.instrument.settings.is_watched:
            # DDP divides the gradients by the number of ranks, so the loss that is optimised is
            # the sum of these
            share = float(loss.detach()) / self.accelerator.num_processes
            self.instrument.see(self.state.global_step, share, 0.0)
        return loss


def build_model(settings: Settings) -> Any:
    if settings.adapters is None:
        return settings.model
    dtype = getattr(torch, DTYPES[settings.precision])
    base = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
    model = PeftModel.from_pretrained(base, settings.adapters, is_trainable=True)
    return model.to(dtype)


def build_config(settings: Settings, has_tokens: bool) -> SFTConfig:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    named: dict[str, Any] = {}
    if settings.adapters is None:
        named["model_init_kwargs"] = {"dtype": DTYPES[settings.precision]}
    if settings.in_order:
        named["train_sampling_strategy"] = "sequential"
    if has_tokens and settings.packing:
        named["dataset_kwargs"] = {"skip_prepare_dataset": True}  # rows are packed already
    if settings.save_every is not None:
        named |= {"save_strategy": "steps", "save_steps": settings.save_every}
    else:
        named["save_strategy"] = "no"
    if settings.strategy == "fsdp":
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        named |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, **layers}}
    return SFTConfig(
        output_dir=str(settings.path / "checkpoints"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        max_length=settings.context,
        packing=settings.packing,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.batch // settings.micro_batch // ranks,
        max_steps=settings.steps,
        optim=OPTIMIZERS[settings.optimizer],
        learning_rate=settings.rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **named,
    )


def main() -> None:
    settings = Settings.from_environment()
    with open(settings.rows, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    has_tokens = "input_ids" in rows[0]
    config = build_config(settings, has_tokens)
    lora = None
    if settings.lora is not None and settings.adapters is None:
        alpha = 2 * settings.lora
        lora = LoraConfig(
            r=settings.lora, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    trainer = Watched(
        model=build_model(settings),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        peft_config=lora,
    )
    if settings.strategy == "fsdp" and "FSDP" not in str(trainer.accelerator.distributed_type):
        sys.exit("not sharded: accelerate leaves fsdp out on CPUs")
    trainer.instrument = Instrument(settings)
    trainer.add_callback(Watch(trainer))
    trainer.train(resume_from_checkpoint=settings.resume or None)
    trainer.save_model(str(settings.path / "last"))


if __name__ == "__main__":
    main()
