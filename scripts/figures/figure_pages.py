"""Take the picture of docs/images of what a user sees: terminal, report and comparison together.

    python scripts/figures/figure_pages.py [--quick] [--all FOLDER] [--out docs/images]
        [--browser chromium]

Trains task=cifar on two ranks and task=text on one and on two, opens the pages in a browser without
a window, in light and dark, and renders the output of a real terminal by rich. --all also trains a
sweep, and takes pictures to look at: each page and the site, at three widths (in all six minutes on
2 cores). Needs chromium, Pillow and mkdocs-material. --quick: short runs, one width.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import IMAGES, REPOSITORY
from PIL import Image
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
COLUMNS = 108
TWO_RANKS = ["launch=elastic", "launch.nproc_per_node=2"]
CIFAR = ["task=cifar", *TWO_RANKS, "run.name=two-ranks", "eval.every_steps=20", "log.every_steps=5"]
TEXT = ["task=text", "task.options.files=24", "task.options.context=32", "task.options.width=32"]
TEXT += ["task.options.layers=2", "checkpoint.every_steps=100", "log.every_steps=2"]
EXACT = ["strategy=exact", "optim.lr=0.004", "eval.every_steps=25"]
RATES = ["run.name=rates", "optim.lr=0.0005,0.002,0.008", "run.seed=0,1,2", "eval.every_steps=20"]
PHONE = 390
WIDTHS = {1280: 1000, PHONE: 1560, 1920: 1080}  # with heights
TERMINAL, JOINED = 400, 1130  # heights of a picture's terminal, and of all of it
# Blink's setting for prefers-color-scheme: 0 is dark, 1 is light
THEMES = {"light": ("1", DEFAULT_TERMINAL_THEME), "dark": ("0", SVG_EXPORT_THEME)}
COLORS = 255  # of a picture
ERASE, UP = "\x1b[2K", "\x1b[1A"  # a line, and a line up: so rich draws its bar anew


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pages = make_pages(folder, given.quick, given.all is not None)
        for theme, (number, _) in THEMES.items():
            image = given.out / f"pages-{theme}.png"
            take(given.browser, join(folder, theme), image, 2 * PHONE, JOINED, number, scale=2)
        if given.all is None:
            return
        given.all.mkdir(parents=True, exist_ok=True)
        for drawn in folder.glob("terminal-*.svg"):
            shutil.copy(drawn, given.all)
        for name, page in pages.items():
            for width, height in ({PHONE: 780} if given.quick else WIDTHS).items():
                for theme, (number, _) in THEMES.items():
                    image = given.all / f"{name}-{width}-{theme}.png"
                    take(given.browser, page, image, width, height, number, scale=1)


def join(folder: Path, theme: str) -> Path:
    """Write a page with the terminal, and below it the report and the comparison side by side."""
    paper = "#121519" if theme == "dark" else "#ffffff"
    page = folder / f"pages-{theme}.html"
    frames = "".join(
        f'<iframe src="{name}.html" style="border:0;width:{PHONE}px;height:{JOINED - TERMINAL}px">'
        "</iframe>"
        for name in ("report", "compare")
    )
    terminal = f'<img src="terminal-end-{theme}.svg" width="{2 * PHONE}" height="{TERMINAL}">'
    body = f'<body style="margin:0;font-size:0;background:{paper}">'
    page.write_text(body + terminal + frames)
    return page


def make_pages(folder: Path, is_quick: bool, has_all: bool) -> dict[str, Path]:
    """Train, draw the terminal, and return the pages by name."""
    text = [*TEXT, "run.steps=4" if is_quick else "run.steps=300"]
    words, place = CIFAR, "runs/cifar/two-ranks"
    if is_quick:
        words, place = [*text, "run.name=quick"], "runs/text/quick"
    draw_terminal(words, watch(folder, ["-m", "trainer", *words]), folder)
    run(folder, "-m", "trainer.show", place, "out=report.html")
    pages = {"report": folder / "report.html"}
    run(folder, "-m", "trainer", *text, *EXACT, "run.name=one-rank")
    run(folder, "-m", "trainer", *text, *EXACT, *TWO_RANKS, "run.name=two-ranks")
    places = ["runs/text/one-rank", "runs/text/two-ranks"]
    run(folder, "-m", "trainer.show", *places, "out=compare.html")
    pages["compare"] = folder / "compare.html"
    if has_all and not is_quick:
        run(folder, "-m", "trainer.sweep", *TEXT, *RATES, "run.steps=120")
        run(folder, "-m", "trainer.show", "runs/sweeps/rates", "out=sweep.html", code=1)
        site = ["-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder / "site")]
        run(REPOSITORY, *site)
        pages |= {"sweep": folder / "sweep.html", "site": folder / "site/index.html"}
    return pages


def run(folder: Path, *words: str, code: int = 0) -> None:
    done = subprocess.run([sys.executable, *words], cwd=folder, env=ENVIRONMENT)
    if done.returncode != code:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}")


def watch(folder: Path, words: list[str]) -> str:
    """Run a command in a terminal of its own, and return all that it wrote there."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env={**ENVIRONMENT, **size}, stdout=theirs
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 2**16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    if process.wait():
        sys.exit(f"{' '.join(words)} ended with {process.returncode}")
    return written.decode()


