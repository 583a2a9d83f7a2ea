"""Chats, templates and tokenizers that mean harm or are damaged: one line, soon, in little room."""

import gzip
import json
import os
import signal
import time
from pathlib import Path

import pytest
from harness import on_ranks

pytest.importorskip("transformers")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # it is a thread

from test_chat import (  # noqa: E402
    CHATML,
    GOOD,
    SHARED,
    build_tokenizer,
    content,
    opened,
    refused,
    rows_of,
    said,
    write,
)
from tokenizers import Regex, Tokenizer, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from trainer import ConfigError, RunError  # noqa: E402
from trainer.hf import file_digests as digests  # noqa: E402
from trainer.hf.chat import Chats, parquet_rows, rows, template, token_store  # noqa: E402
from trainer.shards import long_work  # noqa: E402
from trainer.shards.formats.parquet import ParquetShard  # noqa: E402
from trainer.shards.formats.shard_parts import FileBytes  # noqa: E402


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def left_in(folder):
    """Return what is in the folder of stores beside whole ones."""
    return sorted(path.name for path in (folder / "cache/chat").iterdir() if path.name != ".lock")


def refusal_of(data, **options):
    begun = time.monotonic()
    with pytest.raises(ConfigError) as error:
        Chats(str(data), SHARED, 64, **options).prepare()
    text = str(error.value)
    assert "\n" not in text and time.monotonic() - begun < 10
    return text.removeprefix(f"task.options.data={data}: ")


# Templates ----------------------------------------------------------------------------------------

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    "text", [LOOP, "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}"]
)
def test_a_template_without_an_end_is_one_line(text, tmp_path, monkeypatch):
    monkeypatch.setattr(long_work, "IDLE_S", 0.5)
    tokenizer = build_tokenizer(template=CHATML + text)
    bad = {"messages": said("loop", "four")}
    where = "the chat template of the model" if text == LOOP else "chat.jsonl:2"
    assert refused(tmp_path, GOOD, bad, GOOD, tokenizer=tokenizer) == (
        f"making tokens of chat.jsonl takes more than 0 s at {where}; "
        "remove what is there, or mend it"
    )
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("text", [DOUBLED, "{{ 'a' * 3000000000 }}", "{{ 'a'.ljust(3000000000) }}"])
def test_a_template_that_fills_the_memory_is_one_line(text, tmp_path, monkeypatch):
    monkeypatch.setattr(long_work, "MOST_MEMORY", 2**28)
    tokenizer = build_tokenizer(template=CHATML + text)
    refusal = refused(tmp_path, GOOD, tokenizer=tokenizer)
    assert "takes more than 0.2 GiB of memory at the chat template of the model" in refusal
    assert left_in(tmp_path) == []


def test_a_template_that_writes_without_measure_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(template, "MOST_RENDERED", 1000)
    long = "{% if messages[0].content == 'long' %}{{ 'word ' * 300 }}{% endif %}"
    tokenizer = build_tokenizer(template=CHATML + long)
    bad = {"messages": said("long", "four")}
    assert refused(tmp_path, GOOD, bad, tokenizer=tokenizer) == (
        "1 row of which the chat template makes more than 1,000 characters (chat.jsonl:2); "
        "remove it, or take a model with another template"
    )


@pytest.mark.parametrize("ranks", [0, 2])
def test_ctrl_c_ends_a_start_that_makes_tokens_at_once(ranks, tmp_path, command):
    """The handler notes the request, which nothing looked for before the first step."""
    from trainer.tasks.lm import build_llama, build_tokenizer

    folder = tmp_path / "model"
    tokenizer = build_tokenizer()
    sizes = type("Sizes", (), {"width": 16, "layers": 1, "heads": 2, "context": 64})
    build_llama(sizes, tokenizer).save_pretrained(folder)
    tokenizer.chat_template = CHATML + LOOP
    tokenizer.save_pretrained(folder)
    data = write(tmp_path / "chat.jsonl", GOOD)
    words = ["task=lm", f"task.options.data={data}", f"task.options.model={folder}"]
    process = command.start(*words, "task.options.context=64", ranks=ranks, is_session=True)
    try:
        end = time.monotonic() + 60
        while "making tokens" not in process.read()[1]:  # shown after two seconds
            assert process.poll() is None and time.monotonic() < end, process.read()
            time.sleep(0.05)
        begun = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
        assert time.monotonic() - begun < 5
    finally:
        process.kill()
    err = process.read()[1]
    assert f"making tokens of {data}: 1 rows so far ..." in err
    line = f"error: asked to stop (SIGINT) while making tokens of {data}; nothing was saved\n"
    assert process.returncode == 1 and line in err, err
    assert "Traceback" not in err


