"""Run directories from somebody else: damaged, or written to harm."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.command import Command
from harness.training import CONF
from trainer.base.plain_files import digest_json

RUN = "runs/tiny/a"
CANARY = "canary"  # a module on the path, which leaves a file when it is imported
LIMIT_S = 60.0  # several times what the slowest verb needs
NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63, 10**19, 10**400, 1e308, float("inf"), float("nan"))
TEXTS = ("", "x", "x" * 20_000, "\x1b[31m", "\0", "\u202e", "../../..", "/dev/zero", "${run.seed}")
NAMES = ("canary.Task", "canary", "os.system", "runs.tiny.a.canary.Task", "torch.load")
VALUES = (*NUMBERS, *TEXTS, *NAMES, None, True, [], {}, [[]], {"": {}}, [1, 2, 3])
RAW = (
    *("9" * 5000, "[" * 100_000, "{" * 100_000, '"\\ud800"', "\0", "NaN", "-Infinity", "1e999"),
    *(
        '{"a": 1, "a": 2}',
        "[" * 70 + "]" * 70,
        "\udcff",
        '{"": [[1, 2], [null, 3]]}',
        '{"": 5}',
        "a: 1",
    ),
)
BOMB = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}' if n else 'x'] * 4)}]\n" for n in range(14))
DATA = ("config.json", "metrics.jsonl", "exit.json", ".writer")
IN_A_CHECKPOINT = ("manifest.json", "tensors.json", "training.pt", "model-r00000.safetensors")
VERBS: dict[str, tuple[str, ...]] = {
    "show": (RUN,),
    "show checkpoints": (f"{RUN}/checkpoints/step-00000003",),
    "show two": (RUN, "other"),
    "show page": (RUN, "out=out/report.html"),
    "show step": (RUN, f"--config-dir={CONF}", "step=2"),
    "use": (RUN, f"--config-dir={CONF}"),
    "use stored": (RUN, "--stored", "out=out/weights.safetensors"),
    "use predict": (RUN, f"--config-dir={CONF}", "out=out/all.jsonl"),
    "use export": (RUN, f"--config-dir={CONF}", "out=out/model.safetensors"),
    "resume": (f"run.resume={RUN}", f"--config-dir={CONF}", "run.name=b", "run.dir=out"),
    "check": (f"run.resume={RUN}", f"--config-dir={CONF}", "ranks=1"),
}


def make_run(base: Path) -> None:
    """Train a run of three steps, and place a canary and a second run beside it."""
    words = ("task=tiny", f"--config-dir={CONF}", "run.name=a", "run.steps=3", "log.every_steps=1")
    done = Command(base)(*words, "checkpoint.every_steps=1", "run.ema_decay=0.9")
    assert done.returncode == 0, done.stderr
    shutil.copytree(base / RUN, base / "other")
    (base / f"{CANARY}.py").write_text("open('ran', 'w')\nfrom tiny import Tiny as Task\n")
    (base / RUN / f"{CANARY}.py").write_text("open('ran', 'w')\nfrom tiny import Tiny as Task\n")
    (base / "out").mkdir()


# Damage -------------------------------------------------------------------------------------------


def _newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def _any_file(run: Path, chance: random.Random) -> Path:
    place = chance.choice([*DATA, *IN_A_CHECKPOINT])
    return _newest(run) / place if place in IN_A_CHECKPOINT else run / place


def _change_bytes(run: Path, chance: random.Random) -> str:
    """Flip, cut, lengthen or repeat bytes."""
    file = _any_file(run, chance)
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    end = chance.randrange(at, len(data)) + 1
    kind = chance.choice(["flip", "cut", "remove", "repeat", "insert", "empty"])
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "remove":
        del data[at:end]
    elif kind == "repeat":
        data[at:at] = data[at:end]
    elif kind == "insert":
        data[at:at] = chance.choice([b"\0", b"\xff\xfe", b"\n", b"{", b'"', b": ", b"&a "])
    else:
        data.clear()
    file.write_bytes(data)
    return f"{kind} {file.name}"


def _replace_file(run: Path, chance: random.Random) -> str:
    """Put something else in the place of a file."""
    file = _any_file(run, chance)
    kind = chance.choice(["pipe", "folder", "link", "device", "nothing", "endless", "bomb"])
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to("/etc/hostname")
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "endless":
        with file.open("wb") as sparse:
            sparse.truncate(2**40)
    elif kind == "bomb":
        file.write_text(BOMB)
    return f"{kind} for {file.name}"


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of each value in nested ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, below in items:
        found.append((value, key))
        found += _places(below) if isinstance(below, (dict, list)) and below else []
    return found


def _mutate(value: Any, chance: random.Random) -> tuple[str, str]:
    """Change a value, or remove or rename it; return words and a text to put in its place."""
    container, key = chance.choice(_places(value))
    kind = chance.choice(["value", "value", "value", "raw", "remove", "rename", "swap", "copy"])
    raw = ""
    if kind == "value":
        container[key] = chance.choice(VALUES)
    elif kind == "raw":
        container[key] = ""
        raw = chance.choice(RAW)
    elif kind == "remove" or not isinstance(container, dict):
        del container[key]
    elif kind == "rename":
        container[chance.choice(["x", "", "same_as", "step", "a/b", "\0"])] = container.pop(key)
    elif kind == "swap":
        other = chance.choice([*container])
        container[key], container[other] = container[other], container[key]
    else:
        container |= {f"{key}#{number}": container[key] for number in range(2000)}
    return f"{kind} of {key}", raw


def _dump(value: Any, raw: str) -> bytes:
    with suppress(ValueError):  # 10**400 has too many digits
        return json.dumps(value).replace('""', raw).encode(errors="surrogateescape")
    return b"1" * 5000


def _change_config(run: Path, chance: random.Random) -> str:
    value = json.loads((run / "config.json").read_text())
    words, raw = _mutate(value, chance)
    (run / "config.json").write_bytes(_dump(value, raw))
    return f"config.json: {words}"


def _name_code(run: Path, chance: random.Random) -> str:
    """Name the canary where a configuration names code."""
    value = json.loads((run / "config.json").read_text())
    kind = chance.choice(["trainer", "trainer within", "packages", "optim", "schedule"])
    if kind == "trainer":
        value["task"]["trainer"] = "canary.Task"
    elif kind == "trainer within":
        value["task"]["trainer"] = "runs.tiny.a.canary.Task"
    else:
        value["task"]["packages"] = ["canary"]
        if kind != "packages":
            value[kind] = {"_target_": "canary.Task"}
    (run / "config.json").write_text(json.dumps(value))
    return f"code: {kind}"


def _change_line(run: Path, chance: random.Random) -> str:
    """Change a line of metrics.jsonl, or exit.json or .writer."""
    file = run / chance.choice(["metrics.jsonl", "metrics.jsonl", "exit.json", ".writer"])
    texts = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    at = chance.randrange(len(texts))
    value = json.loads(texts[at])
    words, raw = _mutate(value, chance)
    lines = [text.encode() for text in texts]
    lines[at] = _dump(value, raw) * chance.choice([1, 1, 1, 2, 500])
    file.write_bytes(b"\n".join(lines) + b"\n")
    return f"{file.name}: {words}"


def _change_checkpoint(run: Path, chance: random.Random) -> str:
    """Change values of a checkpoint, with digests that fit: whoever writes it can compute them."""
    path = _newest(run)
    manifest = json.loads((path / "manifest.json").read_text())
    name = chance.choice(["manifest.json", "manifest.json", "tensors.json", "training.pt"])
    raw = words = ""
    if name == "tensors.json":
        index = json.loads((path / name).read_text())
        words, raw = _mutate(index, chance)
        (path / name).write_bytes(_dump(index, raw))
        raw = ""
    elif name == "training.pt":
        words = _change_training(path / name, chance)
    else:
        words, raw = _mutate(manifest, chance)
    with suppress(KeyError, TypeError, AttributeError, OSError, ValueError):
        for file, entry in manifest["files"].items():
            data = (path / file).read_bytes()
            if name != "manifest.json":
                entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with suppress(ValueError):
        manifest.pop("sha256", None)
        manifest["sha256"] = digest_json(manifest)
    (path / "manifest.json").write_bytes(_dump(manifest, raw))
    return f"{name}: {words}"


def _change_training(file: Path, chance: random.Random) -> str:
    import torch

    state = torch.load(file, weights_only=True)
    for _ in range(100):
        container, key = chance.choice(_places(state))
        if isinstance(container, (dict, list)):
            break
    with suppress(TypeError):
        if chance.random() < 0.3:
            del container[key]
        else:
            choices = [value for value in VALUES if value != 10**400]
            container[key] = chance.choice(choices)
    torch.save(state, file)
    return f"another {key}"


def _claim_much(run: Path, chance: random.Random) -> str:
    """Claim a huge run, consistently: every digest fits."""
    path = _newest(run)
    manifest = json.loads((path / "manifest.json").read_text())
    step = chance.choice([10**8, 10**13, 10**17])
    aim = path.with_name(f"step-{step:08d}")
    path.rename(aim)
    manifest["step"] = step
    kind = chance.choice(["steps", "examples", "sessions", "ranks"])
    if kind == "examples":
        manifest["data"]["train"]["length"] = 10 ** chance.choice([12, 15, 18])
    elif kind == "sessions":
        manifest["sessions"] = [[0, 1]] * 10_000
    elif kind == "ranks":
        manifest["world_size"] = 10 ** chance.choice([6, 9, 18])
    del manifest["sha256"]
    manifest["sha256"] = digest_json(manifest)
    (aim / "manifest.json").write_text(json.dumps(manifest))
    return f"claims many {kind}"


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (
    *(_change_bytes, _change_bytes, _replace_file, _change_config, _change_config, _name_code),
    *(_change_line, _change_checkpoint, _change_checkpoint, _change_checkpoint, _claim_much),
)


def damage(run: Path, chance: random.Random) -> str:
    """Damage a run directory in one way, and return words about it."""
    return chance.choice(KINDS)(run, chance)


# The verbs ----------------------------------------------------------------------------------------


def judge(base: Path, code: int, out: str, err: str, seconds: float) -> str | None:
    """Return what is wrong with the end of a verb in `base`, or None."""
    text = out + err
    if (base / "ran").exists():
        return "the canary was imported"
    if "Traceback" in text:
        return f"a traceback: {text.strip().splitlines()[-1]}"
    if code not in (0, 1, 2):
        return f"exit code {code}: {text[-200:]}"
    if code == 2 and len(err.strip().splitlines()) != 1:
        return f"{len(err.splitlines())} lines: {err[:300]}"
    if seconds > LIMIT_S:
        return f"it took {seconds:.0f} s"
    size = sum(file.lstat().st_size for file in (base / "out").rglob("*"))
    return f"{size} bytes were written" if size > 2**24 else None


def snapshot(run: Path) -> list[tuple[str, int, int]]:
    found = []
    for path in sorted(run.rglob("*")):
        status = path.lstat()
        found.append((str(path), status.st_mode, status.st_size))
    return found


def problem_of_a_verb(base: Path, name: str) -> str | None:
    """Run a verb on the run directory in a fork; return what is wrong, or None."""
    verb = name.split()[0]
    module = "trainer" if verb == "resume" else f"trainer.{verb}"
    before = snapshot(base / RUN)
    began = time.monotonic()
    try:
        done = Command(base)(*VERBS[name], verb=module, limit_s=LIMIT_S)
    except Exception as error:  # of the limit
        return f"no end: {str(error)[-300:]}"
    seconds = time.monotonic() - began
    problem = judge(base, done.returncode, done.stdout, done.stderr, seconds)
    return problem or (None if snapshot(base / RUN) == before else "the run directory was changed")
