"""Stores that lack what a mirror needs, hold what is not of the run, or are no stores."""

import ctypes
import errno
import json
import os
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from harness import fit, on_ranks
from harness.fences import open_fence
from harness.s3 import proxied
from harness.training import compose

from trainer import ConfigError
from trainer.core.config import copies
from trainer.places import bucket, fence
from trainer.places.bucket import Bucket
from trainer.places.listing import newest_lease, read_listing

LIST = "<ListBucketResult>{}</ListBucketResult>"
CONTENT = (
    "<Contents><Key>{}</Key><Size>1</Size><ETag>e</ETag>"
    "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
)
LINKS = (86, 265)  # link and linkat of x86-64


@pytest.fixture
def proxy(s3, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as passing:
        monkeypatch.setenv("AWS_ENDPOINT_URL", passing.url)
        yield passing


def refuse_calls(numbers, error):
    """Let system calls of this process fail from now on, by a filter of seccomp."""
    load, equal, back = 0x20, 0x15, 0x06
    code = [(load, 0, 0, 0)]
    for number in numbers:
        code += [(equal, 0, 1, number), (back, 0, 0, 0x00050000 | error)]
    code.append((back, 0, 0, 0x7FFF0000))
    data = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    program = Program(len(code), ctypes.addressof(data))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP


def line_of(address):
    """Return the error of a start that is to write at an address."""

    def body():
        try:
            open_fence(address, 0, 0)
        except ConfigError as error:
            return str(error)
        return ""

    return on_ranks(1, body)[0]


# Conditional puts ---------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """A server that answers each request with 200 and the text that `answer` returns."""

    def reply(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name, _, words = self.path.partition("?")
        status, text = self.answer(self.command, name, words, body)
        self.send_response(status)
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = reply

    def log_message(self, format, *arguments): ...


@contextmanager
def served(handle, monkeypatch):
    """Serve `handle(method, path, query, body)`, which returns (status, text), as S3."""
    names = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    kind = type("Serving", (Server,), {"answer": staticmethod(handle)})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()


def test_store_that_creates_a_file_twice_is_refused_at_the_start(monkeypatch):
    """moto refuses it, as S3 does; only `lockstep check` tried."""
    files = {}

    def answer(method, path, query, body):
        if method == "PUT":
            files[path] = body
        if "list-type" in query:
            names = [path.removeprefix("/data/") for path in files]
            return 200, LIST.format("".join(CONTENT.format(name) for name in names)).encode()
        return (200, files[path]) if path in files else (404, b"")

    with served(answer, monkeypatch):
        line = line_of("s3://data/twice")
    assert line == (
        "s3://data/twice: the store creates a file that is there already, so it has no conditional "
        "put (If-None-Match) and two runs could write there; use another store"
    )
    assert json.loads(files["/data/twice/000001/lease.json"])["released"] is True


def test_store_that_refuses_a_conditional_put_is_named(proxy):
    proxy.begin(lambda number, method, path: "501" if "lease" in path and method == "PUT" else "")
    line = line_of("s3://data/refusing")
    why = "the store takes files, but not a conditional put (If-None-Match), which lets only one"
    assert line.startswith(
        f"s3://data/refusing: {why} process write there: s3://data/refusing/000001/"
    )
    assert "501" in line and line.endswith("; start again, or use another store")
    proxy.begin(lambda number, method, path: "501" if method == "PUT" else "")
    line = line_of("s3://data/none")
    assert line.startswith("checkpoint.mirror=s3://data/none: s3://data/none/000001/lease.json: ")
    assert line.endswith("; check the address, the login and the network")


def test_start_that_fails_after_its_lease_leaves_it_released(proxy):
    proxy.begin(lambda number, method, path: "501" if "list-type" in path and number > 2 else "")
    assert "501" in line_of("s3://data/released")
    proxy.begin(lambda number, method, path: "")
    found = on_ranks(1, lambda: Bucket("s3://data/released").get("000001/lease.json"))
    assert json.loads(found[0])["released"] is True


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS])
def test_folder_without_hard_links_holds_a_run(error, tmp_path):
    """As those of gcsfuse; every test used a disk that has them."""
    address = f"file://{tmp_path}/mounted/first"
    words = ["task=tiny", "run.steps=4", f"checkpoint.mirror={address}", "run.resume=auto"]

    def begin():
        refuse_calls(LINKS, error)
        store = Bucket(f"file://{tmp_path}/x", is_new=True)
        created = [store.create("one", content) for content in (b"a", b"b", b"a")]
        fences = [open_fence(address, 0, None) for _ in range(2)]
        for each in fences:
            each.release()
        return [*created, store.get("one"), *(each.number for each in fences)]

    assert on_ranks(1, begin) == [[True, False, True, b"a", 1, 2]]
    compose(tmp_path / "one", *words)

    def train():
        refuse_calls(LINKS, error)
        return fit(tmp_path / "one", *words)["step"]

    assert on_ranks(1, train) == [4]
    assert max(on_ranks(1, lambda: [*read_listing(Bucket(address)).checkpoints()])[0]) == 4


