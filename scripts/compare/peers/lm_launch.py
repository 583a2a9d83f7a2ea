"""The commands of both contestants of compare_trl.py and bench_lm.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.launch import environment_of_a_command

from peers.lm_problem import Settings

PEERS = Path(__file__).resolve().parent
TITLES = {"trl": "TRL", "lockstep": "Lockstep"}
PACKAGES = ("trl", "transformers", "peft", "accelerate", "datasets", "torch")


def read(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def data_words(rows: str, evaluated: str, context: int, lora: int | None) -> list[str]:
    words = [f"task.options.data={rows}", f"task.options.eval={evaluated}"]
    words += [f"task.options.context={context}", "task.options.answers=0"]
    return [*words, f"task.options.lora={'null' if lora is None else lora}"]


def lockstep_words(settings: Settings) -> list[str]:
    words = ["-m", "trainer", "task=lm", "task.trainer=peers.lm_task.Watched"]
    words += data_words(settings.rows, settings.eval, settings.context, settings.lora)
    words += [f"task.options.model={settings.model}"]
    words += [f"task.options.packing={str(settings.packing).lower()}"]
    words += [f"run.dir={settings.folder}", "run.name=run", f"run.steps={settings.steps}"]
    words += [f"optim={settings.optimizer}", f"optim.lr={settings.rate}", "optim.weight_decay=0"]
    words += ["optim.momentum=0"] if settings.optimizer == "sgd" else []
    words += ["schedule=constant", "schedule.warmup_steps=0"]
    words += [f"data.global_batch={settings.batch}", f"data.micro_batch={settings.micro_batch}"]
    words += [f"strategy={settings.strategy}", f"strategy.precision={settings.precision}"]
    words += ["log.every_steps=1", "log.trackers=[]", "eval.every_steps=null"]
    words += [f"checkpoint.every_steps={settings.save_every or 'null'}"]
    words += ["checkpoint.every_epochs=null", "checkpoint.best_metric=null"]
    if settings.is_watched:  # each loss once, and an adapter at the end
        words.append("checkpoint.export=hf")
    if settings.is_watched or not settings.prove:
        words.append("run.prove=false")
    return [*words, "run.resume=auto"] if settings.resume else words


def start(
    name: str, python: str, ranks: int, settings: Settings, **more: str
) -> tuple[subprocess.Popen, Path]:
    """Start a run under torchrun; return its process and the file of its output."""
    settings.path.mkdir(parents=True, exist_ok=True)
    output = settings.path / f"output-{len(list(settings.path.glob('output-*')))}"
    own = lockstep_words(settings) if name == "lockstep" else [str(PEERS / "trl_script.py")]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = environment_of_a_command(**settings.environment(), HF_HUB_OFFLINE="1", **more)
    if name == "trl":
        environment["PYTHONPATH"] = str(PEERS.parent)
    with output.open("w") as stream:
        process = subprocess.Popen(
            [python, *launcher, *own],
            cwd=settings.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    return process, output


def versions(python: str) -> str:
    """Return the versions of both; raise SystemExit if TRL is not there."""
    found = []
    for each, packages in ((python, PACKAGES), (sys.executable, PACKAGES[1:])):
        code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
        command = [each, "-c", code, *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            needed = ", ".join(packages)
            raise SystemExit(f"--trl {python}: must be the Python of a venv with {needed}")
        pairs = zip(packages, done.stdout.split(), strict=True)
        found.append(", ".join(f"{package} {version}" for package, version in pairs))
    return "; Lockstep with ".join(found)
