"""Optimizers: their state by parameter name, their rates, and a step that can be skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.errors import CheckpointError, ConfigError

_WRONG = "the checkpoint is of another optimizer"


def check_optimizers(built: Any) -> list[Optimizer]:
    """A list of what `build_optimizer` returned. Raises ConfigError for anything else."""
    optimizers = built if isinstance(built, list) else [built]
    for found in optimizers:
        if not isinstance(found, Optimizer):
            given = type(found).__name__
            must = "must be an optimizer, or a list of them"
            raise ConfigError(f"build_optimizer returned a {given}: {must}")
    return optimizers


def remember_options(optimizer: Optimizer) -> None:
    """Note each group's options as built: a resume tells config changes from what training did."""
    for group in optimizer.param_groups:
        group["initial"] = {key: value for key, value in group.items() if key != "params"}


def step_unless(optimizers: Sequence[Optimizer], found_inf: torch.Tensor) -> None:
    """Step, unless `found_inf` is 1: then neither weights nor state change.

    Optimizers that know found_inf (torch's fused ones) skip on the device, so that the host need
    not wait for it; on a CPU, and for others, the host looks.
    """
    is_host = found_inf.device.type == "cpu"
    for optimizer in optimizers:
        if not is_host and _knows_found_inf(optimizer):
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.step()
        elif not found_inf:
            optimizer.step()


def _knows_found_inf(optimizer: Optimizer) -> bool:
    # A skipped first step leaves fused SGD a momentum buffer of uninitialised memory (torch 2.13):
    # not without state.
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return bool(optimizer.state) or not any(g.get("momentum") for g in optimizer.param_groups)


def named_state(optimizer: Optimizer, names: Mapping[Any, str]) -> dict[str, Any]:
    """The state by parameter name: the order in which parameters were registered is irrelevant."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"names": [names[p] for p in group["params"]], "options": options})
    state = {names[p]: dict(state) for p, state in optimizer.state.items()}
    return {"class": type(optimizer).__name__, "state": state, "groups": groups}


def check_count(optimizers: Sequence[Optimizer], saved: Sequence[Any]) -> None:
    if optimizers and len(saved) != len(optimizers):
        count = f"{len(saved)} optimizers, the task builds {len(optimizers)}"
        raise CheckpointError(f"the checkpoint holds {count}")


def load_named_state(
    optimizer: Optimizer, names: Mapping[Any, str], saved: Mapping[str, Any]
) -> None:
    """Load what `named_state` gave; an option that the config changed is the config's.

    Raises CheckpointError for the state of another optimizer.
    """
    ours = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    kind = type(optimizer).__name__
    if kind != saved["class"]:
        raise CheckpointError(f"{_WRONG}: {saved['class']} in it and {kind} here")
    if ours != [group["names"] for group in saved["groups"]]:
        raise CheckpointError(f"{_WRONG}: {kind} groups other parameters here than there")
    groups = []
    first = 0
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=True):
        last = first + len(group["params"])
        merged = _merge_options(group, old["options"])
        groups.append(merged | {"params": list(range(first, last))})
        first = last
    order = [name for group in ours for name in group]
    state = {i: saved["state"][name] for i, name in enumerate(order) if name in saved["state"]}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _merge_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    was = saved["initial"]
    now = group["initial"]
    kept = {k: v for k, v in saved.items() if k in now and was.get(k) == now[k]}
    return {k: v for k, v in group.items() if k != "params"} | kept
