"""Checks of a run before it is built: settings, processes, and hooks that nothing would call."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoints import resume
from trainer.config.schema import Config, MeshSizes
from trainer.config.targets import call_target, check_target
from trainer.config.typed import suggest_hook
from trainer.data.order import check_batch
from trainer.distributed.rendezvous import check_init, choose_backend
from trainer.distributed.world import World
from trainer.engine.context import OWN
from trainer.engine.precision import Precision
from trainer.errors import ConfigError
from trainer.process import uncollected
from trainer.sandbox.outside import names_in
from trainer.setup import check_soon
from trainer.strategy import find_devices, find_strategy
from trainer.strategy.mesh import Mesh
from trainer.strategy.optimizer_trial import FUSED
from trainer.task import Task


def check_hooks(task: Task) -> None:
    """Raise ConfigError for a hook that takes other arguments than the trainer gives it.

    And for an attribute of the class in the place of one of the trainer's, such as `model`.
    """
    kind = type(task).__name__
    for base in type(task).__mro__:
        for name, given in vars(base).items() if base.__module__ in OWN else ():
            if name.startswith("_") or getattr(type(task), name) is given:
                continue
            if isinstance(given, property):
                raise ConfigError(f"{kind}.{name}: is the trainer's; choose another name")
            if inspect.isfunction(given):
                _check_arguments(f"{kind}.{name}", getattr(task, name), given)


def _check_arguments(name: str, own: Any, hook: Any) -> None:
    _, *every = inspect.signature(hook).parameters.values()
    given = [each.name for each in every if each.default is each.empty]
    try:
        taken = inspect.signature(own)
    except (TypeError, ValueError):  # of a built-in function, or nothing that is called
        return
    try:
        taken.bind(*given)
    except TypeError:
        raise ConfigError(f"{name} takes {taken}: must take ({', '.join(given)})") from None


def find_unused_hooks(task: type[Task]) -> list[str]:
    """Return a warning for each method that looks like a hook, and that its class never names."""
    own: dict[str, tuple[type, Any]] = {}
    known: list[str] = []
    for kind in reversed(task.__mro__):
        if kind.__module__ in OWN:
            known += [name for name in vars(kind) if not name.startswith("_")]
        else:
            own |= {n: (kind, each) for n, each in vars(kind).items() if inspect.isfunction(each)}
    used = {name for _, method in own.values() for name in names_in(method.__code__)}
    lines = []
    for name, (kind, _) in own.items():
        advice = "" if name in known or name in used else suggest_hook(name, known)
        if advice:
            line = f"warning: {kind.__name__}.{name} is never called by the trainer; {advice}"
            lines.append(line)
    return lines


COPIES = MeshSizes("auto", 1, 1, 1, 1)  # of the model, on any number of ranks


def check_layout(config: Config, world: World) -> None:
    """Raise ConfigError if this layout cannot run the configuration."""
    Precision.check(config.strategy.precision, world.device)
    kind = find_strategy(config.strategy)
    kind.check(config, world)
    parts = kind.batch_split(config)
    check_batch(config.data.global_batch, parts, Mesh.of(config.strategy.mesh, world).data_size)
    choose_backend(config.dist, world)
    check_init(config.dist, world)


def for_these_ranks(config: Config) -> Config:
    """Return the settings of a run to evaluate: its strategy, or ddp if that needs other ranks."""
    world = World.from_environment()
    block = config.strategy
    try:
        check_layout(config, world.with_devices(find_devices(block, world)))
    except ConfigError:
        block = replace(block, name="ddp", mesh=COPIES, sequence=False, devices_per_rank=1)
        config = replace(config, strategy=replace(block, comm_hook="none", device_ids=None))
    return config


def check_training(config: Config, world: World) -> resume.Origin:
    """Run the early checks of `fit`, and return the origin of the run.

    It is the run directory and the checkpoint to resume from, known on rank 0 only.
    """
    check_run(config, world)
    return check_soon(config, world.launcher)


def check_run(config: Config, world: World) -> None:
    """Run those of the early checks of `fit` that ask for nothing on this machine."""
    if "train" in config.eval.splits:
        raise ConfigError(f"""eval.splits={config.eval.splits}: must not have train:
            its means would have the names of training; use log.train_metrics=true""")
    check_layout(config, world)
    check_target(config.optim, "optim", config.packages, Optimizer)
    check_target(config.schedule, "schedule", config.packages)


@uncollected()
def try_optimizer(config: Config) -> None:
    """Last early check: build torch's optimizer, which checks its arguments, in a second."""
    if config.optim["_target_"] in FUSED:
        weights = [torch.zeros(1, requires_grad=True)]
        call_target(config.optim, "optim", config.packages, Optimizer, weights)