def test_writer_that_was_killed_while_it_created_its_lease_stops_nobody(tmp_path):
    """In a folder without hard links the file is empty then."""
    address = f"file://{tmp_path}/first"

    def body():
        open_fence(address, 3, None).release()
        store = Bucket(address)
        (tmp_path / "first/000002").mkdir()
        (tmp_path / "first/000002/lease.json").touch()
        (tmp_path / "first/000001/checkpoints/step-00000004").mkdir(parents=True)
        (tmp_path / "first/000001/checkpoints/step-00000004/manifest.json").touch()
        held = read_listing(store)
        third = open_fence(address, 3, 3)
        return [held.fence, [*held.checkpoints()], third.number, read_listing(store).writers]

    assert on_ranks(1, body) == [[1, [], 3, [[1, 3], [3, 3]]]]


# Text and keys of others --------------------------------------------------------------------------


def test_text_of_a_lease_is_escaped_and_short(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fence, "EXPIRY_S", 1.5)
    store = tmp_path / "first/000001"
    store.mkdir(parents=True)
    facts = {"writers": [[1, 0]], "host": "\x1b]0;pwned\x07" + "x" * 5000, "pid": "\x1b[31m"}
    (store / "lease.json").write_text(json.dumps(facts))

    def body():
        return open_fence(f"file://{tmp_path}/first", 0, 0).number

    assert on_ranks(1, body) == [2]
    said = capfd.readouterr().err
    assert "waiting until the lease of process \\x1b[31m on \\x1b]0;pwned\\x07xxx" in said
    assert "\x1b" not in said and len(said) < 500


@pytest.mark.parametrize(
    "keys",
    [("//x",), ("../x", "./y"), ("000001//x",), ("000001/checkpoints//x", "a/../b"), ("a//b", "c")],
)
def test_keys_of_others_that_are_no_paths_stop_nothing(keys, proxy, tmp_path):
    """Consoles make them: each verb and the mirror stopped with "invalid path"."""
    import boto3

    address = f"s3://data/{tmp_path.name}"
    client = boto3.client("s3")
    for key in keys:
        client.put_object(
            Bucket="data", Key=f"{address.removeprefix('s3://data/')}/{key}", Body=b""
        )

    def body():
        first = open_fence(address, 0, 0)
        store = Bucket(address)
        for name in ("config.json", "checkpoints/step-00000001/manifest.json"):
            store.put(f"000001/{name}", b"{}")
        first.check()
        first.release()
        held = read_listing(store)
        return [newest_lease(store)[0], [*held.checkpoints()], held.home(), held.writers]

    assert on_ranks(1, body) == [[1, [1], "000001", [[1, 0]]]]


def test_key_that_hides_those_of_the_run_is_named(proxy):
    import boto3

    boto3.client("s3").put_object(Bucket="data", Key="hidden/a\x01b", Body=b"")
    line = line_of("s3://data/hidden")
    assert 'Error parsing Path "hidden/a' in line and "; remove it; " in line


