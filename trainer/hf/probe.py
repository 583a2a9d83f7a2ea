"""Properties that a causal model must have, tried on a few tokens before training.

Its rows hold whole sequences, with padding after them, so that an earlier token never sees a later
one, a packed sequence never sees another, and no position follows from the longest row beside.
"""

from typing import Any

import torch
from torch import nn

from trainer import ConfigError
from trainer.core.api import ExampleRng
from trainer.hf import loading
from trainer.hf.causal import LanguageModel, check_finite

CONTEXT = "task.options.context"
TRIED_TOKENS = 24  # of a row that is tried: a third is one sequence, half another, the rest padding
SAMPLED_ROWS = 100  # of the data, which show the control tokens that a template writes
FEW_TOKENS = 4  # that show which logits a model returns; those of a context of 8 are not fewer
SEEN = 1e-6  # of the spread of states; what a mask hides adds an exact 0
GROUPED = 8  # times the rounding of a row whose tokens stay: experts compute those of all rows
CLOSE_IN_32_BITS = 1e-3  # the same in other shapes, as a part of the spread
CLOSE_IN_16_BITS = 0.1


def most_positions(model: LanguageModel) -> tuple[int | None, str]:
    """Return how many positions a sequence may have, and why; None if any number.

    It is the length of a table of positions. Where RoPE takes other factors for long rows, it is
    the length up to which it does not: it takes them for all rows of a micro-batch, by its longest.
    """
    config = model.base.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    limits: list[tuple[int, str]] = []
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = str(each.get("rope_type"))
        begin = each.get("original_max_position_embeddings") if kind == "longrope" else most
        if begin and (kind == "longrope" or "dynamic" in kind):
            why = f"""its rope ({kind}) changes with the longest row of a micro-batch from there on,
                so what is learned would depend on the layout"""
            limits.append((begin, why))
    if most and any(most <= size <= most + 2 for size in _tables(model.base)):
        limits.append((most, "it has no other positions"))
    return min(limits, default=(None, ""))


def _tables(model: Any) -> list[int]:
    """Return the lengths of a model's tables of positions; OPT's and BART's have 2 rows more."""
    words = model.get_input_embeddings()
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    sines = [b for name, b in model.named_buffers() if name.endswith("embed_positions")]
    return [each.num_embeddings for each in embeddings] + [len(each) for each in sines]


def check_positions(model: LanguageModel, context: int) -> None:
    """Raise ConfigError if rows can be longer than the model's positions."""
    most, why = most_positions(model)
    if most is not None and context > most:
        raise ConfigError(f"""{CONTEXT}={context}: {type(model.base).__name__} takes at most {most}
            tokens: {why}; set {CONTEXT}={most} or less, or take another model""")


def check_tokens(name: str, tokenizer: Any, data: Any) -> None:
    """Raise ConfigError if a token of a text has no embedding in the model of that name.

    A special token that no row has may lack one, as that of images in Gemma 3 of 1B.
    """
    size = getattr(loading.load_config(name).get_text_config(), "vocab_size", None)
    special = {
        token_id for token_id, each in tokenizer.added_tokens_decoder.items() if each.special
    }
    used = {*tokenizer.get_vocab().values()} - special - {*tokenizer.all_special_ids}
    used |= {-1 if data.stop is None else data.stop}
    for row in (data[i] for i in range(min(SAMPLED_ROWS, len(data)))):
        used |= {int(values.max()) for values in row.values()}
    if size is not None and (most := max(used)) >= size:
        token = tokenizer.convert_ids_to_tokens(most)
        raise ConfigError(f"""{loading.MODEL_KEY}={name}: its tokenizer has {len(tokenizer)} tokens
            and the model {size} embeddings, none for {token} ({most}); take the model's own
            tokenizer, or save the model after resize_token_embeddings({len(tokenizer)})""")


@torch.no_grad()
def check_rows(model: LanguageModel, key: str, is_packed: bool, context: int | None = None) -> None:
    """Decide how a model computes, and prove that its rows may hold padding, or two sequences.

    Raises ConfigError for rows that are longer than its positions, for a model whose earlier tokens
    see later ones, and if `is_packed` for one whose packed sequence is not what it is alone: where
    attention, or a state, sees the sequence before.
    """
    if context is not None:
        check_positions(model, context)
    if next(model.parameters()).is_meta:  # of a plan, which computes nothing
        return
    was_training = model.training
    model.positions, _ = most_positions(model)
    rows = _Rows(model, min(TRIED_TOKENS, context or TRIED_TOKENS, model.positions or TRIED_TOKENS))
    model.is_trimmed = not rows.have_wide_draws()
    model.eval()
    model.has_plain_logits = rows.have_plain_logits()
    model.has_cache = rows.have_cache()
    kind = type(model.base).__name__
    early, mixed = rows.compare(is_packed)
    model.train(was_training)
    check_finite(model, early)
    if not early <= 1:
        raise ConfigError(f"""task.options.model: {kind} is not causal: a later token changes
            earlier logits; take a causal model, or one with is_decoder=true in its config.json""")
    if is_packed and not mixed <= 1:
        raise ConfigError(f"""{key}=true: {kind} mixes the sequences of a row;
            set {key}=false, which gives each sequence a row of its own""")


