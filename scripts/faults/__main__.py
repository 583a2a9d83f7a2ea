"""Inject faults and check that nothing is lost: kills, power losses, signals, hangs, two writers,
stores that fail. Attacks on one file or one call are tests.

    python scripts/faults [--only NAME] [--quick] [--part] [--seed N] [--json FILE]

Prints one table at the end. Exit code 1 if any case failed. The seed draws the cases; no case is
retried.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(REPOSITORY / each) for each in ("", "tests", "scripts")]
os.environ["OMP_NUM_THREADS"] = "1"

from run_tests import find_part  # noqa: E402

from faults import (  # noqa: E402
    calls,
    cost,
    hangs,
    jobs,
    launches,
    meshes,
    mirror,
    mirrored_runs,
    parts,
    power,
    resumes,
    runs,
    shards,
    writers,
)
from faults.common import Row  # noqa: E402

# name -> (what runs, cases in full, cases in --quick)
ROWS = {
    "kill": (calls.kill, 1000, 40),
    "parts": (parts.parts, 1000, 40),
    "power": (power.power, 500, 100),
    "weak": (power.weak, 4, 4),
    "ranks": (runs.ranks, 50, 2),
    "starts": (writers.starts, 24, 2),
    "woken": (writers.woken, 15, 2),
    "cost": (cost.cost, 5, 0),
    "restarts": (launches.restarts, 40, 2),
    "signals": (launches.signals, 24, 2),
    "requeues": (jobs.requeues, 20, 1),
    "hangs": (hangs.hangs, 20, 2),
    "mesh_restarts": (meshes.restarts, 10, 1),
    "mesh_signals": (meshes.signals, 10, 1),
    "mesh_hangs": (meshes.hangs, 10, 1),
    **shards.ROWS,
    **mirror.ROWS,
    **mirrored_runs.ROWS,
    **resumes.ROWS,
}


# Rows that take some half a minute or more with --quick: of them --part runs one.
LONG = (
    "starts",
    "ranks",
    "requeues",
    "mesh_restarts",
    "restarts",
    "mirrored_runs",
)


def measure(name: str, is_quick: bool, amount: int | None, seed: int) -> Row | None:
    function, full, quick = ROWS[name]
    amount = amount or (quick if is_quick else full)
    if not amount:
        return None
    what = getattr(function, "func", function).__doc__ or ""
    print(f"{name}: {' '.join(what.split())}", file=sys.stderr, flush=True)
    begun = time.monotonic()
    row = function(amount, seed)
    row.seed, row.seconds = seed, time.monotonic() - begun
    return row


def table(rows: list[Row]) -> str:
    lines = [("fault", "cases", "passed", "seed", "seconds", "")]
    for row in rows:
        said = f"skipped: {row.skipped}" if row.skipped else row.detail
        outcome = "" if row.is_good else "FAILED "
        lines.append(
            (
                row.name,
                str(row.asked),
                str(row.passed),
                str(row.seed),
                f"{row.seconds:.0f}",
                outcome + said,
            )
        )
    widths = [max(len(line[n]) for line in lines) for n in range(5)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  "
        + "  ".join(f"{line[n]:>{widths[n]}}" for n in range(1, 5))
        + f"  {line[5]}".rstrip()
        for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=ROWS, action="append", help="run one row; may be repeated"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run fewer cases: seconds, not minutes"
    )
    parser.add_argument(
        "--part",
        action="store_true",
        help="of the long rows, run one, which the commit chooses",
    )
    parser.add_argument("--cases", type=int, help="number of cases; replaces each row's default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = given.only or list(ROWS)
    if given.part:
        chosen = LONG[find_part() % len(LONG)]
        print(f"of the long rows: {chosen}", flush=True)
        names = [name for name in names if name not in LONG or name == chosen]
    found = [measure(name, given.quick, given.cases, given.seed) for name in names]
    rows = [row for row in found if row is not None]
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(not all(row.is_good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
