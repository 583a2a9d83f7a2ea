"""A tensor plan for a model of transformers: its config's own, or that of its family."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from trainer.errors import ConfigError

AUTO = "auto"
FAMILIES = Path(__file__).with_name("families.yaml")
STYLES = {"colwise": "columns", "rowwise": "rows"}  # of transformers; others are left whole


def find_plan(given: Mapping[str, str] | str, model: nn.Module) -> Mapping[str, str]:
    """Return the plan that a task gave, or for "auto" that of the transformers' model in `model`.

    Raises ConfigError if there is none.
    """
    if not isinstance(given, str):
        return given
    if given != AUTO:
        raise ConfigError(f"tensor_plan returned {given!r}: must be a dict, or {AUTO!r}")
    import yaml

    families = yaml.safe_load(FAMILIES.read_text(encoding="utf-8"))
    for module in model.modules():
        config = getattr(module, "config", None)
        base = getattr(module, "base_model", module)
        if not isinstance(base, nn.Module):
            continue
        own = getattr(config, "base_model_tp_plan", None) or {}
        plan = _translated(own, base) or families.get(getattr(config, "model_type", None))
        if plan:
            prefix = next(name for name, each in model.named_modules() if each is base)
            return {f"{prefix}.{name}" if prefix else name: form for name, form in plan.items()}
    must = f"must have a plan in its config, as many of transformers, or be {', '.join(families)}"
    raise ConfigError(f"tensor_plan=auto: {type(model).__name__} {must}; return a dict")


def _translated(plan: Mapping[str, str], base: nn.Module) -> dict[str, str]:
    """Return the entries that divide an nn.Linear; norms and experts stay whole."""
    names = {name for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    return {
        pattern: STYLES[style]
        for pattern, style in plan.items()
        if style in STYLES and any(fnmatchcase(name, pattern) for name in names)
    }
