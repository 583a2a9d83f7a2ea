"""Find the run directory and the checkpoint to resume from: by settings or previous attempt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoints import run_directory, transaction
from trainer.checkpoints.disk import replace_file
from trainer.checkpoints.run_directory import WRITER, Lease, check_free, last_facts, read_facts
from trainer.config import bucket
from trainer.config.bucket import is_address
from trainer.config.bucket_copies import copy_of
from trainer.config.plain_files import CONFIG, format_config
from trainer.config.schema import Config
from trainer.distributed.launchers import Launcher
from trainer.errors import CheckpointError, ConfigError, RunError

# These cannot change within a run: they determine the samples.
FIXED = ("task.name", "run.seed", "data.global_batch")
OF_COPIES = ("metrics.jsonl", "sampling.safetensors")  # taken over from a copy of the run
RESTARTS = 3  # in a row without a newer checkpoint: then the cause is not chance


@dataclass(frozen=True)
class Origin:
    """The directory of a run and the checkpoint that it resumes from.

    `directory` None means a new one, named by the time. `source` is the run whose newest
    checkpoint is used, unless `checkpoint` names one. `is_resumed`: the run continues in its own
    directory, or from a copy of it in a bucket (`is_copy`). `reached` is the newest step in the
    bucket of `checkpoint.mirror`. `is_attempt`: a previous attempt of this launch created the
    directory. `refused` is the error to raise unless another rank finds the origin. `launch`
    identifies the launch and its command, on rank 0.
    """

    directory: Path | None = None
    checkpoint: Path | None = None
    source: Path | None = None
    is_attempt: bool = False
    refused: str = ""
    launch: str = ""
    is_copy: bool = False
    reached: int | None = None

    @property
    def is_resumed(self) -> bool:
        return self.is_copy or (self.source is not None and self.source == self.directory)

    @property
    def root(self) -> Path:
        """The directory of the source's checkpoints."""
        return (self.source or Path()) / "checkpoints"


def base_of(config: Config) -> Path:
    """Return the directory of the task's runs."""
    return config.runs / config.task.name


def _named(config: Config) -> Path | None:
    """Return the run directory that the settings name: by run.name, else as its mirror."""
    mirror, resume = config.checkpoint.mirror, config.run.resume
    name = config.run.name
    if name is None and is_address(resume):
        name = bucket.name_of(resume or "")
    elif name is None and mirror is not None and resume in (None, "auto"):
        name = bucket.name_of(mirror)
    return base_of(config) / name if name else None


def locate(config: Config, launcher: Launcher) -> Origin:
    """Find the origin of a run by `run.dir`, `run.name` and `run.resume`, without writing.

    After a restart by the launcher it is the previous attempt's run directory.

    Raises ConfigError for a directory that is in use or cannot be written, a missing checkpoint,
    or a checkpoint of a run with another task, seed or global batch. Where the other ranks would
    wait for rank 0 in vain, its line is `refused`, which all ranks raise after rendezvous.
    """
    try:
        return _locate(config, launcher)
    except ConfigError as error:
        if ends_together(launcher):
            raise
        return Origin(refused=str(error))


def ends_together(launcher: Launcher) -> bool:
    """Return True if the launcher ends the other ranks of this one when it fails."""
    is_of_torchrun = launcher.starters and launcher.variables.get("GROUP_WORLD_SIZE") == "1"
    is_alone = launcher.variables.get("WORLD_SIZE", "1") == "1"
    return bool(is_alone or is_of_torchrun or launcher.name == "mpirun")


def _locate(config: Config, launcher: Launcher) -> Origin:
    origin = find_previous_attempt(config, launcher)
    origin = origin or _with_bucket(config, _from_settings(config))
    run_directory.check_writable(origin.directory or base_of(config))
    if origin.directory is not None:
        run_directory.check_plain(origin.directory)
        check_free(origin.directory)
    _check_same_run(config, origin)
    return replace(origin, launch=identify(config, launcher))


