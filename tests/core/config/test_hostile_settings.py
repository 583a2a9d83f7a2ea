"""Settings that would take minutes or the memory, or are no settings: one line, soon."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from harness import CONF
from omegaconf import OmegaConf

from trainer import ConfigError, load_config
from trainer.base.plain_files import MOST_OF_YAML
from trainer.core.config.compose import MOST_WORDS, load_run_config, parse
from trainer.core.config.saved_config import format_config
from trainer.core.config.targets import check_override, masked
from trainer.core.config.working_folder import read_settings

HEAD = "# @package _global_\ntask:\n  name: a\n  trainer: tiny.Tiny\n  options:\n"
SOON_S = 15.0  # of this process; each took over 25 s, or did not end


def chain(entry, last="x", length=30):
    """Return options a0, a1, ..., where each names the next one in `entry`."""
    lines = [f"    a{i}: {entry.replace('KEY', f'task.options.a{i + 1}')}" for i in range(length)]
    return "\n".join([*lines, f"    a{length}: {last}", ""])


# Options of a task whose interpolations would become gigabytes.
DOUBLING = {
    "strings": chain("${KEY}${KEY}"),
    "lists": chain('["${KEY}", "${KEY}"]'),
    "mappings": chain('{a: "${KEY}", b: "${KEY}"}'),
    "a resolver": chain('["${oc.select:KEY}", "${oc.select:KEY}"]'),
    "values of mappings": chain(
        '{x: "${oc.dict.values:KEY}", y: "${oc.dict.values:KEY}"}', "{z: 1}"
    ),
    "one long list": f"    big: [{','.join(['1'] * 15_000)}]\n"
    + "".join(f"    b{i}: ${{task.options.big}}\n" for i in range(500)),
    "one long string": f"    big: {'x' * 200_000}\n"
    + "".join(f"    b{i}: ${{task.options.big}}\n" for i in range(500)),
}


@pytest.fixture
def of_file(tmp_path):
    """Return a function that writes conf/task/a.yaml and loads it."""
    (tmp_path / "task").mkdir()

    def load(text, *words):
        path = tmp_path / "task/a.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(["task=a", *words], [str(tmp_path)])

    return load


@pytest.mark.parametrize("name", DOUBLING)
def test_interpolations_that_grow_are_counted_like_aliases(name, of_file):
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"^the interpolations \$\{\.\.\.\} become more than 20,"):
        of_file(HEAD + DOUBLING[name])
    assert time.process_time() - begun < SOON_S


def test_interpolations_of_the_command_line_are_counted_too():
    words = [
        f"+task.options.a{i}='${{task.options.a{i + 1}}}${{task.options.a{i + 1}}}'"
        for i in range(24)
    ]
    with pytest.raises(ConfigError, match=r"^the interpolations \$\{\.\.\.\} become more than 20,"):
        load_config(["task=text", *words, "+task.options.a15=x", "task.options.a0=2"])


def test_a_thousand_interpolations_are_settings_and_only_ours_are_counted(of_file):
    lines = "".join(f"    a{i}: ${{task.options.b}}\n" for i in range(1000))
    config = of_file(f"{HEAD}    b: c\n{lines}")
    assert config.task.options["a999"] == "c"
    many = OmegaConf.create({"b": "c", "a": ["${b}"] * 4_100})  # a user's own, elsewhere
    assert len(OmegaConf.to_container(many, resolve=True)["a"]) == 4_100
    assert of_file(HEAD + chain("${KEY}", length=20)).task.options["a0"] == "x"
    with pytest.raises(ConfigError, match=r"^task\.options\.a\d+: interpolations lead too "):
        of_file(HEAD + chain("${KEY}", length=300))


def test_threads_that_load_settings_count_their_own(of_file):
    with pytest.raises(ConfigError, match="more than 20,000 values"):
        of_file(HEAD + DOUBLING["lists"])
    with ThreadPoolExecutor(4) as pool:
        ends = [*pool.map(lambda _: load_config(["task=text"]).task.name, range(8))]
    assert ends == ["text"] * 8


@pytest.mark.parametrize(
    "word", ["{" + "a" * 100_000, "://a:" * 20_000, "?" * 100_000, "{a" + " " * 100_000]
)
def test_a_long_word_is_searched_for_secrets_in_time_that_grows_with_its_length(word):
    begun = time.process_time()
    masked(word, [f"task.options.x={word}"])
    with suppress(ConfigError):
        check_override(f"task.options.x={word}")
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("text", ["5", "true", "1.5", "!!set {a, b}", "!!binary aGVsbG8="])
def test_a_task_file_without_settings_is_one_line(text, of_file, tmp_path):
    with pytest.raises(ConfigError) as error:
        of_file(text)
    assert str(error.value).startswith(
        f"{tmp_path}/task/a.yaml: must be settings, as in 'key: value'"
    )


@pytest.mark.parametrize("text", ["hello", "- a", "", "null", "a: 1\n---\nb: 2", "2020-01-01"])
def test_a_task_file_with_other_values_is_one_line(text, of_file):
    with pytest.raises(ConfigError) as error:
        of_file(text)
    assert "\n" not in str(error.value)


def test_a_file_is_measured_before_it_is_read(of_file, tmp_path):
    """30 MB took 43 s until the limit was told."""
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"task/a\.yaml: has 30,000,076 bytes, at most 262,144 "):
        of_file(f"{HEAD}    a: {'x' * 30_000_000}\n")
    assert time.process_time() - begun < 5
    comment = "# " + "x" * (MOST_OF_YAML - len(HEAD) - 4)
    assert of_file(f"{HEAD}    b: 1\n{comment}"[:MOST_OF_YAML]).task.options["b"] == 1
    for name, size in (("lockstep.yaml", 2**18), ("pyproject.toml", 2**20)):
        (tmp_path / name).write_bytes(b"#" * (size + 1))
        with pytest.raises(
            ConfigError, match=rf"^{name} cannot be read: .*{size + 1:,} bytes, at "
        ):
            read_settings(tmp_path)
        (tmp_path / name).write_bytes(b"#" * size)
        read_settings(tmp_path)
        (tmp_path / name).unlink()


def test_a_task_file_may_be_a_link(of_file, tmp_path):
    (tmp_path / "real").write_text(HEAD + "    b: 1\n")
    (tmp_path / "task/linked.yaml").symlink_to(tmp_path / "real")
    (tmp_path / "lockstep.yaml").symlink_to(tmp_path / "more")
    (tmp_path / "more").write_text("packages: [mine]\n")
    assert load_config(["task=linked"], [str(tmp_path)]).task.options == {"b": 1}
    assert read_settings(tmp_path).packages == ["mine"]


LONG = {
    "a list": (f"eval.splits=[{','.join(f's{i}' for i in range(20_000))}]", "at most 2,000 values"),
    "a mapping": (
        f"task.options.x={{{','.join(f'a{i}:1' for i in range(5_000))}}}",
        "at most 2,000 v",
    ),
    "a choice": (f"optim.lr={','.join(['1'] * 20_000)}", "at most 2,000 values"),
    "brackets": (f"task.options.x={'[' * 60_000}", "nested more than 64 deep"),
    "calls": (f"task.options.x={'int(' * 65}", "nested more than 64 deep"),
}


@pytest.mark.parametrize("name", LONG)
def test_an_override_that_takes_minutes_to_parse_is_refused_at_once(name):
    word, reason = LONG[name]
    begun = time.process_time()
    with pytest.raises(ConfigError) as error:
        load_config(["task=text", word])
    assert time.process_time() - begun < 5
    key = word.partition("=")[0]
    assert str(error.value).startswith(f"{key}: ") and reason in str(error.value)
    assert len(str(error.value)) < 200


def test_an_override_of_as_many_values_as_allowed_is_read():
    values = ",".join(["1"] * MOST_WORDS)
    assert len(parse([f"task.options.x=[{values}]"])[0].value()) == MOST_WORDS
    deep = "[" * 64 + "]" * 64
    parse([f"task.options.x={deep}"])
    with pytest.raises(ConfigError, match="must be at most 2,000 values"):
        parse([f"task.options.x=[{values},1]"])
    with pytest.raises(ConfigError, match="nested more than 64 deep"):
        parse([f"task.options.x=[{deep}]"])
    many = ",".join(["[1,2]"] * 100)  # many brackets, none deep
    assert len(parse([f"task.options.x=[{many}]"])[0].value()) == 100


@pytest.mark.parametrize("text", ["a, " * 3_000, "(" * 70 + ")" * 70, "[it\\'s, " * 3_000])
@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_quoted_string_is_one_value_whatever_it_contains(text, quote):
    text = text.strip()
    (parsed,) = parse([f"task.options.x={quote}{text}{quote}"])
    assert parsed.value().startswith(text[:3]) and len(parsed.value()) > 100


def test_a_quoted_interpolation_is_parsed_and_has_limits():
    with pytest.raises(ConfigError, match="must be at most 2,000 values"):
        parse([f"task.options.x='${{oc.create:[{'1,' * MOST_WORDS}1]}}'"])


def test_list_shows_the_tasks_beside_folders_pipes_and_links_of_that_name(command, tmp_path):
    (tmp_path / "conf/task/folder.yaml").mkdir(parents=True)
    os.mkfifo(tmp_path / "conf/task/pipe.yaml")
    (tmp_path / "conf/task/loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "conf/task/zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "conf/task/good.yaml").write_text("# What it learns. And how.\na: 1\n")
    code, out, err = command("tasks", "--config-dir", "conf", verb="trainer.list", limit_s=20)
    assert code == 0, err
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["good"] == ["What", "it", "learns"] and rows["folder"] == rows["pipe"] == []
    assert CONF and "cifar" in rows


LONG_NAME = "x" * 300
LONG_PATH = "y/" * 2500
PATHS = [  # verb, words: each path setting that the settings' own rules do not see first
    ("trainer.list", ["runs", "run.dir=PATH"]),
    ("trainer", ["run.resume=PATH"]),
    ("trainer", ["run.resume=PATH/checkpoints/step-00000001"]),
    ("trainer", ["task=text", "run.init_from=PATH"]),
    ("trainer", ["task=text", "--config-dir", "PATH"]),
    ("trainer", ["task=images", "task.options.data=PATH"]),
    ("trainer.show", ["PATH"]),
    ("trainer.shards", ["index", "PATH"]),
    ("trainer.new", ["PATH/my-task"]),
]


@pytest.mark.parametrize("path", [LONG_NAME, LONG_PATH], ids=["name", "path"])
@pytest.mark.parametrize(("verb", "words"), PATHS, ids=[" ".join([v, *w]) for v, w in PATHS])
def test_a_path_that_no_file_system_has_is_one_line(verb, words, path, command):
    done = command(*(word.replace("PATH", path) for word in words), verb=verb)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr and len(done.stderr) < 2500


def test_a_folder_that_is_none_or_in_a_circle_of_links_is_one_line(command, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"^run\.resume=a.*: must have printable characters only"):
        load_config(["run.resume=a\0b"])
    done = command("runs", "run.dir=loop/x", verb="trainer.list")
    assert "Traceback" not in done.stderr
    (tmp_path / "file").touch()
    done = command("runs", "run.dir=file", verb="trainer.list")
    line = "error: run.dir=file: is not a directory; give the folder of the runs\n"
    assert (done.returncode, done.stderr) == (2, line)
    assert command("runs", "run.dir=none", verb="trainer.list").stdout == "runs: none\n"


def test_an_error_of_the_kernel_that_is_no_path_stays_a_traceback(command, tmp_path):
    """Only what is certainly a wrong path is one: a task's other errors keep their frames."""
    (tmp_path / "bad.py").write_text(
        "from tiny import Tiny\n"
        "class Full(Tiny):\n"
        "    def build_dataset(self, split):\n"
        "        raise OSError(28, 'No space left on device', 'x')\n"
        "class Long(Tiny):\n"
        "    def build_dataset(self, split):\n"
        "        open('z' * 300)\n"
        "class Nul(Tiny):\n"
        "    def build_dataset(self, split):\n"
        "        open('a\\0b')\n"
    )
    words = ["--config-dir", CONF, "task=tiny", "run.name=a"]
    done = command(*words, "task.trainer=bad.Full")
    assert done.returncode == 1 and "bad.py" in done.stderr
    done = command(*words, "task.trainer=bad.Long")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "File name too long; give another path" in done.stderr
    done = command(*words, "task.trainer=bad.Nul")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "a path has a NUL character: " in done.stderr and "bad.py:10)" in done.stderr


def test_hydras_help_is_no_flag_here(command):
    """It was allowed, and ended with "Could not override 'task'"."""
    for verb in ("trainer", "trainer.sweep"):
        done = command("task=text", "--hydra-help", verb=verb)
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith("error: --hydra-help is not a flag: allowed are --config-dir")


def test_words_that_an_error_tells_to_give_are_quoted(tmp_path):
    """The names are those of somebody else's run directory."""
    config = load_config(["task=text"])
    settings = config.plain()
    settings["task"] |= {"trainer": "a$(id).b", "packages": ["x;y", "z"]}
    (tmp_path / "config.json").write_text(format_config(settings))
    with pytest.raises(
        ConfigError, match=r"give '(task\.trainer=a\$\(id\)\.b|task\.packages=.*)' if"
    ):
        load_run_config(str(tmp_path), [])
