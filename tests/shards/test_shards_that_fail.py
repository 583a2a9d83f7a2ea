"""Damaged and endless shards, folders open to others, held locks: a run stays right or ends."""

import bz2
import fcntl
import gzip
import os
import resource
import shutil
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import get_context

import pytest
from harness import CONF, wait_for
from harness.shard_rows import rows
from harness.shard_server import serving
from safetensors.torch import save_file
from test_shards_of_others import mds

from trainer import ConfigError, RunError, ShardedDataset
from trainer.shards import download, sources
from trainer.shards.__main__ import write_index, write_shards
from trainer.shards.index import ShardIndex, load_index
from trainer.shards.sources import LocalSource


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """203 examples in 29 shards."""
    place = tmp_path_factory.mktemp("shards") / "data"
    write_shards(rows(), str(place), 600, 0)
    return place


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(download, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(download, "MOST_DELAY_S", 0.02)
    monkeypatch.setattr(sources, "ANNOUNCED_WAIT_S", 0.2)
    monkeypatch.setattr(sources, "_announced", set())
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


def check_rows(url, count=7, **options):
    """Check the first shard; return the data set."""
    found, data = ShardedDataset(url, **options), rows()
    for index in range(count):
        inputs, label = found[index]
        assert inputs.equal(data[index][0]) and label == data[index][1]
    return found


def cache_of(url):
    """Return the folder of a cache, and the name of its first shard in it."""
    cache = ShardedDataset(url).cache
    return cache.folder, cache.path(0).name


def no_digests(folder, place, sizes=True):
    """Copy a folder of shards; its index has no digests, and perhaps no sizes."""
    shutil.copytree(folder, place)
    index = load_index(LocalSource(place))
    names = [index.name(shard) for shard in range(len(index))]
    known = index.sizes.tolist() if sizes else [-1] * len(index)
    parts = (names, index.rows.tolist(), known, [bytes(32)] * len(index))
    made = ShardIndex.of("mds", index.settings, *parts)
    (place / "lockstep.index").write_bytes(made.to_bytes())
    return place


# Folders of caches --------------------------------------------------------------------------------


def mode_of(path):
    return path.stat().st_mode & 0o7777


def test_a_cache_is_made_for_its_user_only_also_after_it_was_deleted(server, tmp_path):
    parent = tmp_path / "for_all"
    parent.mkdir()
    parent.chmod(0o1777)
    dataset = check_rows(server.url, cache=parent / "mine")
    shutil.rmtree(parent / "mine")
    check_rows(server.url, cache=parent / "mine")
    dataset[7]
    assert mode_of(parent / "mine") == mode_of(dataset.cache.folder) == 0o700


@pytest.mark.parametrize("mode", [0o775, 0o702, 0o1777])
def test_a_cache_that_other_users_may_write_to_is_refused(mode, server, tmp_path):
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        ShardedDataset(server.url, cache=place)
    assert str(caught.value) == (
        f"cache={place}: has mode {mode:o}, so other users may write to it, and must be private;"
        f" chmod 700 {place}, or give another folder, such as cache={place}/mine"
    )
    assert [*place.iterdir()] == []
    check_rows(server.url, cache=place / "mine")
    place.chmod(0o700)
    check_rows(server.url, cache=place)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_cache_of_another_user_is_refused(is_link, server, tmp_path, monkeypatch):
    place = tmp_path / "cache"
    if is_link:
        (tmp_path / "disk").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "disk")
    else:
        place.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError) as caught:
        ShardedDataset(server.url)
    assert str(caught.value) == (
        f"cache={place}: belongs to user {owner}, and must belong to user {owner + 1}, who runs"
        f" this; give another folder, such as cache=/tmp/shards-{owner + 1}"
    )
    assert [*place.iterdir()] == []


def test_the_folder_of_all_caches_may_be_a_link(server, tmp_path):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    check_rows(server.url)
    assert [*(tmp_path / "disk").rglob("*.mds")]


