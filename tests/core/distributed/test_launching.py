"""Every way to start ranks on one machine, and how each launcher handles the exit of its ranks."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import (
    CONF,
    ELASTIC,
    SPAWN,
    TORCHRUN,
    Beside,
    children_of,
    ended,
    free_port,
    launch,
    newest,
    on_ranks,
    ranks_of,
    slow_but,
    wait_for,
)
from harness.internals import resume
from harness.launch import SCRIPTS, environment_of_a_command
from harness.stored import check_same_bits, tensors_of
from harness.training import compose
from mesh_gpt import Meshed

from trainer import ConfigError, World, load_config
from trainer.core.distributed.launchers import expand_counts, expand_hosts, find_launcher
from trainer.core.distributed.rendezvous import meet

TINY = ["--config-dir", CONF, "task=tiny", "run.name=a"]
LAUNCHES = [
    pytest.param(ELASTIC, id="elastic", marks=pytest.mark.slow),
    pytest.param(SPAWN, id="spawn", marks=pytest.mark.slow),
]
SLOW = ["--config-dir", CONF, "--config-dir", str(SCRIPTS / "faults/conf"), "task=slow"]


@pytest.mark.slow
def test_rank_of_spawn_that_is_asked_to_stop_before_it_has_handlers_is_not_silent(tmp_path):
    """Python's resource tracker unblocks SIGTERM, which would kill a rank without a message."""
    process = launch(tmp_path, *TINY, *SPAWN)
    ranks = wait_for(lambda: found if len(found := ranks_of(process)) > 1 else None)
    os.kill(ranks[1], signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 75 or "asked to stop (SIGTERM) before all ranks connected" in err, (code, err)


@pytest.mark.parametrize("words", LAUNCHES)
def test_one_command_starts_the_ranks(words, command, tmp_path):
    code, out, err = command(*TINY, *words, is_fresh=True)
    assert code == 0 and err == "", err
    assert "2 ranks on 1 node" in out and out.rstrip().endswith(
        "train longer with: python -m trainer run.resume=runs/tiny/a task.trainer=tiny.Tiny "
        "run.steps=40"
    )
    assert json.loads((tmp_path / "runs/tiny/a/exit.json").read_text())["code"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [ELASTIC, SPAWN], ids=["elastic", "spawn"])
def test_finished_run_is_resumed_by_the_launcher_that_it_was_started_with(words, command, tmp_path):
    assert command(*TINY, *words, is_fresh=True).returncode == 0
    before = newest(tmp_path / "runs/tiny/a")
    code, out, err = command("run.resume=runs/tiny/a", "task.trainer=tiny.Tiny", is_fresh=True)
    assert code == 0 and "2 ranks on 1 node" in out, out + err
    assert "nothing left to do: the run is finished at step 20" in out
    assert newest(tmp_path / "runs/tiny/a").manifest == before.manifest


@pytest.mark.parametrize("words", LAUNCHES)
def test_exit_code_and_line_of_a_bad_setting_are_passed_on(words, command):
    code, _, err = command(*TINY, *words, "data.global_batch=1", is_fresh=True)
    line = "error: data.global_batch=1: must be at least the 2 data-parallel ranks\n"
    assert (code, err) == (2, line)


@pytest.mark.slow
def test_python_m_torch_distributed_launch_starts_the_ranks(tmp_path):
    launcher = ("-W", "ignore", "-m", "torch.distributed.launch", *TORCHRUN[2:])
    code, out, err = ended(launch(tmp_path, *TINY, launcher=launcher))
    assert code == 0 and "2 ranks on 1 node" in out, err


def test_launch_within_a_launcher_is_refused(command):
    code, _, err = command(*TINY, *ELASTIC, ranks=2)
    line = "error: launch=elastic: the ranks were already started by torchrun; leave it out"
    assert code == 1 and err.splitlines().count(line) == 1, err


@pytest.mark.slow
def test_run_of_a_launch_is_resumed_under_another_launcher(command, tmp_path):
    """The saved settings have launch=elastic, which nobody gave again."""
    assert command(*TINY, *ELASTIC, is_fresh=True).returncode == 0
    words = ("run.resume=runs/tiny/a", "task.trainer=tiny.Tiny", "run.steps=22")
    code, out, err = command(*words, ranks=2)
    assert code == 0 and "done: 22 steps" in out, out + err


SYNCED = [*TINY[:3], "strategy.sync_batchnorm=true", "task.options.norm=true"]


def by_mpirun(folder: Path, backend: str, size: int) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(size)]
    words = [*SYNCED, f"dist.backend={backend}", f"run.name={backend}"]
    done = subprocess.run(
        [*mpirun, sys.executable, "-m", "trainer", *words],
        cwd=folder,
        env=environment_of_a_command(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown = {"mpi": "mpi4py"}.get(backend, backend)  # as torch names it
    assert f"over {shown}, {size} ranks on 1 node" in done.stdout, done.stderr
    resume = f"mpirun -n {size} python -m trainer run.resume=runs/tiny/{backend}"
    resume += " task.trainer=tiny.Tiny run.steps=40"
    assert done.stdout.rstrip().endswith(f"train longer with: {resume}")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_mpirun_starts_the_ranks_over_gloo_and_over_mpi(size, command, tmp_path):
    """Gloo under mpirun runs on three ranks only, because it is slow."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    pytest.importorskip("mpi4py")
    by_mpirun(tmp_path, "mpi", size)
    if size == 3:
        by_mpirun(tmp_path, "gloo", size)
    else:
        assert command(*SYNCED, "run.name=gloo", ranks=size).returncode == 0
    ours, theirs = (tensors_of(newest(tmp_path / "runs/tiny" / n)) for n in ("mpi", "gloo"))
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-12, atol=0), name


REFUSED = {
    "launch.nproc_per_node=2": "launch.nproc_per_node=2: use launch=elastic or launch=spawn",
    "launch.max_restarts=2": "launch.max_restarts=2: use launch=elastic",
    "launch=spawn launch.max_restarts=2": "launch.max_restarts=2: launch=spawn does not "
    "restart ranks; use launch=elastic",
    "launch=elastic launch.nproc_per_node=0": "launch.nproc_per_node=0: must be gpu, cpu, auto "
    "or an integer",
    "launch=elastic launch.nproc_per_node=all": "launch.nproc_per_node=all: must be gpu, cpu, "
    "auto or an integer",
    "launch=elastic launch.max_restarts=-1": "launch.max_restarts=-1: must be an integer of "
    "at least 0",
}


@pytest.mark.parametrize("words", REFUSED)
def test_settings_of_launch_are_checked(words):
    with pytest.raises(ConfigError) as error:
        load_config(["task=tiny", *words.split()], [CONF])
    assert str(error.value).startswith(REFUSED[words])


# Environment variables of launchers ---------------------------------------------------------------

HOSTS = {
    "n[1-2]": ["n1", "n2"],
    "gpu-a[03-07,12]": ["gpu-a03", "gpu-a04", "gpu-a05", "gpu-a06", "gpu-a07", "gpu-a12"],
    "gpu-a[03-04],login1,b[9-10]x": ["gpu-a03", "gpu-a04", "login1", "b9x", "b10x"],
    "r[1-2]n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
    "single": ["single"],
}


@pytest.mark.parametrize("text", HOSTS)
def test_node_lists_of_slurm_are_expanded(text):
    assert expand_hosts(text) == HOSTS[text]


@pytest.mark.parametrize("text", ["", "n[a-b]", "n[1-]"])
def test_invalid_node_list_is_refused(text):
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST="):
        expand_hosts(text)


def test_counts_of_slurm_are_expanded():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1] and expand_counts("4") == [4]


STEP = {
    **{
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "5",
        "SLURM_LOCALID": "1",
    },
    **{
        "SLURM_NODEID": "1",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
        "SLURM_JOB_NODELIST": "localhost,n[1-2]",
    },
}


def test_rank_is_read_from_slurm():
    world = World.from_environment({**STEP, "SLURM_RESTART_COUNT": "2"})
    told = (
        world.rank,
        world.local_rank,
        world.node_rank,
        world.world_size,
        world.local_world_size,
        world.num_nodes,
    )
    assert told == (3, 1, 1, 5, 2, 3)
    host, port = master = world.launcher.master
    assert host == "localhost" and 20000 <= port < 32000
    assert world.launcher.name == "srun" and (world.launcher.job, world.launcher.attempt) == (
        "slurm:7",
        2,
    )
    assert find_launcher({**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master == master
    assert find_launcher({**STEP, "SLURM_STEP_ID": "1"}).master != master
    assert find_launcher({**STEP, "SLURM_STEP_RESV_PORTS": "12000-12001"}).master[1] == 12000
    assert find_launcher({**STEP, "MASTER_ADDR": "h", "MASTER_PORT": "9"}).master == ("h", 9)


def test_batch_script_of_slurm_is_one_rank():
    """A batch script has SLURM_PROCID=0 and SLURM_NTASKS, but no step."""
    batch = {**without("SLURM_STEP_ID"), "SLURM_PROCID": "0"}
    assert World.from_environment(batch).world_size == 1


def without(*names):
    return {name: value for name, value in STEP.items() if name not in names}


START = ": start with srun, mpirun or torchrun, or unset the variables of the launcher"
LONG = "9" * 5000  # more digits than int() takes
SENSELESS = {
    **{
        f"{name} is not set, but SLURM_PROCID=3{START}": without(name)
        for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE")
    },
    f"SLURM_STEP_ID is not set, but SLURM_PROCID=3{START}": without("SLURM_STEP_ID"),
    f"SLURM_JOB_NODELIST is not set, but SLURM_PROCID=3{START}": without("SLURM_JOB_NODELIST"),
    "SLURM_PROCID=-1: must be an integer of at least 0 and at most 4": {"SLURM_PROCID": "-1"},
    "SLURM_NTASKS=1.0: must be an integer of at least 1": {"SLURM_NTASKS": "1.0"},
    f"SLURM_NTASKS={LONG}: must be an integer of at least 1": {"SLURM_NTASKS": LONG},
    "SLURM_NODEID=7: must be below the 3 nodes of SLURM_TASKS_PER_NODE=2(x2),1; start with srun": {
        "SLURM_NODEID": "7"
    },
    "SLURM_TASKS_PER_NODE=two: must be counts, as in 2(x3),1; start with srun": {
        "SLURM_TASKS_PER_NODE": "two"
    },
    "SLURM_STEP_NODELIST=n[1-9999999]: [1-9999999] must be numbers and ranges, as in [03-07,12]": {
        "SLURM_JOB_NODELIST": "n[1-9999999]"
    },
    "SLURM_STEP_NODELIST=n[1-9999][1-9999]: must be at most 1,000,000 hosts": {
        "SLURM_JOB_NODELIST": "n[1-9999][1-9999]"
    },
    f"the node {'x' * 70} of rank 0 does not resolve to an address; set MASTER_ADDR to an address "
    "that all nodes reach": {"SLURM_JOB_NODELIST": "x" * 70},
}


@pytest.mark.parametrize("line", SENSELESS, ids=range(len(SENSELESS)))
def test_senseless_variables_of_slurm_are_one_line(line, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no scontrol
    changed = SENSELESS[line]
    environment = changed if len(changed) > 1 else {**STEP, **changed}
    with pytest.raises(ConfigError) as told:
        find_launcher(environment).place()
    assert str(told.value) == line


HALF = {
    f"{mpi}SIZE is not set, but {mpi}RANK=1{START}": {f"{mpi}RANK": "1"}
    for mpi in ("OMPI_COMM_WORLD_", "PMI_", "MV2_COMM_WORLD_")
}
HALF["OMPI_COMM_WORLD_RANK=a: must be an integer of at least 0 and at most 1"] = {
    "OMPI_COMM_WORLD_RANK": "a",
    "OMPI_COMM_WORLD_SIZE": "2",
}
HALF[f"RANK={LONG}: must be an integer of at least 0 and at most 1"] = {
    "RANK": LONG,
    "WORLD_SIZE": "2",
}


@pytest.mark.parametrize("line", HALF, ids=range(len(HALF)))
def test_senseless_variables_of_mpi_are_one_line(line):
    with pytest.raises(ConfigError) as told:
        find_launcher(HALF[line]).place()
    assert str(told.value) == line


def test_port_of_many_digits_is_refused():
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": LONG}
    with pytest.raises(ConfigError, match=r"^MASTER_PORT=9+: must be a port from 1 to 65535"):
        _ = find_launcher(by_hand).master


@pytest.mark.parametrize(
    "names",
    [
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ],
    ids=["Open MPI", "MPICH and Intel"],
)
def test_rank_is_read_from_mpi(names):
    world = World.from_environment(dict(zip(names, ("3", "4", "3", "4"), strict=True)))
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 3, 4)
    assert world.launcher.name == "mpirun" and world.launcher.master[0] == "127.0.0.1"
    apart = World.from_environment(dict(zip(names, ("3", "4", "1", "2"), strict=True)))
    with pytest.raises(
        ConfigError,
        match="MASTER_ADDR is not set, but WORLD_SIZE=4: start with mpirun -x MASTER_ADDR=",
    ):
        _ = apart.launcher.master


def test_environment_of_torchrun_takes_precedence():
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert find_launcher({**STEP, **mpi, "RANK": "5", "WORLD_SIZE": "6"}).variables["RANK"] == "5"
    assert find_launcher({**STEP, **mpi}).name == "mpirun"  # within an allocation
    assert (
        find_launcher({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5"}).name == "srun"
    )  # srun sets the variables of PMI too
    assert (
        find_launcher({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5", "MPI_LOCALNRANKS": "5"}).name
        == "mpirun"
    )
    assert find_launcher({}).name == "python"


def test_runs_of_one_slurm_job_keep_their_directories_when_it_is_requeued(tmp_path):
    """Two steps of one job, told apart by name or by settings: each resumes its own run."""
    job = {**STEP, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    cases = [["run.name=one"], ["run.name=two"], ["optim.lr=0.3"], ["optim.lr=0.4"]]
    configs = [load_config(["task=tiny", f"run.dir={tmp_path}", *words], [CONF]) for words in cases]
    ours = {}
    for number, config in enumerate(configs):
        directory, lease = resume.take(
            config, resume.locate(config, find_launcher(job)), 0, find_launcher(job)
        )
        lease.release()
        facts = json.loads((directory / ".writer").read_text())
        (directory / ".writer").write_text(
            json.dumps({**facts, "pid": 1})
        )  # of a process that has exited
        ours[number] = directory
    again = find_launcher({**job, "SLURM_RESTART_COUNT": "1"})
    assert {n: resume.locate(c, again).directory for n, c in enumerate(configs)} == ours
    with pytest.raises(ConfigError, match="exists and is not being resumed"):
        resume.locate(configs[0], find_launcher(job))


# Restarts -----------------------------------------------------------------------------------------

EVERY = ["checkpoint.every_steps=5", "checkpoint.every_epochs=null", "eval.every_epochs=null"]


@pytest.mark.slow
def test_rank_behind_a_wrapper_is_restarted_and_the_result_is_the_same(command, tmp_path):
    """Such as a profiler or a container, between torchrun and a rank. `scripts/faults --only
    restarts` kills ranks without one."""
    words = [*SLOW, "run.steps=30", *EVERY]
    (tmp_path / "w.sh").write_text(f'{sys.executable} "$@" & wait $!\n')
    launcher = (*TORCHRUN, "--max_restarts=2", "--no-python", "bash", str(tmp_path / "w.sh"))
    whole = command(*words, "run.name=whole", ranks=2)
    assert whole.returncode == 0, whole.stderr
    run = launch(tmp_path, *words, launcher=launcher)  # no name: its directory has a timestamp
    base = tmp_path / "runs/slow"
    wait_for(lambda: [*base.glob("2*/checkpoints/step-*")])
    os.kill(children_of(ranks_of(run)[1])[0], signal.SIGKILL)
    code, out, err = ended(run)
    assert code == 0 and "resumed at step" in out, out + err
    assert len([*base.iterdir()]) == 2, "the restart made a directory of its own"
    one, other = (newest(next(base.glob(name))) for name in ("whole", "2*"))
    assert one.manifest["ledger"] == other.manifest["ledger"]
    check_same_bits(tensors_of(one), tensors_of(other))


def test_a_launch_is_the_same_before_and_after_the_task_gives_its_options(tmp_path):
    """Else a restart does not know the directory of its previous attempt."""
    config = compose(tmp_path, "task=meshed")
    full = Meshed(config).config
    assert "dropout" in full.task.options and "dropout" not in config.task.options
    assert resume.identify(full, find_launcher()) == resume.identify(config, find_launcher())


@pytest.mark.slow
def test_restarts_without_progress_are_given_up(command, tmp_path):
    task = """import os
from tiny import Tiny
class Dies(Tiny):
    def train_step(self, batch):
        if self.step == 7:
            raise ValueError("this always fails")
        return super().train_step(batch)
"""
    (tmp_path / "dies.py").write_text(task)
    words = [*TINY, "task.trainer=dies.Dies", *ELASTIC, "launch.max_restarts=5", *EVERY]
    code, out, err = command(*words)
    assert code == 1 and out.count("resumed at step 5 of 20") == 1 + 2, out + err
    line = "error: runs/tiny/a: gave up, 3 restarts got no further than step 5: "
    assert f"{line}ValueError: this always fails" in err.splitlines(), err


@pytest.mark.parametrize("victim", [1, 0])
def test_rank_that_dies_is_one_line_on_the_others(victim, command, tmp_path):
    given = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    words = [*TINY, *EVERY, "run.steps=1000000"]
    ranks = [
        command.start(*words, environment={"RANK": rank, "LOCAL_RANK": rank, **given})
        for rank in "01"
    ]
    wait_for(lambda: [*tmp_path.glob("runs/tiny/a/checkpoints/step-*")])
    ranks[victim].kill()
    code, _, err = ended(ranks[1 - victim])
    who = "rank 1: " if victim == 0 else ""
    line = rf"error: {who}another rank has exited or does not answer \([^)]+\); read its "
    assert code == 1 and re.fullmatch(rf"{line}[^\n]+\n", err), err


def test_store_that_dies_prints_no_frames_of_torch(capfd):
    """The error is raised and gets a line; torch's warning would repeat it with C++ frames."""
    port, limit = free_port(), timedelta(seconds=10)
    server = os.fork()
    if server == 0:
        with contextlib.suppress(BaseException):
            store = dist.TCPStore("127.0.0.1", port, is_master=True, timeout=limit)
            store.wait(["leave"])
        os._exit(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    store.set("leave", "")
    os.waitpid(server, 0)
    with pytest.raises(dist.DistError):
        store.add("key", 1)
    assert capfd.readouterr().err == ""


# Groups that cannot form --------------------------------------------------------------------------

LIMIT_S = 0.7


def meeting(
    ranks: list[tuple[int, int]], folder: Path, init: str = "env"
) -> list[tuple[float, str]]:
    """Start one process per (rank, world size); return (seconds, error) of each, where the error
    is "" if the process group opened."""
    port = free_port()

    def come(rank: int, size: int) -> tuple[float, str]:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        words = {
            "tcp": [f"dist.address=127.0.0.1:{port}"],
            "file": [f"dist.path={folder / 'meet'}"],
        }.get(init, [])
        config = load_config(
            ["task=tiny", f"dist.timeout_s={LIMIT_S}", f"dist.init={init}", *words], [CONF]
        )
        began = time.monotonic()
        try:
            _store = meet(config.dist, World.from_environment())
            seconds = time.monotonic() - began
            time.sleep(0.3)  # rank 0 serves the store
            return seconds, ""
        except ConfigError as error:
            return time.monotonic() - began, str(error)

    return on_ranks(len(ranks), lambda: come(*ranks[int(os.environ["RANK"])]))


@pytest.mark.parametrize(
    "init", ["env", *(pytest.param(init, marks=pytest.mark.slow) for init in ("tcp", "file"))]
)
@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([(0, 3), (2, 3)], "rank 1 did not connect; rank 0 is process "),
        ([(0, 3), (1, 3), (1, 3)], "rank 1 was started twice, as process "),
        ([(0, 2), (1, 3)], "WORLD_SIZE is 2 on rank 0 and 3 on rank 1 (process "),
        ([(1, 2)], f"within dist.timeout_s={LIMIT_S}: "),
    ],
    ids=["missing", "twice", "world size", "no rank 0"],
)
def test_group_that_cannot_form_ends_in_time_on_every_rank(ranks, line, init, tmp_path):
    ends = meeting(ranks, tmp_path, init)
    beside = Beside(lambda: meeting([(0, 2), (1, 2)], tmp_path / "beside"))
    for seconds, told in ends:
        assert seconds < 2 * LIMIT_S + beside.allowance_s
        if init != "file" or line.startswith(("rank 1 did", "no group")):
            assert line in told, told
        else:  # a file may be from an earlier run, so its content is trusted only at the end
            assert f"within dist.timeout_s={LIMIT_S}: rank" in told, told


@contextlib.contextmanager
def foreign(how):
    """Yield the address of a process that does not accept, is silent, talks HTTP or hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    line = server.accept()[0]
                    held.append(line)
                    if how == "talks":
                        line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    elif how == "hangs up":
                        line.close()

        if how != "does not accept":
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for line in held:
            line.close()


FOREIGN = ("does not accept", "is silent", "talks", "hangs up")


@pytest.mark.parametrize("how", slow_but(FOREIGN, "does not accept", "talks"))
def test_port_in_use_is_reported_at_once(how, command):
    with foreign(how) as address:
        words = ["dist.init=tcp", f"dist.address={address}", f"dist.timeout_s={LIMIT_S}"]
        ranks = [
            command.start(*TINY, *words, environment={"RANK": rank, "WORLD_SIZE": "2"})
            for rank in "01"
        ]
        ends = [ended(rank) for rank in ranks]
    assert ends[0][0] == 2 and "the port is in use on rank 0's host; choose another" in ends[0][2]
    assert ends[1][0] == 2 and f"error: rank 1: no rendezvous at {address}" in ends[1][2]
    is_named = "the process that listens there is not rank 0 of this run" in ends[1][2]
    assert is_named or how in ("talks", "hangs up"), ends[1]


def test_rank_that_is_taken_names_the_process_that_has_it(tmp_path):
    told = meeting([(0, 2), (1, 2)], tmp_path)
    assert [line for _, line in told] == ["", ""]

    def late():
        config = load_config(["task=tiny", "dist.timeout_s=5"], [CONF])
        os.environ["RANK"] = {"0": "0", "1": "1", "2": "1"}[os.environ["RANK"]]
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ |= {"WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        is_late = os.environ["LOCAL_RANK"] == "2"
        if is_late:
            wait_for((tmp_path / "group").exists)
        try:
            _store = meet(
                config.dist,
                World.from_environment({k: v for k, v in os.environ.items() if "LOCAL" not in k}),
            )
            (tmp_path / "group").touch()
            wait_for((tmp_path / "refused").exists)
        except ConfigError as error:
            (tmp_path / "refused").touch()
            return str(error)
        return ""

    port = free_port()
    *group, last = on_ranks(3, late)
    assert group == ["", ""] and f"127.0.0.1:{port}: rank 1 is taken by process " in last


def test_rendezvous_does_not_change_the_generator_of_torch(tmp_path):
    def come():
        before = torch.get_rng_state()
        _store = meet(load_config(["task=tiny"], [CONF]).dist, World.from_environment())
        time.sleep(0.2)
        return torch.equal(before, torch.get_rng_state())

    assert on_ranks(2, come) == [True, True]


def test_all_ranks_that_were_started_by_hand_refuse_what_only_rank_0_sees(command, tmp_path):
    (tmp_path / "runs/tiny/taken").mkdir(parents=True)
    (tmp_path / "runs/tiny/taken/config.json").touch()
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("--config-dir", CONF, "task=tiny", "run.name=taken", "dist.timeout_s=20")
    ranks = [command.start(*words, environment={**place, "RANK": f"{rank}"}) for rank in (0, 1)]
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    line = "run.name=taken: runs/tiny/taken exists and is not being resumed; add run.resume=auto"
    line += " (nothing was saved, so it starts anew) or choose another run.name"
    assert said == [f"error: {line}\n", f"error: rank 1: {line}\n"]