class _Rows:
    """A row of two sequences with padding, and the same with other tokens at the ends of the first
    and of the padding."""

    def __init__(self, model: LanguageModel, tokens: int):
        self.model = model
        self.first, self.second = tokens // 3, tokens // 2
        rest = tokens - self.first - self.second
        device = next(model.parameters()).device
        size = model.base.get_input_embeddings().weight.shape[0]
        draws = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(size, (1, tokens), generator=draws).to(device)
        places = [torch.arange(self.first), torch.arange(self.second), torch.zeros(rest).long()]
        self.places = torch.cat(places)[None].to(device)
        self.changed = self.tokens.clone()
        ends = [*range(self.first // 2, self.first), *range(tokens - rest, tokens)]
        self.changed[0, ends] = (self.tokens[0, ends] + 1) % size

    def compare(self, is_packed: bool) -> tuple[float, float]:
        """Return how much of what is allowed differs: in tokens before a changed one, and in a
        packed sequence, after a changed one or alone."""
        early = slice(0, self.first // 2)
        later = slice(self.first, self.first + self.second)
        states = self._states(self.tokens, position_ids=self.places)
        far = _far(states, self._states(self.changed, position_ids=self.places))[0]
        allowed = SEEN * _spread(states)
        if not float(torch.cat([far[early], far[later]]).max()) <= allowed:
            allowed = max(allowed, GROUPED * self._rounding())
        if not is_packed:
            return _part(far[early], allowed), 0.0
        alone = self._states(self.tokens[:, later], position_ids=self.places[:, later])
        apart = self._part_of_spread(states[:, later], alone)
        return _part(far[early], allowed), max(_part(far[later], allowed), apart)

    def _part_of_spread(self, one: torch.Tensor, other: torch.Tensor) -> float:
        """Return how much of what rounding may do differs."""
        is_wide = next(self.model.parameters()).dtype.itemsize >= 4
        return _part(
            _far(one, other), (CLOSE_IN_32_BITS if is_wide else CLOSE_IN_16_BITS) * _spread(one)
        )

    def _rounding(self) -> float:
        """Return by how much a row differs if only the row beside it changes."""
        places = self.places.expand(2, -1)
        pairs = [torch.cat([each, self.tokens.flip(1)]) for each in (self.tokens, self.changed)]
        one, other = (self._states(pair, position_ids=places) for pair in pairs)
        return float(_far(one[1], other[1]).max())

    def _states(self, tokens: torch.Tensor, use_cache: bool = False, **more: Any) -> torch.Tensor:
        """Return what the output layer is given, (rows, tokens, width); logits if that is unknown.

        States have a scale where new, or zero, output layers make all logits small. The layer
        itself is computed for one token only.
        """
        seen: list[torch.Tensor] = []

        def cut(_: Any, inputs: Any) -> Any:
            seen.append(inputs[0])
            return inputs[0][:, :1], *inputs[1:]

        head = self.model.base.get_output_embeddings()
        hook = head.register_forward_pre_hook(cut)
        try:
            logits = self.model.model(input_ids=tokens, use_cache=use_cache, **more).logits
        finally:
            hook.remove()
        states = seen[0] if seen else logits
        return states if states.dtype == torch.float64 else states.float()

    def have_plain_logits(self) -> bool:
        """Return True if the logits are what the output layer returns for the last hidden states.

        It returns known numbers here: its own may be too small to show a soft cap, or all 0.
        """
        arguments = {"input_ids": self.tokens[:, :FEW_TOKENS], "use_cache": False}
        arguments["position_ids"] = self.places[:, :FEW_TOKENS]
        seen: list[torch.Tensor] = []

        def answer(_: Any, inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
            seen.extend(
                (inputs[0], torch.linspace(-99, 99, outputs.numel()).view_as(outputs).to(outputs))
            )
            return seen[1]

        hook = self.model.base.get_output_embeddings().register_forward_hook(answer)
        try:
            logits = self.model.model(**arguments).logits
        finally:
            hook.remove()
        hidden = getattr(self.model.base.base_model(**arguments), "last_hidden_state", None)
        if not seen or hidden is None:  # Llama 4's base model is the whole one
            return False
        return _is_same(seen[0], hidden) and _is_same(logits, seen[1])

    def have_cache(self) -> bool:
        """Return True if tokens after a cache are what they are in the whole sequence: others have
        a cache of their own, or none."""
        from transformers import DynamicCache

        tokens = self.tokens[:, :FEW_TOKENS]
        try:
            cache = DynamicCache(config=self.model.base.config)
            both = tokens.split((FEW_TOKENS - 1, 1), 1)
            parts = [self._states(each, True, past_key_values=cache) for each in both]
        except Exception:  # of a model that cannot take it
            return False
        return self._part_of_spread(self._states(tokens), torch.cat(parts, 1)) <= 1

    def have_wide_draws(self) -> bool:
        """Return True if dropout draws for pairs of tokens, as that of attention does: its numbers
        then depend on the length of a row, which must not follow from the rows beside."""
        settings = self.model.base.config.get_text_config().to_dict().items()
        if not any("drop" in name and value for name, value in settings):
            return False
        inputs = {"input_ids": self.tokens.expand(2, -1), "use_cache": False}
        inputs["position_ids"] = self.places.expand(2, -1)
        draws = ExampleRng(0, self.tokens.device, is_by_example=True)
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            drawn = draws.watch(lambda: self.model.base.base_model(**inputs), 2)
        return any(self.tokens.shape[1] in sizes[2:] for _, sizes in drawn)


def _spread(states: torch.Tensor) -> float:
    return float((states - states.mean((0, 1))).square().mean().sqrt())


def _far(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the root of the mean square of what differs, for each token."""
    return (one - other).square().mean(-1).sqrt()


def _part(differences: torch.Tensor, allowed: float) -> float:
    most = float(differences.max())
    return most / allowed if allowed else most


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
