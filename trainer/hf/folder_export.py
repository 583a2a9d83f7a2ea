"""A folder of Hugging Face out of a run, written by the model's own `save_pretrained`.

A fresh process loads the folder by Auto classes (reload.py), and its outputs on examples of the
run's data are compared. If the task has `pipeline_calls()`, pipelines of transformers must give the
run's answers too, and stop where the run has taught it. Only then is the folder renamed to its
place. For a model in a wrapper, the wrapper's method `pretrained_inputs(inputs)` may return the
inputs of the model inside.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import Config
from trainer.base.durable_files import sync_directory
from trainer.base.errors import CheckpointError, ConfigError, RunError, one_line, visible
from trainer.base.folders import PACKAGE
from trainer.base.new_files import check_creatable, check_name
from trainer.base.plain_files import read_json
from trainer.base.process import child
from trainer.base.process.child import interrupted_by_sigterm
from trainer.base.process.streams import BARS
from trainer.base.same import BY_HAND, DIVIDED, Limits
from trainer.base.same.distance import apart
from trainer.core.api import OF_A_GROUP, PROOF, Summary, copy_again, transaction, write_exit
from trainer.hf import pipelines
from trainer.hf.classes import CAUSAL, base_of, why_not_exported
from trainer.hf.library import quiet_transformers
from trainer.hf.pretrained import Pretrained, write_card
from trainer.hf.reload import ANSWER, FOLDER_FACTS, REFERENCE_FILE
from trainer.hf.staged_folder import open_scratch, publish, why_full
from trainer.hf.trained_model import load_alone

FOLDER_NAME = "export"  # of the folder in a run directory
RELOAD_GRACE_S = 5.0  # of the fresh process, after an interrupt
SAFE = (".safetensors", ".json", ".md", ".txt", ".model", ".jinja")  # suffixes that are no pickle


@dataclass(frozen=True)
class FolderExport:
    """A folder to write, as the setting `key` asks for.

    It `is_merged` if adapters become part of the weights, and `is_stored` if the weights are those
    of the training, without averages and in its precision.
    """

    out: Path
    key: str
    is_merged: bool = False
    is_stored: bool = False

    def check_place(self) -> None:
        """Raise ConfigError unless the folder is new, empty, or as an export has left it."""
        setting = f"{self.key}: {self.out}"
        check_name(setting, self.out)
        is_home = self.out.is_dir() and self.out.resolve() in (Path.cwd(), *Path.cwd().parents)
        if is_home or os.path.ismount(self.out) or self.out.name in ("", ".."):
            raise ConfigError(f"{setting} cannot be replaced; give a new folder in it")
        if self.out.is_symlink() or (self.out.exists() and not self.out.is_dir()):
            raise ConfigError(f"{setting} is not a folder; give another name")
        if not self.out.exists():
            check_creatable(setting, self.out)
            return
        listed: Any = None
        with suppress(OSError, ValueError, TypeError, KeyError):
            listed = read_json(self.out / FOLDER_FACTS)["files"]
        if not isinstance(listed, dict):
            if next(self.out.iterdir(), None) is not None:
                raise ConfigError(f"""{setting} already exists, and no export wrote it;
                    move it away, or give another name""")
            return
        sizes = _sizes_of(self.out, len(listed) + 1)
        if sizes != listed:
            changed = sorted(n for n in {*sizes, *listed} if sizes.get(n) != listed.get(n))
            raise ConfigError(f"""{setting} was changed since its export: {changed[0]};
                move it away, or give another name""")


def _sizes_of(folder: Path, most: int | None = None) -> dict[str, int]:
    """Return the sizes of all files in a folder but the one that lists them.

    `most`: the number of files after which it stops.
    """
    files = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    names = ((path.relative_to(folder).as_posix(), path) for path in files)
    sizes = ((name, path.lstat().st_size) for name, path in names if name != FOLDER_FACTS)
    return dict(sorted(islice(sizes, most)))


def write_pretrained(task: Any, config: Config, export: FolderExport) -> tuple[list[str], int]:
    """Write the weights of `config.run.resume`; return lines about the folder, and their step.

    Raises ConfigError, CheckpointError or RunError, with one line, and leaves nothing then.
    """
    export.check_place()
    out, key = export.out, export.key
    with interrupted_by_sigterm():
        model, inputs, rows = load_alone(task, config, export.is_stored)
        why = why_not_exported(model, export.is_merged)
        if why:
            raise ConfigError(f"{key}: {why}; use out=FILE.safetensors otherwise")
        if not rows:
            raise ConfigError(f"{key}: must have an example to compare; the data has none")
        trained = Pretrained.of(model, inputs, rows)
        if export.is_merged and not trained.is_adapter:
            raise ConfigError(f"{key}: merge=true needs a model with adapters; leave it out")
        del model, inputs
        origin = _origin_of(config)
        try:
            with open_scratch(out) as scratch:
                lines = _write(task, trained, export, origin, scratch)
        except OSError as error:
            why = error.strerror or one_line(error)
            raise RunError(f"{key}: {out}: {why}; make room, or give another place") from None
    return lines, origin["step"]


def _origin_of(config: Config) -> dict[str, Any]:
    """Return the facts of the checkpoint that is exported, with its run's lines of the proof."""
    folder = Path(config.folder, config.run.resume or "")
    is_one = (folder / transaction.MANIFEST).is_file()
    root = folder.resolve().parent.parent if is_one else folder
    manifest = transaction.CheckpointFiles.read(folder).manifest if is_one else None
    manifest = manifest or transaction.newest_manifest(root / "checkpoints")
    assert manifest is not None
    lines: list[str] = []
    with suppress(OSError, UnicodeError):
        lines = (root / PROOF).read_text(encoding="utf-8").splitlines()
    return {**manifest, "proof": lines, "name": root.name}


