"""The first minutes of a new user: names of other frameworks, options, the choice of precision."""

import copy
import os
import pickle
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import pytest
import torch
import yaml
from harness import CONF, fit, newest, on_ranks
from harness.training import compose
from tiny import Tiny

import trainer
from trainer import ConfigError, Trainer, limit, load_config
from trainer.base import folders
from trainer.base.process import table
from trainer.core.config.targets import check_target
from trainer.core.config.typed import HINTS, OptionMapping, build
from trainer.core.data.order import BatchSplit
from trainer.core.distributed import world
from trainer.core.distributed.launchers import Launcher
from trainer.core.distributed.world import World
from trainer.core.engine.context import is_bf16_native
from trainer.verify.layouts import choose_layouts, list_left_out, show

FOREIGN = {
    "data.batch_size=32": "use data.global_batch, the rows of an optimizer step over all ranks",
    "devices=2": "the launcher starts the ranks, as in torchrun --nproc_per_node=2",
    "gpus=2": "the launcher starts the ranks",
    "num_nodes=2": "the launcher sets it",
    "local_rank=0": "the launcher sets it",
    "trainer.max_epochs=3": "use run.epochs",
    "logger=wandb": "use log.trackers=[tensorboard,wandb,mlflow,csv]",
    "ckpt_path=x": "use run.resume=<run directory or checkpoint>",
    "data.gradient_accumulation_steps=2": "set data.micro_batch",
    "fp16=true": "use strategy.precision=amp_fp16",
    "optim.learning_rate=1": "use optim.lr",
    "optim.leraning_rate=1": "use optim.lr",
    "+trainer.devices=4": "epochs are run.epochs, ranks come from torchrun",
    "model=resnet18": "the task builds the model",
    "strategy.precision=bf16-mixed": "bf16-mixed is amp_bf16 here",
    "strategy.precision=32": "32 is fp32 here",
    "save_strategy=epoch": "use checkpoint.every_steps or checkpoint.every_epochs",
    "load_best_model_at_end=true": "the best checkpoint is kept beside the newest; set checkpoint",
    "schedule=linear_with_warmup": "linear_with_warmup is linear with schedule.warmup_steps here",
    "schedule=steplr": "steplr is multistep here",
    "strategy=ddp_spawn": "ddp_spawn is ddp here",
}


@pytest.mark.parametrize("word", FOREIGN)
def test_name_of_another_framework_is_answered_with_the_lockstep_name(word):
    with pytest.raises(ConfigError, match=r"is not a setting; |: must be one of ") as error:
        load_config(["task=text", word])
    assert FOREIGN[word] in str(error.value)


def test_every_hint_names_settings_that_exist():
    known = set(load_config(["task=text", "schedule=cosine"]).flat())
    hints = yaml.safe_load(HINTS.read_text())
    groups = r"\b(?:run|data|strategy|dist|checkpoint|eval|log|launch|optim|schedule)\.[a-z_]+"
    named = [name for hint in hints["names"].values() for name in re.findall(groups, hint)]
    assert len(named) > 40 and set(named) <= known
    names = [name.strip() for names in hints["names"] for name in names.split(",")]
    assert len(names) == len(set(names)) > 150
    advice = " ".join(hints["attributes"].values())
    named = {name.partition(".")[0] for name in re.findall(r"self\.([a-z_.]+)", advice)}
    assert len(named) > 5 and named <= {*dir(Trainer)}


@pytest.mark.parametrize("way", ["relative", "absolute", "twice", "link", "links", "copy"])
def test_one_definition_found_in_several_ways_is_not_defined_twice(way, tmp_path, monkeypatch):
    """README's `--config-dir conf` in the checkout names the folder that is searched anyway.

    No test saw it: all ran README's task in a new folder.
    """
    monkeypatch.chdir(folders.CONF.parent)
    (tmp_path / "link").symlink_to(folders.CONF)
    (tmp_path / "links").mkdir()
    for group in ("task", "optim", "strategy"):
        (tmp_path / "links" / group).mkdir()
        for file in (folders.CONF / group).iterdir():
            (tmp_path / "links" / group / file.name).symlink_to(file)
    shutil.copytree(folders.CONF, tmp_path / "copy")
    named = {
        "relative": ["./conf"],
        "absolute": [str(folders.CONF)],
        "twice": ["conf", str(folders.CONF)],
    }
    named |= {name: [str(tmp_path / name)] for name in ("link", "links", "copy")}
    words = ["task=text", "optim=adamw", "strategy=exact"]
    config = load_config(words, named[way])
    assert config.flat() == load_config(words).flat()
    assert config.strategy.name == "exact"


