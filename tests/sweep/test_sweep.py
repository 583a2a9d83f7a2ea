"""Sweeps: each job is a group of ranks, the state is on disk, and finished jobs do not rerun."""

import csv
import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import CONF, ELASTIC, ended, wait_for
from harness.command import fork_jobs
from harness.training import compose

from trainer import ConfigError, load_config
from trainer.base.errors import RunError
from trainer.core.config.compose import parse
from trainer.sweep import __main__ as main
from trainer.sweep import jobs, study
from trainer.sweep.__main__ import expand

TINY = ["--config-dir", CONF, "task=tiny", "run.name=a"]

SWEEPER = study.SWEEPER
WORDS = [*TINY[:3], "launch=elastic", "launch.nproc_per_node=2"]


@pytest.fixture
def command(command):
    """All commands here are sweeps."""
    command.verb = "trainer.sweep"
    return command


def results(folder):
    (place,) = (folder / "runs/sweeps").iterdir()
    with open(place / "results.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file)), json.loads((place / "sweep.json").read_text())


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_job_is_a_group_and_a_failed_one_is_reported(ranks, command, tmp_path):
    """task.options.examples=21 fails, because the global batch is 22."""
    words = [*TINY[:3], *(ELASTIC if ranks == 2 else ()), "task.options.examples=203,21,150"]
    group = f"{ranks} rank{'s' * (ranks > 1)} on 1 node"
    code, out, err = command(*words, before=fork_jobs)
    assert code == 1 and out.count(": done, ") == 2, out + err
    assert ": failed, data.global_batch=22: must be at most the 21 training examples" in out
    logs = [log.read_text() for log in sorted(tmp_path.glob("runs/sweeps/*/job-*.log"))]
    assert [log.count(group) for log in logs] == [1, 0, 1], logs
    rows, jobs = results(tmp_path)
    told = {(row["task.options.examples"], row["state"], row["code"]) for row in rows}
    assert told == {("203", "done", "0"), ("21", "failed", "2"), ("150", "done", "0")}
    values = {row["task.options.examples"]: float(row["best"]) for row in rows if row["best"]}
    assert all(
        json.loads((tmp_path / job["directory"] / "exit.json").read_text())["best"]
        for job in jobs
        if not job["code"]
    )
    table = [line.split()[1] for line in out.splitlines() if " done " in line or " failed " in line]
    assert table == [*sorted(values, key=values.get), "21"], out  # best first
    assert [row["task.options.examples"] for row in rows] == table
    code, out, _ = command(*words, before=fork_jobs)
    assert out.count("is finished") == 2 and ": done, " not in out and code == 1


@pytest.mark.slow
def test_jobs_are_never_confused_and_a_sweep_runs_once_at_a_time(command, tmp_path):
    words = [*TINY, "run.steps=100000", "log.every_steps=1000"]
    first = command.start(*words, "optim.lr=0.1,0.2", before=fork_jobs)
    wait_for(lambda: [*tmp_path.glob("runs/tiny/a-*/checkpoints/step-*")])
    code, _, err = command(*words, "optim.lr=0.1,0.2", before=fork_jobs)
    assert code == 2 and f"process {first.pid} on " in err, err
    first.send_signal(signal.SIGTERM)
    assert ended(first)[0] == 75
    more = ["run.epochs=1", "run.steps=null", "optim.lr=0.3,0.4"]
    code, out, err = command(*words, *more, before=fork_jobs)
    assert code == 0 and "resumed" not in out and len([*(tmp_path / "runs/tiny").iterdir()]) == 3, (
        out + err
    )


def test_every_job_is_checked_before_the_first_starts(command, tmp_path):
    code, out, err = command(*TINY[:3], "task.options.dropout=0.1,abc")
    assert (code, out) == (2, "") and err == "error: task.options.dropout=abc: must be a number\n"
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_sweep_stops_at_a_failed_job_if_configured(command, tmp_path):
    words = [*TINY[:3], "task.options.examples=21,203", "launch.on_failed_job=stop"]
    code, out, _ = command(*words, before=fork_jobs)
    assert code == 1 and [row["state"] for row in results(tmp_path)[0]] == ["failed", "waiting"], (
        out
    )


@pytest.mark.slow
def test_stopped_sweep_resumes_where_it_was(command, tmp_path):
    words = [*TINY, "run.steps=3000", "log.every_steps=1000", "optim.lr=0.1,0.2"]
    first = command.start(*words, before=fork_jobs)
    wait_for(lambda: [*tmp_path.glob("runs/tiny/a-*/checkpoints/step-*")])
    first.send_signal(signal.SIGINT)  # to this process only
    code, out, err = ended(first)
    rows, _ = results(tmp_path)
    assert code == 75 and [row["state"] for row in rows] == ["stopped", "waiting"], out + err
    code, out, err = command(*words, before=fork_jobs)
    logs = [log.read_text() for log in tmp_path.glob("runs/sweeps/a/job-*.log")]
    assert code == 0 and sum(log.count("resumed at step") for log in logs) == 1, out + err
    assert [row["state"] for row in results(tmp_path)[0]] == ["done", "done"]


def test_sweep_under_torchrun_is_refused_with_advice(command, tmp_path):
    told = {"RANK": "0", "WORLD_SIZE": "2"}
    code, _, err = command(*TINY, *ELASTIC, "optim.lr=0.1,0.2", environment=told)
    assert (
        code == 2
        and "a sweep with python, and launch=elastic launch.nproc_per_node=<ranks of each job>"
        in err
    )


@pytest.mark.slow
def test_optuna_chooses_the_jobs(command, tmp_path):
    pytest.importorskip("optuna")
    words = [
        *TINY[:3],
        "optim.lr=interval(0.01,0.5)",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
    ]
    more = ["hydra.sweeper.sampler.seed=1", "hydra.sweeper.n_jobs=1"]
    code, out, err = command(*words, *more, before=fork_jobs)
    assert code == 0, out + err
    rows, _ = results(tmp_path)
    rates = {float(row["optim.lr"]) for row in rows}
    assert len(rates) == 2 and all(0.01 <= rate <= 0.5 for rate in rates)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_job_of_optuna_that_fails_is_the_worst(policy, command, tmp_path):
    pytest.importorskip("optuna")
    words = [
        *TINY[:3],
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
    ]
    words += [
        "data.global_batch=choice(250,251,252)",
        f"launch.on_failed_job={policy}",
        "hydra.sweeper.sampler.seed=2",
    ]
    code, out, err = command(*words, before=fork_jobs)
    rows, _ = results(tmp_path)
    assert code == 1 and [row["state"] for row in rows] == ["failed"] * (
        1 if policy == "stop" else 3
    ), out + err


def test_file_that_has_hydra_build_something_is_refused(command, tmp_path):
    (tmp_path / "conf/task").mkdir(parents=True)
    text = (Path(CONF) / "task/tiny.yaml").read_text()
    evil = "hydra:\n  callbacks:\n    x: {_target_: pathlib.Path.touch, self: canary}\n"
    (tmp_path / "conf/task/evil.yaml").write_text(text + evil)
    words = ["--config-dir", "conf", "task=evil", "optim.lr=interval(0.01,0.5)"]
    code, _, err = command(*words, SWEEPER, before=fork_jobs)
    assert code == 2 and "hydra.callbacks" in err and len(err.splitlines()) == 1, err
    assert not (tmp_path / "canary").exists()


# Optuna without processes: the values of the jobs are computed here -------------------------------

SEED = "hydra.sweeper.sampler.seed=1"
SPACE = (
    *("optim.lr=tag(log,interval(0.001,1))", "run.seed=range(1,4)"),
    *("optim=sgd,adam", "optim.weight_decay=interval(0,1)"),
)


def searched(folder, words, space=SPACE, stop_after=None):
    """Run a search whose jobs only write their result; return (swept words of the jobs in order,
    exit code)."""
    pytest.importorskip("optuna")
    ran = []

    def start(job, *_):
        code = run(job.words)
        job.begin()
        job.finish(code, 1.0)
        return SimpleNamespace(job=job, has_ended=lambda: True, process=None)

    def run(words):
        if len(ran) == stop_after:
            return 75
        ran.append([word for word in words if word.startswith(("optim", "run.seed"))])
        given = dict(word.split("=", 1) for word in words if "=" in word)
        place = Path(folder) / "tiny" / given["run.name"]
        place.mkdir(parents=True)
        end = {"code": 0, "best": (float(given["optim.lr"]) - 0.1) ** 2, "metrics": {}}
        (place / "exit.json").write_text(json.dumps(end))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs._Process, "of", start)
        patch.setattr(jobs, "Lease", lambda place: None)  # held until the process ends
        fixed = ["task=tiny", f"run.dir={folder}", "run.name=s"]
        code = study.search([SWEEPER, *words], [*fixed, *space], [CONF])
    return ran, code


