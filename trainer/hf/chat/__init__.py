"""Chats as tokens and masks: made once, kept on disk, read by memory map.

chats = Chats("chat.jsonl", tokenizer, context=1024)
chats.prepare()                                         # on one rank of each node
data = chats.open("train")
data[0]                                                 # {"tokens": (n,), "learned": (n,)}
PackedDataset(data, data.lengths, 1024)
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer import ConfigError
from trainer.base.errors import counted, shortened, visible
from trainer.hf.chat.forms import Example, read_chat, read_pair
from trainer.hf.chat.function_chats import make_pairs
from trainer.hf.chat.masks import Masks
from trainer.hf.chat.rows import open_source
from trainer.hf.chat.template import make_recipe
from trainer.hf.chat.token_store import TokenStore, open_store

DATA_KEY = "task.options.data"
EVAL_KEY = "task.options.eval"
MODEL_KEY = "task.options.model"
LIBRARY_FILES = 200  # of Python's standard library
SHOWN_CHARACTERS = 300  # of each part of the example
HASHES = 2.0**64

Read = Callable[[Mapping[str, Any]], tuple[str, list[Example]]]


class ChatDataset(Dataset):
    """Rows of a store. An example is {"tokens": int64 (n,), "learned": bool (n,)}.

    `lengths` (examples,): tokens of each. `facts`: what `describe` says of all rows. `stop`: the
    token that ends an answer, or None.
    """

    def __init__(self, store: TokenStore, rows: np.ndarray, name: str, split: str):
        self._store = store
        self._rows = rows
        self.source = name
        self.facts = store.facts
        self.stop: int | None = store.facts["stop"]
        self.lengths = torch.from_numpy(store.lengths()[rows])
        digest = hashlib.sha256(f"{store.facts['digest']} {split} ".encode())
        digest.update(rows.tobytes())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, learned = self._store.read(int(self._rows[index]))
        return {"tokens": torch.from_numpy(tokens), "learned": torch.from_numpy(learned)}


class PairDataset(ChatDataset):
    """Rows of a chosen and a rejected answer to a prompt.

    An example is {"chosen": int64 (n,), "chosen_learned": bool (n,), "rejected": int64 (m,),
    "rejected_learned": bool (m,)}. `lengths` (examples, 2): tokens of both.
    """

    def __init__(self, store: TokenStore, rows: np.ndarray, name: str, split: str):
        super().__init__(store, rows, name, split)
        self.lengths = torch.from_numpy(store.lengths().reshape(-1, 2)[rows])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = int(self._rows[index])
        pair: dict[str, torch.Tensor] = {}
        for offset, name in enumerate(("chosen", "rejected")):
            tokens, learned = self._store.read(2 * row + offset)
            pair |= {name: torch.from_numpy(tokens), f"{name}_learned": torch.from_numpy(learned)}
        return pair


@dataclass(frozen=True)
class _Kind:
    name: str
    read: Read
    dataset: type[ChatDataset]


CHAT = _Kind("chat", read_chat, ChatDataset)
PAIRS = _Kind("pairs", read_pair, PairDataset)


@dataclass(frozen=True)
class Chats:
    """Rows of chats, and how they become tokens.

    `data`: a file, a folder, a glob or shards; None: functions of Python's standard library, in
    `files` files. `learn`: "assistant" or "all". `eval`: the share of rows that is held out, by a
    hash of their content; or a file.
    """

    data: str | None
    tokenizer: Any
    context: int
    learn: str = "assistant"
    eval: float | str | None = 0.05
    files: int = LIBRARY_FILES
    kind: _Kind = CHAT

    def prepare(self) -> None:
        """Make the tokens of `data`, and of `eval` if it is a file, unless they are in the cache.

        Raises ConfigError for rows that cannot be used, with their number and the first one's
        place.
        """
        for data, key in self._places():
            self._open(data, key, is_verified=True)

    def open(self, split: str) -> Any:
        """Return the rows of a split, "train" or "eval", as `prepare` has made them."""
        if split not in ("train", "eval"):
            raise ValueError("there are train and eval")
        places = self._places()
        data, key = places[-1] if split == "eval" else places[0]
        store, name = self._open(data, key)
        rows = np.arange(len(store.hashes()))
        if len(places) == 1:
            rows = rows[_held_out(store.hashes(), self.eval) == (split == "eval")]
            if not len(rows):
                share = f"{EVAL_KEY}={self.eval}"
                raise ConfigError(f"""{share}: leaves no row of {len(store.hashes()):,} for {split};
                    give more rows, a share above 0 that leaves some, or a file""")
        return self.kind.dataset(store, rows, name, split)

    def _places(self) -> list[tuple[str | None, str]]:
        """Return the data and its setting, and those of the held-out file if there is one."""
        if _share(self.eval) is None:
            return [(self.data, DATA_KEY), (str(self.eval), EVAL_KEY)]
        return [(self.data, DATA_KEY)]

    def _open(
        self, data: str | None, key: str, is_verified: bool = False
    ) -> tuple[TokenStore, str]:
        setting = f"{key}={data}"
        source = open_source(data, setting, self.files, is_verified)
        if data is None and self.kind is PAIRS:
            source = replace(source, read=partial(make_pairs, source.read))
        recipe = make_recipe(self.tokenizer, self.context, self.learn, self.kind.name)
        make_masks = partial(Masks, self.tokenizer, self.context, self.learn, MODEL_KEY)
        store = open_store(source, recipe, self.kind.read, make_masks, setting, is_verified)
        return store, source.name


def _share(eval: float | str | None) -> float | None:
    """Return the share that is held out, or None for a file."""
    try:
        share = float(eval or 0)
    except ValueError:
        return None
    if not 0 <= share < 1:
        raise ConfigError(f"{EVAL_KEY}={eval}: must be a share below 1, such as 0.05, or a file")
    return share


def _held_out(hashes: np.ndarray, eval: float | str | None) -> np.ndarray:
    """Return which rows are held out: by their content, so that their order does not matter."""
    share = _share(eval) or 0.0
    held = hashes < int(share * HASHES)
    return hashes == hashes.min() if share and not held.any() else held


def describe(dataset: ChatDataset, tokenizer: Any) -> list[str]:
    """Return lines for the start: how much is learned, one example, and warnings."""
    facts = dataset.facts
    count = facts["sequences"]
    tokens, learned = (round(facts[name] / count) for name in ("tokens", "learned"))
    share = f"{learned:,} of {tokens:,} tokens of a row are learned"
    lines = [f"chat    {share}, {_describe_stop(facts, tokenizer)}"]
    example = dataset[0]
    for name in ("tokens", "chosen", "rejected"):
        if name in example:
            mask = example["learned" if name == "tokens" else f"{name}_learned"]
            label = "" if name == "tokens" else f"{name}: "
            lines.append(f"chat    {label}{mark_learned(example[name], mask, tokenizer)}")
    if facts["empty_files"]:
        lines.append(f"warning: {DATA_KEY}: {counted(facts['empty_files'], 'file')} without a byte")
    lines += [
        f"warning: {DATA_KEY}: {affected_rows:,} of {counted(facts['rows'], 'row')}: {fact}"
        for fact, affected_rows in facts["named"].items()
    ]
    return lines


def _describe_stop(facts: Mapping[str, Any], tokenizer: Any) -> str:
    stop = facts["stop"]
    if stop is None:
        return "and there is no stop token"
    name = f"the stop token {visible(str(tokenizer.convert_ids_to_tokens(stop)))}"
    if facts["stops"] == facts["sequences"]:
        return f"{name} too"
    return f"{name} in {facts['stops']:,} of {facts['sequences']:,} rows"


def mark_learned(tokens: torch.Tensor, learned: torch.Tensor, tokenizer: Any) -> str:
    """Return the text of an example for a terminal, its learned parts in [[ ]]."""
    changes = torch.nonzero(learned[1:] != learned[:-1])[:, 0] + 1
    parts = []
    for piece, mask in zip(
        tokens.tensor_split(changes), learned.tensor_split(changes), strict=True
    ):
        text = visible(shortened(tokenizer.decode(piece.tolist()), SHOWN_CHARACTERS))
        parts.append(f"[[{text}]]" if mask[0] else text)
    return "".join(parts)