# Tokenizers ---------------------------------------------------------------------------------------


def test_a_pattern_that_panics_is_one_line(tmp_path, capfd):
    """Rust wrote the stack of each thread, 1 MB of it."""
    backend = Tokenizer.from_str(SHARED.backend_tokenizer.to_str())
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False)])
    words = {"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, **words)
    bad = {"messages": said("a" * 60 + "b", "four")}
    text = refused(tmp_path, GOOD, bad, GOOD, bad, tokenizer=tokenizer)
    assert text.startswith("2 rows of which the tokenizer makes no tokens (PanicException: ")
    assert text.endswith(
        " (the first is chat.jsonl:2); remove it, or take a model with another tokenizer"
    )
    assert capfd.readouterr().err == ""


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a" * 300 + ".jsonl", "cannot be read (File name too long); give another name"),
        ("b/" * 2500, "cannot be read (File name too long); give another name"),
        ("a\0b", "cannot be read (embedded null byte); give another name"),
        ("loop.jsonl", "cannot be read (Too many levels of symbolic links); give another name"),
        ("pipe.jsonl", "is a pipe or a device; must be a file, folder or glob of .jsonl, "),
        ("/dev/zero", "is a pipe or a device; must be a file, folder or glob of .jsonl, "),
        ("file/x.jsonl", "does not exist; must be"),
        (" ", "must be a file, a folder or a glob; null is the default data"),
        ("folder", "{folder}/pipe.jsonl is a pipe or a device; remove it"),
        ("fold*/*.jsonl", "{folder}/pipe.jsonl is a pipe or a device; remove it"),
        ("loops", "{loops}/loop.jsonl: cannot be read (Too many levels of symbolic links); give"),
    ],
)
def test_a_name_that_is_no_data_is_one_line(name, why, tmp_path, monkeypatch):
    """A pipe was told as absent, with its own name as the nearest one."""
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "loops"):
        Path(folder).mkdir()
    for path in ("pipe.jsonl", "folder/pipe.jsonl"):
        os.mkfifo(path)
    for path in ("loop.jsonl", "loops/loop.jsonl"):
        Path(path).symlink_to("loop.jsonl")
    Path("file").touch()
    assert refusal_of(name).startswith(why.format(folder="folder", loops="loops"))


def test_a_search_that_has_no_end_is_one_line(tmp_path, monkeypatch):
    """Links make folders without number."""
    (tmp_path / "deep").mkdir()
    for name in "abc":
        (tmp_path / "deep" / name).symlink_to(".")
    (tmp_path / "deep/x.jsonl").touch()
    monkeypatch.setattr(long_work, "IDLE_S", 0.5)
    text = refusal_of(tmp_path / "deep/**/y*.jsonl")
    assert text == (
        "looking for its files takes more than 0 s at its start; "
        "remove what is there, or give a narrower glob"
    )
    monkeypatch.setattr(rows, "MOST_FOUND", 1000)
    text = refusal_of(tmp_path / "deep/**/x*.jsonl")
    assert text == "has more than 1,000 names; give a folder or a glob of fewer"


def test_a_name_twice_in_an_object_is_named(tmp_path):
    """The last one counted."""
    one = '{"messages": [{"role": "user", "content": "two", "content": "four"}, '
    rest = '{"role": "assistant", "content": "four"}]}'
    assert refused(tmp_path, GOOD, one + rest) == (
        "1 row with the name 'content' twice in an object (chat.jsonl:2); keep one of both values"
    )


def test_rows_of_any_number_that_cannot_be_used_end_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "MOST_FLAWED", 3)
    text = refused(tmp_path, GOOD, *['{"x": 1}'] * 9)
    assert text.startswith("3 rows without such columns: x (the first is chat.jsonl:2); must have")


