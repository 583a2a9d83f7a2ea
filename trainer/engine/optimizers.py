"""The optimizers of a run: their steps, which can be skipped, learning rates and state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from trainer.engine.optimizer_state import (
    check_count,
    check_groups,
    check_state,
    load_named_state,
    named_state,
    parameter_state,
    remember_options,
    restore_groups,
)
from trainer.errors import ConfigError, one_line
from trainer.hook_errors import MOST_SHOWN, is_explained, is_of_torch
from trainer.schedule import Factor
from trainer.strategy.mesh_model.optimizer_trial import (
    check_by_trial,
    check_fused,
    is_elementwise,
)
from trainer.strategy.shards import Shard, TensorSource
from trainer.strategy.tensors import Tensors


class Optimizers:
    """A task's optimizers, over this rank's parts of the parameters, with their learning rates."""

    def __init__(self, built: Any, tensors: Tensors, schedule: Factor, scale: float):
        """`built` is what `build_optimizer` returned; rates are their own x schedule x `scale`.

        Raises ConfigError for an optimizer that cannot be stepped or saved. A collective.
        """
        self.schedule = schedule
        self._all = check_optimizers(built)
        self._tensors = tensors
        self._scale = scale
        self._updated: dict[Optimizer, list[nn.Parameter]] = {}
        for optimizer in self._all:
            remember_options(optimizer, tensors.names())
            self._updated[optimizer] = tensors.adopt(optimizer)
            check_fused(optimizer)
        self._groups = self._list_groups()

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._all)

    def _list_groups(self) -> list[tuple[dict[str, Any], float]]:
        """Return each group as built that has a learning rate, with it; not those added later."""
        groups = [group for optimizer in self for group in optimizer.param_groups]
        return [(g, g["initial"]["lr"]) for g in groups if "lr" in g.get("initial", {})]

    def set_rate(self, step: int) -> None:
        """Set the learning rate of every parameter group for the 0-based `step`."""
        factor = self.schedule(step) * self._scale
        for group, initial in self._groups:
            group["lr"] = initial * factor

    def rates_around(self, step: int) -> list[float]:
        """Return the first group's learning rate as it is, and as it will be at `step`."""
        factor = self.schedule(step) * self._scale
        return [
            rate for group, initial in self._groups[:1] for rate in (group["lr"], initial * factor)
        ]

    def rates(self) -> dict[str, float]:
        """Return the learning rate of the first parameter group that has one, by name."""
        return {"optim/lr": float(self._groups[0][0]["lr"])} if self._groups else {}

    def find_others(self, chosen: Sequence[Optimizer]) -> list[nn.Parameter]:
        """Return the trained parameters that the `chosen` optimizers do not update.

        Raises ConfigError for an optimizer that `build_optimizer` did not return.
        """
        for optimizer in chosen:
            if optimizer not in self._updated:
                given = f"update got a {type(optimizer).__name__} as one of its optimizers"
                must = "must be of those that build_optimizer returned, which checkpoints hold"
                raise ConfigError(f"{given}: {must}")
        updated = {id(p) for optimizer in chosen for p in self._updated[optimizer]}
        return [p for p in self._tensors.trained if id(p) not in updated]

    def step(self, found_inf: torch.Tensor, chosen: Sequence[Optimizer] | None = None) -> None:
        """Step the `chosen` optimizers, by default all, unless `found_inf` is 1."""
        step_unless(chosen or self._all, found_inf)

    def check(self, is_divided: bool) -> None:
        """Raise ConfigError for state that no resume could load."""
        names = self._tensors.names()
        for optimizer in self:
            check_groups(optimizer, names, is_divided)
            check_state(optimizer, names, is_divided)

    def state(self) -> list[dict[str, Any]]:
        """Return options and state by parameter name, without the tensors of `shards`."""
        names = self._tensors.names()
        return [named_state(optimizer, names) for optimizer in self]

    def shards(self) -> dict[str, Shard]:
        """Return this rank's parts of the state's tensors, as `<number>/<parameter>/<key>`."""
        names = self._tensors.names()
        state: dict[str, Shard] = {}
        for number, optimizer in enumerate(self):
            for parameter, values in parameter_state(optimizer).items():
                shard = self._tensors.shard_of(parameter, is_state=True)
                prefix = f"{number}/{names[parameter]}"
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        state[f"{prefix}/{key}"] = shard.holding(value)
        return state

    def load(self, source: TensorSource, saved: Sequence[Any]) -> None:
        """Load the tensors of `shards`, and what `state` returned.

        Raises CheckpointError if they are of other optimizers.
        """
        check_count(self._all, saved)
        names = self._tensors.names()
        for number, optimizer in enumerate(self):
            restore_groups(optimizer, names, saved[number])
            load_named_state(optimizer, names, saved[number], self._read(number, source))
        self._groups = self._list_groups()

    def _read(self, number: int, source: TensorSource) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's parts of an optimizer's state, by parameter name and key."""
        groups = self._all[number].param_groups
        names = self._tensors.names()
        own = {names[p]: self._tensors.shard_of(p) for group in groups for p in group["params"]}
        state: dict[str, dict[str, torch.Tensor]] = {}
        for place, shape in source.shapes().items():
            first, _, rest = place.partition("/")
            name, _, key = rest.rpartition("/")
            if first != str(number):
                continue
            if name not in own:
                source.skip(place)
                continue
            if shape and shape == own[name].shape:
                value = own[name].read(source, place)
            else:
                value = source.read(place, (0,) * len(shape), shape)
            state.setdefault(name, {})[key] = value
        return state


class Norms:
    """Norms of the gradients of a step's updates: for clipping, and for the log."""

    def __init__(self, limit: float | None):
        self._limit = limit
        self._is_logged = False
        self._found: dict[str, torch.Tensor] = {}

    @property
    def are_wanted(self) -> bool:
        return self._limit is not None or self._is_logged

    def begin_step(self, is_logged: bool) -> None:
        self._is_logged = is_logged

    def note(self, name: str, norm: torch.Tensor | None) -> None:
        if norm is not None:
            self._found[name] = norm

    def clip(self, parameters: Sequence[nn.Parameter], norm: torch.Tensor | None) -> None:
        if self._limit is not None and norm is not None:
            clip_grads_with_norm_(parameters, self._limit, norm)

    def take(self) -> dict[str, torch.Tensor]:
        """Return the norm () of each update's last gradients before clipping, by name, once."""
        norms, self._found = self._found, {}
        return norms


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
            if isinstance(given, tuple) and not all(isinstance(each, Optimizer) for each in given):
                must += "; return the schedule in build_schedule"
            raise ConfigError(f"{subject} a {type(item).__name__}: {must}")
        _complete(item)
        _check_step(item)
    if not optimizers:
        raise ConfigError(f"{subject} an empty list: must be an optimizer, or a list of them")
    return optimizers


