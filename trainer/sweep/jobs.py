"""Jobs of a sweep: runs in their own processes or on SLURM, with state and results on disk.

The settings are those of Hydra's submitit launcher (hydra.launcher.nodes, .tasks_per_node,
.timeout_min, ...); submitit itself (the extra `slurm`) passes them to sbatch. Each job is a group
of ranks.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer import Config
from trainer.base.durable_files import replace_file
from trainer.base.errors import STOPPED, ConfigError, RunError, one_line, shortened, visible
from trainer.base.plain_files import read_json
from trainer.base.process import child, invocation
from trainer.base.process.streams import print_table
from trainer.base.process.table import OMP_NUM_THREADS, usable_cores
from trainer.core.api import SIGNALS, LaunchSettings, Lease, build
from trainer.core.api import run_directory as rundir

MOST_JOBS = 2_000
TOO_MANY_JOBS = f"a sweep must have at most {MOST_JOBS:,} jobs; give fewer values"
CLUSTER_NAMES = {"hydra/launcher=submitit_slurm": "slurm", "hydra/launcher=submitit_local": "local"}
QUEUE_ANSWER_S = 60.0  # for squeue
FORGOTTEN = "invalid job id"  # in SLURM's error for a job that ended some minutes ago
_CHOICE = "hydra/launcher="
_PREFIX = "hydra.launcher."
# submitit has these settings for every cluster; the others are named slurm_<name>.
_FOR_ALL = (
    *("name", "timeout_min", "mem_gb"),
    *("nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node"),
)


def cluster_of(words: Sequence[str]) -> str | None:
    """Return "slurm" or "local" if the words choose a launcher of submitit, else None.

    Raises ConfigError for another launcher.
    """
    chosen = [word for word in words if word.startswith(_CHOICE)]
    if not chosen:
        return None
    if chosen[-1] not in CLUSTER_NAMES:
        allowed = "must be submitit_slurm or submitit_local; without it the jobs run here"
        raise ConfigError(f"{chosen[-1]}: {allowed}")
    return CLUSTER_NAMES[chosen[-1]]


def open_executor(cluster: str, folder: Path, words: Sequence[str]) -> Any:
    """Return submitit's executor with the settings `hydra.launcher.*` among the words.

    Raises ConfigError for unknown settings.
    """
    key = f"{_CHOICE}submitit_{cluster}"
    try:
        import submitit
        from omegaconf import OmegaConf
    except ImportError:
        advice = "needs submitit: pip install 'lockstep-trainer[slurm]'"
        raise ConfigError(f"{key}: {advice}") from None
    if unknown := [word for word in words if not word.startswith((_PREFIX, _CHOICE))]:
        allowed = "must be hydra.launcher.* with submitit"
        raise ConfigError(f"{unknown[0]}: {allowed}")
    assignments = [word.removeprefix(_PREFIX) for word in words if word.startswith(_PREFIX)]
    settings: Any = OmegaConf.to_container(OmegaConf.from_dotlist(assignments))
    if cluster == "slurm":
        # The signal at which Lockstep saves and requeues, two minutes before the time limit.
        settings = {"signal_delay_s": 120, **settings}
    python: dict[str, Any] = {}
    if invocation.SCRIPT in os.environ and sys.version_info >= (3, 11):
        # submitit starts its own module, and -m would put the working directory first.
        python = {f"{cluster}_python": f"{shlex.quote(sys.executable)} -P"}
    named = {n if n in _FOR_ALL else f"{cluster}_{n}": value for n, value in settings.items()}
    try:
        executor = submitit.AutoExecutor(folder=str(folder / "%j"), cluster=cluster, **python)
        executor.update_parameters(**named)
    except (NameError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{key}: {one_line(error)[:300]}") from None
    return executor


def submit(executor: Any, words: Sequence[str]) -> str:
    """Submit a job and return its id. Raise ConfigError with the error of sbatch."""
    from submitit.core.utils import FailedJobError

    try:
        return visible(str(executor.submit(_train, list(words)).job_id))
    except FailedJobError as error:
        raise ConfigError(f"{_CHOICE}submitit_slurm: {one_line(error)[:300]}") from None


def find_known(cluster: str, jobs: Sequence[str]) -> set[str]:
    """Return those of the submitted jobs that wait or run.

    Raises RunError if SLURM does not say: a job that is submitted again would run twice.
    """
    if cluster == "local":
        return {job for job in jobs if Path("/proc", job).exists()}
    if not jobs:
        return set()
    squeue = shutil.which("squeue") or "squeue"
    words = [squeue, "--noheader", "--all", "--format=%i", f"--jobs={','.join(jobs)}"]
    # SQUEUE_STATES and the like would leave out jobs
    own = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(  # noqa: S603
            words, capture_output=True, text=True, errors="replace", timeout=QUEUE_ANSWER_S, env=own
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unsure(one_line(error)) from None
    # a job alone that SLURM has forgotten is an error, one of several is left out
    if done.returncode and not (len(jobs) == 1 and FORGOTTEN in done.stderr.lower()):
        raise _unsure(done.stderr.strip() or f"it ended with code {done.returncode}")
    listed = re.findall(r"^\s*(\d+)", done.stdout, re.MULTILINE)
    return {*listed} & {*jobs}


def _unsure(why: str) -> RunError:
    return RunError(f"""squeue did not say which jobs of this sweep still wait or run:
        {shortened(" ".join(why.split()), 300)};
        nothing was submitted; repeat this command later""")


def _train(words: list[str]) -> int:
    """Run as a rank of the job. The process exits in here if training fails."""
    invocation.append_working_directory()
    sys.argv = ["trainer", *words]
    try:
        invocation.run_module()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


JOB_POLL_S = 0.05
MOST_OF_A_JOB_NAME = 80  # characters of a job's values
_STATE_BY_CODE = {0: "done", STOPPED: "stopped"}


@dataclass
class Job:
    """One run of the sweep.

    `state` is waiting, running, done, failed, stopped or submitted. `submitted` is the job id of
    the cluster, `code` the exit code and `value` the best metric.
    """

    number: int
    swept: dict[str, str]
    words: list[str]
    directory: str
    state: str = "waiting"
    code: int | None = None
    value: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    submitted: str = ""

    @classmethod
    def of(
        cls,
        number: int,
        swept: Sequence[str],
        overrides: Sequence[str],
        config: Config,
        config_dirs: Sequence[str],
        sweep: str,
    ) -> Job:
        """Build a job. Its run directory is named by its values, and a digest where these do not
        tell it from all other jobs, so that no job can resume the run of another one.
        """
        values = dict(word.lstrip("+").split("=", 1) for word in swept if "=" in word)
        has_mirror = config.checkpoint.mirror is not None
        words = [word for folder in config_dirs for word in ("--config-dir", folder)]
        words += [word for word in overrides if not word.startswith(("run.name=", "run.resume="))]
        name = config.run.name if "run.name" in values else f"{sweep}-{_name_values(values, words)}"
        words += [f"run.name={name}", f"run.resume={config.run.resume or 'auto'}"]
        words += [f"checkpoint.mirror={config.checkpoint.mirror}/{name}"] if has_mirror else []
        return cls(number, values, words, str(Path(config.run.dir) / config.task.name / str(name)))

    @property
    def label(self) -> str:
        return visible(" ".join(f"{k}={v}" for k, v in self.swept.items()) or "as given")

    def recall(self, record: Mapping[str, Any]) -> None:
        """Restore the state that the previous start of the sweep saved in `record`."""
        self.submitted = str(record.get("submitted", ""))
        self.seconds = record.get("seconds", 0.0)
        self._take_results(rundir.read_exit(Path(self.directory)).get("code", record.get("code")))

    def end(self, code: int) -> None:
        """Read the results of a job that ended; use exit code `code` if it saved none."""
        self._take_results(rundir.read_exit(Path(self.directory)).get("code", self.code or code))

    def begin(self) -> None:
        self.state = "running"

    def finish(self, code: int, seconds: float) -> None:
        self.seconds = seconds
        self._take_results(code)

    def hand_over(self, submitted: str) -> None:
        self.state = "submitted"
        self.submitted = submitted

    def _take_results(self, code: int | None) -> None:
        record = rundir.read_exit(Path(self.directory))
        self.code = code
        self.metrics = record.get("metrics") or {}
        self.value = record.get("best")
        if code is not None:
            self.state = _STATE_BY_CODE.get(code, "failed")


class Sweep:
    """The jobs of a sweep so far, and their files. Only one process at a time runs a sweep."""

    def __init__(self, name: str, config: Config):
        self.name = name
        self.config = config
        self.place = Path(config.run.dir) / "sweeps" / name
        self.jobs: list[Job] = []
        self.is_stopped = False
        self.place.mkdir(parents=True, exist_ok=True)
        self._lease = Lease(self.place)
        self._previous = _read_jobs(self.place)

    def add(self, job: Job) -> None:
        """Add a job, with its state of the previous start."""
        self.jobs.append(job)
        if record := self._previous.get(job.directory):
            job.recall(record)

    def check_own(self, job: Job) -> None:
        """Raise ConfigError if another job or run uses its directory."""
        words = self._previous.get(job.directory, {}).get("words")
        if Path(job.directory).exists() and words != job.words:
            advice = f"{job.directory} is the run of another job; choose another run.name"
            raise ConfigError(f"job {job.number}: {advice}")

    def run(self, jobs: Sequence[Job], num_jobs: int | None = None) -> None:
        """Run the jobs that are not finished, each in its own process, `launch.jobs` at a time.

        A line tells how each ended; `num_jobs` is the number of all jobs, if it is known. Stop
        signals are passed on.
        """
        of = f" of {num_jobs}" if num_jobs else ""
        waiting = []
        for job in jobs:
            if job.state == "done":
                print(f"job {job.number}{of} is finished: {job.label}", flush=True)
            else:
                waiting.append(job)
        free = [*range(self.config.launch.jobs)]
        running: dict[int, _Process] = {}

        def send(signal_number: int) -> None:
            for each in [*running.values()]:
                each.process.send_signal(signal_number)

        with child.signals_passed_on(SIGNALS, send) as received:
            while running or (waiting and not self.is_stopped):
                while waiting and free and not self.is_stopped and not received:
                    job, slot = waiting.pop(0), free.pop(0)
                    running[slot] = _Process.of(job, self.place, slot, self.config.launch)
                    for missed_signal in received:  # while it was started
                        running[slot].process.send_signal(missed_signal)
                    self.record()
                for slot, each in [*running.items()]:
                    if each.has_ended():
                        del running[slot]
                        free = sorted([*free, slot])
                        self._tell_end(each, of)
                self.is_stopped |= bool(received)
                time.sleep(JOB_POLL_S)

    def _tell_end(self, ended: _Process, of: str) -> None:
        """Record how a job ended, and print its line."""
        job = ended.job
        is_over = job.state == "failed" and self.config.launch.on_failed_job == "stop"
        self.is_stopped |= is_over or job.state == "stopped"
        self.record()
        told = f"{self.config.best_metric} {job.value:.4f}" if job.value is not None else ""
        if job.state == "failed":
            told = f"{child.last_words(child.read_end(ended.log))}; its output is in {ended.log}"
        words = ", ".join(filter(None, (job.state, told, f"{job.seconds:.0f} s")))
        print(visible(f"job {job.number}{of} ({job.label}): {words}"), flush=True)

    def ranking(self) -> list[Job]:
        """Return the jobs, best first, those without a value last."""
        sign = 1 if self.config.best_mode == "min" else -1
        return sorted(
            self.jobs,
            key=lambda job: (job.state != "done", job.value is None, sign * (job.value or 0)),
        )

    def record(self) -> None:
        """Write sweep.json and results.csv."""
        jobs = json.dumps([asdict(job) for job in self.jobs], indent=1)
        replace_file(self.place / "sweep.json", jobs + "\n")
        names = sorted({name for job in self.jobs for name in job.metrics})
        keys = list(self.jobs[0].swept)
        staged = self.place / ".results.csv.new"
        with open(staged, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            header = ["job", "state", "code", *keys, "best", *names, "seconds", "directory"]
            writer.writerow(header)
            for job in self.ranking():
                values = [job.swept.get(key) for key in keys]
                metrics = [job.metrics.get(name) for name in names]
                row = (job.number, job.state, job.code, *values, job.value, *metrics)
                writer.writerow([*row, round(job.seconds, 1), job.directory])
        os.replace(staged, self.place / "results.csv")

    def end(self) -> int:
        """Print a table of all jobs. Return 0 if all are done, 1 if some failed, 75 if stopped."""
        best = f"best {self.config.best_metric}"
        columns = ("job", *self.jobs[0].swept, "state", best, "directory")
        rows = []
        for job in self.ranking():
            value = "" if job.value is None else f"{job.value:.4f}"
            rows.append((str(job.number), *job.swept.values(), job.state, value, job.directory))
        print_table(columns, rows)
        print(f"files: {self.place}/results.csv, {self.place}/sweep.json")
        if sum(job.state == "done" for job in self.jobs) > 1:
            words = shlex.join([str(self.place), f"out={self.place}/compare.html"])
            print(invocation.as_started(f"compare with: python -m trainer.show {words}"))
        states = {job.state for job in self.jobs}
        if states == {"done"}:
            return 0
        return 1 if "failed" in states else STOPPED


def _read_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the jobs of the previous start, by directory."""
    try:
        jobs = read_json(folder / "sweep.json")
        records = [{name: value for name, value in job.items() if value != ""} for job in jobs]
        return {build(Job, job).directory: job for job in records}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@dataclass(frozen=True)