def test_an_option_that_differs_by_a_byte_is_defined_twice(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder / "optim").mkdir(parents=True)
        (tmp_path / folder / "optim/mine.yaml").write_text(f"# {folder}\nlr: 0.1\n")
    both = [str(tmp_path / "one"), str(tmp_path / "two")]
    with pytest.raises(ConfigError, match=r"^optim=mine is defined twice, in .*; rename yours$"):
        load_config(["task=text", "optim=mine"], both)
    (tmp_path / "two/optim/mine.yaml").unlink()
    (tmp_path / "two/optim/mine.yaml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"^optim=mine is defined twice"):
        load_config(["task=text", "optim=mine"], both)


@dataclass
class Shapes:
    size: int | str
    pair: tuple[int, int]
    many: tuple[float, ...]
    weights: dict[str, int]
    rate: float | str = 0.5
    names: dict[str, list[int]] = field(default_factory=dict)


GOOD = {"size": 3, "pair": [1, 2], "many": [1, 2.5], "weights": {"a": 1}}


def test_options_may_be_unions_tuples_and_mappings():
    shapes = build(Shapes, {**GOOD, "names": {"x": [1]}}, "task.options.")
    assert shapes == Shapes(3, (1, 2), (1.0, 2.5), {"a": 1}, 0.5, {"x": [1]})
    assert build(Shapes, {**GOOD, "size": "auto"}).size == "auto"
    assert build(Shapes, {**GOOD, "rate": "auto"}).rate == "auto"
    assert build(Shapes, {**GOOD, "rate": 2}).rate == 2.0


@dataclass
class Mixed:
    first: str | float = "a"
    second: Annotated[int | str, limit(min=10)] = "a"
    third: Annotated[int, limit(min=10)] | None = None
    fourth: Annotated[int, limit(min=10)] | str = "a"


def test_limits_of_a_schedule_hold_also_if_its_annotations_are_strings(tmp_path, monkeypatch):
    text = """from __future__ import annotations
from typing import Annotated
from trainer import limit
def mine(num_steps, height: Annotated[float, limit(min=0)] = 1.0):
    return lambda step: height
"""
    (tmp_path / "schedule_of_strings.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    spec = {"_target_": "schedule_of_strings.mine", "height": -1.0}
    with pytest.raises(ConfigError, match=r"schedule.height=-1.0: must be a number of at least 0"):
        check_target(spec, "schedule", ["schedule_of_strings"])
    assert check_target({**spec, "height": 2.0}, "schedule", ["schedule_of_strings"])


def test_number_stays_a_number_in_a_union_and_keeps_its_limit():
    mixed = build(Mixed, {"first": 3, "second": 12, "third": 10, "fourth": "b"})
    assert mixed == Mixed(3.0, 12, 10, "b")
    assert build(Mixed, {"first": 2.5}).first == 2.5
    assert build(Mixed, {"third": None}) == Mixed()
    for name in ("second", "third", "fourth"):
        with pytest.raises(ConfigError, match=f"^{name}=5: must be an integer of at least 10"):
            build(Mixed, {name: 5})


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("size", True, "size=true: must be an integer or a string"),
        ("pair", [1], "pair=[1]: must be a list of 2 values"),
        ("pair", 5, "pair=5: must be a list of 2 values"),
        ("pair", [1, "b"], "pair[1]=b: must be an integer"),
        ("many", [1, "b"], "many[1]=b: must be a number"),
        ("weights", {"a": "b"}, "weights.a=b: must be an integer"),
        ("weights", [1], "weights=[1]: must be a mapping"),
        ("names", {"x": 1}, "names.x=1: must be a list"),
    ],
)
def test_wrong_option_names_its_key_and_what_is_allowed(name, value, line):
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        build(Shapes, {**GOOD, name: value})


class Defaulted(Tiny):
    @dataclass
    class Options(Tiny.Options):
        depth: int = 1