def _write(
    task: Any, trained: Pretrained, export: FolderExport, origin: Mapping[str, Any], scratch: Path
) -> list[str]:
    """Write the folder into `scratch`, check it and rename it; return lines about it."""
    new = scratch / "new"
    new.mkdir()
    lines: list[str] = []
    with quiet_transformers(), warnings.catch_warnings(), _failures_named(export, scratch):
        warnings.simplefilter("ignore")
        if export.is_merged:
            before = trained.outputs
            trained = trained.merged()
            far = {name: apart(each, trained.outputs[name]) for name, each in before.items()}
            words = _limited(export.key, far, trained, DIVIDED, "the merged model")
            lines.append(f"merging only rounded: the merged model has {words}")
        trained.save(new)
        parts = _save_tokenizers(task, new)
        facts = {**trained.facts(), "is_merged": export.is_merged, "is_stored": export.is_stored}
        weights = str(getattr(base_of(trained.model), "name_or_path", ""))
        card = write_card(task.config, facts, origin, weights)
        (new / "README.md").write_text(card, encoding="utf-8")
        facts["files"] = _sizes_of(new)
        if odd := [name for name in facts["files"] if not name.endswith(SAFE)]:
            raise RunError(f"{export.key}: {odd[0]} may hold code, so the folder is not written")
        (new / FOLDER_FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        calls = pipelines.expect(trained.model, list(_pipeline_calls(task)))
        _save_given(task, trained, parts, calls, scratch)
    far, differs = _reload(export.key, new, scratch)
    lines.insert(0, _describe(task, export, trained, parts, facts, far))
    if differs:
        way = "; merge the adapter: RUN out=FOLDER/ merge=true" if trained.is_adapter else ""
        raise RunError(f"{export.key}: {differs[:400]}; nothing was written{way}")
    lines[1:1] = pipelines.describe_calls(calls)
    mode = stat.S_IMODE((new / FOLDER_FACTS).stat().st_mode)
    for path in new.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # safetensors makes it readable for its owner only
        sync_directory(path)  # of a file, too
    export.check_place()  # again: it took minutes
    publish(scratch, new, export.out)
    return lines + _list_commands(task.config.shown(export.out.absolute()), facts)


@contextmanager
def _failures_named(export: FolderExport, scratch: Path) -> Iterator[None]:
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:  # of a library, which raises many types, also for a full disk
        if full := why_full(error, scratch):
            raise OSError(0, full) from error
        raise RunError(f"""{export.key}: cannot be saved: {type(error).__name__}:
            {one_line(error)[:300]}; nothing was written""") from error


def _pipeline_calls(task: Any) -> Sequence[pipelines.PipelineCall]:
    calls = getattr(task, "pipeline_calls", None)
    return calls() if calls else ()


def _save_tokenizers(task: Any, folder: Path) -> list[str]:
    """Write the task's tokenizer and processor, where they can be written; return their names."""
    names = []
    for name in ("tokenizer", "processor"):
        own: Any = getattr(task, name, None)
        if callable(getattr(own, "save_pretrained", None)):
            own.save_pretrained(folder)
            names.append(name)
    return names


def _save_given(
    task: Any,
    trained: Pretrained,
    parts: list[str],
    calls: list[dict[str, Any]],
    scratch: Path,
) -> None:
    """Write the inputs and what is expected for them, for the fresh process."""
    expected: dict[str, Any] = dict.fromkeys(parts)
    if "tokenizer" in parts:
        text = "Lockstep: one run, any layout. "
        if isinstance(trained.inputs, dict) and "input_ids" in trained.inputs:
            text += task.tokenizer.decode(trained.inputs["input_ids"][0].flatten()[:64].tolist())
        template = getattr(task.tokenizer, "chat_template", None)
        tokens = list(task.tokenizer(text)["input_ids"])
        expected["tokenizer"] = {"text": text, "tokens": tokens, "template": template}
    reference = {"inputs": trained.inputs, "outputs": trained.outputs, "expected": expected}
    reference |= {"calls": calls, "threads": torch.get_num_threads()}
    with open(scratch / REFERENCE_FILE, "wb") as file:  # a path loses the reason of a full disk
        torch.save(reference, file)


def _reload(key: str, new: Path, scratch: Path) -> tuple[dict[str, float], str]:
    """Return how far the outputs of a fresh process are from ours, by name; and how a pipeline
    differs, if one does.
    """
    variables = {name: each for name, each in os.environ.items() if name not in OF_A_GROUP}
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", *BARS), "1")
    environment = {**variables, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    words = [sys.executable, "-m", "trainer.hf.reload", str(new), str(scratch)]
    log = scratch / "log"
    with log.open("wb") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = child.start(words, env=environment, **streams)
        try:
            process.wait()
        finally:
            child.end(process, RELOAD_GRACE_S)
    answer: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        answer = read_json(scratch / ANSWER)
    if "apart" not in answer:
        why = answer.get("error") or child.last_words(child.read_end(log))
        raise RunError(f"{key}: a fresh process cannot load it: {why[:400]}; nothing was written")
    return {name: float(far) for name, far in answer["apart"].items()}, answer["differs"]


def _limited(
    key: str, far: Mapping[str, float], trained: Pretrained, limits: Limits, what: str
) -> str:
    """Return words on how far outputs are apart. Raises RunError for more than rounding."""
    name, most = max(far.items(), key=lambda item: item[1])
    if not most:
        shown = "logits" if "logits" in far else "outputs"
        return f"equal {shown}"
    if not most <= limits.of(trained.outputs[name].dtype):
        raise RunError(f"""{key}: {name} of {what} differ by {most:.1e} of the
            largest, which is more than rounding; nothing was written""")
    return f"{name} that differ by {most:.1e} of the largest"


def _describe(
    task: Any,
    export: FolderExport,
    trained: Pretrained,
    parts: Sequence[str],
    facts: Mapping[str, Any],
    far: Mapping[str, float],
) -> str:
    what = "merged model" if export.is_merged else "model"
    if trained.is_adapter:
        what = f"adapter of {Path(facts['base'], facts['options'].get('gguf_file', ''))}"
    names = [what, *parts]
    named = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    size = sum(facts["files"].values())
    shown = f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} kB"
    path = task.config.shown(export.out.absolute())
    library = "peft" if trained.is_adapter else facts["library"]
    equal = _limited(export.key, far, trained, BY_HAND, "a model loaded from it")
    return f"{named} in {path} ({shown}): {library} loads it with {equal}"


def _list_commands(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return lines with the commands that upload the folder, and that evaluate it."""
    lines = [f"upload it with: hf upload NAME {shlex.quote(str(folder))}"]
    if facts["class"] == CAUSAL:
        words = f"pretrained={folder}"
        if facts["is_adapter"]:
            gguf_file = facts["options"].get("gguf_file")
            words = f"pretrained={facts['base']},peft={folder}"
            words += f",gguf_file={gguf_file}" if gguf_file else ""
        words = shlex.quote(words)
        lines.append(f"evaluate it with: lm_eval --model hf --model_args {words} --tasks ...")
    return lines


def check_export(config: Config, model: nn.Module) -> None:
    """Raise ConfigError if a run could not write what checkpoint.export asks for at its end."""
    if why := why_not_exported(model):
        raise ConfigError(
            f"checkpoint.export={config.checkpoint.export}: {why}; use null otherwise"
        )


def export_at_end(task: Any, summary: Summary) -> None:
    """Write the folder that checkpoint.export asks for, on rank 0 of a run that is done.

    It has the weights of the last checkpoint, or of the best one if checkpoint.best_metric is set.
    Raises RunError if that fails, or what the task's own code raises; exit.json has it then.
    """
    config = task.config
    if summary.exit_code or task.world.rank:
        return
    folder = summary.directory
    if config.checkpoint.best_metric is not None and summary.best_step is not None:
        folder = transaction.steps(folder / "checkpoints").get(summary.best_step, folder)
    key = f"checkpoint.export={config.checkpoint.export}"
    loaded = replace(config, run=replace(config.run, resume=str(folder)))
    try:
        export = FolderExport(summary.directory / FOLDER_NAME, key)
        lines, step = write_pretrained(task, loaded, export)
    except Exception as error:
        is_known = isinstance(error, (ConfigError, RunError, CheckpointError))
        line = f"{error if is_known else one_line(error)}; the checkpoints of the run stay"
        facts = {"step": summary.step, "metrics": summary.metrics, "best": summary.best}
        with suppress(OSError):
            write_exit(summary.directory, 1, line, **facts)
        keep = replace(
            config.checkpoint, best_metric=config.best_metric, best_mode=config.best_mode
        )
        copy_again(keep, summary.directory, summary.best_step, print_line)
        if not is_known:
            raise
        raise RunError(line) from error
    if step != summary.step:
        lines.insert(0, f"exported: step {step:,}, with the best {config.best_metric}")
    for line in lines:
        print_line(line)


def print_line(line: str) -> None:
    print(visible(line), flush=True)
