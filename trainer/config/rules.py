"""Rules about settings: what one value, or two together, cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.guard import check_no_secret
from trainer.config.schema import Config, Dist, Launch
from trainer.config.typed import build, convert, show
from trainer.errors import ConfigError


def check(plain: Any, choices: Mapping[str, Iterable[str]]) -> Config:
    """A Config from nested plain values; `choices` are the options of each config group.

    Raises ConfigError naming the key, what was given and what is allowed.
    """
    if not isinstance(plain.get("task"), Mapping) or "name" not in plain["task"]:
        where = "a task's file sets it, below a first line '# @package _global_'"
        raise ConfigError(f"task.name is missing: {where}")
    check_no_secret(plain)
    config = build(Config, plain)
    _check_run(config)
    _check_launch(config.launch)
    _check_dist(config.dist)
    if (name := config.strategy.name) not in choices["strategy"]:
        allowed = ", ".join(choices["strategy"])
        raise ConfigError(f"strategy.name={name}: must be one of {allowed}")
    for group in ("optim", "schedule"):
        _check_spec(group, getattr(config, group), choices[group])
    return config


def _check_run(config: Config) -> None:
    data = config.data
    run = config.run
    if data.micro_batch is not None and data.micro_batch > data.global_batch:
        most = f"data.global_batch={data.global_batch}"
        raise ConfigError(f"data.micro_batch={data.micro_batch}: must be at most {most}")
    if run.lr_scaling == "none" and run.lr_batch is not None:
        raise ConfigError("run.lr_scaling=none: takes no run.lr_batch")
    if run.lr_scaling != "none" and run.lr_batch is None:
        needs = "give run.lr_batch=<the global batch that optim.lr was chosen for>"
        raise ConfigError(f"run.lr_scaling={run.lr_scaling}: {needs}")
    steps = config.log.profile_steps
    if steps is not None and (len(steps) != 2 or not 0 < steps[0] < steps[1]):
        allowed = "must be [<step to begin after>, <last step>], as in [10,20]"
        raise ConfigError(f"log.profile_steps={steps}: {allowed}")
    for key, name in (("run.name", run.name), ("task.name", config.task.name)):
        if name is not None and not _is_folder_name(name):
            allowed = "must be one folder name, without '/' and not starting with '.'"
            raise ConfigError(f"{key}={show(name)}: {allowed}")


def _is_folder_name(name: str) -> bool:
    return Path(name).name == name and not name.startswith(".") and 0 < len(name) < 200


def _check_launch(block: Launch) -> None:
    given = block.nproc_per_node
    is_count = given is not None and given.isdecimal() and int(given) > 0
    if given not in (None, "gpu", "cpu", "auto") and not is_count:
        allowed = "must be gpu, cpu, auto or a whole number of at least 1"
        raise ConfigError(f"launch.nproc_per_node={given}: {allowed}")
    if block.name == "inline" and (given is not None or block.max_restarts):
        restarts = f"max_restarts={block.max_restarts}"
        key = restarts if given is None else f"nproc_per_node={given}"
        advice = "needs launch=elastic or launch=spawn; torchrun has flags of its own for it"
        raise ConfigError(f"launch.{key}: {advice}")
    if block.name == "spawn" and block.max_restarts:
        why = "launch=spawn starts nothing anew; use elastic"
        raise ConfigError(f"launch.max_restarts={block.max_restarts}: {why}")


def _check_dist(block: Dist) -> None:
    for name, method in (("address", "tcp"), ("path", "file")):
        value = getattr(block, name)
        if block.init == method and not value:
            advice = f"dist.init={method} needs it on every rank; see conf/dist/auto.yaml"
            raise ConfigError(f"dist.{name} is missing: {advice}")
        if block.init != method and value:
            why = f"is for dist.init={method}, and dist.init is {block.init}"
            raise ConfigError(f"dist.{name}={value}: {why}")
    host, _, port = (block.address or "localhost:1").rpartition(":")
    if not host or not is_port(port):
        allowed = "must be <host>:<port>, port from 1 to 65535"
        raise ConfigError(f"dist.address={block.address}: {allowed}")


def is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


def _check_spec(group: str, spec: Mapping[str, Any], options: Iterable[str]) -> None:
    if not isinstance(spec.get("_target_"), str):
        given = f"give {group}=<name> ({', '.join(options)})"
        raise ConfigError(f"{group}._target_ is missing: {given}")
    for name, value in spec.items():
        if name == "lr" or isinstance(value, float):
            convert(float, value, f"{group}.{name}", {"min": 0} if name == "lr" else {})
