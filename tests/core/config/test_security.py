"""Configurations, run directories and names from an untrusted source; SECURITY.md lists what they
must not be able to do."""

import ast
import dataclasses
import importlib
import os
import pkgutil
import shutil
from pathlib import Path

import pytest
import torch
from harness import CONF, fit, fit_on, on_ranks
from harness.command import fork_jobs

import trainer
from trainer import ConfigError, load_config
from trainer.base.errors import visible
from trainer.cli import load_task
from trainer.core.config.compose import load_run_config
from trainer.core.config.saved_config import format_config
from trainer.core.config.targets import call_target, check_target, masked
from trainer.core.record.trackers.console import Console

ROOT = Path(__file__).resolve().parents[3]
TINY = ["--config-dir", CONF, "task=tiny"]


def with_options(tmp_path, text, run="name: a"):
    """Write a task with the given extra options to a folder for --config-dir."""
    (tmp_path / "task").mkdir(exist_ok=True)
    base = (Path(CONF) / "task/tiny.yaml").read_text().replace("tiny.Tiny", "free.Free")
    base = base.replace("options: {", f"options: {{{text}, ", 1).replace(
        "run: {", f"run: {{{run}, ", 1
    )
    (tmp_path / "task/theirs.yaml").write_text(base)
    return ["task=theirs"], [str(tmp_path)]


