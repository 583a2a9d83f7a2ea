"""Rendezvous that cannot succeed, and ranks that differ: all end in time, with a line that states
the problem."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness.launch import environment_of_a_command as environment
from harness.waiting import free_port

from faults.common import (
    REPOSITORY,
    Row,
    errors_in,
    folder,
    random_of,
    wait_for,
    words_of,
)
from faults.launches import is_gone
from faults.rank import OTHER_VERSION, UNLIKE
from faults.runs import LIMIT_S, Launched

# Rendezvous that cannot succeed -------------------------------------------------------------------

GRACE_S = 2.0  # after dist.timeout_s


@dataclass
class Broken:
    """The processes to start, as (RANK, WORLD_SIZE), and a part of the line that each of them must
    print."""

    ranks: list[tuple[str, str]]
    says: list[str]
    words: list[str] = field(default_factory=list)
    environment: dict[str, str | None] = field(default_factory=dict)
    may_work: bool = False


@contextmanager
def foreign(how: str) -> Iterator[int]:
    """Yield the port of a foreign process that accepts nothing, sends nothing, sends HTTP, or
    closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            while True:
                try:
                    line = server.accept()[0]
                    held.append(line)
                    if how == "talks":
                        line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    elif how == "hangs up":
                        line.close()
                except OSError:
                    return

        if how != "accepts nothing":
            threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for line in held:
            line.close()


def _init(chance: random.Random, port: int, place: Path) -> tuple[str, list[str]]:
    how = chance.choice(("env", "tcp", "file"))
    words = {
        "tcp": [f"dist.address=127.0.0.1:{port}"],
        "file": [f"dist.path={place / 'meet'}"],
    }.get(how, [])
    return how, [f"dist.init={how}", *words]


