"""Launchers on two machines, a machine that is lost and comes back, and a pulled cable
(tests/harness/machines.py)."""

import contextlib
import io
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import CONF, PATHS, fit_on, newest, relative_distance, wait_for
from harness import machines as two
from harness.internals import rundir
from harness.machines import ADDRESSES, Machines
from harness.shard_rows import Padded
from harness.stored import check_same_bits, tensors_of
from harness.verbs import audit, write_shards

TINY = ["--config-dir", CONF, "task=tiny", "run.name=a"]
EVERY = ["checkpoint.every_steps=5", "checkpoint.every_epochs=null", "eval.every_epochs=null"]
LIMIT_S = 150  # five times what these tests take on an idle machine
ENVIRONMENT = {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@pytest.fixture
def machines(tmp_path):
    if reason := two.unavailable():
        pytest.skip(reason)
    with Machines(tmp_path) as machines:
        yield machines


def by_c10d(machines: Machines, number: int, *words: str) -> list[subprocess.Popen]:
    """Start torchrun with c10d. `is_host` is needed because both machines have the same host name;
    elsewhere torchrun detects it."""
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[0]}:29400", "--rdzv_id=job"]
    meet += [f"--local_addr={ADDRESSES[number]}", f"--rdzv_conf=is_host={int(number == 0)}"]
    launcher = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=2", *meet]
    return [machines.start(number, *launcher, "-m", "trainer", *words, **ENVIRONMENT)]


def by_static(machines: Machines, number: int, *words: str) -> list[subprocess.Popen]:
    meet = [f"--node_rank={number}", f"--master_addr={ADDRESSES[0]}", "--master_port=29401"]
    launcher = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=2", *meet]
    return [machines.start(number, *launcher, "-m", "trainer", *words, **ENVIRONMENT)]


def by_hand(machines: Machines, number: int, *words: str) -> list[subprocess.Popen]:
    started = []
    for local_rank in (0, 1):
        told = {
            "RANK": 2 * number + local_rank,
            "WORLD_SIZE": 4,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": 2,
        }
        told |= {
            "GROUP_RANK": number,
            "GROUP_WORLD_SIZE": 2,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": 29402,
        }
        given = {name: str(value) for name, value in told.items()}
        started.append(
            machines.start(number, sys.executable, "-m", "trainer", *words, **ENVIRONMENT, **given)
        )
    return started


INITS = {
    "env": ["dist.init=env"],
    "tcp": ["dist.init=tcp", f"dist.address={ADDRESSES[0]}:29403"],
    "file": ["dist.init=file", "dist.path=meeting"],
}
LAUNCHERS = {"c10d": by_c10d, "static": by_static, "hand": by_hand}
CELLS = [
    pytest.param(name, init, id=f"{name}-{init}", marks=pytest.mark.slow)
    for name in LAUNCHERS
    for init in INITS
]


def check_ends(machines: Machines, *processes: subprocess.Popen) -> None:
    """Check that all processes end with code 0."""
    end = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.05)
    for process in processes:
        assert process.poll() == 0, "".join(
            f"\n{p.args[4:]}: {p.poll()}\n{machines.said(p)}" for p in processes
        )


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    return fit_on(4, tmp_path_factory.mktemp("one"), "task=tiny")["directory"]


@pytest.mark.parametrize(("launcher", "init"), CELLS)
def test_two_machines_learn_what_one_learns(launcher, init, machines, one_machine, tmp_path):
    processes = [
        p for number in (0, 1) for p in LAUNCHERS[launcher](machines, number, *TINY, *INITS[init])
    ]
    check_ends(machines, *processes)
    assert "4 ranks on 2 nodes" in machines.said(processes[0])
    ours, theirs = newest(tmp_path / "runs/tiny/a"), newest(one_machine)
    check_same_bits(tensors_of(ours), tensors_of(theirs))
    assert ours.manifest["ledger"] == theirs.manifest["ledger"]


# A lost machine -----------------------------------------------------------------------------------

PACED = """
import time
from pathlib import Path
from tiny import Tiny
class Paced(Tiny):
    def train_step(self, batch):
        if self.world.rank == 0:
            with open("steps", "a") as file:
                file.write(f"{self.step + 1}\\n")
        if Path("hold").exists():
            time.sleep(0.2)
        return super().train_step(batch)
"""
# Dropout and unequal weights; rows of 11 in any layout, so that the curve does not depend on the
# layout (test_parity.py).
RECIPE = [
    "task.options.dropout=0.1",
    "task.options.weights=true",
    "data.micro_batch=11",
    "log.every_steps=1",
]
# A machine is lost after 3 s of silence, and others then have 3 s to join: 15 and 30 s by default.
QUICK_TO_NOTICE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"


@pytest.fixture
def paced(machines):
    """`machines` on which rank 0 records each step that it begins, and a step takes 0.2 s until
    the file `hold` is removed."""
    (machines.folder / "paced.py").write_text(PACED)
    (machines.folder / "hold").touch()
    return machines


