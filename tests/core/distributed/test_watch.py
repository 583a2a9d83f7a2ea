"""A hung rank is named, with its phase and the collective that the others wait in, and the group
ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import CONF, PATHS, TORCHRUN, children_of, ended, free_port, launch, wait_for

from trainer.base.process import table
from trainer.core.distributed.watch import watcher

WATCHED = watcher.Rank
STICKS = ["--config-dir", CONF, "task=sticks", "run.name=a"]

BARRIER = (
    "every rank waits for another; rank 0 waits in gradient all-reduce of step 8; "
    "rank 1 waits in a collective in forward and backward of step 8"
)


def test_ranks_that_wait_for_each_other_are_named_with_their_collectives(command, tmp_path):
    """`scripts/faults --only hangs` and `mesh_hangs` make a single rank hang, in each way."""
    words = [*STICKS, "task.options.how=barrier", "task.options.at=8"]
    code, _, err = command(*words, "dist.hang_timeout_s=1", ranks=2)
    assert code == 1, err
    line = next(line for line in err.splitlines() if line.startswith("error: hang detected: "))
    assert line == f"error: hang detected: {BARRIER}"
    calls = re.findall(r"^rank 0 waits in .*number .*", err, re.M)  # test_flight_recorder.py
    reason = json.loads((tmp_path / "runs/sticks/a/exit.json").read_text())["reason"]
    assert reason == "; ".join([line[len("error: ") :], *calls]) and calls


@pytest.mark.slow
def test_run_that_is_suspended_and_continued_finishes(tmp_path):
    """As with Ctrl-Z and fg, a suspended job or a paused container: watcher and ranks stop
    together."""
    words = [*STICKS, "run.steps=300", "dist.hang_timeout_s=2"]
    run = launch(tmp_path, *words, launcher=TORCHRUN)
    wait_for(lambda: (tmp_path / "runs/sticks/a/metrics.jsonl").exists())
    pids = [
        run.pid,
        *(pid for child in children_of(run.pid) for pid in (child, *children_of(child))),
    ]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(4)
    code, out, err = ended(run)
    assert code == 0 and "done: 300 steps" in out and "hang detected" not in err, err


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_first_process_of_a_container_is_ended_too(tmp_path):
    words = [
        sys.executable,
        "-m",
        "trainer",
        *STICKS,
        "task.options.how=sleep",
        "task.options.rank=0",
    ]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    contained = ["unshare", "--pid", "--fork", "--mount-proc", *words]
    done = subprocess.run(
        contained, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 128 + 9 and "error: hang detected: rank 0 (process " in done.stderr, (
        done.stderr
    )


@pytest.mark.slow
def test_slow_rank_is_reported_as_a_straggler_and_not_as_hung(command):
    words = [
        *STICKS,
        "task.options.slow_ms=60",
        "run.steps=160",
        "dist.hang_timeout_s=3",
        "eval.every_epochs=null",
    ]
    code, _, err = command(*words, ranks=2)
    assert code == 0 and "hang detected" not in err
    assert re.findall(r"warning: rank (\d) on \S+ is a straggler", err) == ["1"], err


@pytest.mark.slow
def test_single_rank_is_watched_and_a_long_start_is_tolerated(command, tmp_path):
    task = """import time
from hanging_tasks import Sticks
class LateStart(Sticks):
    def build_model(self):
        time.sleep(1.5)
        return super().build_model()
"""
    (tmp_path / "late.py").write_text(task)
    words = [*STICKS, "task.trainer=late.LateStart", "dist.hang_timeout_s=1", "task.options.rank=0"]
    code, out, err = command(*words)
    assert code == 0 and "done: 20 steps" in out, err
    began = time.monotonic()
    code, _, err = command(*words[:3], "run.name=b", *words[4:], "task.options.how=gil")
    assert (
        code != 0
        and "error: hang detected: rank 0 (process " in err
        and time.monotonic() - began < 30
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_at_work", [True, False])
def test_busy_long_build_is_no_hang_and_sleeping_one_is(is_at_work, command, tmp_path):
    """dist.hang_timeout_s=1 allows 5 s before the first step; rank 1 builds for 9 s."""
    busy = "while time.monotonic() < end: sum(range(1000))" if is_at_work else "time.sleep(900)"
    task = f"""import time
