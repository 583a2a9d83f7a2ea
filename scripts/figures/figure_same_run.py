"""The figure of docs/same-run.md: the difference of the loss on 2 and 3 ranks from that on one.

    python scripts/figures/figure_same_run.py [--steps 60] [--out docs/images/same-run.svg]

A small GPT with dropout is trained in fp32 from the same weights: by a typical DDP script
(DistributedSampler, the mean of each rank's batch, rank 0's loss), by Lockstep with strategy=ddp,
and with strategy=exact. The figure shows |loss - loss on one rank| / loss on one rank.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import naive_ddp
from figures import IMAGES, REPOSITORY, document, line, polyline, power_of_ten, text

sys.path.insert(0, str(REPOSITORY / "tests"))
from harness import fit_on, on_ranks

WORDS = [*naive_ddp.WORDS, "data.micro_batch=4"]
WAYS = {"a naive DDP script": "#c0392b", "strategy=ddp": "#2471a3", "strategy=exact": "#1e8449"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 70, 20, 190, 45
LEAST, MOST = 1e-9, 1.0
TITLE = "difference of the loss to one rank, relative"


def train(way: str, ranks: int, steps: int) -> list[float]:
    if way == "a naive DDP script":
        return on_ranks(ranks, naive_ddp.train, steps)[0]
    with tempfile.TemporaryDirectory(prefix="lockstep-figure-") as folder:
        run = fit_on(ranks, Path(folder), *WORDS, way, f"run.steps={steps}")
    return [run["losses"][step] for step in range(1, steps + 1)]


def height(value: float) -> float:
    share = (math.log10(max(value, LEAST)) - math.log10(LEAST)) / math.log10(MOST / LEAST)
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(1, share))


def draw(curves: dict[tuple[str, int], Sequence[float]], steps: int) -> str:
    across = (WIDTH - LEFT - RIGHT) / (steps - 1)
    parts = []
    for power in range(-9, 1, 3):
        y = height(10.0**power)
        place = (LEFT - 8, y + 4)
        parts.append(line((LEFT, y), (WIDTH - RIGHT, y), "#ddd"))
        if power == -9:
            parts.append(text(place, "0", text_anchor="end"))
        else:
            parts.append(power_of_ten(place, power, text_anchor="end"))
    x = WIDTH - RIGHT + 15
    for number, ((way, ranks), values) in enumerate(curves.items()):
        dashes = None if ranks == 2 else "5 3"
        style = {"stroke": WAYS[way], "stroke_dasharray": dashes, "stroke_width": 2}
        parts.append(
            polyline([(LEFT + i * across, height(v)) for i, v in enumerate(values)], **style)
        )
        y = TOP + 20 + 22 * number
        parts.append(line((x, y), (x + 22, y), **style))
        parts.append(text((x + 28, y + 4), f"{way}, {ranks}"))
    parts.append(text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10), "step", text_anchor="middle"))
    turned = f"rotate(-90 16 {HEIGHT / 2})"
    parts.append(text((16, HEIGHT / 2), TITLE, text_anchor="middle", transform=turned))
    return document(
        WIDTH, HEIGHT, parts, title=TITLE, description=__doc__ or "", background="white"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=IMAGES / "same-run.svg")
    given = parser.parse_args()
    curves: dict[tuple[str, int], Sequence[float]] = {}
    for way in WAYS:
        one = train(way, 1, given.steps)
        for ranks in (2, 3):
            other = train(way, ranks, given.steps)
            far = [abs(a - b) / abs(b) for a, b in zip(other, one, strict=True)]
            curves[way, ranks] = far
            print(f"{way}, {ranks} ranks: at most {max(far):.1e}, at the end {far[-1]:.1e}")
    given.out.write_text(draw(curves, given.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
