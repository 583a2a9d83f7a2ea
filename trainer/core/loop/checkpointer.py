"""Checkpoints of a run in training: restoring its state at the start, and saving it later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError
from trainer.base.plain_files import strict
from trainer.core.checkpoints import resume
from trainer.core.checkpoints.progress import RunProgress
from trainer.core.checkpoints.reading import read_on_all_ranks, wrong_state_named
from trainer.core.checkpoints.saver import Snapshot
from trainer.core.checkpoints.transaction import Manifest, steps
from trainer.core.config.copies import address_of
from trainer.core.data.batches import Batches
from trainer.core.distributed.watch.heartbeat import Phase
from trainer.core.engine.engine import Engine
from trainer.core.record import fingerprint, init_from
from trainer.core.setup.build import Setup
from trainer.core.setup.session import RunDirectory
from trainer.core.strategy.tensor_shards import gather

MOST_NAMED = 4
AGAIN = "so a resume starts from its first value"
CHANGED = f"training changes it, {AGAIN}; use self.step, torch's own generator, or register_buffer"
RESHAPED = f"its shape changed in training, {AGAIN}; build it with its final shape"
ARRIVE_S = 1.5  # between the ranks, after an error that each of them has


class Checkpointer:
    """Saves the state of a run. `data` has the facts of its data, `code` digests by module."""

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        batches: Batches,
        opened: RunDirectory,
        data: dict[str, dict[str, Any]],
        code: dict[str, str],
    ):
        self._setup = setup
        self._ranks = setup.parts.ranks
        self._engine = engine
        self._batches = batches
        self._record = opened.record
        self._saver = opened.saver
        self._is_shared = opened.is_shared
        self._data = data
        self._code = code
        self._named: set[str] = set()
        self.is_requested = False

    def request(self, step: int) -> Path:
        """Ask for a checkpoint that is not due by the settings; return its path, if of `step`."""
        self.is_requested = True
        return self.path_of(step)

    def path_of(self, step: int) -> Path:
        return self._saver.path_of(step)

    def wait(self, step: int | None = None) -> None:
        """Wait for the checkpoint that is being written. Raises RunError if it or `step` failed."""
        self._saver.wait(step)

    @property
    def is_copied(self) -> bool:
        return self._saver.is_copied

    def close(self, beat: Callable[[], None]) -> None:
        self._saver.close(beat)

    def newest(self) -> int:
        """Return the step of the newest checkpoint, 0 without one."""
        return max(steps(self._saver.root), default=0)

    def save(self, state: RunProgress, is_over: bool) -> Sequence[int]:
        """Begin a checkpoint of the state, unless this step has one already. A collective.

        As a rule a thread publishes it later. Return the indices of examples that could not be read
        since the last one, on every rank.
        """
        self.is_requested = False
        self._ranks.heartbeat.enter(Phase.SAVE)
        group = self._ranks.group
        with group.agreed("saving a checkpoint"):
            self._engine.state.check()
        self._warn_of_lost_state(state.step)
        training = {**self._engine.state.plain(), "progress": state.saved()}
        shards, left_out = self._engine.state.saved_shards()
        if not self._is_shared:
            # rank 0 writes all of them
            shards = {kind: gather(named, group) for kind, named in shards.items()}
        self._batches.ledger.close(group)
        unreadable = self._batches.gather_replaced()
        facts = {**self._facts(state), "frozen": left_out}
        staging = ""
        with group.agreed("saving a checkpoint"):
            self._batches.check_length()
            self._saver.wait()
            staging = self._saver.stage(state.step)
        if staging := group.tell_all(staging):
            snapshot = Snapshot(state.step, shards, training, facts, state.best_step)
            with group.agreed("saving a checkpoint"):
                self._record.note(state.step, {"ledger": facts["ledger"]})
                is_behind = self._setup.config.checkpoint.background and not is_over
                self._saver.save(staging, snapshot, is_behind)
        return unreadable

    def _warn_of_lost_state(self, step: int) -> None:
        """Show, once for each, the state that this checkpoint does not hold. A collective."""
        own = [self._engine.inspection.list_changed(), self._engine.state.buffers.reshaped()]
        every = self._ranks.group.gather(own)
        kinds = [dict.fromkeys(n for each in every for n in each[kind]) for kind in range(2)]
        new = [name for names in kinds for name in names if name not in self._named]
        self._named.update(new)
        lost = self._engine.inspection.find_lost(new, step) if new else []
        for names, why in zip(kinds, (CHANGED, RESHAPED), strict=True):
            if told := [name for name in names if name in lost]:
                more = f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
                named = ", ".join(told[:MOST_NAMED]) + more
                self._record.say(f"warning: a checkpoint does not hold {named}: {why}")

    def save_after_error(self, state: RunProgress, flush: Callable[[], None]) -> bool:
        """Publish the state after an error between two steps; return True if it is saved then.

        `flush` raises an error for a step that must not be published. A collective that does
        nothing unless all ranks have come within seconds: an error of one rank alone leaves the
        others in a collective of their own.
        """
        self._ranks.heartbeat.enter(Phase.SAVE)
        group = self._ranks.group
        if not group.all_arrive(f"after an error at step {state.step}", ARRIVE_S):
            return False
        try:
            flush()
            self.save(state, True)
            with group.agreed("saving a checkpoint"):
                self._saver.wait(state.step)
        except Exception:  # the first error is the one to report
            return False
        return True

    def _facts(self, state: RunProgress) -> dict[str, Any]:
        """Return the entries of the manifest except files, step and what is left out."""
        setup = self._setup
        config = setup.config
        ledger = self._batches.ledger
        return {
            "config": config.flat(),
            "data": self._data,
            "machine": fingerprint.of_machine(setup.world),
            "code": self._code,
            "run": state.run_id,
            "run_hash": config.run_hash(self._engine.strategy.of_the_run),
            "strategy": config.strategy.name,
            "world_size": setup.world.world_size,
            "sessions": state.sessions,
            "changes": state.changes,
            "ledger": ledger.chain,
            "replaced": self._batches.replaced,
            "metrics": strict(state.metrics if state.evaluated == state.step else {}),
        }


def restore(
    setup: Setup,
    engine: Engine,
    batches: Batches,
    data: dict[str, dict[str, Any]],
    origin: resume.Origin,
    num_steps: int,
) -> tuple[RunProgress, Manifest | None, resume.Origin, list[str]]:
    """Restore engine and batches from `origin`, or start from the weights of `run.init_from`.

    Returns the state of the run, the manifest if there is a checkpoint, the origin with the
    checkpoint that was used, and lines to print.
    Raises CheckpointError for a checkpoint of another model, optimizer or data set, ConfigError if
    the run is beyond `num_steps`. A collective.
    """
    group = setup.parts.ranks.group
    config = setup.config
    size = setup.world.world_size
    restored, skipped = read_on_all_ranks(group, lambda: resume.find_checkpoints(origin))
    if restored is None:
        lines = [*skipped, *init_from.start_from(config, engine, setup.parts)]
        return RunProgress.begin(size), None, origin, lines
    manifest = restored.manifest
    training = restored.content.training
    with group.agreed("comparing the data"):
        fingerprint.check_data(data, manifest.data)
    is_same_run = group.tell_all(origin.is_resumed)
    restored.check_base(setup.parts)
    with wrong_state_named():
        engine.state.load(restored.content.sources, training, manifest.frozen)
        state = RunProgress.resume(manifest, training["progress"], size, is_same_run)
    restored.close(group)
    batches.restore(manifest.step, manifest.ledger or "", manifest.replaced)
    if state.step > num_steps:
        run = config.run
        setting = f"run.epochs={run.epochs}" if run.steps is None else f"run.steps={run.steps}"
        raise ConfigError(f"""{setting}: ends at step {num_steps:,},
            but the run to resume is at step {state.step:,} already; give a larger number""")
    origin = replace(origin, used=restored.path)
    if skipped and origin.used_copy:
        skipped.append(f"step {state.step:,} is read from {address_of(restored.path)}")
    return state, manifest, origin, skipped
