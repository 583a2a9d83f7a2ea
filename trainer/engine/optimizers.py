"""Optimizers: state by parameter name, options at a resume, and a step that can be skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer.data.examples import find_flaw
from trainer.errors import CheckpointError, ConfigError, RunError, one_line
from trainer.hook_errors import MOST_SHOWN, is_of_torch
from trainer.strategy.mesh_model.optimizer_trial import check_closure, is_elementwise

_WRONG = "the checkpoint is of another optimizer"


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained matrices, which Muon steps, and the other parameters.

    An embedding is none: its rows are no map between activations (K. Jordan,
    kellerjordan.github.io/posts/muon).
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {m.weight for m in model.modules() if isinstance(m, kinds)}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and p not in embeddings]
    return matrices, [p for p in trained if p.dim() != 2 or p in embeddings]


def check_optimizers(given: Any, subject: str = "build_optimizer returned") -> list[Optimizer]:
    """Return an optimizer, or a list of them, as a list. Raises ConfigError for anything else."""
    optimizers = given if isinstance(given, list) else [given]
    for item in optimizers:
        if not isinstance(item, Optimizer):
            must = "must be an optimizer, or a list of them"
            raise ConfigError(f"{subject} a {type(item).__name__}: {must}")
        _check_step(item)
    if not optimizers:
        raise ConfigError(f"{subject} an empty list: must be an optimizer, or a list of them")
    return optimizers


def _check_step(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that `update` cannot step."""
    kind = type(optimizer)
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        why = f"{kind.__name__} has train() and eval(), which move the weights between steps"
        advice = "use an optimizer without, such as optim=adamw with run.ema_decay"
        raise ConfigError(f"build_optimizer: {why}; {advice}")
    if not is_elementwise(optimizer):
        check_closure(optimizer)


def remember_options(optimizer: Optimizer, names: Mapping[Any, str]) -> None:
    """Store each group's options as built, and the names of its parameters.

    A resume uses the options to tell changes of the config from changes by training.
    """
    for group in optimizer.param_groups:
        if any(p not in names for p in group["params"]):
            why = "has a parameter that is not one of the model's; register it in the model"
            raise ConfigError(f"build_optimizer: {type(optimizer).__name__} {why}")
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
    if isinstance(optimizer, torch.optim.SGD):
        _begin_momentum(optimizer)
    try:
        optimizer.step()
    except (ConfigError, RunError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_of_torch(error):
            raise
        what = f"{type(error).__name__}: {one_line(error)[:MOST_SHOWN]}"
        raise ConfigError(f"{type(optimizer).__name__}.step() failed: {what}") from error


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Give a buffer to parameters that get their first gradient after the others.

    torch's fused SGD takes buffers for all or for none (TypeError in torch 2.13). From a buffer of
    zeros the first update is the same, unless dampening is set.
    """
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return  # all have one: the loop takes 90 us for 300 parameters, in each step
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"] or group["dampening"]:
            continue
        ready = [p for p in group["params"] if p.grad is not None]
        late = [p for p in ready if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if 0 < len(late) < len(ready):
            for p in late:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


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
            why = "a parameter group was added with a tensor that is not one of the model's"
            raise ConfigError(f"optimizer {kind}: {why}; register it in the model")
        if is_late and is_divided:
            why = "a parameter group was added after the start, and this rank has parts only"
            raise ConfigError(f"optimizer {kind}: {why}; add it in build_optimizer, or use ddp")


def restore_groups(optimizer: Optimizer, names: Mapping[Any, str], saved: Any) -> None:
    """Add the parameter groups that were added in training, which a checkpoint has at the end."""
    num_built = len(optimizer.param_groups)
    known = {name: parameter for parameter, name in names.items()}
    used = {names[p] for group in optimizer.param_groups for p in group["params"]}
    for late in saved["groups"][num_built:]:
        if "initial" in late["options"] or not known.keys() - used >= set(late["names"]):
            return  # `load_named_state` refuses it
        parameters = [known[name] for name in late["names"]]
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
            why = "has state for a tensor that is not one of the model's parameters"
            raise ConfigError(f"optimizer {kind}: {why}; register it in the model")
        given = f"optimizer {kind}: state[{names[owner]}]"
        if not isinstance(values, Mapping):
            raise ConfigError(f"{given} is a {type(values).__name__}: must be a dict")
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                _check_plain(f"{given}[{key!r}]", value, is_divided)
            elif flaw := find_flaw(value, allows_gradient=True):
                raise ConfigError(f"{given}[{key!r}] is {flaw[0]}; {flaw[1]}")


def _check_plain(place: str, value: Any, is_alone: bool) -> None:
    """Raise ConfigError if a value has more than numbers, strings and, unless alone, tensors."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and is_alone:
            advice = "keep each tensor as an entry of its own in the state of its parameter"
            raise ConfigError(f"{place} has a tensor, which not every layout can load; {advice}")
        if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
            must = "a checkpoint holds tensors, numbers and strings; keep it in the config"
            raise ConfigError(f"{place} has a {type(leaf).__name__}: {must}")


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
    state: dict[Any, Any] = dict(saved.get("shared", {}))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        name = names[parameter]
        own = {key: _ordered_like(parameter, value) for key, value in tensors.get(name, {}).items()}
        if values := {**saved["state"].get(name, {}), **own}:
            state[number] = values
    optimizer.load_state_dict({"state": state, "param_groups": groups})


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
    kept = {k: v for k, v in saved.items() if k in after and before.get(k) == after[k]}
    return {k: v for k, v in group.items() if k != "params"} | kept
