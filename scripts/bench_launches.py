"""Count kernel launches and waits of the host in a steady step, on the simulated accelerator.

usage: python scripts/bench_launches.py [--ranks 2] [--places 12] task=text [key=value ...]

Trains a few steps and prints, for the last but one, the launches, the waits for the device, and the
places in the code that make most of them. No GPU is needed: the counts are those of torch's
operations on a simulated device (tests/harness/simulated_accelerator.py), not of a GPU.
"""

import argparse
import collections
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness import simccl, simulated_streams
from harness import simulated_accelerator as simulated
from harness.ranks import on_ranks

from trainer.cli import load_task
from trainer.config.compose import load_config
from trainer.engine.outcome import OneStepLate

STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--places", type=int, default=12)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        own = [f"run.steps={arguments.steps}", f"run.dir={folder}", "eval.every_epochs=null"]
        record = on_ranks(arguments.ranks, count, [*own, *words])[0]
    launches, operations, places, waits = record
    print(f"{' '.join(words)}, {arguments.ranks} ranks: {launches} launches, {len(waits)} waits")
    for place, number in collections.Counter(places).most_common(arguments.places):
        print(f"{number:6} launches at {place}")
    for (what, place), number in collections.Counter(waits).most_common():
        print(f"{number:6} waits: {what} at {place}")
    names = collections.Counter(operations).most_common(arguments.places)
    print(", ".join(f"{name} {number}" for name, number in names))


def count(words: list[str]) -> tuple[int, dict, dict, list]:
    """Train, and return the record of the step before the last one."""
    simulated.register()
    simccl.register()
    steps: list[simulated_streams.Record] = []
    push = OneStepLate.push

    def push_and_begin(self, outcome):
        report = push(self, outcome)
        simulated_streams.record = simulated_streams.Record()
        steps.append(simulated_streams.record)
        return report

    OneStepLate.push = push_and_begin
    config = load_config(words, [])
    load_task(config)(config).fit()
    for race in simulated.races[:5]:
        print("race:", race)
    for line in simccl.violations[:5]:
        print("violation:", line)
    record = steps[-3]
    return record.count, dict(record.launches), dict(record.places), record.waits


if __name__ == "__main__":
    main()
