"""Train with two commits and compare losses, weights and optimizer state, bit for bit.

    python scripts/compare/compare_commits.py A B [--only WORD] [--list] [--keep FOLDER]

A and B are git revisions or directories of checkouts. Each command runs with the code of each
checkout, in a scratch folder, and both results are compared: every line of metrics.jsonl without
speed/*, every tensor of the newest checkpoint, and the exit codes. Prints a Markdown table. Exit
codes: 0 everything is equal, 1 something differs or failed, 2 A or B cannot be run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# so that checkpoints of both commits are read by this checkout
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(REPOSITORY))

from trainer.core.checkpoints.reading import open_content  # noqa: E402
from trainer.core.checkpoints.transaction import load  # noqa: E402
from trainer.core.strategy.tensor_shards import read_whole  # noqa: E402

USER_FILES = HERE / "compared"  # the tasks points and gan, and their config
LIMIT_S = 300
EQUAL = "equal"

# The settings that replace a task's name in a command: the smallest useful ones. The learning rates
# of cifar are for its full width and batch; a net this small collapses under them to a constant
# loss.
SETTINGS = {
    "cifar": (
        "task=cifar task.options.data=bundled task.options.widths=[16,32,32] data.global_batch=100"
        " task.options.bias_lr=0.002 task.options.head_lr=0.02 optim.lr=0.05"
        " run.steps=20 eval.micro_batch=250 log.every_steps=1"
    ),
    "text": (
        "task=text task.options.files=24 task.options.context=32 task.options.width=32"
        " task.options.layers=2 task.options.heads=2 data.global_batch=24 run.steps=20"
        " eval.every_steps=10 checkpoint.every_steps=10 log.every_steps=1"
    ),
    "points": "--config-dir conf task=points log.every_steps=1",
    "gan": "--config-dir conf task=gan log.every_steps=1",
}


@dataclass(frozen=True)
class Start:
    """Command `python -m <module> <words>`, under torchrun for two or more ranks; `code` is its
    expected exit code.

    A word that is a key of SETTINGS is replaced by those settings.
    """

    words: str
    ranks: int = 1
    module: str = "trainer"
    code: int = 0

    def command(self) -> list[str]:
        launcher = [sys.executable]
        if self.ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={self.ranks}"]
        words = [word for name in self.words.split() for word in SETTINGS.get(name, name).split()]
        return [*launcher, "-m", self.module, *words]

    def __str__(self) -> str:
        module = "" if self.module == "trainer" else f"{self.module} "
        return f"`{module}{self.words}`"


@dataclass(frozen=True)
class Case:
    """Commands that run one after another in one folder."""

    name: str
    starts: tuple[Start, ...]


def trains(name: str, words: str, ranks: int = 1) -> Case:
    return Case(name, (Start(words, ranks),))


FP32 = "strategy.precision=fp32"
FP64 = "strategy.precision=fp64"
CASES = [
    trains("cifar on 1 rank", f"cifar {FP32}"),
    trains("cifar on 2 ranks", f"cifar {FP32}", ranks=2),
    trains("cifar on 3 ranks", f"cifar {FP64}", ranks=3),
    trains("text on 1 rank", f"text {FP64} strategy=single"),
    trains("text on 2 ranks", f"text {FP64}", ranks=2),
    trains("text on 3 ranks", f"text {FP32}", ranks=3),
    trains("accumulation", f"cifar {FP32} data.micro_batch=20"),
    trains("accumulation on 2 ranks", f"text {FP32} data.micro_batch=4", ranks=2),
    trains("streamed", f"cifar {FP32} data.path=streamed data.workers=2", ranks=2),
    trains("clipping", f"cifar {FP32} run.clip_norm=0.5 optim=sgd schedule=one_cycle optim.lr=0.1"),
    trains("syncbn", f"cifar {FP32} strategy.sync_batchnorm=true", ranks=2),
    trains("amp_bf16", "cifar strategy.precision=amp_bf16"),
    trains("amp_fp16", "points strategy.precision=amp_fp16"),
    trains("powersgd", f"cifar {FP32} strategy.comm_hook=powersgd", ranks=2),
    trains("fsdp", f"text {FP64} strategy=fsdp", ranks=2),
    trains("hsdp", f"text {FP32} strategy=hsdp data.micro_batch=4 run.clip_norm=0.5", ranks=4),
    trains("tp", f"text {FP64} strategy=tp", ranks=2),
    trains("pp", f"text {FP64} strategy=pp data.micro_batch=6", ranks=2),
    trains("cp", f"text {FP64} strategy=cp", ranks=2),
    trains("exact", f"text {FP32} strategy=exact", ranks=2),
    trains("parameter server", f"text {FP32} strategy.comm_hook=parameter_server", ranks=3),
    trains("gan on 1 rank", f"gan {FP32} data.micro_batch=8"),
    trains("gan on 2 ranks", f"gan {FP64} run.clip_norm=1.0", ranks=2),
    trains("bad step", f"points {FP32} task.options.bad_step=7"),
    trains(
        "unreadable example",
        f"points {FP32} task.options.items=true task.options.unreadable=5"
        " data.workers=1 data.on_error=skip",
        ranks=2,
    ),
    trains("elastic", f"points {FP64} launch=elastic launch.nproc_per_node=2"),
    Case("sweep", (Start(f"points {FP32} optim.lr=0.05,0.1", module="trainer.sweep"),)),
    Case(
        "resume and evaluation",
        (
            Start(f"text {FP32} run.ema_decay=0.99 run.steps=10 run.name=first", ranks=2),
            Start("run.resume=runs/text/first run.steps=20", ranks=2),
            Start("runs/text/first", module="trainer.use"),
        ),
    ),
    Case(
        "resume on other ranks",
        (
            Start(f"cifar {FP64} data.micro_batch=30 run.steps=8 run.name=first", ranks=3),
            Start("run.resume=runs/cifar/first run.steps=16 data.micro_batch=50", ranks=2),
        ),
    ),
    Case(
        "stop and resume",
        (
            Start(f"points {FP32} task.options.signal_at=9 run.name=first", code=75),
            Start("--config-dir conf run.resume=runs/points/first"),
        ),
    ),
    Case(
        "stop and resume on 3 ranks",  # torchrun exits with 1 for every exit code of a rank
        (
            Start(f"points {FP64} task.options.signal_at=9 run.name=first", ranks=3, code=1),
            Start("--config-dir conf run.resume=runs/points/first", ranks=3),
        ),
    ),
]


@dataclass(frozen=True)
class Checkout:
    """Code to run; `name` is the revision or directory from the command line."""

    name: str
    place: Path

    def environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return {**os.environ, **threads, "PYTHONPATH": str(self.place)}

    def check_import(self) -> None:
        """Exit with 2 unless a command finds the package of this checkout."""
        command = [sys.executable, "-c", "import trainer; print(trainer.__file__)"]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                command, cwd=folder, env=self.environment(), capture_output=True, text=True
            )
        imported = Path(done.stdout.strip() or "nothing").resolve()
        if imported.parent != self.place / "trainer":
            print(done.stderr[-2000:], file=sys.stderr)
            print(f"error: {self.name}: imports {imported}, not its own trainer", file=sys.stderr)
            raise SystemExit(2)


@dataclass(frozen=True)
class Result:
    """Results of a case: exit codes, printed metrics, and the files of each run by name."""

    problem: str
    codes: list[int]
    printed: list[str]
    metrics: dict[str, list[dict[str, Any]]]
    weights: dict[str, Any]
    training: dict[str, Any]


@contextmanager
def opened(given: str) -> Iterator[Checkout]:
    """Yield the checkout of a directory, or of a revision in a temporary worktree."""
    if Path(given).is_dir():
        yield Checkout(given, Path(given).resolve())
        return
    git = ["git", "-C", str(REPOSITORY)]
    found = subprocess.run(
        [*git, "rev-parse", "--verify", "--short", f"{given}^{{commit}}"],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        print(f"error: {given}: neither a directory nor a git revision", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve() / "checkout"
        commit = found.stdout.strip()
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", place, commit], check=True)
        try:
            yield Checkout(given if given.startswith(commit) else f"{given} ({commit})", place)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", place], check=True)


def run_case(case: Case, checkout: Checkout, folder: Path) -> Result:
    """Run the commands of a case in the new folder `folder` and read what they wrote."""
    shutil.copytree(USER_FILES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    codes: list[int] = []
    printed: list[str] = []
    for start in case.starts:
        code, output, errors = run_start(start, checkout, folder)
        codes.append(code)
        if start.module != "trainer":
            printed.append(output)
        if code != start.code:
            problem = f"{checkout.name}: exit code {code}, not {start.code}: {errors[-1500:]}"
            return Result(problem, codes, printed, {}, {}, {})
    return read_result(folder, codes, printed)


def run_start(start: Start, checkout: Checkout, folder: Path) -> tuple[int, str, str]:
    """Run one command; return (exit code, standard output, standard error)."""
    process = subprocess.Popen(
        start.command(),
        cwd=folder,
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers, within 30 s, before it ends itself
        output, errors = process.communicate()
        errors += f"terminated after {LIMIT_S} s"
    return process.returncode, output, errors


def read_result(folder: Path, codes: list[int], printed: list[str]) -> Result:
    metrics = {}
    weights = {}
    training = {}
    runs = sorted(path.parent for path in folder.glob("runs/*/*/metrics.jsonl"))
    for number, run in enumerate(runs):
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        newest = max((run / "checkpoints").glob("step-*"))
        key = f"run {number}"
        metrics[key] = [without_speed(json.loads(line)) for line in lines]
        content = open_content(load(newest))
        tensors = {kind: read_whole(source) for kind, source in content.sources.items()}
        weights[key] = tensors.pop("model")
        plain = {name: content.training[name] for name in sorted(content.training)}
        training[key] = {**tensors, **plain}
    problem = "" if metrics else "no run directory was written"
    for key, entries in metrics.items():
        if has_stalled(entries):
            problem = f"{key}: the loss is constant, so a comparison of it shows nothing"
    return Result(problem, codes, printed, metrics, weights, training)


def has_stalled(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the last three losses are the same."""
    losses = [entry["train/loss"] for entry in entries if "train/loss" in entry]
    return len(set(losses[-3:])) == 1


