"""`python -m trainer.prove task=<name>`: compare a task in every layout, and after resumes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from trainer.base.errors import ConfigError
from trainer.cli import JSON, answer, load_task, split_arguments, take_words
from trainer.core.config.compose import load_config
from trainer.core.distributed import accelerator
from trainer.core.engine.context import OPEN, choose_precision, is_bf16_native, takes_bf16
from trainer.core.strategy import find_strategy
from trainer.core.strategy.ddp import COMPRESSING
from trainer.core.task import Task
from trainer.verify.findings import Finding
from trainer.verify.layout_runs import TrialRuns, prove_resume
from trainer.verify.layouts import choose_layouts, list_left_out, prove_layouts, show

RESUME = "--resume"
BITS = "--bits"
VERB_WORDS = {
    True: {"steps", "kills", "seed"},
    False: {"steps", "layouts"},
}  # with and without --resume


def verify(arguments: Sequence[str], folder: Path) -> int:
    """Prove a task in the layouts that the arguments name, and return the exit code.

    The runs are written to a new folder, which the caller removes.
    """
    if any(os.environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        advice = "run it with python, not under a launcher"
        raise ConfigError(f"trainer.prove: starts its own ranks; {advice}")
    is_resume = RESUME in arguments
    is_bits = BITS in arguments
    if is_resume and is_bits:
        raise ConfigError(f"{BITS}: must not be combined with {RESUME}; leave one out")
    plain = [word for word in arguments if word not in (RESUME, BITS)]
    plain += ["strategy.name=exact"] if is_bits else []
    words, config_dirs = split_arguments(plain, own=(JSON, BITS, RESUME))
    own, overrides = _divide(words, is_resume, config_dirs)
    config = load_config(overrides, config_dirs)
    task = load_task(config)(config)
    device = task.world.device
    if (precision := config.strategy.precision) in OPEN:
        is_taken = takes_bf16(precision, accelerator.is_used(device))
        chosen = choose_precision(is_taken and is_bf16_native(device))
        overrides = [*overrides, f"strategy.precision={chosen}"]
        config = load_config(overrides, config_dirs)
    steps = _read_integer(own, "steps", 10)
    left_out: dict[str, str] = {}
    stage = TrialRuns(folder, overrides, config_dirs, config, steps)
    if is_resume:
        kills = _read_integer(own, "kills", 3)
        seed = _read_integer(own, "seed", 0, least=0)
        findings = prove_resume(stage, kills, seed)
    else:
        batch_split = find_strategy(config.strategy).batch_split(config)
        units = config.data.global_batch // batch_split.unit
        barred = _find_barred(task)
        layouts = choose_layouts(own.get("layouts"), units, batch_split, barred)
        findings = prove_layouts(stage, layouts, is_bits, "layouts" not in own)
        if "layouts" not in own:
            left_out = list_left_out(layouts, units, batch_split, barred)
    return _answer(findings, steps, left_out)


def _answer(findings: Sequence[Finding], steps: int, left_out: Mapping[str, str]) -> int:
    """Print the findings, and return the exit code."""
    is_bad = any(finding.is_bad for finding in findings)
    rows = [asdict(finding) for finding in findings]
    facts = {"steps": steps, "findings": rows, "left_out": left_out}
    result = "not proved" if is_bad else "proved"
    return answer(int(is_bad), result, facts, lambda: show(findings, steps, left_out))


def _find_barred(task: Task) -> dict[str, str]:
    """Return the axes of the mesh that the task cannot use, each with the reason."""
    barred: dict[str, str] = {}
    block = task.config.strategy
    if block.devices_per_rank > 1 or block.comm_hook in COMPRESSING:
        why = "a mesh takes no such strategy.comm_hook or strategy.devices_per_rank"
        return dict.fromkeys(("shard", "tensor", "context", "pipeline"), why)
    if not task.tensor_plan():
        barred |= dict.fromkeys(("tensor", "context"), "the task has no tensor_plan")
    if type(task).blocks is Task.blocks:
        barred["pipeline"] = "the task has no blocks"
    if task.config.run.dropout == "torch":
        why = "run.dropout=torch draws by rank"
        barred |= dict.fromkeys(("tensor", "context", "pipeline"), why)
    return barred


def _divide(
    words: Sequence[str], is_resume: bool, config_dirs: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Return (the arguments of this verb by name, the overrides of the configuration)."""
    own, overrides = take_words(words, VERB_WORDS[True] | VERB_WORDS[False], config_dirs)
    for name in own:
        if name not in VERB_WORDS[is_resume]:
            how = "without" if is_resume else "with"
            word = f"{name}={own[name]}"
            raise ConfigError(f"{word}: is only valid {how} --resume; leave it out")
    return own, overrides


def _read_integer(words: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    word = words.get(name, str(default))
    if not word.isdecimal() or int(word) < least:
        raise ConfigError(f"{name}={word}: must be an integer of at least {least}")
    return int(word)
