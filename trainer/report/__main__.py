"""`python -m trainer.report DIR`: write one page about a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.audit import audit
from trainer.cli import answer, run, single, split_arguments, take_words
from trainer.config.schema import LAYOUT
from trainer.errors import ConfigError, counted
from trainer.record.startup import STOPPED, picture
from trainer.report.charts import Axis, Chart, Line
from trainer.report.numbers import Cell, duration, rounded, shown, spoken
from trainer.report.page import MOST_CHARTS, Card, Page, Section, Status
from trainer.report.reading import EPOCH, PLACE, SPEED, RunFiles, mesh_of, read_runs

HELP = """usage: python -m trainer.report DIR [out=FILE.html] [--config-dir DIR]

Writes one page about a run: best metric, curves of training and evaluation, resumes, skipped steps,
audit, checkpoints, settings that differ from the task's own, data and versions. The page is one
file that opens without a network, in light and dark, and prints. DIR is a run directory.

out: the page; by default report.html in the run directory
--config-dir: the folder with task/<name>.yaml; by default that of lockstep.yaml or pyproject.toml,
else conf. Without a file of the task its settings are compared with Lockstep's defaults."""

MOST_LARGE = 3
USAGE = "python -m trainer.report DIR [out=FILE.html]"


def main(arguments: Sequence[str]) -> int:
    own, rest = take_words(arguments, ("out",))
    words, config_dirs = split_arguments(rest)
    place = single(words, f"give one run directory: {USAGE}")
    out = Path(own.get("out", Path(place) / "report.html"))
    if out.suffix != ".html":
        raise ConfigError(f"out={out}: must end with .html")
    (found,) = read_runs([place])
    make_page(found, config_dirs).write(out)
    return answer(0, "written", {"file": out}, lambda: print(f"written: {out}"))


def make_page(found: RunFiles, config_dirs: Sequence[str]) -> Page:
    """Return the page of a run; `config_dirs` may have the file of its task."""
    name = found.metric_name
    best = f" · {spoken(name)} {shown(name, found.best[1])}" if found.best else ""
    audited, lines = _audit(found)
    page = Page(found.task + best, found.name, [_status(found), *audited], _cards(found))
    large, small = _charts(found)
    page.add(Section("", charts=large, size="large"))
    left_out = [f"The first {MOST_CHARTS} of {len(small):,} charts."] * (len(small) > MOST_CHARTS)
    page.add(Section("", left_out, small[:MOST_CHARTS]))
    changed, others = _split_settings(found, _read_defaults(found.task, config_dirs))
    title = "Settings that differ from the defaults"
    columns = ("setting", "value", "default")
    page.add(Section(title, columns=columns, rows=changed, is_beside=True))
    page.add(_sessions(found))
    rows = [[f"{step:,}", why] for step, why in sorted(found.bad_steps.items())]
    page.add(Section("Skipped steps", columns=("step", "reason"), rows=rows, is_beside=True))
    page.add(_checkpoints(found))
    if found.manifest:
        page.add(Section("Mesh", text="\n".join(picture(mesh_of(found.manifest)))))
    page.add(Section("Settings with their defaults", rows=sorted(others), is_folded=True))
    facts = [[name, value] for name, value in found.facts().items() if value not in ("", "None")]
    page.add(Section("Data, code and versions", rows=facts, is_folded=True))
    page.add(Section("Audit of the examples", lines, is_folded=True))
    return page


def _status(found: RunFiles) -> Status:
    code, reason = found.exit.get("code"), found.exit.get("reason", "")
    if code == 0:
        return Status("good", "done", reason.removeprefix("done").lstrip(": "))
    if code is None:
        return Status("open", f"at step {found.step:,}", "the run has not ended")
    if code == STOPPED:
        return Status("open", f"stopped at step {found.step:,}", "the state is saved")
    return Status("bad", f"failed at step {found.step:,}", reason)