class Untyped(Tiny):
    Options = None


def test_option_with_a_default_needs_no_plus():
    config = load_config(["task=tiny", "task.options.depth=3"], [str(CONF)])
    assert Defaulted(config).options.depth == 3
    plain = load_config(["task=tiny"], [str(CONF)])
    assert Defaulted(plain).config.task.options["depth"] == 1  # a default is saved with the run
    assert Defaulted(plain).config.run_hash() != plain.run_hash() == Tiny(plain).config.run_hash()
    with pytest.raises(ConfigError, match=r"^task\.options\.depth is not a setting$"):
        Tiny(config)
    with pytest.raises(ConfigError, match=r"^task\.options\.depth is not a setting$"):
        Untyped(config)
    config = load_config(["task=tiny", "+task.options.depth=3"], [str(CONF)])
    assert Untyped(config).options.depth == 3


def test_options_without_a_dataclass_are_attributes():
    options = OptionMapping({"width": 4, "parts": [{"name": "a"}], "block": {"heads": 2}})
    assert (options.width, options.parts[0].name, options.block.heads) == (4, "a", 2)
    assert options == {"width": 4, "parts": [{"name": "a"}], "block": {"heads": 2}}
    assert pickle.loads(pickle.dumps(copy.deepcopy(options))) == options
    with pytest.raises(AttributeError, match=r"there is no option widht; did you mean width\?"):
        _ = options.widht
    with pytest.raises(AttributeError, match=r"give task\.options\.width=5"):
        options.width = 5


# Precision ----------------------------------------------------------------------------------------

