"""`python -m trainer.show RUN [RUN ...]`: report a run, or compare several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base.errors import CheckpointError, ConfigError, visible
from trainer.base.process import invocation
from trainer.base.process.streams import print_table
from trainer.cli import JSON, answer, local, run, single, split_arguments, take_words
from trainer.core.api import CONFIG, address_of, check_path

HELP = """usage: python -m trainer.show RUN [out=FILE.html] [--long] [--config-dir DIR]
       python -m trainer.show RUN RUN [...] [out=FILE.html] [out=FILE.csv]
       python -m trainer.show RUN step=N [key=value ...] [--config-dir DIR]

  python -m trainer.show runs/cifar/first                      one run
  python -m trainer.show runs/cifar/first out=first.html       its page, with curves
  python -m trainer.show runs/cifar/first runs/cifar/second    how two differ

One run: its result, layout and settings, an audit and its checkpoints. The audit recomputes from
the seed which examples each step must have used, across restarts, and names the first save that
differs. Every byte of each checkpoint is read and checked against its SHA-256. Without --long,
checks that would take more than a minute or two are skipped. RUN is a run directory, or one
directory step-<number> in its checkpoints, or the address of a checkpoint.mirror.

Several runs: compares each with the first one. The first line says how they compare: the same bits,
the same run up to rounding, starts as rounding and grows, different, or cannot tell. Settings,
data, code and versions follow, the first step that differs and by how much, best metrics and time.
Logged losses are means over several steps, so the step is only known as precisely as the runs
logged (log.every_steps) and saved. The folder of a sweep stands for all its runs.

step=N: repeats step N on one process, from the newest checkpoint before it (or from the start), in
micro-batches of the run's size. It names the examples whose loss or gradient is not finite, and
those with the largest losses. The run is not changed. With a larger checkpoint.keep_last a run
keeps more checkpoints, so that fewer steps have to be repeated.

out: a page (.html) that opens without a network, with curves, resumes and skipped steps; for a
sweep also means over seeds and the best value of each setting. For several runs also a table (.csv)
--config-dir: the folder with task/<name>.yaml, from which a page knows the defaults of the task

Exit codes: 0 everything is in order, or the runs are the same; 1 a save, a checkpoint or a step is
wrong, or the runs differ; 2 no such run."""
LONG = "--long"
SHOW_ADVICE = "give one or more run directories: python -m trainer.show RUN"
SOON_BYTES = 20e9  # of all checkpoints together, read and digested within a minute


def main(arguments: Sequence[str]) -> int:
    own, rest = take_words(arguments, ("step", "out"))
    if "step" in own:
        from trainer.show.replay import replay

        return replay(arguments)
    is_long = LONG in rest
    without_long = [word for word in rest if word != LONG]
    words, config_dirs = split_arguments(without_long, own=(JSON, LONG))
    outs = [Path(word[4:]) for word in arguments if word.startswith("out=")]
    words = [local(word) for word in words]
    for word in words:
        check_path("the argument", word)
    from trainer.show.compare import compare, expand

    directories = expand([word for word in words if word])
    if len(directories) > 1:
        return compare(directories, outs)
    directory = Path(single(words, SHOW_ADVICE))
    for out in outs:
        if out.suffix != ".html":
            raise ConfigError(f"out={out}: must end with .html; several runs have .csv too")
    from trainer.core.api import MANIFEST

    if (directory / MANIFEST).is_file() or not (directory / CONFIG).is_file():
        if outs:
            raise ConfigError(f"{directory}: has no {CONFIG}; give a run directory for out=FILE")
        return _show_checkpoints(directory, is_long)
    return _show_run(directory, outs, config_dirs, is_long)


def _show_checkpoints(directory: Path, is_long: bool) -> int:
    checkpoints = _read_checkpoints(directory, is_long)
    if not checkpoints:
        raise ConfigError(f"{directory}: has no {CONFIG} and no checkpoints; {SHOW_ADVICE}")
    wrong = sum("error" in facts for facts in checkpoints)
    result = f"{wrong} invalid" if wrong else "valid"
    facts = {"checkpoints": checkpoints}
    return answer(int(wrong > 0), result, facts, lambda: _print_checkpoints(checkpoints))


def _show_run(directory: Path, outs: Sequence[Path], config_dirs: list[str], is_long: bool) -> int:
    from trainer.show.run_page import RunSummary
    from trainer.show.run_reading import read_runs

    (run_files,) = read_runs([str(directory)])
    told = RunSummary.of(run_files, config_dirs, is_long)
    listed = _read_checkpoints(directory, is_long)
    wrong = sum("error" in facts for facts in listed)
    for out in outs:
        told.make_page().write(out)

    def show() -> None:
        _print_lines(told)
        if told.changed:
            print_table(("settings that differ", "value", "default"), told.changed)
        if listed:
            _print_checkpoints(listed)
        print(invocation.as_started(f"repeat it with: {told.command}"))
        print("".join(f"written: {out}\n" for out in outs), end="")

    facts = {**told.as_json(), "checkpoints": listed} | ({"files": outs} if outs else {})
    return answer(int(wrong > 0 or told.is_wrong), told.word, facts, show)


def _print_lines(told: Any) -> None:
    """Print a run's state, its figures, its sessions and its audit, a line each."""
    state = told.state
    print(visible(f"{told.found.name}: {', '.join(filter(None, (state.words, state.about)))}"))
    rows = [(card.label, getattr(card.value, "text", card.value), card.note) for card in told.cards]
    rows += [("examples", line, "") for line in told.audit_lines]
    rows += [("skipped", f"step {n:,}", why) for n, why in sorted(told.found.bad_steps.items())]
    width = max(len(label) for label, *_ in rows)
    for label, value, note in rows:
        print(visible(f"{label:<{width}}  {value}{'  ' * bool(note)}{note}"))


