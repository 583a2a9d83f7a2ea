"""`python -m trainer.checkpoints DIR`: list a run's checkpoints and verify every byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoints import transaction as checkpoint
from trainer.checkpoints.manifest import Manifest
from trainer.cli import run, single
from trainer.errors import CheckpointError, ConfigError, visible

HELP = """usage: python -m trainer.checkpoints DIR [--export FILE.safetensors]

DIR is a run directory, or one directory step-<number> in its checkpoints. Lists the checkpoints
and verifies them: each file is read and its SHA-256 compared with the manifest. --export writes
the weights of the newest valid checkpoint to one file, and the averaged weights as ema.<name> if
run.ema_decay is set. It reads and writes one tensor at a time.

Exit codes: 0 all are valid, 1 at least one is invalid, 2 there are none."""


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    target = None
    if "--export" in words:
        at = words.index("--export")
        if at + 1 == len(words):
            raise ConfigError("--export: give a file name, as in --export weights.safetensors")
        target = Path(words[at + 1])
        del words[at : at + 2]
    usage = "python -m trainer.checkpoints DIR [--export FILE.safetensors]"
    place = Path(single(words, f"give one run directory: {usage}"))
    is_one = (place / checkpoint.MANIFEST).is_file()
    paths = [place] if is_one else list(checkpoint.steps(place / "checkpoints").values())
    if not paths:
        raise ConfigError(f"{place}: has no checkpoints; give a run directory")
    return _list(paths) if target is None else _export(place, is_one, target)


def _list(paths: Sequence[Path]) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = ("step", "files", "size", "strategy", "ranks", "metrics")
    table = Table(*columns, box=None, header_style="bold")
    num_invalid = 0
    for path in paths:
        try:
            manifest = checkpoint.load(path).manifest
            Manifest.of_run(manifest, path)
        except CheckpointError as error:
            if checkpoint.is_gone(path):
                continue  # its run is going on
            step = path.name.removeprefix("step-").lstrip("0")
            table.add_row(step, Text(f"INVALID {visible(str(error))}"))
            num_invalid += 1
            continue
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        metrics = "  ".join(
            f"{name} {math.nan if value is None else value:.4f}"
            for name, value in manifest["metrics"].items()
        )
        layout = (manifest["strategy"], str(manifest["world_size"]), metrics)
        cells = [Text(visible(text)) for text in layout]
        table.add_row(f"{manifest['step']:,}", "valid", f"{size / 1e6:,.1f} MB", *cells)
    Console(highlight=False, width=None if num_invalid == 0 else 200).print(table)
    return int(num_invalid > 0)


def _export(place: Path, is_one: bool, target: Path) -> int:
    if target.exists():
        raise ConfigError(f"--export {target}: already exists; give another name")
    from trainer.checkpoints.reading import open_content

    def read(path: Path) -> tuple[Any, Any]:
        loaded = checkpoint.load(path)
        content = open_content(loaded)
        content.hold()
        return loaded.manifest, content.sources

    root = place / "checkpoints"
    found, skipped = (read(place), []) if is_one else checkpoint.find_newest(root, read)
    for line in skipped:
        print(line)
    if found is None:
        raise CheckpointError(f"{root}: no checkpoint is valid")
    manifest, sources = found
    step = manifest["step"]
    facts = {"step": str(step), "run": str(manifest["run"])}
    num_tensors = _write(sources, facts, target)
    print(f"{target}: {num_tensors} tensors of step {step:,}")
    return 0


def _write(sources: Mapping[str, Any], facts: Mapping[str, str], target: Path) -> int:
    """Write the weights and their averages to a new safetensors file; return their number."""
    from trainer.checkpoints.tensor_files import write_tensors

    places = {
        f"{prefix}{name}": (sources[kind], name, shape)
        for kind, prefix in (("model", ""), ("ema", "ema."))
        for name, shape in sources[kind].shapes().items()
    }
    forms = {key: (source.dtype(name), shape) for key, (source, name, shape) in places.items()}

    def read(key: str) -> Any:
        source, name, shape = places[key]
        return source.read(name, (0,) * len(shape), shape)

    try:
        write_tensors(target, forms, read, facts, 0o666)
    except BaseException as error:
        if not isinstance(error, FileExistsError):  # of another process
            with suppress(OSError):
                target.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"--export {target}: {error.strerror}; give another path") from None
        raise
    return len(forms)


if __name__ == "__main__":
    run(main, HELP)
