"""Take pictures of the pages of a report and a comparison, of real runs, for docs/results.md.

    python scripts/figure_pages.py [--browser chromium]

Trains task=text in two layouts (a minute on 2 cores), writes both pages, and opens them in a
browser without a window, in light and dark.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import IMAGES, REPOSITORY

TASK = [
    *("task=text", "run.steps=60", "log.every_steps=5", "eval.every_steps=20"),
    *("task.options.files=24", "task.options.context=32", "task.options.width=32"),
    *("task.options.layers=2", "checkpoint.every_steps=20"),
]
SIZE = "1280,1500"
# Blink's setting for prefers-color-scheme: 0 is dark, 1 is light
THEMES = {"light": "1", "dark": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="chromium")
    browser = parser.parse_args().browser
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
        run(folder, *ranks, "-m", "trainer", *TASK, "run.name=first", "strategy=pp_fsdp")
        run(folder, "-m", "trainer", *TASK, "run.name=second", "optim.lr=0.003")
        run(folder, "-m", "trainer.report", "runs/text/first", "out=report.html")
        words = ["runs/text/first", "runs/text/second", "out=compare.html"]
        run(folder, "-m", "trainer.compare", *words, code=1)
        for page in ("report", "compare"):
            for theme, number in THEMES.items():
                take(browser, folder / f"{page}.html", IMAGES / f"{page}-{theme}.png", number)


def run(folder: Path, *words: str, code: int = 0) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment)
    if done.returncode != code:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}")


def take(browser: str, page: Path, image: Path, theme: str) -> None:
    """Take a picture of the top of a page."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--window-size={SIZE}", f"--blink-settings=preferredColorScheme={theme}"]
    words = [browser, *flags, f"--screenshot={image}", page.as_uri()]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"written: {image}")


if __name__ == "__main__":
    main()