def without_speed(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not key.startswith("speed/")}


def find_difference(a: Any, b: Any, path: str = "") -> str:
    """Return where two trees of tensors and plain values differ first; "" if all bits are equal.

    An entry that one has and that holds nothing is no difference.
    """
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} / {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        return "" if is_same_tensor(a, b) else f"{path}: {describe_tensors(a, b)}"
    if isinstance(a, Mapping):
        a, b = ({k: v for k, v in c.items() if k in d or v != {}} for c, d in ((a, b), (b, a)))
        if list(a) != list(b):
            only = sorted(map(str, set(a) ^ set(b)))
            return f"{path}: keys {', '.join(only) or 'in another order'}"
        pairs: Any = [(f"{path}.{key}".lstrip("."), a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{path}: length {len(a)} / {len(b)}"
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(a, b, strict=True))]
    else:
        return "" if a == b else f"{path}: {a} / {b}"
    return next(filter(None, (find_difference(x, y, where) for where, x, y in pairs)), "")


def is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if dtype, shape and every bit are equal; NaN may equal NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def describe_tensors(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} / {b.dtype} {tuple(b.shape)}"
    return f"by up to {float((a.double() - b.double()).abs().max()):.1e}"


def count_tensors(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return 1
    if isinstance(tree, Mapping):
        return sum(count_tensors(value) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return sum(count_tensors(value) for value in tree)
    return 0


def compare_metrics(a: Result, b: Result) -> str:
    """Return the first difference between the lines of metrics.jsonl, or between the output."""
    for run in a.metrics:
        for ours, theirs in zip(a.metrics[run], b.metrics.get(run, []), strict=False):
            if where := find_difference(ours, theirs):
                return f"step {ours['step']}: {where}"
    return find_difference([a.metrics, a.printed], [b.metrics, b.printed])


def compare(a: Result, b: Result) -> tuple[list[str], bool]:
    """Return the cells losses, weights, optimizer and result of a row, and True if all is equal."""
    if a.problem or b.problem:
        return ["-", "-", "-", "**failed**"], False
    num_lines = sum(len(lines) for lines in a.metrics.values())
    found = {
        f"{num_lines} lines equal": compare_metrics(a, b),
        f"{count_tensors(a.weights)} tensors equal": find_difference(a.weights, b.weights),
        f"{count_tensors(a.training)} tensors equal": find_difference(a.training, b.training),
    }
    cells = [where or text for text, where in found.items()]
    is_equal = not any(found.values()) and a.codes == b.codes
    return [*cells, EQUAL if is_equal else "**differs**"], is_equal


def print_row(cells: Sequence[object]) -> None:
    print("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |", flush=True)


def compare_all(cases: Sequence[Case], a: Checkout, b: Checkout, scratch: Path) -> bool:
    """Run every case with both checkouts and print the table; True if everything is equal."""
    names = sorted(
        {word for c in cases for s in c.starts for word in s.words.split()} & {*SETTINGS}
    )
    for name in names:
        print(f"`{name}` means `{SETTINGS[name]}`.")
    print(f"\nA is {a.name}, B is {b.name}; torch {torch.__version__}.\n")
    print_row(["command", "ranks", "losses", "weights", "optimizer", "result"])
    print_row(["---"] * 6)
    is_all_equal = True
    for number, case in enumerate(cases):
        places = (scratch / f"{number}-a", scratch / f"{number}-b")
        with ThreadPoolExecutor(2) as side_by_side:
            results = list(side_by_side.map(run_case, (case, case), (a, b), places))
        cells, is_equal = compare(*results)
        is_all_equal &= is_equal
        command = ", then ".join(map(str, case.starts))
        ranks = ", then ".join(str(start.ranks) for start in case.starts)
        print_row([f"{case.name}: {command}", ranks, *cells])
        for result in results:
            if result.problem:
                print(result.problem, file=sys.stderr, flush=True)
    return is_all_equal


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revisions", nargs="*", metavar="A B", help="revisions or directories")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only cases whose line contains WORD"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and run nothing")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the runs in this folder")
    given = parser.parse_args()
    lines = [(case, f"{case.name}: {', then '.join(map(str, case.starts))}") for case in CASES]
    chosen = [(case, line) for case, line in lines if given.only in line]
    if given.list:
        print("\n".join(line for _, line in chosen))
        return 0
    if len(given.revisions) != 2 or not chosen:
        parser.error("give two revisions or directories, and an --only that a case contains")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that worktrees are removed
    with ExitStack() as stack:
        a, b = (stack.enter_context(opened(name)) for name in given.revisions)
        a.check_import()
        b.check_import()
        scratch = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        is_equal = compare_all([case for case, _ in chosen], a, b, scratch.resolve())
    print("\nEverything is equal." if is_equal else "\nNot everything is equal.")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