def elastic(machines: Machines, number: int, *words: str, host: int = 0) -> subprocess.Popen:
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[host]}:29400", "--rdzv_id=job"]
    meet += [
        f"--local_addr={ADDRESSES[number]}",
        f"--rdzv_conf=is_host={int(number == host)},{QUICK_TO_NOTICE}",
    ]
    launcher = [*TORCHRUN, "--nnodes=1:2", "--nproc_per_node=1", "--max_restarts=3", *meet]
    command = [
        *launcher,
        "-m",
        "trainer",
        "--config-dir",
        CONF,
        "task=tiny",
        "task.trainer=paced.Paced",
        *EVERY,
    ]
    # Without this, in torch 2.13, a replaced agent and the others wait for each other until both
    # give up.
    return machines.start(
        number, *command, *RECIPE, *words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **ENVIRONMENT
    )


def last_step(machines: Machines) -> int:
    """Return the current step of the run; 0 before the first."""
    path = machines.folder / "steps"
    return int((path.read_text().split() or ["0"])[-1]) if path.exists() else 0


def wait_for_ranks(machines: Machines, process: subprocess.Popen, ranks: int) -> None:
    """Wait until the newest group has so many ranks, as the machine of rank 0 reports, and one more
    step has begun."""
    wanted = f", {ranks} rank{'s' * (ranks > 1)} on "

    def is_so() -> bool:
        assert process.poll() is None, machines.said(process)
        return wanted in machines.said(process).rpartition("layout  ddp")[2]

    wait_for(is_so, LIMIT_S)
    step = last_step(machines)
    wait_for(lambda: last_step(machines) != step, LIMIT_S)


def wait_for_random_step(machines: Machines) -> None:
    """Wait for a random moment of a random step after the first checkpoint."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    step = chance.randrange(6, 12)
    wait_for(lambda: last_step(machines) >= step, LIMIT_S)
    time.sleep(chance.uniform(0, 0.2))


def check_unbroken(directory: Path, folder: Path, steps: int, sizes: list[int]) -> None:
    """Check that the run took the samples, and learned the weights, of an undisturbed run on one
    rank (with the tolerance of test_parity.py)."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert audit([str(directory)]) == 0, told.getvalue()
    undisturbed = fit_on(1, folder / "undisturbed", "task=tiny", *RECIPE, f"run.steps={steps}")
    entries = [
        entry
        for _, entry in rundir.read_entries(directory / rundir.METRICS)
        if "train/loss" in entry
    ]
    losses = {entry["step"]: entry["train/loss"] for entry in entries}
    assert len(entries) == len(losses) == steps and losses.keys() == undisturbed["losses"].keys()
    for step, loss in undisturbed["losses"].items():
        assert abs(losses[step] - loss) <= 1e-10 * abs(loss), f"loss of step {step}"
    ours, theirs = newest(directory), newest(undisturbed["directory"])
    assert ours.manifest["ledger"] == theirs.manifest["ledger"] and ours.manifest["step"] == steps
    assert [ranks for _, ranks in ours.manifest["sessions"]] == sizes, ours.manifest["sessions"]
    weights = tensors_of(ours)
    for name, tensor in undisturbed["weights"].items():
        assert relative_distance(tensor, weights[name]) <= 1e-10, name


@pytest.mark.slow
def test_run_continues_without_a_lost_machine(paced, tmp_path):
    words = ["run.name=a", "run.resume=auto", "run.steps=100"]
    ours, theirs = (elastic(paced, number, *words) for number in (0, 1))
    wait_for_ranks(paced, ours, 2)
    wait_for_random_step(paced)
    paced.kill(1)
    (tmp_path / "hold").unlink()
    check_ends(paced, ours)
    assert theirs.wait() == -9 and "1 rank on 1 node" in paced.said(ours)
    check_unbroken(tmp_path / "runs/tiny/a", tmp_path, 100, [2, 1])


LONG = ["run.steps=300", "dist.timeout_s=10"]  # one minute, so that a machine can come back


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["its processes are killed", "its power goes", "its cable is pulled"]
)
def test_machine_that_comes_back_rejoins_the_run(how, paced, tmp_path):
    words = ["run.name=a", "run.resume=auto", *LONG]
    ours, theirs = (elastic(paced, number, *words) for number in (0, 1))
    wait_for_ranks(paced, ours, 2)
    wait_for_random_step(paced)
    if how != "its processes are killed":
        paced.partition()
    if how != "its cable is pulled":
        paced.kill(1)
    wait_for_ranks(paced, ours, 1)
    if how != "its processes are killed":
        paced.heal()
    if how != "its cable is pulled":  # else its torchrun still runs, and reconnects itself
        theirs = elastic(paced, 1, *words)
    wait_for_ranks(paced, ours, 2)
    (tmp_path / "hold").unlink()
    check_ends(paced, ours, theirs)
    check_unbroken(tmp_path / "runs/tiny/a", tmp_path, 300, [2, 1, 2])