def draw_terminal(words: list[str], written: str, out: Path) -> None:
    """Write pictures of a terminal in the middle of a run, and after it."""
    command = f"$ lockstep {' '.join(words)}\n"
    bars = [place.start() for place in re.finditer(re.escape(ERASE), written)]
    middle = bars[2 * len(bars) // 3] if bars else len(written)
    for name, part in {"progress": written[:middle], "end": written}.items():
        lines = screen(part)
        for theme, (_, colors) in THEMES.items():
            console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="256")
            console.print(Text.from_ansi(command + "\n".join(lines)))
            svg = console.export_svg(title="Lockstep", theme=colors)
            svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # from a network
            svg = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f]", "", svg)  # not allowed in XML
            svg = svg.replace('<rect fill="#ffffff"', '<rect fill="#f6f7f9"')
            (out / f"terminal-{name}-{theme}.svg").write_text(svg, encoding="utf-8")
            print(f"written: {out}/terminal-{name}-{theme}.svg")


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows after this output."""
    lines = [""]
    row = 0
    for part in re.split(f"([\n\r]|{re.escape(ERASE)}|{re.escape(UP)})", written):
        if part == "\n":
            row += 1
            lines += [""] if row == len(lines) else []
        elif part == UP:
            row = max(0, row - 1)
        elif part == ERASE:
            lines[row] = ""
        elif part != "\r":
            lines[row] += part
    while lines and not Text.from_ansi(lines[-1]).plain.strip():
        lines.pop()
    return lines


def take(
    browser: str, page: Path, image: Path, width: int, height: int, theme: str, *, scale: int
) -> None:
    """Take a picture of the top of a page, with few colours, which makes it small."""
    frame = page.with_name("frame.html")  # a window has at least 500 pixels
    style = f"border:0;width:{width}px;height:{height}px"
    frame.write_text(f'<body style="margin:0"><iframe src="{page.as_uri()}" style="{style}">')
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--allow-file-access-from-files", f"--window-size={max(width, 500)},{height}"]
    flags += [f"--blink-settings=preferredColorScheme={theme}"]
    flags += [f"--force-device-scale-factor={scale}"]
    words = [browser, *flags, f"--screenshot={image}", frame.as_uri()]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with Image.open(image) as taken:
        cut = taken.convert("RGB").crop((0, 0, width * scale, height * scale))
    # the largest distance between colours: thin lines keep theirs
    small = cut.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(image, optimize=True)
    print(f"written: {image}")


if __name__ == "__main__":
    main()