def files_under(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


# Targets ------------------------------------------------------------------------------------------

DANGEROUS = [
    *(
        "os.system",
        "posix.system",
        "os.remove",
        "builtins.eval",
        "builtins.exec",
        "builtins.open",
        "builtins.print",
    ),
    *(
        "subprocess.Popen",
        "subprocess.run",
        "importlib.import_module",
        "pathlib.Path.write_text",
        "shutil.copy",
    ),
    *(
        "shutil.rmtree",
        "urllib.request.urlretrieve",
        "pickle.loads",
        "runpy.run_path",
        "functools.partial",
    ),
    *(
        "webbrowser.open",
        "ctypes.CDLL",
        "socket.create_connection",
        "antigravity.webbrowser",
        "hydra.utils.call",
    ),
    *(
        "torch.load",
        "torch.save",
        "torch.serialization.load",
        "torch.hub.load",
        "torch.ops.load_library",
    ),
    *(
        "torch.utils.cpp_extension.load_inline",
        "torch.jit.load",
        "torch.package.PackageImporter",
        "numpy.load",
    ),
    *(
        "torch.nn.modules.module.os.system",
        "torch.nn.modules.module.torch.load",
        "torch.optim.optimizer.torch.load",
    ),
    *(
        "torch.nn.modules.module.functools.partial",
        "torch.nn.modules.module.OrderedDict",
        "torch.optim.optimizer.cast",
    ),
    *(
        "torch.nn.modules.module.pickle.loads",
        "torch.optim.swa_utils.deepcopy",
        "torch.nn.functional.importlib",
    ),
    *(
        "torch.nn.parallel.distributed.os.system",
        "torch.nn.parallel.distributed.dist",
        "torch.nn.Module",
    ),
    *(
        "torch.nn.Module.to",
        "torch.nn.utils.parametrize.copyreg",
        "torch.optim.lr_scheduler.LambdaLR",
    ),
    *(
        "trainer.core.checkpoints.transaction.os.system",
        "trainer.core.checkpoints.transaction.shutil.rmtree",
        "trainer.core.checkpoints.transaction.os",
        "trainer.core.engine.means.torch",
    ),
    *(
        "trainer.core.checkpoints.transaction.sweep",
        "trainer.core.checkpoints.transaction.set_aside",
        "trainer.core.checkpoints.transaction._discard",
        "trainer.core.checkpoints.transaction.load",
    ),
    *(
        "trainer.core.checkpoints.run_directory.write_exit",
        "trainer.core.checkpoints.run_directory.replace_file",
        "trainer.core.checkpoints.run_directory.Lease",
        "trainer.train.run",
    ),
    *(
        "trainer.tasks.data.download.fetch",
        "trainer.tasks.data.download._download",
        "trainer.tasks.data.download.urlopen",
    ),
    *(
        "trainer.tasks.cifar.partial",
        "trainer.import_module",
        "trainer.Trainer",
        "trainer.core.config.targets.call_target",
    ),
    *(
        "canary.Optimizer",
        "canary.schedule",
        "torch.optim",
        "torch.optim.",
        ".os",
        "torch.optim.SGD()",
        "",
        "SGD",
    ),
    *(
        "torch.optim..SGD",
        "torch.optim.SGD.__init__.__globals__",
        "torch.optim.SGD\n",
        "torch.optim.Optimizer.__class__",
    ),
]


@pytest.mark.parametrize(
    "packages", [[], ["os"], ["torch", "trainer", "shutil", "builtins"]], ids=str
)
@pytest.mark.parametrize("group", ["optim", "schedule"])
def test_no_target_but_an_optimizer_or_a_schedule_is_called(group, packages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, first = {"optim": (torch.optim.Optimizer, []), "schedule": (None, 5)}[group]
    for name in DANGEROUS:
        with pytest.raises(ConfigError) as raised:
            call_target({"_target_": name}, group, packages, kind, first)
        assert str(raised.value).startswith(f"{group}._target_="), name
        assert "\n" not in visible(str(raised.value))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def composed():
    return load_config(TINY[2:], [CONF])


@pytest.mark.parametrize("name", [n for n in DANGEROUS if not n.startswith("canary")])
def test_no_task_but_a_trainer_is_made(name, composed):
    config = dataclasses.replace(composed, task=dataclasses.replace(composed.task, trainer=name))
    with pytest.raises(ConfigError, match=r"^task\.trainer="):
        if load_task(config) is not trainer.Trainer:
            raise AssertionError(name)
        raise ConfigError("task.trainer= is the base class, which trains nothing")


def test_no_function_of_ours_can_be_called_but_the_five_schedules():
    """Functions that are added after this test are covered too."""
    found, tried = set(), 0
    for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
        if module.name.endswith("__main__"):
            continue
        for name in vars(importlib.import_module(module.name)):
            tried += 1
            try:
                found.add(
                    check_target({"_target_": f"{module.name}.{name}"}, "schedule", []).__name__
                )
            except ConfigError:
                continue
    assert tried > 500 and found == {"constant", "linear", "cosine", "one_cycle", "multistep"}


def test_module_of_a_target_that_is_not_allowed_is_not_imported(command, tmp_path):
    (tmp_path / "canary.py").write_text(
        "open('ran', 'w')\nclass Optimizer: ...\ndef schedule(num_steps): ...\n"
    )
    for words in (["optim._target_=canary.Optimizer"], ["schedule._target_=canary.schedule"]):
        done = command(*TINY, *words)
        assert done.returncode == 2 and done.stderr.startswith(
            f"error: {words[0]}: must be under"
        ), done.stderr
        assert done.stderr.count("\n") == 1 and not (tmp_path / "ran").exists()
    done = command(*TINY, "task.packages=[canary]", "optim._target_=canary.Optimizer")
    assert done.stderr.startswith(
        "error: optim._target_=canary.Optimizer: must be a subclass of torch.optim"
    ), done.stderr
    assert (
        not (tmp_path / "runs").exists() and (tmp_path / "ran").exists()
    )  # the canary task does write its file


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        *(("trainer", flags) for flags in (["--cfg", "job"], ["--info", "all"], ["--resolve"], [])),
        *(("trainer.sweep", flags) for flags in (["--cfg", "job"], [])),
    ],
)
def test_hydra_builds_nothing_of_what_a_config_names(verb, flags, command, tmp_path):
    places = "".join(
        f"  {name}: "
        f"{{version: 1, formatters: {{a: {{'()': os.mkdir, path: {tmp_path}/{name}}}}}}}\n"
        for name in ("job_logging", "hydra_logging")
    )
    more = (
        f"  sweep: {{dir: {tmp_path}/sweep}}\n  run: {{dir: {tmp_path}/run}}\n  "
        f"output_subdir: {tmp_path}/sub\n"
    )
    more += (
        "  callbacks: {x: {_target_: os.mkdir, path: called}}\n  job: {chdir: true, "
        "env_set: {PATH: ''}}\n"
    )
    (tmp_path / "conf/task").mkdir(parents=True)
    text = (Path(CONF) / "task/tiny.yaml").read_text()
    (tmp_path / "conf/task/theirs.yaml").write_text(f"{text}\nhydra:\n{places}{more}")
    command(
        "--config-dir", "conf", "task=theirs", "run.steps=1", *flags, verb=verb, before=fork_jobs
    )
    assert {path.name for path in tmp_path.iterdir()} <= {"conf", "runs"}


