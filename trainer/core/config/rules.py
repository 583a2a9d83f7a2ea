"""Rules about settings that types and ranges cannot express, such as relations between two."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config, DistSettings, LaunchSettings
from trainer.core.config.stores import address_problem, is_address
from trainer.core.config.targets import check_no_secret
from trainer.core.config.typed import build, convert, show

MOST_OF_A_PATH = 3_500  # bytes, of 4,096: files of a checkpoint have longer paths
Problems = Iterator[tuple[str, str]]  # (key, reason why its value is refused)


def check(plain: Any, choices: Mapping[str, Iterable[str]]) -> Config:
    """Build a Config from nested plain values. `choices` are the options of each config group.

    Raises ConfigError with the key, the given value and the allowed values.
    """
    if not isinstance(plain.get("task"), Mapping) or "name" not in plain["task"]:
        raise ConfigError("""task.name is missing:
            set it in the task's file, below a first line '# @package _global_'""")
    check_no_secret(plain)
    _spell_out(plain.get("dist"))
    config = build(Config, plain)
    for key, problem in _find_problems(config, choices["strategy"]):
        value = config.flat()[key]
        shown_value = " is missing" if value is None else f"={_shortened(show(value))}"
        raise ConfigError(f"{key}{shown_value}: {problem}")
    for group in ("optim", "schedule"):
        _check_spec(group, getattr(config, group), choices[group])
    return config


def _spell_out(dist: Any) -> None:
    """Take a rendezvous as torch's `init_method` has it, tcp://<host>:<port> or file://<path>."""
    if not isinstance(dist, dict):
        return
    method, is_url, location = str(dist.get("init")).partition("://")
    name = {"tcp": "address", "file": "path"}.get(method)
    if is_url and name and location and dist.get(name) is None:
        dist |= {"init": method, name: location}
    elif is_url and method == "env":
        dist["init"] = method


def _find_problems(config: Config, strategies: Iterable[str]) -> Problems:
    run = config.run
    whole = config.data.global_batch
    if config.data.most_rows is not None and config.data.most_rows > whole:
        yield "data.micro_batch", f"must be at most data.global_batch={whole}"
    if run.lr_scaling == "none" and run.lr_batch is not None:
        yield "run.lr_scaling", "must be linear or sqrt if run.lr_batch is given"
    if run.lr_scaling != "none" and run.lr_batch is None:
        yield "run.lr_scaling", "give run.lr_batch=<the global batch that optim.lr was tuned for>"
    if config.norm_rows is not None:
        yield from _find_group_problems(config, config.norm_rows)
    splits = config.eval.splits
    if not splits or len(set(splits)) < len(splits) or not all(map(_is_folder_name, splits)):
        yield "eval.splits", "must be one or more different names, such as [eval] or [val,test]"
    steps = config.log.profile_steps
    if steps is not None and (len(steps) != 2 or not 0 < steps[0] < steps[1]):
        yield "log.profile_steps", "must be [<step to begin after>, <last step>], as in [10,20]"
    for key, name in (("run.name", run.name), ("task.name", config.task.name)):
        if name is not None and not _is_folder_name(name):
            must = "must be one folder name, without '/' and not starting with '.'"
            yield key, f"{must}, of printable characters and less than 200 bytes"
    yield from _find_place_problems(config)
    if config.strategy.name not in strategies:
        yield "strategy.name", f"must be one of {', '.join(strategies)}"
    is_loss = config.best_metric.endswith("/loss")
    if is_loss and config.best_mode == "max":
        yield "checkpoint.best_mode", f"must be min for {config.best_metric}"
    if not is_loss and config.checkpoint.best_mode is None:
        yield "checkpoint.best_mode", f"set it to min or max for {config.best_metric}"
    yield from _find_launch_problems(config.launch)
    yield from _find_dist_problems(config.dist)


def _find_place_problems(config: Config) -> Problems:
    run, mirror = config.run, config.checkpoint.mirror
    if is_address(run.dir):
        own = f"checkpoint.mirror={run.dir}"
        yield "run.dir", f"must be a folder here; keep the run in a bucket by {own}"
    if mirror and (problem := address_problem(mirror)):
        yield "checkpoint.mirror", problem
    of_run = {"run.dir": run.dir, "run.resume": run.resume, "run.init_from": run.init_from}
    for key, path in {**of_run, "dist.path": config.dist.path}.items():
        may_be_far = key in ("run.resume", "run.init_from") and is_address(path)
        find_problem = address_problem if may_be_far else _path_problem
        if problem := find_problem(path or ""):
            yield key, problem


