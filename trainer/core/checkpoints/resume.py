"""Find the run directory and the checkpoint to resume from: by settings or previous attempt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.base.durable_files import replace_file
from trainer.base.errors import CheckpointError, ConfigError, RunError
from trainer.core.checkpoints import run_directory, transaction
from trainer.core.checkpoints.run_directory import WRITER, Lease, last_facts, read_facts
from trainer.core.config import stores
from trainer.core.config.copies import address_of, copy_of
from trainer.core.config.saved_config import CONFIG, format_config
from trainer.core.config.schema import Config
from trainer.core.config.stores import Held, NotThereError, StoreError, is_address, is_same_address
from trainer.core.distributed.launchers import Launcher

# These cannot change within a run: they determine the samples.
FIXED = ("task.name", "run.seed", "data.global_batch")
# Taken over from a copy of the run, with its checkpoint.
OF_COPIES = ("metrics.jsonl", "sampling.safetensors", "trackers.json")
RESTARTS = 3  # in a row without a newer checkpoint: then the cause is not chance


@dataclass(frozen=True)
class Origin:
    """The directory of a run, and where the checkpoints are from which it may resume.

    The newest valid checkpoint of `source` and `copies` is used, unless `checkpoint` names one.
    """

    directory: Path | None = None  # None: a new one, named by the time
    checkpoint: Path | None = None
    source: Path | None = None  # a run directory
    copies: tuple[Path, ...] = ()  # of the same run, in stores
    fallback: Path | None = None  # one more copy, if no other one has a valid checkpoint
    used: Path | None = None  # the checkpoint that was read
    reached: int | None = None  # the newest step in the store of checkpoint.mirror
    before: int | None = None  # after a rollback only earlier steps are used
    mirror: str | None = None  # a store that may have these earlier steps
    is_attempt: bool = False  # a previous attempt of this launch created the directory
    refused: str = ""  # the error to raise unless another rank finds the origin
    launch: str = ""  # identifies the launch and its command, on rank 0

    @property
    def is_resumed(self) -> bool:
        """True if the run continues: in its own directory, or from a copy of it in a store."""
        is_here = self.source is not None and self.source == self.directory
        return is_here or bool(self.copies or self.fallback)

    @property
    def root(self) -> Path:
        """The directory of the source's checkpoints."""
        return (self.source or Path()) / "checkpoints"

    @property
    def used_copy(self) -> Path | None:
        """The copy of a run in a store that has the checkpoint that was read."""
        home = self.used.parent.parent if self.used else None
        return home if home and address_of(home) else None


def base_of(config: Config) -> Path:
    """Return the directory of the task's runs."""
    return config.runs / config.task.name


def _named(config: Config) -> Path | None:
    """Return the run directory that the settings name: by run.name, else as its mirror."""
    mirror, resume = config.checkpoint.mirror, config.run.resume
    name = config.run.name
    if name is None and is_address(resume):
        name = stores.name_of(resume or "")
    elif name is None and mirror is not None and resume in (None, "auto"):
        name = stores.name_of(mirror)
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
    origin = origin or _with_stores(config, _from_settings(config), launcher)
    run_directory.check_writable(origin.directory or base_of(config))
    if origin.directory is not None:
        run_directory.check_plain(origin.directory)
        Lease.check_free(origin.directory)
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
    if begun.checkpoint and last > _step_of(begun.checkpoint):
        advice = f"give run.name=<new> to branch off, or run.resume={begun.source}"
        raise ConfigError(f"run.resume={Path(resume)}: its run has reached step {last}; {advice}")
    return replace(begun, directory=begun.source)