# Interpolations -----------------------------------------------------------------------------------

READING = [
    "oc.env:CANARY",
    "oc.env:CANARY,x",
    "hydra:runtime.cwd",
    "now:%Y",
    "python_version:",
    "oc.deprecated:run.dir",
]
READING += [
    "oc.${run.name}:CANARY",
    'oc.decode:"\\${oc.env:CANARY}"',
    "oc.create:{a: ${oc.env:CANARY}}",
]


@pytest.mark.parametrize("what", READING)
def test_interpolation_that_looks_at_the_machine_is_refused(what, tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "s3kr1t")
    with pytest.raises(ConfigError, match=r"^\$\{[\w.]+:\.\.\.\}: must be one of oc\.create"):
        load_config(*with_options(tmp_path, f"extra: '${{{what}}}'", "name: env"))
    saved = load_config([*TINY[2:], "run.name=env"], [CONF]).plain()
    saved["task"]["packages"] = [f"${{{what}}}"]
    (tmp_path / "config.json").write_text(format_config(saved))
    with pytest.raises(ConfigError) as raised:
        load_run_config(str(tmp_path), [])
    assert "${" in str(raised.value) or "interpolation" in str(raised.value)
    assert "s3kr1t" not in str(raised.value)


@pytest.mark.parametrize(
    "word",
    ["run.name=${oc.env:CANARY}", "+task.options.x=${oc.env:CANARY}", "optim=${oc.env:CANARY}"],
)
def test_environment_is_not_read_on_the_command_line(word, command, tmp_path):
    done = command(*TINY, word, environment={"CANARY": "s3kr1t"})
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and "s3kr1t" not in done.stderr + done.stdout
    )
    assert list(tmp_path.iterdir()) == []


def test_interpolation_within_the_configuration_still_works():
    words = [
        "run.name=${task.name}",
        "run.seed=${oc.select:data.global_batch}",
        "eval.micro_batch=${oc.decode:'7'}",
    ]
    config = load_config([*TINY[2:], *words], [CONF])
    assert (config.run.name, config.run.seed, config.eval.micro_batch) == ("tiny", 22, 7)
    assert load_config([*TINY[2:], "run.name=a"], [CONF]).run.name == "a"


# Secrets ------------------------------------------------------------------------------------------

VALUE = "s3kr1t"
SECRETS = [
    "token",
    "hf_token",
    "hfToken",
    "HF_TOKEN",
    "auth-token",
    "token2",
    "password",
    "db_password",
    "api_key",
    "apiKey",
]
SECRETS += [
    "API_KEY",
    "access_key",
    "aws_secret_access_key",
    "secret",
    "client.secret",
    "secret.value",
    "token_of_mine",
]
INNOCENT = [
    "num_tokens",
    "max_tokens",
    "tokenizer",
    "secretary",
    "tokens",
    "passwordless",
    "key",
    "monkey",
    "access",
    "api",
]
FORMS = [
    "{}={}",
    "+{}={}",
    "++{}='{}'",
    "{}={},b",
    "{}=[{}]",
    "{}={{a:{}}}",
    "--{}={}",
    "{}={} (",
    "+{}={{b:[{},{{",
]


