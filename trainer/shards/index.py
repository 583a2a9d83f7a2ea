"""The index of a data set in shards: names, rows, bytes and SHA-256 of its files or their parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from trainer.base.errors import ConfigError, describe, one_line
from trainer.base.plain_files import parse_json, parse_safetensors
from trainer.shards.download import read_whole
from trainer.shards.sources import Source, Span

INDEX_NAME = "lockstep.index"  # beside the shards, in the form of a safetensors file
OF_MDS = "index.json"
INDEX_FORMAT = 1
MOST_INDEX_BYTES = 2**33  # 10**8 shards
MOST_INDEX_HEADER = 2**24  # bytes, with the settings of the format


@dataclass(frozen=True)
class ShardIndex:
    """The shards of a data set, in the order of their examples' indices.

    `format`: that of the files, such as "mds"; `settings`: what its reader needs. `rows`, `sizes`
    (bytes, -1: unknown) and `digests` (shards, 32; SHA-256, zeros: unknown) have a row for each
    shard. `names` is a blob of UTF-8, in which a file's name ends at `ends[shard]`. `spans`
    (shards, 4) has a `Span` for each, zeros for a whole file; (0, 4) if all are whole files.
    """

    format: str
    settings: Mapping[str, Any]
    names: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor
    sizes: torch.Tensor
    digests: torch.Tensor
    spans: torch.Tensor

    @classmethod
    def of(
        cls,
        format: str,
        settings: Mapping[str, Any],
        names: Sequence[str],
        rows: Sequence[int],
        sizes: Sequence[int],
        digests: Sequence[bytes],
        spans: Sequence[Span | None] = (),
    ) -> ShardIndex:
        blobs = [name.encode() for name in names]
        blob = torch.frombuffer(bytearray(b"".join(blobs)), dtype=torch.uint8)
        ends = torch.tensor([len(each) for each in blobs]).cumsum(0)
        hashes = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(-1, 32)
        numbers = (torch.tensor(rows, dtype=torch.int64), torch.tensor(sizes, dtype=torch.int64))
        table = [span or (0,) * 4 for span in spans] if any(spans) else []
        parts = torch.tensor(table, dtype=torch.int64).view(-1, 4)
        return cls(format, settings, blob, ends, *numbers, hashes, parts)

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, shard: int) -> str:
        start = int(self.ends[shard - 1]) if shard else 0
        return bytes(self.names[start : int(self.ends[shard])].tolist()).decode()

    def size(self, shard: int) -> int | None:
        """Return the bytes of a shard as it is stored; None if they are unknown."""
        size = int(self.sizes[shard])
        return None if size < 0 else size

    def span(self, shard: int) -> Span | None:
        """Return the part of its file that is a shard; None if it is the whole file."""
        span = Span(*self.spans[shard].tolist()) if len(self.spans) else None
        return span if any(span or ()) else None

    def sha256(self, shard: int) -> str:
        """Return the SHA-256 of a shard as it is stored; empty if it is unknown."""
        digest = self.digests[shard]
        return bytes(digest.tolist()).hex() if bool(digest.any()) else ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names, rows and digests: of the content, not of the place."""
        total = hashlib.sha256(
            f"{self.format} {json.dumps(self.settings, sort_keys=True)}".encode()
        )
        for name in _TENSORS:
            total.update(getattr(self, name).numpy().tobytes())
        return total.hexdigest()[:16]

    def select(self, chosen: slice) -> ShardIndex:
        """Return the index of some of the shards. Raises ConfigError if there are none."""
        numbers = list(range(len(self))[chosen]) if isinstance(chosen, slice) else []
        if not numbers:
            raise ConfigError(f"""shards={chosen}:
                must be a slice with some of the {len(self):,} shards, such as slice(0, -1)""")
        names = [self.name(shard) for shard in numbers]
        digests = [bytes(each) for each in self.digests[numbers].tolist()]
        rows = self.rows[numbers].tolist()
        sizes = self.sizes[numbers].tolist()
        spans = [self.span(shard) for shard in numbers]
        return ShardIndex.of(self.format, self.settings, names, rows, sizes, digests, spans)

    def to_bytes(self) -> bytes:
        from safetensors.torch import save

        facts = {"format": INDEX_FORMAT, "shards": self.format, "settings": dict(self.settings)}
        facts["digest"] = self.digest
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return save(tensors, {"lockstep": json.dumps(facts)})

    @classmethod
    def from_bytes(cls, data: bytes, url: str) -> ShardIndex:
        """Raise ConfigError for anything but an index of this version."""
        try:
            metadata, tensors = parse_safetensors(data)
            facts = parse_json(metadata["lockstep"])
            index = cls(facts["shards"], facts["settings"], *(tensors[n] for n in _TENSORS))
            version = facts["format"]
            flaw = "is damaged" if facts["digest"] != index.digest else index.find_flaw()
        except Exception:  # safetensors has its own kind of error
            version = INDEX_FORMAT
            flaw = "cannot be read"
        if version != INDEX_FORMAT:
            flaw = f"is an index of version {version}, and {INDEX_FORMAT} is read"
        if flaw:
            raise _damaged(url, flaw)
        return index

    def find_flaw(self) -> str:
        """Return why this cannot be an index, empty if it can; the one who wrote it may mean harm.

        Names must stay in their folder.
        """
        numbers = (self.ends, self.rows, self.sizes)
        count = len(self.rows)
        forms = {(each.dtype, *each.shape) for each in numbers}
        is_formed = forms == {(torch.int64, count)} and self.names.dtype == torch.uint8
        has_digests = self.digests.dtype == torch.uint8 and self.digests.shape == (count, 32)
        has_spans = self.spans.dtype == torch.int64 and self.spans.shape in ((0, 4), (count, 4))
        if not (is_formed and has_digests and has_spans and self.names.dim() == 1):
            return "has tables of other forms"
        is_part = self.spans.any(1)
        parts = self.spans[is_part]
        lengths = (parts[:, 1::2] - parts[:, ::2]).sum(1)
        is_ordered = bool((parts.diff(dim=1) >= 0).all() and (parts >= 0).all())
        if len(parts) and not (is_ordered and lengths.equal(self.sizes[is_part])):
            return "has parts of files that cannot be"
        if not count:
            return ""
        starts = torch.cat([self.ends.new_zeros(1), self.ends[:-1]])
        if int(self.ends[-1]) != len(self.names) or not bool((starts < self.ends).all()):
            return "has names of other lengths"
        if int(self.rows.min()) < 0 or float(self.rows.double().sum()) > 2.0**53:
            return "has numbers of rows that cannot be"
        continues = self.names[starts] & 0xC0 == 0x80  # in the middle of a character of UTF-8
        if bool(continues.any()) or not _is_text(self.names.numpy().tobytes()):
            return "has names that are no UTF-8"
        dots = (self.names[1:] == ord(".")) & (self.names[:-1] == ord("."))
        is_absolute = bool((self.names[starts] == ord("/")).any())
        if is_absolute or not bool(self.names.all()) or bool(dots.any()):
            return self._find_odd_name()
        return ""

    def _find_odd_name(self) -> str:
        for shard in range(len(self)):
            name = self.name(shard)
            if name.startswith("/") or "\0" in name or ".." in name.split("/"):
                return f"names {name!r}, which is outside of the folder"
        return ""


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


