"""Schedules of a pipeline: in which order a stage runs its micro-batches forward and backward."""

from __future__ import annotations

Order = list[tuple[bool, int]]  # (is it forward, number of the micro-batch)


def order(schedule: str, num_stages: int, stage: int, count: int) -> Order:
    """Return what a stage does with `count` micro-batches. On one stage all schedules are alike.

    gpipe runs all of them forward, then all backward (Huang et al., arXiv:1811.06965). 1f1b
    alternates as soon as the first one comes back, so a stage keeps the activations of at most as
    many micro-batches as stages follow, and itself (Narayanan et al., arXiv:2006.09503).
    """
    ahead = min(count, num_stages - 1 - stage)
    if schedule == "gpipe" and num_stages > 1:
        ahead = count
    made: Order = [(True, number) for number in range(ahead)]
    for number in range(ahead, count):
        made += [(True, number), (False, number - ahead)]
    made += [(False, number) for number in range(count - ahead, count)]
    return made


def most_kept(schedule: str, num_stages: int, stage: int, count: int) -> int:
    """Return how many of `count` micro-batches a stage keeps activations of at a time."""
    kept = most = 0
    for is_forward, _ in order(schedule, num_stages, stage, count):
        kept += 1 if is_forward else -1
        most = max(most, kept)
    return most


def bubble(num_stages: int, count: int) -> float:
    """Return the part of a step in which a stage waits, if all stages take equally long."""
    return (num_stages - 1) / (count + num_stages - 1)
