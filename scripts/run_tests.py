"""Run tests in two processes, as most tests wait for one core of the two, and a third one.

    python scripts/run_tests.py [--third] [pytest's arguments]

Each of the two takes the next file that the other has not taken, the file that was committed last
first, so that what a change breaks shows early. The third one runs the few files that import large
libraries, which else each fork of a test would copy: 41 ms a fork, not 28. The output of the first
process comes at once, that of the others at the end. With --third only a third of the slow tests
run, chosen by the commit's hash.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGE = ("api_page", "architecture", "error_texts", "export", "features", "finetune", "report")
LARGE = [f"tests/test_{name}.py" for name in (*LARGE, "transformers")]
NO_TESTS = 5  # pytest's exit code if it found none, such as with -m


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
    return sorted({*files} - {*LARGE}, key=lambda file: (-times.get(file, 0), file))


def main(arguments: list[str]) -> int:
    """Return 1 if a test failed, else 0."""
    own = ["--third"] if "--third" in arguments else []
    words = [sys.executable, "-m", "pytest", *(word for word in arguments if word != "--third")]
    if own:
        third = find_third()
        print(f"of the slow tests: third {third + 1} of 3", flush=True)
        words.append(f"--third={third}")
    files = [word for word in arguments if word.startswith("tests/")]
    with tempfile.TemporaryDirectory() as folder:
        shared = [*words, *([] if files else newest_first()), f"--share={folder}"]
        later = [shared] if files else [shared, [*words, *LARGE]]
        return run(shared, later)


def run(first: list[str], others: list[list[str]]) -> int:
    """Run the commands side by side; print the output of the others after that of the first."""
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(tempfile.TemporaryFile()) for _ in others]
        started = [
            subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
            for words, file in zip(others, kept, strict=True)
        ]
        codes = []
        try:
            codes.append(subprocess.call(first, cwd=ROOT))
        except KeyboardInterrupt:  # the terminal sent it to all
            codes.append(1)
        codes += [process.wait() for process in started]
        for file in kept:
            file.seek(0)
            sys.stdout.buffer.write(file.read())
    return int(any(code not in (0, NO_TESTS) for code in codes) or 0 not in codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
