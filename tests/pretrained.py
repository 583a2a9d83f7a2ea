"""Tasks with tiny models of transformers, for tests of exports."""

import copy
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from harness.command import Process
from torch import nn
from torch.utils.data import TensorDataset

from trainer import Trainer
from trainer.base.process import child
from trainer.hf import reload

WORDS = 64
TOKENS = 12
LABELS = 3
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
OF_LLAMA = {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", OF_LLAMA),
    "qwen": ("Qwen3ForCausalLM", {**OF_LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma": ("Gemma2ForCausalLM", {**OF_LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", OF_LLAMA),
    "mixtral": ("MixtralForCausalLM", {**OF_LLAMA, "num_local_experts": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL),
    "bert": ("BertForSequenceClassification", {**SMALL, "num_labels": LABELS}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            **{"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2},
            **{"num_heads": 2, "decoder_start_token_id": 0},
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": LABELS},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **{"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
            **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8},
            **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 8},
            **{"max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1},
            **{"eos_token_id": 2, "decoder_start_token_id": 1},
        },
    ),
}


def build(family: str) -> Any:
    """Return a new tiny model of a family."""
    import transformers

    name, values = FAMILIES[family]
    kind = getattr(transformers, name)
    return kind(kind.config_class(**values))


class Rows(TensorDataset):
    """Random rows of tokens, or of what else a family takes."""

    def __init__(self, family: str, number: int):
        random = torch.Generator().manual_seed(number)
        shape = {"vit": (3, 16, 16), "whisper": (8, 16)}.get(family)
        tokens = torch.randint(3, WORDS, (number, TOKENS), generator=random)
        first = torch.randn(number, *shape, generator=random) if shape else tokens
        super().__init__(first, tokens)


class Wrapper(nn.Module):
    """A model of transformers in a module of the task's own."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(**self.pretrained_inputs(tokens), use_cache=False).logits

    def pretrained_inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": tokens}


class Pretrained(Trainer):
    """Trains a model of a family on random rows, with or without adapters."""

    @dataclass
    class Options:
        family: str
        base: str | None
        lora: int | None
        odd: str

    def build_model(self):
        import peft
        import transformers

        options = self.options
        model = build(options.family)
        if options.base is not None:
            model = getattr(transformers, FAMILIES[options.family][0]).from_pretrained(options.base)
        if options.lora is not None:
            words: dict[str, Any] = {"target_modules": "all-linear"}
            if options.family in ("bert", "vit"):
                words["modules_to_save"] = ["classifier"]
            if options.odd == "head":
                words["target_modules"] = ["q_proj", "lm_head"]
            settings = peft.LoraConfig(r=options.lora, init_lora_weights=False, **words)
            model = peft.get_peft_model(model, settings)
        if options.odd == "shared":
            inner: Any = model
            inner.model.layers[1].mlp.up_proj.weight = inner.model.layers[0].mlp.up_proj.weight
        if options.odd == "transposed":
            weight = model.model.layers[0].mlp.up_proj.weight
            weight.data = weight.data.t().contiguous().t()
        return Wrapper(model) if options.odd == "wrapped" else model

    def build_dataset(self, split):
        return Rows(self.options.family, 24 if split == "train" else 9)

    def split_batch(self, batch):
        first, tokens = batch
        family = self.options.family
        if family == "vit":
            return {"pixel_values": first}, tokens
        if family == "whisper":
            return {"input_features": first, "decoder_input_ids": tokens[:, :6]}, tokens
        if family == "t5":
            return {"input_ids": tokens, "decoder_input_ids": tokens[:, :6]}, tokens
        return tokens if self.options.odd == "wrapped" else {"input_ids": tokens}, tokens

    def loss(self, outputs, tokens):
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        if logits.dim() == 2:
            return F.cross_entropy(logits, tokens[:, 0] % LABELS, reduction="none")
        length = logits.shape[1]
        return F.cross_entropy(logits.mT, tokens[:, :length], reduction="none").mean(1)


class WithTokenizer(Pretrained):
    """Has a tokenizer, which cannot be saved if the option `odd` says so."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        from trainer.tasks.finetune import build_tokenizer

        self.tokenizer = build_tokenizer(["a b c d"], 4)
        if self.options.odd == "unsaved":
            self.tokenizer.save_pretrained = copy.copy(unsaved)


def unsaved(folder: Any) -> None:
    raise NotImplementedError("a custom PreTokenizer cannot be serialized")


def fork_reloads() -> None:
    """Have the fresh process of an export be a fork, which has transformers loaded."""
    warnings.simplefilter("ignore")  # of peft and transformers about each other
    real = child.start

    def begin(words, **options):
        if "trainer.hf.reload" not in words:
            return real(words, **options)
        if pid := os.fork():
            return Process(pid)
        os.setsid()
        os.dup2(options["stdout"].fileno(), 1)
        os.dup2(options["stderr"].fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os.environ.update(options["env"])
        reload.main(*words[3:])

    child.start = begin
