"""Run tests in two processes: most tests wait for one core of the two.

    python scripts/run_tests.py [--third] [pytest's arguments]

Each process takes the next file that the other has not taken, the file that was committed last
first, so that what a change breaks shows early. The output of the second process follows that of
the first. With --third only a third of the slow tests run, chosen by the commit's hash.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_third() -> int:
    """Return 0, 1 or 2 by the hash of the commit, so that three commits on average run all."""
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True)
    return int(found.stdout.strip() or "0", 16) % 3


def newest_first() -> list[str]:
    """Return the files of tests, those of the newest commits first; changed ones before them."""
    words = ["git", "-C", str(ROOT), "log", "--format=%ct", "--name-only", "--", "tests/test_*.py"]
    times: dict[str, int] = {}
    stamp = 0
    for line in subprocess.run(words, capture_output=True, text=True).stdout.split():
        if line.isdecimal():
            stamp = int(line)
        else:
            times.setdefault(line, stamp)
    words = ["git", "-C", str(ROOT), "status", "--porcelain", "--", "tests"]
    for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines():
        times[line[3:]] = int(time.time())
    files = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("tests/test_*.py"))]
    return sorted(files, key=lambda file: -times.get(file, 0))


def main(arguments: list[str]) -> int:
    """Return 1 if a test failed, else 0."""
    own = ["--third"] if "--third" in arguments else []
    words = [sys.executable, "-m", "pytest", *(word for word in arguments if word != "--third")]
    if own:
        third = find_third()
        print(f"of the slow tests: third {third + 1} of 3", flush=True)
        words.append(f"--third={third}")
    if not any(word.startswith("tests/") for word in arguments):
        words += newest_first()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as kept:
        words.append(f"--share={folder}")
        other = subprocess.Popen(words, stdout=kept, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            codes = [subprocess.call(words, cwd=ROOT), other.wait()]
        except KeyboardInterrupt:  # the terminal sent it to both
            codes = [other.wait(), 1]
        kept.seek(0)
        sys.stdout.buffer.write(kept.read())
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
