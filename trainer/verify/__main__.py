"""`python -m trainer.verify task=<name>`: prove that the layouts of a user's task agree."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.cli import load_task, run, split_arguments
from trainer.config.compose import load_config
from trainer.errors import ConfigError
from trainer.strategy.base import find_strategy
from trainer.verify.layouts import (
    LAYOUTS,
    choose_layouts,
    prove_layouts,
)
from trainer.verify.resume import prove_resume
from trainer.verify.stage import Stage
from trainer.verify.table import show

HELP = """usage: python -m trainer.verify task=<name> [layouts=ranks-2,ranks-3] [steps=10]
           [key=value ...]
       python -m trainer.verify --bits task=<name> [layouts=ranks-2,ranks-3] [steps=10] ...
       python -m trainer.verify --resume task=<name> [kills=3] [seed=0] ...

Trains the task for some steps on one rank and in each layout, in fp64 and in its own precision,
by real processes, and compares the examples taken, losses, first gradients, weights and
evaluation. Where something differs it names the first tensor that does and the likely reason.
--bits trains with strategy=exact, in the task's own precision, and demands equal bits.
--resume kills a run at random steps and ranks and starts it again: the same layout must end with
the same bits, other numbers of ranks with the same run.

layouts: {layouts}
         ranks-<n> for any n; all of these by default (with --bits those of another number of ranks
         or workers)
Exit codes: 0 proved, 1 something differs or nothing was shown, 2 bad configuration."""
RESUME = "--resume"
BITS = "--bits"
WORDS = {True: {"steps", "kills", "seed"}, False: {"steps", "layouts"}}  # with and without it


def main(arguments: Sequence[str]) -> int:
    if any(os.environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        advice = "run it with python, not under a launcher"
        raise ConfigError(f"trainer.verify starts its ranks itself: {advice}")
    is_resume = RESUME in arguments
    is_bits = BITS in arguments
    if is_resume and is_bits:
        raise ConfigError(f"{BITS}: is for layouts; leave out {RESUME}")
    plain = [word for word in arguments if word not in (RESUME, BITS)]
    words, config_dirs = split_arguments([*plain, "strategy.name=exact"] if is_bits else plain)
    own, overrides = _divide(words, is_resume)
    config = load_config(overrides, config_dirs)
    load_task(config)
    steps = _whole_number(own, "steps", 10)
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        stage = Stage(Path(folder), overrides, config_dirs, config, steps)
        if is_resume:
            kills = _whole_number(own, "kills", 3)
            seed = _whole_number(own, "seed", 0, least=0)
            findings = prove_resume(stage, kills, seed)
        else:
            cut = find_strategy(config.strategy.name).cut(config)
            units = config.data.global_batch // cut.unit
            layouts = choose_layouts(own.get("layouts"), units, cut)
            findings = prove_layouts(stage, layouts, is_bits)
    show(findings, steps)
    return int(any(finding.is_bad for finding in findings))


def _divide(words: Sequence[str], is_resume: bool) -> tuple[dict[str, str], list[str]]:
    """(the words of this verb by name, the overrides of the configuration)."""
    known = WORDS[is_resume]
    own: dict[str, str] = {}
    overrides = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in known and equals:
            own[name] = value
        elif name in WORDS[not is_resume] - known:
            how = "without" if is_resume else "with"
            raise ConfigError(f"{word}: is for trainer.verify {how} --resume; leave it out")
        else:
            overrides.append(word)
    return own, overrides


def _whole_number(words: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    word = words.get(name, str(default))
    if not word.isdecimal() or int(word) < least:
        raise ConfigError(f"{name}={word}: must be a whole number of at least {least}")
    return int(word)


if __name__ == "__main__":
    run(main, HELP.format(layouts=", ".join(LAYOUTS)))
