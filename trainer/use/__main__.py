"""`python -m trainer.use RUN`: evaluate a trained model, write its predictions, or export it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer import Config, World
from trainer.base.errors import ConfigError, visible
from trainer.base.new_files import check_name
from trainer.base.plain_files import strict
from trainer.cli import (
    answer,
    check_alone,
    load_task,
    local,
    run,
    single,
    split_arguments,
    take_words,
)
from trainer.core.api import MeshSizes, fits_here, load_run_config

HELP = """usage: python -m trainer.use RUN [split=test] [key=value ...] [--config-dir DIR]
       python -m trainer.use RUN out=FILE [--stored] [split=test] [key=value ...]
       torchrun --nproc_per_node=<ranks> -m trainer.use RUN ...

  python -m trainer.use runs/cifar/first                        its metrics, as JSON
  python -m trainer.use runs/cifar/first out=predictions.npz    what it predicts
  python -m trainer.use runs/cifar/first out=model.onnx         the model for other programs

RUN is a run directory (its newest valid checkpoint is used), one directory step-<number> in its
checkpoints, or the address of a checkpoint.mirror, of a run in any layout. Metrics and predictions
are the same on any number of ranks.

out: a new file; its suffix selects the format
  .npz .jsonl .parquet   the result of the task's predict(outputs) for each example of a split, once
                         and in the order of the data set: one array per name, or one object or row
                         per example (.parquet: extra parquet)
  .onnx                  the model (extra export), with a dynamic batch axis. Its outputs are
                         compared with PyTorch's on real examples, in batches of 1 and 7, before
                         anything is written
  .safetensors           only the weights; with --stored as the checkpoint has them, with averages
                         as ema.<name>, one tensor at a time and without the task's code
  FOLDER/                a Hugging Face folder, written by the model's save_pretrained, with the
                         task's tokenizer or processor and a card; merge=true merges adapters into
                         the weights. A fresh process loads it by Auto classes and compares outputs,
                         also those of a pipeline of transformers for the tasks that come with it
  .engine                TensorRT for this machine's GPU, built from ONNX; it is not compared
An export has the weights used for evaluation, in fp32. Next to it are a page that describes the
inputs and their preprocessing, and the examples with their outputs.
split: a name that build_dataset takes, or several (split=val,test); by default those of
eval.splits, and for a file the first of them

Exit codes: 0 done, 1 failed, 2 no such run, or invalid arguments."""
STORED = "--stored"
USE_ADVICE = "give one run directory: python -m trainer.use RUN [out=FILE]"
PREDICTIONS = (".npz", ".jsonl", ".parquet")
MODELS = (".onnx", ".safetensors", ".engine")


def main(arguments: Sequence[str]) -> int:
    """Evaluate on all ranks, print on rank 0; or write the file that `out` names."""
    own, rest = take_words(arguments, ("split", "out", "merge"))
    without_stored = [word for word in rest if word != STORED]
    words, config_dirs = split_arguments(without_stored, own=("--json", STORED))
    directory = single([local(word) for word in words if "=" not in word], USE_ADVICE)
    overrides = [word for word in words if "=" in word]
    if "split" in own:
        overrides.append(f"eval.splits=[{own['split']}]")
    if "out" not in own:
        return _evaluate(_load(directory, overrides, config_dirs))
    out = _read_out(own["out"])
    if own["out"].endswith("/") or not out.suffix:
        config = load_run_config(directory, overrides, config_dirs)
        return _write_folder(config, out, own.get("merge", "false"), STORED in rest)
    if "merge" in own:
        raise ConfigError(
            f"merge={own['merge']}: must stand beside a folder, out=FOLDER/, not {out}"
        )
    if out.suffix not in (*PREDICTIONS, *MODELS):
        suffixes = ", ".join((*PREDICTIONS, *MODELS))
        raise ConfigError(f"out={out}: must end with {suffixes}, or with / for a folder")
    if STORED in rest:
        return _write_stored(directory, out)
    if "," in own.get("split", ""):
        raise ConfigError(f"split={own['split']}: must be one split for a file; call it for each")
    if out.suffix in PREDICTIONS:
        from trainer.use.predict import predict

        return predict(_load(directory, overrides, config_dirs), out)
    from trainer.use.export import check_tensorrt, export

    if out.suffix == ".engine":
        check_tensorrt(directory)
    return export(load_run_config(directory, overrides, config_dirs), out)


def _read_out(target: str) -> Path:
    """Return the file or folder to write, on this machine."""
    if "://" in target:
        raise ConfigError(f"""out={target}: is an address, and exports are written to this machine;
            give a file or folder here, and copy it""")
    if not target:
        raise ConfigError("out=: names nothing; give a file, or a folder that ends with /")
    out = Path(target)
    with suppress(RuntimeError):  # nobody has that name
        out = out.expanduser()
    check_name(f"out={target}", out)
    return out


def _load(directory: str, overrides: list[str], config_dirs: Sequence[str]) -> Config:
    """Return the settings of a run, with a layout that these ranks have."""
    config = load_run_config(directory, overrides, config_dirs)
    if any(word.startswith("strategy") for word in overrides):
        return config
    pass

    return for_these_ranks(config)


def _evaluate(config: Config) -> int:
    task = load_task(config)(config)
    metrics = task.evaluate()
    if not metrics:
        raise ConfigError(f"""task={config.task.name}: has no evaluation data;
            return a dataset from build_dataset({config.eval.splits[0]!r})""")
    facts = {"step": task.step, **strict(metrics)}
    if task.world.rank:
        return 0
    return answer(0, "evaluated", facts, lambda: print(json.dumps(facts)))


def _write_folder(config: Config, out: Path, merge: str, is_stored: bool) -> int:
    if merge not in ("true", "false"):
        raise ConfigError(f"merge={merge}: must be true or false")
    check_alone(f"out={out}", "export with one process")
    task = load_task(config)(config)
    from trainer.hf.folder_export import FolderExport, write_pretrained

    export = FolderExport(out, f"out={out}", merge == "true", is_stored)
    lines, step = write_pretrained(task, config, export)
    files = [str(path) for path in sorted(out.iterdir())]
    facts = {"format": "hf", "step": step, "files": files, "notes": lines}
    return answer(0, "written", facts, lambda: print("\n".join(map(visible, lines))))


def _write_stored(directory: str, out: Path) -> int:
    if out.suffix != ".safetensors":
        raise ConfigError(f"{STORED}: must stand beside out=FILE.safetensors, not {out}")
    check_alone(f"out={out}", "write it with one process")
    from trainer.use.export import write_stored

    return write_stored(Path(directory), out)


def for_these_ranks(config: Config) -> Config:
    """Return the settings of a run to evaluate: its strategy, or ddp if that needs other ranks."""
    block = config.strategy
    if not fits_here(config, World.from_environment()):
        mesh = MeshSizes.of_copies()
        block = replace(block, name="ddp", mesh=mesh, sequence=False, devices_per_rank=1)
        config = replace(config, strategy=replace(block, comm_hook="none", device_ids=None))
    return config


if __name__ == "__main__":
    run(main, HELP)
