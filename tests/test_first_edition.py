"""Runs that the first edition wrote are resumed, evaluated, audited and replayed by this one.

The runs in tests/fixtures/first_edition were made by scripts/make_fixtures.py with the code of
commit 97dd115, and expected.json has the results of that commit without an interruption. Bits are
compared only if torch's version, the CPU capability and the bits of plain torch's kernels are those
in expected.json; otherwise the tolerance is 1e-6.
"""

import faulthandler
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from harness import newest
from harness.stored import tensors_of
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = Path(__file__).resolve().parent / "fixtures" / "first_edition"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
LIMIT_S = 120
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digests():
    """Return the module of the fixtures with `digest_tensors` and `digest_kernels`."""
    return runpy.run_path(str(FIXTURES / "first_edition_task.py"))


@pytest.fixture(scope="module")
def has_same_kernels(digests):
    found = {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels_sha256": digests["digest_kernels"](),
    }
    return all(found[key] == EXPECTED[key] for key in found)


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the runs, the task and its config, in which the commands run."""
    place = tmp_path / "first_edition"
    shutil.copytree(FIXTURES, place, ignore=shutil.ignore_patterns("__pycache__", "expected.json"))
    return place


def run_in_fork(folder, module, *words):
    """Run `python -m module words` in a fork that has torch loaded; return (exit code, output).

    The output includes standard output and standard error.
    """
    path = folder / "output.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = become(folder, path, module, words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), path.read_text()


def become(folder, output, module, words):
    """Run a module in this process as `python -m` does; return its exit code."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # pytest's own would capture the output
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(folder))
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code or 0
    return 0


def run_in_process(folder, *words):
    """Run `python -m trainer words` in a new interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trainer", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )


def read_losses(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [entry["train/loss"] for entry in map(json.loads, lines) if "train/loss" in entry]


def check_end(directory, expected, digests, has_same_kernels):
    """Compare a resumed run with the first edition's run without an interruption."""
    end = json.loads((directory / "exit.json").read_text())
    assert (end["code"], end["step"]) == (0, expected["step"])
    last = newest(directory)
    assert last.manifest["format"] == 3
    weights = tensors_of(last)
    losses = read_losses(directory)
    if has_same_kernels:
        assert losses == expected["losses"]
        assert end["metrics"] == expected["metrics"]
        assert digests["digest_tensors"](weights) == expected["weights_sha256"]
    assert losses == pytest.approx(expected["losses"], rel=1e-6)
    assert end["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    norms = {name: float(tensor.double().norm()) for name, tensor in weights.items()}
    assert norms == pytest.approx(expected["weights_norm"], rel=1e-6, abs=1e-9)


def check_verbs(folder, name, is_exact):
    """Evaluate, list, audit and replay a run; return the output of the audit."""
    directory = f"runs/blobs/{name}"
    expected = EXPECTED["verbs"][name]
    tolerance = 0 if is_exact else 1e-6
    code, output = run_in_fork(folder, "trainer.evaluate", directory)
    assert code == 0, output
    assert json.loads(output) == pytest.approx(expected["evaluate"], rel=tolerance)

    code, output = run_in_fork(folder, "trainer.checkpoints", directory)
    assert (code, output.count(" valid "), "INVALID" in output) == (0, 2, False), output

    code, output = run_in_fork(folder, "trainer.checkpoints", directory, "--export", "all.st")
    assert code == 0, output
    path = max((folder / directory / "checkpoints").glob("step-*"))
    files = (torch.load(path / name, weights_only=True) for name in ("model.pt", "training.pt"))
    weights, training = files
    named = {**weights, **{f"ema.{name}": mean for name, mean in training["ema"].items()}}
    exported = load_file(folder / "all.st")
    assert exported.keys() == named.keys() and bool(training["ema"]) == (name == "stopped")
    assert all(torch.equal(tensor, exported[key]) for key, tensor in named.items())

    words = (directory, f"step={EXPECTED['replayed_step']}")
    code, output = run_in_fork(folder, "trainer.replay", *words)
    assert code == 0, output
    loss = float(re.search(r"mean loss ([\d.e+-]+)", output)[1].rstrip("."))
    # the first edition did not divide by the weights, whose mean is 1.5 in this batch
    printed = 2e-6  # six digits
    assert 1.5 * loss == pytest.approx(expected["replayed_loss"], rel=max(tolerance, printed))

    code, output = run_in_fork(folder, "trainer.audit", directory)
    assert code == 0, output
    return output


def test_stopped_run_is_evaluated_listed_audited_and_replayed(folder, has_same_kernels):
    before = {path: path.read_bytes() for path in folder.rglob("runs/**/*") if path.is_file()}
    audit = check_verbs(folder, "stopped", has_same_kernels)
    assert "agree" in audit
    assert {path: path.read_bytes() for path in before} == before


def test_stopped_run_resumes_to_the_bits_of_an_undisturbed_one(folder, digests, has_same_kernels):
    done = run_in_process(folder, "run.resume=runs/blobs/stopped")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = folder / "runs/blobs/stopped"
    check_end(directory, EXPECTED["undisturbed"]["stopped"], digests, has_same_kernels)
    code, audit = run_in_fork(folder, "trainer.audit", "runs/blobs/stopped")
    assert code == 0 and "2 sessions" in audit, audit


@pytest.mark.slow
def test_cifar_run_resumes_to_more_steps(folder, digests, has_same_kernels):
    words = ("run.resume=runs/cifar/shorter", "run.steps=8")
    code, output = run_in_fork(folder, "trainer", *words)
    assert code == 0, output
    directory = folder / "runs/cifar/shorter"
    check_end(directory, EXPECTED["undisturbed"]["shorter"], digests, has_same_kernels)


def test_run_with_a_skipped_example_keeps_its_replacement(folder, has_same_kernels):
    audit = check_verbs(folder, "skipped", has_same_kernels)
    assert "example 5 " in audit and "example 6 " in audit
    words = ("run.resume=runs/blobs/skipped", "run.steps=24", "data.workers=0")
    code, output = run_in_fork(folder, "trainer", *words)
    assert code == 0, output
    code, audit = run_in_fork(folder, "trainer.audit", "runs/blobs/skipped")
    assert code == 0 and audit.count("example 5 ") == 3, audit


def test_sweep_started_again_is_finished(folder):
    (table,) = folder.glob("runs/sweeps/*/results.csv")
    before = {path: path.read_bytes() for path in folder.glob("runs/blobs/*-*/**/*.json*")}
    rows = table.read_text()
    code, output = run_in_fork(folder, "trainer", *EXPECTED["sweep"])
    assert code == 0 and output.count("is finished") == 2, output
    # the seconds of each job may be formatted differently
    assert [row.split(",")[:7] for row in table.read_text().splitlines()] == [
        row.split(",")[:7] for row in rows.splitlines()
    ]
    assert len(before) == 6 and {path: path.read_bytes() for path in before} == before
