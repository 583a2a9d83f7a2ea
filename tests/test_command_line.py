"""The command line as a person uses it: real processes, real torchrun, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONF = str(Path(__file__).parent / "conf")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TINY = ["--config-dir", CONF, "task=tiny"]


def trainer(*words, ranks=0, folder, verb="trainer", **options):
    launcher = [*TORCHRUN, f"--nproc_per_node={ranks}", "-m", verb] if ranks else [sys.executable, "-m", verb]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    environment |= options.pop("environment", {})
    return subprocess.run(
        [*launcher, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, **options
    )


BAD = [
    (["task=cifar", "optim.lrr=1"], "error: optim.lrr is not a setting; did you mean optim.lr?"),
    (["task=cifar", "lr=1"], "error: lr is not a setting; did you mean optim.lr?"),
    (["task=cifar", "+run.sed=1"], "error: run.sed is not a setting; did you mean run.seed?"),
    (["task=cifar", "+optim.nesterof=true"], "error: optim.nesterof is not an argument of trainer.tasks.cifar.Muon"),
    (["task=cifra"], "error: task=cifra: must be one of cifar, text; did you mean cifar?"),
    (["optim=sdg", "task=text"], "error: optim=sdg: must be one of adam, adamw, muon, sgd; did you mean sgd?"),
    ([], "error: task is not chosen: give task=<name>, one of cifar, text"),
    (["task=cifar", "run.epochs=many"], "error: run.epochs=many: must be a whole number of at least 1"),
    (["task=cifar", "run.epochs=0"], "error: run.epochs=0: must be a whole number of at least 1"),
    (["task=cifar", "run.seed=-1"], "error: run.seed=-1: must be a whole number of at least 0"),
    (["task=cifar", "run.clip_norm=0"], "error: run.clip_norm=0: must be a number above 0 or null"),
    (["task=cifar", "data.path=ram"], "error: data.path=ram: must be one of auto, resident, streamed"),
    (
        ["task=cifar", "strategy.precision=fp31"],
        "error: strategy.precision=fp31: must be one of fp64, fp32, tf32, amp_bf16, amp_fp16, bf16, fp16",
    ),
    (["task=cifar", "data.micro_batch=500"], "error: data.micro_batch=500: must be at most data.global_batch=250"),
    (["task=cifar", "dist.backend=nccl"], "error: dist.backend=nccl: needs CUDA, and torch sees no GPU here"),
    (["task=cifar", "task.options.data=ful"], "error: task.options.data=ful: must be one of auto, full, bundled"),
    (
        ["task=cifar", "task.options.data=full"],
        "error: task.options.root=data/cifar-10-batches-bin: has no data_batch_1",
    ),
    (
        ["task=cifar", "optim._target_=os.system"],
        "error: optim._target_=os.system: must lie under torch.optim, torch.nn",
    ),
    (["task=cifar", "task.trainer=torch.optim.SGD"], "error: task.trainer=torch.optim.SGD: must be a subclass of"),
    (["task=cifar", "schedule.warmup_steps=-1"], "error: schedule (trainer.schedule.linear): warmup_steps=-1: must be"),
    (
        ["task=cifar", "run.dir=/dev/null"],
        "error: run.dir: /dev/null/cifar cannot be made, /dev/null is not a directory",
    ),
    (["task=cifar", "run.name=a/b"], "error: run.name=a/b: must be one folder name"),
    (
        ["task=cifar", "run.resume=nowhere"],
        "error: run.resume=nowhere: no checkpoint there; give auto, a run directory",
    ),
    (["task=cifar", "data.global_batch=6000"], "error: data.global_batch=6000: must be at most the 5000 training"),
    (
        ["task=cifar", "checkpoint.best_metric=eval/acuracy"],
        "error: checkpoint.best_metric=eval/acuracy: must be one of",
    ),
    (["task=cifar", "--epochs", "3"], "error: --epochs is not a flag"),
    (["task=cifar", "epochs"], "error: 'epochs' is not a setting: write key=value"),
    (["task=cifar", "optim.lr=0.1,0.2"], "error: optim.lr=0.1,0.2: several values need -m"),
    (["task=cifar", "--config-dir", "nowhere"], "error: --config-dir nowhere: no such directory"),
]


@pytest.mark.parametrize(("words", "line"), BAD, ids=[" ".join(words) or "nothing" for words, _ in BAD])
def test_bad_setting_is_one_line_and_exit_code_2(words, line, tmp_path):
    done = trainer(*words, folder=tmp_path)
    said = done.stderr.strip().splitlines()
    assert len(said) == 1 and said[0].startswith(line), done.stderr
    assert done.returncode == 2 and "Traceback" not in done.stdout


def test_refused_before_a_directory_is_made(tmp_path):
    trainer("task=cifar", "optim.lrr=1", folder=tmp_path)
    trainer("task=cifar", "data.micro_batch=500", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["task=cifar", "optim.lrr=1"], "error: optim.lrr is not a setting; did you mean optim.lr?"),
        (["task=cifar", "strategy=single"], "error: strategy=single: works on 1 rank, and 2 were started"),
        (
            ["task=cifar", "data.global_batch=1"],
            "error: data.global_batch=1: must be at least the 2 data-parallel ranks",
        ),
        (["task=cifar", "data.global_batch=9999"], "error: data.global_batch=9999: must be at most the 5000 training"),
    ],
)
def test_bad_setting_under_torchrun_is_said_once(words, line, tmp_path):
    done = trainer(*words, ranks=2, folder=tmp_path)
    assert [said.startswith(line) for said in done.stderr.splitlines()].count(True) == 1, done.stderr
    assert done.returncode != 0 and "Traceback (most recent call last):\n  File" not in done.stderr.split("torch/")[0]


def test_scalar_loss_is_refused_by_name(tmp_path):
    task = """from tiny import Tiny
