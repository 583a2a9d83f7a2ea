"""The command line as a user runs it: its output, exit codes and files, and its reaction to
signals."""

import json
import os
import shutil
import signal
import sys
import time

import pytest
from harness import CONF, TORCHRUN, ended, launch, wait_for

from trainer.core.distributed import signals

TINY = ["--config-dir", CONF, "task=tiny"]


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["task=cifar", "optim.lrr=1"],
            "error: optim.lrr is not a setting; did you mean optim.lr?",
        ),
        (
            ["task=cifar", "strategy=single"],
            "error: strategy=single: must run on 1 rank, and 2 ranks were started",
        ),
        (
            ["task=cifar", "data.global_batch=1", "run.norm_rows=null"],
            "error: data.global_batch=1: must be at least the 2 data-parallel ranks",
        ),
        pytest.param(
            ["task=cifar", "data.global_batch=9999", "run.norm_rows=null"],
            "error: data.global_batch=9999: must be at most the 5000 training",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_setting_on_two_ranks_is_reported_once(words, line, is_real, command, tmp_path):
    if is_real:
        code, _, err = ended(launch(tmp_path, *words, launcher=TORCHRUN))
    else:
        code, _, err = command(*words, ranks=2)
    assert [said.startswith(line) for said in err.splitlines()].count(True) == 1, err
    assert code != 0 and "Traceback (most recent call last):\n  File" not in err.split("torch/")[0]


@pytest.mark.slow  # test_bad_setting_on_two_ranks_is_reported_once has forked ranks
def test_bad_setting_under_torchrun_is_said_once(tmp_path):
    code, _, err = ended(launch(tmp_path, *TINY, "optim.lrr=1", launcher=TORCHRUN))
    line = "error: optim.lrr is not a setting; did you mean optim.lr?"
    assert code == 1 and err.splitlines().count(line) == 1, err


def test_scalar_loss_is_refused_by_name(command, tmp_path):
    task = """from tiny import Tiny
class Mean(Tiny):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets).mean()
"""
    (tmp_path / "scalar.py").write_text(task)
    done = command(*TINY, "task.trainer=scalar.Mean")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: loss returned a scalar: must be a value per example"
    )
    assert 'reduction="none"' in done.stderr


def test_run_directory_is_not_overwritten(command, tmp_path):
    assert command(*TINY, "run.name=a").returncode == 0
    done = command(*TINY, "run.name=a")
    assert done.returncode == 2
    assert done.stderr == (
        "error: run.name=a: runs/tiny/a exists and is not being resumed; "
        "add run.resume=auto or choose another run.name\n"
    )
    shutil.rmtree(tmp_path / "runs/tiny/a/checkpoints")  # as after an error before the first save
    line = "add run.resume=auto (nothing was saved, so it starts anew) or choose another run.name\n"
    assert command(*TINY, "run.name=a").stderr.endswith(line)
    assert command(*TINY, "run.name=a", "run.resume=auto").returncode == 0


