"""Where a setting is just allowed and just refused, which settings belong to the run, and what a
resume, a sweep, a list and an exit code are made of."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import CONF

from trainer import ConfigError, cli, load_config
from trainer.base.errors import RunError
from trainer.base.process import table
from trainer.check.doctor import list_checks
from trainer.core.config.compose import load_run_config
from trainer.core.config.rules import is_port
from trainer.core.config.saved_config import format_config
from trainer.core.config.typed import build
from trainer.core.distributed import world
from trainer.core.distributed.launchers import Launcher
from trainer.core.distributed.signals import CODE_OF_INTERRUPT
from trainer.core.distributed.world import World
from trainer.sweep import __main__ as main
from trainer.sweep import jobs, study
from trainer.sweep.jobs import Job, Sweep

TEXT = ["task=text"]
ALLOWED = [
    "data.micro_batch=32",  # the global batch
    "run.lr_scaling=linear run.lr_batch=1",
    f"run.name={'n' * 199}",
    f"run.dir={'d' * 255}",
    "log.profile_steps=[1,2]",
    "launch=ray launch.ranks=[2,2]",
    "launch=elastic launch.nproc_per_node=2 launch.max_restarts=1",
    "launch=spawn launch.nproc_per_node=auto",
    "dist.init=tcp dist.address=host:65535",
    "dist.init=tcp://host:1",
    "optim.lr=0",
    "run.clip_norm=1e-9",
    "run.ema_decay=0",
    "eval.splits=[eval,test]",
    "run.norm_rows=8 data.micro_batch=8",
    "checkpoint.best_metric=eval/bits checkpoint.best_mode=max",
    "checkpoint.best_metric=loss",
]
REFUSED = {
    "data.micro_batch=33": "data.micro_batch=33: must be at most data.global_batch=32",
    "run.lr_batch=8": "run.lr_scaling=none: must be linear or sqrt if run.lr_batch is given",
    "run.lr_scaling=sqrt": "run.lr_scaling=sqrt: give run.lr_batch=<the global batch that",
    f"run.name={'n' * 200}": "run.name=nnn",
    f"run.dir={'d' * 256}": "run.dir=ddd",
    "log.profile_steps=[0,2]": "log.profile_steps=[0, 2]: must be [<step to begin after>",
    "log.profile_steps=[2,2]": "log.profile_steps=[2, 2]: must be [<step to begin after>",
    "launch=ray launch.ranks=[3,2]": "launch.ranks=[3, 2]: must be a number, or [least,most]",
    "launch=ray launch.nproc_per_node=2": "launch.nproc_per_node=2: must be null with launch=ray",
    "launch=elastic launch.ranks=2": "launch.ranks=2: must be null without launch=ray",
    "launch=spawn launch.max_restarts=1": "launch.max_restarts=1: launch=spawn does not restart",
    "launch.max_restarts=1": "launch.max_restarts=1: use launch=elastic or launch=spawn",
    "launch.nproc_per_node=2": "launch.nproc_per_node=2: use launch=elastic or launch=spawn",
    "launch=elastic launch.nproc_per_node=0": "launch.nproc_per_node=0: must be gpu, cpu, auto or",
    "dist.init=tcp dist.address=host:65536": "dist.address=host:65536: must be <host>:<port>",
    "dist.init=tcp dist.address=host:0": "dist.address=host:0: must be <host>:<port>",
    "dist.init=tcp dist.address=:1": "dist.address=:1: must be <host>:<port>",
    "dist.address=host:1": "dist.address=host:1: must be null with dist.init=env",
    "optim.lr=-1e-9": "optim.lr=-1e-09: must be a number of at least 0",
    "run.clip_norm=0": "run.clip_norm=0: must be a number above 0",
    "run.ema_decay=1": "run.ema_decay=1: must be a number of at least 0 and below 1",
    "run.epochs=true": "run.epochs=true: must be an integer of at least 1",
    "data.global_batch=1.0": "data.global_batch=1.0: must be an integer of at least 1",
    "run.name=''": "run.name='': must be a string",
    "eval.splits=[eval,eval]": "eval.splits=['eval', 'eval']: must be one or more different",
    "eval.splits=[]": "eval.splits=[]: must be one or more different names",
    "eval.splits=[a/b]": "eval.splits=['a/b']: must be one or more different names",
    "run.norm_rows=5": "data.global_batch=32: must be a multiple of run.norm_rows=5, such as 30 or",
    "run.norm_rows=8 data.micro_batch=4": "data.micro_batch=4: must be a multiple of run.norm_rows",
    "checkpoint.best_metric=eval/loss checkpoint.best_mode=max": "checkpoint.best_mode=max: must",
    "checkpoint.best_metric=bits checkpoint.best_mode=null": "checkpoint.best_mode is",
    "run.dir=s3://b/x": "run.dir=s3://b/x: must be a folder here; keep the run in a bucket by",
    "+optim.lr=1": "+optim.lr=1: optim.lr already exists; leave out the '+'",
}


@pytest.mark.parametrize("words", ALLOWED)
def test_what_is_just_allowed_is_a_setting(words):
    load_config([*TEXT, *words.split()])


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_just_not_allowed_is_refused(words):
    with pytest.raises(ConfigError) as error:
        load_config([*TEXT, *words.split()])
    assert str(error.value).startswith(REFUSED[words])


@dataclass
class Mixed:
    number: str | float
    word: float | str
    count: float | int | None


def test_a_number_stays_a_number_where_a_string_is_allowed_too():
    made = build(Mixed, {"number": 5, "word": "5", "count": 5})
    assert (made.number, made.word, made.count) == (5.0, "5", 5)
    assert [type(value) for value in (made.number, made.word, made.count)] == [float, str, int]
    assert build(Mixed, {"number": "x", "word": 1, "count": None}).word == 1.0


def test_ports_are_counted_from_one():
    assert [text for text in ("0", "1", "65535", "65536", "-1", "x", "٣") if is_port(text)] == [
        "1",
        "65535",
    ]


# Changing one of these is another run; all other settings are of the layout.
OF_THE_RUN = """
    run.seed run.epochs run.steps run.init_from run.freeze run.ema_decay run.lr_scaling run.lr_batch
    run.compile run.clip_norm run.dropout run.norm_rows run.buffers run.on_bad_step
    data.global_batch data.on_error strategy.precision strategy.sync_batchnorm
    strategy.channels_last strategy.comm_hook eval.splits eval.every_steps eval.every_epochs
    task.name task.trainer task.packages