def missing(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    how, words = _init(chance, port, place)
    return Broken(
        [("0", "3"), ("2", "3")],
        (["rank 1 did not connect"] if how != "file" else []) or [": rank"],
        words,
    )


def duplicate(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    how, words = _init(chance, port, place)
    line = "rank 1 was started twice, as process " if how != "file" else ": rank"
    return Broken([("0", "3"), ("1", "3"), ("1", "3")], [line], words)


def wrong_size(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    how, words = _init(chance, port, place)
    line = "WORLD_SIZE is 2 on rank 0 and 3 on rank 1" if how != "file" else ": rank"
    return Broken([("0", "2"), ("1", "3")], [line], words)


def no_master(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    return Broken([("1", "2")], [f"no rendezvous at 127.0.0.1:{port}"])


def foreign_process(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    other = stack.enter_context(
        foreign(chance.choice(("accepts nothing", "says nothing", "talks", "hangs up")))
    )
    words = ["dist.init=tcp", f"dist.address=127.0.0.1:{other}"]
    return Broken([("1", "2")], [f"no rendezvous at 127.0.0.1:{other}"], words)


def port_in_use(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    other = stack.enter_context(
        foreign(chance.choice(("accepts nothing", "says nothing", "talks", "hangs up")))
    )
    words = ["dist.init=tcp", f"dist.address=127.0.0.1:{other}"]
    lines = ["the port is in use on rank 0's host", f"no rendezvous at 127.0.0.1:{other}"]
    return Broken([("0", "2"), ("1", "2")], lines, words)


def foreign_file(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    path = place / "meet"
    path.write_bytes(b"?" + os.urandom(chance.randrange(1, 300)))
    line = "meet: must be a new file or FileStore; choose another"
    return Broken([("0", "2"), ("1", "2")], [line], _file(path))


def fresh_file(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    """Use the file of a run that was just killed. Success is as good as an error line."""
    broken = Broken(
        [("0", "2"), ("1", "2")], ["meet"], [*_file(place / "meet"), "run.steps=4"], may_work=True
    )
    before = [*broken.words[:-1], "run.steps=100000"]
    runs = [
        _come(place, n, who, Broken([], [], before), port, "before")
        for n, who in enumerate(broken.ranks)
    ]
    assert wait_for(lambda: any(run.has_marked("step 1") for run in runs), LIMIT_S), runs[0].tail()
    for run in runs:
        run.kill()
    assert (place / "meet").exists()
    return broken


def _file(path: Path) -> list[str]:
    return ["dist.init=file", f"dist.path={path}"]


def tcp_under_torchrun(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    return Broken([], [], ["dist.init=tcp", f"dist.address=127.0.0.1:{port}"], may_work=True)


def beyond(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    rank = str(chance.randrange(2, 9))
    return Broken([("0", "2"), (rank, "2")], ["rank 1 did not connect", f"RANK={rank}: must be"])


def no_number(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    rank = chance.choice(("one", "-1", "1.0", ""))
    return Broken([("0", "2"), (rank, "2")], ["rank 1 did not connect", f"RANK={rank}: must be"])


def no_address(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    name = chance.choice(("MASTER_ADDR", "MASTER_PORT"))
    return Broken(
        [("0", "2"), ("1", "2")], [f"{name} is not set, but WORLD_SIZE=2"], environment={name: None}
    )


def unresolvable(chance: random.Random, port: int, place: Path, stack: ExitStack) -> Broken:
    host = "no-such-host.invalid"
    return Broken([("0", "2"), ("1", "2")], [f"{host}:{port}"], environment={"MASTER_ADDR": host})


KINDS: dict[str, Callable[[random.Random, int, Path, ExitStack], Broken]] = {
    "missing rank": missing,
    "rank twice": duplicate,
    "wrong world size": wrong_size,
    "no master at the address": no_master,
    "foreign process at the address": foreign_process,
    "port in use": port_in_use,
    "foreign init file": foreign_file,
    "fresh init file": fresh_file,
    "tcp:// under torchrun": tcp_under_torchrun,
    "rank beyond the world size": beyond,
    "rank that is no number": no_number,
    "master address missing": no_address,
    "unresolvable host": unresolvable,
}


def groups(amount: int, seed: int) -> Row:
    """Make the rendezvous fail: every rank ends within dist.timeout_s + 2 s and prints one line
    that states the problem."""
    row, chance = Row("rendezvous that cannot succeed", amount), random_of(seed)
    cases = (chance.sample(sorted(KINDS), len(KINDS)) * (1 + amount // len(KINDS)))[:amount]
    longest = 0.0
    with folder() as base:
        for number, name in enumerate(cases):
            place, timeout_s = base / str(number), chance.randrange(3, 6)
            place.mkdir()
            with ExitStack() as stack:
                port = free_port()
                broken = KINDS[name](chance, port, place, stack)
                problem, late_s = _judge_group(place, broken, port, timeout_s)
            row.note(f"{name}, {' '.join(broken.words[:1])}", problem)
            longest = max(longest, late_s)
    row.detail = f"{len({*cases})} kinds; at most {longest:.1f} s after dist.timeout_s"
    return row


def _come(
    place: Path, number: int, who: tuple[str, str], broken: Broken, port: int, name: str = "rank"
) -> Launched:
    """Start one process of a group by hand (environment variables)."""
    given = {
        "RANK": who[0],
        "WORLD_SIZE": who[1],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    given |= {key: value for key, value in broken.environment.items() if value is not None}
    kept = {
        key: value for key, value in given.items() if broken.environment.get(key, "") is not None
    }
    words = words_of("slow", place / name, "run.steps=5", *broken.words, module="faults.rank")
    return Launched(words, place, f"{name}-{number}", **kept)


def _judge_group(
    place: Path, broken: Broken, port: int, timeout_s: int
) -> tuple[str | None, float]:
    """Return (problem or None, seconds from dist.timeout_s until the last rank ended)."""
    broken.words.append(f"dist.timeout_s={timeout_s}")
    if not broken.ranks:
        run = Launched(words_of("slow", place, "run.steps=5", *broken.words, ranks=2), place, "run")
        return f"must work: {run.tail()}" if run.end() else None, 0.0
    runs = [_come(place, number, who, broken, port) for number, who in enumerate(broken.ranks)]
    ended: dict[int, float] = {}
    limit = time.monotonic() + LIMIT_S
    while len(ended) < len(runs) and time.monotonic() < limit:
        now = time.monotonic()
        ended |= {n: now for n, run in enumerate(runs) if n not in ended and run.is_over()}
        time.sleep(0.005)
    late_s = 0.0
    for number, (run, (rank, _)) in enumerate(zip(runs, broken.ranks, strict=True)):
        if number not in ended:
            run.kill()
            return f"rank {rank} did not end within {LIMIT_S:.0f} s: {run.tail()}", LIMIT_S
        code, lines = run.process.returncode, errors_in(run.log.read_text(errors="replace"))
        if broken.may_work and (code, lines) == (0, []):
            continue
        part = broken.says[number % len(broken.says)]
        if code != 2 or len(lines) != 1 or part not in lines[0]:
            return (
                f"RANK={rank} ended with code {code}; not {part!r} in one line: "
                f"{lines or run.tail()}",
                late_s,
            )
        begun = re.search(r"^meets \d+ (\S+)$", run.marks.read_text(), re.M)
        if begun is not None:
            late_s = max(late_s, ended[number] - float(begun[1]) - timeout_s)
    return (
        f"the last rank ended {late_s:.1f} s after dist.timeout_s={timeout_s}"
        if late_s > GRACE_S
        else None
    ), late_s


# Ranks that differ --------------------------------------------------------------------------------

WITHIN_S = 2.0
TASK = """import os
from torch import nn
from tiny import Tiny, points
from trainer import ResidentDataset
class Mine(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, int(os.environ.get("WIDTH", "16"))), nn.LazyLinear(3))
    def build_dataset(self, split):
        return ResidentDataset(*points(int(os.environ.get("LENGTH", "203")), split))
"""
ALIKE = {
    "optim.lr": "0.1",
    "run.seed": "3",
    "strategy.precision": "fp64",
    "task.options.dropout": "0.1",
    "data.global_batch": "22",
}
DIGEST = "[0-9a-f]{12}"
# kind -> (the key that the line must name, the value on most ranks, the value on one rank); values
# are regular expressions
UNEQUAL = {
    "learning rate": ("optim.lr", "0.1", "0.2"),
    "seed": ("run.seed", "3", "4"),
    "precision": ("strategy.precision", "fp64", "fp32"),
    "task's options": ("task.options.dropout", "0.1", "0.2"),
    "global batch": ("data.global_batch", "22", "24"),
    "length of the data": ("the train data's length", "203", "190"),
    "shape of the model": ("the shape of 0.weight", r"\[16, 4\]", r"\[17, 4\]"),
    "code of the task": ("the code of mine", DIGEST, DIGEST),
    "version of torch": ("torch's version", re.escape(torch.__version__), OTHER_VERSION),
    "code of Lockstep": ("the code of trainer", DIGEST, DIGEST),
    "default dtype": ("the default dtype", "torch.float32", "torch.float64"),
}


def unequal(amount: int, seed: int) -> Row:
    """Make one rank differ from the others: all stop within 2 s after the process group was
    formed, with a line that names key, ranks and values."""
    row, chance = Row("ranks with different settings, data, model or code", amount), random_of(seed)
    left_out = chance.choice(("version of torch", "code of Lockstep"))
    kinds = [kind for kind in UNEQUAL if kind != left_out]
    cases = (chance.sample(kinds, len(kinds)) * (1 + amount // len(kinds)))[:amount]
    longest = 0.0
    with folder() as base:
        for number, kind in enumerate(cases):
            size = chance.choice((2, 3))
            problem, seconds = _judge_unequal(
                base / str(number), kind, size, chance.randrange(size)
            )
            row.note(f"{kind}, {size} ranks", problem)
            longest = max(longest, seconds)
    row.detail = f"{', '.join(cases)}; the last rank ended {longest:.1f} s after the group formed"
    return row


def _unlike(place: Path, kind: str, rank: int) -> dict[str, object]:
    """Return the changes that rank.py applies to that rank only."""
    key, _, other = UNEQUAL[kind]
    more = {"length of the data": {"LENGTH": other}, "shape of the model": {"WIDTH": "17"}}.get(
        kind, {}
    )
    paths = {
        "code of the task": [str(place / "odd")],
        "code of Lockstep": [str(place / "copy")],
    }.get(kind, [])
    if kind == "code of the task":
        (place / "odd").mkdir()
        (place / "odd/mine.py").write_text(TASK + "# another version\n")
    elif kind == "code of Lockstep":
        for part in ("trainer", "conf"):
            shutil.copytree(
                REPOSITORY / part,
                place / "copy" / part,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        (place / "copy/trainer/means.py").open("a").write("# another version\n")
    settings = {"default dtype": "dtype", "version of torch": "version"}
    words = [f"{key}={other}"] if key in ALIKE else []
    return {
        "rank": str(rank),
        "words": words,
        "paths": paths,
        "environment": more,
        "set": settings.get(kind, ""),
    }


def _judge_unequal(place: Path, kind: str, size: int, rank: int) -> tuple[str | None, float]:
    """Return (problem or None, seconds from the forming of the group until the last rank ended)."""
    place.mkdir()
    (place / "mine.py").write_text(TASK)
    words = words_of("tiny", place, "task.trainer=mine.Mine", ranks=size, module="faults.rank")
    words += [f"{key}={value}" for key, value in ALIKE.items()]
    paths = os.pathsep.join([environment()["PYTHONPATH"], str(place)])
    told = {"PYTHONPATH": paths, UNLIKE: json.dumps(_unlike(place, kind, rank))}
    run = Launched(words, place, "run", **told)
    is_standing = wait_for(lambda: len(_stands(run)) == size or run.is_over(), LIMIT_S)
    stands = _stands(run)
    is_over = wait_for(lambda: all(map(is_gone, stands)), LIMIT_S) if len(stands) == size else False
    ended = time.monotonic()
    if not is_standing or not is_over:
        run.kill(*stands)
        return f"{len(stands)} of {size} ranks connected; last lines: {run.tail()}", 0.0
    code, lines, seconds = (
        run.end(),
        errors_in(run.log.read_text(errors="replace")),
        ended - max(stands.values()),
    )
    key, most, one = UNEQUAL[kind]
    others = [str(other) for other in range(size) if other != rank]
    sides = [f"{most} on ranks? {', '.join(others)}", f"{one} on rank {rank}"]
    wanted = (
        f"error: {re.escape(key)} is {' and '.join(sides[:: -1 if rank == 0 else 1])}: "
        f"must be the same; .*"
    )
    if not code or len(lines) != 1 or not re.fullmatch(wanted, lines[0]):
        return f"exit code {code}; not {wanted!r}: {lines or run.tail()}", seconds
    if (place / "tiny").exists():
        return "a run directory was made", seconds
    return (f"the last rank ended after {seconds:.1f} s" if seconds > WITHIN_S else None), seconds


def _stands(run: Launched) -> dict[int, float]:
    """Return process id to time for each rank whose process group has formed."""
    found = re.findall(r"^stands (\d+) (\S+)$", run.marks.read_text(), re.M)
    return {int(pid): float(moment) for pid, moment in found}
