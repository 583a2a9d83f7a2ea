"""`python -m trainer.report DIR`: write one page about a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from trainer.audit import audit
from trainer.cli import answer, run, single, take_words
from trainer.config.schema import LAYOUT
from trainer.errors import ConfigError, counted
from trainer.record.startup import picture
from trainer.report.page import MOST_CHARTS, Page, Section
from trainer.report.reading import SPEED, RunFiles, mesh_of, read_runs

HELP = """usage: python -m trainer.report DIR [out=FILE.html]

Writes one page about a run: curves, layout, resumes, skipped steps, audit, checkpoints, settings,
data and versions. The page is one file that opens without a network, in light and dark. DIR is a
run directory. Needs the extra report.

out: the page; by default report.html in the run directory"""

USAGE = "python -m trainer.report DIR [out=FILE.html]"


def main(arguments: Sequence[str]) -> int:
    own, rest = take_words(arguments, ("out",))
    place = single(rest, f"give one run directory: {USAGE}")
    out = Path(own.get("out", Path(place) / "report.html"))
    if out.suffix != ".html":
        raise ConfigError(f"out={out}: must end with .html")
    (found,) = read_runs([place])
    make_page(found).write(out)
    return answer(0, "written", {"file": out}, lambda: print(f"written: {out}"))


def make_page(found: RunFiles) -> Page:
    """Return the page of a run. Raises ConfigError without matplotlib."""
    page = Page(f"Run {found.name}", _lead(found))
    names = sorted(found.curves, key=lambda n: (n.startswith(SPEED), not n.startswith("train/"), n))
    shown = names[:MOST_CHARTS]
    left_out = [f"The first {MOST_CHARTS} of {len(names):,} curves."] * (len(names) > MOST_CHARTS)
    charts = [page.chart(name, {name: found.curves[name]}) for name in shown]
    page.add(Section("Curves", left_out, charts))
    page.add(_layout(found))
    page.add(_resumes(found))
    rows = [[f"{step:,}", why] for step, why in sorted(found.bad_steps.items())]
    nothing = [] if rows else ["No step was skipped."]
    page.add(Section("Skipped steps", nothing, columns=("step", "reason"), rows=rows))
    page.add(Section("Audit of the examples", _audit(found)))
    page.add(_checkpoints(found))
    page.add(Section("Data, code and versions", columns=("name", "value"), rows=_facts(found)))
    page.add(_settings(found))
    return page


def _lead(found: RunFiles) -> list[str]:
    reason = found.exit.get("reason", "the run has not ended")
    lines = [f"{counted(found.step, 'step')}; {reason}"]
    if found.best is not None:
        step, value = found.best
        lines.append(f"best {found.best_metric}: {value:.6g} at step {step:,}")
    if found.seconds:
        lines.append(f"{found.seconds:,.1f} s of training, without evaluations and saves")
    return lines


def _layout(found: RunFiles) -> Section:
    settings = found.settings
    size = found.manifest.world_size if found.manifest else 1
    lines = [
        f"strategy {settings['strategy.name']}, precision {settings['strategy.precision']}, "
        f"{counted(size, 'rank')} in the last session",
        f"global batch of {counted(settings['data.global_batch'], 'row')}",
    ]
    drawing = ""
    if found.manifest:
        mesh = mesh_of(found.manifest)
        lines.append(f"mesh: {mesh}")
        drawing = "\n".join(picture(mesh))
    return Section("Layout", lines, text=drawing)


def _resumes(found: RunFiles) -> Section:
    if found.manifest is None:
        line = "No checkpoint can be read." if found.checkpoints else "There is no checkpoint yet."
        return Section("Sessions", [line])
    sessions = found.manifest.sessions
    ends = [first for first, _ in sessions[1:]] + [found.manifest.step]
    changes = found.manifest.changes
    rows = [
        [str(number), f"{first:,}", f"{end:,}", str(ranks), "; ".join(changes.get(str(first), ()))]
        for number, ((first, ranks), end) in enumerate(zip(sessions, ends, strict=True), 1)
    ]
    columns = ("session", "from step", "to step", "ranks", "changed")
    return Section("Sessions", columns=columns, rows=rows)


def _audit(found: RunFiles) -> list[str]:
    try:
        return audit(found.path)[1]
    except ConfigError as error:
        return [str(error)]


def _checkpoints(found: RunFiles) -> Section:
    rows = [[f"{step:,}", path.name] for step, path in sorted(found.checkpoints.items())]
    return Section("Checkpoints", columns=("step", "folder"), rows=rows)


def _facts(found: RunFiles) -> list[list[str]]:
    return [[name, value] for name, value in found.facts().items()]


def _settings(found: RunFiles) -> Section:
    rows = []
    for name, value in sorted(found.settings.items()):
        shown = yaml.safe_dump(value, default_flow_style=True, width=1000).split("\n")[0]
        rows.append([name, shown, "layout" if name.startswith(LAYOUT) else "run"])
    return Section("Settings", columns=("setting", "value", "belongs to the"), rows=rows)


if __name__ == "__main__":
    run(main, HELP)
