"""`python -m trainer.checkpoints DIR`: a run's checkpoints, and whether every byte is intact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoints import transaction as checkpoint
from trainer.checkpoints.manifest import Manifest
from trainer.cli import run, single
from trainer.errors import CheckpointError, ConfigError, one_line, visible

HELP = """usage: python -m trainer.checkpoints DIR [--export FILE.safetensors]

DIR is a run directory, or one directory step-<number> in its checkpoints. Lists the checkpoints:
each file is read and its SHA-256 compared with the manifest's. --export writes the weights of the
newest valid one as safetensors; averaged weights too, as ema.<name>, where run.ema_decay made them.
It needs pip install '.[export]'.

Exit codes: 0 all are valid, 1 one is not, 2 there is none."""


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    target = None
    if "--export" in words:
        at = words.index("--export")
        if at + 1 == len(words):
            raise ConfigError("--export: needs a file name, as in --export weights.safetensors")
        target = Path(words[at + 1])
        del words[at : at + 2]
    usage = "python -m trainer.checkpoints DIR [--export FILE.safetensors]"
    place = Path(single(words, f"give one run directory: {usage}"))
    is_one = (place / checkpoint.MANIFEST).is_file()
    paths = [place] if is_one else list(checkpoint.steps(place / "checkpoints").values())
    if not paths:
        raise ConfigError(f"{place}: has no checkpoints; give a run directory")
    return _list(paths) if target is None else _export(paths, target)


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


def _export(paths: Sequence[Path], target: Path) -> int:
    if target.exists():
        raise ConfigError(f"--export {target}: exists already; give another name")
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        advice = "needs safetensors; pip install 'lockstep-trainer[export]'"
        raise ConfigError(f"--export: {advice}") from None
    for path in reversed(paths):
        try:
            loaded = checkpoint.load(path)
        except CheckpointError as error:
            print(f"skipped {path.name}: {error}")
            continue
        tensors = _weights(loaded)
        step = loaded.manifest["step"]
        facts = {"step": str(step), "run": str(loaded.manifest["run"])}
        try:
            save_file(tensors, target, metadata=facts)
        except Exception as error:  # safetensors has its own for a folder that is not there
            raise ConfigError(f"--export {target}: {one_line(error)}") from None
        print(f"{target}: {len(tensors)} tensors of step {step:,}")
        return 0
    raise CheckpointError(f"{paths[0].parent}: no checkpoint is valid")


def _weights(loaded: checkpoint.Loaded) -> dict[str, Any]:
    """Tensors by name, each with its own memory: safetensors knows no sharing."""
    import torch

    from trainer.checkpoints.packing import unpack

    state: dict[str, Any] = unpack(loaded.files["model.pt"], torch.device("cpu"))
    averages = unpack(loaded.files["training.pt"], torch.device("cpu"))["ema"]
    named = {**state, **{f"ema.{name}": tensor for name, tensor in averages.items()}}
    return {
        name: tensor.contiguous().clone()
        for name, tensor in named.items()
        if isinstance(tensor, torch.Tensor)
    }


if __name__ == "__main__":
    run(main, HELP)