def _from_settings(config: Config) -> Origin:
    named = _named(config)
    resume = config.run.resume
    if resume is None:
        return Origin(_check_unused(config, named))
    if resume == "auto" or is_address(resume):
        directory = named or _find_latest(base_of(config))
        exists = directory is not None and directory.is_dir()
        return Origin(directory, source=directory if exists else None)
    begun = find_checkpoint(config, resume)
    if named is not None and begun.source and named.resolve() != begun.source.resolve():
        return replace(begun, directory=_check_unused(config, named))
    last = max(transaction.steps(begun.root), default=0)
    if begun.checkpoint and last > transaction.read_manifest(begun.checkpoint)["step"]:
        advice = f"give run.name=<new> to branch off, or run.resume={begun.source}"
        raise ConfigError(f"run.resume={Path(resume)}: its run has reached step {last}; {advice}")
    return replace(begun, directory=begun.source)


def _check_unused(config: Config, named: Path | None) -> Path | None:
    if named is not None and named.exists() and not _is_empty_folder(named):
        check_free(named)
        raise ConfigError(_is_taken(config, named))
    return named


def _is_taken(config: Config, named: Path) -> str:
    why = f"{config.shown(named)} exists and is not being resumed"
    is_saved = bool(transaction.steps(named / "checkpoints"))
    how = "" if is_saved else " (nothing was saved, so it starts anew)"
    return f"run.name={named.name}: {why}; add run.resume=auto{how} or choose another run.name"


def _has_run(directory: Path) -> bool:
    metrics = directory / run_directory.METRICS
    is_logged = metrics.is_file() and metrics.stat().st_size > 0
    return is_logged or bool(transaction.steps(directory / "checkpoints"))


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _find_latest(base: Path) -> Path | None:
    """Return the run in `base`, among those with checkpoints, that was started or resumed last.

    Runs are numbered in this order, since a clock may have been set back.
    """
    roots = [root for root in base.glob("*/checkpoints") if transaction.steps(root)]
    saved = [(_number(root.parent), root.stat().st_mtime, root.parent) for root in roots]
    return max(saved)[2] if saved else None


def _number(directory: Path) -> int:
    """Return the number of a run among those of its task; 0 for one of the first edition."""
    return _count(read_facts(directory), "number")


def _count(facts: Mapping[str, Any], name: str) -> int:
    number = facts.get(name, 0)
    return number if isinstance(number, int) else 0


def _with_bucket(config: Config, origin: Origin) -> Origin:
    """Return the origin, or a copy of the run in its bucket if that has a newer checkpoint.

    Raises ConfigError for a bucket that cannot be read, or that holds another run.
    """
    resume, mirror = config.run.resume, config.checkpoint.mirror
    address = resume if resume is not None and is_address(resume) else mirror
    if address is None:
        return origin
    key = "run.resume" if address == resume else "checkpoint.mirror"
    newest = newest_in(key, address, is_needed=address == resume)
    own = max(transaction.steps(origin.root), default=0) if origin.source else 0
    is_wanted = resume in ("auto", address) or origin.is_attempt
    is_other = mirror is not None and not _is_same(mirror, address)
    if is_other and (held := newest_in("checkpoint.mirror", mirror or "", is_needed=False)):
        raise ConfigError(f"""checkpoint.mirror={mirror}:
            holds a run that has reached step {held:,}; give another prefix""")
    if newest and not is_wanted and (own < newest or not origin.is_resumed):
        raise ConfigError(f"""{key}={address}: holds a run that has reached step {newest:,};
            give run.resume=auto to continue it, or another prefix""")
    origin = replace(origin, reached=0 if is_other else newest)
    if not newest or not is_wanted:
        return origin
    copy = copy_of(address, base_of(config))
    directory = origin.directory or base_of(config) / bucket.name_of(address)
    if own and _run_of(origin.root) != _run_of(copy / "checkpoints"):
        raise ConfigError(f"""{key}={address}: holds another run than {config.shown(directory)};
            give another prefix, or run.name=<new>""")
    if own >= newest:
        return origin
    return replace(origin, directory=directory, source=copy, is_copy=True)


