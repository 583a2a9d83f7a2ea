"""A report of a hang says which collective the ranks wait in, and which rank has not come to it."""

import json
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import CONF, on_ranks, wait_for

from trainer import World, load_config
from trainer.core.distributed.group import process_group
from trainer.core.distributed.ranks import open_ranks
from trainer.core.distributed.watch import watching
from trainer.core.distributed.watch.phases import MAX_ANSWER, History, Mailbox, ask, describe

WAIT = "ranks 0, 2 wait in all_reduce number # of the world (3 float32)"
SILENT = f"{WAIT}; rank 1 does not answer and may not have come to it"
CASES = {
    "sleep": f"{WAIT}; rank 1 has not come to it",
    "stop": SILENT,
    "gil": SILENT,
    "broadcast": f"{WAIT}; rank 1 waits in broadcast number # of the world (3 float32)",
}


def hang(how):
    """Rank 1 of three does not come to the collective that the others call."""
    config = load_config(["task=tiny", "dist.hang_timeout_s=0.5"], [CONF])
    with open_ranks(config.dist, World.from_environment(), {}) as ranks:
        ranks.heartbeat.set_directory(str(Path.cwd()))
        ranks.heartbeat.end_step()  # as if this were a later step
        numbers = torch.ones(3)
        dist.all_reduce(numbers)
        ranks.heartbeat.begin_step(1)
        if ranks.group.world.rank == 1:
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "gil":
                sum(range(10**15))
            elif how == "broadcast":
                dist.broadcast(numbers, 1)
            else:
                time.sleep(1000)
        dist.all_reduce(numbers)
        time.sleep(1000)  # a rank that another has joined


@pytest.fixture
def report_of(capfd, tmp_path, monkeypatch):
    """Return a function that returns the lines of a report but for the stacks."""
    monkeypatch.chdir(tmp_path)
    return partial(_report, capfd)


def _report(capfd, how):
    with pytest.raises(AssertionError, match="died"):
        on_ranks(3, hang, how)
    text = re.sub(r"number \d+", "number #", capfd.readouterr().err)
    lines = text.partition("error: hang detected: ")[2].splitlines()
    return [line for line in lines if not line.startswith("  ") and "innermost" not in line]


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=([pytest.mark.slow] if how == "gil" else [])) for how in CASES]
)
def test_collective_is_named_and_the_rank_that_has_not_come(how, report_of, tmp_path):
    _, *lines = report_of(how)
    assert lines == [CASES[how]]
    reason = json.loads((tmp_path / "exit.json").read_text())["reason"]
    assert re.sub(r"number \d+", "number #", reason).endswith(f"; {CASES[how]}")


def test_without_a_recorder_the_report_is_as_before(report_of, monkeypatch):
    monkeypatch.setattr(watching, "_RECORDERS", [])
    (line,) = report_of("sleep")
    assert line.startswith("rank 1 (process ")


def test_rank_answers_until_the_end_of_the_block_and_leaves_nothing_behind():
    """Also if a child that was forked meanwhile still has the pipe."""
    for answers, forked, before, after in on_ranks(2, answer):
        assert answers == forked == [("all_reduce", "3 float32", True)]
        assert before == after


def answer():
    memory = memoryview(bytearray(MAX_ANSWER))
    with process_group(load_config(["task=tiny"], [CONF]).dist, World.from_environment()):
        dist.all_reduce(torch.ones(3))
        before = threads_and_files()
        with watching.answering(Mailbox(memory)) as pipe:
            watcher = Mailbox(memory, f"/proc/{os.getpid()}/fd/{pipe}")
            # gloo's thread notes the end of a call after it has returned
            wait_for(lambda: last_calls(watcher)[0][-1], limit_s=20)
            answers = last_calls(watcher)
            child = os.fork()
            if not child:
                time.sleep(1000)
                os._exit(0)
            forked = last_calls(watcher)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        threads, files = threads_and_files()
        return answers, forked, before, (threads, files - 1)  # the watcher's is still open


def last_calls(mailbox):
    (history,) = ask({0: mailbox})[0].values()
    return [call[1:] for call in history.calls.values()][-1:]


def threads_and_files():
    return threading.active_count(), len([*Path("/proc/self/fd").iterdir()])


def test_rank_of_another_group_and_rank_that_went_on_are_told_apart():
    """A root may leave a broadcast that nobody receives."""
    reduce, cast = [7, "all_reduce", "3 float32", False], [7, "broadcast", "3 float32", True]
    others = [[8, "barrier", "", False]]
    answers = {
        0: {"gloo:1": History([0, 1, 2, 5], "shard", [reduce])},
        1: {"gloo:1": History([0, 1, 2, 5], "shard", [cast, *others])},
        2: {},
        3: {"gloo:2": History([3], "undefined", [[1, "all_gather", "4 int64", True]])},
    }
    assert [*describe(answers, range(4))] == [
        "rank 0 waits in all_reduce number 7 of the shard group (3 float32); "
        "rank 1 has finished broadcast number 7 of the shard group (3 float32); "
        "rank 2 has not come to it",
        "rank 1 waits in barrier number 8 of the shard group; ranks 0, 2 have not come to it",
    ]