@pytest.mark.slow
def test_interrupted_search_samples_what_it_would_have_sampled(tmp_path):
    """TPE's first ten trials are random; later trials use their results."""
    words = [SEED, "hydra.sweeper.n_trials=12"]
    whole, code = searched(tmp_path / "whole", words)
    assert code == 0 and len({tuple(job) for job in whole}) == len(whole) == 12
    assert {job[1] for job in whole} == {"run.seed=1", "run.seed=2", "run.seed=3"}
    first, code = searched(tmp_path / "parts", words, stop_after=11)
    assert code == 75 and len(first) == 11
    rest, code = searched(tmp_path / "parts", words)
    assert code == 0 and first + rest == whole


def test_search_is_extended_by_a_larger_number_of_trials(tmp_path):
    words = [SEED, "hydra/sweeper/sampler=random"]
    first, _ = searched(tmp_path, [*words, "hydra.sweeper.n_trials=2"])
    more, _ = searched(tmp_path, [*words, "hydra.sweeper.n_trials=3"])
    assert (len(first), len(more)) == (2, 1)  # finished jobs are not run again


def test_grid_runs_each_point_once(tmp_path):
    space = ("optim.lr=0.1,0.2", "run.seed=range(1,4)")
    ran, code = searched(tmp_path, ["hydra/sweeper/sampler=grid"], space)
    assert code == 0
    assert ran == [
        [f"optim.lr={rate}", f"run.seed={seed}"] for rate in (0.1, 0.2) for seed in (1, 2, 3)
    ]


