"""The barrier at the end of a run with a mirror: who waits for whom, and how long."""

import mmap
import os
import signal
import time

import pytest
from harness import CONF, on_ranks, wait_for
from torch.distributed.elastic.multiprocessing.api import PContext

from trainer import load_config
from trainer.core.distributed import exit_barrier, launch
from trainer.core.distributed.exit_barrier import ExitBarrier
from trainer.core.distributed.ranks import lone_rank, open_ranks
from trainer.core.distributed.watch import watcher
from trainer.core.distributed.watch.heartbeat import Heartbeat
from trainer.core.distributed.watch.phases import Phase
from trainer.core.distributed.world import World
from trainer.train import main


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {"NOTICE_S": 0.1, "BARRIER_POLL_S": 0.05, "RELEASE_S": 0.4}.items():
        monkeypatch.setattr(exit_barrier, name, seconds)


def seconds_of_rank_1(of_rank_0, limit_s, is_copied=False, gone_s=30.0, monkeypatch=None):
    """Return how long rank 1 waits at the barrier, where rank 0 does `of_rank_0(barrier)`."""
    if monkeypatch is not None:
        monkeypatch.setattr(exit_barrier, "GONE_S", gone_s)
    config = load_config(["task=tiny"], [CONF]).dist

    def body():
        world = World.from_environment()
        with open_ranks(config, world, {}) as ranks:
            barrier = ExitBarrier(ranks.group, ranks.heartbeat, limit_s, lambda: is_copied)
            if world.rank == 0:
                of_rank_0(barrier)
                os._exit(0)
            begun = time.monotonic()
            with barrier.held():
                pass
            os.write(1, f"{time.monotonic() - begun:.2f}".encode())
            return time.monotonic() - begun

    return body


def wait_of_rank_1(capfd, *arguments, **options):
    with pytest.raises(AssertionError, match="died"):  # rank 0, which ends by os._exit
        on_ranks(2, seconds_of_rank_1(*arguments, **options))
    out = capfd.readouterr().out
    return float(out)


def closing(seconds):
    def close(barrier):
        with barrier.held():
            time.sleep(seconds)

    return close


def never(barrier):
    time.sleep(4)


def test_rank_waits_as_long_as_rank_0_copies_also_beyond_the_limit(capfd):
    """Rank 0 keeps its limit by itself, and counts it from another moment."""
    assert 1.5 < wait_of_rank_1(capfd, closing(1.5), 0.1) < 3.5


def test_rank_without_a_mirror_does_not_wait(capfd):
    assert wait_of_rank_1(capfd, closing(1.5), None) < 0.5


def test_rank_leaves_rank_0_that_does_not_come_once_all_is_copied(capfd):
    """It is blocked in a collective with the rank that waits, whose end ends it."""
    assert 0.3 < wait_of_rank_1(capfd, never, 100.0, is_copied=True) < 3


def test_rank_leaves_rank_0_that_does_not_come_after_the_limit(capfd):
    assert 1.3 < wait_of_rank_1(capfd, never, 1.0) < 3.5


def test_rank_leaves_rank_0_that_gives_no_sign(capfd, monkeypatch):
    options = {"gone_s": 1.0, "monkeypatch": monkeypatch}
    assert 0.9 < wait_of_rank_1(capfd, lambda barrier: None, 100.0, **options) < 3


def test_restart_after_the_loss_of_rank_0_is_not_held_up_for_long():
    """The other ranks cannot see that it was killed."""
    assert exit_barrier.GONE_S == 10


def test_watcher_sees_that_a_rank_waits_rightly_in_a_collective_and_not_for_ever(monkeypatch):
    """A thread says so while another rank is at the barrier; the phase stays."""
    monkeypatch.setattr(exit_barrier, "GONE_S", 0.3)
    config = load_config(["task=tiny"], [CONF]).dist

    def body():
        world = World.from_environment()
        with open_ranks(config, world, {}) as ranks:
            page = memoryview(bytearray(mmap.PAGESIZE))
            fields = page[: watcher.FIELDS * 8].cast("d")
            heartbeat = Heartbeat(page)
            heartbeat.enter(Phase.REDUCE)
            barrier = ExitBarrier(ranks.group, heartbeat, 0.7, lambda: False)
            begun = fields[watcher.SINCE]
            time.sleep(0.3)
            is_quiet = fields[watcher.SINCE] == begun
            ranks.group.max(0.0)
            if world.rank == 1:
                with barrier.held():
                    return is_quiet, int(fields[watcher.PHASE])
            wait_for(lambda: fields[watcher.SINCE] > begun + 0.3)
            phase = int(fields[watcher.PHASE])
            time.sleep(1.5)
            ended = fields[watcher.SINCE]
            time.sleep(0.3)
            is_left_alone = ended == fields[watcher.SINCE]
            with barrier.held():
                return is_quiet, phase, is_left_alone, int(fields[watcher.PHASE])

    first, second = on_ranks(2, body)
    assert first == (True, Phase.REDUCE, True, Phase.SAVE)
    assert second == (True, Phase.SAVE)


@pytest.mark.parametrize("limit_s", [None, 5.0])
def test_rank_that_writes_its_last_checkpoint_is_not_said_to_copy_it(limit_s):
    """A run without a mirror that hung there was "in copying to checkpoint.mirror"."""
    page = memoryview(bytearray(mmap.PAGESIZE))
    fields = page[: watcher.FIELDS * 8].cast("d")
    ranks = lone_rank()
    barrier = ExitBarrier(ranks.group, Heartbeat(page), limit_s, lambda: True)
    with barrier.held():
        assert fields[watcher.PHASE] == Phase.SAVE
        barrier.beat()
        assert fields[watcher.PHASE] == Phase.MIRROR


@pytest.mark.parametrize(
    ("patience_s", "timeout", "used"), [(130, 30, 130), (30, 30, 30), (5, 9, 9)]
)
def test_agent_of_torchrun_waits_longer_for_ranks_that_may_copy(
    patience_s, timeout, used, monkeypatch
):
    waited = []

    def close(context, death_sig=None, timeout=30):
        waited.append((death_sig, timeout))

    monkeypatch.setattr(PContext, "close", close)
    with launch._patient_agent(patience_s):
        PContext.close(None, signal.SIGINT, timeout)
    assert PContext.close is close
    assert waited == [(signal.SIGINT, used)]


@pytest.mark.parametrize("name", ["elastic", "spawn", "ray"])
@pytest.mark.parametrize(("words", "copy_s"), [([], None), (["checkpoint.mirror=file:///x"], 300)])
def test_launchers_know_how_long_a_run_may_copy(name, words, copy_s, monkeypatch):
    from trainer.places import ray_ranks

    calls = []
    monkeypatch.setattr(launch, "launch", lambda *given: calls.append(given[1:]) or 0)

    def launch_on_ray(config, words):
        calls.append((words, config.checkpoint.copy_s))
        return 0

    monkeypatch.setattr(ray_ranks, "launch", launch_on_ray)
    monkeypatch.setattr("trainer.train.catch_early", lambda: None)
    words = ["task=tiny", f"--config-dir={CONF}", f"launch={name}", *words]
    assert main(words) == 0
    assert calls == [(words, copy_s)]
