"""Run the core's tests in a copy of this tree from which the companions were deleted.

    python scripts/run_core_tests.py [arguments of run_tests.py; by default tests/core -q]

A test that asks for a companion, such as for strategy=fsdp, is skipped there (tests/conftest.py).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST = 1700  # default tests that pass without companions


def copy_core(tree: Path) -> None:
    """Copy the files that git knows, but for companions and their tests."""
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        parts = Path(name).parts
        is_companion = parts[0] == "trainer" and len(parts) > 2 and parts[1] not in ("base", "core")
        if is_companion or not (ROOT / name).is_file():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def main(arguments: list[str]) -> int:
    """Return 1 if a test failed, or if fewer than LEAST passed, else 0."""
    with tempfile.TemporaryDirectory(prefix="lockstep-core-") as folder:
        tree = Path(folder)
        copy_core(tree)
        environment = {**os.environ, "PYTHONPATH": folder}
        words = [sys.executable, "scripts/run_tests.py", *(arguments or ["tests/core", "-q"])]
        passed = 0
        with subprocess.Popen(
            words, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                ended = re.search(r"(\d+) passed.* in [\d.]+s", line)
                passed += int(ended[1]) if ended else 0
    is_enough = passed >= LEAST or bool(arguments)
    print(f"the core alone: {passed} tests passed" + ("" if is_enough else f", not {LEAST}"))
    return int(process.returncode != 0 or not is_enough)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