class Mean(Tiny):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets).mean()
"""
    (tmp_path / "scalar.py").write_text(task)
    done = trainer(*TINY, "task.trainer=scalar.Mean", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: loss returned a scalar: must be a value per example")
    assert 'reduction="none"' in done.stderr


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "error: WORLD_SIZE=two: must be a whole number of at least 1"),
        ({"RANK": "0"}, "error: WORLD_SIZE is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "error: RANK=2: must be a whole number of at least 0 and at most 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "error: MASTER_ADDR is not set, but WORLD_SIZE=2"),
    ],
)
def test_broken_environment_is_one_line(environment, line, tmp_path):
    start = f"import os; os.environ |= {environment}; import sys; sys.argv[0] = ''; import runpy; "
    done = subprocess.run(
        [sys.executable, "-c", start + "runpy.run_module('trainer', run_name='__main__', alter_sys=True)", "task=text"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    (said,) = done.stderr.strip().splitlines()
    assert said.startswith(line)
    assert done.returncode == 2


def test_run_directory_is_not_overwritten(tmp_path):
    assert trainer(*TINY, "run.name=a", folder=tmp_path).returncode == 0
    done = trainer(*TINY, "run.name=a", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: run.name=a: runs/tiny/a exists and is not being resumed; "
        "add run.resume=auto or choose another run.name\n"
    )


def test_directory_holds_what_is_promised(tmp_path):
    done = trainer(*TINY, "run.name=a", ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    place = tmp_path / "runs/tiny/a"
    assert sorted(path.name for path in place.iterdir()) == [
        *(".writer", "checkpoints", "config.yaml", "exit.json", "metrics.jsonl", "tensorboard"),
    ]
    assert len(list((place / "tensorboard").iterdir())) == 1  # rank 0's alone
    assert json.loads((place / "exit.json").read_text())["code"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    for word in (
        "local_rank",
        "2 ranks x 1 micro-batch of 11 rows",
        "203 // 22 = 9 steps",
        "131 parameters",
        "go on with",
    ):
        assert word in done.stdout, word


def test_evaluate_gives_the_run_its_metrics_on_any_layout(tmp_path):
    trainer(*TINY, "run.name=a", ranks=2, folder=tmp_path)
    told = json.loads((tmp_path / "runs/tiny/a/exit.json").read_text())["metrics"]
    for ranks, words in ((0, []), (3, []), (0, ["strategy=single", "strategy.precision=fp64", "eval.micro_batch=10"])):
        done = trainer("runs/tiny/a", *words, ranks=ranks, folder=tmp_path, verb="trainer.evaluate")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        assert found.pop("step") == 20 and found == pytest.approx(told, rel=1e-12), done.stderr
    done = trainer("nowhere", folder=tmp_path, verb="trainer.evaluate")
    assert done.returncode == 2 and done.stderr.startswith("error: nowhere: has no config.yaml")


def test_help_lists_groups_and_settings(tmp_path):
    done = trainer("--help", folder=tmp_path)
    assert done.returncode == 0
    for word in (
        "cifar, text",
        "ddp, ddp_syncbn_amp, dp, single",
        "data.global_batch",
        "run.resume",
        "torchrun --nproc_per_node=2",
    ):
        assert word in done.stdout, word


def test_sweep_runs_each_job_in_a_directory_of_its_own(tmp_path):
    done = trainer("-m", *TINY, "optim.lr=0.1,0.2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs/tiny").iterdir())) == 2 and [p.name for p in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["optim.lrr=0.1,0.2"], "error: optim.lrr is not a setting; did you mean optim.lr?"),
        (["optim.lr=0.1,abc"], "error: optim.lr=abc: must be a number of at least 0"),
        (["optim.lr=0.1,0.2", "run.name=a"], "error: run.name=a: all 2 jobs of the sweep would have it"),
        (["optim=sgd,foo"], "error: optim=foo: must be one of adam, adamw, muon, sgd"),
    ],
)
def test_sweep_with_a_bad_job_starts_none(words, line, tmp_path):
    done = trainer("-m", *TINY, *words, folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_run_to_resume_brings_its_configuration(tmp_path):
    trainer(*TINY, "run.name=a", "optim.lr=0.05", folder=tmp_path)
    (tmp_path / "runs/tiny/a").rename(tmp_path / "moved")
    done = trainer("run.resume=moved", "run.steps=25", folder=tmp_path)
    assert done.returncode == 0 and "resumed at step 20 of 25" in done.stdout, done.stdout + done.stderr
    assert "changed at this resume: run.steps: 20 -> 25" in done.stdout and done.stdout.count("changed at") == 1
    assert (tmp_path / "moved/checkpoints/step-00000025").is_dir()
    done = trainer("run.resume=moved", "task.name=x", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: task.name=x: the run to resume has tiny")


def test_hydra_prints_the_composed_config(tmp_path):
    done = trainer("task=text", "--cfg", "job", folder=tmp_path)
    assert done.returncode == 0 and "trainer.tasks.text.Text" in done.stdout and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("ranks", "number"), [(0, signal.SIGINT), (2, signal.SIGINT), (2, signal.SIGTERM)])
def test_ctrl_c_stops_all_ranks_saves_and_says_how_to_go_on(ranks, number, tmp_path):
    """As a terminal does it: the signal goes to the whole foreground group, torchrun included."""
    words = [*TINY, "run.name=a", "run.steps=1000000", "log.every_steps=1000"]
    launcher = [*TORCHRUN, f"--nproc_per_node={ranks}"] if ranks else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [*launcher, "-m", "trainer", *words],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    record = tmp_path / "runs/tiny/a/metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (record.exists() and record.stat().st_size):
        time.sleep(0.1)
    asked = time.monotonic()
    os.killpg(started.pid, number)
    out, err = started.communicate(timeout=30)
    assert time.monotonic() - asked < 5
    told = json.loads((tmp_path / "runs/tiny/a/exit.json").read_text())
    assert told["code"] == 75 and told["reason"] == "stopped", told
    assert ranks or (started.returncode == 75 and err == "")
    assert "stopped by SIG" in out and "go on with:" in out and "run.resume=" in out, out
    assert (tmp_path / f"runs/tiny/a/checkpoints/step-{told['step']:08d}").is_dir()
    again = next(line for line in out.splitlines() if line.startswith("go on with:"))
    resumed = trainer(
        *again.split("-m trainer ")[1].split(), f"run.steps={told['step'] + 5}", ranks=ranks, folder=tmp_path
    )
    assert f"resumed at step {told['step']:,}" in resumed.stdout, resumed.stdout + resumed.stderr
