"""Runs under a real SLURM of two nodes (tests/harness/slurm.py); `scripts/faults --only requeues`
requeues them."""

import json
import re
import sys
from pathlib import Path

import pytest
from harness import CONF, PATHS, newest, slurm

TINY = ["--config-dir", CONF, "task=tiny", "run.name=a"]
NAMES = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NODELIST")
SHOW = f"import os; print(*map(os.environ.get, {NAMES}))"  # srun cuts lines at 1024 bytes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm.unavailable():
        pytest.skip(reason)
    with slurm.Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        cluster.environment["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
        cluster.environment |= {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
        yield cluster


def test_srun_numbers_its_tasks_over_the_nodes(cluster):
    done = cluster.srun("-N2", "--ntasks-per-node=2", sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    tasks = sorted(line.split() for line in done.stdout.splitlines())
    assert tasks == [
        [rank, node, local, "4", "n[1-2]"] for rank, node, local in ("000", "101", "210", "311")
    ]


@pytest.mark.slow
def test_requeued_job_restarts_automatically(cluster, tmp_path: Path):
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        "#SBATCH --requeue --open-mode=append\n"
        "echo attempt ${SLURM_RESTART_COUNT:-0}\n"
        '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || { scontrol requeue $SLURM_JOB_ID; sleep 60; }\n'
    )
    job = cluster.submit(script, f"--output={tmp_path}/out")
    assert cluster.wait(job, {"COMPLETED"}, 30) == "COMPLETED"
    assert cluster.requeues(job) == 1
    said = (tmp_path / "out").read_text().splitlines()
    assert [line for line in said if line.startswith("attempt")] == ["attempt 0", "attempt 1"]


@pytest.mark.slow
def test_doctor_examines_the_ranks_of_srun(cluster):
    done = cluster.srun("-N2", "--ntasks-per-node=2", "python", "-m", "trainer.check", "--json")
    rows = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    assert "by srun" in rows["rank 3"]["found"] and rows["rendezvous"]["found"].startswith(
        "4 ranks connected"
    ), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 2])
def test_srun_starts_the_ranks(tasks, cluster, tmp_path):
    words = ["python", "-m", "trainer", *TINY, f"run.dir={tmp_path}"]
    done = cluster.srun("-N2", f"--ntasks-per-node={tasks}", *words)
    assert done.returncode == 0, done.stderr
    assert f"{2 * tasks} ranks on 2 nodes" in done.stdout
    assert f"train longer with: srun --nodes=2 --ntasks={2 * tasks} python" in done.stdout
    config = (tmp_path / "tiny/a/config.json").read_text()
    assert '"init": "env"' in config
    assert newest(tmp_path / "tiny/a").manifest["world_size"] == 2 * tasks


@pytest.mark.slow
def test_micro_batch_is_found_by_the_ranks_of_two_nodes(cluster, tmp_path, monkeypatch):
    monkeypatch.setitem(cluster.environment, "ROOM", "6 3")
    words = ["task.trainer=narrow_memory.Narrow", "data.global_batch=24", "data.micro_batch=auto"]
    words = ["python", "-m", "trainer", *TINY, f"run.dir={tmp_path}", *words, "run.steps=3"]
    done = cluster.srun("-N2", "--ntasks-per-node=1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data.micro_batch=auto: 3, because no larger one fits; tried 12" in done.stdout


@pytest.mark.slow
def test_bad_setting_is_one_line_and_never_retried(cluster, tmp_path):
    words = (
        "--kill-on-bad-exit=1",
        "python",
        "-m",
        "trainer",
        *TINY,
        f"run.dir={tmp_path}",
        "optim.lrr=1",
    )
    done = cluster.srun("-n2", *words)
    lines = [
        line
        for line in done.stderr.splitlines()
        if "error:" in line and not line.startswith(("srun", "slurmstepd"))
    ]
    # a second one is of a rank that SLURM took more than 3 s to end
    assert {*lines} == {"error: optim.lrr is not a setting; did you mean optim.lr?"}, done.stderr


@pytest.mark.slow
def test_the_script_of_a_new_project_is_one_of_slurm(cluster, tmp_path):
    from trainer.new.__main__ import _file_of

    (text,) = _file_of("slurm", {"__NAME__": "My_run"}).values()
    (tmp_path / "train.sbatch").write_text(text)
    done = cluster.run("sbatch", "--test-only", "-N2", tmp_path / "train.sbatch")
    assert done.returncode == 0 and re.search(r"Job \d+ to start at", done.stderr), done.stderr
    wrong = tmp_path / "wrong.sbatch"
    wrong.write_text(text.replace("--signal=USR1@120", "--signal=NONE@120"))
    assert cluster.run("sbatch", "--test-only", wrong).returncode


@pytest.mark.slow
def test_sweep_is_submitted_by_submitit_as_groups_of_ranks(cluster, tmp_path):
    pytest.importorskip("submitit")
    words = [*TINY[:3], f"run.dir={tmp_path}", "optim.lr=0.1,0.2", "run.steps=6000"]
    words += [
        "hydra/launcher=submitit_slurm",
        "log.every_steps=1000",
        "eval.every_epochs=null",
        "checkpoint.every_epochs=null",
    ]
    settings = ["nodes=2", "tasks_per_node=1", "timeout_min=5", "cpus_per_task=1"]
    command = [
        "python",
        "-m",
        "trainer.sweep",
        *words,
        *(f"hydra.launcher.{setting}" for setting in settings),
    ]
    done, twice = cluster.run(*command), cluster.run(*command)
    assert done.returncode == 0, done.stderr
    jobs = [line.split()[-1] for line in done.stdout.splitlines() if "submitted as" in line]
    known = [line.split()[-1] for line in twice.stdout.splitlines() if "submitted as" in line]
    assert known and set(known) <= set(jobs), twice.stdout  # queued jobs are not submitted again
    assert [cluster.wait(job, {"COMPLETED", "FAILED"}, 180) for job in jobs] == ["COMPLETED"] * 2, (
        done.stdout
    )
    runs = sorted((tmp_path / "tiny").iterdir())
    assert [newest(run).manifest["world_size"] for run in runs] == [2, 2]
    again = cluster.run("python", "-m", "trainer.sweep", *words, "hydra.launcher.nodes=2")
    assert again.stdout.count(": done") == 2, again.stdout
    wrong = cluster.run("python", "-m", "trainer.sweep", *words, "hydra.launcher.nods=2")
    assert wrong.returncode == 2 and wrong.stderr.startswith(
        "error: hydra/launcher=submitit_slurm: "
    ), wrong.stderr