class _Process:
    """A job that runs, and the file with its output.

    It has its own session, so that Ctrl-C reaches the sweep only, and only once.
    """

    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    began: float

    @classmethod
    def of(cls, job: Job, folder: Path, slot: int, launch: LaunchSettings) -> _Process:
        """Start a job in one of `launch.jobs` places of this machine."""
        job.begin()
        log = folder / f"job-{job.number}.log"
        with log.open("ab") as file:  # a later start goes on in it
            words = [sys.executable, *invocation.words(), *job.words]
            told = {**os.environ, **_divide_machine(slot, launch)}
            process = child.start(words, stdout=file, stderr=subprocess.STDOUT, env=told)
        return cls(job, process, log, time.monotonic())

    def has_ended(self) -> bool:
        """Return True, and finish the job, if its process has ended."""
        code = self.process.poll()
        if code is not None:
            self.job.finish(code, time.monotonic() - self.began)
        return code is not None


def _divide_machine(slot: int, launch: LaunchSettings) -> dict[str, str]:
    """Return the variables with which a job uses its part of the machine's cores and GPUs."""
    num_slots = launch.jobs
    if num_slots == 1 or launch.name == "ray":  # its ranks run where Ray has room
        return {}
    from trainer.core.api import count_ranks

    told = {}
    if not os.environ.get(OMP_NUM_THREADS, "").strip():
        ranks = 1 if launch.name == "inline" else count_ranks(launch.nproc_per_node or "auto")
        told[OMP_NUM_THREADS] = str(max(1, usable_cores() // (num_slots * ranks)))
    devices = _list_visible_gpus()
    each = len(devices) // num_slots
    if devices:  # with more jobs than GPUs, several share one
        first = slot * each if each else slot % len(devices)
        told["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + max(1, each)])
    return told


def _list_visible_gpus() -> list[str]:
    """Return the GPUs that a process started here sees, as CUDA_VISIBLE_DEVICES names them."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        return [word for word in visible_devices.split(",") if word.strip()]
    from trainer.core.api import accelerator

    return [str(device) for device in range(accelerator.count())]


def _name_values(values: Mapping[str, str], words: Sequence[str]) -> str:
    """Return the values of a job for the name of its directory: `lr0.01-seed1`."""
    plain = "-".join(key.rpartition(".")[2] + value for key, value in values.items())
    name = re.sub(r"[^\w.-]+", "_", plain)[:MOST_OF_A_JOB_NAME]
    if plain and name == plain and len({key.rpartition(".")[2] for key in values}) == len(values):
        return name
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:6]
    return f"{name}-{digest}".lstrip("-")
