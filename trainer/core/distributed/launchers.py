"""The launcher of this process, described in torchrun's variables; how processes start others.

Imports no torch.

`python -m trainer` puts the working directory before installed packages in sys.path, so a
`trainer.py` in that directory would be run instead. The console script `lockstep` appends the
directory, and so do the processes that it starts.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import inf, prod
from pathlib import Path

from trainer.base.errors import ConfigError
from trainer.core.config.rules import is_port

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
OF_A_GROUP = (*RANKS, *MASTER)  # variables of a rank, which a process that is alone must not have
MARK = "LOCKSTEP_LAUNCH"  # set for the ranks that `launch=elastic` and `launch=spawn` start
# For the same ranks: a file for their exit codes, since torchrun's engine turns each into 1.
CODES = "LOCKSTEP_CODES"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's, for why a rank failed
_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
_MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]  # and Intel MPI
_MVAPICH = [f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
MOST_HOSTS = 10**6
_PORTS = range(20000, 32000)  # below the ephemeral ports that systems assign


@dataclass(frozen=True)
class Launcher:
    """The launcher of this process; `variables` are torchrun's variables, as far as known.

    `job` is the same for all attempts of one launch, and None without torchrun and srun.
    `attempt` counts the launcher's restarts, `requeues` those of them that were SLURM's requeues.
    `starters` name torchrun's agents: this host's, or those of all ranks after rendezvous.
    `names` are the launcher's own names of torchrun's variables.
    """

    name: str
    variables: Mapping[str, str]
    job: str | None = None
    attempt: int = 0
    requeues: int = 0
    starters: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def on_this_machine(cls, name: str) -> Launcher:
        """Return a launcher for checks of ranks that meet here; nothing is started or opened."""
        return cls(name, dict(zip(MASTER, ("localhost", "1"), strict=True)))

    def place(self) -> tuple[int, int, int, int, int, int]:
        """Return (rank, local rank, node rank, world size, local world size, number of nodes).

        Raises ConfigError if one of RANK and WORLD_SIZE is missing, or if a variable is not an
        integer or out of range.
        """
        if "RANK" not in self.variables and "WORLD_SIZE" not in self.variables:
            return 0, 0, 0, 1, 1, 1
        size = self._whole("WORLD_SIZE", 1)
        rank = self._whole("RANK", 0, size - 1)
        local_size = self._whole("LOCAL_WORLD_SIZE", 1, size, default=size)
        local_rank = self._whole("LOCAL_RANK", 0, local_size - 1, default=rank % local_size)
        nodes = self._whole("GROUP_WORLD_SIZE", 1, default=-(-size // local_size))
        node = self._whole("GROUP_RANK", 0, nodes - 1, default=rank // local_size)
        return rank, local_rank, node, size, local_size, nodes

    def _whole(self, name: str, low: int, high: float = inf, default: int | None = None) -> int:
        value = self.variables.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"""{name} is not set: RANK and WORLD_SIZE must be set together;
                start with torchrun, or set both""")
        if not _is_count(value) or not low <= int(value) <= high:
            limit = "" if high == inf else f" and at most {high}"
            raise ConfigError(f"""{self.names.get(name, name)}={value}:
                must be an integer of at least {low}{limit}""")
        return int(value)

    @property
    def master(self) -> tuple[str, int]:
        """(host, port) of rank 0's store. Raises ConfigError if one is missing or invalid."""
        for name in MASTER:
            if not self.variables.get(name):
                start = "start with torchrun, or set MASTER_ADDR and MASTER_PORT by hand"
                if self.name == "mpirun":
                    start = "start with mpirun -x MASTER_ADDR=<host of rank 0> over several nodes"
                raise ConfigError(f"""{name} is not set,
                    but WORLD_SIZE={self.variables.get("WORLD_SIZE")}: {start}""")
        port = self.variables["MASTER_PORT"]
        if not is_port(port):
            raise ConfigError(f"""MASTER_PORT={port}:
                must be a port from 1 to 65535, and the same on every rank""")
        return self.variables["MASTER_ADDR"], int(port)


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Find the launcher: RANK and WORLD_SIZE (torchrun, or set by hand), then mpirun, then srun.

    Without any of them this is a single process.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _by_variables(environment)
    has_step = "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment  # no batch script
    first = environment.get("SLURM_PROCID", "0")
    if first != "0" and not has_step:
        raise _missing("SLURM_STEP_ID", f"SLURM_PROCID={first}")
    for names in (_OPEN_MPI, _MPICH, _MVAPICH):
        # srun sets PMI's too; mpirun of MPICH and of Intel MPI starts its processes with srun
        is_srun = has_step and names == _MPICH and "MPI_LOCALNRANKS" not in environment
        present_names = [name for name in names[:2] if name in environment]
        if len(present_names) == 2 and not is_srun:
            return _by_mpirun(environment, names)
        if len(present_names) == 1 and not has_step:
            (other,) = {*names[:2]} - {*present_names}
            raise _missing(other, f"{present_names[0]}={environment[present_names[0]]}")
    return _by_srun(environment) if has_step else Launcher("python", {})