def newest_in(key: str, address: str, is_needed: bool = True) -> int:
    """Return the newest step in a bucket, 0 without one. Raises ConfigError."""
    held = bucket.Listing({}, [])
    try:
        with suppress(bucket.NotThereError):  # a folder that its first writer will make
            held = bucket.read_listing(bucket.Bucket(address))
    except bucket.BucketError as error:
        raise ConfigError(f"{key}={address}: {error}; check the address and the login") from None
    newest = max(held.checkpoints(), default=0)
    if not newest and is_needed:
        raise ConfigError(f"""{key}={address}: no checkpoint there;
            give the checkpoint.mirror of a run""")
    return newest


def _is_same(address: str, other: str) -> bool:
    return address.rstrip("/") == other.rstrip("/")


def _run_of(root: Path) -> Any:
    return (transaction.newest_manifest(root) or {}).get("run")


def find_checkpoint(config: Config, resume: str | None, key: str = "run.resume") -> Origin:
    """Find the run or checkpoint at a path, without taking over the run.

    Raises ConfigError if there is none.
    """
    if resume is None:
        return Origin()
    if is_address(resume):
        is_start = key == "run.init_from"  # the copy gets the weights, and is where the run is
        return Origin(source=copy_of(resume, base_of(config) if is_start else None))
    path = Path(config.folder, resume)
    if (path / transaction.MANIFEST).is_file():
        return Origin(checkpoint=path, source=path.resolve().parent.parent)
    if transaction.steps(path / "checkpoints"):
        return Origin(source=path)
    auto = "auto, " * (key == "run.resume")
    allowed = f"give {auto}a run directory, or a directory step-<number> in its checkpoints"
    if key == "run.init_from":
        allowed += ", or a file of weights, such as model.safetensors"
    raise ConfigError(f"{key}={resume}: no checkpoint there; {allowed}")


def find_previous_attempt(config: Config, launcher: Launcher) -> Origin | None:
    """Find the previous attempt's run directory: of the same launch, requeued or restarted.

    Call it a second time after rendezvous, with the `starters` of all ranks. torchrun counts no
    attempt when it re-forms the group because a machine has joined, and that one may have rank 0.
    """
    if not launcher.requeues and not launcher.starters:
        return None
    begun = Origin()
    resume = config.run.resume
    if resume is not None and resume != "auto" and not is_address(resume):
        begun = Origin(source=Path(config.folder, resume).parent.parent)
        with suppress(ConfigError):  # a checkpoint that has been pruned since
            begun = find_checkpoint(config, resume)
    launch = identify(config, launcher)
    named = _named(config)
    attempts: dict[tuple[int, float], Path] = {}
    own = [begun.source] if begun.source else []
    for place in [named] if named else [*base_of(config).glob("*/"), *own]:
        facts = last_facts(place)
        starters = {*str(facts.get("starters", "")).split()}
        is_known = launcher.requeues or starters & {*launcher.starters}
        if facts.get("launch") == launch and is_known:
            attempts[_number(place), (place / WRITER).stat().st_mtime] = place
    begun = replace(begun, launch=launch)
    if not attempts:
        return None
    return _with_bucket(config, roll_back(attempts[max(attempts)], begun))


def identify(config: Config, launcher: Launcher) -> str:
    """Identify the launch and its command: a SLURM job may run several.

    It is known before the task is, whose `Options` may give further settings.
    """
    options = {n: v for n, v in config.task.options.items() if n not in config.implied}
    plain = replace(config, task=replace(config.task, options=options)).plain()
    given = json.dumps(plain, sort_keys=True)
    return f"{launcher.job}/{hashlib.sha256(given.encode()).hexdigest()[:12]}"


def roll_back(directory: Path, begun: Origin) -> Origin:
    """Return the origin of the run's own newest checkpoint, else of the one it started from."""
    if begun.source not in (None, directory) and not transaction.steps(directory / "checkpoints"):
        return replace(begun, directory=directory, is_attempt=True, reached=None)
    return Origin(directory, source=directory, launch=begun.launch)


