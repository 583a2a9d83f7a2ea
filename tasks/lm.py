"""A language model that learns chats, prompts with completions, or texts.

Without options it is a new small Llama, which reads bytes and learns to write functions of Python's
standard library from their docstrings: nothing is downloaded. `task.options.model` names one on the
hub, a folder or a GGUF file; `task.options.lora` trains adapters of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer import ConfigError, PackedDataset, Trainer, limit
from trainer.hf import chat, loading, task_exports
from trainer.hf.causal import (
    IGNORED,
    LanguageModel,
    RowCounts,
    answer,
    check_parts,
    count_bytes,
    divides_positions,
)
from trainer.hf.chat.pipeline_calls import call_pipeline
from trainer.hf.lora import ALL_LINEAR
from trainer.hf.probe import check_rows, check_tokens

PACKING = "task.options.packing"
CONTEXT = "strategy.mesh.context"
PAD, START, END = SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENING = 16  # tokens of a text that is to be continued
MOST_WRITTEN = 64  # tokens of an answer


@dataclass
class Options:
    model: str | None
    data: str | None
    eval: float | str
    files: Annotated[int, limit(min=1)]
    context: Annotated[int, limit(min=8)]
    learn: Literal["assistant", "all"]
    packing: bool
    lora: Annotated[int, limit(min=1)] | None
    targets: str | list[str]
    answers: Annotated[int, limit(min=0)]
    width: Annotated[int, limit(min=2)]
    layers: Annotated[int, limit(min=1)]
    heads: Annotated[int, limit(min=1)]

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ConfigError(f"""task.options.heads={self.heads}:
                must divide half of task.options.width={self.width}""")
        if self.lora is None and self.targets != ALL_LINEAR:
            raise ConfigError(f"""task.options.targets={self.targets}: needs task.options.lora,
                without which all weights train; set both, or neither""")


class LM(Trainer):
    Options = Options
    kind = chat.CHAT
    wrapper = LanguageModel

    @cached_property
    def tokenizer(self) -> Any:
        name = self.options.model
        return loading.load_tokenizer(name) if name else build_tokenizer()

    @property
    def chats(self) -> chat.Chats:
        names = ("context", "learn", "eval", "files")
        settings = {name: getattr(self.options, name) for name in names}
        return chat.Chats(self.options.data, self.tokenizer, kind=self.kind, **settings)

    @property
    def divides_rows(self) -> bool:
        """True if ranks have parts of each row, as with strategy=cp."""
        return divides_positions(self.config, self.world)

    def prepare(self):
        loading.fetch(self.options.model)
        self.chats.prepare()
        if self.options.model:
            check_tokens(self.options.model, self.tokenizer, self.chats.open("train"))

    def open_rows(self, split: str) -> Any:
        """Return the rows of a split, and tell once what is learned of them."""
        data = self.chats.open(split)
        if split == "train" and self.world.rank == 0:
            print(*chat.describe(data, self.tokenizer), sep="\n")
            if self.options.answers and self.divides_rows:
                print(f"answers are not shown: {CONTEXT} divides the rows")
        return data

    def build_dataset(self, split):
        data = self.open_rows(split)
        if not self.options.packing:
            return data
        pad = self.tokenizer.pad_token_id or 0
        return PackedDataset(data, data.lengths, self.options.context, {"tokens": pad})

    def collate(self, rows):
        """Return rows of one length, and what the host has to know of them."""
        if not self.options.packing:
            size = self.options.context
            rows = [row | {"positions": torch.arange(len(row["tokens"]))} for row in rows]
            rows = [row | {"segments": torch.ones_like(row["tokens"])} for row in rows]
            rows = [{k: F.pad(v, (0, size - len(v))) for k, v in row.items()} for row in rows]
        batch = default_collate(rows)
        return batch | {"counts": RowCounts.of(follows(batch), batch["positions"])}

    def split_batch(self, batch):
        """Return inputs, all (rows, context), and labels: the next tokens of the same sequence."""
        segments = batch["segments"]
        labels = batch["tokens"][:, 1:].masked_fill(~follows(batch), IGNORED)
        labels = F.pad(labels, (0, 1), value=IGNORED)
        inputs = {"input_ids": batch["tokens"], "position_ids": batch["positions"]}
        if self.divides_rows:
            inputs["places"] = torch.arange(segments.shape[1]).expand_as(segments)
            inputs["segments"] = segments[:, None]  # for each rank as a whole
        else:
            inputs["counts"] = batch.get("counts")
        return inputs | {"labels": labels}, labels

    def build_model(self):
        options = self.options
        self.sizes = torch.tensor(count_bytes(self.tokenizer))
        if options.model:
            dtype = "auto" if options.lora else torch.float32  # what trains has 32 bits
            inner = loading.load_model("AutoModelForCausalLM", options.model, dtype=dtype)
        else:
            inner = build_llama(options, self.tokenizer)
        task_exports.end_answers(inner, self.chats.open("train").stop)
        if options.lora:
            inner = self.adapt(inner)
        model = self.wrapper(inner)
        check_rows(model, PACKING, options.packing, options.context)
        if self.divides_rows:
            check_parts(model, CONTEXT)
        return model

    def adapt(self, model):
        """Return the model with adapters."""
        return loading.adapt(model, self.options.lora, self.options.targets)

    def pipeline_calls(self):
        """Return what an export must answer as the run does: it is compared with that."""
        return call_pipeline(self.tokenizer, self.chats.open("train").stop)

    def blocks(self, model):
        return loading.blocks_of(model)

    def tensor_plan(self):
        return "auto"

    def loss(self, outputs, labels):
        return outputs, (labels != IGNORED).to(outputs.dtype)

    def metrics(self, outputs, labels):
        sizes = self.sizes.to(labels.device)[labels.clamp_min(0)] * (labels != IGNORED)
        bits = outputs.double() / math.log(2) / sizes.clamp_min(1)
        return {"bits_per_byte": (bits, sizes.double())}

    def summarize(self, means):
        return {"perplexity": math.exp(min(means["loss"], 700))}

    def samples(self, forward):
        """Return what the model answers to prompts that are held out."""
        if not self.options.answers or self.divides_rows:
            return {}
        data = self.chats.open("eval")
        count = min(self.options.answers, len(data))
        found = {}
        for number in range(count):
            tokens, learned = [*data[number * len(data) // count].values()][:2]
            first = int(learned.nonzero()[0]) if self.options.learn != "all" else 0
            prompt = tokens[: first if first > 1 else OPENING].tolist()
            stop = -1 if data.stop is None else data.stop
            written = answer(forward, self.model, prompt, stop, MOST_WRITTEN)
            texts = [self.tokenizer.decode(tokens) for tokens in (prompt, written)]
            found[f"answer {number + 1}"] = f"{texts[0]}[[{texts[1]}]]"
        return found


def follows(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return which tokens but the first are learned from the one before, (rows, context - 1)."""
    segments = batch["segments"]
    return (segments[:, 1:] == segments[:, :-1]) & batch["learned"][:, 1:]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a chat template that marks what an assistant writes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, chat_template=TEMPLATE
    )


def build_llama(options: Options, tokenizer: Any) -> LlamaForCausalLM:
    """Return a new Llama of the given size."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        max_position_embeddings=options.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)