def test_grid_runs_all_its_points_unless_a_number_is_given(tmp_path):
    """No test had more points than the 20 trials that a search has by default."""
    grid = ["hydra/sweeper/sampler=grid"]
    space = ("run.seed=range(1,24)", "optim.lr=0.1")
    some, _ = searched(tmp_path, [*grid, "hydra.sweeper.n_trials=2"], space)
    rest, code = searched(tmp_path, grid, space)
    assert code == 0 and [row[0] for row in [*some, *rest]] == [
        f"run.seed={seed}" for seed in range(1, 24)
    ]
    assert searched(tmp_path, [*grid, "hydra.sweeper.n_trials=99"], space) == ([], 0)


def test_search_without_a_number_has_twenty_trials(tmp_path):
    ran, code = searched(tmp_path, ["hydra/sweeper/sampler=random", SEED], SPACE[:1])
    assert code == 0 and len(ran) == 20


@pytest.mark.parametrize(
    ("words", "space", "line"),
    [
        (["hydra/sweeper/sampler=grid"], "run.seed=range(1,10000)", "run.seed: a sweep must have "),
        ([], "optim.lr=range(0.1,1e9,0.5)", "optim.lr=range(0.1,1e9,0.5): has more than 100,000 "),
    ],
)
def test_a_space_without_an_end_is_refused_at_once(words, space, line, tmp_path):
    with pytest.raises(ConfigError) as error:
        searched(tmp_path, words, (space,))
    assert str(error.value).startswith(line)


