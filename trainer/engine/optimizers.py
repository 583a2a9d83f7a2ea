"""Optimizers: state by parameter name, options at a resume, and a step that can be skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.data.examples import find_flaw
from trainer.data.hook_errors import MOST_SHOWN, is_of_torch
from trainer.errors import CheckpointError, ConfigError, RunError, one_line

_WRONG = "the checkpoint is of another optimizer"


def check_optimizers(given: Any, subject: str = "build_optimizer returned") -> list[Optimizer]:
    """Return an optimizer, or a list of them, as a list. Raises ConfigError for anything else."""
    optimizers = given if isinstance(given, list) else [given]
    for item in optimizers:
        if not isinstance(item, Optimizer):
            must = "must be an optimizer, or a list of them"
            raise ConfigError(f"{subject} a {type(item).__name__}: {must}")
    if not optimizers:
        raise ConfigError(f"{subject} an empty list: must be an optimizer, or a list of them")
    return optimizers


def remember_options(optimizer: Optimizer, names: Mapping[Any, str]) -> None:
    """Store each group's options as built, and the names of its parameters.

    A resume uses the options to tell changes of the config from changes by training.
    """
    for group in optimizer.param_groups:
        if any(p not in names for p in group["params"]):
            why = "has a parameter that is not one of the model's"
            raise ConfigError(f"build_optimizer: {type(optimizer).__name__} {why}")
        if "lr" not in group:
            kind = type(optimizer).__name__
            must = "each must have one, which the schedule sets"
            raise ConfigError(f"build_optimizer: {kind} has parameters without an lr: {must}")
        group["initial"] = {key: value for key, value in group.items() if key != "params"}
        group["names"] = [names[p] for p in group["params"]]


def step_unless(optimizers: Sequence[Optimizer], found_inf: torch.Tensor) -> None:
    """Step the optimizers. If `found_inf` is 1, change neither weights nor state.

    Optimizers that support found_inf (torch's fused ones) skip on the device, so that the host does
    not wait for it. On a CPU, and for other optimizers, the host reads `found_inf`.
    """
    is_host = found_inf.device.type == "cpu"
    for optimizer in optimizers:
        if not is_host and _knows_found_inf(optimizer):
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            _step(optimizer)
        elif not found_inf:
            _step(optimizer)


def _step(optimizer: Optimizer) -> None:
    """Step. Raises ConfigError for an exception of torch's, such as for a missing closure."""
    try:
        optimizer.step()
    except (ConfigError, RunError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_of_torch(error):
            raise
        what = f"{type(error).__name__}: {one_line(error)[:MOST_SHOWN]}"
        raise ConfigError(f"{type(optimizer).__name__}.step() failed: {what}") from error


def _knows_found_inf(optimizer: Optimizer) -> bool:
    # Without state, a skipped first step leaves fused SGD with a momentum buffer of uninitialised
    # memory (torch 2.13).
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return bool(optimizer.state) or not any(g.get("momentum") for g in optimizer.param_groups)


def named_state(optimizer: Optimizer, names: Mapping[Any, str]) -> dict[str, Any]:
    """Return options and state by parameter name, without the tensors of the state."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "names")}
        groups.append({"names": _names_of(group, names), "options": options})
    state: dict[str, Any] = {}
    for p, values in optimizer.state.items():
        _check_state(optimizer, names, p, values)
        plain = {key: v for key, v in values.items() if not isinstance(v, torch.Tensor)}
        state |= {names[p]: plain} if plain else {}
    return {"class": type(optimizer).__name__, "state": state, "groups": groups}


def _check_state(optimizer: Optimizer, names: Mapping[Any, str], key: Any, values: Any) -> None:
    """Raise CheckpointError for a state that cannot be saved by the name of a parameter."""
    given = f"the state of {type(optimizer).__name__}"
    if not isinstance(key, torch.Tensor) or key not in names:
        must = "must have a key for each parameter, and no other"
        raise CheckpointError(f"{given} has the key {key!r:.60}: {must}")
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{given} for {names[key]} is a {type(values).__name__}: must be a dict"
        )
    for name, value in values.items():
        flaw = find_flaw(value, allows_gradient=True)
        if flaw:
            raise CheckpointError(f"{given} for {names[key]}: {name} is {flaw[0]}; {flaw[1]}")


def _names_of(group: Mapping[str, Any], names: Mapping[Any, str]) -> list[str]:
    return group.get("names") or [names[p] for p in group["params"]]  # a group added later


def check_count(optimizers: Sequence[Optimizer], saved: Sequence[Any]) -> None:
    if optimizers and len(saved) != len(optimizers):
        count = f"{len(saved)} optimizers, and the task builds {len(optimizers)}"
        raise CheckpointError(f"the checkpoint has {count}; resume with the task of the run")


def load_named_state(
    optimizer: Optimizer,
    names: Mapping[Any, str],
    saved: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Load what `named_state` returned, and the tensors of the state by parameter name and key.

    An option that the config changed keeps its new value.

    Raises CheckpointError if the state is of another optimizer.
    """
    built = [_names_of(group, names) for group in optimizer.param_groups]
    kind = type(optimizer).__name__
    if kind != saved["class"]:
        raise CheckpointError(f"{_WRONG}: {saved['class']} in it and {kind} here")
    if built != [group["names"] for group in saved["groups"]]:
        raise CheckpointError(f"{_WRONG}: {kind} has other parameter groups in it than here")
    groups = []
    first = 0
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=True):
        last = first + len(group["params"])
        merged = _merge_options(group, old["options"])
        groups.append(merged | {"params": list(range(first, last))})
        first = last
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    values = {name: {**saved["state"].get(name, {}), **tensors.get(name, {})} for name in order}
    state = {number: values[name] for number, name in enumerate(order) if values[name]}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _merge_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    before = saved["initial"]
    after = group["initial"]
    kept = {k: v for k, v in saved.items() if k in after and before.get(k) == after[k]}
    return {k: v for k, v in group.items() if k != "params"} | kept