"""


def test_settings_of_the_run_are_these():
    """One that moves to the layout would be ignored by a resume, and by a comparison of runs."""
    config = load_config(TEXT)
    found = []
    for key in config.flat():
        group, _, name = key.partition(".")
        if group not in ("optim", "schedule") and not key.startswith("task.options"):
            block = getattr(config, group)
            if name.startswith("mesh."):
                value = replace(block.mesh, **{name.partition(".")[2]: -1})
                name = "mesh"
            else:
                value = "changed"
            changed = replace(config, **{group: replace(block, **{name: value})})
            if changed.run_hash() != config.run_hash():
                found.append(key)
    assert set(found) == set(OF_THE_RUN.split())


def test_names_that_follow_from_settings():
    config = load_config(["task=tiny"], [CONF])
    assert (config.best_metric, config.best_mode) == ("eval/loss", "min")
    named = replace(config, checkpoint=replace(config.checkpoint, best_metric="a/b"))
    assert named.best_metric == "eval/a/b"
    named = replace(config, checkpoint=replace(config.checkpoint, best_metric="eval/a/b"))
    assert named.best_metric == "eval/a/b"
    grouped = replace(config, run=replace(config.run, norm_rows=8))
    assert grouped.norm_rows == 8
    synchronised = replace(config.strategy, sync_batchnorm=True)
    assert replace(grouped, strategy=synchronised).norm_rows is None


def saved(folder, *words):
    """Write config.json of a run with these settings; return the path of the run."""
    config = load_config([*TEXT, *words])
    (folder / "config.json").write_text(format_config(config.plain()))
    return str(folder)


def test_a_saved_run_forgets_its_name_and_where_ranks_met(tmp_path):
    words = ["run.name=mine", "dist.init=tcp", "dist.address=old:1", "strategy.precision=fp64"]
    config = load_run_config(saved(tmp_path, *words), ["strategy=exact"])
    assert config.run.name is None and config.run.resume == str(tmp_path)
    assert (config.dist.init, config.dist.address, config.dist.path) == ("env", None, None)
    assert (config.strategy.name, config.strategy.precision) == ("exact", "fp64")
    with pytest.raises(ConfigError, match=r"^task=cifar: the run directory already has a task; "):
        load_run_config(str(tmp_path), ["task=cifar"])


@pytest.mark.parametrize("word", ["run.resume=null", "run.resume=auto", "run.resume="])
def test_a_resume_that_names_no_directory_still_needs_a_task(word):
    with pytest.raises(ConfigError, match=r"^task is missing: give task=<name>, one of cifar"):
        load_config([word])


# The command line ---------------------------------------------------------------------------------


def test_exit_codes_tell_kinds_of_errors_apart(capsys):
    ends = [ConfigError("a"), RunError("b"), KeyboardInterrupt(), SystemExit(0), ValueError("c")]
    assert [cli._report(end) for end in ends] == [2, 1, CODE_OF_INTERRUPT, 1, 1]
    assert CODE_OF_INTERRUPT == 130
    assert "sys.exit(0) was called at" in capsys.readouterr().err


def test_json_has_null_for_numbers_that_json_does_not_have(monkeypatch):
    written = []
    monkeypatch.setattr(cli, "_documents", [SimpleNamespace(write=written.append)])
    facts = {"loss": float("nan"), "best": float("-inf"), "step": 3, "place": Path("a")}
    assert cli.answer(0, "done", facts, lambda: pytest.fail("shown")) == 0
    (line,) = written
    document = {"code": 0, "result": "done", "loss": None, "best": None, "step": 3, "place": "a"}
    assert json.loads(line, parse_constant=pytest.fail) == document


def test_folders_of_the_settings_file_count_only_without_a_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "lockstep.yaml").write_text("config_dirs: [mine]\n")
    assert cli.split_arguments(["a=1"]) == (["a=1"], ["mine"])
    assert cli.split_arguments(["a=1", "--config-dir", "other"]) == (["a=1"], ["other"])
    assert cli.split_arguments(["--config-dir=other", "-cd", "mine"]) == ([], ["other", "mine"])


def test_lists_have_the_newest_runs_first_and_no_other_settings(command, tmp_path):
    for age, name in enumerate(("b", "c", "a")):
        path = tmp_path / "runs/text" / name / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(format_config(load_config(TEXT).plain()))
        os.utime(path, (10**9 - age, 10**9 - age))
    done = command("runs", "--json", verb="trainer.list")
    names = [row["name"] for row in json.loads(done.stdout)["runs"]]
    assert [Path(name).name for name in names] == ["b", "c", "a"]
    done = command("runs", "run.seed=1", verb="trainer.list")
    line = "error: run.seed=1: must be run.dir=<folder>, the only setting of list\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("a" * 41, "must be letters, digits, - and _, at most 40, as in my-task"),
        ("text", "text: is a built-in task; choose another name"),
        ("--recipe=notebook --cluster=ray", "--recipe notebook: starts no ranks on a cluster; "),
    ],
)
def test_new_refuses_and_writes_nothing(word, line, command, tmp_path):
    done = command(*word.split(), verb="trainer.new")
    assert done.returncode == 2 and line in done.stderr and [*tmp_path.iterdir()] == []
    assert command("b" * 40, verb="trainer.new").returncode == 0


# Cores --------------------------------------------------------------------------------------------


def test_cores_of_a_rank_by_launcher(monkeypatch):
    monkeypatch.setattr(world, "usable_cores", lambda: 4)
    monkeypatch.setattr(world.os, "cpu_count", lambda: 8)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    two = World(world_size=2, local_world_size=2)

    def cores(name, one=two):
        return replace(one, launcher=Launcher(name, {})).count_cores()

    assert (cores("torchrun"), cores("hand")) == (2, 2)
    assert (cores("srun"), cores("mpirun")) == (4, 4)  # each rank is bound to its own four
    three = replace(two, local_world_size=3)
    assert cores("mpirun", three) == 1  # 12 of 8 cores: they share the four
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert (cores("srun"), cores("torchrun")) == (3, 2)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000", 2), ("max 100000", 4), ("50000 100000", 1), ("900000 100000", 4), ("x", 4)],
)
def test_usable_cores_are_those_of_the_process_within_its_quota(text, cores, monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(table, "Path", lambda path: tmp_path / "cpu.max")
    monkeypatch.setattr(table.os, "sched_getaffinity", lambda pid: {1, 2, 5, 7})
    assert table.usable_cores() == cores


@pytest.mark.parametrize(("threads", "result"), [(4, "ok"), (5, "warn")])
def test_as_many_threads_as_cores_are_right(threads, result):
    who = "0\t0\thost a\thost\t1\tcpu\tx"
    rank = {
        "who": who,
        "launcher": "python",
        "checks": [],
        "cores": [0, 1, 2, 3],
        "threads": threads,
        "quota": None,
    }
    (check,) = [check for check in list_checks([rank]) if check.check == "threads"]
    assert check.result == result


# Sweeps -------------------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Return a function that makes a sweep with settings, and jobs of (state, value)."""
    monkeypatch.setattr(jobs, "Lease", lambda place: None)

    def make(states, *words):
        config = load_config(["task=tiny", *words], [CONF])
        config = replace(config, run=replace(config.run, dir=str(tmp_path)))
        made = Sweep("s", config)
        for number, (state, value) in enumerate(states, 1):
            swept = {"optim.lr": str(number)}
            job = Job(number, swept, [], f"{tmp_path}/tiny/{number}", state=state, value=value)
            made.add(job)
        return made

    return make