NAMED = ["run.name=a", "run.resume=auto"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "words"),
    [(0, NAMED), (1, NAMED), (0, []), (1, [])],
    ids=["named", "named, as rank 0", "without a name", "without a name, as rank 0"],
)
def test_run_continues_with_a_machine_that_joins_later(host, words, paced, tmp_path):
    """The machine with the lower address has rank 0. If the other one has the store, rank 0 joins
    later."""
    first = elastic(paced, host, *words, *LONG, host=host)
    wait_for_ranks(paced, first, 1)
    second = elastic(paced, 1 - host, *words, *LONG, host=host)
    wait_for_ranks(paced, second if host else first, 2)
    (tmp_path / "hold").unlink()
    check_ends(paced, first, second)
    (directory,) = (tmp_path / "runs/tiny").iterdir()
    check_unbroken(directory, tmp_path, 300, [1, 2])


# A pulled cable -----------------------------------------------------------------------------------


def ranks_on(machines: Machines, number: int) -> list[int]:
    """Return the processes of ranks and their children; torchrun itself has no RANK."""
    found = []
    for pid in machines.pids(number):
        with contextlib.suppress(OSError):
            if b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


# A watcher detects that it is cut off from the watcher of node 0 when its messages fill a buffer.
# It then decides alone.
LIMITS = {"dist.timeout_s": 8, "dist.hang_timeout_s": 40}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("limit", LIMITS)
def test_ranks_on_both_sides_end_when_the_cable_is_pulled(launcher, limit, paced, tmp_path):
    settings = {"dist.timeout_s": 300, "dist.hang_timeout_s": "null"} | {limit: 10}
    words = [
        *TINY,
        "task.trainer=paced.Paced",
        *EVERY,
        "run.resume=auto",
        *(f"{k}={v}" for k, v in settings.items()),
    ]
    for number in (0, 1):
        LAUNCHERS[launcher](paced, number, *words, "run.steps=5000")
    wait_for(lambda: [*tmp_path.glob("runs/tiny/a/checkpoints/step-*")], LIMIT_S)
    assert min(len(ranks_on(paced, number)) for number in (0, 1)) >= 2
    paced.partition()
    began = time.monotonic()
    wait_for(lambda: not ranks_on(paced, 0) and not ranks_on(paced, 1), LIMIT_S)
    assert time.monotonic() - began < 10 + LIMITS[limit]
    for number in (0, 1):
        paced.kill(number)  # a torchrun that waits for its store does so for 15 minutes
    paced.heal()
    (tmp_path / "hold").unlink()
    last = newest(tmp_path / "runs/tiny/a").manifest["step"] + 20
    again = [
        p
        for number in (0, 1)
        for p in LAUNCHERS[launcher](paced, number, *words, f"run.steps={last}")
    ]
    check_ends(paced, *again)
    assert f"of {last}\n" in paced.said(again[0]).partition("resumed at step ")[2]
    with contextlib.redirect_stdout(io.StringIO()):
        assert audit([str(tmp_path / "runs/tiny/a")]) == 0


@pytest.mark.slow
def test_each_machine_downloads_the_shards_of_its_ranks(machines, tmp_path):
    """Four lanes on two machines with a cache each, from a plain HTTP server on the first."""
    write_shards(Padded(2000), str(tmp_path / "data"), 5000, 0)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "data").glob("*.mds")}
    server = [sys.executable, "-m", "http.server", "8000", "--bind", ADDRESSES[0]]
    machines.start(0, *server, "--directory", str(tmp_path / "data"))
    url = f"http://{ADDRESSES[0]}:8000"
    words = ["--config-dir", CONF, "task=on_shards", "run.name=a", "run.steps=10"]
    started = []
    for number in (0, 1):
        meet = [f"--node_rank={number}", f"--master_addr={ADDRESSES[0]}", "--master_port=29405"]
        launcher = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=2", *meet, "-m", "trainer"]
        told = {**ENVIRONMENT, "LOCKSTEP_CACHE": str(tmp_path / f"cache-{number}")}
        given = ["task.options.url=" + url, "task.options.cache_bytes=10_000_000"]
        started.append(machines.start(number, *launcher, *words, *given, **told))
    for process in started:
        assert process.wait(LIMIT_S) == 0, machines.said(process)
    found = [
        {path.name.partition("-")[2] for path in (tmp_path / f"cache-{n}").rglob("*.mds")}
        for n in (0, 1)
    ]
    assert len(sizes) == 102 and len(sizes) - len(found[0] | found[1]) <= 2  # 3 rows are left out
    for names in found:  # half of them, and what the proof of the start reads on all ranks
        assert len(names) < 0.75 * len(sizes)
