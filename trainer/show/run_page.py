"""One run: its figures, curves, sessions, audit and settings, for the terminal and as a page."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.base.errors import STOPPED, ConfigError, counted
from trainer.core.api import LAYOUT, picture
from trainer.pages import MOST_CHARTS, Card, Page, Row, Section, Status
from trainer.pages.charts import (
    SPEED,
    Axis,
    Cell,
    Chart,
    Line,
    duration,
    rounded,
    shown,
    spoken,
)
from trainer.show.audit import audit
from trainer.show.run_reading import EPOCH, PLACE_SETTINGS, RunFiles, mesh_of

MOST_LARGE = 3
UNQUOTED_TEXT = re.compile(r"[\w./-]+")  # text that Hydra takes without quotes


@dataclass(frozen=True)
class RunSummary:
    """Figures, settings and audit of a run, for the terminal and for its page."""

    found: RunFiles
    state: Status
    cards: list[Card]
    audited: Audited
    changed: list[list[str]]  # settings that differ: name, value, default
    others: list[list[str]]
    command: str

    @classmethod
    def of(cls, run: RunFiles, config_dirs: Sequence[str], is_long: bool) -> RunSummary:
        """Summarize a run; `config_dirs` may have the file of its task."""
        changed, others = _split_settings(run, _read_defaults(run.task, config_dirs))
        audited = _audit(run, is_long)
        command = _command(run, changed, config_dirs)
        return cls(run, _status(run), _cards(run), audited, changed, others, command)

    @property
    def word(self) -> str:
        """The result in a word."""
        words = {"good": "done", "open": "not ended", "bad": "failed"}
        return "wrong" if self.is_wrong else words[self.state.kind]

    @property
    def is_wrong(self) -> bool:
        """True if a step had other examples than the run's order requires."""
        return any(status.kind == "bad" for status in self.audited.states)

    @property
    def audit_lines(self) -> Sequence[str]:
        """The lines about the examples; why they were not audited, if so."""
        lines = self.audited.lines
        if self.found.manifest and len(self.found.manifest.sessions) == 1 and not self.is_wrong:
            lines = lines[2:]  # without the run and its only session
        return lines or [f"{status.words}: {status.about}" for status in self.audited.states]

    def as_json(self) -> dict[str, Any]:
        run = self.found
        return {
            "run": run.name,
            "task": run.task,
            "state": self.state.words,
            "step": run.step,
            "best": run.best and {"metric": run.best_metric, **_as_pair(run.best)},
            "settings_that_differ": {name: run.settings[name] for name, *_ in self.changed},
            "audit": {"result": [s.words for s in self.audited.states], **self.audited.facts},
            "skipped_steps": run.bad_steps,
            "command": self.command,
        }

    def make_page(self) -> Page:
        run = self.found
        name = run.metric_name
        best = f" · {spoken(name)} {shown(name, run.best[1])}" if run.best else ""
        states = [self.state, *self.audited.states]
        page = Page(run.task + best, run.name, states, self.cards)
        charts = _charts(run)
        page.add_charts(charts[:MOST_CHARTS], len(charts), Section(""))
        title = "Settings that differ from the defaults"
        columns = ("setting", "value", "default")
        page.add(Section(title, columns=columns, rows=self.changed, is_beside=True))
        for sample, (step, text) in run.samples.items():
            page.add(Section(f"{sample}, step {step:,}", text=text))
        page.add(_sessions(run))
        rows = [[f"{step:,}", why] for step, why in sorted(run.bad_steps.items())]
        page.add(Section("Skipped steps", columns=("step", "reason"), rows=rows, is_beside=True))
        page.add(_checkpoints(run))
        page.add(Section("Repeat this run", text=self.command))
        if run.manifest:
            page.add(Section("Mesh", text="\n".join(picture(mesh_of(run.manifest)))))
        others = sorted(self.others)
        page.add(Section("Settings with their defaults", rows=others, is_folded=True))
        facts = [[name, text] for name, text in run.facts().items() if text not in ("", "None")]
        page.add(Section("Data, code and versions", rows=facts, is_folded=True))
        page.add(Section("Audit of the examples", self.audited.lines, is_folded=True))
        return page


def _as_pair(best: tuple[int, float]) -> dict[str, Any]:
    return dict(zip(("step", "value"), best, strict=True))


class Audited(NamedTuple):
    """States for the top of a page, lines and facts about the examples of a run."""

    states: list[Status]
    lines: list[str]
    facts: dict[str, Any]


def _status(run: RunFiles) -> Status:
    code, reason = run.exit.get("code"), run.exit.get("reason", "")
    if code == 0:
        return Status("good", "done", reason.removeprefix("done").lstrip(": "))
    if code is None:
        return Status("open", f"at step {run.step:,}", "the run has not ended")
    if code == STOPPED:
        return Status("open", f"stopped at step {run.step:,}", "the state is saved")
    return Status("bad", f"failed at step {run.step:,}", reason)


def _cards(run: RunFiles) -> list[Card]:
    settings, manifest = run.settings, run.manifest
    batch = settings["data.global_batch"]
    cards = []
    if run.best:
        step, value = run.best
        name = run.metric_name
        cards.append(Card(f"best {spoken(name)}", Cell.number(value, name), f"at step {step:,}"))
    length = manifest.steps_per_epoch if manifest else 0
    epochs = rounded("", run.step / length, 3) if length else ""
    note = f"{epochs} epoch{'s' * (epochs != '1')} of {counted(length, 'step')}" if epochs else ""
    cards.append(Card("steps", f"{run.step:,}", note))
    if run.seconds:
        speed = rounded("", run.step * batch / run.seconds, 3)
        cards.append(Card("training time", duration(run.seconds), f"{speed} examples/s"))
    if manifest:
        note = f"{run.strategy}, {settings['strategy.precision']}"
        mesh = mesh_of(manifest)
        note += f", {mesh}" if mesh.is_divided else ""
        cards.append(Card("layout", counted(manifest.world_size, "rank"), note))
    return cards


