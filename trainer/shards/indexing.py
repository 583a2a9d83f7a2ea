"""Indexing and checking shards that exist."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.shards.addresses import create_source, open_source
from trainer.data.shards.download import digest_file, download, read_whole
from trainer.data.shards.errors import ServerError
from trainer.data.shards.formats import FORMATS
from trainer.data.shards.formats.parts import FileBytes
from trainer.data.shards.index import MOST_BYTES, NAME, OF_MDS, ShardIndex, load_index, of_mds
from trainer.data.shards.sources import LocalSource, Source, Span, open_file
from trainer.errors import ConfigError, RunError


def write_index(
    url: str, to: str, settings: Mapping[str, Any], most_bytes: int
) -> tuple[ShardIndex, str]:
    """Read all shards at `url`; write their index and return it with its place.

    A file of more than `most_bytes` becomes several shards, in formats whose files can be divided.
    Raises ConfigError if there are none, or of several formats, or one cannot be read.
    """
    source = open_source(url)
    listed = source.list()
    format, names = _find_shards(source.url, listed)
    settings = dict(settings)
    if format == "mds" and OF_MDS in listed:
        made = of_mds(read_whole(source, OF_MDS, MOST_BYTES), f"{source.url}/{OF_MDS}")
        names = [made.name(shard) for shard in range(len(made))]
        settings = dict(made.settings)
    elif format == "mds":
        raise ConfigError(f"{source.url}: has no {OF_MDS}, which names the columns; copy it there")
    if format == "bin":
        settings = {"header": 0, "dtype": "uint16", **settings}
    found: list[tuple[str, int, int, bytes, Span | None]] = []
    for number, name in enumerate(names):
        with _local(source, name) as path:
            parts = _divide(format, path, settings, most_bytes)
            for rows, span in parts or [(int(made.rows[number]), None)]:
                size = span.size if span else path.stat().st_size
                with open_file(path) as file:
                    digest = bytes.fromhex(digest_file(file, span))
                found.append((name, rows, size, digest, span))
    index = ShardIndex.of(format, settings, *zip(*found, strict=True))
    target = create_source(to)
    target.write(NAME, index.to_bytes())
    return index, f"{target.url}/{NAME}"


def _find_shards(url: str, listed: list[str]) -> tuple[str, list[str]]:
    """Return the format and the names of the shards."""
    names = [name for name in listed if not f"/{name}".count("/.")]  # copies of editors
    found = {
        format: shards
        for format, kind in FORMATS.items()
        if (shards := [n for n in names if _without_compression(n).endswith(kind.suffixes)])
    }
    if len(found) != 1:
        kinds = ", ".join(suffix for kind in FORMATS.values() for suffix in kind.suffixes)
        has = f"files of several formats ({', '.join(found)})" if found else "no shards"
        raise ConfigError(f"{url}: has {has}; must have files of one of {kinds}")
    ((format, shards),) = found.items()
    packed = [name for name in shards if name != _without_compression(name)]
    if packed and format != "mds":
        raise ConfigError(f"{url}: {packed[0]} is compressed: must be {format} files as they are")
    return format, shards


def _without_compression(name: str) -> str:
    return name.removesuffix(".zstd").removesuffix(".gz")


def _divide(
    format: str, path: Path, settings: Mapping[str, Any], most: int
) -> list[tuple[int, Span | None]]:
    """Return rows and span of each shard of a file; none for MDS, whose index has them."""
    divide = FORMATS[format].divide
    try:
        return [] if divide is None else divide(path, settings, most)
    except (ConfigError, RunError):
        raise
    except Exception as error:  # each reader has its own kinds
        raise ConfigError(f"{path.name}: cannot be read as {format}: {error}") from None


def check_shards(url: str) -> tuple[ShardIndex, dict[str, str]]:
    """Read every shard; return the index, and why by the name of each file that differs.

    Raises RunError if the server does not answer.
    """
    source = open_source(url)
    index = load_index(source)
    wrong = {}
    for shard in range(len(index)):
        name = index.name(shard)
        try:
            facts = (index.size(shard), index.sha256(shard), index.span(shard))
            with _local(source, name, *facts) as path:
                if not index.settings.get("compression"):
                    rows = int(index.rows[shard])
                    FORMATS[index.format].open(
                        FileBytes(path), index.settings, rows, index.span(shard)
                    )
        except ServerError:
            raise
        except (OSError, RunError, ConfigError) as error:
            wrong[name] = str(error)
        except Exception as error:  # each reader has its own kinds
            wrong[name] = f"cannot be read as {index.format}: {error}"
    return index, wrong


@contextmanager
def _local(
    source: Source, name: str, size: int | None = None, sha256: str = "", span: Span | None = None
) -> Iterator[Path]:
    """Yield a file's place on this machine; compare its bytes and SHA-256, where they are given.

    Raises RunError if they differ, or if it cannot be read.
    """
    if isinstance(source, LocalSource):
        path = source.folder / name
        with open_file(path) as opened:
            found = path.stat().st_size
            if size is not None and span is None and found != size:
                raise RunError(f"has {found:,} bytes, and {size:,} in the index")
            digest = digest_file(opened, span) if sha256 else ""
        if digest != sha256:
            raise RunError(f"has SHA-256 {digest[:12]}, and {sha256[:12]} in the index")
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=Path(name).suffix) as file:
        stream: BinaryIO = file.file  # type: ignore[assignment]
        most = shutil.disk_usage(file.name).free // 2

        def check_bytes(num_bytes: int) -> None:
            if num_bytes > most:
                raise RunError(f"has more than {most:,} bytes, half of what is free for it")

        download(source, name, stream, size, sha256, span, check_bytes)
        yield Path(file.name)