from hanging_tasks import Sticks
class LongBuild(Sticks):
    def build_model(self):
        if self.world.rank == 1:
            end = time.monotonic() + 9
            {busy}
        return super().build_model()
"""
    (tmp_path / "long.py").write_text(task)
    words = [*STICKS, "task.trainer=long.LongBuild", "dist.hang_timeout_s=1"]
    code, out, err = command(*words, ranks=2)
    if is_at_work:
        assert code == 0 and "done: 20 steps" in out, err
    else:
        assert code != 0
        assert re.search(
            r"hang detected: rank 1 \(.*\) has been in building data and model", err
        ), err


def start_two_nodes(command, *words):
    """Start rank 0 and rank 1 so that Lockstep sees two nodes, with a watcher each."""
    port = str(free_port())
    nodes = []
    for rank in ("0", "1"):
        place = {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": rank,
            "GROUP_WORLD_SIZE": "2",
        }
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        told = {"RANK": rank, "WORLD_SIZE": "2", **place, **master}
        nodes.append(command.start(*words, environment=told, is_fresh=True))
    return nodes


def test_each_node_names_its_own_ranks(command):
    words = [*STICKS, "task.options.how=stop", "task.options.at=8", "dist.hang_timeout_s=1"]
    nodes = start_two_nodes(command, *words)
    ends = [ended(node) for node in nodes]
    print(*ends, sep="\n")
    assert all(code for code, _, _ in ends) and "hang detected" not in ends[0][2]
    assert "error: another rank has exited or does not answer" in ends[0][2]
    (line,) = [line for line in ends[1][2].splitlines() if line.startswith("error: hang detected")]
    assert re.fullmatch(
        rf"error: hang detected: rank 1 \(process {nodes[1].pid} on \S+\) has been in"
        r" forward and backward for [123] s, at step 8, stopped by a signal",
        line,
    )
    assert "hanging_tasks.py" in ends[1][2].split("rank 1, innermost call first:")[1]


def test_a_rank_that_waits_for_a_killed_one_before_it_saves_is_not_hung(command):
    kill = ["task.options.how=kill@metrics", "task.options.at=9", "dist.hang_timeout_s=1"]
    ends = [ended(node) for node in start_two_nodes(command, *STICKS, *kill)]
    assert all(code for code, _, _ in ends)
    assert "error: another rank has exited or does not answer" in ends[0][2]
    assert "hang detected" not in ends[0][2]


@pytest.mark.slow
def test_node_whose_ranks_all_wait_for_a_lost_node_ends_them(command, tmp_path):
    words = [*STICKS, "task.options.how=stop", "task.options.at=8", "dist.hang_timeout_s=1"]
    nodes = start_two_nodes(command, *words)
    (other,) = wait_for(lambda: children_of(nodes[1].pid))
    try:
        os.kill(other, signal.SIGSTOP)
        code, _, err = ended(nodes[0])
    finally:
        os.kill(other, signal.SIGKILL)
        nodes[1].kill()
    ended(nodes[1])
    assert (
        code
        and "error: hang detected: every rank of this node waits for a rank of another node"
        in (err)
    )
    reason = json.loads((tmp_path / "runs/sticks/a/exit.json").read_text())["reason"]
    assert re.search(
        r"or of this one; rank 0 waits in gradient all-reduce of step 8;"
        r" rank 0 waits in all_reduce number \d+ of the world \(133 float64\)$",
        reason,
    )


WAITING = """import faulthandler, os, signal, struct, sys, threading, time
sys.path.insert(0, sys.argv[1])
from trainer.core.distributed.watch import watcher
memory = os.memfd_create("heartbeat")
os.ftruncate(memory, watcher.MMAP_BYTES)
os.lseek(memory, watcher.MMAP_BYTES, os.SEEK_SET)
faulthandler.register(watcher.DUMP, file=memory, all_threads=False)
fields = [0.0] * watcher.FIELDS
fields[watcher.PHASE] = watcher.Phase.COMPUTE
fields[watcher.STEPS] = 8
fields[watcher.SINCE] = time.monotonic() - 60
os.pwrite(memory, struct.pack(f"{len(fields)}d", *fields), 0)
for _ in range(4):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
ENDS = {
    "at device": "fields[watcher.PHASE] = watcher.Phase.DEVICE\n"
    "os.pwrite(memory, struct.pack(f'{len(fields)}d', *fields), 0)\n"
    "print(memory, flush=True)\ntime.sleep(1000)\n",
    "stuck": "print(memory, flush=True)\ntime.sleep(1000)\n",
    "moving": "print(memory, flush=True)\nwhile True:\n" + "    time.sleep(0.02)\n" * 200,
    "stopping": "print(memory, flush=True)\nwhile True:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    "    end = time.monotonic() + 0.02\n    while time.monotonic() < end: sum(range(10))\n",
}


