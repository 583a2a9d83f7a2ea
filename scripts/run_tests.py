"""Run the default tests in two processes: most tests wait for one core of the two.

    python scripts/run_tests.py [pytest's arguments]

Each process takes the next file that the other has not taken. The output of the second follows
that of the first.
"""

import subprocess
import sys
import tempfile


def main(arguments: list[str]) -> int:
    """Return 1 if a test failed, else 0."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as kept:
        words = [sys.executable, "-m", "pytest", f"--share={folder}", *arguments]
        other = subprocess.Popen(words, stdout=kept, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.call(words), other.wait()]
        except KeyboardInterrupt:  # the terminal sent it to both
            codes = [other.wait(), 1]
        kept.seek(0)
        sys.stdout.buffer.write(kept.read())
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
