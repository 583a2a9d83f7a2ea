"""Who started this process: torchrun, srun or mpirun, each by its own variables, told in torchrun's. Without torch."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainer.config.rules import is_port
from trainer.errors import ConfigError

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
MARK = "LOCKSTEP_LAUNCH"  # set for the ranks that `launch=elastic` and `launch=spawn` start
CODES = "LOCKSTEP_CODES"  # for the same: a file to which each rank adds its exit code; torchrun's engine flattens them
# Open MPI; MPICH and Intel MPI; MVAPICH: rank, size, local rank, local size
_MPI = (
    *(
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    *(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),),
    *(
        (
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
)
_PORTS = range(20000, 32000)  # below those that systems hand out by themselves


@dataclass(frozen=True)
class Launcher:
    """`variables` are torchrun's, as far as known; `job` is the same for all attempts of one launch, None by hand;
    `attempt` counts how often the launcher has started it anew, `requeues` how often SLURM has of those; `starters`
    are torchrun's processes, that of this host, and those of all ranks once they have met."""

    name: str
    variables: Mapping[str, str]
    job: str | None = None
    attempt: int = 0
    requeues: int = 0
    starters: tuple[str, ...] = ()

    def place(self) -> tuple[int, int, int, int, int, int]:
        """(rank, local rank, node rank, world size, local world size, nodes), as `World` has them.

        Raises ConfigError for a variable that is missing beside another, no whole number, or out of range.
        """
        given = self.variables
        if "RANK" not in given and "WORLD_SIZE" not in given:
            return 0, 0, 0, 1, 1, 1
        size = _whole(given, "WORLD_SIZE", 1, None)
        rank = _whole(given, "RANK", 0, size - 1)
        local_size = _whole(given, "LOCAL_WORLD_SIZE", 1, size, default=size)
        local_rank = _whole(given, "LOCAL_RANK", 0, local_size - 1, default=rank % local_size)
        nodes = _whole(given, "GROUP_WORLD_SIZE", 1, None, default=-(-size // local_size))
        node = _whole(given, "GROUP_RANK", 0, nodes - 1, default=rank // local_size)
        return rank, local_rank, node, size, local_size, nodes

    @property
    def master(self) -> tuple[str, int]:
        """(host, port) where rank 0's store is. Raises ConfigError for what is missing or no port."""
        for name in MASTER:
            if not self.variables.get(name):
                advice = {
                    "mpirun": "with mpirun over several nodes, mpirun -x MASTER_ADDR=<host of rank 0>"
                }
                start = advice.get(self.name, "start with torchrun, or set it to rank 0's")
                raise ConfigError(
                    f"{name} is not set, but WORLD_SIZE={self.variables.get('WORLD_SIZE')}: {start}"
                )
        host, port = (self.variables[name] for name in MASTER)
        if not is_port(port):
            raise ConfigError(
                f"MASTER_PORT={port}: must be a port from 1 to 65535, and the same on every rank"
            )
        return host, int(port)


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """RANK and WORLD_SIZE win (torchrun, or by hand), then mpirun, then srun; else this process is alone."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _by_variables(environment)
    names = next(
        (names for names in _MPI if names[0] in environment and names[1] in environment), None
    )
    is_step = (
        "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment
    )  # not the batch script itself
    is_hydra = (
        "MPI_LOCALNRANKS" in environment
    )  # MPICH's and Intel's mpirun, which start their processes by srun
    if names is not None and (
        is_hydra or not (is_step and names[0] == "PMI_RANK")
    ):  # srun sets PMI's too
        return _by_mpirun(environment, names)
    return _by_srun(environment) if is_step else Launcher("python", {})


def _by_variables(environment: Mapping[str, str]) -> Launcher:
    variables = {name: environment[name] for name in (*RANKS, *MASTER) if name in environment}
    if "TORCHELASTIC_RUN_ID" not in environment:
        return Launcher("hand", variables)
    run, name = environment["TORCHELASTIC_RUN_ID"], environment.get(MARK, "torchrun")
    requeues = _count(environment, "SLURM_RESTART_COUNT")  # a requeue starts torchrun anew
    attempt = _count(environment, "TORCHELASTIC_RESTART_COUNT") + requeues
    job = (
        f"slurm:{environment['SLURM_JOB_ID']}"
        if "SLURM_JOB_ID" in environment
        else f"torchrun:{run}"
    )
    return Launcher(name, variables, job, attempt, requeues, (_starter(),))


def _starter() -> str:
    """torchrun's process: the nearest above that was not told of a launch itself, as a wrapper script is."""
    process, began = str(os.getppid()), ""
    with suppress(OSError, IndexError):
        while b"TORCHELASTIC_RUN_ID=" in Path("/proc", process, "environ").read_bytes():
            process = _stat(process)[1]
        began = _stat(process)[
            19
        ]  # a process id comes again; with the time of its start it does not
    return f"{zlib.crc32(f'{socket.gethostname()}:{process}:{began}'.encode()):08x}"


def _stat(process: str) -> list[str]:
    return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()


def _by_mpirun(environment: Mapping[str, str], names: tuple[str, ...]) -> Launcher:
    found = dict(
        zip(
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            map(environment.get, names),
            strict=True,
        )
    )
    variables = {name: value for name, value in found.items() if value is not None}
    job = environment.get("PMIX_NAMESPACE") or environment.get("PMI_JOBID") or ""
    if variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"]) == variables["WORLD_SIZE"]:
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": _port_of(f"mpi:{job or os.getppid()}"),
        }
    else:
        variables["MASTER_PORT"] = _port_of(
            f"mpi:{job.split('@')[0] or environment.get('MASTER_ADDR')}"
        )
    return Launcher("mpirun", variables | _given_master(environment))


def _by_srun(environment: Mapping[str, str]) -> Launcher:
    step = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    node = _count(environment, "SLURM_NODEID")
    tasks = expand_counts(
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]
    )
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(tasks)),
    }
    given = _given_master(environment)
    if "MASTER_ADDR" not in given and variables["WORLD_SIZE"] != "1":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        given["MASTER_ADDR"] = _address_of(expand_hosts(nodes)[0])
    reserved = environment.get("SLURM_STEP_RESV_PORTS", "")  # srun --resv-ports
    given.setdefault("MASTER_PORT", re.split("[-,]", reserved)[0] or _port_of(f"slurm:{step}"))
    job, requeues = (
        f"slurm:{environment['SLURM_JOB_ID']}",
        _count(environment, "SLURM_RESTART_COUNT"),
    )
    return Launcher("srun", variables | given, job, requeues, requeues)


