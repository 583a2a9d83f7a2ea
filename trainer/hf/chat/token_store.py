"""Tokens and masks on disk: flat files in a folder of the cache, which is whole or not there."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer import ConfigError, RunError
from trainer.hf.chat.flaws import Flaw, Flaws
from trainer.hf.chat.forms import Example, check_forms, content_hash
from trainer.hf.chat.masks import CUT, NAMED, AnswerPlan, Masked, Masks
from trainer.hf.chat.rows import RowSource
from trainer.shards.cache import default_folder
from trainer.shards.long_work import Tell, run_apart, watched

# name of each file and the type of its values: tokens of all sequences after each other, which of
# them are learned, where each sequence ends, and a hash of the content of each row
STORE_FILES = {"tokens": np.int32, "learned": np.bool_, "ends": np.int64, "hashes": np.uint64}
STORE_FACTS = "facts.json"
LOCK = ".lock"  # of the folder of stores
DIGEST_BLOCK_BYTES = 2**20
MOST_FLAWED = 100_000  # rows that cannot be used, after which no more are read
MOST_ROWS_OF_A_BATCH = 1000  # that are encoded together
MOST_CHARACTERS_OF_A_BATCH = 2**21
CUT_BEFORE_ANSWER = "left out: task.options.context ends before the answer begins"
EQUAL_ANSWERS = "left out: task.options.context ends before its answers differ"
ALIKE_ANSWERS = "left out: the template renders both of its answers alike"
NAMED_FACTS = (*NAMED, CUT_BEFORE_ANSWER, EQUAL_ANSWERS, ALIKE_ANSWERS)
CACHE_ADVICE = "set LOCKSTEP_CACHE to a folder with room"

Read = Callable[[Mapping[str, Any]], tuple[str, list[Example]]]


class TokenStore:
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
            self._maps[name] = np.memmap(self.folder / name, STORE_FILES[name], "r")
        return self._maps[name]


def open_store(
    source: RowSource,
    recipe: str,
    read: Read,
    make_masks: Callable[[], Masks],
    setting: str,
    is_verified: bool,
) -> TokenStore:
    """Return the store of a source, which is made first if it is not there, or damaged."""
    name = hashlib.sha256(f"{recipe} {source.digest}".encode()).hexdigest()[:40]
    folder = default_folder().expanduser() / "chat" / name
    facts = _load(folder, is_verified)
    if facts is None:
        try:
            _make(folder, lambda scratch: _fill(scratch, source, read, make_masks, setting))
        except OSError as error:
            raise _unwritable(folder, error) from None
        facts = _load(folder, False)
        if facts is None:
            raise RunError(f"{folder}: is changed by another process; {CACHE_ADVICE}")
    return TokenStore(folder, facts)


def _fill(
    scratch: Path,
    source: RowSource,
    read: Read,
    make_masks: Callable[[], Masks],
    setting: str,
) -> dict[str, Any]:
    """Write the files of a store and return facts about them.

    It is done in a process apart: templates, tokenizers and files of others may have no end, take
    all memory, or end their process.
    """

    def work(tell: Tell) -> dict[str, Any]:
        tell("the chat template of the model")
        with ExitStack() as stack:
            try:
                opened = [stack.enter_context(open(scratch / name, "wb")) for name in STORE_FILES]
                files: dict[str, BinaryIO] = dict(zip(STORE_FILES, opened, strict=True))
                return _Writer(files, make_masks(), tell).write(source, read, setting)
            except OSError as error:
                raise _unwritable(scratch, error) from None

    return dict(run_apart(work, f"making tokens of {source.name}", "rows", setting))


def _unwritable(folder: Path, error: OSError) -> RunError:
    return RunError(f"{folder}: cannot be written ({error.strerror}); {CACHE_ADVICE}")


def _load(folder: Path, is_verified: bool) -> dict[str, Any] | None:
    """Return the facts of a folder, or None if it is not there or damaged."""
    try:
        facts = json.loads((folder / STORE_FACTS).read_text())
        sizes = {name: (folder / name).stat().st_size for name in STORE_FILES}
        if sizes != facts["sizes"] or (is_verified and _digest(folder) != facts["digest"]):
            return None
        return dict(facts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in STORE_FILES:
        with open(folder / name, "rb") as file:
            blocks = iter(partial(file.read, DIGEST_BLOCK_BYTES), b"")
            for block in watched(blocks, f"reading {folder / name}", "MiB"):
                digest.update(block)
    return digest.hexdigest()


def _make(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Write a folder beside, then rename it. Of several processes the first one's is taken."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _own_scratch(folder) as scratch:
        facts = fill(scratch)
        facts["sizes"] = {name: (scratch / name).stat().st_size for name in STORE_FILES}
        facts["digest"] = _digest(scratch)
        (scratch / STORE_FACTS).write_text(json.dumps(facts))
        # else the slower of two that find it damaged would take the other one's away
        with _one_process(folder.parent):
            if _load(folder, True) is None:
                with suppress(FileNotFoundError):
                    os.rename(folder, scratch / "damaged")
                os.rename(scratch, folder)
                shutil.rmtree(folder / "damaged", ignore_errors=True)


@contextmanager
def _own_scratch(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside, which is removed; remove those that killed processes have left.

    Each is locked by its process.
    """
    with ExitStack() as stack:
        with _one_process(folder.parent):
            for path in folder.parent.glob(f".{folder.name}.*"):
                with suppress(OSError), _locked(path):
                    shutil.rmtree(path, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            stack.enter_context(_locked(scratch))
        yield scratch


@contextmanager
def _one_process(parent: Path) -> Iterator[None]:
    """Let one process at a time change the names in a folder."""
    with open(parent / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder. Raises BlockingIOError if another process has."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


class _Writer:
    """Writes the rows of a source, batch by batch, and counts what the start of a run names."""

    def __init__(self, files: dict[str, BinaryIO], masks: Masks, tell: Tell):
        self._files = files
        self._masks = masks
        self._tell = tell
        self._flaws = Flaws()
        self._named: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._batch: list[tuple[str, int, list[AnswerPlan]]] = []
        self._size = 0  # characters of the batch
        self._stop: int | None = None

    def write(self, source: RowSource, read: Read, setting: str) -> dict[str, Any]:
        """Write all rows and return facts about them. Raises ConfigError."""
        forms: dict[str, str] = {}
        self._tell(source.name)
        for location, values in source.read():
            self._tell(location)
            self._sums["rows"] += 1
            try:
                if isinstance(values, Flaw):
                    raise values
                form, examples = read(values)
                forms.setdefault(form, location)
                self._add(location, examples)
            except Flaw as flaw:
                self._flaws.add(location, flaw)
                if self._flaws.counts.total() >= MOST_FLAWED:
                    break
        self._flush()
        check_forms(forms, setting)
        self._flaws.refuse(setting)
        if not self._sums["sequences"]:
            rows = self._sums["rows"]
            why = max(CUT_BEFORE_ANSWER, EQUAL_ANSWERS, ALIKE_ANSWERS, key=self._named.__getitem__)
            problem = f"all of {rows:,} rows are {why}" if rows else "has no rows"
            raise ConfigError(f"{setting}: {problem}; must have at least 1 row")
        named = {fact: self._named[fact] for fact in NAMED_FACTS if self._named[fact]}
        names = ("rows", "sequences", "tokens", "learned", "stops")
        facts = {name: self._sums[name] for name in names}
        return facts | {"named": named, "stop": self._stop, "empty_files": source.empty}

    def _add(self, location: str, examples: list[Example]) -> None:
        plans = [self._masks.plan(example) for example in examples]
        self._stop = self._masks.stop_of(examples[0])
        self._batch.append((location, content_hash(examples), plans))
        self._size += sum(len(plan.sealed) + sum(map(len, plan.befores)) for plan in plans)
        if len(self._batch) >= MOST_ROWS_OF_A_BATCH or self._size >= MOST_CHARACTERS_OF_A_BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            self._tell(f"the rows up to {self._batch[-1][0]}")
        sequences = iter(self._masks.make([plan for _, _, plans in self._batch for plan in plans]))
        for location, row_hash, plans in self._batch:
            row_sequences = [next(sequences) for _ in plans]
            flaw = next((each for each in row_sequences if isinstance(each, Flaw)), None)
            if flaw is not None:
                self._flaws.add(location, flaw)
            else:
                self._write(row_hash, [each for each in row_sequences if isinstance(each, Masked)])
        self._batch, self._size = [], 0

    def _write(self, row_hash: int, sequences: list[Masked]) -> None:
        self._named.update({fact for each in sequences for fact in each.facts})
        if not all(each.learned.any() for each in sequences):
            self._named[CUT_BEFORE_ANSWER] += 1
            return
        if len({each.tokens.tobytes() for each in sequences}) < len(sequences):
            self._named[
                EQUAL_ANSWERS if any(CUT in each.facts for each in sequences) else ALIKE_ANSWERS
            ] += 1
            return
        for each in sequences:
            self._sums["tokens"] += len(each.tokens)
            self._sums["learned"] += int(each.learned.sum())
            self._sums["stops"] += bool((each.tokens[each.learned] == self._stop).any())
            self._sums["sequences"] += 1
            self._files["tokens"].write(each.tokens.astype(STORE_FILES["tokens"]).tobytes())
            self._files["learned"].write(each.learned.tobytes())
            self._files["ends"].write(np.array(self._sums["tokens"], STORE_FILES["ends"]).tobytes())
        self._files["hashes"].write(np.array(row_hash, STORE_FILES["hashes"]).tobytes())
