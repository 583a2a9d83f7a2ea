"""A real SLURM of two nodes, n1 and n2, on this machine, with its own munge, ports and files; /etc
is not changed.

    with Cluster(tmp_path) as cluster:
        cluster.srun("-N2", "--ntasks-per-node=2", sys.executable, "-m", "trainer", "task=cifar")

It needs Debian's slurm-wlm and munge, but not root, and does not disturb a SLURM or munge that is
already running.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

DAEMONS = ("munged", "slurmctld", "slurmd")
# folder of the daemons, which is on the PATH of root only
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
START_S, CANCEL_S = (
    60,
    15,
)  # limits: a start takes 1 s, the end up to 11 s if a job ignores SIGTERM

# cred_expire is the time before a requeued job restarts: 120 s by default; 5 s is the least that
# SLURM accepts.
# sched_interval and bf_interval are the intervals of the scheduler (a restart takes 30 s without
# them). KillWait is the time from SIGTERM to SIGKILL. The nodes claim more CPUs than the machine
# has, so that any layout starts immediately.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
MessageTimeout=30
KillWait=5
JobRequeue=1
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64
PartitionName=test Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""

# For SLURM a step ends when its process group is empty, and an exited process counts until it is
# reaped. A process that outlives its parent there (a rank's watcher, the sleep of a killed script)
# goes to the next subreaper above: in tests that is pytest, which reaps only between tests, and the
# first process of a container may never do so. The step then hangs (COMPLETING, or srun itself),
# and after 60 s its node is drained with "Kill task failed". So each slurmd runs below this
# process, which adopts and reaps immediately; 36 is PR_SET_CHILD_SUBREAPER.
REAPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
daemon = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
signal.signal(signal.SIGTERM, lambda *_: os.kill(daemon, signal.SIGTERM))
while os.wait()[0] != daemon:
    pass
"""


def unavailable() -> str:
    """Return the reason why SLURM cannot be started here; "" if it can."""
    missing = [
        name for name in (*DAEMONS, "srun", "sbatch") if shutil.which(name, path=PATH) is None
    ]
    return f"no {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else ""


class Cluster:
    """Run a cluster for the duration of the block; its logs stay in `folder`, whose path must be
    short because of Unix sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
        }
        self.environment = own | {"PATH": PATH, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> "Cluster":
        for name in ("state", "n1", "n2"):
            (self.folder / name).mkdir(parents=True)
        with (
            contextlib.ExitStack() as stack
        ):  # all open at the same time, so that no two are the same
            sockets = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)
            ]
            ports = [one.getsockname()[1] for one in sockets]
        host = socket.gethostname().split(".")[0]
        text = CONFIG.format(host=host, ports=ports, user=os.getuid(), folder=self.folder)
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "seed", "log")]
        try:
            munge = self.folder / "munge.socket"
            self._start(
                "munged",
                "--foreground",
                "--force",
                f"--socket={munge}",
                f"--key-file={key}",
                *files,
            )
            self._until(munge.exists, START_S, "munged up")
            self._start("slurmctld", "-D")
            reaper = (sys.executable, "-I", "-S", "-c", REAPER)
            self._start("slurmd", "-D", "-N", "n1", below=reaper)
            self._start("slurmd", "-D", "-N", "n2", below=reaper)
            self._until(self._is_idle, START_S, "both nodes idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(
            subprocess.TimeoutExpired, TimeoutError
        ):  # remaining processes are killed below
            self.run("scancel", "--partition=test", timeout=CANCEL_S)
            self._until(
                lambda: not self.run("squeue", "-h", timeout=CANCEL_S).stdout,
                CANCEL_S,
                "no job left",
            )
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(CANCEL_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        self._until(self._kill_leftovers, CANCEL_S, "no process left")

    def run(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess:
        """Run a command in the cluster's environment; options are those of subprocess.run, by
        default text, captured output, 60 s, no stdin."""
        usual = {
            "env": self.environment,
            "stdin": subprocess.DEVNULL,
            "text": True,
            "capture_output": True,
        }
        return subprocess.run(words, **{**usual, "timeout": 180, **options})

    def srun(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess:
        return self.run("srun", *words, **options)

    def submit(self, script: Path, *words: str) -> str:
        """Submit a script and return the number of the job; `words` are options of sbatch, then
        `--` and the arguments of the script."""
        split = words.index("--") if "--" in words else len(words)
        return self._said(
            "sbatch", "--parsable", *words[:split], script, *words[split + 1 :]
        ).strip()

    def state(self, job: str) -> str:
        return self._shown(job)["JobState"]

    def requeues(self, job: str) -> int:
        return int(self._shown(job)["Restarts"])

    def wait(self, job: str, states: Collection[str], limit_s: float) -> str:
        """Wait until the job is in one of `states` and return it; raise TimeoutError with all that
        SLURM reports about the job."""
        end = time.monotonic() + limit_s
        while (shown := self._shown(job))["JobState"] not in states:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"job {job} not {' or '.join(states)} within {limit_s} s: {shown}"
                )
            time.sleep(0.2)
        return shown["JobState"]

    def _shown(self, job: str) -> dict[str, str]:
        words = self._said("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _said(self, *words: str | Path) -> str:
        done = self.run(*words)
        assert done.returncode == 0, f"{words[0]}: exit {done.returncode}: {done.stderr}"
        return done.stdout

    def _start(self, *words: str, below: tuple[str, ...] = ()) -> None:
        with (self.folder / f"{words[0]}{len(self._daemons)}.log").open("w") as log:
            # a separate session: Ctrl-C reaches only the tests, which then end the cluster in order
            own = {"cwd": self.folder, "env": self.environment, "start_new_session": True}
            self._daemons.append(
                subprocess.Popen(
                    [*below, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, **own
                )
            )

    def _until(self, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
        end = time.monotonic() + limit_s
        while not is_so():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                logs = [
                    f"{path.name}:\n{path.read_text()[-2000:]}"
                    for path in sorted(self.folder.glob("*.log"))
                ]
                raise TimeoutError(
                    "\n".join([f"not within {limit_s} s: {what}; ended: {ended}", *logs])
                )
            time.sleep(0.1)

    def _is_idle(self) -> bool:
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split() == [
            "idle",
            "idle",
        ]

    def _kill_leftovers(self) -> bool:
        """Kill processes that were started in this cluster; return True once none is left. A
        slurmstepd outlives its slurmd."""
        mark, is_clean = f"SLURM_CONF={self.folder}/slurm.conf".encode(), True
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    is_clean = False
                    os.kill(int(path.name), signal.SIGKILL)
        return is_clean