def _charts(run: RunFiles) -> list[Chart]:
    """Return charts of the loss and what is evaluated, training and splits together; then others.

    The others are more of those, the optimizer's values, the task's, speed and memory.
    """
    splits = ["train", *run.settings["eval.splits"]]
    groups: dict[str, list[Line]] = {}
    for name in sorted(run.evaluated, key=lambda n: (n != "loss", n != run.metric_name)):
        pairs = [(color, split, f"{split}/{name}") for color, split in enumerate(splits)]
        own = [Line(s, run.curves[full], n) for n, s, full in pairs if full in run.curves]
        if own:
            groups[name] = own
    large = [*groups][:MOST_LARGE]
    taken = {f"{split}/{name}" for split in splits for name in groups}
    others = [name for name in run.curves if name not in taken and name != EPOCH]
    others.sort(key=lambda name: (name.startswith(SPEED), not name.startswith("optim/")))
    groups |= {name: [Line(name, run.curves[name])] for name in others}
    across = Axis(run.begin, max(run.step, run.begin + 1))
    sessions = run.manifest.sessions if run.manifest else []
    marks = {step: f"resumed, {counted(ranks, 'rank')}" for step, ranks in sessions[1:]}
    more = {"across": across, "marks": marks}
    return [Chart.of(n, lines, is_large=n in large, **more) for n, lines in groups.items()]


def _sessions(run: RunFiles) -> Section:
    if run.manifest is None:
        line = "No checkpoint can be read." if run.checkpoints else "There is no checkpoint yet."
        return Section("Sessions", [line])
    sessions = run.manifest.sessions
    ends = [first for first, _ in sessions[1:]] + [run.manifest.step]
    changes = run.manifest.changes
    rows: list[Row] = [
        [
            Cell(f"{first:,} to {end:,}", is_number=True),
            str(ranks),
            "; ".join(changes.get(str(first), ())),
        ]
        for (first, ranks), end in zip(sessions, ends, strict=True)
    ]
    if len(rows) == 1 and not rows[0][2]:
        return Section("Sessions")  # the cards tell it
    return Section("Sessions", columns=("steps", "ranks", "changed"), rows=rows, is_beside=True)


def _audit(run: RunFiles, is_long: bool) -> Audited:
    if not run.checkpoints:
        return Audited([], [], {})
    try:
        code, lines, facts = audit(run.path, is_long)
    except ConfigError as error:
        return Audited([Status("open", "not audited", str(error))], [], {})
    if code:
        return Audited([Status("bad", "audit", lines[-1])], lines, facts)
    agreement = next(line for line in lines if "recomputed order" in line)
    return Audited([Status("good", "audit", agreement)], lines, facts)


def _command(run: RunFiles, changed: list[list[str]], config_dirs: Sequence[str]) -> str:
    """Return the command that starts the run again, with the settings that make it what it is."""
    words = [f"task={run.task}"]
    for name, value, default in changed:
        if name != "task.name" and value != default:
            words.append(f"{name}={_as_override(run.settings[name], value)}")
    words += [f"--config-dir={folder}" for folder in config_dirs]
    return shlex.join(["python", "-m", "trainer", *words])


def _as_override(value: Any, written: str) -> str:
    """Return a value as Hydra's command line takes it; text with special characters in quotes."""
    if not isinstance(value, str) or UNQUOTED_TEXT.fullmatch(value):
        return written
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _checkpoints(run: RunFiles) -> Section:
    best = run.best[0] if run.best else None
    curve = run.curves.get(run.best_metric, {})
    rows: list[Row] = [
        [
            f"{step:,}",
            Cell.number(curve.get(step), run.metric_name),
            f"{path.name}{' (best)' * (step == best)}",
        ]
        for step, path in sorted(run.checkpoints.items())
    ]
    return Section(
        "Checkpoints",
        columns=("step", spoken(run.metric_name), "folder"),
        rows=rows,
        is_beside=True,
    )


def _split_settings(
    run: RunFiles, defaults: Mapping[str, Any]
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the settings that differ from the defaults, the run's first; and the others."""
    changed, others = [], []
    for name, value in sorted(run.settings.items(), key=lambda item: item[0].startswith(LAYOUT)):
        if name in defaults and value == defaults[name]:
            others.append([name, _written(value)])
        elif name not in PLACE_SETTINGS:
            default = _written(defaults[name]) if name in defaults else ""
            changed.append([name, _written(value), default])
    return changed, others


def _read_defaults(task: str, config_dirs: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a task without changes; without its file, Lockstep's own."""
    from trainer import load_config
    from trainer.base.folders import CONF
    from trainer.core.api import Task

    # in a checkout that folder is Lockstep's own, and a task's file must not be given twice
    is_theirs = Path("conf").resolve() != CONF.resolve()
    usual = ["conf"] if is_theirs and Path(f"conf/task/{task}.yaml").is_file() else []
    try:
        return load_config([f"task={task}"], config_dirs or usual).flat()
    except ConfigError:
        return load_config(task=Task).flat()


def _written(value: Any) -> str:
    """Return a setting as one would write it."""
    return (
        json.dumps(value, default=str)
        if isinstance(value, (bool, list, dict, type(None)))
        else str(value)
    )
