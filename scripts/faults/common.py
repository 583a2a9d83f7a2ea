"""Shared parts of the rows: the outcome of a row, checkpoint content that identifies its step, and
strace attached to a forked child."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness.internals import checkpoint
from harness.stored import Shards, content_of, save
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from trainer.base.errors import RunError
from trainer.core.strategy.tensor_shards import Shard

REPOSITORY = Path(__file__).resolve().parents[2]
FACTS: dict[str, Any] = {"metrics": {"eval/loss": None}, "config": {"run.seed": 3}}


@dataclass
class Row:
    """One line of the table."""

    name: str
    asked: int
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    detail: str = ""
    skipped: str = ""
    seed: int = 0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.failures and (bool(self.skipped) or self.passed == self.asked)

    def note(self, case: str, problem: str | None) -> None:
        """Count one case: passed if `problem` is None, else failed."""
        if problem is None:
            self.passed += 1
        else:
            self.failures.append(f"{case}: {problem}")
            print(f"FAILED {self.name}: {case}: {problem}", file=sys.stderr, flush=True)


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def random_of(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  # draws cases, not secrets


# Checkpoints whose content identifies the save ----------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Number of ranks that write a part of one save, numbers in a part, and older checkpoints."""

    num_parts: int
    size: int
    num_older: int = 1

    def content(self, step: int) -> dict[str, Any]:
        weight = torch.arange(self.num_parts * self.size, dtype=torch.float32) * step
        kinds = {"model": {"weight": weight}, "optimizer": {}, "ema": {}, "buffer": {}}
        return {**kinds, "training": {"seen": [step, None]}}

    def parts(self, step: int) -> list[Shards]:
        """Return the shards of each rank."""
        whole = self.content(step)["model"]["weight"]
        found = []
        for first in range(0, len(whole), self.size):
            part = whole[first : first + self.size].clone()
            found.append({"model": {"weight": Shard(part, tuple(whole.shape), (first,), True)}})
        return found

    def save(self, root: Path, step: int) -> Path:
        """Save as the ranks of a run do. Raises OSError for an error of the disk."""
        try:
            return save(root, step, self.parts(step), self.content(step)["training"], FACTS)
        except RunError as error:
            raise OSError(str(error)) from None

    def step_of(self, loaded: checkpoint.CheckpointFiles | None) -> int | None:
        """Return the step; raise AssertionError unless the content is exactly what was saved."""
        if loaded is None:
            return None
        step = loaded.manifest["step"]
        assert same(content_of(loaded), self.content(step)), (
            f"step {step} is mixed: it has content that was not saved for it"
        )
        return step


def same(one: Any, other: Any) -> bool:
    """Return True if both are equal bit for bit, including types and structure."""
    (ours, shape), (theirs, other_shape) = tree_flatten(one), tree_flatten(other)
    return shape == other_shape and all(_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and bool(
            (one.contiguous().view(-1).view(torch.uint8) == _bytes(other)).all()
        )
    return type(one) is type(other) and (one == other or one != one)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# strace on a forked child -------------------------------------------------------------------------


def without_strace() -> str:
    """Return the reason why strace cannot be used here; "" if it can."""
    if shutil.which("strace") is None and os.geteuid() == 0 and (apt := shutil.which("apt-get")):
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [apt, "install", "-y", "-qq", "strace"], capture_output=True, timeout=120
            )
    if shutil.which("strace") is None:
        return "strace is not installed"
    try:
        code, _ = traced(lambda: None, ["-e", "trace=close"], os.devnull)
    except OSError as error:
        return str(error)
    return "" if code == 0 else "strace cannot attach here"


def traced(body: Callable[[], None], options: list[str], log: str) -> tuple[int, str]:
    """Run `body` in a forked child with strace attached; return (exit code, error text).

    A negative exit code is a signal. The child has torch loaded, and waits for a byte until
    strace is attached.
    """
    (go, start), (told, tell) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(body, go, tell, (start, told))
    os.close(go)
    os.close(tell)
    words = ["strace", "-f", "-p", str(pid), "-o", log, *options]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    first = tracer.stderr.readline()
    if "attached" not in first:
        os.kill(pid, signal.SIGKILL)
    else:
        os.write(start, b".")
    with os.fdopen(told, "rb") as stream:
        said = stream.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(start)
    tracer.stderr.close()
    tracer.wait()
    if "attached" not in first:
        raise OSError(first.strip() or "strace said nothing")
    return code, said


def _child(body: Callable[[], None], go: int, tell: int, others: tuple[int, int]) -> None:
    for descriptor in others:
        os.close(descriptor)
    select.select([go], [], [])  # not os.read, because calls of read are counted
    try:
        body()
    except BaseException as error:
        text = "" if isinstance(error, OSError) else traceback.format_exc()
        os.write(tell, f"{type(error).__name__}: {error}\n{text}".encode())
        os._exit(1)
    os._exit(0)


# Whole runs ---------------------------------------------------------------------------------------


def words_of(
    task: str, run_dir: Path, *overrides: str, ranks: int = 0, restarts: int = 0
) -> list[str]:
    """Return the command of a run; under torchrun if `ranks` is given."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    launcher = [*torchrun, f"--max_restarts={restarts}"] if ranks else []
    folders = [str(REPOSITORY / each) for each in ("tests/conf", "scripts/faults/conf")]
    dirs = [f"--config-dir={folder}" for folder in folders]
    named = [f"task={task}", f"run.dir={run_dir}", "run.name=run"]
    return [sys.executable, *launcher, "-m", "trainer", *dirs, *named, *overrides]


def wait_for(condition: Callable[[], Any], limit_s: float, every_s: float = 0.005) -> Any:
    """Return the value of `condition` once it is true; None after `limit_s`."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(every_s)
    return None


def errors_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def state_of(directory: Path) -> Mapping[str, Any]:
    """Return the content of a run's newest checkpoint, its metrics.jsonl without speeds and ledger,
    and the metrics of its end.

    A step that was saved at a stop, before its evaluation, is not saved again: exit.json has that
    evaluation, and the checkpoint's own progress is left out.
    """
    import json

    loaded, skipped = checkpoint.find_newest(directory / "checkpoints", checkpoint.load)
    assert loaded is not None and not skipped, f"no valid newest checkpoint: {skipped}"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    record = [
        {k: v for k, v in line.items() if not k.startswith("speed/")}
        for line in lines
        if "ledger" not in line
    ]
    content = content_of(loaded)
    training = {name: value for name, value in content["training"].items() if name != "progress"}
    told = directory / "exit.json"
    facts = json.loads(told.read_text()) if told.exists() else {}
    end = {name: facts.get(name) for name in ("step", "metrics", "best")}
    return {"step": loaded.manifest["step"], "record": record, "end": end, **content} | {
        "training": training
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return the parts that differ and the first value that differs; None if all are equal."""
    unlike = [name for name in {**ours, **theirs} if not same(ours.get(name), theirs.get(name))]
    if not unlike:
        return None
    one, other = (dict(tree_flatten_with_path(state.get(unlike[0]))[0]) for state in (ours, theirs))
    where = next(
        (path for path in {**one, **other} if not same(one.get(path), other.get(path))), ()
    )
    first = f"{keystr(where)} is {_short(one.get(where))}, not {_short(other.get(where))}"
    return f"{', '.join(unlike)} differ from the undisturbed run: {first}"


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:100]
