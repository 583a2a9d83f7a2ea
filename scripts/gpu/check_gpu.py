"""Check on a GPU, or on several, everything that GPUs change, in at most fifteen minutes: backends,
precisions, placement, strategies, hangs, compilation, memory, speed.

    python scripts/gpu/check_gpu.py [--root data/cifar-10-batches-bin] [--json gpu.json]
        [--airbench airbench94_muon.py] [--only nccl tf32] [--jobs 4]

Each check runs in a separate process with a time limit, so one failure does not affect the other
checks. `--jobs` runs several at a time; those of speed, memory and deadlines follow one by one. A
check that needs more GPUs than there are is skipped, with the reason; several ranks share one over
NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1. Profiler traces are written beside the JSON
file. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

# runs from a checkout that is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from gpu_checks import (
    arithmetic,
    backends,
    compiling,
    ends,
    layouts,
    memory,
    resuming,
    speed,
    waits,
)
from gpu_checks.runs import Here, Skip
from harness.launch import kill_with_descendants

BUDGET_S, KEPT, TOLD = 900, 9000, "told: "  # seconds, characters
NO_GPU = "no GPU: torch sees no CUDA device; nothing was checked"

RANKS = {"zero1": 2, "tp": 2, "cp": 2, "pp": 2, "fsdp_tp": 4, "pp_fsdp": 4}
CHECKS: dict[str, tuple[Callable[[Here], str], int]] = {  # name: (check, seconds it may take)
    "nccl": (backends.nccl, 90),
    "amp_fp16": (arithmetic.amp_fp16, 60),
    "tf32": (arithmetic.tf32, 60),
    "resident": (waits.resident, 60),
    "waits": (waits.waits, 60),
    "streamed": (waits.streamed, 60),
    "map_location": (resuming.map_location, 120),
    "resume": (resuming.resume, 60),
    "predict": (resuming.predict, 120),
    "data_parallel": (backends.data_parallel, 60),
    "two_ranks": (backends.two_ranks, 90),
    "syncbn": (backends.syncbn, 90),
    "one_gpu_each": (backends.one_gpu_each, 60),
    "sharded": (layouts.sharded, 240),
    **{name: (partial(layouts.divided, strategy=name, ranks=n), 180) for name, n in RANKS.items()},
    "context_flash": (layouts.context_flash, 120),
    "pipeline": (layouts.pipeline, 120),
    "model_parallel": (layouts.model_parallel, 90),
    "exact": (layouts.exact, 120),
    "hang": (ends.hang, 90),
    "kill": (ends.kill, 120),
    "bits": (arithmetic.bits, 40),
    "precisions": (arithmetic.precisions, 90),
    "as_on_cpu": (arithmetic.as_on_cpu, 300),
    "compiled": (compiling.compiled, 150),
    "compiled_text": (compiling.compiled_text, 120),
    "compiled_draws": (compiling.compiled_draws, 120),
    "auto_batch": (memory.auto_batch, 180),
    "launches": (waits.launches, 200),
    "plan": (speed.plan, 120),
    "cifar": (speed.cifar, 180),
    "airbench": (speed.airbench, 480),
}
# of speed, of a GPU's memory, or with a deadline
ALONE = ("hang", "kill", "waits", "auto_batch", "launches", "plan", "cifar", "airbench")


# The command --------------------------------------------------------------------------------------


def check_here(name: str, given: argparse.Namespace) -> None:
    """Run a check in this process and print its result as the last line."""
    warnings.filterwarnings("ignore", message="There are no gradients|.*TensorFloat32")
    with tempfile.TemporaryDirectory() as folder:
        traces = given.json.resolve().parent
        here = Here(torch.device(given.device), Path(folder), given.root, given.airbench, traces)
        try:
            told = {"result": "ok", "note": CHECKS[name][0](here)}
        except Skip as skip:
            told = {"result": "skipped", "note": str(skip)}
        except Exception as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            told = {
                "result": "FAILED",
                "note": line[:600],
                "traceback": traceback.format_exc()[-4000:],
            }
    print(TOLD + json.dumps(told), flush=True)


def run(name: str, given: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a check in a separate process; at the limit, kill it with all its descendants."""
    began = time.monotonic()
    row: dict[str, Any] = {"check": name}
    if limit_s < 5:
        return {
            **row,
            "result": "FAILED",
            "seconds": 0.0,
            "note": f"no time left of the {BUDGET_S} s",
        }
    words = [sys.executable, __file__, "--check", name, "--device", given.device]
    words += ["--root", given.root, "--airbench", given.airbench, "--json", str(given.json)]
    environment = {**os.environ, "TORCH_SHOW_CPP_STACKTRACES": "0"}
    if given.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if given.jobs > 1:  # else each takes a thread per core
        environment.setdefault("OMP_NUM_THREADS", "1")
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output = child.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        kill_with_descendants(child.pid)  # torchrun's ranks are in process groups of their own
        output = child.communicate()[0]
        row |= {
            "result": "FAILED",
            "note": f"not done after {limit_s:.0f} s",
            "output": output[-KEPT:],
        }
    told = [line for line in output.splitlines() if line.startswith(TOLD)]
    if told:
        row = {**json.loads(told[-1][len(TOLD) :]), **row}
    elif "result" not in row:
        row |= {
            "result": "FAILED",
            "note": f"ended with code {child.returncode}",
            "output": output[-KEPT:],
        }
    if row["result"] == "FAILED":
        row.setdefault("output", output[-KEPT:])
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def run_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the checks, print a line for each and write all that are done to the JSON file."""
    found, began = facts(given.device), time.monotonic()
    rows: list[dict[str, Any]] = []

    def start(name: str) -> dict[str, Any]:
        left = BUDGET_S - (time.monotonic() - began)
        return run(name, given, min(CHECKS[name][1], left))

    together = [name for name in given.only if given.jobs > 1 and name not in ALONE]
    with ThreadPoolExecutor(given.jobs) as pool:
        alone = (start(name) for name in given.only if name not in together)
        begun = [pool.submit(start, name) for name in together]
        for row in chain((each.result() for each in as_completed(begun)), alone):
            rows.append(row)
            print("{check:<15}{result:<8}{seconds:6.1f} s  {note}".format(**row)[:200], flush=True)
            given.json.write_text(json.dumps({**found, "checks": rows}, indent=1) + "\n")
    return rows


def facts(device: str) -> dict[str, Any]:
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "device": device,
        "card": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        found["card"] = torch.cuda.get_device_name(0)
        found["gpus"] = torch.cuda.device_count()
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def show(rows: list[dict[str, Any]], found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{found['card'] or found['device']}, torch {found['torch']}, CUDA {found['cuda']}, "
        f"{found['date']}"
    )
    table = Table("check", "result", "seconds", "note", title=title)
    colours = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}
    for row in rows:
        result = f"[{colours[row['result']]}]{row['result']}[/]"
        table.add_row(
            row["check"], result, f"{row['seconds']:.1f}", row["note"].replace("[", r"\[")
        )
    console = Console()
    Console(width=None if console.is_terminal else 140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", default="data/cifar-10-batches-bin", help="CIFAR-10's binary files"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--airbench", default="", help="airbench94_muon.py, for a comparison")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--jobs", type=int, default=1, help="checks at a time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.check:
        check_here(given.check, given)
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        given.json.write_text(
            json.dumps({**facts("cpu"), "note": NO_GPU, "checks": []}, indent=1) + "\n"
        )
        return 0
    rows = run_all(given)
    show(rows, facts(given.device))
    results = Counter(row["result"] for row in rows)
    print(", ".join(f"{results[result]} {result}" for result in ("ok", "FAILED", "skipped")))
    return int(any(row["result"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