def test_what_unpacks_to_many_times_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "FREE_UNPACKED_BYTES", 2**18)
    for name, line in (("blank", b"\n"), ("long", b"x" * 2**18), ("rows", b'{"text": "a"}\n')):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(gzip.compress(line * (2**22 // len(line))))
        problem = f"{path} cannot be read (it unpacks to more than 200 times its size); write"
        assert refusal_of(path).startswith(problem)


# Parquet ------------------------------------------------------------------------------------------

BIG = "x" * 3_000_000


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a table of Parquet, and its path."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"

    def write_table(columns, types=(), **options):
        columns = {n: pyarrow.array(v, dict(types).get(n)) for n, v in columns.items()}
        parquet.write_table(pyarrow.table(columns), path, compression="zstd", **options)
        return path

    return write_table


def test_a_long_value_of_parquet_is_refused_as_a_long_line_is(written):
    """It was made Python's 256 times at once: 30 kB took 12 GB."""
    turn = said("two", BIG)
    for columns in (
        {"text": ["two", BIG, BIG]},
        {"messages": [said("two", "four"), turn, turn]},
        {"prompt": ["two"] * 3, "completion": ["four", BIG, BIG]},
    ):
        path = written(columns)
        assert path.stat().st_size < 10_000
        assert refusal_of(path) == (
            f"2 rows longer than 2,097,152 bytes (the first is {path} row 2); divide or remove it"
        )


def test_a_value_that_many_rows_share_takes_its_room_once(written, monkeypatch):
    monkeypatch.setattr(long_work, "MOST_MEMORY", 2**27)
    path = written({"text": ["two " * 450_000] * 150})  # 270 MB

    def read(tell):
        return sum(len(values["text"]) for _, _, values in parquet_rows.read_parquet(path, 2**21))

    assert long_work.run_apart(read, "reading", "rows", "x") == 270_000_000


def test_a_file_that_unpacks_to_far_more_is_refused_before_it_is_read(written, monkeypatch):
    """By its metadata, for chats and for shards."""
    pyarrow = pytest.importorskip("pyarrow")
    turns = pyarrow.list_(pyarrow.struct([("role", pyarrow.string())]))
    for columns, types, why in (
        (
            {"text": [BIG + str(n) for n in range(100)]},
            {},
            "its row group 0 has 300,0.* bytes when it is unpacked, at most 268,435,456 are read",
        ),
        (
            {"messages": [[None] * 20_000_000]},
            {"messages": turns},
            "its column messages.list.element.role has 20,000,000 values in .. bytes; write small",
        ),
    ):
        path = written(columns, types)
        assert path.stat().st_size < 60_000
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=why):
            Chats(str(path), SHARED, 64).prepare()
        with pytest.raises(ValueError, match=why.replace(" ", r"\s+")):
            ParquetShard(FileBytes(path), {}, len(next(iter(columns.values()))), None)
        assert time.monotonic() - begun < 10


def test_shards_of_parquet_share_values_and_read_the_same(written):
    rows = [{"text": "two" * (n % 3), "n": n, "parts": [{"a": "x", "b": n}]} for n in range(50)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    path = written(columns, row_group_size=20)
    shard = ParquetShard(FileBytes(path), {}, 50, None)
    assert [shard[n] for n in range(50)] == rows
    some = ParquetShard(FileBytes(path), {"columns": ["n"]}, 50, None)
    assert some[49] == {"n": 49}


def test_sizes_are_those_of_each_value():
    pyarrow = pytest.importorskip("pyarrow")
    turns = [[{"role": "user", "content": "abc"}], None, [], [{"role": "é", "content": None}] * 2]
    pairs = [[("ab", "c")], None, [("d", "e"), ("f", "")]]
    for values, sizes in (
        (pyarrow.array(["", "abc", None, "é"]), [0, 3, 0, 2]),
        (pyarrow.array(["ab", "ab", None, "c"]).dictionary_encode(), [2, 2, 0, 1]),
        (pyarrow.array([b"ab", None], pyarrow.large_binary()), [2, 0]),
        (pyarrow.array(turns), [8, 0, 0, 6]),
        (pyarrow.array(turns)[1:], [0, 0, 6]),
        (pyarrow.array([1, None]), [8, 8]),
        (pyarrow.array([["a"], ["b"]], pyarrow.list_(pyarrow.string(), 1)), [2, 2]),
        (pyarrow.array(pairs, pyarrow.map_(pyarrow.string(), pyarrow.string())), [4, 0, 5]),
    ):
        assert parquet_rows.sizes_of(values).tolist() == sizes, values.type
    odd = pyarrow.array([[1]], pyarrow.list_view(pyarrow.int64()))
    with pytest.raises(ValueError, match=r"it has values of the type list_view<.*>, which is not"):
        parquet_rows.sizes_of(odd)


# The cache ----------------------------------------------------------------------------------------


def make(data):
    Chats(data, SHARED, 64).prepare()
    return Chats(data, SHARED, 64).open("train").digest


def test_of_two_processes_that_find_a_damaged_store_none_takes_the_others_away(
    tmp_path, monkeypatch
):
    """The slower one renamed the good folder of the faster one away, with its readers."""
    data = write(tmp_path / "chat.jsonl", *rows_of(5))
    digest = make(data)
    (folder,) = (path for path in (tmp_path / "cache/chat").iterdir() if path.is_dir())
    (folder / "tokens").write_bytes(b"damaged")
    made = token_store._make
    seen = []

    def make_late(folder, fill):
        def fill_late(scratch):
            facts = fill(scratch)
            if not seen:
                seen.append(0)
                assert make(data) == digest  # the other process
                seen.append((folder / "tokens").stat().st_ino)
            return facts

        made(folder, fill_late)

    monkeypatch.setattr(token_store, "_make", make_late)
    assert make(data) == digest
    assert (folder / "tokens").stat().st_ino == seen[1]
    assert left_in(tmp_path) == [folder.name]


def test_what_a_killed_process_has_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    data = write(tmp_path / "chat.jsonl", *rows_of(5))
    make(data)
    (folder,) = (path for path in (tmp_path / "cache/chat").iterdir() if path.is_dir())
    left, alive = (folder.with_name(f".{folder.name}.{name}") for name in ("left", "alive"))
    for path in (left, alive):
        path.mkdir()
        (path / "tokens").write_bytes(b"half")
    (folder / "tokens").write_bytes(b"damaged")
    with token_store._locked(alive):
        make(data)
    assert left_in(tmp_path) == sorted([alive.name, folder.name])


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    data = write(tmp_path / "chat.jsonl", *rows_of(5))

    def fail(self, *arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(token_store._Writer, "_write", fail)
        with pytest.raises(RunError, match=r"cannot be written \(No space left on device\); set L"):
            make(data)
    assert left_in(tmp_path) == []
    path = tmp_path / "notes/a"
    with pytest.raises(OSError, match="No space left"):
        digests.write_whole(path, lambda staged: (staged.write_text("half"), fail(None)))
    assert list(path.parent.iterdir()) == []


def test_a_note_of_a_digest_is_that_of_these_bytes(tmp_path):
    """A copy, or a touch, keeps size and time."""
    path = tmp_path / "a.jsonl"
    path.write_text("two")
    os.utime(path, (1e9, 1e9))
    first = digests.digest_files([path])
    path.write_text("six")
    os.utime(path, (1e9, 1e9))
    assert digests.digest_files([path]) != first
    path.write_text("two")
    assert digests.digest_files([path]) == first
    notes = [*(tmp_path / "cache/digests").iterdir()]
    for note in notes:
        note.write_text("wrong")
    assert digests.digest_files([path]) == "wrong"  # it is read, and not the file
    assert digests.digest_files([path], is_verified=True) == first
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        digests.digest_files([tmp_path / "pipe"], is_verified=True)


def test_two_ranks_find_the_same_files(tmp_path):
    (tmp_path / "d").mkdir()
    for number in range(3):
        write(tmp_path / f"d/{number}.jsonl", *rows_of(number + 1))
    one, two = on_ranks(2, lambda: make(str(tmp_path / "d/**/*.jsonl")))
    assert one == two == make(str(tmp_path / "d"))
    assert len(content(opened(tmp_path, *rows_of(2)))) == 2
    assert json.loads((tmp_path / "chat.jsonl").read_text().splitlines()[0])
