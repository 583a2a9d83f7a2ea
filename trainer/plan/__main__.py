"""`python -m trainer.plan task=<name> ranks=<n>`: compute what a run needs, before it starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from trainer.cli import answer, check_alone, run, split_arguments, take_words
from trainer.config.compose import load_config
from trainer.errors import ConfigError

HELP = """usage: python -m trainer.plan task=<name> [ranks=1024] [local_ranks=8] [device=h100]
           [devices=FILE] [disk_gb_s=1] [key=value ...] [--config-dir DIR]

Computes what a run needs, before anything is started: the refusals of a real start, batches and
steps, memory of a rank, bytes and messages of a step, size of a checkpoint, time of a step. It is
one process, needs no memory for the model, and opens no socket and no run directory. Settings apply
as in a run.

ranks: number of ranks, 1 by default; local_ranks: those of a node, 8 or `ranks` if fewer
device: name in the table of devices, for time and memory: {devices}
devices: your own table, a copy of trainer/distributed/devices.yaml with other numbers
disk_gb_s: GB per second that the disk takes from all ranks, 1 by default

Exit codes: 0 planned, 1 the run does not fit the device, 2 the run would be refused."""
WORDS = ("ranks", "local_ranks", "device", "devices", "disk_gb_s")
PER_NODE = 8


def main(arguments: Sequence[str]) -> int:
    check_alone("trainer.plan", "it plans all ranks in one process; run it with python")
    words, config_dirs = split_arguments(arguments)
    own, overrides = take_words(words, WORDS, config_dirs)
    ranks = _read_integer(own, "ranks", 1)
    local_ranks = _read_integer(own, "local_ranks", min(ranks, PER_NODE))
    if ranks % local_ranks:
        must = f"must divide ranks={ranks}; give another number of ranks per node"
        raise ConfigError(f"local_ranks={local_ranks}: {must}")
    disk_gb_s = _read_rate(own, "disk_gb_s")
    from trainer.distributed.devices import find_device
    from trainer.plan.advice import find_fitting
    from trainer.plan.planning import Plan, PlannedLayout, make_plan
    from trainer.plan.report import Advice, as_json, show
    from trainer.plan.trial import SharedParts

    if "devices" in own and "device" not in own:
        raise ConfigError(f"devices={own['devices']}: give device=<name> too, an entry of it")
    device = find_device(own["device"], own.get("devices")) if "device" in own else None
    layout = PlannedLayout(ranks, local_ranks, device)
    kept = SharedParts()

    def replan(changed: Sequence[str]) -> Plan:
        return make_plan(load_config(changed, config_dirs), layout, kept)

    plan = replan(overrides)
    advice = None
    if plan.fits is False:
        found = find_fitting(plan, overrides, replan)
        folders = [f"--config-dir={folder}" for folder in config_dirs]
        given = [f"{name}={value}" for name, value in own.items()]
        words = ["python", "-m", "trainer.plan", *(found[0] if found else ()), *given, *folders]
        advice = Advice(shlex.join(words), found[1]) if found else Advice()
    result = {True: "fits", False: "does not fit", None: "planned"}[plan.fits]
    facts = as_json(plan, disk_gb_s, advice)
    code = int(plan.fits is False)
    return answer(code, result, facts, lambda: show(plan, disk_gb_s, advice))


def _read_integer(words: Mapping[str, str], name: str, default: int) -> int:
    word = words.get(name, str(default))
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"{name}={word}: must be an integer of at least 1")
    return int(word)


def _read_rate(words: Mapping[str, str], name: str) -> float:
    word = words.get(name, "1")
    try:
        rate = float(word)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ConfigError(f"{name}={word}: must be a number above 0, GB per second")
    return rate


def _help(words: Sequence[str]) -> str:
    from trainer.distributed.devices import list_devices

    return HELP.format(devices=", ".join(list_devices()))


if __name__ == "__main__":
    run(main, _help)