def _step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint. Raises CheckpointError for a folder of another name."""
    match = transaction.STEP_NAME.fullmatch(checkpoint.resolve().name)
    return int(match[1]) if match else int(transaction.read_manifest(checkpoint)["step"])


def _check_unused(config: Config, named: Path | None) -> Path | None:
    if named is not None and named.exists() and not _is_empty_folder(named):
        Lease.check_free(named)
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
    count = facts.get(name, 0)
    return count if isinstance(count, int) else 0


def _with_stores(config: Config, origin: Origin, launcher: Launcher) -> Origin:
    """Return the origin with copies of the run in its stores.

    Raises ConfigError for a store that cannot be read, or that holds another run.
    """
    resume, mirror = config.run.resume, config.checkpoint.mirror
    if mirror is not None:
        held = read_store("checkpoint.mirror", mirror)
        origin = replace(origin, reached=held.newest)
        if held.newest:
            origin = _with_mirror(config, origin, launcher, held)
    if is_address(resume) and not (mirror and is_same_address(mirror, resume or "")):
        return _with_resumed(config, origin)
    if is_address(resume) and not origin.reached:
        raise _none_there("run.resume", resume or "")
    return origin


def _with_mirror(config: Config, origin: Origin, launcher: Launcher, held: Held) -> Origin:
    """Return the origin with a copy of the run in `checkpoint.mirror`, which has checkpoints.

    Raises ConfigError unless it is the run that the settings, or the previous attempt, name.
    """
    resume, mirror = config.run.resume, config.checkpoint.mirror or ""
    is_named = resume == "auto" or (is_address(resume) and is_same_address(mirror, resume or ""))
    is_named = is_named or _is_attempt(held.launch, launcher, identify(config, launcher))
    newest = held.newest
    how = f"run.resume={mirror}" if is_address(resume) else "run.resume=auto"
    refusal = ConfigError(f"""checkpoint.mirror={mirror}: holds a run that has reached
        step {newest:,}; give {how} to continue it, or another prefix""")
    is_older = origin.checkpoint is not None and _step_of(origin.checkpoint) < newest
    if not is_named and (is_older or not origin.is_resumed):
        raise refusal
    copy = copy_of(mirror, base_of(config), held=held)
    is_same = _check_run_of("checkpoint.mirror", mirror, config, origin, copy)
    if not is_named and not is_same:
        raise refusal
    directory = origin.directory or base_of(config) / stores.name_of(mirror)
    return replace(origin, directory=directory, copies=(copy,))


def _with_resumed(config: Config, origin: Origin) -> Origin:
    """Return the origin with a copy of the run at an address that is not its mirror.

    A restart goes on from what this launch has made, if there is something. Raises ConfigError.
    """
    address = config.run.resume or ""
    is_begun = origin.is_attempt and bool(find_checkpoints(origin)[0])
    try:
        held = read_store("run.resume", address)
        if not held.newest:
            raise _none_there("run.resume", address)
        copy = copy_of(address, base_of(config), held=held)
    except ConfigError:
        if is_begun:
            return origin
        raise
    _check_run_of("run.resume", address, config, origin, copy)
    directory = origin.directory or base_of(config) / stores.name_of(address)
    if is_begun:
        return replace(origin, directory=directory, fallback=copy)
    return replace(origin, directory=directory, copies=(*origin.copies, copy))


def _check_run_of(key: str, address: str, config: Config, origin: Origin, copy: Path) -> bool:
    """Return True if a copy of a run in a store has the run of the origin's directory, False if
    one of them has no readable checkpoint. Raises ConfigError if it has another one."""
    is_here = origin.source is not None and origin.source == origin.directory
    own = _run_of(origin.root) if is_here else None
    other = _run_of(copy / "checkpoints")
    if own and other and own != other:
        raise ConfigError(f"""{key}={address}: holds another run than
            {config.shown(origin.directory or Path())}; give another prefix, or run.name=<new>""")
    return bool(own) and own == other


def read_store(key: str, address: str) -> Held:
    """Return what a store holds; nothing for a folder that does not exist. Raises ConfigError."""
    try:
        with suppress(NotThereError):  # a folder that its first writer will make
            return stores.open_store(address).held()
    except StoreError as error:
        raise ConfigError(f"{key}={address}: {error}; check the address and the login") from None
    return stores.NOTHING


def check_has_run(key: str, address: str) -> None:
    """Raise ConfigError unless there is a checkpoint in a store."""
    if not read_store(key, address).newest:
        raise _none_there(key, address)


def _none_there(key: str, address: str) -> ConfigError:
    return ConfigError(f"{key}={address}: no checkpoint there; give the checkpoint.mirror of a run")


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
    auto = "auto, " if key == "run.resume" else ""
    allowed = f"give {auto}a run directory, or a directory step-<number> in its checkpoints"
    if key == "run.init_from":
        allowed += ", or a file of weights, such as model.safetensors"
    raise ConfigError(f"{key}={resume}: no checkpoint there; {allowed}")


def find_previous_attempt(config: Config, launcher: Launcher) -> Origin | None:
    """Find the previous attempt's run directory: of the same launch, requeued or restarted.

    If its disk was lost, its run is in the store of `checkpoint.mirror`.

    Call it a second time after rendezvous, with the `starters` of all ranks. torchrun counts no
    attempt when it re-forms the group because a machine has joined, and that one may have rank 0.
    """
    if not launcher.requeues and not launcher.starters:
        return None
    launch = identify(config, launcher)
    begun = replace(_find_beginning(config), launch=launch)
    directory = _find_attempt_here(config, launcher, launch, begun)
    if directory is None and config.checkpoint.mirror is not None:
        held = read_store("checkpoint.mirror", config.checkpoint.mirror)
        if _is_attempt(held.launch, launcher, launch):
            name = stores.name_of(config.checkpoint.mirror)
            directory = _named(config) or begun.source or base_of(config) / name
    if directory is None:
        return None
    origin = replace(roll_back(directory, begun), is_attempt=True)
    resumed = _with_stores(config, origin, launcher)
    if resumed.copies and origin.source != directory:
        # the run has checkpoints of its own by now
        return replace(resumed, checkpoint=None, source=directory)
    return resumed


def _find_beginning(config: Config) -> Origin:
    """Return the run or checkpoint at a path from which the settings let the run begin."""
    resume = config.run.resume
    if resume is None or resume == "auto" or is_address(resume):
        return Origin()
    path = Path(config.folder, resume)
    is_one = transaction.STEP_NAME.fullmatch(path.name)
    with suppress(ConfigError):  # a checkpoint that has been pruned since
        return find_checkpoint(config, resume)
    return Origin(source=path.parent.parent if is_one else path)


def _find_attempt_here(
    config: Config, launcher: Launcher, launch: str, begun: Origin
) -> Path | None:
    attempts: dict[tuple[int, float], Path] = {}
    own = [begun.source] if begun.source else []
    named = _named(config)
    for directory in [named] if named else [*base_of(config).glob("*/"), *own]:
        if _is_attempt(last_facts(directory), launcher, launch):
            written = (directory / WRITER).stat().st_mtime
            attempts[_number(directory), written] = directory
    return attempts[max(attempts)] if attempts else None


def _is_attempt(facts: Mapping[str, Any], launcher: Launcher, launch: str) -> bool:
    """Return True if facts of a writer, in a run directory or a store, are of this launch."""
    if facts.get("launch") != launch:
        return False
    starters = {*str(facts.get("starters", "")).split()}
    return bool(launcher.requeues or starters & {*launcher.starters})


def facts_of_launch(launch: str, launcher: Launcher) -> dict[str, str]:
    """Return the facts by which the next attempt of a launch knows what this one has written."""
    return {"launch": launch, "starters": " ".join(sorted({*launcher.starters}))}


def identify(config: Config, launcher: Launcher) -> str:
    """Identify the launch and its command: a SLURM job may run several.

    It is known before the task is, whose `Options` may give further settings.
    """
    options = {n: v for n, v in config.task.options.items() if n not in config.implied}
    plain = replace(config, task=replace(config.task, options=options)).plain()
    settings_text = json.dumps(plain, sort_keys=True)
    return f"{launcher.job}/{hashlib.sha256(settings_text.encode()).hexdigest()[:12]}"


def roll_back(
    directory: Path, begun: Origin, before: int | None = None, mirror: str | None = None
) -> Origin:
    """Return the origin of the run's own newest checkpoint, else of the one it started from.

    After a rollback it is one of a step below `before`, also of those in `mirror`.
    """
    if begun.source not in (None, directory) and not transaction.steps(directory / "checkpoints"):
        return replace(begun, directory=directory, is_attempt=True, reached=None, used=None)
    return Origin(
        directory,
        source=directory,
        copies=begun.copies,
        fallback=begun.fallback,
        before=before,
        mirror=mirror,
        launch=begun.launch,
    )


def find_checkpoints(origin: Origin) -> tuple[list[Path], bool]:
    """Return the checkpoints to resume from, the newest first; none for a fresh start.

    Of a step, that of the run directory comes before its copies in stores. The second result is
    True if only one step was asked for.
    """
    roots = _roots(origin)
    if origin.checkpoint is not None:
        name = origin.checkpoint.name
        copies = [root / name for root in roots if (root / name).is_dir()]
        return [origin.checkpoint, *copies], True
    if origin.source is not None:
        roots = [origin.root, *roots]
    paths = _list_checkpoints(roots, origin.before)
    if origin.fallback is not None:
        paths += _list_checkpoints([origin.fallback / "checkpoints"], origin.before)
    return paths, False


def _roots(origin: Origin) -> list[Path]:
    """Return the directories of the checkpoints that are in stores."""
    copies = [*origin.copies]
    if origin.mirror is not None and origin.directory is not None:
        with suppress(ConfigError):  # a store that does not answer now
            copies.append(copy_of(origin.mirror, origin.directory.parent))
    return [copy / "checkpoints" for copy in copies]


def _list_checkpoints(roots: Sequence[Path], before: int | None = None) -> list[Path]:
    """Return the checkpoints in several directories, the newest first, of a step in this order."""
    every = [
        (-step, order, path)
        for order, root in enumerate(roots)
        for step, path in transaction.steps(root).items()
        if before is None or step < before
    ]
    return [path for _, _, path in sorted(every)]


def read_saved(config: Config, origin: Origin) -> dict[str, Any]:
    """Return the settings of the run to continue from by full name; none without one.

    Raises CheckpointError.
    """
    problem: CheckpointError | None = None
    for _ in range(transaction.LISTING_TRIES):
        paths, is_named = find_checkpoints(origin)
        for path in paths:
            try:
                saved: dict[str, Any] = transaction.read_manifest(path).get("config", {})
                return saved
            except CheckpointError as error:
                problem = problem or error
        if not any(map(transaction.is_gone, paths)):
            break  # else its run is going on, and has newer ones
    if problem is not None and is_named:
        raise CheckpointError(f"run.resume={config.run.resume}: {problem}")
    return {}


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

    Writes config.json of a new run. Checkpoints after `step` are not valid, nor is that of `step`
    if it was read from a store: they are renamed, so that their steps can be saved.

    Raises ConfigError for disk errors, RunError if several restarts reached no newer checkpoint.
    """
    base = base_of(config)
    try:
        directory = origin.directory or run_directory.make_timestamped(base)
        directory.mkdir(parents=True, exist_ok=True)
        run_directory.check_plain(directory)
        others = [_number(folder) for folder in base.glob("*/")]
        facts = {"number": 1 + max(others, default=0)}
        facts |= _count_attempt(config, origin.launch, launcher, directory, step)
        lease = Lease(directory, facts)
    except OSError as error:
        raise _disk_error(config, error, base) from None
    try:
        if not (origin.is_resumed or origin.is_attempt) and _has_run(directory):
            raise ConfigError(_is_taken(config, directory))  # since the check before the start
        with suppress(PermissionError):  # the run can go on, and warns when it writes the file
            (directory / run_directory.EXIT).unlink(missing_ok=True)
        _take_record(origin.used_copy, directory)
        is_there = (directory / CONFIG).exists()
        if not (origin.is_resumed and is_there):  # else after the first step of this session
            lease.write_beside(directory / CONFIG, format_config(config.plain()))
        # the step itself stays if it is this directory's; that of a copy is saved here again
        first = step if origin.used_copy is not None else step + 1
        _set_aside(directory / "checkpoints", first)
    except BaseException as error:
        lease.release()
        raise (_disk_error(config, error, base) if isinstance(error, OSError) else error) from None
    return directory, lease