def find_checkpoints(origin: Origin) -> tuple[list[Path], bool]:
    """Return the checkpoints to resume from, the newest first; none for a fresh start.

    The second result is True if the first one is asked for by name.
    """
    if origin.checkpoint is not None:
        return [origin.checkpoint], True
    paths = transaction.steps(origin.root).values() if origin.source is not None else []
    return list(paths)[::-1], False


def read_saved(config: Config, origin: Origin) -> dict[str, Any]:
    """Return the settings of the run to continue from by full name; none without one.

    Raises CheckpointError.
    """
    one = origin.checkpoint
    if one is None and origin.source is None:
        return {}
    try:
        raw = transaction.read_manifest(one) if one else transaction.newest_manifest(origin.root)
    except CheckpointError as error:
        raise CheckpointError(f"run.resume={config.run.resume}: {error}") from None
    return raw.get("config", {}) if raw else {}


def _check_same_run(config: Config, origin: Origin) -> None:
    values = config.flat()
    saved = read_saved(config, origin)
    for key in FIXED:
        if key in saved and saved[key] != values[key]:
            had = f"the run to resume has {saved[key]}, and another value would change its samples"
            advice = f"give {key}={saved[key]}, or start a new run"
            raise ConfigError(f"{key}={values[key]}: {had}; {advice}")


def take(config: Config, origin: Origin, step: int, launcher: Launcher) -> tuple[Path, Lease]:
    """Create the run directory, or take over the resumed one, as its only writer. Rank 0 only.

    Writes config.json of a new run. Checkpoints after `step` are not valid: they are renamed, so
    that their steps can be saved.

    Raises ConfigError for disk errors, RunError if several restarts reached no newer checkpoint.
    """
    base = base_of(config)
    try:
        directory = origin.directory or run_directory.make_timestamped(base)
        directory.mkdir(parents=True, exist_ok=True)
        run_directory.check_plain(directory)
        others = [_number(place) for place in base.glob("*/")]
        facts = {"number": 1 + max(others, default=0)}
        facts |= _count_attempt(config, origin.launch, launcher, directory, step)
        lease = Lease(directory, facts)
        if not (origin.is_resumed or origin.is_attempt) and _has_run(directory):
            lease.release()
            raise ConfigError(_is_taken(config, directory))  # since the check before the start
        with suppress(PermissionError):  # the run can go on, and warns when it writes the file
            (directory / run_directory.EXIT).unlink(missing_ok=True)
        if origin.is_copy and origin.source is not None:
            for name in filter(lambda name: (origin.root.parent / name).exists(), OF_COPIES):
                replace_file(directory / name, (origin.source / name).read_bytes())
        is_there = (directory / CONFIG).exists()
        if not (origin.is_resumed and is_there):  # else after the first step of this session
            lease.write_beside(directory / CONFIG, format_config(config.plain()))
        root = directory / "checkpoints"
        for number, path in transaction.steps(root).items():
            if number > step:
                transaction.set_aside(path)
        transaction.sweep(root)
    except OSError as error:
        what = f"{error.filename or base}: {error.strerror}"
        raise ConfigError(f"run.dir={config.run.dir}: {what}; choose another run.dir") from None
    return directory, lease


def _count_attempt(
    config: Config, launch: str, launcher: Launcher, directory: Path, step: int
) -> dict[str, Any]:
    """Return the facts of this attempt that the next one needs, or raise RunError to give up."""
    before = last_facts(directory)
    facts = {"launch": launch, "step": step}
    is_vain = launcher.attempt > 0 and facts.items() <= before.items()
    vain = _count(before, "vain") + 1 if is_vain else 0
    if vain >= RESTARTS:
        reason = run_directory.read_exit(directory).get("reason", "its rank 0 was killed")
        why = f"gave up, {RESTARTS} restarts got no further than step {step}"
        raise RunError(f"{config.shown(directory)}: {why}: {reason}")
    return {**facts, "vain": vain, "starters": " ".join(sorted({*launcher.starters}))}