def _by_variables(environment: Mapping[str, str]) -> Launcher:
    variables = {name: environment[name] for name in (*RANKS, *MASTER) if name in environment}
    if "TORCHELASTIC_RUN_ID" not in environment:
        return Launcher("hand", variables)
    job = f"torchrun:{environment['TORCHELASTIC_RUN_ID']}"
    if "SLURM_JOB_ID" in environment:
        job = f"slurm:{environment['SLURM_JOB_ID']}"
    requeues = _count(environment, "SLURM_RESTART_COUNT")  # a requeue starts a new torchrun
    attempt = _count(environment, "TORCHELASTIC_RESTART_COUNT") + requeues
    name = environment.get(MARK, "torchrun")
    return Launcher(name, variables, job, attempt, requeues, _name_agent(environment))


def _name_agent(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Name torchrun's agent by its log directory: new for each launch, kept over restarts.

    The run id is not unique: several launches may have the same. Empty with --log-dir=/dev/null.
    `launch=ray` has one for all nodes, whose run id is new.
    """
    if environment.get(MARK) == "ray":
        return (environment["TORCHELASTIC_RUN_ID"],)
    error_file = Path(environment.get("TORCHELASTIC_ERROR_FILE", ""))
    directory = error_file.parts[:-3]  # <directory>/attempt_<number>/<local rank>/error.json
    name = f"{socket.gethostname()}:{'/'.join(directory)}"
    return (f"{zlib.crc32(name.encode()):08x}",) if directory else ()


def _by_mpirun(environment: Mapping[str, str], names: list[str]) -> Launcher:
    pairs = zip(RANKS, names, strict=False)  # the first four of RANKS
    variables = {own: environment[name] for own, name in pairs if name in environment}
    job = environment.get("PMIX_NAMESPACE") or environment.get("PMI_JOBID") or ""
    size = variables["WORLD_SIZE"]
    if variables.get("LOCAL_WORLD_SIZE", size) == size:
        variables["MASTER_ADDR"] = "127.0.0.1"
        key = job or str(os.getppid())
    else:
        key = job.split("@")[0] or environment.get("MASTER_ADDR", "")
    variables["MASTER_PORT"] = _port_of(f"mpi:{key}")
    own = dict(zip(RANKS, names, strict=False))
    return Launcher("mpirun", variables | _given_master(environment), names=own)


def _by_srun(environment: Mapping[str, str]) -> Launcher:
    job = f"slurm:{_read(environment, 'SLURM_JOB_ID')[1]}"
    counts_name, counts_text = _read(
        environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"
    )
    tasks = expand_counts(counts_text, counts_name)
    node = _count(environment, "SLURM_NODEID")
    if node >= len(tasks):
        raise ConfigError(f"""SLURM_NODEID={node}:
            must be below the {len(tasks)} nodes of {counts_name}={counts_text}; start with srun""")
    size_name, size_text = _read(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size_text,
        "LOCAL_RANK": _read(environment, "SLURM_LOCALID")[1],
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(tasks)),
    }
    own = (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", size_name), ("LOCAL_RANK", "SLURM_LOCALID"))
    names = {**dict(own), "LOCAL_WORLD_SIZE": counts_name, "GROUP_RANK": "SLURM_NODEID"}
    master = _given_master(environment)
    if "MASTER_ADDR" not in master and variables["WORLD_SIZE"] != "1":
        nodes = _read(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")[1]
        master["MASTER_ADDR"] = _address_of(expand_hosts(nodes)[0])
    reserved = re.split("[-,]", environment.get("SLURM_STEP_RESV_PORTS", ""))  # srun --resv-ports
    port = reserved[0] or _port_of(f"{job}.{environment['SLURM_STEP_ID']}")
    variables |= {"MASTER_PORT": port} | master
    requeues = _count(environment, "SLURM_RESTART_COUNT")
    return Launcher("srun", variables, job, requeues, requeues, names=names)


def _read(environment: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Return (name, value) of the first variable that is set. Raises ConfigError for none."""
    for name in names:
        if environment.get(name):
            return name, environment[name]
    raise _missing(names[-1], f"SLURM_PROCID={environment['SLURM_PROCID']}")


def _missing(name: str, other: str) -> ConfigError:
    return ConfigError(f"""{name} is not set, but {other}:
        start with srun, mpirun or torchrun, or unset the variables of the launcher""")


def requeue(say: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> None:
    """Requeue this job with SLURM, if it is a SLURM job; call `say` with a line before.

    SLURM then ends srun, scontrol and this process, in any order. So a later line can be lost,
    and an scontrol that was ended by a signal has succeeded.
    """
    job = environment.get("SLURM_JOB_ID", "")
    scontrol = shutil.which("scontrol")
    if not job:
        return
    if not re.fullmatch(r"\d+", job) or scontrol is None:
        say(f"not requeued: SLURM_JOB_ID={job!r}, and scontrol is {scontrol or 'not found'}")
        return
    say(f"requeueing SLURM job {job}")
    words = [str(Path(scontrol).absolute()), "requeue", job]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"SLURM job {job} not requeued: {error}")
        return
    if done.returncode > 0:
        say(f"SLURM job {job} not requeued: {done.stderr.strip()}")


def record_failure(line: str, is_of_others: bool) -> None:
    """Write why this rank failed where torchrun looks for it: its last lines then have the reason.

    As root cause it shows the earliest rank. One that only lost another rank `is_of_others`.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    facts = {"py_callstack": line, "timestamp": str(int(time.time()) + is_of_others)}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": facts}}))


def expand_hosts(text: str) -> list[str]:
    """Expand SLURM's list: `gpu-a[03-07,12],login1` is seven hosts; several brackets multiply.

    Raises ConfigError for any other string.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = re.findall(r"([^\[]+)|\[([^\]]*)\]", part)
        choices = [[name] if name else _expand_numbers(ranges, text) for name, ranges in pieces]
        if prod(map(len, choices)) > MOST_HOSTS:
            raise ConfigError(f"SLURM_STEP_NODELIST={text}: must be at most {MOST_HOSTS:,} hosts")
        hosts += map("".join, itertools.product(*choices))
    if not hosts:
        raise ConfigError(f"SLURM_STEP_NODELIST={text}: must be a list of hosts, as in n[1-3,7]")
    return hosts


def _expand_numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        size = int(match[2] or match[1]) - int(match[1]) + 1 if match else 0
        if match is None or not 0 < size <= MOST_HOSTS:
            raise ConfigError(f"""SLURM_STEP_NODELIST={text}:
                [{ranges}] must be numbers and ranges, as in [03-07,12]""")
        first, last = match[1], match[2] or match[1]
        numbers += [
            f"{host_number:0{len(first)}d}" for host_number in range(int(first), int(last) + 1)
        ]
    return numbers


def expand_counts(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Expand SLURM's tasks per node: `2(x3),1` is 2, 2, 2, 1. Raises ConfigError for others."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if match is None:
            raise ConfigError(f"{name}={text}: must be counts, as in 2(x3),1; start with srun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


@cache
def _address_of(node: str) -> str:
    """Return the node's name if it resolves, else the address that SLURM has for it."""
    with suppress(OSError, ValueError):  # ValueError: a label that is too long
        socket.getaddrinfo(node, None)
        return node
    if (scontrol := shutil.which("scontrol")) and re.fullmatch(r"[\w.-]+", node):
        words = [scontrol, "show", "node", node]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(words, capture_output=True, text=True, timeout=10)  # noqa: S603
            if address := re.search(r"NodeAddr=(\S+)", done.stdout):
                return address[1]
    raise ConfigError(f"""the node {node} of rank 0 does not resolve to an address;
        set MASTER_ADDR to an address that all nodes reach""")


def _given_master(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in MASTER if environment.get(name)}


def _port_of(text: str) -> str:
    """Return a port that is the same on every rank, and differs between jobs."""
    return str(_PORTS[zlib.crc32(text.encode()) % len(_PORTS)])


def _count(environment: Mapping[str, str], name: str) -> int:
    count = environment.get(name, "0")
    return int(count) if _is_count(count) else 0


def _is_count(text: str) -> bool:
    """Return True for an integer that a launcher can mean; int refuses very long ones."""
    return text.isascii() and text.isdecimal() and len(text) < 10