@pytest.mark.parametrize("name", SECRETS)
def test_secret_is_refused_in_files_and_on_the_command_line_without_its_value(
    name, tmp_path, capfd, monkeypatch
):
    from trainer.sweep.__main__ import main as sweep
    from trainer.train import main as train

    monkeypatch.setattr("trainer.train.catch_early", lambda: None)
    for number, form in enumerate(FORMS):
        for verb, flags in (([sweep, train][number % 2], []), (train, ["--cfg", "job"])):
            with pytest.raises(ConfigError) as raised:
                verb(
                    [
                        "task=tiny",
                        "--config-dir",
                        CONF,
                        *flags,
                        form.format(f"task.options.{name}", VALUE),
                    ]
                )
            assert VALUE not in str(raised.value) and "\n" not in str(raised.value), form
            assert form.startswith("--") or "read it inside the task, as os.environ" in str(
                raised.value
            ), form
    with pytest.raises(ConfigError, match=r"^task\.options\..* is the name of a secret") as raised:
        load_config(*with_options(tmp_path, f"a: [{{'{name}': {VALUE}}}]"))
    assert VALUE not in str(raised.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [
        (f"https://me:{VALUE}@host/data", True),
        (f"s3://bucket/a?X-Amz-Date=1&X-Amz-Signature={VALUE}", True),
        (f"https://account.blob/a?sv=1&sig={VALUE}", True),
        (f"s3://KEY:ab/{VALUE}@bucket/x", True),
        (f"s3://bucket/x?password={VALUE}", True),
        (f"s3://bucket/x?a=b&secret_access_key={VALUE}", True),
        (f"https://host/x?api%5Fkey={VALUE}", True),
        ("https://host:8000/models@v1?key=train", False),
        ("https://me@host/data?versionId=1", False),
        ("tcp://10.0.0.1:29500", False),
        ("https://host/noise?sigma=0.1&design=a&signal=on", False),
    ],
)
def test_address_with_a_password_or_a_signature_is_refused(address, is_refused, tmp_path):
    given = with_options(tmp_path, f"url: '{address}'")
    if not is_refused:
        assert load_config(*given).task.options["url"] == address
        return
    told = r"^task\.options\.url: is an address with .* os\.environ\[\"URL\"\]$"
    with pytest.raises(ConfigError, match=told):
        load_config(*given)


ECHOED = [  # words that an error quotes before anybody looks for secrets in them
    ["checkpoint.mirror=s3://b/x?password=VALUE"],
    ["checkpoint.mirror=s3://KEY:VALUE@b/x"],
    ["task.options.hf_token=VALUE", "=", "1"],
    ["task.options.x={password: VALUE}"],
    ["task.options.x={password: VALUE", "-m"],
    ["hf_token=VALUE", "-m"],
    ["-m", "task.options.hf_token=VALUE"],
    ["--password=VALUE"],
    ["https://me:VALUE@host/x"],
]


@pytest.mark.parametrize("words", ECHOED, ids=[" ".join(words) for words in ECHOED])
@pytest.mark.parametrize("verb", ["trainer", "trainer.sweep", "trainer.list", "trainer.check"])
def test_an_error_that_quotes_its_arguments_hides_their_secrets(words, verb, command):
    done = command(*(word.replace("VALUE", VALUE) for word in words), "task=tiny", verb=verb)
    assert done.returncode == 2 and VALUE not in done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_masks_hide_secrets_and_nothing_else():
    assert masked("x=a1 is not a flag", ["token=a1"]) == "x=*** is not a flag"
    assert masked("a1 and token=a1", ["token=a1"]) == "a1 and token=***"  # too short for a word
    assert masked("no abcdef here", ["+x.password='abcdef'"]) == "no *** here"
    assert masked("{password: abcdef, lr: 1}", ["x={password: abcdef, lr: 1}"]) == (
        "{password: ***, lr: 1}"
    )
    assert masked("see s3://me:a/b@c/d?sig=1&x=2 at b@c") == "see s3://***@c/d?sig=***&x=2 at b@c"
    for text in ("optim.lr=0.1", "tcp://10.0.0.1:29500", "pad_token=<pad>", "token_dim=640000"):
        assert masked(f"error: {text}", [text]) == f"error: {text}"


