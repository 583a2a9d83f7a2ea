"""Draw the figure of the README: the training loss of one run in five layouts.

    python scripts/figures/figure_one_run.py [--steps 80] [--curves FILE] [--out docs/images]

The same small GPT is trained with dropout and in fp32 on 1, 2 and 4 ranks, with gradient
accumulation, and killed and resumed: by a typical DDP script (scripts/figures/naive_ddp.py), and by
Lockstep. Every run starts its ranks with torchrun; the kill is SIGKILL to all of them. Writes
docs/images/one-run-light.svg and one-run-dark.svg. With --curves the losses are read from a file,
or written to it if it does not exist.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import naive_ddp
from figures import IMAGES, REPOSITORY, Point, document, line, polyline, text

sys.path.insert(0, str(REPOSITORY / "tests"))
from harness.launch import environment_of_a_command, kill_with_descendants

SAVE_EVERY = 20
LIMIT_S = 120


@dataclass
class Layout:
    label: str
    ranks: int
    micro_batches: int = 1
    is_killed: bool = False


LAYOUTS = [
    Layout("1 rank", 1),
    Layout("2 ranks", 2),
    Layout("4 ranks", 4),
    Layout("accumulation", 1, micro_batches=4),
    Layout("kill, resume", 2, is_killed=True),
]
Losses = dict[int, float]  # by step
Curves = dict[str, list[Losses]]  # by panel, in the order of LAYOUTS


# Runs ---------------------------------------------------------------------------------------------


def run_naive(layout: Layout, steps: int, folder: Path) -> Losses:
    words = [str(REPOSITORY / "scripts/figures/naive_ddp.py"), f"--steps={steps}"]
    words += [f"--accumulation={layout.micro_batches}", f"--save-every={SAVE_EVERY}"]
    output = folder / "output"

    def read() -> Losses:
        found = re.findall(r"step (\d+) loss (\S+)\n", output.read_text())
        return {int(step): float(loss) for step, loss in found}

    run(layout, [*words, f"--checkpoint={folder / 'checkpoint'}"], output, read, steps)
    return read()


def run_lockstep(layout: Layout, steps: int, folder: Path) -> Losses:
    words = ["-m", "trainer", *naive_ddp.WORDS, f"run.steps={steps}", f"run.dir={folder}"]
    words += ["run.name=run", "run.resume=auto", f"checkpoint.every_steps={SAVE_EVERY}"]
    if layout.micro_batches > 1:
        words.append(f"data.micro_batch={naive_ddp.BATCH // layout.micro_batches}")
    record = folder / "text/run/metrics.jsonl"

    def read() -> Losses:
        lines = record.read_text().split("\n")[:-1] if record.exists() else []
        rows = [json.loads(each) for each in lines]
        return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}

    run(layout, words, folder / "output", read, steps)
    return read()


def run(
    layout: Layout, words: list[str], output: Path, read: Callable[[], Losses], steps: int
) -> None:
    """Run to the end; in a killed layout, kill all processes in the middle and start again."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={layout.ranks}"]
    middle = min(steps // 2 + SAVE_EVERY // 2, steps)
    with output.open("w") as stream:
        for is_killed in (True, False) if layout.is_killed else (False,):
            process = subprocess.Popen(
                [sys.executable, *torchrun, *words],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment_of_a_command(),
            )
            try:
                if is_killed:
                    wait_for_step(middle, read)
                elif process.wait(LIMIT_S):
                    raise SystemExit(f"{layout.label}:\n{output.read_text()[-2000:]}")
            finally:
                kill_with_descendants(process.pid)
                process.wait()


def wait_for_step(step: int, read: Callable[[], Losses]) -> None:
    end = time.monotonic() + LIMIT_S
    while step not in read():
        if time.monotonic() > end:
            raise SystemExit(f"no step {step} after {LIMIT_S} s")
        time.sleep(0.005)


RUNS = {"a naive DDP script": run_naive, "Lockstep": run_lockstep}


def train_all(steps: int) -> Curves:
    curves: Curves = {panel: [] for panel in RUNS}
    for layout, (panel, run_one) in itertools.product(LAYOUTS, RUNS.items()):
        with tempfile.TemporaryDirectory(prefix="lockstep-figure-") as folder:
            losses = run_one(layout, steps, Path(folder))
        assert sorted(losses) == list(range(1, steps + 1)), (panel, layout, sorted(losses))
        curves[panel].append(losses)
        print(f"{panel}, {layout.label}: {losses[1]:.4f} to {losses[steps]:.4f}", flush=True)
    return curves


def largest_difference(curves: list[Losses]) -> float:
    """Return the largest difference between any two curves at any step."""
    spreads = (
        max(losses[step] for losses in curves) - min(losses[step] for losses in curves)
        for step in curves[0]
    )
    return max(spreads)


# Drawing ------------------------------------------------------------------------------------------


@dataclass
class Theme:
    background: str
    ink: str
    faint: str
    colours: tuple[str, ...]


# Colours after Okabe and Ito, which colour-blind readers can distinguish; adjusted for contrast.
THEMES = {
    "light": Theme(
        "#ffffff", "#1f2328", "#d8dee4", ("#0072b2", "#c14f00", "#00805d", "#a8447f", "#1f2328")
    ),
    "dark": Theme(
        "#0d1117", "#e6edf3", "#30363d", ("#56b4e9", "#f28e2b", "#2fc79a", "#e7a1c7", "#e6edf3")
    ),
}
# So narrow that a phone, which shows it at two thirds of its size, leaves the words legible.
WIDTH, HEIGHT, TOP, BOTTOM = 560, 390, 64, 108
PANEL, LEFTS = 230, (44, 316)
LEGEND = ((0, 1, 2), (3, 4))  # the numbers of the layouts, by line
LEGEND_STEP = 24
DASH = 6


class Panel:
    """A pair of axes: x from step 1 to the last step, y from loss `least` to `most`."""

    def __init__(self, left: float, steps: int, least: float, most: float, theme: Theme):
        self.left = left
        self.steps = steps
        self.least = least
        self.most = most
        self.theme = theme

    def place(self, step: float, loss: float) -> Point:
        share = (loss - self.least) / (self.most - self.least)
        x = self.left + PANEL * (step - 1) / (self.steps - 1)
        return x, HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def frame(self, title: str, difference: float) -> list[str]:
        theme = self.theme
        middle = self.left + PANEL / 2
        written: dict[str, object] = {"fill": theme.ink, "text_anchor": "middle", "font_size": 16}
        parts = [
            text((self.left, 22), title, fill=theme.ink, font_size=18, font_weight="bold"),
            text((middle, HEIGHT - BOTTOM + 40), "step", **written),
        ]
        for loss in range(math.ceil(self.least), math.floor(self.most) + 1):
            x, y = self.place(1, loss)
            parts.append(line((x, y), (x + PANEL, y), theme.faint))
            parts.append(text((x - 12, y + 5), str(loss), **written))
        bottom = self.place(1, self.least)
        parts.append(line(bottom, (bottom[0] + PANEL, bottom[1]), theme.ink))
        for step in (1, *range(20, self.steps + 1, 20)):
            x, y = self.place(step, self.least)
            parts.append(line((x, y), (x, y + 4), theme.ink))
            parts.append(text((x, y + 20), str(step), **written))
        said = f"apart by up to {as_decimal(difference)}"
        parts.append(text((self.left, 44), said, fill=theme.ink, font_size=16))
        return parts

    def curves(self, curves: list[Losses], are_woven: bool) -> list[str]:
        """Draw each curve as a line; if woven, with every fifth dash, so none hides another."""
        parts = []
        for number, (losses, colour) in enumerate(zip(curves, self.theme.colours, strict=True)):
            style = {"stroke_width": 1.5, "stroke_linejoin": "round"}
            if are_woven:
                style["stroke_width"] = 2.5
                style["stroke_dasharray"] = f"{DASH} {DASH * (len(curves) - 1)}"
                style["stroke_dashoffset"] = -DASH * number
            points = [self.place(step, loss) for step, loss in losses.items()]
            parts.append(polyline(points, colour, **style))
        return parts


def legend(theme: Theme) -> list[str]:
    """Return the names of the layouts, in lines below both panels, each beside its colour."""
    parts = []
    for row, numbers in enumerate(LEGEND):
        y = HEIGHT - 14 - LEGEND_STEP * (len(LEGEND) - 1 - row)
        for place, number in enumerate(numbers):
            x = LEFTS[0] + 175.0 * place
            colour = theme.colours[number]
            parts.append(line((x, y - 5), (x + 22, y - 5), colour, stroke_width=3))
            parts.append(text((x + 30, y), LAYOUTS[number].label, fill=colour, font_size=16))
    return parts


def as_decimal(value: float) -> str:
    """Format a value with one significant digit, without an exponent."""
    digits = max(0, -math.floor(math.log10(value))) if value else 0
    return f"{value:.{digits}f}"


def draw(curves: Curves, theme: Theme) -> str:
    values = [loss for runs in curves.values() for losses in runs for loss in losses.values()]
    least = math.floor(2 * min(values)) / 2
    most = math.ceil(2 * max(values)) / 2
    steps = len(next(iter(curves.values()))[0])
    parts = []
    said = []
    for left, (name, runs) in zip(LEFTS, curves.items(), strict=True):
        panel = Panel(left, steps, least, most, theme)
        difference = largest_difference(runs)
        parts += panel.frame(name, difference)
        parts += panel.curves(runs, are_woven=name == "Lockstep")
        said.append(f"{name}: the lines differ by at most {as_decimal(difference)}.")
    place = (14, (TOP + HEIGHT - BOTTOM) / 2)
    turned = f"rotate(-90 {place[0]} {place[1]})"
    middle = {"fill": theme.ink, "text_anchor": "middle", "font_size": 16}
    parts.append(text(place, "training loss", transform=turned, **middle))
    parts += legend(theme)
    layouts = ", ".join(layout.label for layout in LAYOUTS)
    return document(
        WIDTH,
        HEIGHT,
        parts,
        title="Training loss of one run in five layouts",
        description=f"Loss against step. Lines: {layouts}. {' '.join(said)}",
        background=theme.background,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--curves", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="FOLDER")
    given = parser.parse_args()
    if given.curves is not None and given.curves.exists():
        kept = json.loads(given.curves.read_text())
        curves = {
            panel: [{int(step): loss for step, loss in losses.items()} for losses in runs]
            for panel, runs in kept.items()
        }
    else:
        curves = train_all(given.steps)
        if given.curves is not None:
            given.curves.write_text(json.dumps(curves))
    for name, theme in THEMES.items():
        path = given.out / f"one-run-{name}.svg"
        path.write_text(draw(curves, theme), encoding="utf-8")
    for panel, runs in curves.items():
        print(f"{panel}: the curves differ by at most {largest_difference(runs):.2e}")


if __name__ == "__main__":
    main()