@pytest.mark.slow
def test_directory_holds_what_is_promised(tmp_path):
    code, out, err = ended(launch(tmp_path, *TINY, "run.name=a", launcher=TORCHRUN))
    assert code == 0, err
    place = tmp_path / "runs/tiny/a"
    assert sorted(path.name for path in place.iterdir()) == [
        *(".writer", "checkpoints", "config.json", "exit.json", "metrics.jsonl"),
        *("proof.txt", "tensorboard"),
    ]
    assert len(list((place / "tensorboard").iterdir())) == 1  # rank 0's alone
    assert json.loads((place / "exit.json").read_text())["code"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    for word in (
        "2 ranks on 1 node",
        "2 ranks x 1 micro-batch of 11",
        "20 = 2.22 of an epoch's 9; drops 5 examples per epoch, different ones each time",
        "131 parameters",
        "train longer with: torchrun",
    ):
        assert word in out, word


@pytest.mark.slow
def test_evaluate_gives_the_run_its_metrics_on_any_layout(command, tmp_path):
    command(*TINY, "run.name=a", ranks=2)
    told = json.loads((tmp_path / "runs/tiny/a/exit.json").read_text())["metrics"]
    for ranks, words in (
        (3, []),
        (0, ["strategy=single", "strategy.precision=fp64", "eval.micro_batch=10"]),
    ):
        words = [*TINY[:2], *words]
        done = command("runs/tiny/a", *words, ranks=ranks, verb="trainer.use")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        assert found.pop("step") == 20 and found == pytest.approx(told, rel=1e-12), done.stderr
    done = command("nowhere", verb="trainer.use")
    assert done.returncode == 2 and done.stderr.startswith("error: nowhere: has no config.json")


@pytest.mark.parametrize(
    ("verb", "words", "line"),
    [
        (
            "notebook",
            [],
            "trainer.notebook: is started by Trainer.launch; call launch(ranks) in a ",
        ),
        ("notebook", ["nowhere"], "nowhere: is no task that Trainer.launch wrote: "),
        (
            "verify.recorded_run",
            [],
            "trainer.verify.recorded_run: is started by trainer.prove; use ",
        ),
    ],
)
def test_commands_that_others_start_say_so(verb, words, line, command):
    done = command(*words, verb=f"trainer.{verb}")
    assert done.returncode == 2 and done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1
    done = command("--help", verb=f"trainer.{verb}")
    assert done.returncode == 0 and done.stdout and not done.stderr


def test_help_lists_groups_and_settings(command):
    done = command("--help")
    assert done.returncode == 0
    for word in (
        "cifar, dpo, finetune, images, lm, text",
        "strategy   single, ddp, exact, zero1, fsdp, hsdp\n",
        "data.global_batch",
        "run.resume",
        "torchrun --nproc_per_node=2",
    ):
        assert word in done.stdout, word


@pytest.mark.slow
def test_sweep_runs_each_job_in_its_own_directory(command, tmp_path):
    done = command(*TINY, "optim.lr=0.1,0.2", verb="trainer.sweep")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs/tiny").iterdir())) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_run_to_resume_brings_its_configuration(command, tmp_path):
    command(*TINY, "run.name=a", "optim.lr=0.05")
    (tmp_path / "runs/tiny/a").rename(tmp_path / "moved")
    done = command(*TINY[:2], "run.resume=moved", "run.steps=25")
    assert done.returncode == 0 and "resumed at step 20 of 25" in done.stdout, done
    assert "changed at this resume: run.steps: 20 -> 25" in done.stdout
    assert done.stdout.count("changed at") == 1
    assert (tmp_path / "moved/checkpoints/step-00000025").is_dir()
    done = command(*TINY[:2], "run.resume=moved", "task.name=x")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: task.name=x: the run to resume has tiny"
    )


def test_hydra_prints_the_composed_config(command, tmp_path):
    done = command("task=text", "--cfg", "job")
    assert done.returncode == 0 and "trainer.tasks.text.Text" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_modules_are_imported_is_not_lost(command, tmp_path):
    """An extension module may clear the KeyboardInterrupt raised in it, as those of numpy and torch
    do."""
    (tmp_path / "mine.py").write_text("""if True:
        import os, signal, time
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            pass
        from tiny import Tiny as Mine
        """)
    done = command(*TINY, "task.trainer=mine.Mine")
    assert (done.returncode, done.stderr) == (130, "interrupted; nothing was saved\n"), done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