@pytest.mark.parametrize("name", [*INNOCENT, "token_dim", "pad_token", "hf_token"])
def test_innocent_name_passes(name, tmp_path):
    value = {"token_dim": 64, "pad_token": "<pad>", "hf_token": "null"}.get(name, "abc")
    config = load_config(*with_options(tmp_path, f"{name}: {value}"))
    assert name in config.task.options


def test_secret_stands_in_no_file_of_a_run(command, tmp_path):
    task = "import os\nfrom tiny import Tiny\nclass Free(Tiny):\n    Options = None\n"
    task += "    def __init__(self, *given):\n        super().__init__(*given)\n"
    task += (
        "        from types import SimpleNamespace\n        self.options = "
        "SimpleNamespace(**self.options)\n"
    )
    task += f"        assert os.environ['HF_TOKEN'] == '{VALUE}'\n"
    (tmp_path / "free.py").write_text(task)
    words = [
        "--config-dir",
        CONF,
        "task=tiny",
        "task.trainer=free.Free",
        "run.name=a",
        "run.steps=2",
    ]
    for word in (
        f"+task.options.hf_token={VALUE}",
        f"+task.options={{hf_token: {VALUE}}}",
        f"--hf_token={VALUE}",
    ):
        done = command(*words, word)
        assert (
            done.returncode == 2
            and VALUE not in done.stdout + done.stderr
            and done.stderr.count("\n") == 1
        )
        assert not (tmp_path / "runs").exists()
    done = command(*words, "+task.options.mark=visible-mark", environment={"HF_TOKEN": VALUE})
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_bytes() for path in files_under(tmp_path / "runs")}
    assert not [name for name, data in made.items() if VALUE.encode() in data]
    assert {"config.json", "manifest.json"} <= {
        name for name, data in made.items() if b"visible-mark" in data
    }


# The run directory --------------------------------------------------------------------------------