def _cards(found: RunFiles) -> list[Card]:
    settings, manifest = found.settings, found.manifest
    batch = settings["data.global_batch"]
    cards = []
    if found.best:
        step, value = found.best
        name = found.metric_name
        cards.append(Card(f"best {spoken(name)}", Cell.number(value, name), f"at step {step:,}"))
    length = manifest.steps_per_epoch if manifest else 0
    epochs = rounded("", found.step / length, 3) if length else ""
    note = f"{epochs} epoch{'s' * (epochs != '1')} of {counted(length, 'step')}" if epochs else ""
    cards.append(Card("steps", f"{found.step:,}", note))
    if found.seconds:
        speed = rounded("", found.step * batch / found.seconds, 3)
        cards.append(Card("training time", duration(found.seconds), f"{speed} examples/s"))
    if manifest:
        note = f"{settings['strategy.name']}, {settings['strategy.precision']}"
        mesh = mesh_of(manifest)
        note += f", {mesh}" * mesh.is_divided
        cards.append(Card("layout", counted(manifest.world_size, "rank"), note))
    return cards


def _charts(found: RunFiles) -> tuple[list[Chart], list[Chart]]:
    """Return charts of the loss and what is evaluated, training and splits together; and others.

    The others are more of those, the optimizer's values, the task's, speed and memory.
    """
    splits = ["train", *found.settings["eval.splits"]]
    groups: dict[str, list[Line]] = {}
    for name in sorted(found.evaluated, key=lambda n: (n != "loss", n != found.metric_name)):
        pairs = [(place, split, f"{split}/{name}") for place, split in enumerate(splits)]
        own = [Line(s, found.curves[full], n) for n, s, full in pairs if full in found.curves]
        if own:
            groups[name] = own
    large = [*groups][:MOST_LARGE]
    taken = {f"{split}/{name}" for split in splits for name in groups}
    others = [name for name in found.curves if name not in taken and name != EPOCH]
    others.sort(key=lambda name: (name.startswith(SPEED), not name.startswith("optim/")))
    groups |= {name: [Line(name, found.curves[name])] for name in others}
    across = Axis(found.begin, max(found.step, found.begin + 1))
    sessions = found.manifest.sessions if found.manifest else []
    marks = {step: f"resumed, {counted(ranks, 'rank')}" for step, ranks in sessions[1:]}
    charts: dict[bool, list[Chart]] = {True: [], False: []}
    for name, lines in groups.items():
        is_large = name in large
        chart = Chart.of(name, lines, is_large=is_large, across=across, marks=marks)
        charts[is_large].append(chart)
    return charts[True], charts[False]


def _sessions(found: RunFiles) -> Section:
    if found.manifest is None:
        line = "No checkpoint can be read." if found.checkpoints else "There is no checkpoint yet."
        return Section("Sessions", [line])
    sessions = found.manifest.sessions
    ends = [first for first, _ in sessions[1:]] + [found.manifest.step]
    changes = found.manifest.changes
    rows: list[list[str | Cell]] = [
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


def _audit(found: RunFiles) -> tuple[list[Status], list[str]]:
    """Return the line at the top about the audit, and all that it told."""
    if not found.checkpoints:
        return [], []
    try:
        code, lines, _ = audit(found.path)
    except ConfigError as error:
        return [Status("open", "not audited", str(error))], []
    if code:
        return [Status("bad", "audit", lines[-1])], []
    agreement = next(line for line in lines if "recomputed order" in line)
    return [Status("good", "audit", agreement)], lines


def _checkpoints(found: RunFiles) -> Section:
    best = found.best[0] if found.best else None
    curve = found.curves.get(found.best_metric, {})
    rows: list[list[str | Cell]] = [
        [
            f"{step:,}",
            Cell.number(curve.get(step), found.metric_name),
            f"{path.name}{' (best)' * (step == best)}",
        ]
        for step, path in sorted(found.checkpoints.items())
    ]
    return Section(
        "Checkpoints",
        columns=("step", spoken(found.metric_name), "folder"),
        rows=rows,
        is_beside=True,
    )


def _split_settings(
    found: RunFiles, defaults: Mapping[str, Any]
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the settings that differ from the defaults, the run's first; and the others."""
    changed, others = [], []
    for name, value in sorted(found.settings.items(), key=lambda item: item[0].startswith(LAYOUT)):
        if name in defaults and value == defaults[name]:
            others.append([name, _written(value)])
        elif name not in PLACE:
            default = _written(defaults[name]) if name in defaults else ""
            changed.append([name, _written(value), default])
    return changed, others


def _read_defaults(task: str, config_dirs: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a task without changes; without its file, Lockstep's own."""
    from trainer.config.compose import load_config
    from trainer.task import Task

    usual = ["conf"] if Path(f"conf/task/{task}.yaml").is_file() else []
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


if __name__ == "__main__":
    run(main, HELP)
