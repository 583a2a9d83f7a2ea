"""Models of timm by their names there, whose weights are on the hub."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import ConfigError
from trainer.base.errors import did_you_mean, one_line
from trainer.hf import loading


def is_of_timm(name: str | None) -> bool:
    """Return True for a name without a slash, such as resnet18.a1_in1k; the hub's have an owner."""
    return name is not None and "/" not in name and not Path(name).exists()


def import_timm() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError, OSError) as error:
        if getattr(error, "name", None) == "timm":
            raise ConfigError("""task.options.model: a name without an owner is one of timm, which
                is not installed: pip install timm; a name on the hub is owner/name""") from None
        raise ConfigError(f"""task.options.model: timm cannot be imported ({one_line(error)}); it
            must find the torchvision that is built for torch {torch.__version__}""") from None
    return timm


def repository_of_timm(name: str | None) -> str:
    timm = import_timm()
    is_known = timm.is_model(name)
    config = None
    if is_known:
        try:
            config = timm.get_pretrained_cfg(name)
        except RuntimeError:  # it has the model, but not with these weights
            is_known = False
    if not is_known:
        near = did_you_mean(str(name), timm.list_models() + timm.list_pretrained())
        must = near or "; choose one of timm.list_pretrained()"
        raise ConfigError(f"task.options.model={name}: timm has no such model{must}")
    if not config or not config.hf_hub_id:
        raise ConfigError(f"""task.options.model={name}: timm has no weights for it on the hub;
            choose one of timm.list_pretrained()""")
    return config.hf_hub_id


def load_timm(name: str, num_classes: int) -> nn.Module:
    """Return a model with the weights of `name`; its head is new unless the classes are as many."""
    timm = import_timm()
    file = loading.find(repository_of_timm(name)).folder / "model.safetensors"
    if not file.is_file():
        raise ConfigError(f"task.options.model={name}: has no model.safetensors; take another one")
    model = timm.create_model(
        name,
        pretrained=True,
        num_classes=num_classes,
        pretrained_cfg_overlay={"file": str(file)},
    )
    if num_classes != timm.get_pretrained_cfg(name).num_classes:
        heads = model.pretrained_cfg["classifier"]
        model.new_modules = (heads,) if isinstance(heads, str) else tuple(heads)
    return model