PLANTED = [
    "metrics.jsonl",
    "config.json",
    "exit.json",
    ".metrics.jsonl.new",
    ".config.json.new",
    ".exit.json.new",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    fit_on(1, folder / "runs", "task=tiny", "run.steps=2")
    return folder / "runs"


def goes_on(folder):
    """Return the error that a resume of the run gives, or "" if it resumes."""
    try:
        fit(folder, "task=tiny", "run.resume=auto", "run.steps=4")
    except ConfigError as error:
        return str(error)
    return ""


PLANTS = [(name, "link") for name in [*PLANTED, ".writer", "checkpoints", "tensorboard"]]
PLANTS += [
    (n, k)
    for n in ("metrics.jsonl", ".config.json.new", "checkpoints")
    for k in ("dangling link", "pipe")
]


@pytest.mark.parametrize(("name", "kind"), PLANTS)
def test_planted_link_is_not_followed(name, kind, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs")
    place, canary = tmp_path / "runs/tiny/run" / name, tmp_path / "canary"
    is_folder = place.is_dir()
    if is_folder:
        place.rename(canary)
    elif kind == "link":
        canary.write_text('{"step": 0}\n')
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(canary if kind == "link" else tmp_path / "absent")
    before = {path: path.read_bytes() for path in [canary, *canary.rglob("*")] if path.is_file()}
    said = on_ranks(1, goes_on, tmp_path / "runs")[0]
    assert before == {
        path: path.read_bytes() for path in [canary, *canary.rglob("*")] if path.is_file()
    }
    assert not (tmp_path / "absent").exists()
    if name.endswith(".new"):
        assert said == "" and not place.is_symlink()
        return
    assert (
        "\n" not in said
        and f"{name} must be a plain {'folder' if is_folder else 'file'}, not a link; remove it"
        in said
    )


# Names --------------------------------------------------------------------------------------------

NASTY = {
    "\x1b[31m": "\\x1b[31m",
    "\r": "\\r",
    "\n": "\\n",
    "\x07": "\\x07",
    "\u202e": "\\u202e",
    "\u2066": "\\u2066",
}
NASTY |= {
    "\x9b2J": "\\x9b2J",
    "\u2028": "\\u2028",
    "\x00": "\\x00",
    "\udcff": "\\udcff",
    "[red]": "[red]",
    "é": "é",
}


@pytest.mark.parametrize(("name", "shown"), NASTY.items(), ids=map(ascii, NASTY))
def test_names_are_shown_and_not_obeyed(name, shown, tmp_path, capsys):
    console = Console()
    console.say(f"class a{name}b")
    console.table(("host",), [[f"c{name}d"]])
    out = capsys.readouterr().out
    assert f"class a{shown}b\n" in out and f"c{shown}d" in out
    assert name == shown or name == "\n" or name not in out


@pytest.mark.parametrize("name", ["\x1b[31m", "\r", "\n", "\x07", "\u202e"])
def test_error_line_shows_and_does_not_obey(name, command, tmp_path):
    done = command(*TINY, f"run.resume=no{name}where")
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and name not in done.stderr.rstrip("\n")
    ), done.stderr
    assert NASTY[name] in done.stderr or name in "\r\n", done.stderr
    (tmp_path / "task").mkdir()
    (tmp_path / f"task/a{name}b.yaml").touch()
    helped = command("--help", "--config-dir", str(tmp_path))
    assert f"a{NASTY[name]}b" in helped.stdout


# The code itself ----------------------------------------------------------------------------------

BANNED = {
    "eval",
    "exec",
    "compile",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "pickle.load",
    "pickle.loads",
}
BANNED |= {
    "pickle.Unpickler",
    "marshal.loads",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
}
OBJECTS = ("_object", "_object_list")


def banned(tree):
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        words = {word.arg: ast.unparse(word.value) for word in node.keywords} if called else {}
        if called in BANNED or called.endswith(OBJECTS) or words.get("shell", "False") != "False":
            yield node.lineno, called
        if called == "torch.load" and words.get("weights_only") != "True":
            yield node.lineno, called
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (
                (node.lineno, name)
                for name in names
                if name in ("pickle", "dill", "marshal", "shelve")
            )


def test_code_has_no_pickle_no_object_collectives_and_no_shell():
    paths = [
        path for folder in ("trainer", "tasks", "scripts") for path in (ROOT / folder).rglob("*.py")
    ]
    others = ("naive_ddp.py", "peers")  # written as users write their scripts
    found = [
        f"{path}:{line} {what}"
        for path in paths
        if not {path.name, path.parent.name} & {*others}
        for line, what in banned(ast.parse(path.read_text()))
    ]
    assert len(paths) > 30 and found == []


@pytest.mark.parametrize(
    "line",
    [
        *(
            "import pickle",
            "from pickle import loads",
            "pickle.loads(x)",
            "torch.load(x)",
            "torch.load(x, weights_only=False)",
        ),
        *(
            "dist.broadcast_object_list(x)",
            "dist.all_gather_object(x, y)",
            "torch.distributed.gather_object(x)",
            "eval(x)",
        ),
        *(
            "dist.scatter_object_list(x, y)",
            "subprocess.run(x, shell=True)",
            "os.system(x)",
            "exec(x)",
            "yaml.load(x)",
        ),
    ],
)
def test_check_of_the_code_finds_violations(line):
    assert list(banned(ast.parse(line)))
