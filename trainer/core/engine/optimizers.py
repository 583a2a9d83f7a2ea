"""The optimizers of a run: their steps, which can be skipped, learning rates and state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.engine.optimizer_state import (
    check_count,
    check_groups,
    check_state,
    load_named_state,
    named_state,
    parameter_state,
    remember_options,
    restore_groups,
)
from trainer.core.engine.step import Norms, Rates
from trainer.core.schedule import Factor, rate_scale
from trainer.core.strategy.optimizer_trial import (
    check_by_trial,
    check_fused,
)
from trainer.core.strategy.tensor_shards import Shard, TensorSource
from trainer.core.strategy.tensors import Tensors


class Optimizers:
    """A task's optimizers, over this rank's parts of the parameters, with their learning rates."""

    def __init__(self, built: Any, tensors: Tensors, schedule: Factor, config: Config):
        """`built` is what `build_optimizer` returned.

        Learning rates are their own x schedule x the scale of run.lr_scaling.
        Raises ConfigError for an optimizer that cannot be stepped or saved. A collective.
        """
        self.every = check_optimizers(built)
        self._tensors = tensors
        self.norms = Norms(config.run.clip_norm)
        self._updated: dict[Optimizer, list[nn.Parameter]] = {}
        for optimizer in self.every:
            remember_options(optimizer, tensors.names())
            self._updated[optimizer] = tensors.adopt(optimizer)
            check_fused(optimizer)
        self.rates = Rates(self.every, schedule, rate_scale(config))

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.every)

    def find_others(self, chosen: Sequence[Optimizer]) -> list[nn.Parameter]:
        """Return the trained parameters that the `chosen` optimizers do not update.

        Raises ConfigError for an optimizer that `build_optimizer` did not return.
        """
        for optimizer in chosen:
            if optimizer not in self._updated:
                raise ConfigError(f"""update got a {type(optimizer).__name__}
                    as one of its optimizers:
                    must be of those that build_optimizer returned, which checkpoints hold""")
        updated = {id(p) for optimizer in chosen for p in self._updated[optimizer]}
        return [p for p in self._tensors.trained if id(p) not in updated]

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
        """Return this rank's parts of the state's tensors, as `<optimizer>/<parameter>/<key>`."""
        names = self._tensors.names()
        state: dict[str, Shard] = {}
        for index, optimizer in enumerate(self):
            for parameter, values in parameter_state(optimizer).items():
                shard = self._tensors.shard_of(parameter, is_state=True)
                prefix = f"{index}/{names[parameter]}"
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        state[f"{prefix}/{key}"] = shard.holding(value)
        return state

    def load(self, source: TensorSource, saved: Sequence[Any]) -> None:
        """Load the tensors of `shards`, and what `state` returned.

        Raises CheckpointError if they are of other optimizers.
        """
        check_count(self.every, saved)
        names = self._tensors.names()
        for index, optimizer in enumerate(self):
            restore_groups(optimizer, names, saved[index])
            load_named_state(optimizer, names, saved[index], self._read(index, source))
        self.rates.list_groups()

    def _read(self, index: int, source: TensorSource) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's parts of an optimizer's state, by parameter name and key."""
        groups = self.every[index].param_groups
        names = self._tensors.names()
        own = {names[p]: self._tensors.shard_of(p) for group in groups for p in group["params"]}
        state: dict[str, dict[str, torch.Tensor]] = {}
        for tensor_name, shape in source.shapes().items():
            first, _, rest = tensor_name.partition("/")
            name, _, key = rest.rpartition("/")
            if first != str(index):
                continue
            if name not in own:
                source.skip(tensor_name)
                continue
            if shape and shape == own[name].shape:
                value = own[name].read(source, tensor_name)
            else:
                value = source.read(tensor_name, (0,) * len(shape), shape)
            state.setdefault(name, {})[key] = value
        return state


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


def check_optimizers(built: Any, subject: str = "build_optimizer returned") -> list[Optimizer]:
    """Return an optimizer, or a list of them, as a list. Raises ConfigError for anything else."""
    optimizers = built if isinstance(built, list) else [built]
    for item in optimizers:
        if not isinstance(item, Optimizer):
            must = "must be an optimizer, or a list of them"
            if isinstance(built, tuple) and not all(isinstance(each, Optimizer) for each in built):
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
        raise ConfigError(f"""build_optimizer:
            {kind.__name__} has train() and eval(), which move the weights between steps;
            use an optimizer without, such as optim=adamw with run.ema_decay""")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(f"""build_optimizer: {kind.__name__} has a scheduler of torch,
            whose rates schedule= would overwrite; leave it out, and write build_schedule""")
    check_by_trial(optimizer)
