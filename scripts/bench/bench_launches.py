"""Count kernel launches and waits of the host in a steady step, on the simulated accelerator.

usage: python scripts/bench/bench_launches.py [--ranks 2] [--places 12] task=text [key=value ...]

Trains a few steps and prints, for the last but one, the launches, the waits for the device, and the
places in the code that make most of them. No GPU is needed: the counts are those of torch's
operations on a simulated device (tests/harness/simulated_accelerator.py), not of a GPU.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.simulated import count_steps, on_simulated, server
from harness.simulated_accelerator import reason_to_skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--places", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    arguments, words = parser.parse_known_args()
    if reason := reason_to_skip():
        sys.exit(f"error: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        own = [f"run.steps={arguments.steps}", f"run.dir={folder}", "eval.every_epochs=null"]
        with server():
            steps = on_simulated(arguments.ranks, count_steps, [*own, *words], [])[0]
    launches, operations, places, waits = steps[-1]
    print(f"{' '.join(words)}, {arguments.ranks} ranks: {launches} launches, {len(waits)} waits")
    for place, number in Counter(places).most_common(arguments.places):
        print(f"{number:6} launches at {place}")
    for (what, place), number in Counter(waits).most_common():
        print(f"{number:6} waits: {what} at {place}")
    names = Counter(operations).most_common(arguments.places)
    print(", ".join(f"{name} {number}" for name, number in names))


if __name__ == "__main__":
    main()