def _find_group_problems(config: Config, rows: int) -> Problems:
    whole = config.data.global_batch
    micro_batch = config.data.most_rows
    if whole % rows:
        near = " or ".join(str(n * rows) for n in (whole // rows, whole // rows + 1) if n)
        must = f"must be a multiple of run.norm_rows={rows}, such as {near}"
        yield "data.global_batch", f"{must}; or give run.norm_rows=null"
    if micro_batch is not None and micro_batch % rows:
        yield "data.micro_batch", f"must be a multiple of run.norm_rows={rows}"


def _is_folder_name(name: str) -> bool:
    is_one = Path(name).name == name and not name.startswith(".") and name.isprintable()
    return is_one and 0 < len(os.fsencode(name)) < 200


def check_path(key: str, path: str) -> None:
    """Raise ConfigError for a path that no file system can have."""
    if problem := _path_problem(path):
        raise ConfigError(f"{key}={_shortened(path)}: {problem}")


def _path_problem(path: str) -> str:
    if "://" in path:
        return "must be a path of a file system; mount the storage, and give its folder"
    if not path.isprintable():
        return "must have printable characters only, and no line breaks"
    longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    if longest > 255:
        return f"must have names of at most 255 bytes, and one has {longest:,}"
    size = len(os.fsencode(Path(path).absolute()))
    return (
        f"must be at most {MOST_OF_A_PATH:,} bytes, and is {size:,}"
        if size > MOST_OF_A_PATH
        else ""
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}...{text[-20:]}"


def _find_launch_problems(block: LaunchSettings) -> Problems:
    ranks = block.nproc_per_node
    is_count = ranks is not None and ranks.isdecimal() and int(ranks) > 0
    if ranks not in (None, "gpu", "cpu", "auto") and not is_count:
        yield "launch.nproc_per_node", "must be gpu, cpu, auto or an integer of at least 1"
    if block.name == "inline" and (ranks is not None or block.max_restarts):
        key = "launch.max_restarts" if ranks is None else "launch.nproc_per_node"
        yield key, "use launch=elastic or launch=spawn; torchrun has its own flags for it"
    if block.name == "ray":
        bounds = block.ranks if isinstance(block.ranks, list) else [block.ranks or 1] * 2
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            yield "launch.ranks", "must be a number, or [least,most], as in [2,8]"
        if ranks is not None:
            yield "launch.nproc_per_node", "must be null with launch=ray; give launch.ranks"
    elif block.ranks is not None:
        yield "launch.ranks", "must be null without launch=ray; give launch.nproc_per_node"
    if block.name == "spawn" and block.max_restarts:
        yield "launch.max_restarts", "launch=spawn does not restart ranks; use launch=elastic"


def _find_dist_problems(block: DistSettings) -> Problems:
    init = block.init
    for key, method in (("address", "tcp"), ("path", "file")):
        value = getattr(block, key)
        if init == method and not value:
            yield f"dist.{key}", f"dist.init={init} needs it on every rank; see conf/dist/auto.yaml"
        if init != method and value:
            yield f"dist.{key}", f"must be null with dist.init={init}; or set dist.init={method}"
    host, _, port = (block.address or "localhost:1").rpartition(":")
    if not host or not is_port(port):
        yield "dist.address", "must be <host>:<port>, port from 1 to 65535"


def is_port(text: str) -> bool:
    """Return True if the text is a port number from 1 to 65535."""
    return text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536


def _check_spec(group: str, spec: Mapping[str, Any], options: Iterable[str]) -> None:
    """Check that a spec has a `_target_`, its floats are finite and its `lr` is not negative."""
    if not isinstance(spec.get("_target_"), str):
        raise ConfigError(f"""{group}._target_ is missing:
            give {group}=<name> ({", ".join(options)})""")
    for name, value in spec.items():
        if name == "lr" or isinstance(value, float):
            convert(float, value, f"{group}.{name}", {"min": 0} if name == "lr" else {})