def test_files_that_others_name_alike_count_for_nothing(server):
    place, name = cache_of(server.url)
    others = ("00000001-evil", "00000001-evil.part", f"{name}.raw.raw", "٣-x", "9" * 250)
    for other in others:
        sparse(place / other, None)
    check_rows(server.url, 203, cache_bytes=1300)
    assert all((place / other).exists() for other in others)


def pipe(path, _):
    os.mkfifo(path)


def empty_folder(path, _):
    path.mkdir()


def sparse(path, _):
    path.touch()
    os.truncate(path, 2**42)


# Bytes that have changed --------------------------------------------------------------------------


def flip(path):
    """Change a bit, and nothing that `stat` shows but the time of change."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("has_digests", [True, False])
def test_a_flipped_bit_in_a_cached_shard_that_keeps_its_time_is_fetched_again(
    has_digests, folder, tmp_path
):
    data = folder if has_digests else no_digests(folder, tmp_path / "data")
    with serving(data) as server:
        dataset = check_rows(server.url)
        flip(dataset.cache.path(0))
        check_rows(server.url)
        server.sent.clear()
        check_rows(server.url)
        assert server.sent.get("shard.00000.mds") is None
        flip(dataset.cache.path(0))  # of a run that has the file open
        data = rows()
        assert all(dataset[index][0].equal(data[index][0]) for index in range(7))


def test_a_flipped_bit_in_a_decompressed_shard_is_decompressed_again(tmp_path):
    def opened():
        return mds(tmp_path, "str", [b"a" * 40], "bz2", bz2.compress)

    flip_of = opened()
    assert flip_of[0] == {"x": "a" * 40}
    flip(flip_of.cache.path(0))
    assert opened()[0] == {"x": "a" * 40}


def test_a_flipped_bit_in_a_folder_that_keeps_its_time_is_named_at_the_next_start(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "data")
    check_rows(tmp_path / "data")
    flip(tmp_path / "data/shard.00000.mds")
    with pytest.raises(RunError, match="has another SHA-256 than in its index; restore it"):
        check_rows(tmp_path / "data")


def test_a_shard_is_hashed_once_a_start_also_in_workers(folder, tmp_path, monkeypatch):
    from trainer.shards import cache

    done = tmp_path / "done"
    real = cache.digest_file

    def note(*given):
        with open(done, "a") as file:
            file.write(".")
        return real(*given)

    monkeypatch.setattr(cache, "digest_file", note)
    dataset = ShardedDataset(folder)
    for _ in range(3):
        process = get_context("fork").Process(target=dataset.__getitem__, args=(0,))
        process.start()
        process.join()
    dataset[0]
    assert done.read_text() == "."


# Bytes without end --------------------------------------------------------------------------------


def most_on_disk(place, action):
    """Return the most bytes that a folder had while `action` ran, and its error."""
    found = []
    thread = threading.Thread(target=lambda: found.append(error_of(action)))
    thread.start()
    highest = 0
    while thread.is_alive():
        sizes = [0]
        for path in place.rglob("*"):
            with suppress(OSError):
                sizes.append(path.lstat().st_size * path.is_file())
        highest = max(highest, sum(sizes))
    return highest, found[0]


def error_of(action):
    try:
        action()
    except Exception as error:
        return error
    return None


def zstd(data):
    return pytest.importorskip("zstandard").compress(data)


@pytest.mark.parametrize(
    ("name", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("zstd", zstd)]
)
def test_a_shard_that_decompresses_to_more_than_the_cache_ends_within_its_bytes(
    name, pack, tmp_path
):
    mds(tmp_path, "str", [b"one"], name, lambda data: pack(data + bytes(2**28)))
    most = 2**21
    dataset = ShardedDataset(tmp_path, cache=tmp_path / "cache", cache_bytes=most)
    highest, error = most_on_disk(tmp_path / "cache", lambda: dataset[0])
    assert str(error) == f"cache_bytes={most}: must hold shard 0.mds, which has more bytes"
    packed = (tmp_path / "0.mds").stat().st_size
    assert highest <= most + packed
    assert not [*(tmp_path / "cache").rglob("*.raw")]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def endless(connection):
    """Answer with a body in chunks that has no end."""
    connection.sendall(CHUNKED)
    chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
    while True:
        connection.sendall(chunk)


def continues(connection):
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def slow_head(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: y\r\n")
        time.sleep(0.01)


def trailers(connection):
    connection.sendall(CHUNKED + b"1\r\nx\r\n0\r\n")
    while True:
        connection.sendall(b"a: b\r\n")


def raw(data):
    return lambda connection: connection.sendall(data)


def answer(status, *headers, body=b""):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]

    def reply(connection):
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    return reply


@contextmanager
def replying(folder, reply, address="127.0.0.1"):
    """Serve the index of a folder; every shard gets `reply`. Yields (address, requests)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family)
    requests = []

    def serve(connection):
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            path = head.split()[1].decode()
            if path.endswith(".index"):
                answer("200 OK", body=(folder / "lockstep.index").read_bytes())(connection)
                return
            requests.append(path)
            reply(connection)

    def accept():
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        host = f"[{address}]" if ":" in address else address
        yield f"http://{host}:{server.getsockname()[1]}", requests
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def test_a_shard_of_unknown_size_without_end_stops_at_the_bytes_of_the_cache(folder, tmp_path):
    data = no_digests(folder, tmp_path / "data", sizes=False)
    with replying(data, endless) as (url, _):
        dataset = ShardedDataset(url, cache_bytes=2**21)
        highest, error = most_on_disk(tmp_path / "cache", lambda: dataset[0])
    must = "must hold shard shard.00000.mds, which has more bytes"
    assert str(error) == f"cache_bytes={2**21}: {must}"
    assert highest <= 2**21