def test_ends_of_ranges_in_both_directions(tmp_path):
    pytest.importorskip("optuna")
    parsed = parse(["a=range(0,1000000000)", "b=range(9,0,-3)", "c=range(0.9,0.1,-0.2)"], "spaces")
    space = study.read_space(parsed)
    ends = {name: (each.low, each.high, each.step) for name, each in space.items()}
    assert ends["a"] == (0, 999_999_999, 1) and ends["b"] == (3, 9, 3)
    assert ends["c"] == pytest.approx((0.3, 0.9, 0.2))


OLD = "hydra.sweeper._target_=hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
REFUSED = [
    ("hydra.sweeper.n_trials=0", "hydra.sweeper.n_trials=0: must be an integer of at least 1"),
    ("hydra.sweeper.direction=up", "hydra.sweeper.direction=up: must be one of minimize, maximize"),
    (
        "hydra/sweeper/sampler=cmaes",
        "hydra.sweeper.sampler=cmaes: must be one of tpe, random",
    ),
    ("hydra/sweeper/sampler=grid", "optim.lr: must be values, as a,b"),
    ("hydra.sweeper.n_jobs=2", "hydra.sweeper.n_jobs=2: must be an integer of at least 1"),
    ("hydra.sweeper.max_failure_rate=1", "hydra.sweeper.max_failure_rate=1: must be one of hydra"),
    ("hydra/launcher=submitit_slurm", "hydra/launcher=submitit_slurm: must be one of hydra.sw"),
    (OLD, f"{OLD}: names Hydra's Optuna plugin, which Lockstep no longer uses; remove it and "),
]


@pytest.mark.parametrize(("word", "line"), REFUSED, ids=[word for word, _ in REFUSED])
def test_impossible_search_is_refused_and_leaves_nothing(word, line, tmp_path):
    with pytest.raises(ConfigError) as error:
        searched(tmp_path, [word])
    assert str(error.value).startswith(line) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trace", ["sweep.json", "optimization_results.yaml"])
def test_old_search_is_refused_in_one_line(trace, tmp_path):
    (tmp_path / "sweeps/s").mkdir(parents=True)
    (tmp_path / "sweeps/s" / trace).write_text("[]")
    with pytest.raises(ConfigError, match=r"sweeps/s: is a sweep without a study, or one of "):
        searched(tmp_path, [SEED])


def test_file_that_names_the_old_plugin_is_refused(tmp_path):
    (tmp_path / "task").mkdir()
    node = "hydra: {sweeper: {_target_: hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.X}}"
    (tmp_path / "task/old.yaml").write_text(f"# @package _global_\n{node}\n")
    with pytest.raises(ConfigError, match=r"task/old\.yaml: names Hydra's Optuna plugin"):
        study.search([SWEEPER], ["task=old", *SPACE], [str(tmp_path)])


