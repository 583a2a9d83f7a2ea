"""State of optimizers: options and tensors by parameter name, at a checkpoint and at a resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer.base.errors import CheckpointError, ConfigError
from trainer.core.data.examples import find_flaw
from trainer.core.strategy.optimizer_trial import inner_optimizers

_WRONG = "the checkpoint is of another optimizer"
_USE_THAT_ONE = "resume with that one, or start a new run with run.init_from"


def remember_options(optimizer: Optimizer, names: Mapping[Any, str]) -> None:
    """Store each group's options as built, and the names of its parameters.

    A resume uses the options to tell changes of the config from changes by training.
    """
    for group in optimizer.param_groups:
        if any(p not in names for p in group["params"]):
            raise ConfigError(f"""build_optimizer: {type(optimizer).__name__}
                has a parameter that is not one of the model's; register it in the model""")
        group["initial"] = {key: value for key, value in group.items() if key != "params"}
        group["names"] = [names[p] for p in group["params"]]


def named_state(optimizer: Optimizer, names: Mapping[Any, str]) -> dict[str, Any]:
    """Return options and state by parameter name, without the tensors of the state."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "names")}
        groups.append({"names": _names_of(group, names), "options": options})
    state: dict[str, Any] = {}
    for p, values in parameter_state(optimizer).items():
        plain = {key: v for key, v in values.items() if not isinstance(v, torch.Tensor)}
        state |= {names[p]: plain} if plain else {}
    shared = {key: v for key, v in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {
        "class": type(optimizer).__name__,
        "state": state,
        "shared": shared,
        "groups": groups,
    }


def parameter_state(optimizer: Optimizer) -> dict[torch.Tensor, Any]:
    """Return the state by parameter, without what belongs to no parameter."""
    return {p: v for p, v in optimizer.state.items() if isinstance(p, torch.Tensor)}


def check_groups(optimizer: Optimizer, names: Mapping[Any, str], is_divided: bool) -> None:
    """Raise ConfigError for a group added in training that no step or resume could treat right."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        is_late = "initial" not in group
        if is_late and any(p not in names for p in group["params"]):
            raise ConfigError(f"""optimizer {kind}: a parameter group was added
                with a tensor that is not one of the model's; register it in the model""")
        if is_late and is_divided:
            raise ConfigError(f"""optimizer {kind}: a parameter group was added after the start,
                and this rank has parts only; add it in build_optimizer, or use ddp""")


def restore_groups(optimizer: Optimizer, names: Mapping[Any, str], saved: Any) -> None:
    """Add the parameter groups that were added in training, which a checkpoint has at the end."""
    num_built = len(optimizer.param_groups)
    by_name = {name: parameter for parameter, name in names.items()}
    used = {names[p] for group in optimizer.param_groups for p in group["params"]}
    for late in saved["groups"][num_built:]:
        if "initial" in late["options"] or not by_name.keys() - used >= set(late["names"]):
            return  # `load_named_state` refuses it
        parameters = [by_name[name] for name in late["names"]]
        optimizer.add_param_group({**late["options"], "params": parameters})


def check_state(optimizer: Optimizer, names: Mapping[Any, str], is_divided: bool) -> None:
    """Raise ConfigError, naming the entry, for state that a resume could not load.

    If the model `is_divided`, a tensor in a list or dict would be this rank's part only.
    """
    kind = type(optimizer).__name__
    for owner, values in optimizer.state.items():
        if not isinstance(owner, torch.Tensor):
            _check_plain(f"optimizer {kind}: state[{owner!r}]", [owner, values], True)
            continue
        if owner not in names:
            raise ConfigError(f"""optimizer {kind}: has state for a tensor that
                is not one of the model's parameters; register it in the model""")
        subject = f"optimizer {kind}: state[{names[owner]}]"
        if not isinstance(values, Mapping):
            raise ConfigError(f"{subject} is a {type(values).__name__}: must be a dict")
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                _check_plain(f"{subject}[{key!r}]", value, is_divided)
            elif flaw := find_flaw(value, allows_gradient=True):
                raise ConfigError(f"{subject}[{key!r}] is {flaw[0]}; {flaw[1]}")


def _check_plain(subject: str, value: Any, is_alone: bool) -> None:
    """Raise ConfigError if a value has more than numbers, strings and, unless alone, tensors."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and is_alone:
            raise ConfigError(f"""{subject} has a tensor, which not every layout can load;
                keep each tensor as an entry of its own in the state of its parameter""")
        if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
            raise ConfigError(f"""{subject} has a {type(leaf).__name__}:
                a checkpoint holds tensors, numbers and strings; keep it in the config""")


def _names_of(group: Mapping[str, Any], names: Mapping[Any, str]) -> list[str]:
    return group.get("names") or [names[p] for p in group["params"]]  # a group added later


def check_count(optimizers: Sequence[Optimizer], saved: Sequence[Any]) -> None:
    if optimizers and len(saved) != len(optimizers):
        raise CheckpointError(f"""the checkpoint has {len(saved)} optimizers,
            and the task builds {len(optimizers)}; resume with the task of the run""")


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
        raise CheckpointError(f"{_WRONG}: {saved['class']} in it and {kind} here; {_USE_THAT_ONE}")
    if built != [group["names"] for group in saved["groups"]]:
        raise CheckpointError(f"{_WRONG}: {kind} has other parameter groups in it than here")
    groups = []
    first = 0
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=True):
        last = first + len(group["params"])
        merged = _merge_options(group, old["options"])
        groups.append(merged | {"params": list(range(first, last))})
        first = last
    state: dict[Any, Any] = dict(saved.get("shared", {}))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        name = names[parameter]
        own = {key: _ordered_like(parameter, value) for key, value in tensors.get(name, {}).items()}
        if values := {**saved["state"].get(name, {}), **own}:
            state[index] = values
    before = list(optimizer.param_groups)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _give_to_inner(optimizer, before)


def _give_to_inner(optimizer: Optimizer, before: Sequence[Any]) -> None:
    """Give the optimizers that one wraps its groups and state, which torch makes anew."""
    places = {id(group): index for index, group in enumerate(before)}
    for inner in inner_optimizers(optimizer):
        inner.state = optimizer.state
        for index, group in enumerate(inner.param_groups):
            if (outer_index := places.get(id(group))) is not None:
                inner.param_groups[index] = optimizer.param_groups[outer_index]


def _ordered_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the state with the order of axes in memory of its parameter.

    Fused kernels walk both at once: a resumed AdamW on channels_last weights was 6e-3 off after 15
    steps (torch 2.13).
    """
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _merge_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    if "initial" not in group:  # added in training
        return {**saved}
    before = saved["initial"]
    after = group["initial"]
    unchanged = {k: v for k, v in saved.items() if k in after and before.get(k) == after[k]}
    return {k: v for k, v in group.items() if k != "params"} | unchanged
