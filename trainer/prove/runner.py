"""Runs of the user's commands with the recorder, also killed and resumed, and their comparison."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.base.errors import ConfigError, counted, shortened, visible
from trainer.base.process.child import end, read_end, start
from trainer.prove.comparison import REST, Deviation, PairComparison, compare, rest_apart
from trainer.prove.end_view import kill_left
from trainer.prove.kept_output import OutputKeeper
from trainer.prove.merging import CommandHistory, RankHistory
from trainer.prove.private_view import View, Views, WrittenFile
from trainer.prove.rank_reading import find_records, open_histories
from trainer.prove.reasons import explain, explain_resume, find_partly_restored
from trainer.prove.rounding import Bounds, compare_tensors, measure

STARTUP = Path(__file__).with_name("injected")
VARIABLE = "LOCKSTEP_PROVE"
KILLED = "killed"  # file that the recorder makes at the step of the kill
LOADED = "loaded"  # file of the recorder, made as it is loaded
SHOWN_LINES = 12  # of a failed command
TRACEBACK_LINES = 24
# The shell takes such a path as it is, in quotes or not.
PLAIN_PATH = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
FLAGS = r"[abd-ln-zA-Z]"  # -c and -m end Python's own
ISOLATED = re.compile(rf"\bpython[\d.]*(\s+-[XW]\s*\S+|\s+-{FLAGS}+)*?\s+-{FLAGS}*[IES]")
AGENT = re.compile(r"^[WE]\d{4} \S+ \d+ torch/distributed/elastic/multiprocessing/api", re.M)
GRACE_S = 5.0  # for the processes of a command that is ended
SILENCE_S = 60.0  # after the end of a rank, while others neither print nor record: they wait for it
POLL_S = 0.05


@dataclass(frozen=True)
class Recording:
    """How a command is recorded. `kill` is the number of steps after which it is killed."""

    steps: int
    dtype: str  # fp64 or native
    kill: int | None = None
    is_perturbed: bool = False  # first weights changed by their last bit, other thread count

    def variables(self, folder: Path, view: View | None = None) -> dict[str, str]:
        """Return the environment of a recorded command."""
        settings = {"folder": str(folder), "steps": self.steps, "dtype": self.dtype}
        settings |= {"kill": self.kill, "perturb": self.is_perturbed}
        settings["copies"] = str(view.copies) if view else None
        settings["started_in"] = str(Path.cwd())
        settings["threads"] = 2 if self.is_perturbed else None
        paths = [str(STARTUP), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        programs = [*os.environ.get("PATH", "").split(os.pathsep), str(Path(sys.executable).parent)]
        return {
            **os.environ,
            VARIABLE: json.dumps(settings),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PATH": os.pathsep.join(programs),
            "PYTHONUNBUFFERED": "1",
        }


@dataclass(frozen=True)
class CommandRun:
    """A command that has ended: its records are in `folder`, its output in output.txt.

    `stopped` says why we ended it; "" if it ended by itself, or was killed at a step.
    """

    command: str
    folder: Path
    code: int
    stopped: str
    records: list[Path] = field(default_factory=list)
    written: list[WrittenFile] = field(default_factory=list)
    is_full: bool = False  # the disk that takes what it writes

    @property
    def is_killed(self) -> bool:
        """Return True if the command came to the step at which it was to be killed."""
        return (self.folder / KILLED).exists()

    @property
    def is_complete(self) -> bool:
        """Return True if each rank with records came to the last step that is compared."""
        ranks = {each.name.split("-")[0].removeprefix("rank") for each in self.records}
        done = {each.name.removeprefix("done-") for each in self.folder.glob("done-*")}
        return bool(ranks) and ranks <= done

    @property
    def has_ended_whole(self) -> bool:
        """Return True if a rank came to the last step that is compared, or to its normal end."""
        return any(any(self.folder.glob(f"{each}-*")) for each in ("done", "ended"))

    @property
    def has_failed(self) -> bool:
        """Return True if the command ended by itself, and no rank made all steps successfully."""
        is_done = any(self.folder.glob("done-*")) or (self.code == 0 and self.records)
        return not self.stopped and not is_done

    def last_lines(self) -> str:
        """Return the traceback of the first rank that failed, or else the end of the output.

        The outputs of ranks are mixed, and a launcher adds its own report of the failure.
        """
        errors = sorted(self.folder.glob("error-*.txt"))
        of_ranks = [each for each in errors if not each.stem.endswith("-launcher")]
        if errors:
            text = read_end((of_ranks or errors)[0])
            return _shorten(text.splitlines()[-TRACEBACK_LINES:])
        text = read_end(self.folder / "output.txt")
        text = re.split(AGENT, text, maxsplit=1)[0] or text
        return _shorten(text.splitlines()[-SHOWN_LINES:])

    def check(self) -> None:
        """Raise ConfigError for a command that failed, or that made no optimizer step."""
        what = ""
        if not (self.folder / "output.txt").is_file():
            what = f"the records in {self.folder} are gone; the command may not delete that folder"
        elif not self.records and ISOLATED.search(self.command):
            what = "python -I, -E and -S load no recorder; run it without them"
        elif self.stopped and not self.records:
            advice = "read its last lines above, or give limit=SECONDS"
            what = f"{self.stopped} and made no step; {advice}"
        elif self.code != 0 and self.has_failed:
            what = f"failed with code {self.code}; read its last lines above"
        elif not self.records:
            what = self._explain_no_records()
        if reasons := sorted(self.folder.glob("unwritten-*")):
            why = os.strerror(int(reasons[0].name.split("-")[1]))
            advice = f"free space in {self.folder.parent}, or raise the limit (ulimit -f)"
            what = f"its records could not be written ({why}); {advice}"
        elif what and self.is_full:
            what = f"{what}; the disk that takes its writes is full: set TMPDIR to another one"
        if what:
            print(self.last_lines(), file=sys.stderr)
            raise ConfigError(f"{self.command}: {what}")

    def _explain_no_records(self) -> str:
        if not (self.folder / LOADED).exists():
            why = "a Python with -I, -E or -S, or without PYTHONPATH, shuts it out"
            return f"no Python process of it loaded the recorder: {why}; run it without that"
        why = "in a Python process that keeps PYTHONPATH (no -I, -E or -S, no cleared environment)"
        return f"must step an optimizer of torch.optim, {why}; read its last lines above"


def _shorten(lines: Sequence[str]) -> str:
    return "\n".join(shortened(visible(line)) for line in lines)


@contextlib.contextmanager
def plain_path(folder: Path) -> Iterator[str]:
    """Yield a path to a folder that the shell takes as it is, wherever it is in a command.

    A name with spaces or other signs that the shell interprets is reached through a link.
    """
    if PLAIN_PATH.fullmatch(str(folder)):
        yield str(folder)
        return
    root = tempfile.gettempdir()
    root = root if PLAIN_PATH.fullmatch(root) else "/tmp"  # noqa: S108  # mkdtemp makes its own
    link_folder = Path(tempfile.mkdtemp(prefix="lockstep-dir-", dir=root))
    link = link_folder / "dir"
    link.symlink_to(folder, target_is_directory=True)
    try:
        yield str(link)
    finally:
        link.unlink(missing_ok=True)
        link_folder.rmdir()


def run_command(
    command: str,
    folder: Path,
    recording: Recording,
    limit_s: float,
    work: Path,
    view: View | None = None,
) -> CommandRun:
    """Run a command in the shell with its output in a file, and return how it ended.

    `{dir}` in the command is the folder `work`. What it writes elsewhere goes to the view.
    """
    folder.mkdir(parents=True)
    work.mkdir(exist_ok=True)
    environment = recording.variables(folder.absolute(), view)
    first = view.words(folder.parent, environment) if view else []
    stopped = ""
    mark = json.dumps(str(folder.absolute())).encode()  # in the environment of its processes
    with plain_path(work) as work_path:
        output = OutputKeeper(folder / "output.txt")
        try:
            process = start(
                [*first, "/bin/sh", "-c", command.replace("{dir}", work_path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output.writer,
                stderr=subprocess.STDOUT,
            )
            output.start()
            try:
                stopped = _wait(process, folder, limit_s)
            finally:
                end(process, GRACE_S, is_asked=not (folder / KILLED).exists())
                kill_left((), [mark])  # torchrun's ranks have sessions of their own
                if view:
                    view.end()
        finally:
            output.close()
    done = CommandRun(command, folder, process.returncode, stopped, find_records(folder))
    return replace(done, written=view.list_written(), is_full=view.is_full()) if view else done


def _wait(process: subprocess.Popen[bytes], folder: Path, limit_s: float) -> str:
    """Wait until a command ends, comes to its kill, or must be ended; return why it must be."""
    limit = time.monotonic() + limit_s
    while not (folder / KILLED).exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return ""
        if time.monotonic() > limit:
            return f"did not end within {limit_s:.0f} s"
        if not folder.is_dir():
            return "deleted the folder of its records"
        latest = _last_change(folder)
        if any(folder.glob("ended-*")) and time.time() - latest > SILENCE_S:
            return f"did nothing for {SILENCE_S:.0f} s after one of its ranks had ended,"
    return ""


def _last_change(folder: Path) -> float:
    """Return when a file in a folder was last written; files may go meanwhile."""
    times = [0.0]
    for each in folder.glob("*"):
        with contextlib.suppress(OSError):
            times.append(each.stat().st_mtime)
    return max(times)


@dataclass
class Bench:
    """Where commands are run: `folder` of the records, number of steps, limit for a command."""

    folder: Path
    views: Views
    steps: int
    dtype: str  # auto, fp64 or native
    limit_s: float
    tell: Callable[[str], None]

    def run(
        self,
        name: str,
        command: str,
        dtype: str,
        is_perturbed: bool = False,
        work: Path | None = None,
        kill: int | None = None,
        view: View | None = None,
    ) -> CommandRun:
        """Run a command and return how it ended; `work` is {dir} in it, `kill` a step.

        It gets a new view, unless it shall find what another command wrote in its `view`.
        """
        self.tell(f"running {name} in {dtype}: {command}")
        recording = Recording(self.steps, dtype, kill, is_perturbed)
        records_folder = (self.folder / f"{name}-{dtype}".replace(" ", "-")).absolute()
        work = work or records_folder.with_name(f"files-{records_folder.name}")
        view = view or self.views.make()
        done = run_command(command, records_folder, recording, self.limit_s, work, view)
        if problem := view.read_problem(done.code):
            view.give_up(problem)
            self.views.problem = problem
            shutil.rmtree(records_folder)
            done = run_command(command, records_folder, recording, self.limit_s, work, view)
        return done

    def read(self, name: str, done: CommandRun) -> CommandHistory:
        """Return the history of a run. Raises ConfigError if it failed.

        A run whose ranks made different numbers of steps fails because of that: it is compared.
        """
        ranks = open_histories(done.records)
        if not have_uneven_steps(ranks):
            done.check()
        history = CommandHistory.of(name, done.command, ranks)
        history.written = done.written
        count = len(history.steps)
        if (done.code or done.stopped) and not done.is_complete:
            how = done.stopped or f"failed with code {done.code}"
            history.note = f"{name} {how} and was ended" if done.stopped else f"{name} {how}"
            history.is_whole = have_made_steps(ranks, self.steps)
            self.tell(f"{done.last_lines()}\n{history.note}; the steps that it made are compared")
        elif not (done.has_ended_whole or have_made_steps(ranks, self.steps)):
            raise ConfigError(f"""{done.command}: ended abruptly after {counted(count, "step")} of
                {self.steps}, by os._exit, or a signal that its launcher took for success; give
                steps={count}""")
        return history


def have_made_steps(ranks: Sequence[RankHistory], steps: int) -> bool:
    """Return True if an optimizer of each rank has made so many steps."""
    return all(any(each.number >= steps for each in rank.steps) for rank in ranks)


def have_uneven_steps(ranks: Sequence[RankHistory]) -> bool:
    """Return True if every rank of a command has records, and they began other numbers of steps."""
    lengths = {rank.num_begun for rank in ranks}
    return len(lengths) > 1 and len(ranks) == ranks[0].world_size


def prove_pair(bench: Bench, first: str, second: str) -> PairComparison:
    """Return how two commands differ."""
    dtype = "native" if bench.dtype == "native" else "fp64"
    done = bench.run("A", first, dtype)
    can_retry = bench.dtype == "auto"
    if can_retry and done.has_failed and done.code:
        return prove_pair(_native(bench, "A"), first, second)
    one = bench.read("A", done)
    other_run = bench.run("B", second, dtype)
    is_uneven = have_uneven_steps(open_histories(other_run.records))
    if other_run.has_failed and other_run.code and not is_uneven and can_retry:
        return prove_pair(_native(bench, "B"), first, second)
    other = bench.read("B", other_run)
    if not (one.is_whole or other.is_whole) and len(one.steps) == len(other.steps):
        count = len(one.steps)
        raise ConfigError(f"""cannot tell: {one.note}, {other.note}, both after
            {counted(count, "step")}; give steps={count}, or limit=SECONDS""")
    bounds = find_bounds(bench, one, dtype)
    return explain(compare(one, other, bounds))


def _native(bench: Bench, name: str) -> Bench:
    bench.tell(f"{name} fails in fp64, so the script's own precision is used")
    return replace(bench, dtype="native")


def find_bounds(bench: Bench, one: CommandHistory, dtype: str) -> Bounds:
    """Return the bounds of rounding: known in fp64, otherwise measured by a repeat of A."""
    kinds = {k for rank in one.ranks for a in rank.optimizers.values() for k in a["dtypes"]}
    losses = {b["dtype"] for r in one.ranks for s in r.steps for b in s.backwards}
    if dtype == "fp64" and kinds | losses <= {"torch.float64"}:
        return Bounds()
    repeat = bench.run("A again", one.command, dtype, is_perturbed=True)
    return measure(one, bench.read("A again", repeat))


def prove_resume(bench: Bench, command: str, resume: str, kill: int) -> PairComparison:
    """Return how a resumed run differs from one that was not killed.

    The killed run comes first, so that it finds no checkpoint of the reference.
    """
    dtype = "native" if bench.dtype == "native" else "fp64"
    work = bench.folder.absolute() / "files-killed"
    view = bench.views.make()
    killed = bench.run("A killed", command, dtype, work=work, kill=kill, view=view)
    if killed.has_failed and not killed.is_killed and bench.dtype == "auto":
        dtype = "native"
        view = bench.views.make()
        killed = bench.run("A killed", command, dtype, work=work, kill=kill, view=view)
    if not killed.is_killed:
        killed.check()
        bench.tell(killed.last_lines())
        what = f"{killed.stopped or 'ended with code 0'} before {counted(kill, 'step')} were made"
        raise ConfigError(f"{command}: {what}; give kill=STEP, or limit=SECONDS")
    resumed = bench.read("resumed", bench.run("A resumed", resume, dtype, work=work, view=view))
    one = bench.read("A", bench.run("A", command, dtype, work=work.with_name("files")))
    bounds = find_bounds(bench, one, dtype)
    return _align(one, resumed, bounds, kill, killed)


def _align(
    one: CommandHistory, resumed: CommandHistory, bounds: Bounds, kill: int, killed: CommandRun
) -> PairComparison:
    """Compare from the step on whose weights the resumed run has at its start."""
    begun = CommandHistory.of("killed", killed.command, open_histories(killed.records))
    first = one.initial[0]
    if compare_tensors(first, begun.initial[0], bounds.weight_floor)[0] > max(bounds.least, 1e-6):
        what = "starts with other weights each time, or found a checkpoint of another run"
        advice = "set its seed, and give it {dir} as the folder of its checkpoints"
        raise ConfigError(f"{one.command}: {what}; {advice}")
    states = [first, *(each.weights for each in one.steps[: kill + 1])]
    apart = [compare_tensors(each, resumed.initial[0], bounds.weight_floor)[0] for each in states]
    step = min(range(len(apart)), key=lambda each: apart[each])
    is_whole = not apart[step] > max(bounds.least, 1e-6 if bounds.noise else 0.0)
    partly = None if is_whole else find_partly_restored(one, resumed, kill, bounds.least)
    step = partly.place if partly else step
    reference = replace(one, steps=one.steps[step:], initial={**one.initial, 0: states[step]})
    aligned = compare(reference, resumed, bounds)
    aligned.worst["evaluation"] = 0.0
    aligned.deviations = [
        replace(each, reason=explain_resume(aligned, each, one, step))
        for each in aligned.deviations
        if each.kind not in ("evaluation", "steps")
    ]
    if partly:
        aligned.deviations = [partly]
    elif not is_whole:
        where = f"the weights at the resume are those of no step (nearest: after step {step})"
        aligned.deviations = [Deviation("initial weights", 0, where, "they are not all restored")]
    elif step == 0:
        where = "the resumed command starts with the first weights"
        aligned.deviations = [Deviation("initial weights", 0, where, "no checkpoint was loaded")]
    else:
        repeats = f"; {counted(kill - step, 'step')} repeated" if step < kill else ""
        aligned.notes.append(f"killed after step {kill}, resumed after step {step}{repeats}")
        if resumed.first_rank in rest_apart(aligned, 0) and not aligned.deviations:
            aligned.deviations = [Deviation("rest", 0, f"{REST} differ", "they are not restored")]
    return aligned