def _read_checkpoints(directory: Path, is_long: bool = False) -> list[dict[str, Any]]:
    """Return the facts of each checkpoint of a run, or of the one at `directory`, oldest first.

    Their bytes are compared with the manifest if that takes no longer than a minute, or `is_long`.
    """
    from trainer.core.api import transaction as checkpoint

    is_one = (directory / checkpoint.MANIFEST).is_file()
    paths = [directory] if is_one else list(checkpoint.steps(directory / "checkpoints").values())
    num_bytes = 0
    for file in (file for path in paths for file in path.glob("*")):
        with suppress(OSError):  # a run that goes on has removed it
            num_bytes += file.stat().st_size
    is_far = any(map(address_of, paths))  # in a bucket: reading them would fetch them
    is_read = is_long or (num_bytes < SOON_BYTES and not is_far)
    return [facts for path in paths if (facts := _examine(path, is_read))]


def _examine(path: Path, is_read: bool) -> dict[str, Any]:
    """Return what is known of a checkpoint; nothing if its run has just removed it."""
    from trainer.core.api import transaction as checkpoint

    try:
        read = checkpoint.load if is_read else checkpoint.CheckpointFiles.read
        manifest = read(path).manifest
        checkpoint.Manifest.of_run(manifest, path)
    except CheckpointError as error:
        if checkpoint.is_gone(path):
            return {}  # its run is going on
        step = path.name.removeprefix("step-")
        return {"step": int(step) if step.isdecimal() else None, "error": str(error)}
    return {
        "step": manifest["step"],
        "is_read": is_read,
        "bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
        "strategy": manifest["strategy"],
        "ranks": manifest["world_size"],
        "metrics": manifest["metrics"],
    }


def _print_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of them."""
    columns = ("checkpoint", "files", "size", "strategy", "ranks", "metrics")
    rows: list[Sequence[str]] = []
    for facts in checkpoints:
        if error := facts.get("error"):
            step = "" if facts["step"] is None else str(facts["step"])
            rows.append((step, f"INVALID {error}"))
            continue
        metrics = "  ".join(
            f"{name} {math.nan if value is None else value:.4f}"
            for name, value in facts["metrics"].items()
        )
        size = f"{facts['bytes'] / 1e6:,.1f} MB"
        layout = (facts["strategy"], str(facts["ranks"]), metrics)
        state = "valid" if facts["is_read"] else "not read (--long)"
        rows.append((f"{facts['step']:,}", state, size, *layout))
    print_table(columns, rows)


if __name__ == "__main__":
    run(main, HELP)
