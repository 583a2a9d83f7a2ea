"""The source of an address: a folder, a server, or a store."""

from __future__ import annotations

from pathlib import Path

from trainer.data.shards.http_source import HttpSource
from trainer.data.shards.sources import FsspecSource, LocalSource, Source
from trainer.errors import ConfigError, one_line


def create_source(url: str) -> Source:
    """Return the source of an address or a folder to write to. Raises ConfigError as
    `open_source` does."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme == "file":
        folder = Path(rest if mark else url).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{url}: {error.strerror}; give another folder") from None
    return open_source(url)


def open_source(url: str) -> Source:
    """Return the source of an address or a folder.

    Raises ConfigError for one that does not exist, or whose packages are missing.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme == "file":
        folder = Path(rest if mark else url).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"{url}: must be a folder with shards, and is none")
        return LocalSource(folder)
    if scheme.lower() in ("http", "https"):
        try:
            return HttpSource(url)
        except ValueError as error:
            shown = rest.partition("?")[0].rpartition("@")[2]
            must = "must be an address such as https://host/folder"
            raise ConfigError(f"{scheme}://{shown}: {one_line(error)}; {must}") from None
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        advice = 'pip install "lockstep-trainer[shards]", and s3fs for s3://, gcsfs for gs://'
        raise ConfigError(f"{url}: {one_line(error)}; {advice}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {one_line(error)}; give a folder, https:// or s3://") from None
    return FsspecSource(url)
