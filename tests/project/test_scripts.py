"""Each script of scripts/ runs, with the smallest arguments; its figures are not looked at."""

import importlib.util
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
from harness.launch import SCRIPTS, environment_of_a_command


class Smoke(NamedTuple):
    """Arguments of a script; `module` or `program` is needed, `skip` says why nothing can run."""

    words: str = ""
    module: str = ""
    program: str = ""
    skip: str = ""


ONE = "--rounds 1"
CASES = {
    "bench_cifar.py": Smoke(f"{ONE} --steps 2"),
    "bench_dp.py": Smoke("--help"),  # its ranks are started by torchrun
    "bench_data.py": Smoke("--packing --rounds 1"),
    "bench_compile.py": Smoke("--help"),  # each start compiles for half a minute
    "bench_exact.py": Smoke("--help"),  # each of its runs has 30 steps
    "bench_gpt.py": Smoke(skip="needs a checkout of nanoGPT and a GPU"),
    "bench_launches.py": Smoke("--steps 3 task=text task.options.files=20"),
    "bench_lm.py": Smoke("--help"),  # needs a venv with TRL
    "bench_memory.py": Smoke("--help"),  # its model has 202 MB
    "bench_mirror.py": Smoke(f"{ONE} --steps 41"),
    "bench_mesh.py": Smoke(f"{ONE} --steps 12 --only fsdp"),
    "bench_proof.py": Smoke(f"{ONE} --only text"),
    "bench_scale.py": Smoke(f"{ONE} --ranks 2 4 --real 2"),
    "bench_step.py": Smoke(f"{ONE} --steps 200 --only bare lockstep"),
    "bench_watch.py": Smoke("--steps 1000"),
    "bundle_cifar.py": Smoke(skip="needs the official CIFAR-10 files, and writes the bundled set"),
    "check_gpu.py": Smoke("--device cpu --only tf32"),
    "compare_commits.py": Smoke("--list"),
    "compare_buckets.py": Smoke("--cases 1"),
    "compare_trl.py": Smoke("--help"),  # needs a venv with TRL
    "compare_peers.py": Smoke("--only lockstep --checks 1"),
    "faults": Smoke("--quick --only power --cases 2"),
    "figure_one_run.py": Smoke("--steps 4 --out ."),
    "figure_pages.py": Smoke("--help", program="chromium"),  # writes to docs/images
    "figure_same_run.py": Smoke("--steps 4 --out same-run.svg"),
    "first_calls.py": Smoke("20 resolved"),
    "make_api.py": Smoke("--check"),
    "make_schema.py": Smoke("--check"),
    "make_settings.py": Smoke("--check"),
    "mutants": Smoke("--default --only objective-short-rows"),
    "make_tour.py": Smoke("--check"),
    "naive_ddp.py": Smoke("--help"),  # figure_one_run.py starts it
    "run_core_tests.py": Smoke("--collect-only -q tests/core/data/test_order.py"),
    "run_tests.py": Smoke("--collect-only -q tests/startup_checks/test_late.py"),
}
# They are imported by others.
MODULES = {"contest.py", "figures.py", "site_hooks.py"}


PATHS = {path.name: path for each in ("*.py", "*/*.py") for path in SCRIPTS.glob(each)}
PACKAGES = ("faults", "mutants")
PATHS = {name: path for name, path in PATHS.items() if path.parent.name not in PACKAGES}
PATHS |= {name: SCRIPTS / name for name in PACKAGES}


def test_every_script_has_a_case():
    assert PATHS.keys() == {*CASES, *MODULES}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_script_runs(name, tmp_path):
    case = CASES[name]
    if case.skip:
        pytest.skip(case.skip)
    if case.module and importlib.util.find_spec(case.module) is None:
        pytest.skip(f"{case.module} is not installed")
    if case.program and shutil.which(case.program) is None:
        pytest.skip(f"{case.program} is not installed")
    done = subprocess.run(
        [sys.executable, str(PATHS[name]), *case.words.split()],
        cwd=tmp_path,
        env=environment_of_a_command(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
