"""Tensor parallel: the ranks of a tensor axis divide the matrices of a model.

After Megatron-LM (arXiv:1909.08053); sequence parallel after Korthikanti et al. (arXiv:2205.05198).
A task says how in `tensor_plan`. `columns` divides the outputs of an nn.Linear, `rows` the inputs
of the one that follows, whose partial sums are then added over the ranks. `columns/3` divides each
of three packed matrices, such as query, key and value. `vocabulary` divides the entries of an
nn.Embedding, or of the nn.Linear that scores them. Every rank has plain tensors, which are parts of
the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer.base.errors import ConfigError
from trainer.core.distributed.world import RankGroup
from trainer.core.strategy import collectives
from trainer.core.strategy.tensor_shards import Band, Shard
from trainer.mesh.loss_parallel import VocabularyPart

AUTO = "auto"
FAMILIES = Path(__file__).with_name("families.yaml")
STYLES = {"colwise": "columns", "rowwise": "rows"}  # of transformers; others are left whole


def find_plan(tensor_plan: Mapping[str, str] | str, model: nn.Module) -> Mapping[str, str]:
    """Return the plan that a task gave, or for "auto" that of the transformers' model in `model`.

    Raises ConfigError if there is none.
    """
    if not isinstance(tensor_plan, str):
        return tensor_plan
    if tensor_plan != AUTO:
        raise ConfigError(f"tensor_plan returned {tensor_plan!r}: must be a dict, or {AUTO!r}")
    import yaml

    families = yaml.safe_load(FAMILIES.read_text(encoding="utf-8"))
    for module in model.modules():
        config = getattr(module, "config", None)
        base = getattr(module, "base_model", module)
        if not isinstance(base, nn.Module):
            continue
        own = getattr(config, "base_model_tp_plan", None) or {}
        adapted = _adapters(base)
        plan = _translated(own, base) or families.get(getattr(config, "model_type", None), {})
        if adapted:
            plan = _through(plan, base, adapted)
        if plan:
            prefix = next(name for name, each in model.named_modules() if each is base)
            return {f"{prefix}.{name}" if prefix else name: form for name, form in plan.items()}
    raise ConfigError(f"""tensor_plan=auto: {type(model).__name__} must have a plan in its config,
        as many of transformers, or be {", ".join(families)}; return a dict, or take fsdp""")


def _translated(plan: Mapping[str, str], base: nn.Module) -> dict[str, str]:
    """Return the entries that divide an nn.Linear; norms and experts stay whole."""
    names = {name for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    names |= {name for name, m in _adapters(base).items() if isinstance(m.base_layer, nn.Linear)}
    return {
        pattern: STYLES[style]
        for pattern, style in plan.items()
        if style in STYLES and any(fnmatchcase(name, pattern) for name in names)
    }


def _adapters(base: nn.Module) -> dict[str, Any]:
    """Return the layers that peft has wrapped, by name."""
    named = base.named_modules()
    return {name: m for name, m in named if isinstance(getattr(m, "base_layer", None), nn.Module)}


def _through(
    plan: Mapping[str, str], base: nn.Module, adapted: Mapping[str, Any]
) -> dict[str, str]:
    """Return a plan by the names of modules, also of those in adapters.

    LoRA's second matrix has the outputs of its layer, the first one the inputs. Raises ConfigError
    for other adapters.
    """
    form_of: dict[str, str] = {}
    for name, module in base.named_modules():
        forms = [form for pattern, form in plan.items() if _matches(name, pattern)]
        form = forms[-1] if forms else ""
        if not form or name not in adapted:
            form_of |= {name: form} if form else {}
            continue
        factors = getattr(module, "lora_A" if form == "rows" else "lora_B", None)
        if not factors or len(getattr(module, "lora_magnitude_vector", ())):
            raise ConfigError(f"""tensor_plan=auto: {name} has an adapter that is not plain LoRA of
                a linear layer: cannot be divided; leave it out of the adapter's targets""")
        form_of[f"{name}.base_layer"] = form
        form_of |= {
            f"{name}.{'lora_A' if form == 'rows' else 'lora_B'}.{key}": form for key in factors
        }
    return form_of


PLAN_FORMS = "columns, columns/<n>, rows or vocabulary"
Wrapped = Callable[[torch.Tensor], Any]