_TENSORS = ("names", "ends", "rows", "sizes", "digests", "spans")


def load_index(source: Source) -> ShardIndex:
    """Read the index at a source: Lockstep's, or else that of MDS.

    Raises ConfigError if there is none, or if it cannot be read.
    """
    problems = []
    for name, check, convert in (
        (INDEX_NAME, _check_head, ShardIndex.from_bytes),
        (OF_MDS, _check_head_of_mds, of_mds),
    ):
        url = f"{source.url}/{name}"
        try:
            data = read_whole(source, name, MOST_INDEX_BYTES, partial(check, url))
        except OSError as error:
            problems.append(error)
        else:
            return convert(data, url)
    for name, problem in zip((INDEX_NAME, OF_MDS), problems, strict=True):
        if not isinstance(problem, FileNotFoundError):  # of two, that of Lockstep's own
            kind = "credentials" if isinstance(problem, PermissionError) else "file"
            why = (problem.strerror or one_line(problem)).rstrip(".")
            raise ConfigError(f"""{source.url}/{name}: cannot be read: {why};
                check the {kind} and the address""") from None
    raise ConfigError(f"""{source.url}:
        has no {INDEX_NAME}, nor {OF_MDS} of MDS ({one_line(problems[-1])});
        check the address, or write one: python -m trainer.shards index {source.url}""")


def _check_head(url: str, head: bytes) -> None:
    """Raise ConfigError if a file does not begin as an index does: it may be long."""
    if not 2 <= int.from_bytes(head[:8], "little") <= MOST_INDEX_HEADER or head[8:9] not in b"{":
        raise _damaged(url, "cannot be read")


def _check_head_of_mds(url: str, head: bytes) -> None:
    if not head.lstrip().startswith(b"{"):
        raise ConfigError(f"{url}: cannot be read as an index of MDS: it is no JSON; restore it")


def _damaged(url: str, flaw: str) -> ConfigError:
    return ConfigError(f"""{url}: {flaw};
        write it again: python -m trainer.shards index {url.removesuffix(INDEX_NAME)}""")


def of_mds(data: bytes, url: str) -> ShardIndex:
    """Convert MDS's index.json. Raises ConfigError for one of another form."""
    try:
        shards = parse_json(data)["shards"]
        forms = {(each["format"], each["version"]) for each in shards} - {("mds", 2)}
        if forms:
            kind, version = min(forms)
            raise ValueError(f"its format is {kind} {version}, and mds 2 is read")
        columns = [[each[name] for name in _MDS_COLUMN_SETTINGS] for each in shards]
        compressions = {each["compression"] for each in shards}
        if len(compressions) != 1 or columns[1:] != columns[:-1]:
            raise ValueError("its shards have several forms" if shards else "it has no shards")
        (compression,) = compressions
        files = [each["zip_data"] if compression else each["raw_data"] for each in shards]
        names = [each["basename"] for each in files]
        hashes = [each["hashes"].get("sha256") or "0" * 64 for each in files]
        settings = dict(zip(_MDS_COLUMN_SETTINGS, columns[0], strict=True))
        settings["compression"] = compression
        rows = [each["samples"] for each in shards]
        sizes = [each["bytes"] for each in files]
        digests = [bytes.fromhex(each) for each in hashes]
        index = ShardIndex.of("mds", settings, names, rows, sizes, digests)
        if flaw := index.find_flaw():
            raise ValueError(f"it {flaw}")
        return index
    except Exception as error:  # it may hold anything
        raise ConfigError(f"""{url}: cannot be read as an index of MDS: {describe(error)};
            restore it""") from None


_MDS_COLUMN_SETTINGS = ("column_names", "column_encodings", "column_sizes")