def test_an_unused_file_that_is_nested_too_deep_does_not_end_a_search(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task/deep.yaml").write_text("[" * 5000)
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.n_trials=0: must be an integer"):
        study.search([SWEEPER, "hydra.sweeper.n_trials=0"], ["task=cifar"], [str(tmp_path)])


def test_search_of_other_settings_is_not_resumed(tmp_path):
    searched(tmp_path, [SEED, "hydra.sweeper.n_trials=1"])
    with pytest.raises(ConfigError, match=r"was started with other settings; give run\.name=<new>"):
        searched(tmp_path, ["hydra.sweeper.sampler.seed=2", "hydra.sweeper.n_trials=2"])


@pytest.mark.parametrize("words", [["a=range(0,1e9)"], ["a=range(0,50)", "b=range(0,50)"]])
def test_a_sweep_of_too_many_jobs_is_refused_at_once(words):
    with pytest.raises(ConfigError, match=r"=range.*: a sweep must have at most 2,000 jobs; give "):
        expand(words)


# Answers of squeue for the jobs 7 and 8, or 7 alone: those that wait or run, None if it is unsure.
ANSWERS = {
    "both": ("printf '7\\n8\\n'", {"7", "8"}),
    "one": ("echo 8", {"8"}),
    "none": ("true", set()),
    "part of a job": ("echo 7+0", {"7"}),
    "with a name of the cluster": ("printf 'CLUSTER: gpu7\\n 8\\n'", {"8"}),
    "no controller": (
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        None,
    ),
    "half an answer": ("echo 7; echo 'slurm_load_jobs error: Zero Bytes' >&2; exit 1", None),
    "an error without a word": ("exit 3", None),
    "no answer": ("exec /bin/sleep 30", None),
    "forgotten, of several": ("echo 'Invalid job id specified' >&2; exit 1", None),
}


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Return a function that gives the commands of squeue; its words are in the file `words`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(jobs, "QUEUE_ANSWER_S", 5.0)

    def answer(commands):
        log = tmp_path / "words"
        path = tmp_path / "squeue"
        path.write_text(f'#!/bin/sh\necho "$SQUEUE_STATES" "$@" >> {log}\n{commands}\n')
        path.chmod(0o700)
        return log

    return answer


@pytest.mark.parametrize("name", ANSWERS)
def test_a_job_counts_as_over_only_if_squeue_says_so(name, squeue, monkeypatch):
    commands, known = ANSWERS[name]
    log = squeue(commands)
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")  # else a waiting job would be submitted again
    if name == "no answer":
        monkeypatch.setattr(jobs, "QUEUE_ANSWER_S", 0.3)
    if known is None:
        with pytest.raises(RunError, match=r"^squeue did not say .*: .+; nothing was submitted; "):
            jobs.find_known("slurm", ["7", "8"])
    else:
        assert jobs.find_known("slurm", ["7", "8"]) == known
    assert log.read_text() == " --noheader --all --format=%i --jobs=7,8\n"


def test_a_job_alone_that_slurm_has_forgotten_is_over(squeue, monkeypatch, tmp_path):
    log = squeue("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert jobs.find_known("slurm", ["7"]) == set()
    log.unlink()
    assert jobs.find_known("slurm", []) == set() and not log.exists()
    (tmp_path / "squeue").unlink()
    with pytest.raises(RunError, match=r"squeue did not say which jobs .* No such file"):
        jobs.find_known("slurm", ["7"])


def test_nothing_is_submitted_again_while_squeue_is_unsure(squeue, tmp_path, monkeypatch):
    """Each failure of squeue counted as "not known", so a repeated command ran all jobs twice."""
    sent = []
    monkeypatch.setattr(jobs, "Lease", lambda place: None)  # held until the process ends
    monkeypatch.setattr(main, "open_executor", lambda *_: None)
    monkeypatch.setattr(main, "submit", lambda _, words: sent.append(words) or f"{6 + len(sent)}")
    monkeypatch.setattr(main, "_check_jobs", lambda *_, **__: None)
    overrides = [
        ["task=tiny", f"run.dir={tmp_path}", f"optim.lr={rate}"] for rate in ("0.1", "0.2")
    ]

    def repeat():
        configs = [load_config(words, [CONF]) for words in overrides]
        return main.run_combinations(overrides, configs, [CONF], ("slurm", []))

    assert repeat() == 0 and len(sent) == 2
    squeue("echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    with pytest.raises(RunError, match="Socket timed out"):
        repeat()
    squeue("printf '7\\n'")
    assert len(sent) == 2 and repeat() == 0
    assert len(sent) == 3 and sent[2] == sent[1]  # the one that squeue does not list


def test_jobs_of_a_sweep_divide_the_cores_by_jobs_and_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "usable_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS")
    launch = compose(tmp_path, "task=tiny").launch

    def told(**settings):
        return jobs._divide_machine(0, replace(launch, **settings)).get("OMP_NUM_THREADS")

    assert told(jobs=2) == "8" and told(jobs=1) is None
    assert told(jobs=2, name="elastic", nproc_per_node="4") == "2"
    assert told(jobs=16, name="elastic", nproc_per_node="4") == "1"
    assert told(jobs=2, name="ray") is None
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert told(jobs=2) is None
