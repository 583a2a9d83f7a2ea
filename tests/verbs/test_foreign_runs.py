"""Run directories from somebody else: what they name is not imported, and no damage makes a verb
hang, crash or write."""

import importlib
import io
import os
import random
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from harness import CONF, hostile_runs, on_ranks, within
from harness.launch import environment_of_a_command
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from trainer import ConfigError, RunError, load_config
from trainer.base.errors import visible
from trainer.core.config.compose import load_run_config
from trainer.core.config.saved_config import CONFIG, format_config, read_config
from trainer.core.config.working_folder import read_settings

RUN = hostile_runs.RUN


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a run, and modules that leave a file when they are imported."""
    base = tmp_path_factory.mktemp("foreign")
    hostile_runs.make_run(base)
    return base


@pytest.fixture
def base(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def change(run, old, new):
    text = (run / "config.json").read_text()
    assert old in text
    (run / "config.json").write_text(text.replace(old, new))


# The allow list -----------------------------------------------------------------------------------

WITHOUT_FOLDER = {
    "use": (RUN,),
    "use to predict": (RUN, "out=p.npz"),
    "show": (RUN, "step=2"),
    "use to export": (RUN, "out=m.safetensors"),
    "check": (f"run.resume={RUN}", "ranks=1"),
    "prove": (f"run.resume={RUN}",),
    "train": (f"run.resume={RUN}",),
    "train from a checkpoint": (f"run.resume={RUN}/checkpoints/step-00000003", "run.name=b"),
}


def test_code_that_only_a_saved_configuration_names_is_not_imported(base, command):
    change(base / RUN, "tiny.Tiny", "canary.Task")
    before = hostile_runs.snapshot(base)
    for verb, words in WITHOUT_FOLDER.items():
        done = command(*words, f"--config-dir={CONF}", verb=f"trainer.{verb.split()[0]}")
        assert (done.returncode, done.stdout) == (2, ""), verb
        assert done.stderr == (
            f"error: {RUN}/config.json: task.trainer: only this file names the package canary, "
            "whose code would be run; give task.trainer=canary.Task if you trust it, or "
            "packages: [canary] in lockstep.yaml\n"
        ), verb
    assert hostile_runs.snapshot(base) == before


@pytest.mark.parametrize("target", ["canary.Task", "runs.tiny.a.canary.Task", "os.path.Task"])
def test_package_that_only_a_saved_configuration_lists_is_not_allowed(target, base):
    package = target.removesuffix(".Task")
    change(base / RUN, '"packages": []', f'"packages": ["torch.optim", "{package}"]')
    change(base / RUN, "torch.optim.SGD", target)
    why = rf"a/config\.json: task\.packages: only this file names the package {package}, "
    with pytest.raises(ConfigError, match=why):
        load_run_config(RUN, [], [CONF])
    repeated = f"task.packages=[torch.optim,{package}]"
    assert load_run_config(RUN, [repeated], [CONF]).task.packages == ["torch.optim", package]


def name_on_the_command_line(base):
    return ["task.trainer=tiny.Tiny"], []


def name_the_package_on_the_command_line(base):
    return ["task.packages=[tiny]"], []


def give_the_config_folder(base):
    return [], [CONF]


def have_the_config_folder_beside(base):
    (base / "conf/task").mkdir(parents=True)
    shutil.copy(Path(CONF) / "task/tiny.yaml", base / "conf/task")
    return [], []


def name_in_the_folders_settings(base):
    (base / "lockstep.yaml").write_text("packages: [tiny]\n")
    return [], []


def name_in_the_projects_settings(base):
    (base / "pyproject.toml").write_text("[tool.lockstep]\npackages = ['tiny']\n")
    return [], []


@pytest.mark.parametrize(
    "name",
    [
        name_on_the_command_line,
        name_the_package_on_the_command_line,
        give_the_config_folder,
        have_the_config_folder_beside,
        name_in_the_folders_settings,
        name_in_the_projects_settings,
    ],
)
def test_task_of_a_saved_run_is_loaded_if_the_user_names_its_package(name, base):
    with pytest.raises(ConfigError, match="names the package tiny, whose"):
        load_run_config(RUN, [], [])
    assert load_run_config(RUN, *name(base)).task.trainer == "tiny.Tiny"


def with_a_folder(place):
    (place / "conf/task").mkdir(parents=True)
    shutil.copy(Path(CONF) / "task/tiny.yaml", place / "conf/task")


@pytest.mark.parametrize("way", ["settings", "folder", "folder given", "folder around"])
def test_settings_that_came_with_a_run_name_no_package(way, base, monkeypatch):
    place, dirs = RUN, []
    if way == "settings":  # the working directory is the run directory
        (base / RUN / "lockstep.yaml").write_text("packages: [tiny]\n")
        monkeypatch.chdir(base / RUN)
        place = "."
    elif way == "folder around":
        with_a_folder(base / "runs")
        (base / "runs/conf").rename(base / "runs/task_of")
        shutil.move(base / "runs/task_of/task", base / "runs/task")
    else:
        with_a_folder(base / RUN)
        monkeypatch.chdir(base / RUN)
        place, dirs = ".", (["conf"] if way == "folder given" else [])
    with pytest.raises(ConfigError, match="names the package tiny, whose"):
        load_run_config(place, [], dirs)


def test_printed_command_names_the_task_if_a_later_start_would_not_know_it(base, command):
    again = ["run.steps=4", "run.name=c"]
    words = [f"run.resume={RUN}", f"--config-dir={CONF}", *again]
    line = "train longer with: python -m trainer run.resume=runs/tiny/c"
    assert f"{line} task.trainer=tiny.Tiny run.steps=8\n" in command(*words).stdout
    have_the_config_folder_beside(base)
    done = command(f"run.resume={RUN}", *again[:1], "run.name=d")
    assert f"{line[:-1]}d run.steps=8\n" in done.stdout


def test_place_where_ranks_meet_is_not_taken_from_a_saved_run(base):
    change(base / RUN, '"init": "env"', '"init": "tcp"')
    change(base / RUN, '"address": null', '"address": "10.0.0.1:80"')
    config = load_run_config(RUN, [], [CONF]).dist
    assert (config.init, config.address, config.path) == ("env", None, None)
    words = ["dist.init=file", "dist.path=meet"]
    assert load_run_config(RUN, words, [CONF]).dist.path == "meet"


SHADOWS = ("typing", "pathlib", "yaml", "torch", "traceback", "trainer_of_others")


@pytest.mark.parametrize("place", [".", "checkpoints/step-00000003"])
def test_nothing_is_imported_from_the_run_directory_that_a_command_is_started_in(place, base):
    for name in SHADOWS:
        (base / RUN / f"{name}.py").write_text("open('ran', 'w')\nraise SystemExit(9)\n")
    words = [sys.executable, "-m", "trainer.show", place]
    environment = environment_of_a_command()
    done = subprocess.run(words, capture_output=True, text=True, cwd=base / RUN, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and "valid" in done.stdout
    assert not (base / RUN / "ran").exists()


# Configurations -----------------------------------------------------------------------------------

CONFIGS = {
    "[" * 20_000: "values are nested more than 64 deep",
    '{"a": ' + "9" * 5000 + "}": "a number has 5,000 digits",
    '{"a": 1, "a": 2}': "a name is given twice",
    '{"a": "${oc.env:HOME}"}': "a has an interpolation, ${...}",
    '{"a": {"": [[[1], 2]]}}': "the name '' must have pairs of a name and a value",
    '{"a": {"": [1]}}': "the name '' must have pairs of a name and a value",
    "a: 1\nrun: {}": "Expecting value",  # YAML
    '{"a": [' + ",".join(["[[]]"] * 10_000) + "]}": "it has more than 20,000 values",
    "\0": "Expecting value",
}


@pytest.mark.parametrize("text", CONFIGS, ids=lambda text: text[:9])
def test_saved_configuration_that_no_run_has_written_is_refused_soon(text, base):
    (base / RUN / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(CONFIGS[text])) as raised:
        load_run_config(RUN, [], [CONF])
    assert str(raised.value).startswith(f"{RUN}: its config.json was not written by a run: ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"resume":', '"xresume":'),
        ('"strategy": {\n  "name"', '"strategy": {\n  "xname"'),
        ('"channels_last": false', '"channels_last": "???"'),
    ],
)
def test_saved_setting_with_another_name_or_no_value_is_one_line(old, new, base):
    """Also where overrides choose a group of settings anew, as predict does."""
    change(base / RUN, old, new)
    with pytest.raises(ConfigError) as raised:
        load_run_config(RUN, ["strategy=single"], [CONF])
    assert "\n" not in str(raised.value)


def test_saved_configuration_that_is_too_large_or_no_file_is_refused(base):
    path = base / RUN / "config.json"
    path.write_text(f'{{"a": "{"x" * 2**18}"}}')
    with pytest.raises(ConfigError, match=r"config\.json: has 262,153 bytes, at most 262,144 are"):
        load_run_config(RUN, [], [CONF])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"a: has no config\.json"):
        load_run_config(RUN, [], [CONF])


@pytest.mark.parametrize("words", [["x" * 2**18], [1] * 20_000], ids=["long", "many"])
def test_settings_that_a_resume_could_not_read_are_refused_at_the_start(words):
    config = load_config(["task=tiny"], [CONF])
    config.task.options["words"] = words
    with pytest.raises(ConfigError, match=r"^task\.options: all settings as JSON must be at most "):
        format_config(config.plain())


def test_options_come_back_from_a_run_directory_with_the_names_they_had(tmp_path):
    """JSON has names of text alone; a task may have others, such as numbers of classes."""
    options = {"classes": {1: "cat", 2: {"3": 0.1, 4.5: None}}, "": {"": [[1, 2]]}, "none": {}}
    path = tmp_path / CONFIG
    path.write_text(format_config({"task": {"options": options}}))
    assert read_config(path) == {"task": {"options": options}}
    assert "NaN" in format_config({"task": {"options": {"fill": float("nan")}}})


UNSAVED = {
    "!!binary aGVsbG8=": "Object of type bytes is not JSON serializable",
    "0x" + "f" * 5000: "Exceeds the limit (4300 digits) for integer string conversion",
    "9" * 30: "a number has 30 digits",
    "[" * 70 + "]" * 70: "values are nested more than 64 deep",
}


@pytest.mark.parametrize("text", UNSAVED, ids=lambda text: text[:9])
def test_options_that_no_run_directory_can_hold_are_refused_before_the_start(text, tmp_path):
    (tmp_path / "task").mkdir()
    tiny = (Path(CONF) / "task/tiny.yaml").read_text()
    mine = tiny.replace("signal_at: null", f"signal_at: null, mine: {text}")
    (tmp_path / "task/mine.yaml").write_text(mine)
    line = f"task.options: a value cannot be written as JSON: {UNSAVED[text]}"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        load_config(["task=mine"], [str(tmp_path)])


USERS = {
    "{1: a, null: b}": "task.options.mine: Incompatible key type 'NoneType'",
    "9" * 5000: "a YAML file cannot be read: Exceeds the limit (4300 digits)",
    "&a [*a]": "mine.yaml: it has more than 20,000 values",
    "{&a x: {<<: [&b {<<: *b}]}}": "mine.yaml: it has more than 20,000 values",
    "&a [*a," + "[" * 1000: "mine.yaml: values are nested too deep",
}


@pytest.mark.parametrize("text", USERS, ids=lambda text: text[:9])
def test_a_users_yaml_that_cannot_be_composed_is_one_line(text, tmp_path):
    (tmp_path / "task").mkdir()
    tiny = (Path(CONF) / "task/tiny.yaml").read_text()
    mine = tiny.replace("signal_at: null", f"signal_at: null, mine: {text}")
    (tmp_path / "task/mine.yaml").write_text(mine)
    with pytest.raises(ConfigError, match=re.escape(USERS[text])) as raised:
        load_config(["task=mine"], [str(tmp_path)])
    assert "\n" not in str(raised.value)


BOMBS = [
    hostile_runs.BOMB,
    hostile_runs.BOMB.replace("[", "{<<: [").replace("]", "]}").replace("x", "{x: 1}"),
]


@pytest.mark.parametrize("text", [*BOMBS, "[" * 20_000, "a: 1\na: 2", "a: *b"], ids=range(5))
def test_yaml_of_the_working_folder_is_read_within_limits(text, tmp_path):
    (tmp_path / "lockstep.yaml").write_text(text)
    with within(10), pytest.raises(ConfigError, match=r"^lockstep\.yaml cannot be read: "):
        read_settings(tmp_path)


def test_aliases_of_a_users_file_are_limited_too(command, tmp_path):
    (tmp_path / "conf/task").mkdir(parents=True)
    text = (Path(CONF) / "task/tiny.yaml").read_text()
    (tmp_path / "conf/task/mine.yaml").write_text(f"{text}\n{hostile_runs.BOMB}")
    for words in (["task=mine"], ["task=mine", "--cfg", "job"]):
        done = command("--config-dir=conf", *words)
        line = f"error: {tmp_path}/conf/task/mine.yaml: it has more than 20,000 values\n"
        assert (done.returncode, done.stderr) == (2, line)


# Any damage ---------------------------------------------------------------------------------------

QUICK = {  # verbs that train and evaluate nothing: 10 to 100 ms
    "show": "trainer.show.__main__",
    "show checkpoints": "trainer.show.__main__",
    "show two": "trainer.show.__main__",
    "use stored": "trainer.use.__main__",
}


def call_verb(name):
    """Call a verb in this process; return its exit code and what it printed."""
    out = io.StringIO()
    code = 0
    try:
        with redirect_stdout(out), within(20):
            if name in QUICK:
                code = importlib.import_module(QUICK[name]).main(hostile_runs.VERBS[name])
            else:
                load_run_config(RUN, [], [CONF])
    except (ConfigError, RunError) as error:
        return (2 if isinstance(error, ConfigError) else 1), out.getvalue(), visible(str(error))
    return code, out.getvalue(), ""


def check_any_damage(base, original):
    """Draw damage and a verb, in the working directory `base`."""

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(chance=st.randoms(use_true_random=False), name=st.sampled_from([*QUICK, "load"]))
    def check(chance, name):
        for place in (RUN, "out"):
            shutil.rmtree(base / place)
            shutil.copytree(original / place, base / place)
        note(f"{name} after {hostile_runs.damage(base / RUN, chance)}")
        before = hostile_runs.snapshot(base / RUN)
        code, out, err = call_verb(name)
        assert hostile_runs.judge(base, code, out, err, 0.0) is None
        assert hostile_runs.snapshot(base / RUN) == before

    set_hypothesis_home_dir(original.parent / "hypothesis")
    check()


def test_no_damage_makes_a_verb_hang_crash_write_or_import(base, trained):
    on_ranks(1, check_any_damage, base, trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile_runs.VERBS)
def test_no_damage_makes_a_whole_command_hang_crash_write_or_import(name, trained, tmp_path):
    chance = random.Random(name)
    for number in range(10):
        base = tmp_path / str(number)
        shutil.copytree(trained, base)
        words = hostile_runs.damage(base / RUN, chance)
        assert hostile_runs.problem_of_a_verb(base, name) is None, (number, words)


def test_each_verb_that_reads_a_run_is_attacked():
    assert {"show", "use"} <= {name.partition(" ")[0] for name in hostile_runs.VERBS}
