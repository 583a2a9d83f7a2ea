"""Examination: run the checks in a thread, stage by stage, so that a hanging call can be left."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from trainer.cli import WAIT_S
from trainer.distributed import accelerator
from trainer.distributed.group import Group, find_sharing, process_group
from trainer.distributed.rendezvous import meet
from trainer.distributed.watch.collectives import name_ranks
from trainer.doctor.group import (
    SIZES,
    all_reduce,
    check_clocks,
    compare,
    judge_sums,
    list_checks,
)
from trainer.doctor.local import find_existing, gather_facts
from trainer.doctor.table import ADVICE, Check, judge, list_ranks, report
from trainer.errors import one_line, visible
from trainer.task import Task

# Seconds after dist.timeout_s: when a hanging stage is given up, and when ranks above 0 exit.
LATE_S = 1.2
LAST_S = 1.5


class Examination(threading.Thread):
    """All checks, stage by stage. If a call hangs, the results so far are still shown."""

    def __init__(self, task: Task, url: str = ""):
        """`url`: that of data in shards, to be examined too."""
        super().__init__(daemon=True)
        self.task = task
        self.url = url
        self.world = task.world
        self.config = task.config
        self.code = 1
        self.error = ""
        self.mark = ""  # path of a file in run.dir that the other ranks should find
        self.checks: list[Check] = []
        self._begin("start")

    def _begin(self, stage: str) -> None:
        self.stage = stage
        self.since = time.monotonic()

    def is_late(self) -> bool:
        return time.monotonic() - self.since > self.config.dist.timeout_s + LATE_S

    def end(self, *_: object) -> None:
        """Handle SIGTERM, sent by a launcher when another rank exits: show the results so far."""
        if self.stage != "end":
            self.error = "ended by the launcher; the rank that exited first reports the reason"

    def run(self) -> None:
        try:
            facts = gather_facts(self.task, self.url)
            self.checks = list_checks([facts])
            group = self._meet(facts)
            self._begin("backends")
            group.check_equal({"dist.backend": facts["backend"]})
            self._reduce()
        except Exception as error:
            self.error = one_line(error) or type(error).__name__

    def _meet(self, facts: dict[str, Any]) -> Group:
        """Rendezvous, compare facts, and make the checks that need the store only."""
        block = self.config.dist
        world = self.world
        self._begin("rendezvous")
        store = dist.HashStore() if world.world_size == 1 else meet(block, world)
        seconds = time.monotonic() - self.since
        group = Group(world, store)
        self._begin("facts")
        self.checks = list_checks(group.gather(facts))
        may_share = accelerator.is_used(world.device) and block.backend == "auto"
        if may_share and (shared := find_sharing(group)):
            found = f"{name_ranks(shared)} share GPUs, so dist.backend=auto is gloo"
            advice = f"start one rank for each of the {accelerator.count()} GPUs"
            self.checks.append(Check("devices", "warn", found, advice))
        self.checks += [compare(group, n, facts[n]) for n in ("versions", "code", "settings")]
        if world.world_size > 1:
            place = block.address or block.path or ":".join(map(str, world.launcher.master))
            found = f"{world.world_size} ranks connected at {place} in {seconds:.2f} s"
            self.checks.append(Check("rendezvous", "ok", f"{found}, by dist.init={block.init}"))
            self._begin("clocks")
            self.checks.append(check_clocks(group))
            self._begin("run.dir")
            self.checks += self._check_visibility(group)
        return group

    def _reduce(self) -> None:
        """Test all-reduce with several sizes, then print the table on rank 0."""
        world = self.world
        self._begin("process group")
        with process_group(self.config.dist, world) as group:
            is_carried = dist.is_initialized() and accelerator.carries(dist.get_backend())
            device = world.device if is_carried else torch.device("cpu")
            for name, num_bytes in SIZES.items():
                self._begin(f"all-reduce {name}")
                found = group.gather(all_reduce(world, num_bytes, device))
                self.checks.append(judge_sums(name, num_bytes, found))
            self._begin("end")
            code = report(self.checks) if world.rank == 0 else 0
            self.code = group.tell_all(code)

    def _check_visibility(self, group: Group) -> list[Check]:
        """Check that every rank sees a file that rank 0 writes to run.dir.

        A run does not need it, because only rank 0 writes there; a resume on another node does.
        """
        if self.world.rank == 0:
            with suppress(OSError):  # the disk check of rank 0 has reported it
                place = find_existing(self.config)
                descriptor, self.mark = tempfile.mkstemp(prefix=".doctor-", dir=place)
                os.close(descriptor)
        mark = group.tell_all(self.mark)
        if not mark:
            return []
        seen = group.gather(os.access(mark, os.F_OK))
        blind = [rank for rank, is_seen in enumerate(seen) if not is_seen]
        who = f"all but {list_ranks(blind)}" if blind else "every rank"
        found = f"a file that rank 0 writes is visible to {who}"
        advice = "a resume on another node would find no checkpoint: "
        advice += "choose a file system that all nodes share"
        return [judge("run.dir", not blind, found, advice)]

    def give_up(self) -> None:
        """Print the results so far: on rank 0 the table, on every rank the stage that failed."""
        limit_s = self.config.dist.timeout_s
        world = self.world
        error = self.error or f"no answer within dist.timeout_s={limit_s:g}"
        self.checks.append(Check(self.stage, "fail", error, ADVICE.get(self.stage.split()[0], "")))
        # ranks started by hand have their own terminals
        has_terminal = world.local_rank == 0 or world.launcher.name == "hand"
        if world.rank == 0 or has_terminal:
            report(self.checks)
        who = f"rank {world.rank} ({world.host}, process {world.pid}): " if world.rank else ""
        print(visible(f"error: {who}{self.stage}: {error}"), file=sys.stderr, flush=True)
        self.code = 1
        # A launcher kills all ranks at the first exit: rank 0 must have reported by then.
        if world.rank:
            left_s = self.since + limit_s + LAST_S - time.monotonic()
            time.sleep(max(0.0, min(WAIT_S, left_s)))
