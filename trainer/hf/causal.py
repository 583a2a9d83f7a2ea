"""Causal models of transformers as this project trains them: a loss for each token, in any row."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer import Config, ConfigError, World
from trainer.core.api import Mesh

IGNORED = -100  # as everywhere in transformers: such a label has no weight
TOKENS_AT_ONCE = 512  # whose logits are in memory at once


@dataclass(frozen=True)
class RowCounts:
    """Facts of rows that the host knows before they are on a device, which it then need not ask:
    how many tokens of each are learned, and where its padding begins. No tree of tensors."""

    learned: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, is_learned: torch.Tensor, position_ids: torch.Tensor) -> "RowCounts":
        """Return those of masks (rows, tokens) and positions (rows, tokens) on the host."""
        places = torch.arange(position_ids.shape[1])
        lengths = (places * (position_ids > 0)).amax(1) + 1
        return cls(tuple(is_learned.sum(1).tolist()), tuple(lengths.tolist()))

    def learned_in(self, rows: int) -> int:
        """Return how many tokens are learned in as many rows: at most, if they are some of them."""
        return sum(self.learned) if rows == len(self.learned) else rows * max(self.learned)


class LanguageModel(nn.Module):
    """A causal model of transformers or peft, `.model`, and the loss of each token.

    The logits of a vocabulary of 128,000 are never there as a whole: they are computed for 512
    learned tokens at a time, and again in backward. Models that change their logits after the last
    layer, such as Gemma 2's soft cap, compute them themselves.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.has_plain_logits = True
        self.is_trimmed = True
        self.has_cache = True
        self.positions: int | None = None  # of a sequence, at most

    @property
    def base(self) -> Any:
        """The model of transformers, in which peft's layers are too."""
        inner = getattr(self.model, "get_base_model", None)
        return inner() if inner else self.model

    @property
    def _is_empty(self) -> bool:
        """True if the model has no values: only the shapes of its outputs are asked for."""
        return self.base.get_input_embeddings().weight.is_meta

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values: Any = None,
        places: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        counts: RowCounts | None = None,
    ) -> torch.Tensor:
        """Return the loss of each token (rows, tokens); it is 0 where the label is -100.

        `labels` (rows, tokens) are the tokens that follow. `position_ids` (rows, tokens) begin with
        0 in each sequence of a row, which tells sequences apart. Without labels return the logits
        (rows, vocabulary) that follow the last token; `past_key_values`, if given, holds those
        before.

        Where ranks divide rows, `places` (rows, tokens) are those of the tokens in the whole rows,
        and `segments` (rows, 1, places) number the sequences there. `counts` are those of the rows:
        without them the host waits for the device to count.
        """
        if labels is None:
            more = {} if past_key_values is None else {"past_key_values": past_key_values}
            return self.model(input_ids=input_ids, use_cache=bool(more), **more).logits[:, -1]
        labels = labels.to("meta" if self._is_empty else labels.device)
        is_learned = labels != IGNORED
        mask = None if segments is None else visible(places, segments)
        length = self._length(position_ids, counts) if mask is None else None
        inputs = {"input_ids": input_ids[:, :length], "use_cache": False, "attention_mask": mask}
        if position_ids is not None:
            inputs["position_ids"] = position_ids[:, :length]
        labels, chosen = labels[:, :length], is_learned[:, :length]
        if counts is not None and not self._is_empty:
            # learned tokens first, in order; the label of what is beyond them is ignored
            order = (~chosen).flatten().to(torch.uint8).argsort(stable=True)
            chosen = order[: counts.learned_in(len(labels))]
        losses = self._losses(inputs, chosen, _chosen(labels, chosen))
        if chosen.dtype == torch.bool:
            return losses.new_zeros(is_learned.shape).masked_scatter(is_learned, losses)
        every = losses.new_zeros(labels.numel()).index_copy(0, chosen, losses)
        return F.pad(every.view(labels.shape), (0, is_learned.shape[1] - labels.shape[1]))

    def _losses(
        self, inputs: Mapping[str, Any], chosen: torch.Tensor, words: torch.Tensor
    ) -> torch.Tensor:
        """Return the losses of the chosen tokens, in order."""
        if not self.has_plain_logits:
            logits = _chosen(self.model(**inputs).logits, chosen)
            return F.cross_entropy(logits, words, reduction="none")
        hidden = _chosen(self.base.base_model(**inputs).last_hidden_state, chosen)
        parts = zip(hidden.split(TOKENS_AT_ONCE), words.split(TOKENS_AT_ONCE), strict=True)
        if torch.is_grad_enabled():
            again: Any = {"use_reentrant": False, "preserve_rng_state": False}
            return torch.cat([checkpoint(self._score, *part, **again) for part in parts])
        return torch.cat([self._score(*part) for part in parts])

    def _score(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        logits = self.base.get_output_embeddings()(hidden)
        return F.cross_entropy(logits, words, reduction="none")

    def _length(self, position_ids: torch.Tensor | None, counts: RowCounts | None) -> int | None:
        """Return where the padding at the end of all rows begins: nothing there is learned.

        Padding has the position 0, as has the first token of a sequence.
        """
        if position_ids is None or self._is_empty or not self.is_trimmed:
            return None
        if counts is not None:
            return max(counts.lengths)
        places = torch.arange(position_ids.shape[1], device=position_ids.device)
        return int((places * (position_ids > 0)).max()) + 1

    def pretrained_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `.model` takes for the same rows."""
        return {name: inputs[name] for name in ("input_ids", "position_ids")} | {"use_cache": False}


def _chosen(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the values of the chosen tokens, by a mask or their numbers; of all if values are on
    the meta device."""
    if values.is_meta:
        return values.flatten(0, 1)
    return values[chosen] if chosen.dtype == torch.bool else values.flatten(0, 1)[chosen]


def visible(places: torch.Tensor | None, segments: torch.Tensor) -> torch.Tensor | None:
    """Return which tokens of whole rows each token sees, (rows, 1, tokens, places): those before it
    in its sequence. None where a rank has whole rows: models make their own mask then.
    """
    size = segments.shape[2]
    if places is None or places.shape[1] == size:
        return None
    own = segments[:, 0].gather(1, places)
    every = torch.arange(size, device=segments.device)
    return ((own[:, :, None] == segments) & (places[:, :, None] >= every))[:, None]


def check_finite(model: LanguageModel, computed: float) -> None:
    """Raise ConfigError for a model that has computed NaN, naming a weight that is not finite."""
    if math.isnan(computed):
        names = (n for n, p in model.model.named_parameters() if not bool(p.isfinite().all()))
        reason = next((f": {name} has values that are not finite" for name in names), "")
        raise ConfigError(f"""task.options.model: {type(model.base).__name__} computes NaN{reason};
            take other weights, or strategy.precision=fp32 for some of 16 bits""")


@torch.no_grad()
def check_parts(model: LanguageModel, key: str) -> None:
    """Raise ConfigError for a model whose rows the ranks of strategy=cp cannot divide.

    Their attention gets a mask as an input. A window or chunks in it would be ignored.
    """
    config = model.base.config
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if not hasattr(config, "layer_types") and getattr(config, "sliding_window", None):
        windows = {"sliding_attention"}
    if windows or config._attn_implementation != "sdpa":
        kind = type(model.base).__name__
        what = ", ".join(sorted(windows)) or f"{config._attn_implementation} attention"
        raise ConfigError(f"""{key}: the ranks cannot divide the rows of {kind},
            which has {what}; use strategy=fsdp with strategy.recompute=blocks for long rows""")


@torch.no_grad()
def answer(
    forward: Any, model: LanguageModel, prompt: list[int], stop: int, most: int
) -> list[int]:
    """Return the tokens that the model writes after a prompt, the likeliest each time, as long as
    it has positions for them.

    `forward(inputs)` computes them on every rank, as with `Task.samples`.
    """
    from transformers import DynamicCache

    device = next(model.parameters()).device
    more = {"past_key_values": DynamicCache(config=model.base.config)} if model.has_cache else {}
    if model.positions is not None:
        most = min(most, model.positions + 1 - len(prompt))
    tokens = prompt
    written: list[int] = []
    while len(written) < most:
        logits = forward({"input_ids": torch.tensor([tokens], device=device), **more})
        word = int(logits[0].argmax())
        if word == stop:
            break
        written.append(word)
        tokens = [word] if more else prompt + written
    return written


def count_bytes(tokenizer: Any) -> list[int]:
    """Return the bytes of text that each token stands for, by number; 0 for special ones."""
    special = {*tokenizer.all_special_ids}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_of_bytes = backend is not None and "ByteLevel" in str(backend.decoder)
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return [0 if i in special else _size(name, is_of_bytes) for i, name in enumerate(names)]


def _size(name: str | None, is_of_bytes: bool) -> int:
    if not name:
        return 0
    if is_of_bytes:  # a letter for each byte
        return len(name)
    if len(name) == 6 and name.startswith("<0x"):  # SentencePiece, a byte that is no piece
        return 1
    return len(name.removeprefix("##").replace("\u2581", " ").encode())


def divides_positions(config: Config, world: World) -> bool:
    """Return True if ranks have parts of each row, as with strategy=cp."""
    return Mesh.of(config.strategy.mesh, world).context > 1
