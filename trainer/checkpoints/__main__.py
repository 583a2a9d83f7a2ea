"""`python -m trainer.checkpoints DIR`: list a run's checkpoints and verify every byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoints import transaction as checkpoint
from trainer.checkpoints.manifest import Manifest
from trainer.cli import answer, run, single
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
    found = [facts for facts in map(_examine, paths) if facts]
    num_invalid = sum("error" in facts for facts in found)
    result = f"{num_invalid} invalid" if num_invalid else "valid"
    return answer(int(num_invalid > 0), result, {"checkpoints": found}, lambda: _show(found))


def _examine(path: Path) -> dict[str, Any]:
    """Return what is known of a checkpoint; nothing if its run has just removed it."""
    try:
        manifest = checkpoint.load(path).manifest
        Manifest.of_run(manifest, path)
    except CheckpointError as error:
        if checkpoint.is_gone(path):
            return {}  # its run is going on
        number = path.name.removeprefix("step-")
        return {"step": int(number) if number.isdecimal() else None, "error": str(error)}
    return {
        "step": manifest["step"],
        "bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
        "strategy": manifest["strategy"],
        "ranks": manifest["world_size"],
        "metrics": manifest["metrics"],
    }


def _show(found: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = ("step", "files", "size", "strategy", "ranks", "metrics")
    table = Table(*columns, box=None, header_style="bold")
    is_valid = True
    for facts in found:
        if error := facts.get("error"):
            step = "" if facts["step"] is None else str(facts["step"])
            table.add_row(step, Text(f"INVALID {visible(error)}"))
            is_valid = False
            continue
        metrics = "  ".join(
            f"{name} {math.nan if value is None else value:.4f}"
            for name, value in facts["metrics"].items()
        )
        layout = (facts["strategy"], str(facts["ranks"]), metrics)
        cells = [Text(visible(text)) for text in layout]
        table.add_row(f"{facts['step']:,}", "valid", f"{facts['bytes'] / 1e6:,.1f} MB", *cells)
    Console(highlight=False, width=None if is_valid else 200).print(table)


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
    exported = {"file": target, "tensors": num_tensors, "step": step}
    line = f"{target}: {num_tensors} tensors of step {step:,}"
    return answer(0, "written", exported, lambda: print(line))


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