@pytest.fixture
def waiting_ranks(tmp_path):
    """Start processes that look like ranks in a collective; return their facts for a watcher."""
    place = tmp_path / "torch" / "distributed"
    place.mkdir(parents=True)
    ranks = []

    def start(*kinds):
        for kind in kinds:
            path = place / f"{kind}.py"
            path.write_text(WAITING + ENDS[kind])
            root = str(Path(watcher.__file__).parents[4])
            words = [sys.executable, "-S", "-E", str(path), root]
            ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return [
            {
                "rank": number,
                "pid": rank.pid,
                "launcher": None,
                "pipe": None,
                "memory": int(rank.stdout.readline()),
            }
            for number, rank in enumerate(ranks)
        ]

    yield start
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize(
    "other, is_hang", [("stuck", True), pytest.param("moving", False, marks=pytest.mark.slow)]
)
def test_ranks_that_pass_from_one_collective_to_the_next_do_not_hang(
    other, is_hang, waiting_ranks, monkeypatch, capfd
):
    """Their stacks are read one after another, so all of them may be seen in a collective."""
    facts = waiting_ranks("stuck", other)
    # the watcher has inherited the first rank's file; here it is another process's
    monkeypatch.setattr(watcher, "Rank", lambda facts, _: WATCHED(facts, False))
    settings = {"ranks": facts, "is_only_node": True, "timeout_s": 1.0}
    node = watcher.Watcher(settings)
    time.sleep(1.2)  # the seconds in a phase count from the start of the watcher
    looks = [node.look() for _ in range(1 if is_hang else 5)]
    assert any(looks) == is_hang
    assert (watcher.ALL_WAIT in capfd.readouterr().err) == is_hang


def test_a_rank_that_waits_for_its_device_ends_soon_after_another_one(waiting_ranks, monkeypatch):
    """Over NCCL it would wait on, and torchrun kills only 30 s after it asked it to stop."""
    facts = waiting_ranks("at device", "stuck", "at device")
    monkeypatch.setattr(watcher, "Rank", lambda facts, _: WATCHED(facts, False))
    monkeypatch.setattr(watcher, "BEREFT_S", 0.5)
    node = watcher.Watcher({"ranks": facts, "is_only_node": True, "timeout_s": 100.0})
    node.end_bereft()  # all are there
    os.kill(facts[0]["pid"], signal.SIGKILL)
    wait_for(node.look)
    node.end_bereft()
    wait_for(lambda: table.is_ending(facts[2]["pid"]))  # the kernel takes a moment
    assert not table.is_ending(facts[1]["pid"])


def test_stack_of_a_stopped_rank_is_read_without_a_crash(waiting_ranks):
    """With a signal to the process, not to its main thread, 2 of 100 crashed."""
    (facts,) = waiting_ranks("stopping")
    rank = watcher.Rank(facts, False)
    for _ in range(20):
        wait_for(lambda: table.kernel_state(rank.pid) == "T")
        assert "stopping.py" in " ".join(rank.stack())
