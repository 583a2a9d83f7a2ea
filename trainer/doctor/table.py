"""The rows of the doctor's table, and how it is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.errors import visible
from trainer.record.startup import MOST_RANKS

RESULTS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
ADVICE = {
    "rendezvous": "one address on every rank, that of rank 0's host, its port open; "
    "start the ranks that are missing",
    "backends": "give dist.backend=gloo, or every rank a GPU",
    "process": "ranks connect by their hosts' names: "
    "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME gives another interface",
    "all-reduce": "a rank, its GPU or its network hangs: "
    "TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO says more",
    "versions": "install the same on every node",
    "code": "bring the same code to every node",
    "settings": "start all ranks with the same command",
}


@dataclass(frozen=True)
class Check:
    """A row of the table; `advice` is what to do where `result` is not ok."""

    check: str
    result: str
    found: str
    advice: str = ""


def judge(check: str, is_good: bool, found: str, advice: str) -> Check:
    return Check(check, "ok", found) if is_good else Check(check, "warn", found, advice)


def list_ranks(ranks: Sequence[int | str]) -> str:
    listed = ", ".join(map(str, ranks[:MOST_RANKS]))
    more = ", ..." if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def show(checks: Sequence[Check], is_json: bool) -> int:
    """Print the table; the exit code."""
    worst = max((check.result for check in checks), key=list(RESULTS).index, default="ok")
    if is_json:
        rows = [asdict(check) for check in checks]
        print(json.dumps({"result": worst, "checks": rows}), flush=True)
        return int(worst == "fail")
    columns = ("check", "result", "what was found", "what to do")
    table = Table(*columns, box=None, header_style="bold")
    for check in checks:
        result = Text(check.result, style=RESULTS[check.result])
        table.add_row(visible(check.check), result, visible(check.found), visible(check.advice))
    width = None if sys.stdout.isatty() else 500
    Console(highlight=False, markup=False, width=width).print(table)
    sys.stdout.flush()
    return int(worst == "fail")
