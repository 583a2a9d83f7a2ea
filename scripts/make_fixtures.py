"""Write tests/fixtures/first_edition: runs of commit 97dd115 for tests/test_first_edition.py.

    python scripts/make_fixtures.py [--revision 97dd115]

It was run once and is kept to document the runs. Run it again only to add a run, because
checkpoints of a later edition would prove nothing. The runs are made by the code of that commit,
in a separate git worktree; `--revision` also accepts the directory of a checkout.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from compare_commits import Checkout, Start, load, open_content, opened, read_whole, run_start

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "first_edition"
LEFT_OUT = ("tensorboard", ".writer", "submitit")  # .writer and event files name the host

BLOBS = "--config-dir conf task=blobs strategy.precision=fp32 log.every_steps=1 eval.every_steps=5"
STOPPED = f"{BLOBS} run.ema_decay=0.9 run.clip_norm=1.0 schedule=cosine checkpoint.every_steps=5"
CIFAR = (
    "task=cifar strategy.precision=fp64 task.options.data=bundled task.options.widths=[8,8,8]"
    " task.options.bias_lr=0.0005 task.options.head_lr=0.005 optim.lr=0.02"
    " data.global_batch=40 eval.micro_batch=250 log.every_steps=1 schedule=constant"
)
SWEEP = f"-m {BLOBS} run.steps=5 optim.lr=0.1,0.2"
# Runs that are committed. Run `stopped` has in its options the SIGTERM that ended it.
RUNS = [
    Start(f"{STOPPED} run.name=stopped task.options.signal_at=11", code=75),
    Start(f"{CIFAR} run.name=shorter run.steps=4"),
    Start(
        f"{BLOBS} run.name=skipped run.steps=12 task.options.items=true data.workers=1"
        " data.on_error=skip",
        ranks=2,
    ),
    Start(SWEEP),
]
# The committed runs without an interruption; only their results are committed.
UNDISTURBED = {
    "stopped": Start(f"{STOPPED} run.name=undisturbed"),
    "shorter": Start(f"{CIFAR} run.name=undisturbed run.steps=8"),
}
REPLAYED_STEP = 7


def run(start: Start, checkout: Checkout, folder: Path) -> str:
    """Run a command that must succeed; return its standard output."""
    code, output, errors = run_start(start, checkout, folder)
    if code != start.code:
        raise SystemExit(f"{start}: exit code {code}, not {start.code}: {errors[-2000:]}")
    return output


def read_end(directory: Path, task: Any) -> dict[str, Any]:
    """Return the losses by step, the last metrics and the digest of the weights of a run."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    loaded = load(max((directory / "checkpoints").glob("step-*")))
    weights = read_whole(open_content(loaded).sources["model"])
    return {
        "step": loaded.manifest["step"],
        "losses": [line["train/loss"] for line in lines if "train/loss" in line],
        "metrics": json.loads((directory / "exit.json").read_text())["metrics"],
        "weights_sha256": task.digest_tensors(weights),
        "weights_norm": {name: float(t.double().norm()) for name, t in weights.items()},
    }


def evaluate_and_replay(directory: str, checkout: Checkout, folder: Path) -> dict[str, Any]:
    """Return the output of evaluate and replay on a committed run."""
    metrics = run(Start(directory, module="trainer.evaluate"), checkout, folder)
    words = f"{directory} step={REPLAYED_STEP}"
    replayed = run(Start(words, module="trainer.replay"), checkout, folder)
    loss = replayed.split("mean loss ")[1].split(";")[0].split()[0]
    return {"evaluate": json.loads(metrics), "replayed_loss": float(loss)}


def make(checkout: Checkout, folder: Path) -> dict[str, Any]:
    """Make all runs in `folder`; return the results that the test expects."""
    for start in RUNS:
        run(start, checkout, folder)
    undisturbed = folder.parent / "undisturbed"
    shutil.copytree(folder, undisturbed, ignore=shutil.ignore_patterns("runs"))
    ends = {}
    sys.path.insert(0, str(folder))
    import first_edition_task

    for name, start in UNDISTURBED.items():
        run(start, checkout, undisturbed)
        (place,) = undisturbed.glob("runs/*/undisturbed")
        ends[name] = read_end(place, first_edition_task)
        shutil.rmtree(place)
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels_sha256": first_edition_task.digest_kernels(),
        "undisturbed": ends,
        "replayed_step": REPLAYED_STEP,
        "verbs": {
            name: evaluate_and_replay(f"runs/blobs/{name}", checkout, folder)
            for name in ("stopped", "skipped")
        },
        "sweep": SWEEP.split(),
    }


def check_anonymous(folder: Path, places: list[Path]) -> None:
    """Exit if a file contains the name of the machine or a path on it."""
    words = [re.escape(str(place)) for place in places]
    for path in filter(Path.is_file, folder.rglob("*")):
        # a short host name occurs in a tensor's bytes by chance
        host = [] if path.suffix == ".pt" else [rf"\b{re.escape(socket.gethostname())}\b"]
        content = path.name.encode() + path.read_bytes()
        if found := re.search("|".join([*words, *host]).encode(), content):
            raise SystemExit(f"{path.relative_to(folder)} names {found[0].decode()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--revision", default="97dd115")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with opened(given.revision) as checkout, tempfile.TemporaryDirectory() as scratch:
        checkout.check_import()
        folder = Path(scratch).resolve() / "fixtures"
        others = shutil.ignore_patterns("runs", "__pycache__", "expected.json")
        shutil.copytree(FIXTURES, folder, ignore=others)
        expected = make(checkout, folder)
        kept = shutil.ignore_patterns(*LEFT_OUT)
        shutil.rmtree(FIXTURES / "runs", ignore_errors=True)
        shutil.copytree(folder / "runs", FIXTURES / "runs", ignore=kept)
        (FIXTURES / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        check_anonymous(FIXTURES, [folder, checkout.place, Path.home()])
    size = sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file())
    print(f"{FIXTURES}: {size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