@pytest.mark.parametrize(
    ("kind", "ranks", "number"),
    [
        ("forked", 2, signal.SIGINT),
        pytest.param("real", 0, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("real", 2, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("real", 2, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_stops_all_ranks_saves_and_says_how_to_go_on(kind, ranks, number, command, tmp_path):
    """The signal goes to the whole process group, including torchrun and data workers, as from a
    terminal."""
    words = [*TINY, "run.name=a", "run.steps=1000000", "log.every_steps=1000", "data.workers=1"]
    if kind == "real":
        launcher = TORCHRUN if ranks else ()
        started = launch(tmp_path, *words, launcher=launcher, is_session=True)
    else:
        started = command.start(*words, ranks=ranks, is_session=True)
    record = tmp_path / "runs/tiny/a/metrics.jsonl"
    wait_for(lambda: record.exists() and record.stat().st_size)
    asked = time.monotonic()
    os.killpg(started.pid, number)
    code, out, err = ended(started)
    assert time.monotonic() - asked < 20  # less than the 30 s after which torchrun kills
    assert (tmp_path / "runs/tiny/a/exit.json").exists(), (code, out, err)
    told = json.loads((tmp_path / "runs/tiny/a/exit.json").read_text())
    assert told["code"] == 75 and told["reason"] == "stopped", told
    assert ranks or (code == 75 and err == "")
    assert "stopped by SIG" in out and "resume with:" in out and "run.resume=" in out, out
    assert (tmp_path / f"runs/tiny/a/checkpoints/step-{told['step']:08d}").is_dir()
    again = next(line for line in out.splitlines() if line.startswith("resume with:"))
    more = [*again.split("-m trainer ")[1].split(), f"run.steps={told['step'] + 5}"]
    resumed = command(*more, ranks=ranks)
    assert f"resumed at step {told['step']:,}" in resumed.stdout, resumed


@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_a_second_ctrl_c_ends_the_run_but_not_that_of_torchrun(launcher, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(signals, "REPEAT_GRACE_S", -1.0)  # a busy machine: each comes late
    monkeypatch.setattr(os, "_exit", sys.exit)
    request = signals.StopRequest()
    for _ in range(2 if launcher == "torchrun" else 1):
        request.receive(signal.SIGINT, None)
    assert request.name == "SIGINT"
    with pytest.raises(SystemExit, match="1"):
        request.receive(signal.SIGINT, None)


MISSPELT = {
    "trainer --resume task=tiny": "--resume is not a flag: allowed are --config-dir, --help, -n, "
    "--cfg, --info and key=value; use run.resume=<run directory or checkpoint>, or "
    "run.resume=auto for the newest run of the task",
    "trainer.prove --bit task=tiny": "--bit is not a flag: allowed are --config-dir, --help, "
    "--json, --bits, --resume and key=value; did you mean --bits?",
    "trainer.prove layout=ranks-2 task=tiny": "layout is not a setting; did you mean layouts?",
    "trainer.check --jsn": "--jsn is not a flag: allowed are --config-dir, --help, --json and "
    "key=value; did you mean --json?",
    "trainer.use runs splt=test": "splt is not a setting; did you mean split?",
    "trainer.use runs ot=a.onnx": "ot is not a setting; did you mean out?",
    "trainer.use runs --store": "--store is not a flag: allowed are --config-dir, --help, --json, "
    "--stored and key=value; did you mean --stored?",
    "trainer.show runs stp=3": "stp is not a setting; did you mean step?",
    "trainer.check rank=4 task=tiny": "rank is not a setting; did you mean ranks?",
    "trainer.list recipe": "recipe: must be one of tasks, recipes, strategies, runs; did you mean "
    "recipes?",
    "trainer verify": "verify: use prove: python -m trainer.prove --help",
    "trainer -m task=tiny": "-m: use sweep: python -m trainer.sweep task=tiny",
    "trainer task=tiny -n two": "-n two: must be a number of ranks, or auto, as in -n 2",
}


@pytest.mark.parametrize("line", MISSPELT)
def test_a_verb_names_its_own_words_and_flags(line, command):
    verb, *words = line.split()
    done = command(*words, verb=verb)
    assert done.returncode == 2 and done.stderr == f"error: {MISSPELT[line]}\n"