def check_evaluation(config: Config, world: World, fitted: Path | None) -> resume.Origin:
    """Run the early checks of `evaluate`, and return the checkpoint to read, on rank 0 only.

    It is that of `run.resume`, else of the run directory `fitted`, else none.
    """
    check_layout(config, world)
    if world.rank:
        return resume.Origin()
    given = config.run.resume or (str(fitted) if fitted else None)
    try:
        return resume.find_checkpoint(config, given)
    except ConfigError as error:
        if resume.ends_together(world.launcher):
            raise
        return resume.Origin(refused=str(error))  # all ranks raise it after rendezvous


CAUSAL = "AutoModelForCausalLM"
LIBRARIES = ("transformers", "peft", "diffusers")  # whose models are saved by save_pretrained


def find_pretrained(model: nn.Module) -> nn.Module | None:
    """Return the model that has `save_pretrained`: itself, or the only module in a wrapper."""
    inner = [module for module in model.children() if _is_pretrained(module)]
    return model if _is_pretrained(model) else inner[0] if len(inner) == 1 else None


def _is_pretrained(module: nn.Module) -> bool:
    return callable(getattr(module, "save_pretrained", None))


def public_class(model: nn.Module) -> type | None:
    """Return the class of a model in its library, which a class of the user's may derive from."""
    kinds = type(model).__mro__
    return next((k for k in kinds if k.__module__.partition(".")[0] in LIBRARIES), None)


def auto_class(kind: type, model: Any) -> str:
    """Return the Auto class that makes a model of this class from its config, else the class."""
    auto = import_module("transformers.models.auto.modeling_auto")
    general = ("AutoModelForPreTraining", "AutoModel", "AutoModelForTextEncoding")
    names = [name for name in vars(auto) if name.startswith("AutoModel") and name not in general]
    for name in (CAUSAL, *names, *general):
        known = getattr(getattr(auto, name), "_model_mapping", None) or {}
        if type(model.config) in known:
            made = known[type(model.config)]
            if kind is made or (isinstance(made, tuple) and made and made[0] is kind):
                return name
    return kind.__name__


def is_adapter(model: nn.Module) -> bool:
    kind = public_class(model)
    return kind is not None and kind.__module__.startswith("peft.")


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that an adapter of peft is for; any other model itself."""
    inner: Any = model
    return inner.base_model.model if is_adapter(model) else model


def find_base(model: nn.Module) -> str:
    """Return the name that loads the weights a model began with, "" without one.

    A folder in the cache of the hub has the name of its repository.
    """
    name = str(getattr(base_of(model), "name_or_path", None) or "")
    parts = Path(name).parts
    hub = [part for part in parts if part.startswith("models--")]
    return "/".join(hub[-1].split("--")[1:]) if hub and "snapshots" in parts else name


def why_not_exported(model: nn.Module, is_merged: bool = False) -> str:
    """Return the reason why a model cannot become a folder of Hugging Face; empty if it can."""
    found = find_pretrained(model)
    if found is None:
        return f"""the model ({type(model).__name__}) has no save_pretrained, and not one module
            in it that does; use a model of transformers, peft or diffusers"""
    kind = public_class(found)
    if kind is None:
        return f"{type(found).__name__} is of no library that can load it: {', '.join(LIBRARIES)}"
    if is_adapter(found) and not is_merged:
        return _why_no_adapter(found)
    quantizer = getattr(base_of(found), "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_serializable():
        how = type(quantizer).__name__
        return f"the model is quantized ({how}), and transformers does not save it; load it whole"
    return ""


def _why_no_adapter(model: Any) -> str:
    from peft import get_peft_model_state_dict

    if not find_base(model):
        return """the base of the adapter has no name that loads it; build it by from_pretrained,
            or merge the adapter: RUN out=FOLDER merge=true"""
    name = model.active_adapter
    words = {"adapter_name": name, "save_embedding_layers": trains_embeddings(model)}
    saved = {
        key.removeprefix("base_model.model.") for key in get_peft_model_state_dict(model, **words)
    }
    for each, parameter in model.named_parameters():
        plain = each.removeprefix("base_model.model.").replace(f".modules_to_save.{name}", "")
        if parameter.requires_grad and plain.replace(f".{name}", "") not in saved:
            return f"{each} trains, and peft does not save it; name its module in modules_to_save"
    return ""


def trains_embeddings(model: Any) -> bool:
    """Return True if an adapter's base has embeddings that train, as those of new tokens do."""
    base: Any = base_of(model)
    found = base.get_input_embeddings()
    return any(p.requires_grad for p in found.parameters()) if found is not None else False


def check_export(config: Config, model: nn.Module) -> None:
    """Raise ConfigError if a run could not write what checkpoint.export asks for at its end."""
    if config.checkpoint.export is not None and (why := why_not_exported(model)):
        raise ConfigError(
            f"checkpoint.export={config.checkpoint.export}: {why}; use null otherwise"
        )
