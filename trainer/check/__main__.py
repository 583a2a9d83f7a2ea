"""`python -m trainer.check`: test the machine, plan a run, and make its first step."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError
from trainer.base.process.streams import HidingStream
from trainer.cli import (
    answer,
    check_alone,
    load_task,
    run,
    split_arguments,
    starter,
    take_words,
    tell,
)
from trainer.core.config.compose import load_config
from trainer.core.config.schema import Config, LaunchSettings
from trainer.core.distributed.launchers import MASTER, find_launcher
from trainer.core.distributed.world import World
from trainer.places.ray_cluster import range_of

HELP = """usage: python -m trainer.check [task=<name>] [data.url=URL] [key=value ...]
       python -m trainer.check task=<name> ranks=1024 [local_ranks=8] [device=h100]
           [devices=FILE] [disk_gb_s=1] [key=value ...] [--config-dir DIR]
       torchrun --nproc_per_node=<ranks> -m trainer.check ...       (or srun, mpirun, by hand)

  python -m trainer.check                                  this machine
  python -m trainer.check task=cifar                       machine, plan and start of a run
  python -m trainer.check task=cifar ranks=64 device=h100  the plan of a run elsewhere

The machine: the ranks and their rendezvous, all-reduce (results and speed), clocks, disk, threads,
shared memory, versions, code and settings. Start it exactly as you will start the run: it finds
problems that would otherwise show up as a hang. Here dist.timeout_s is 30 unless you set it.
With data.url, each rank reads the index of sharded data and its first shard, and times both. With
checkpoint.mirror, rank 0 writes to the bucket, reads and removes it. With launch=ray it reports the
cluster and whether launch.ranks fit; then this process alone is tested, as one rank.

The plan: every error that a real start would raise, batches and steps, memory of a rank, messages
of a step, size of a checkpoint and, with a device, time of a step and of the whole run. It does not
allocate the model. With any of these words it only prints the plan:
  ranks         number of ranks; local_ranks: ranks per node, 8 or `ranks` if fewer
  device        estimates time and memory for one of {devices}
  devices       your own table, a copy of trainer/core/distributed/devices.yaml with other numbers
  disk_gb_s     GB per second that the disk takes from all ranks, 1 by default

The start: opens the run in a temporary folder, tests that data, random numbers, model and loss do
not depend on the layout, and makes the first step.

Nothing is left on disk.
Exit codes: 0 the run can start (warnings do not count), 1 a check fails or the run does not fit, 2
the run would be refused."""
URL = "data.url"
TASK = ("task", "task.trainer", "run.resume")  # settings that name one


def main(arguments: Sequence[str]) -> int:
    from trainer.check.plan import PLAN_WORDS, answer_plan

    words, config_dirs = split_arguments(arguments)
    own, overrides = take_words(words, (*PLAN_WORDS, URL), config_dirs)
    url = own.pop(URL, "")
    if own:
        check_alone("the plan", "it is of all ranks, in one process; run it with python")
        plan = answer_plan(own, overrides, config_dirs)
        return answer(plan.code, plan.result, plan.facts, plan.show)
    from trainer.check.doctor import examine_ranks
    from trainer.check.rank_checks import as_facts

    has_task = any(word.lstrip("+").partition("=")[0] in TASK for word in words)
    code, checks = examine_ranks(overrides, config_dirs, url, is_part=has_task)
    if code or not has_task:
        return code
    facts: dict[str, Any] = as_facts(checks)
    config = load_config(overrides, config_dirs)
    if not starter():
        plan = answer_plan(_layout_of(config.launch), overrides, config_dirs)
        tell(plan.show)
        facts["plan"] = plan.facts
    rank = _start(config)
    if rank:
        return 0
    return answer(0, "ready", facts, lambda: print("ready: the run can start"))


def _layout_of(launch: LaunchSettings) -> dict[str, str]:
    """Return the words of the plan for the ranks that Ray will start; none without launch=ray."""
    from trainer.check.plan import PER_NODE

    if launch.name != "ray":
        return {}
    least = range_of(launch)[0]
    return {"ranks": str(least), "local_ranks": str(math.gcd(least, PER_NODE))}


def _start(config: Config) -> int:
    """Open the run in a folder of its own, make its first step, and return this rank."""
    from trainer.core.loop.training import make_first_step, start

    folder = _folder(find_launcher().variables)
    run_settings = replace(config.run, dir=str(folder), name="check", resume=None)
    log = replace(config.log, trackers=[])
    checkpoint = replace(config.checkpoint, mirror=None)
    config = replace(config, run=run_settings, log=log, checkpoint=checkpoint)
    task = load_task(config)(config)
    if config.launch.name == "ray" and not _takes_one_rank(config, task.world):
        tell(lambda: print("start   not tried: one rank is too few for this layout"))
        return 0
    try:
        with redirect_stdout(HidingStream(sys.stdout, str(folder))):
            start(task, make_first_step)
    finally:
        if task.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return int(task.world.rank)


def _takes_one_rank(config: Config, world: World) -> bool:
    from trainer.core.setup.early_checks import check_layout

    try:
        check_layout(config, world)
    except ConfigError:
        return False
    return True


def _folder(variables: Mapping[str, str]) -> Path:
    """Return a folder that all ranks name alike, and no other start does."""
    if not starter():
        return Path(tempfile.mkdtemp(prefix="lockstep-check-"))
    address = ":".join(variables.get(name, "") for name in MASTER)
    return Path(tempfile.gettempdir(), f"lockstep-check-{zlib.crc32(address.encode()):08x}")


def _describe(_: Sequence[str]) -> str:
    from trainer.core.distributed.devices import list_devices

    return HELP.format(devices=", ".join(list_devices()))


if __name__ == "__main__":
    run(main, _describe)