def test_a_shard_of_known_size_without_end_is_read_twice_and_named(folder, tmp_path):
    with replying(folder, endless) as (url, requests):
        dataset = ShardedDataset(url)
        highest, error = most_on_disk(tmp_path / "cache", lambda: dataset[0])
    assert "has more than the 582 bytes of its index; it was changed or is damaged" in str(error)
    assert (len(requests), highest) == (2, 0)


# Answers of servers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "why", "most"),
    [
        (answer("416 Range Not Satisfiable"), "HTTP 416: it has no bytes from 0 on", 1),
        (answer("200 OK"), "has 0 bytes, and 582 in its index; it was changed", 2),
        (answer("200 OK", body=b"x" * 99), "has 99 bytes, and 582 in its index", 3),
        (answer("200 OK", body=b"x" * 582), "has SHA-256 .*, and its index", 2),
        (continues, 'after 8 tries: it answers "100 Continue" without end', 8),
        (trailers, "after 8 tries: it ends with trailers without end", 16),
        (raw(bytes(range(256)) * 9), "after 8 tries: it answers no HTTP; check", 8),
        (raw(CHUNKED + b"-5\r\nabc"), "after 8 tries: read length must be non-negative", 8),
        (answer("302 Found", "Location: http://[::1:8/a"), "redirects to an address that", 1),
        (answer("302 Found", "Location: ftp://127.0.0.1/a"), "ftp://.*, which is not http://", 1),
        (answer("302 Found", "Location: file:///etc/passwd"), "not allowed|which is not http", 1),
        (answer("302 Found", "Location: http://h:port/a"), "redirects to an address that", 1),
        (answer("302 Found", "Location: /again"), "infinite loop", 12),
        (answer("206 Partial", "Content-Range: bytes 0-0/1"), "has 0 bytes, and 582", 3),
    ],
)
def test_an_answer_that_is_no_shard_ends_after_few_requests_in_one_line(reply, why, most, folder):
    with replying(folder, reply) as (url, requests):
        dataset = ShardedDataset(url)
        with pytest.raises(RunError, match=why) as caught:
            dataset[0]
    assert "\n" not in str(caught.value) and "shard.00000.mds" in str(caught.value)
    assert len(requests) <= most


def test_a_head_without_end_is_left(folder, monkeypatch):
    from trainer.shards import http_source

    monkeypatch.setattr(http_source, "HEAD_S", 0.2)
    with replying(folder, slow_head) as (url, requests):
        dataset = ShardedDataset(url)
        with pytest.raises(RunError, match=r"after 8 tries: .*(head without end|100 headers)"):
            dataset[0]
    assert len(requests) == 8