def test_folder_of_other_digits_is_somebody_elses(tmp_path):
    name = "\u0660" * 5 + "\u0669"
    (tmp_path / f"first/{name}").mkdir(parents=True)
    (tmp_path / f"first/{name}/lease.json").write_text("x")
    numbers = on_ranks(1, lambda: open_fence(f"file://{tmp_path}/first", 0, 0).number)
    assert numbers == [1]


# Servers that are no stores -----------------------------------------------------------------------

MORE = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
ANSWERS = {
    "one page again": (LIST.format(MORE + CONTENT.format("first/a")), "its listing repeats itself"),
    "empty pages": (LIST.format(MORE), "its listing has no end: nothing came in 2 s"),
    "a web page": ("<html><body>Please log in</body></html>", ""),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_server_that_is_no_store_is_one_line(answer, monkeypatch):
    text, why = ANSWERS[answer]
    monkeypatch.setattr(bucket, "LIST_S", 2.0)
    with served(lambda *request: (200, text.encode()), monkeypatch):
        line = line_of("s3://data/first")
    if why:
        assert line.startswith(f"checkpoint.mirror=s3://data/first: s3://data/first: {why}")
    else:
        assert "the store creates a file that is there already" in line
    assert len(line.splitlines()) == 1


# Temporary folders of others ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "foreign"])
def test_copies_of_others_in_the_temporary_folder_are_left_alone(kind, tmp_path, monkeypatch):
    """A pipe there stopped all verbs on buckets, of all users."""
    shared = tmp_path / "shared"
    own = shared / f"{copies.COPY_PREFIX}{copies.socket.gethostname()}-x"
    own.mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    if kind == "pipe":
        os.mkfifo(own / copies.HELD)
    elif kind == "link to a pipe":
        (own / copies.HELD).symlink_to(tmp_path / "pipe")
    else:
        (own / copies.HELD).touch()
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    copies._sweep(shared)
    assert own.exists()
    if kind == "foreign":
        os.utime(own, (0, 0))
        copies._sweep(shared)
        assert own.exists()


def test_file_that_is_larger_than_its_manifest_says_is_not_fetched(tmp_path):
    """A bucket is input: one that everybody may write would fill the disk."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first/file").write_bytes(b"x" * 5000)
    store = on_ranks(
        1, lambda: Bucket(f"file://{tmp_path}/first").download("file", tmp_path / "part", 4999)
    )
    assert store[0][0] == 5000 and (tmp_path / "part").stat().st_size == 0
    whole = on_ranks(
        1, lambda: Bucket(f"file://{tmp_path}/first").download("file", tmp_path / "part", 5000)
    )
    assert whole[0][0] == 5000 and (tmp_path / "part").stat().st_size == 5000


# What is shown ------------------------------------------------------------------------------------


def test_damaged_run_in_a_bucket_is_listed_by_its_address(command, tmp_path):
    """The line named a copy in the temporary folder."""
    home = tmp_path / "first/000001"
    home.mkdir(parents=True)
    (home / "lease.json").write_text('{"writers": [[1, 0]]}')
    (home / "config.json").write_text("{")
    done = command(f"file://{tmp_path}", verb="trainer.list")
    assert "lockstep-copy" not in done.stdout + done.stderr, done.stdout
    done = command(f"file://{tmp_path}/first", verb="trainer.show")
    assert f"file://{tmp_path}/first/config.json" in done.stderr
    assert "lockstep-copy" not in done.stdout + done.stderr


def test_of_two_starts_at_once_the_one_that_s3_answers_with_a_conflict_is_the_second(proxy):
    """Amazon's S3 may refuse one of two conditional puts with 409, before either is there."""

    def body():
        own = Bucket("s3://data/conflict")
        assert own.create("lease.json", b"of the other one")
        proxy.begin(lambda number, method, path: "409" if method == "PUT" else "")
        return own.create("lease.json", b"of this one"), own.create(
            "lease.json", b"of the other one"
        )

    assert on_ranks(1, body) == [(False, True)]