AUTO = ["task=tiny", "strategy.precision=auto", "run.steps=2", "log.every_steps=1"]
HERE = torch.device("cpu")


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_cpu_whose_bf16_is_disabled_has_none(variable, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert is_bf16_native(HERE)
    monkeypatch.setenv(variable, "avx512_core_vnni")
    assert not is_bf16_native(HERE)
    monkeypatch.setenv(variable, "AVX512_CORE_AMX")
    assert is_bf16_native(HERE)


def has_bf16(*ranks):
    """Pretend that the CPU has bf16 arithmetic on these ranks only."""
    here = int(os.environ.get("RANK", "0")) in ranks
    torch.cpu._is_avx512_bf16_supported = lambda: here
    torch.cpu._is_amx_tile_supported = lambda: False


@pytest.mark.parametrize(
    ("ranks", "chosen", "why"),
    [
        ((0, 1), "amp_bf16", "every rank has bf16 arithmetic in hardware"),
        ((0,), "fp32", "rank 1 has no bf16 arithmetic in hardware"),
        ((), "fp32", "no rank has bf16 arithmetic in hardware"),
    ],
)
def test_auto_is_bf16_only_where_every_rank_has_it(ranks, chosen, why, tmp_path, capfd):
    def train():
        has_bf16(*ranks)
        return fit(tmp_path, *AUTO)

    compose(tmp_path, *AUTO)
    results = on_ranks(2, train)
    directory = results[0]["directory"]
    assert f'"precision": "{chosen}"' in (directory / "config.json").read_text()
    assert newest(directory).manifest["config"]["strategy.precision"] == chosen
    assert f"dtype   {chosen} (strategy.precision=auto), because {why}" in capfd.readouterr().out


def test_resume_keeps_the_precision_of_its_run_and_reports_that_it_is_slow(tmp_path, capfd):
    def first():
        has_bf16(0)
        return fit(tmp_path, *AUTO)

    def second():
        has_bf16()
        return fit(tmp_path, *AUTO, "run.steps=4", "run.resume=auto")

    compose(tmp_path, *AUTO)
    on_ranks(1, first)
    capfd.readouterr()
    (resumed,) = on_ranks(1, second)
    out = capfd.readouterr().out
    assert resumed["step"] == 4
    assert "dtype   amp_bf16 (strategy.precision=auto), because the run to resume has it" in out
    assert "slower than necessary: this CPU emulates bf16 (strategy.precision=amp_bf16)" in out


def test_kept_precision_is_checked_like_one_that_is_given(tmp_path):
    class Broken(Tiny):
        def build_model(self):
            return pytest.fail("not reached")

    def resume():
        has_bf16(0)
        fit(tmp_path, *AUTO)
        config = compose(tmp_path, *AUTO, "run.resume=auto", "strategy.comm_hook=powersgd")
        with pytest.MonkeyPatch.context() as patch:
            kept = {"strategy.precision": "fp64"}
            patch.setattr("trainer.core.checkpoints.resume.read_saved", lambda *_: {**kept})
            with pytest.raises(ConfigError, match=r"^strategy\.comm_hook=powersgd: compresses"):
                Broken(config).fit()

    compose(tmp_path, *AUTO)
    on_ranks(1, resume)


def test_auto_is_resolved_anew_for_another_checkpoint(tmp_path, capfd):
    """evaluate has resolved it to fp32; fit then keeps the precision of the run to resume."""

    def train():
        has_bf16(0)
        directory = fit(tmp_path, *AUTO)["directory"]
        has_bf16()
        trainer = Tiny(compose(tmp_path, *AUTO[:2], "run.steps=3", "run.name=b"))
        trainer.evaluate()
        trainer.load_checkpoint(directory / "checkpoints/step-00000002")
        summary = trainer.fit()
        assert trainer.config.strategy.precision == "auto"
        assert '"precision": "amp_bf16"' in (summary.directory / "config.json").read_text()

    compose(tmp_path, *AUTO)
    on_ranks(1, train)
    assert "dtype   fp32 (strategy.precision=auto)" in capfd.readouterr().err


def test_rank_that_is_bound_to_its_core_is_not_called_slow(monkeypatch):
    bound = World(world_size=2, local_world_size=2, launcher=Launcher("mpirun", {}))
    monkeypatch.setattr(world, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert bound.count_cores() == 1
    assert replace(bound, launcher=Launcher("torchrun", {})).count_cores() == 0


def test_driver_without_a_visible_gpu_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert world.explain_unseen_gpu() == ""
    program = Path(tmp_path, "nvidia-smi")
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert world.explain_unseen_gpu().startswith(
        "an NVIDIA driver is installed, but torch sees no GPU: torch "
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "needs a driver for CUDA 13.0" in world.explain_unseen_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES=7 shows it none" in world.explain_unseen_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert world.explain_unseen_gpu() == ""


@pytest.mark.slow
def test_run_that_is_slow_for_a_known_reason_reports_it(command, tmp_path):
    words = [*AUTO[:1], "run.steps=1", "data.path=streamed", "strategy.precision=fp32"]
    words += [f"run.dir={tmp_path}", f"--config-dir={CONF}"]
    cores = table.usable_cores()
    done = command(*words, ranks=cores + 1)
    assert done.returncode == 0, done.stderr
    assert f"slower than necessary: {cores + 1} ranks share {cores} cores\n" in done.stdout


@pytest.mark.parametrize("precision", ["fp16", "amp_fp16"])
def test_fp16_on_a_cpu_is_told_to_be_slow(precision, command):
    words = [*AUTO[:1], "run.steps=1", "data.path=streamed", f"strategy.precision={precision}"]
    done = command(*words, f"--config-dir={CONF}")
    line = f"a CPU computes fp16 up to 100 times slower (strategy.precision={precision}), so use "
    assert line in done.stdout and "data.workers" not in done.stdout


# The folder's settings ----------------------------------------------------------------------------

SETTINGS = {
    "lockstep.yaml": "config_dirs: [{}]\n",
    "pyproject.toml": "[project]\nname = 'mine'\n[tool.lockstep]\nconfig_dirs = ['{}']\n",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_folder_names_its_config_dirs_once(name, command, tmp_path):
    (tmp_path / name).write_text(SETTINGS[name].format(CONF))
    words = ["task=tiny", "run.steps=1", "run.name=a"]
    assert command(*words).returncode == 0
    assert command("runs/tiny/a", verb="trainer.use").returncode == 0
    assert "task=tiny" not in command("--help").stdout and "tiny" in command("--help").stdout
    assert "name: tiny" in command("task=tiny", "--cfg", "job").stdout
    done = command(*words, "--config-dir=other")
    assert (done.returncode, done.stderr) == (2, "error: --config-dir other: must be a directory\n")


WRONG = {
    "config_dir: [a]": "lockstep.yaml: config_dir is not a setting; "
    "did you mean lockstep.yaml: config_dirs?",
    "config_dirs: a": "lockstep.yaml: config_dirs=a: must be a list",
    "config_dirs: [a]": "lockstep.yaml: config_dirs: a is not a directory; make or remove it",
    "config_dirs: [": "lockstep.yaml cannot be read: ",
    "- a": "lockstep.yaml=['a']: must be a mapping",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_settings_of_a_folder_are_one_line(text, command, tmp_path):
    (tmp_path / "lockstep.yaml").write_text(text)
    done = command("task=text")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {WRONG[text]}")


def test_printed_configuration_has_all_config_dirs(command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "lockstep.yaml").write_text(f"config_dirs: [{CONF}, empty]\n")
    assert "name: tiny" in command("task=tiny", "--cfg", "job").stdout


def test_version_is_printed(command):
    assert command("--version").stdout == f"Lockstep {trainer.__version__}\n"


def test_folder_with_settings_in_both_files_is_refused(command, tmp_path):
    for name, text in SETTINGS.items():
        (tmp_path / name).write_text(text.format(CONF))
    line = (
        "error: config_dirs: lockstep.yaml and pyproject.toml both have settings; keep only one\n"
    )
    assert command("task=text").stderr == line


def test_flag_of_another_framework_is_answered_with_the_lockstep_setting(command):

    done = command("task=text", "--max_epochs=3")
    assert done.returncode == 2 and done.stderr.endswith("and key=value; use run.epochs\n")


# What walks of new users found --------------------------------------------------------------------


def test_plain_batchnorm_is_noted_at_the_start(command):
    words = ["task=tiny", f"--config-dir={CONF}", "run.steps=1", "task.options.norm=true"]
    assert "BatchNorm sees one micro-batch at a time" in command(*words).stdout
    for word in ("run.norm_rows=11", "strategy.sync_batchnorm=true", "strategy=exact"):
        assert "BatchNorm sees" not in command(*words, word).stdout, word


def test_spaces_around_the_equals_sign_are_named(command):
    done = command("task=text", "run.epochs", "=", "3")
    assert done.stderr == "error: run.epochs = ...: write key=value without spaces\n"


def test_model_that_is_wrapped_already_is_refused(tmp_path):
    class Wrapped(Tiny):
        def build_model(self):
            return torch.nn.DataParallel(super().build_model())

    def train():
        line = "build_model returned a DataParallel: must be the model without a wrapper"
        with pytest.raises(ConfigError, match=line):
            Wrapped(compose(tmp_path, *AUTO)).fit()

    on_ranks(1, train)


def test_verify_says_which_default_layouts_it_leaves_out(capsys):
    cut = BatchSplit(unit=32, is_fixed=False)
    show([], 1, list_left_out(choose_layouts(None, 2, cut), 2, cut))
    line = capsys.readouterr().out.splitlines()[0]
    assert line == "left out: ranks-3, fsdp-4, hsdp-2-2 (the global batch has 2 parts of 32 rows)"
    barred = {"tensor": "the task has no tensor_plan", "shard": "no sharding"}
    show([], 1, list_left_out(choose_layouts(None, 2, cut, barred), 2, cut, barred))
    small, sharded, tensor = capsys.readouterr().out.splitlines()[:3]
    assert small == "left out: ranks-3 (the global batch has 2 parts of 32 rows)"
    assert sharded == "left out: fsdp-2, fsdp-4, hsdp-2-2, fsdp-2-tp-2 (no sharding)"
    assert tensor == "left out: tp-2 (the task has no tensor_plan)"


def test_verify_refuses_a_named_layout_that_cannot_work_before_it_trains():
    cut = BatchSplit(unit=32, is_fixed=False)
    line = (
        "layouts=ranks-2,ranks-3: ranks-3 cannot be tried: the global batch has 2 parts of 32 rows"
    )
    with pytest.raises(ConfigError, match=line):
        choose_layouts("ranks-2,ranks-3", 2, cut)
    with pytest.raises(
        ConfigError, match="tp-2 cannot be tried: the task has no tensor_plan; leave"
    ):
        choose_layouts("tp-2", 2, cut, {"tensor": "the task has no tensor_plan"})