def requeue(environment: Mapping[str, str] = os.environ) -> str:
    """Have SLURM end this job now and start it again; what came of it, in a line. Empty where there is no job."""
    job, scontrol = environment.get("SLURM_JOB_ID", ""), shutil.which("scontrol")
    if not job:
        return ""
    if not re.fullmatch(r"\d+", job) or scontrol is None:
        return f"not requeued: SLURM_JOB_ID={job!r}, and scontrol is {scontrol or 'not there'}"
    words = [str(Path(scontrol).absolute()), "requeue", job]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"SLURM job {job} not requeued: {error}"
    return f"SLURM job {job} " + (
        f"not requeued: {done.stderr.strip()}" if done.returncode else "is requeued"
    )


def expand_hosts(text: str) -> list[str]:
    """SLURM's compressed list: `gpu-a[03-07,12],login1` names seven hosts; several brackets in a name multiply.

    Raises ConfigError for what is no such list.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for fixed, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            names = [
                name + piece
                for name in names
                for piece in ([fixed] if fixed else _numbers(ranges, text))
            ]
        hosts += names
    if not hosts:
        raise ConfigError(f"SLURM_STEP_NODELIST={text}: must be a list of hosts, as in n[1-3,7]")
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_NODELIST={text}: [{ranges}] must be numbers and ranges, as in [03-07,12]"
            )
        first, last = match[1], match[2] or match[1]
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """SLURM's tasks per node: `2(x3),1` is 2, 2, 2, 1."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


@cache
def _address_of(node: str) -> str:
    """The node's name where it is a host's, else the address that SLURM has for it."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    if (scontrol := shutil.which("scontrol")) and re.fullmatch(r"[\w.-]+", node):
        said = subprocess.run(
            [scontrol, "show", "node", node], capture_output=True, text=True, timeout=10
        )
        if found := re.search(r"NodeAddr=(\S+)", said.stdout):
            return found[1]
    raise ConfigError(
        f"the node {node} of rank 0 has no address here; set MASTER_ADDR to one that all nodes reach"
    )


def _given_master(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in MASTER if environment.get(name)}


def _whole(
    environment: Mapping[str, str],
    name: str,
    low: int,
    high: int | None,
    default: int | None = None,
) -> int:
    given = environment.get(name)
    if given is None:
        if default is None:
            raise ConfigError(
                f"{name} is not set, though its kin is: torchrun sets RANK and WORLD_SIZE together; by hand, set both"
            )
        return default
    if not given.isdecimal() or int(given) < low or (high is not None and int(given) > high):
        raise ConfigError(
            f"{name}={given}: must be a whole number of at least {low}"
            + ("" if high is None else f" and at most {high}")
        )
    return int(given)


def _port_of(text: str) -> str:
    """The same port on every rank; another for every job."""
    return str(_PORTS[zlib.crc32(text.encode()) % len(_PORTS)])


def _count(environment: Mapping[str, str], name: str) -> int:
    given = environment.get(name, "0")
    return int(given) if given.isdecimal() else 0
