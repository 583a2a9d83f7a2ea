"""Show why a first call of torch.cos on several threads may be wrong (pytorch#188792).

    python scripts/bench/first_calls.py [processes] [resolved]

Forks processes that call torch.cos for the first time, on 8 threads, and compares their bits. MKL
chooses the kernel of a function in its first call, and 2024.2 may give a thread one with 11 correct
bits. With `resolved` each process calls it on one thread first, as Lockstep does.
"""

import collections
import os
import sys

import torch

from trainer.base.process import torch_flags

THREADS = 8


def first_call(values: torch.Tensor, large: torch.Tensor, is_resolved: bool) -> bytes:
    """Return the bits of a process's first torch.cos."""
    reader, writer = os.pipe()
    if not os.fork():
        torch.set_num_threads(THREADS)
        if is_resolved:
            torch_flags.resolve_vector_functions()
        large + 1  # the threads wait for work now, and begin the next call together
        with os.fdopen(writer, "wb") as file:
            file.write(values.cos().numpy().tobytes())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.wait()
    return data


def main() -> None:
    torch.set_num_threads(1)  # a parent with threads hangs its forked children
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    is_resolved = "resolved" in sys.argv
    values = torch.linspace(0, 1, 50_000)
    large = torch.ones(200_000)
    found = collections.Counter(first_call(values, large, is_resolved) for _ in range(count))
    (usual, most), *others = found.most_common()
    how = "resolved before" if is_resolved else "not resolved before"
    print(f"{how}: {count - most} of {count} processes differ")
    for bits, times in others:
        one, other = (
            torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (usual, bits)
        )
        wrong = (one != other).nonzero()
        place = f"elements {int(wrong[0])} to {int(wrong[-1])}"
        print(f"  {times} by up to {float((one - other).abs().max()):.1e}, in {place}")


if __name__ == "__main__":
    main()
