#!/usr/bin/env python3
"""Make the bundled set of task=cifar from the official CIFAR-10 binary files.

    python scripts/generate/bundle_cifar.py DIR   # DIR holds data_batch_1.bin ... test_batch.bin

It has the first 500 training and the first 100 test images of each class, in the order of the
files, as official records (a label byte, then 1,024 red, green and blue bytes each). Pixels are
stored as differences modulo 256 (green and blue to red, then to the left, then to the row above),
compressed with zlib: lossless, 11 MB instead of 18, read in a tenth of a second.
"""

import hashlib
import sys
import zlib
from pathlib import Path

import numpy as np

OUT = Path(__file__).resolve().parents[2] / "tasks" / "data" / "cifar10-5000-1000.z"


def first_of_each_class(files: list[Path], count: int) -> np.ndarray:
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    chosen = [np.flatnonzero(records[:, 0] == label)[:count] for label in range(10)]
    return records[np.sort(np.concatenate(chosen))]


def main(folder: Path) -> None:
    train = first_of_each_class([folder / f"data_batch_{i}.bin" for i in range(1, 6)], 500)
    test = first_of_each_class([folder / "test_batch.bin"], 100)
    records = np.concatenate([train, test])
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).copy()
    pixels[:, 1:] -= pixels[:, :1].copy()
    pixels[..., 1:] -= pixels[..., :-1].copy()
    pixels[..., 1:, :] -= pixels[..., :-1, :].copy()
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_bytes(zlib.compress(records[:, 0].tobytes() + pixels.tobytes(), 9))
    sha256 = hashlib.sha256(records.tobytes()).hexdigest()
    print(f"{OUT}: {OUT.stat().st_size:,} bytes, records' SHA-256 {sha256}")


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) == 2 else sys.exit(__doc__)
