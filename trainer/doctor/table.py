"""The rows of the doctor's table, and its output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.cli import answer
from trainer.errors import visible
from trainer.record.startup import MOST_RANKS

RESULTS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
ADVICE = {
    "rendezvous": "give every rank the address of rank 0's host, with its port open; "
    "start the ranks that are missing",
    "backends": "give dist.backend=gloo, or start one rank per GPU",
    "process": "ranks connect by host name: "
    "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME for another interface",
    "all-reduce": "a rank, its GPU or its network hangs: "
    "set TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO for more",
    "versions": "install the same versions on every node",
    "code": "copy the same code to every node",
    "settings": "start all ranks with the same command",
}


@dataclass(frozen=True)
class Check:
    """A row of the table; `result` is ok, warn or fail, and `advice` is empty if it is ok."""

    check: str
    result: str
    found: str
    advice: str = ""


def judge(check: str, is_good: bool, found: str, advice: str) -> Check:
    """Return a check that is ok, or a warning with advice."""
    return Check(check, "ok", found) if is_good else Check(check, "warn", found, advice)


def list_ranks(ranks: Sequence[int | str]) -> str:
    """Return `rank 1` or `ranks 1, 2, ...`."""
    listed = ", ".join(map(str, ranks[:MOST_RANKS]))
    more = ", ..." if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def report(checks: Sequence[Check]) -> int:
    """Print the checks and return the exit code."""
    worst = max((check.result for check in checks), key=list(RESULTS).index, default="ok")
    facts = {"checks": [asdict(check) for check in checks]}
    return answer(int(worst == "fail"), worst, facts, lambda: show(checks))


def show(checks: Sequence[Check]) -> None:
    """Print the table."""
    columns = ("check", "result", "found", "advice")
    table = Table(*columns, box=None, header_style="bold")
    for check in checks:
        result = Text(check.result, style=RESULTS[check.result])
        table.add_row(visible(check.check), result, visible(check.found), visible(check.advice))
    width = None if sys.stdout.isatty() else 500
    Console(highlight=False, markup=False, width=width).print(table)
    sys.stdout.flush()
