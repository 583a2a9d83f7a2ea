"""Fingerprints: the facts that must be equal on all ranks, and in a resumed run."""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import trainer
from trainer.base.errors import CheckpointError, counted
from trainer.base.folders import PACKAGE
from trainer.core.config.schema import Config
from trainer.core.data import ledger
from trainer.core.data.sampling import Sampling
from trainer.core.data.sampling.mixture import digest_of
from trainer.core.distributed import accelerator
from trainer.core.distributed.world import World

OF_RANK_0 = ("run.dir", "run.name", "run.resume")  # may differ: only rank 0 uses them


def of_start(config: Config, task: type) -> dict[str, Any]:
    """Return configuration, versions, default dtype, and digests of Lockstep and the task."""
    facts = {key: value for key, value in config.flat().items() if key not in OF_RANK_0}
    facts["torch's version"] = torch.__version__
    facts["Lockstep's version"] = trainer.__version__
    facts["the default dtype"] = str(torch.get_default_dtype())
    return facts | {f"the code of {name}": digest for name, digest in of_code(task).items()}


def of_code(task: type) -> dict[str, str]:
    """Return digests of Lockstep and of the files that define the task's classes, by module."""
    digests = {"trainer": _package_digest()}
    for base in task.__mro__:
        module = base.__module__
        is_known = module.startswith(("trainer.", "builtins"))
        if not is_known or module.startswith("trainer.tasks."):
            digests[module] = _module_digest(base)
    return digests


def of_machine(world: World) -> dict[str, str]:
    """Return the software versions and the kind of device: others may round differently."""
    device = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    if accelerator.is_used(world.device):
        device = accelerator.describe(world.device)
    return {
        "Lockstep": trainer.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the device": device,
    }


def of_data(
    datasets: Mapping[str, Any], sampling: Sampling, reads: bool = False
) -> dict[str, dict[str, Any]]:
    """Return length, digest and, if it `reads` them, content of the data, by split.

    Of the training data also the number of positions of an epoch, and the digest of its sampling.
    """
    facts: dict[str, dict[str, Any]] = {}
    for split, data in datasets.items():
        facts[split] = {"length": len(data), "digest": getattr(data, "digest", "")}
        if reads:
            facts[split]["content"] = ledger.describe(data)
        if split == "train":
            facts[split] |= {"size": sampling.size, "sampling": digest_of(sampling)}
    return facts


def of_built(datasets: Mapping[str, Any], sampling: Sampling, model: nn.Module) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for split, values in of_data(datasets, sampling).items():
        facts |= {f"the {split} data's {name}": value for name, value in values.items()}
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter):
            facts[f"the shape of {name}"] = list(parameter.shape)
    return facts


def check_data(
    current: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise CheckpointError if the data differs from that of the run to resume."""
    advice = "resume with the same data, or start a new run"
    for split in [split for split in saved if split in current]:
        for name in ("length", "digest", "size", "sampling"):
            own = current[split].get(name)
            if name in saved[split] and own != (value := saved[split][name]):
                raise CheckpointError(f"""the {split} data has {name} {own},
                    the run to resume had {value}: {advice}""")
        before = saved[split].get("content")
        if changed := ledger.find_changes(before, current[split].get("content")):
            raise CheckpointError(f"""the {split} data has other content than the run to resume
                had ({", ".join(changed[:4])} of {counted(len(before or ()), "place")} compared):
                {advice}""")


def list_unsteady(current: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each split whose content cannot be compared at a resume."""
    why = "an example differs when it is read twice, so a resume cannot notice other data"
    unsteady = [split for split, facts in current.items() if facts.get("content", {}) is None]
    return [f"{split}: {why}" for split in unsteady]


@cache
def _package_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _module_digest(base: type) -> str:
    """Return the digest of the file that defines a class; empty without one, as in a notebook."""
    try:
        return hashlib.sha256(Path(inspect.getfile(base)).read_bytes()).hexdigest()[:12]
    except (OSError, TypeError):
        return ""