def test_best_job_is_first_for_losses_and_for_scores(sweep):
    states = [("done", 0.5), ("done", 0.1), ("failed", 0.0), ("done", None), ("done", 0.9)]
    assert [job.number for job in sweep(states).ranking()] == [2, 1, 5, 4, 3]
    words = ["checkpoint.best_metric=accuracy", "checkpoint.best_mode=max"]
    assert [job.number for job in sweep(states, *words).ranking()] == [5, 1, 2, 4, 3]


@pytest.mark.parametrize(
    ("states", "code"),
    [("done done", 0), ("done failed", 1), ("done stopped", 75), ("failed stopped", 1)],
)
def test_exit_code_of_a_sweep(states, code, sweep, capsys):
    assert sweep([(state, None) for state in states.split()]).end() == code
    assert ("compare with: " in capsys.readouterr().out) == (states == "done done")


def test_states_of_jobs_by_exit_code(tmp_path):
    job = Job(1, {}, [], str(tmp_path))
    states = []
    for code in (0, 75, 1, 2, -9):
        job.finish(code, 1.0)
        states.append(job.state)
    assert states == ["done", "stopped", "failed", "failed", "failed"]


@pytest.mark.parametrize(
    ("policy", "state", "is_stopped"),
    [
        ("stop", "failed", True),
        ("continue", "failed", False),
        ("continue", "stopped", True),
        ("stop", "done", False),
    ],
)
def test_what_a_failed_job_does_to_a_sweep(policy, state, is_stopped, sweep, tmp_path):
    made = sweep([(state, None)], f"launch.on_failed_job={policy}")
    (tmp_path / "log").touch()
    made._tell_end(SimpleNamespace(job=made.jobs[0], log=tmp_path / "log"), "")
    assert made.is_stopped == is_stopped


def test_a_job_does_not_take_the_run_of_another_command(sweep):
    made = sweep([("waiting", None)])
    Path(made.jobs[0].directory).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^job 1: .*/tiny/1 is the run of another job; choose"):
        made.check_own(made.jobs[0])


@pytest.mark.parametrize(("direction", "worst"), [("minimize", "inf"), ("maximize", "-inf")])
def test_a_failed_trial_has_the_worst_value(direction, worst):
    one = study.Study.__new__(study.Study)
    one._settings = SimpleNamespace(direction=direction)
    assert one._worst == float(worst)
    mode = {"minimize": "min", "maximize": "max"}[direction]
    assert study.read_settings([study.SWEEPER], mode).direction == direction


def test_names_of_jobs_are_all_equal_or_all_different():
    def named(*names):
        return [SimpleNamespace(run=SimpleNamespace(name=name)) for name in names]

    main._check_names(named("a", "a"))
    main._check_names(named("a", "b"))
    with pytest.raises(ConfigError, match=r"^run\.name=a: two jobs of the sweep have this name"):
        main._check_names(named("a", "b", "a"))
