"""Tokens and masks on disk: flat files in a folder of the cache, which is whole or not there."""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer import ConfigError, RunError
from trainer.shards.cache import default_folder
from trainer.tasks.chat.flaws import Flaw, Flaws
from trainer.tasks.chat.forms import Example, check_forms, content_hash
from trainer.tasks.chat.masks import CUT, NAMED, Masked, Masks, Plan
from trainer.tasks.chat.rows import Source

# name of each file and the type of its values: tokens of all sequences after each other, which of
# them are learned, where each sequence ends, and a hash of the content of each row
FILES = {"tokens": np.int32, "learned": np.bool_, "ends": np.int64, "hashes": np.uint64}
FACTS = "facts.json"
MOST_ROWS = 1000  # that are encoded together
MOST_CHARACTERS = 2**21
LEFT_OUT = "left out: task.options.context ends before the answer begins"
EQUAL = "left out: task.options.context ends before its answers differ"
ALIKE = "left out: the template renders both of its answers alike"
KNOWN = (*NAMED, LEFT_OUT, EQUAL, ALIKE)
ADVICE = "set LOCKSTEP_CACHE to a folder with room"

Read = Callable[[Mapping[str, Any]], tuple[str, list[Example]]]


class Store:
    """The sequences in a folder; each process maps its files when it first reads them."""

    def __init__(self, folder: Path, facts: dict[str, Any]):
        self.folder = folder
        self.facts = facts
        self._maps: dict[str, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def read(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and mask of a sequence."""
        ends = self._map("ends")
        begin = int(ends[sequence - 1]) if sequence else 0
        end = int(ends[sequence])
        tokens = self._map("tokens")[begin:end].astype(np.int64)
        return tokens, np.array(self._map("learned")[begin:end])

    def lengths(self) -> np.ndarray:
        return np.diff(self._map("ends"), prepend=0)

    def hashes(self) -> np.ndarray:
        return np.array(self._map("hashes"))

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            self._maps[name] = np.memmap(self.folder / name, FILES[name], "r")
        return self._maps[name]


def open_store(
    source: Source,
    recipe: str,
    read: Read,
    make_masks: Callable[[], Masks],
    given: str,
    is_verified: bool,
) -> Store:
    """Return the store of a source, which is made first if it is not there, or damaged."""
    name = hashlib.sha256(f"{recipe} {source.digest}".encode()).hexdigest()[:40]
    folder = default_folder().expanduser() / "chat" / name
    facts = _load(folder, is_verified)
    if facts is None:
        masks = make_masks()
        try:
            _make(folder, lambda files: _Writer(files, masks).write(source, read, given))
        except OSError as error:
            raise RunError(f"{folder}: cannot be written ({error.strerror}); {ADVICE}") from None
        facts = _load(folder, False)
        if facts is None:
            raise RunError(f"{folder}: is changed by another process; {ADVICE}")
    return Store(folder, facts)


def _load(folder: Path, is_verified: bool) -> dict[str, Any] | None:
    """Return the facts of a folder, or None if it is not there or damaged."""
    try:
        facts = json.loads((folder / FACTS).read_text())
        sizes = {name: (folder / name).stat().st_size for name in FILES}
        if sizes != facts["sizes"] or (is_verified and _digest(folder) != facts["digest"]):
            return None
        return dict(facts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in FILES:
        with open(folder / name, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _make(folder: Path, write: Callable[[dict[str, BinaryIO]], dict[str, Any]]) -> None:
    """Write a folder beside, then rename it. Of several processes the first one's is taken."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with ExitStack() as stack:
            facts = write({n: stack.enter_context(open(scratch / n, "wb")) for n in FILES})
        facts["sizes"] = {name: (scratch / name).stat().st_size for name in FILES}
        facts["digest"] = _digest(scratch)
        (scratch / FACTS).write_text(json.dumps(facts))
        if folder.exists() and _load(folder, True) is None:
            os.rename(folder, scratch / "damaged")
        with suppress(OSError):  # another process was faster
            os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(folder / "damaged", ignore_errors=True)


class _Writer:
    """Writes the rows of a source, batch by batch, and counts what the start of a run names."""

    def __init__(self, files: dict[str, BinaryIO], masks: Masks):
        self._files = files
        self._masks = masks
        self._flaws = Flaws()
        self._named: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._batch: list[tuple[str, int, list[Plan]]] = []
        self._size = 0  # characters of the batch
        self._stop: int | None = None

    def write(self, source: Source, read: Read, given: str) -> dict[str, Any]:
        """Write all rows and return facts about them. Raises ConfigError."""
        forms: dict[str, str] = {}
        for place, values in source.read():
            self._sums["rows"] += 1
            try:
                if isinstance(values, Flaw):
                    raise values
                form, examples = read(values)
                forms.setdefault(form, place)
                self._add(place, examples)
            except Flaw as flaw:
                self._flaws.add(place, flaw)
        self._flush()
        check_forms(forms, given)
        self._flaws.refuse(given)
        if not self._sums["sequences"]:
            rows = self._sums["rows"]
            why = max(LEFT_OUT, EQUAL, ALIKE, key=self._named.__getitem__)
            problem = f"all of {rows:,} rows are {why}" if rows else "has no rows"
            raise ConfigError(f"{given}: {problem}; must have at least 1 row")
        named = {fact: self._named[fact] for fact in KNOWN if self._named[fact]}
        names = ("rows", "sequences", "tokens", "learned", "stops")
        facts = {name: self._sums[name] for name in names}
        return facts | {"named": named, "stop": self._stop, "empty_files": source.empty}

    def _add(self, place: str, examples: list[Example]) -> None:
        plans = [self._masks.plan(example) for example in examples]
        self._stop = self._masks.stop_of(examples[0])
        self._batch.append((place, content_hash(examples), plans))
        self._size += sum(len(plan.sealed) + sum(map(len, plan.befores)) for plan in plans)
        if len(self._batch) >= MOST_ROWS or self._size >= MOST_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        made = iter(self._masks.make([plan for _, _, plans in self._batch for plan in plans]))
        for place, number, plans in self._batch:
            found = [next(made) for _ in plans]
            flaw = next((each for each in found if isinstance(each, Flaw)), None)
            if flaw is not None:
                self._flaws.add(place, flaw)
            else:
                self._write(number, [each for each in found if isinstance(each, Masked)])
        self._batch, self._size = [], 0

    def _write(self, number: int, sequences: list[Masked]) -> None:
        self._named.update({fact for each in sequences for fact in each.facts})
        if not all(each.learned.any() for each in sequences):
            self._named[LEFT_OUT] += 1
            return
        if len({each.tokens.tobytes() for each in sequences}) < len(sequences):
            self._named[EQUAL if any(CUT in each.facts for each in sequences) else ALIKE] += 1
            return
        for each in sequences:
            self._sums["tokens"] += len(each.tokens)
            self._sums["learned"] += int(each.learned.sum())
            self._sums["stops"] += bool((each.tokens[each.learned] == self._stop).any())
            self._sums["sequences"] += 1
            self._files["tokens"].write(each.tokens.astype(FILES["tokens"]).tobytes())
            self._files["learned"].write(each.learned.tobytes())
            self._files["ends"].write(np.array(self._sums["tokens"], FILES["ends"]).tobytes())
        self._files["hashes"].write(np.array(number, FILES["hashes"]).tobytes())