def test_a_redirect_to_an_address_of_ipv6_is_followed(folder):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6")
    body = (folder / "shard.00000.mds").read_bytes()
    with replying(folder, answer("200 OK", body=body), "::1") as (url, _):
        check_rows(url)
        location = f"Location: {url}/shard.00000.mds"
        with replying(folder, answer("302 Found", location)) as (other, _):
            check_rows(other)


def test_bytes_that_change_on_their_way_are_not_a_damaged_shard(folder):
    """They differ each time: the network is named, and no example is replaced."""
    whole = (folder / "shard.00000.mds").read_bytes()
    number = [0]

    def reply(connection):
        number[0] += 1
        changed = bytearray(whole)
        if number[0] < 5:
            changed[-number[0]] ^= 1
        answer("200 OK", body=bytes(changed))(connection)

    with replying(folder, reply) as (url, requests):
        check_rows(url)
    assert len(requests) == 5


# Indices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (answer("200 OK"), r"lockstep\.index: cannot be read; write it again"),
        (answer("403 Forbidden"), r"lockstep\.index: cannot be read: HTTP 403 .*credentials"),
        (answer("416 Range Not Satisfiable"), "has no lockstep.index, nor index.json of MDS"),
        (answer("302 Found", "Location: http://[::1:8/a"), "redirects to an address that cannot"),
        (endless, r"lockstep\.index: cannot be read; write it again"),
        (continues, r'lockstep\.index: cannot be read after 8 tries: .*"100 Continue"'),
    ],
)
def test_an_index_that_is_empty_or_refused_is_one_line(reply, why, tmp_path):
    with (
        replying(tmp_path, reply) as (url, _),
        pytest.raises((ConfigError, RunError), match=why) as caught,
    ):
        load_index_with(url)
    assert "\n" not in str(caught.value)


def load_index_with(url):
    """Read an index from the address of a shard."""
    from trainer.shards.http_source import HttpSource

    class All(HttpSource):
        def _request(self, name, begin, end):
            request = super()._request(name, begin, end)
            request.full_url = f"{url}/any"
            return request

    source = All(url)
    return load_index(source)


@pytest.mark.parametrize("name", ["lockstep.index", "index.json"])
@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (pipe, "cannot be read: is not a regular file; check the file"),
        (lambda path, _: path.touch(), "cannot be read"),
        (sparse, "cannot be read"),
        (empty_folder, "cannot be read: Is a directory|is not a regular file"),
    ],
)
def test_an_index_that_is_no_file_is_refused_at_once(plant, why, name, tmp_path):
    plant(tmp_path / name, None)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=why) as caught:
        ShardedDataset(tmp_path)
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert time.monotonic() - begun < 5


def test_a_shard_in_a_folder_that_is_a_pipe_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "data")
    (tmp_path / "data/shard.00000.mds").unlink()
    os.mkfifo(tmp_path / "data/shard.00000.mds")
    with pytest.raises(RunError, match="is not a regular file; restore it"):
        check_rows(tmp_path / "data")


# Evictions ----------------------------------------------------------------------------------------


def test_a_shard_that_is_deleted_while_it_is_opened_is_fetched_again(tmp_path):
    """safetensors opens a file twice."""
    (tmp_path / "data").mkdir()
    data = rows(60)
    for number in range(6):
        inputs, labels = data[number * 10 : number * 10 + 10]
        save_file({"0": inputs, "1": labels}, tmp_path / f"data/{number}.safetensors")
    write_index(str(tmp_path / "data"), str(tmp_path / "data"), {}, 2**24)
    is_over = threading.Event()
    with serving(tmp_path / "data") as server:
        place = ShardedDataset(server.url).cache.folder

        def delete():
            while not is_over.is_set():
                for path in place.glob("*.safetensors"):
                    path.unlink(missing_ok=True)

        thread = threading.Thread(target=delete)
        thread.start()
        try:
            for turn in range(10):
                found = ShardedDataset(server.url)
                for index in range(0, 60, 7):
                    assert found[index][0].equal(data[index][0]), turn
                assert not found._flaws
        finally:
            is_over.set()
            thread.join()