def _complete(optimizer: Optimizer) -> None:
    """Give a wrapper that does not call Optimizer.__init__ the attributes that torch expects."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        defaults = getattr(optimizer, "defaults", {})
        Optimizer.__setstate__(optimizer, {"defaults": defaults})


def _check_step(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that `update` cannot step."""
    kind = type(optimizer)
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        why = f"{kind.__name__} has train() and eval(), which move the weights between steps"
        advice = "use an optimizer without, such as optim=adamw with run.ema_decay"
        raise ConfigError(f"build_optimizer: {why}; {advice}")
    if any("initial_lr" in group for group in optimizer.param_groups):
        why = f"{kind.__name__} has a scheduler of torch, whose rates schedule= would overwrite"
        advice = "leave it out, and write build_schedule"
        raise ConfigError(f"build_optimizer: {why}; {advice}")
    check_by_trial(optimizer)


def step_unless(optimizers: Sequence[Optimizer], found_inf: torch.Tensor) -> None:
    """Step the optimizers. If `found_inf` is 1, change neither weights nor state.

    On an accelerator this is decided on the device, so that the host does not wait for it:
    optimizers that support found_inf (torch's fused ones) skip, others step and get back what they
    had. On a CPU, and where there is no state yet to give back, the host reads `found_inf`.
    """
    is_host = found_inf.device.type == "cpu"
    for optimizer in optimizers:
        if not is_host and _knows_found_inf(optimizer):
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            _step(optimizer)
        elif not is_host and (kept := _tensors_of(optimizer)) is not None:
            _step_and_undo(optimizer, kept, found_inf)
        elif not found_inf:
            _step(optimizer)


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor] | None:
    """Return the tensors that a step changes; None if a step may make more, or change numbers."""
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    tensors = list(stepped)
    for parameter in stepped:
        values = list(optimizer.state.get(parameter, {}).values())
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            return None
        tensors += values
    return [getattr(each, "_local_tensor", each) for each in tensors]  # of FSDP: this rank's


@torch.no_grad()
def _step_and_undo(
    optimizer: Optimizer, tensors: Sequence[torch.Tensor], found_inf: torch.Tensor
) -> None:
    """Step, and where `found_inf` is 1 write back what the tensors held: a copy of them each."""
    kept = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(kept, [*tensors])  # one launch
    _step(optimizer)
    is_skipped = {device: found_inf.to(device) > 0 for device in {t.device for t in tensors}}
    for tensor, before in zip(tensors, kept, strict=True):
        torch.where(is_skipped[tensor.device], before, tensor, out=tensor)


def _step(optimizer: Optimizer) -> None:
    """Step. Raises ConfigError for an exception of torch's, such as for a missing closure."""
    if isinstance(optimizer, torch.optim.SGD):
        _begin_momentum(optimizer)
    try:
        optimizer.step()
    except Exception as error:
        if is_explained(error) or not is_of_torch(error):
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
    # A step of the user's may change weights beside the fused one.
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not is_elementwise(optimizer):
        return False
    return bool(optimizer.state) or not any(g.get("momentum") for g in optimizer.param_groups)
