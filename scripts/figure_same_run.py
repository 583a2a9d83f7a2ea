"""The figure of docs/same-run.md: how far the loss on 2 and 3 ranks is from that on one.

    python scripts/figure_same_run.py [--steps 60] [--out docs/images/same-run.svg]

A small GPT with dropout is trained in fp32 from the same weights: by a DDP script as one finds them
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness import fit_on, on_ranks

from trainer import load_config
from trainer.tasks.text import Text

REPOSITORY = Path(__file__).resolve().parents[1]
BATCH = 24
WORDS = [
    *("task=text", "task.options.files=24", "task.options.context=32", "task.options.width=32"),
    *("task.options.layers=2", "task.options.heads=2", f"data.global_batch={BATCH}"),
    *("log.every_steps=1", "schedule=constant", "optim.lr=0.003", "run.clip_norm=null"),
    *("strategy.precision=fp32", "eval.every_steps=null", "data.micro_batch=4"),
]
WAYS = {"a naive DDP script": "#c0392b", "strategy=ddp": "#2471a3", "strategy=exact": "#1e8449"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 70, 20, 190, 45
LEAST, MOST = 1e-9, 1.0


def naive(steps: int) -> list[float]:
    """What rank 0 of a common DDP script prints."""
    dist.init_process_group("gloo")
    task = Text(load_config(WORDS))
    torch.manual_seed(0)
    model = DistributedDataParallel(task.build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    dataset = task.build_dataset("train")
    sampler: DistributedSampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)
    losses = []
    for _, batch in zip(range(steps), loader, strict=False):
        inputs, (tokens, is_there) = task.split_batch(batch)
        values = F.cross_entropy(model(inputs).transpose(1, 2), tokens, reduction="none")
        loss = values[is_there].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    del model  # before the group that it reduces over
    dist.destroy_process_group()
    return losses


def train(way: str, ranks: int, steps: int) -> list[float]:
    if way == "a naive DDP script":
        return on_ranks(ranks, naive, steps)[0]
    with tempfile.TemporaryDirectory(prefix="lockstep-figure-") as folder:
        run = fit_on(ranks, Path(folder), *WORDS, way, f"run.steps={steps}")
    return [run["losses"][step] for step in range(1, steps + 1)]


def height(value: float) -> float:
    share = (math.log10(max(value, LEAST)) - math.log10(LEAST)) / math.log10(MOST / LEAST)
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(1, share))


def draw(curves: dict[tuple[str, int], Sequence[float]], steps: int) -> str:
    across = (WIDTH - LEFT - RIGHT) / (steps - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(-9, 1, 3):
        y = height(10.0**power)
        label = "0" if power == -9 else f"10<tspan dy='-5' font-size='9'>{power}</tspan>"
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{label}</text>')
    for number, ((way, ranks), values) in enumerate(curves.items()):
        points = " ".join(f"{LEFT + i * across:.1f},{height(v):.1f}" for i, v in enumerate(values))
        style = f'stroke="{WAYS[way]}" stroke-dasharray="{"" if ranks == 2 else "5 3"}"'
        parts.append(f'<polyline fill="none" {style} stroke-width="2" points="{points}"/>')
        y = TOP + 20 + 22 * number
        x = WIDTH - RIGHT + 15
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" {style} stroke-width="2"/>')
        parts.append(f'<text x="{x + 28}" y="{y + 4}">{way}, {ranks}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">step</text>')
    title = "difference of the loss to one rank, relative"
    turned = f'transform="rotate(-90 16 {HEIGHT / 2})"'
    parts.append(f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle" {turned}>{title}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/images/same-run.svg")
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