def test_a_download_in_a_folder_that_was_deleted_leaves_that_of_another_run_alone(folder):
    whole = (folder / "shard.00000.mds").read_bytes()
    paths = []

    def reply(connection):
        (path,) = paths
        if len(requests) == 1:
            shutil.rmtree(path.parent)
            path.parent.mkdir()
            path.with_name(f"{path.name}.part").write_bytes(whole[:99])
        answer("200 OK", body=whole)(connection)

    with replying(folder, reply) as (url, requests):
        paths.append(ShardedDataset(url).cache.path(0))
        check_rows(url)
    assert paths[0].read_bytes() == whole


def test_a_file_that_becomes_shorter_in_a_cache_is_fetched_again(folder, server):
    dataset = check_rows(server.url)
    data = rows()
    os.truncate(dataset.cache.path(0), 100)
    assert dataset._read(3)[0].equal(data[3][0])


# Other processes ----------------------------------------------------------------------------------


def hold(path, ready):
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ready.set()
        time.sleep(600)


@contextmanager
def holding(path):
    """Lock a file in another process; yields its id."""
    context = get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(path, ready))
    process.start()
    ready.wait(20)
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("name", [".part", "free"])
def test_a_stopped_process_that_holds_a_lock_is_named_and_not_waited_for_for_ever(
    name, server, monkeypatch, capfd
):
    monkeypatch.setattr(sources, "STUCK_IF_STOPPED_S", 1.0)
    place, shard = cache_of(server.url)
    path = place / (name if name == "free" else shard + name)
    with holding(path) as pid:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RunError) as caught:
            check_rows(server.url, cache_bytes=1300)
    assert str(caught.value).startswith(f"{path}: process {pid} (stopped) has locked it for 1 s")
    assert str(caught.value).endswith("without progress; end it, or give another cache= folder")
    said = capfd.readouterr().err
    assert said == f"waiting for process {pid} (stopped), which has locked {path} ...\n"


def test_a_process_that_makes_progress_is_waited_for(server, monkeypatch):
    monkeypatch.setattr(sources, "STUCK_S", 0.5)
    place, shard = cache_of(server.url)
    with holding(place / f"{shard}.part"):
        thread = threading.Thread(target=check_rows, args=(server.url,), daemon=True)
        thread.start()
        for _ in range(15):
            time.sleep(0.1)
            with open(place / f"{shard}.part", "ab") as file:
                file.write(b"x")
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()


def test_a_slow_download_is_announced_once(folder, capfd):
    with serving(folder, 1.0, faults=("slow",), slow_s=1.0) as server:
        found = ShardedDataset(server.url)
        capfd.readouterr()
        [found[index] for index in (0, 7)]
        said = capfd.readouterr().err
    assert said == f"downloading {server.url}/shard.00000.mds ...\n"


def test_a_run_that_is_asked_to_stop_in_a_download_ends_soon(folder, command):
    is_over = threading.Event()
    words = ["task=on_shards", f"--config-dir={CONF}", "run.steps=3", "data.workers=0"]
    with replying(folder, lambda connection: is_over.wait(60)) as (url, requests):
        process = command.start(*words, f"task.options.url={url}")
        wait_for(lambda: requests or process.poll() is not None, 60)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(30)
        is_over.set()
    assert time.monotonic() - begun < 10
    assert process.returncode == 1, err
    (line,) = [each for each in err.splitlines() if each.startswith("error: ")]
    assert "asked to stop (SIGTERM) while" in line


def in_child(body):
    """Run `body` in a fork, as one may change its user and limits; return what it says."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            said = str(body() or "")
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(pid, 0)
    return said


def test_a_limit_on_the_size_of_files_is_named(server):
    def body():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        ShardedDataset(server.url)[0]

    said = in_child(body)
    assert said.startswith("ServerError: ") and said.endswith(
        "shard shard.00000.mds cannot be written: File too large; raise ulimit -f, or give another"
        " cache= folder"
    )
