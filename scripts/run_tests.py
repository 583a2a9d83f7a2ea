"""Run tests in three processes, as most tests wait for one core of the two or for neither.

    python scripts/run_tests.py [--part] [pytest's arguments]

Each takes the next file that no other has taken, the file that was committed last first, so that
what a change breaks shows early. One of them is started when another process has run the few files
that import large libraries or parse the whole package, which else each fork of a test would copy:
420 MB, not 290. The output of the first process comes at once, that of the others at the end.

With --part these of the slow tests run: one of PARTS, chosen by the commit's hash, and all of the
packages that commits of the last day touched, as far as TOUCHED_WITHIN_S allows.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
LARGE = (
    "adapters",
    "api_page",
    "architecture",
    "error_texts",
    "export",
    "features",
    "finetune",
    "report",
)
LARGE = [
    path.relative_to(ROOT).as_posix()
    for name in (*LARGE, "transformers", "chat", "hf", "images", "lm", "pretrained")
    for path in ROOT.glob(f"tests/**/test_{name}.py")
]
PARTS = 12  # of the slow tests: all take some two hours on two cores
TOUCHED_WITHIN_S = 900  # begin no more tests of touched packages after so long
DAY_S = 24 * 3600
# Tests of what has no folder of its own.
ELSEWHERE = {
    "trainer/core/state/": ("tests/startup_checks",),
    "trainer/base/": ("tests/core/distributed", "tests/prove"),
    "trainer/notebook.py": ("tests/new",),
    "trainer/pages/": ("tests/show",),
    "trainer/list/": ("tests/verbs",),
}
INTERRUPTED = 2  # pytest's exit codes
NO_TESTS = 5  # such as with -m


def find_part() -> int:
    """Return the number of the part that runs, from 0, by the hash of the commit."""
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True)
    return int(found.stdout.strip() or "0", 16) % PARTS


def touched_folders() -> list[str]:
    """Return the folders of the tests of packages that commits of a day before HEAD's touched."""
    git = ["git", "-C", str(ROOT)]
    newest = subprocess.run([*git, "log", "-1", "--format=%ct"], capture_output=True, text=True)
    since = f"--since={int(newest.stdout.strip() or 0) - DAY_S}"
    words = [*git, "log", since, "--format=", "--name-only"]
    named = subprocess.run(words, capture_output=True, text=True).stdout.split()
    parts = [path.split("/") for path in named if path.startswith(("trainer/", "tests/"))]
    folders = {"/".join(["tests", *own[1 : 3 if own[1] == "core" else 2]]) for own in parts}
    for prefix, more in ELSEWHERE.items():
        folders |= {*more} if any(path.startswith(prefix) for path in named) else set()
    return sorted(each for each in folders if (ROOT / each).is_dir())


def newest_first() -> list[str]:
    """Return the files of tests, those of the newest commits first; changed ones before them."""
    words = [
        "git",
        "-C",
        str(ROOT),
        "log",
        "--format=%ct",
        "--name-only",
        "--",
        "tests/*/test_*.py",
    ]
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
    files = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    return sorted({*files} - {*LARGE}, key=lambda file: (-times.get(file, 0), file))


def main(arguments: list[str]) -> int:
    """Return 1 if a test failed, else 0."""
    own = ["--part"] if "--part" in arguments else []
    words = [sys.executable, "-m", "pytest", *(word for word in arguments if word != "--part")]
    if own:
        part = find_part()
        touched = touched_folders()
        print(f"of the slow tests: part {part + 1} of {PARTS}", flush=True)
        print(f"and those of {', '.join(touched) or 'no package'}", flush=True)
        words.append(f"--part={part}/{PARTS}")
        words += [f"--touched={','.join(touched)}", f"--until={time.time() + TOUCHED_WITHIN_S}"]
    files = [word for word in arguments if word.startswith("tests/")]
    with tempfile.TemporaryDirectory() as folder:
        shared = [*words, *([] if files else newest_first()), f"--share={folder}"]
        code = run(shared, [[shared]] if files else [[shared], [[*words, *LARGE], shared]])
        for path in sorted(Path(folder).glob("*.failures")):  # last: a log may keep its end alone
            print(path.read_text(), end="", flush=True)
        return code


def run(first: list[str], others: list[list[list[str]]]) -> int:
    """Run a command beside lists of commands, and print the output of the lists after its own.

    Those of a list run one after another, until one is interrupted.
    """
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(tempfile.TemporaryFile()) for _ in others]
        started = [pool.submit(call_each, *each) for each in zip(others, kept, strict=True)]
        codes = []
        try:
            codes.append(subprocess.call(first, cwd=ROOT))
        except KeyboardInterrupt:  # the terminal sent it to all
            codes.append(INTERRUPTED)
        for each in started:
            codes += each.result()
        for file in kept:
            file.seek(0)
            sys.stdout.buffer.write(file.read())
    return int(any(code not in (0, NO_TESTS) for code in codes) or 0 not in codes)


def call_each(commands: list[list[str]], output: IO[bytes]) -> list[int]:
    """Run commands one after another, until one is interrupted; return their exit codes."""
    codes: list[int] = []
    for words in commands:
        if INTERRUPTED not in codes:
            codes.append(subprocess.call(words, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT))
    return codes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