class MatrixPart:
    """How a parameter is divided: `part` cuts a whole tensor, `shard` describes such a part.

    `source` is the whole parameter on the meta device.
    """

    def __init__(self, source: torch.Tensor, dim: int, bands: Sequence[Band]):
        self.source = source
        self.shape = tuple(source.shape)
        self.dim = dim
        self.bands = tuple(bands)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        parts = [whole.narrow(self.dim, first, count) for first, count in self.bands]
        return torch.cat(parts, self.dim)

    def shard(self, tensor: torch.Tensor, is_written: bool) -> Shard:
        offset = [0] * len(self.shape)
        if self.dim:
            ((offset[self.dim], _),) = self.bands
            return Shard(tensor, self.shape, tuple(offset), is_written)
        offset[0] = self.bands[0][0]
        bands = self.bands if len(self.bands) > 1 else ()
        return Shard(tensor, self.shape, tuple(offset), is_written, bands)


class TensorPlan:
    """A task's `tensor_plan` applied to a model, whose parameters are on the meta device.

    `cuts` are the divided parameters, as they are after the cut.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, str],
        axis: RankGroup,
        sequential: Sequence[nn.Module] = (),
    ):
        """Replace the parameters and forward passes of the modules that the plan names.

        Between the `sequential` modules' inputs and outputs each rank has its part of the
        positions. Raises ConfigError for a name, form or size that does not fit.
        """
        self.cuts: dict[torch.Tensor, MatrixPart] = {}
        self._axis = axis
        self._inside = {module for block in sequential for module in block.modules()}
        self._names = {module: name for name, module in model.named_modules()}
        self._made: dict[torch.Tensor, nn.Parameter] = {}
        form_of: dict[nn.Module, str] = {}
        for pattern, form in plan.items():
            modules = [m for m, name in self._names.items() if _matches(name, pattern)]
            if not modules:
                some = ", ".join(list(filter(None, self._names.values()))[:6])
                raise ConfigError(f"""tensor_plan: {pattern}: no module has this name;
                    give one of the model, such as {some}""")
            form_of |= dict.fromkeys(modules, form)
        for module, form in form_of.items():
            self._divide(module, form)
        for module, name in self._names.items():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter in self._made:
                    raise ConfigError(f"""tensor_plan: {name or "the model"}.{key}
                        shares a parameter that tensor_plan divides; name it there too""")

    def _divide(self, module: nn.Module, form: str) -> None:
        kind, _, suffix = form.partition("/")
        is_sound = kind in ("columns", "rows", "vocabulary") and (
            not suffix or (kind == "columns" and suffix.isdecimal() and int(suffix) > 0)
        )
        name = self._names[module]
        if not is_sound:
            raise ConfigError(f"tensor_plan: {name}: {form!r} must be {PLAN_FORMS}")
        is_linear = type(module).forward is nn.Linear.forward
        is_embedding = type(module).forward is nn.Embedding.forward
        if not is_linear and not (is_embedding and kind != "columns"):
            kinds = "nn.Linear" + (" or nn.Embedding" if kind != "columns" else "")
            raise ConfigError(f"""tensor_plan:
                {name} is a {type(module).__name__}: must be {kinds} for {form}""")
        is_sequence = module in self._inside
        forward: Wrapped
        if is_embedding:
            _check_embedding(module, name)
            self._cut(module, "weight", 0, 1, name, is_even=False)
            forward = _Entries(module, self._axis)
        elif kind == "rows":
            self._cut(module, "weight", 1, 1, name)
            forward = _Rows(module, self._axis, is_sequence)
        else:
            is_head = kind == "vocabulary"
            for key in ("weight", "bias"):
                if getattr(module, key) is not None:
                    self._cut(module, key, 0, int(suffix or 1), name, is_even=not is_head)
            wrap = _Head if is_head else _Columns
            forward = wrap(module, self._axis, is_sequence)
        module.forward = forward
        module.register_forward_hook(_keep)

    def _cut(
        self,
        module: nn.Module,
        key: str,
        dim: int,
        num_packed: int,
        name: str,
        is_even: bool = True,
    ) -> None:
        """Replace a parameter by an empty one of this rank's size."""
        whole = getattr(module, key)
        if whole not in self._made:
            length = whole.shape[dim]
            size = self._axis.size
            if length % num_packed or (is_even and length // num_packed % size):
                packed = f" in {num_packed} packed parts" if num_packed > 1 else ""
                raise ConfigError(f"""strategy.mesh.tensor={size}:
                    {name}.{key} has {length}{packed} on axis {dim}, which it must divide""")
            sizes = collectives.sizes_of(length // num_packed, self._axis)
            first, count = sum(sizes[: self._axis.rank]), sizes[self._axis.rank]
            cut = MatrixPart(
                whole, dim, [(p * sum(sizes) + first, count) for p in range(num_packed)]
            )
            part = nn.Parameter(cut.part(whole.detach()), whole.requires_grad)
            vars(part).update(vars(whole))
            self._made[whole] = part
            self.cuts[part] = cut
        setattr(module, key, self._made[whole])


def _keep(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing. With a hook nn.TransformerEncoderLayer calls its layers in evaluation too."""


def _matches(name: str, pattern: str) -> bool:
    """Match a module's name, part by part: "blocks.*.query|key" is every block's query and key."""
    parts, patterns = name.split("."), pattern.split(".")
    if len(parts) != len(patterns):
        return False
    return all(
        any(fnmatchcase(part, one) for one in alternatives.split("|"))
        for part, alternatives in zip(parts, patterns, strict=True)
    )


class _Columns:
    """The forward pass of an nn.Linear with some of its outputs."""

    def __init__(self, module: Any, axis: RankGroup, is_sequence: bool):
        self._module = module
        self._axis = axis
        self._is_sequence = is_sequence

    def _enter(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._is_sequence:
            length = inputs.shape[1] * self._axis.size
            return collectives.gather_parts(inputs, 1, length, self._axis)
        return collectives.copy(inputs, self._axis)

    def __call__(self, inputs: torch.Tensor) -> Any:
        return F.linear(self._enter(inputs), self._module.weight, self._module.bias)


class _Head(_Columns):
    """The forward pass of the nn.Linear that scores a vocabulary."""

    def __call__(self, inputs: torch.Tensor) -> Any:
        return VocabularyPart.of(super().__call__(inputs), self._module.out_features, self._axis)


class _Rows(_Columns):
    """The forward pass of an nn.Linear with some of its inputs."""

    def __call__(self, inputs: torch.Tensor) -> Any:
        partial = F.linear(inputs, self._module.weight)
        if self._is_sequence:
            outputs = collectives.add_split(partial, 1, self._axis)
        else:
            outputs = collectives.add(partial, self._axis)
        bias = self._module.bias
        return outputs if bias is None else outputs + bias.to(outputs.dtype)


class _Entries:
    """The forward pass of an nn.Embedding with some of its entries; the others give zeros."""

    def __init__(self, module: Any, axis: RankGroup):
        sizes = collectives.sizes_of(module.num_embeddings, axis)
        self._first = sum(sizes[: axis.rank])
        self._count = sizes[axis.rank]
        self._module = module
        self._axis = axis
        padding = module.padding_idx
        is_here = padding is not None and 0 <= padding - self._first < self._count
        self._padding = padding - self._first if is_here else None

    def __call__(self, tokens: torch.Tensor) -> Any:
        own = tokens - self._first
        is_here = (own >= 0) & (own < self._count)
        embedded = F.embedding(own.where(is_here, 0), self._module.weight, self._padding)
        return collectives.add(embedded * is_here.unsqueeze(-1).to(embedded.dtype), self._axis)


def _check_embedding(module: Any, name: str) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ConfigError(f"""tensor_plan: {name} has {option}={getattr(module, option)}:
                cannot be divided; leave {name} out""")


def divide_sequence(blocks: Sequence[nn.Module], axis: RankGroup) -> list[Any]:
    """Give each rank its part of the positions between the blocks' inputs and outputs.

    The first block's first input (rows, positions, ...) is divided, the last one's output joined.
    Returns the hooks that do it.
    """
    length = [0]

    def enter(module: nn.Module, args: Any) -> Any:
        length[0] = args[0].shape[1]
        if length[0] % axis.size:
            raise ConfigError(f"""strategy.sequence=true: strategy.mesh.tensor={axis.size}
                must divide the {length[0]} positions; pad the rows""")
        return (collectives.split(args[0], 1, axis), *args[1:])

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return collectives.gather(output, 1, length[0], axis)

    return [blocks[0].register_forward_pre_hook(enter), blocks[-1].register_forward_hook(leave)]
