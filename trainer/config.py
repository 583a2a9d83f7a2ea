"""Configuration: composed by Hydra, typed and checked here, a plain dataclass everywhere else.

Values stand once, in `conf/`; this room holds names, types and ranges. It does not import torch, so a bad setting is
refused before torch is loaded, a socket opened or a directory made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer.errors import ConfigError
from trainer.guard import check_no_secret, check_override, pure_resolvers
from trainer.typed import build, limit, show, suggest, typed

PACKAGE = Path(__file__).resolve().parent
# A wheel carries conf/ and tasks/ inside the package; in a checkout they lie beside it. Never the working directory.
HOME = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
CONF = HOME / "conf"

# What lays a run out, keeps it or shows it, and changes nothing of what is learned; everything else is the run.
LAYOUT = (
    *(
        "run.name",
        "run.dir",
        "run.resume",
        "data.micro_batch",
        "data.workers",
        "data.timeout_s",
        "data.path",
    ),
    *("strategy.name", "strategy.device_ids", "strategy.devices_per_rank", "strategy.bucket_mb"),
    *("strategy.static_graph", "strategy.find_unused_parameters", "eval.micro_batch"),
    *("dist.", "launch.", "checkpoint.", "log."),
)
SWEEPS = ("SIMPLE_CHOICE_SWEEP", "CHOICE_SWEEP", "RANGE_SWEEP")  # not glob(*) and interval(0,1)


@dataclass
class Run:
    name: str | None
    dir: str
    seed: Annotated[int, limit(min=0, max=2**63 - 1)]
    epochs: Annotated[int, limit(min=1)]
    steps: Annotated[int | None, limit(min=1)]
    resume: str | None
    ema_decay: Annotated[float | None, limit(min=0, max=1)]
    lr_scaling: Literal["none", "linear", "sqrt"]
    lr_batch: Annotated[int | None, limit(min=1)]
    compile: bool
    clip_norm: Annotated[float | None, limit(above=0)]
    on_bad_step: Literal["skip", "stop", "rollback"]


@dataclass
class Data:
    global_batch: Annotated[int, limit(min=1)]
    micro_batch: Annotated[int | None, limit(min=1)]
    workers: Annotated[int, limit(min=0)]
    timeout_s: Annotated[float, limit(min=0)]
    path: Literal["auto", "resident", "streamed"]
    on_error: Literal["raise", "skip"]


COMPRESSING = ("fp16", "bf16", "powersgd")  # the hooks that send other numbers than the gradients


@dataclass
class Strategy:
    name: str
    precision: Literal["fp64", "fp32", "tf32", "amp_bf16", "amp_fp16", "bf16", "fp16"]
    sync_batchnorm: bool
    channels_last: bool
    device_ids: list[Annotated[int, limit(min=0)]] | None
    devices_per_rank: Annotated[int, limit(min=1)]
    bucket_mb: Annotated[float, limit(above=0)]
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: Literal["none", "fp16", "bf16", "powersgd", "parameter_server"]


@dataclass
class Dist:
    backend: Literal["auto", "nccl", "gloo", "mpi"]
    init: Literal["env", "tcp", "file"]
    address: str | None
    path: str | None
    timeout_s: Annotated[float, limit(above=0, max=10**6)]
    hang_timeout_s: Annotated[float | None, limit(above=0, max=10**6)]
    drift_every_steps: Annotated[int | None, limit(min=1)]


@dataclass
class Launch:
    name: Literal["inline", "elastic", "spawn"]
    nproc_per_node: str | None
    max_restarts: Annotated[int, limit(min=0)]
    on_failed_job: Literal["continue", "stop"]


@dataclass
class Checkpoint:
    every_steps: Annotated[int | None, limit(min=1)]
    every_epochs: Annotated[int | None, limit(min=1)]
    keep_last: Annotated[int, limit(min=1)]
    keep_best: Annotated[int, limit(min=0)]
    background: bool
    on_error: Literal["stop", "continue"]
    best_metric: str | None
    best_mode: Literal["min", "max"]

    @property
    def metric(self) -> str:
        """The metric that "best" goes by, with its prefix."""
        name = self.best_metric or "loss"
        return name if name.startswith("eval/") else f"eval/{name}"


@dataclass
class Eval:
    every_steps: Annotated[int | None, limit(min=1)]
    every_epochs: Annotated[int | None, limit(min=1)]
    micro_batch: Annotated[int | None, limit(min=1)]


@dataclass
class Log:
    every_steps: Annotated[int, limit(min=1)]
    images: Annotated[int, limit(min=0)]
    histograms_every_steps: Annotated[int | None, limit(min=1)]
    profile_steps: list[int] | None


@dataclass
class Task:
    name: str
    trainer: str
    packages: list[str]
    options: dict[str, Any]


@dataclass
class Config:
    """Everything a run is told. `optim` and `schedule` are a `_target_` and its arguments; the rest is closed."""

    run: Run
    data: Data
    strategy: Strategy
    dist: Dist
    launch: Launch
    checkpoint: Checkpoint
    eval: Eval
    log: Log
    task: Task
    optim: dict[str, Any]
    schedule: dict[str, Any]

    @property
    def packages(self) -> list[str]:
        """Those that a `_target_` may lie under beside torch's and ours: the task's own and `task.packages`."""
        return [self.task.trainer.split(".")[0], *self.task.packages]

    def flat(self) -> dict[str, Any]:
        """Every value by its full name, `{"data.global_batch": 250, ...}`."""
        return flatten(dataclasses.asdict(self))

    def run_hash(self) -> str:
        """Of everything that changes what is learned: equal in any layout."""
        run = {key: value for key, value in self.flat().items() if not key.startswith(LAYOUT)}
        return hashlib.sha256(json.dumps(run, sort_keys=True, default=str).encode()).hexdigest()[
            :16
        ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# Composition ----------------------------------------------------------------------------------------------------------


def load_config(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> Config:
    """The configuration that `conf/`, further folders (`--config-dir`) and `key=value` overrides make together."""
    return from_plain(_composed("config", overrides, config_dirs))


def load_run_config(
    place: str, overrides: Sequence[str], config_dirs: Sequence[str] = (), prefix: str = ""
) -> Config:
    """The configuration that a run directory, or that of a checkpoint, was written with, changed by overrides.

    Overrides are single values, or whole flat groups. `run.resume` is `place`; errors about it begin with `prefix`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    home = (
        Path(place).resolve().parent.parent
        if (Path(place) / "manifest.json").is_file()
        else Path(place)
    )
    if not (home / "config.yaml").is_file():
        raise ConfigError(
            f"{prefix}{place}: has no config.yaml; give a run directory, or one of its checkpoints"
        )
    try:
        saved: Any = OmegaConf.create((home / "config.yaml").read_text(encoding="utf-8"))
        groups = [field.name for field in dataclasses.fields(Config)]
        if not OmegaConf.is_dict(saved) or not all(
            OmegaConf.is_dict(saved.get(group)) for group in groups
        ):
            raise ConfigError(
                f"{prefix}{place}: its config.yaml is not that of a run: it has not all groups of settings"
            )
        OmegaConf.set_struct(saved, True)
        saved.run.name = None  # where it lives now counts, not where it was begun
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{prefix}{place}: its config.yaml is not that of a run: {one_line(error)}"
        ) from None
    options = _options(config_dirs)
    for override in _parsed(overrides):
        key, value = override.key_or_group, override.value()
        if key in ("task", "experiment"):
            raise ConfigError(
                f"{key}={value}: the run directory has a task already; give single values"
            )
        if key in options:
            _check_choice(key, value, options)
            saved[key] = _composed(f"{key}/{value}", [], config_dirs)[key]
            continue
        try:
            OmegaConf.update(saved, key, value, force_add=override.is_add())
        except OmegaConfBaseException:
            known = flatten(OmegaConf.to_container(saved))  # type: ignore[arg-type]
            raise ConfigError(f"{key} is not a setting{suggest(key, known)}") from None
    saved.run.resume = place
    try:
        with pure_resolvers():
            return from_plain(OmegaConf.to_container(saved, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{home / 'config.yaml'}: {one_line(error)}") from None


def from_plain(plain: Any) -> Config:
    """A Config from nested plain values. Raises ConfigError for what one setting, or two together, cannot be."""
    if not isinstance(plain.get("task"), Mapping) or "name" not in plain["task"]:
        raise ConfigError(
            "task.name is missing: a task's file sets it, below a first line '# @package _global_'"
        )
    check_no_secret(plain)
    config = build(Config, plain)
    data, options = config.data, _options(())
    if data.micro_batch is not None and data.micro_batch > data.global_batch:
        raise ConfigError(
            f"data.micro_batch={data.micro_batch}: must be at most data.global_batch={data.global_batch}"
        )
    if (config.run.lr_scaling == "none") != (config.run.lr_batch is None):
        rule, needs = (
            config.run.lr_scaling,
            "run.lr_batch=<the global batch that optim.lr was chosen for>",
        )
        raise ConfigError(
            f"run.lr_scaling={rule}: "
            + ("takes no run.lr_batch" if rule == "none" else f"give {needs}")
        )
    _check_launch(config.launch)
    _check_dist(config.dist)
    if config.strategy.name not in options["strategy"]:
        raise ConfigError(
            f"strategy.name={config.strategy.name}: must be one of {', '.join(options['strategy'])}"
        )
    _check_strategy(config.strategy)
    for group, spec in (("optim", config.optim), ("schedule", config.schedule)):
        if not isinstance(spec.get("_target_"), str):
            raise ConfigError(
                f"{group}._target_ is missing: give {group}=<name> ({', '.join(options[group])})"
            )
        for name, value in spec.items():
            if name == "lr" or isinstance(value, float):
                typed(float, value, f"{group}.{name}", {"min": 0} if name == "lr" else {})
    if (steps := config.log.profile_steps) is not None and (
        len(steps) != 2 or not 0 < steps[0] < steps[1]
    ):
        raise ConfigError(
            f"log.profile_steps={steps}: must be [<step to begin after>, <last step>], as in [10,20]"
        )
    for key, folder in (("run.name", config.run.name), ("task.name", config.task.name)):
        if folder is not None and (
            Path(folder).name != folder or folder.startswith(".") or not 0 < len(folder) < 200
        ):
            raise ConfigError(
                f"{key}={show(folder)}: must be one folder name, without '/' and not starting with '.'"
            )
    return config


def _check_launch(block: Launch) -> None:
    given = block.nproc_per_node
    if given not in (None, "gpu", "cpu", "auto") and not (given.isdecimal() and int(given) > 0):
        raise ConfigError(
            f"launch.nproc_per_node={given}: must be gpu, cpu, auto or a whole number of at least 1"
        )
    if block.name == "inline" and (given is not None or block.max_restarts):
        key = f"max_restarts={block.max_restarts}" if given is None else f"nproc_per_node={given}"
        raise ConfigError(
            f"launch.{key}: needs launch=elastic or launch=spawn; torchrun has flags of its own for it"
        )
    if block.name == "spawn" and block.max_restarts:
        raise ConfigError(
            f"launch.max_restarts={block.max_restarts}: launch=spawn starts nothing anew; use elastic"
        )


def _check_dist(block: Dist) -> None:
    for name, method in (("address", "tcp"), ("path", "file")):
        value = getattr(block, name)
        if block.init == method and not value:
            advice = f"dist.init={method} needs it on every rank; see conf/dist/auto.yaml"
            raise ConfigError(f"dist.{name} is missing: {advice}")
        if block.init != method and value:
            raise ConfigError(
                f"dist.{name}={value}: is for dist.init={method}, and dist.init is {block.init}"
            )
    host, _, port = (block.address or "localhost:1").rpartition(":")
    if not host or not is_port(port):
        raise ConfigError(
            f"dist.address={block.address}: must be <host>:<port>, port from 1 to 65535"
        )


def is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


def _check_strategy(block: Strategy) -> None:
    if block.device_ids is not None and block.name != "dp":
        advice = "is for strategy=dp; other strategies take what CUDA_VISIBLE_DEVICES shows"
        raise ConfigError(f"strategy.device_ids: {advice}")
    if block.comm_hook != "none" and block.name != "ddp":
        raise ConfigError(
            f"strategy.comm_hook={block.comm_hook}: strategy={block.name} reduces no gradients; use ddp"
        )
    if block.name == "dp" and (block.sync_batchnorm or block.devices_per_rank > 1):
        name = (
            "sync_batchnorm=true"
            if block.sync_batchnorm
            else f"devices_per_rank={block.devices_per_rank}"
        )
        raise ConfigError(f"strategy.{name}: torch's DataParallel cannot; use strategy=ddp")
    if block.comm_hook in COMPRESSING and block.precision in ("fp64", "bf16", "fp16"):
        why = f"compresses float32 gradients, and strategy.precision={block.precision} has none"
        raise ConfigError(
            f"strategy.comm_hook={block.comm_hook}: {why}; use none or parameter_server"
        )


def to_yaml(config: Config) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def choices(config_dirs: Sequence[str] = ()) -> dict[str, list[str]]:
    """The options of every config group, `{"task": ["cifar", "text"], ...}`."""
    return {group: sorted(found) for group, found in _options(config_dirs).items()}


def _options(config_dirs: Sequence[str]) -> dict[str, dict[str, list[Path]]]:
    options: dict[str, dict[str, list[Path]]] = {}
    for root in [CONF, *map(Path, config_dirs)]:
        for file in sorted(root.glob("*/[!_]*.yaml")):
            if (CONF / file.parent.name).is_dir():
                options.setdefault(file.parent.name, {}).setdefault(file.stem, []).append(file)
    return options


def _parsed(overrides: Sequence[str], is_sweep: bool = False) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for text in overrides:
        check_override(text)
        if ("=" not in text and not text.startswith("~")) or text.startswith(
            ("=", "hydra.", "hydra/")
        ):
            raise ConfigError(
                f"{text!r} is not a setting: write key=value{suggest(text, ['--help', '--config-dir'])}"
            )
    parsed, parser = [], OverridesParser.create()
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException:
            raise ConfigError(
                f"{text}: cannot be read as key=value; quote special characters: key=\"'a,b'\""
            ) from None
    for override in parsed:
        is_list = override.value_type is not None and override.value_type.name in SWEEPS
        if override.is_sweep_override() and not (is_sweep and is_list):
            line = f"{override.input_line}: several values need -m, as a,b or range(1,4)"
            raise ConfigError(f"{line}; a list is written [a,b]")
    return parsed


def jobs_of_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep, to check all before any starts."""
    choices = []
    for override in _parsed(overrides, is_sweep=True):
        is_swept = override.is_sweep_override()
        values = (
            [f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()]
            if is_swept
            else []
        )
        choices.append(values or [override.input_line])
    return [list(job) for job in itertools.product(*choices)]


def _check_choice(group: str, choice: Any, options: Mapping[str, Mapping[str, list[Path]]]) -> None:
    found = options[group]
    if choice is None or not isinstance(choice, str):
        raise ConfigError(f"{group}={show(choice)}: must be one of {', '.join(found)}")
    if choice not in found:
        near = suggest(choice, found) or (
            "; one of yours needs --config-dir" if group == "task" else ""
        )
        raise ConfigError(f"{group}={choice}: must be one of {', '.join(found)}{near}")
    if len(found[choice]) > 1:
        both = " and ".join(str(path) for path in found[choice])
        raise ConfigError(f"{group}={choice} stands twice, in {both}; rename yours")


def _composed(name: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for folder in config_dirs:
        if not folder or not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder}: no such directory")
    options, parsed = _options(config_dirs), _parsed(overrides)
    chosen: dict[str, Any] = {}
    for override in parsed:
        group, value = override.key_or_group, override.value()
        if group in options and override.is_add():
            raise ConfigError(f"{override.input_line}: {group} is there already; leave out the '+'")
        if group in options and not override.is_delete():
            _check_choice(group, value, options)
            if chosen.setdefault(group, value) != value:
                raise ConfigError(
                    f"{group}={value}: {group}={chosen[group]} was given before; give one"
                )
    where = f"--config-dir {' '.join(config_dirs)}" if config_dirs else str(CONF)
    folders = ",".join(repr(f"file://{Path(folder).resolve()}") for folder in config_dirs)
    search = [f"hydra.searchpath=[{folders}]"] if config_dirs else []
    GlobalHydra.instance().clear()
    with (
        initialize_config_dir(str(CONF), version_base="1.3", job_name="trainer"),
        pure_resolvers("now", "hydra"),
    ):
        try:
            composed = compose(name, [*overrides, *search])
            with pure_resolvers():  # Hydra's own node, which is not ours to keep, needs those two
                return typing.cast(dict, OmegaConf.to_container(composed, resolve=True))
        except (YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: a file in it cannot be read: {one_line(error)}") from None
        except (HydraException, OmegaConfBaseException) as error:
            if "You must specify 'task'" in str(error):
                raise ConfigError(
                    f"task is not chosen: give task=<name>, one of {', '.join(options['task'])}"
                ) from None
            groups = [o.input_line.lstrip("+") for o in parsed if o.key_or_group in options]
            _name_unknown(parsed, options, where, lambda: compose(name, [*groups, *search]))
            key = getattr(error, "full_key", None)  # of an interpolation
            raise ConfigError(
                f"{key}: {str(error).splitlines()[0]}" if key else one_line(error)
            ) from None


def _name_unknown(
    parsed: list[Any], options: Mapping[str, Any], where: str, compose_groups: Any
) -> None:
    """Raise for the first override whose key does not exist, in our words: Hydra's advise to add the typo with `+`."""
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        base = compose_groups()
    except (HydraException, OmegaConfBaseException) as error:
        hint = (
            "; is the first line of the task's file '# @package _global_'?"
            if "@task." in str(error)
            else ""
        )
        raise ConfigError(
            f"{where}: {one_line(error).split(' Config search path')[0]}{hint}"
        ) from None
    known = [*flatten(typing.cast(dict, OmegaConf.to_container(base))), *options]
    for override in parsed:
        key = override.key_or_group
        found = OmegaConf.select(base, key, default=known)
        if override.is_add() and found is not known:
            raise ConfigError(f"{override.input_line}: {key} is there already; leave out the '+'")
        if isinstance(found, DictConfig) and key not in options:
            raise ConfigError(f"{key} is a group of settings: give {key}.<name>=<value>")
        if not override.is_add() and key not in options and found is known:
            raise ConfigError(f"{key} is not a setting{suggest(key, known)}")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