def _disk_error(config: Config, error: OSError, base: Path) -> ConfigError:
    what = f"{error.filename or base}: {error.strerror}"
    return ConfigError(f"run.dir={config.run.dir}: {what}; choose another run.dir")


def _take_record(copy: Path | None, directory: Path) -> None:
    """Replace the record by that of a copy of the run in a store, if there is one."""
    if copy is None:
        return
    for name in OF_COPIES:
        if (copy / name).exists():
            replace_file(directory / name, (copy / name).read_bytes())


def _set_aside(root: Path, first: int) -> None:
    """Rename the checkpoints from a step on, and remove what an interrupted save has left."""
    for step, path in transaction.steps(root).items():
        if step >= first:
            transaction.set_aside(path)
    transaction.sweep(root)


def _count_attempt(
    config: Config, launch: str, launcher: Launcher, directory: Path, step: int
) -> dict[str, Any]:
    """Return the facts of this attempt that the next one needs, or raise RunError to give up."""
    before = last_facts(directory)
    facts = {"launch": launch, "step": step}
    own = facts_of_launch(launch, launcher)
    is_vain = launcher.attempt > 0 and facts.items() <= before.items()
    vain = _count(before, "vain") + 1 if is_vain else 0
    if vain >= RESTARTS:
        reason = run_directory.read_exit(directory).get("reason", "its rank 0 was killed")
        why = f"gave up, {RESTARTS} restarts got no further than step {step}"
        raise RunError(f"{config.shown(directory)}: {why}: {reason}")
    return {**facts, **own, "vain": vain}
