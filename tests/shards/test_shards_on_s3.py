"""Shards in S3: the same run as from a folder, and errors in one line each."""

import pytest
import torch
from harness import CONF, fit_on, on_ranks, wait_for
from harness.s3 import serving_s3
from harness.shard_rows import rows
from harness.verbs import audit

from trainer.shards import download
from trainer.shards.__main__ import write_shards

pytestmark = pytest.mark.slow
TASK = ("task=on_shards", f"--config-dir={CONF}")
URL = "s3://data/rows"


@pytest.fixture(autouse=True)
def with_credentials(monkeypatch, tmp_path, s3):
    monkeypatch.setattr(download, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(download, "MOST_DELAY_S", 0.05)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def shards(command):
    """Run python -m trainer.shards, with other variables than those of the credentials."""

    def run(*words, **others):
        return command(*words, verb="trainer.shards", environment=others)

    return run


def put(url):
    """Write the rows in 29 shards, in another process: fsspec starts a thread."""

    def body():
        return write_shards(rows(), url, 600, 0).digest

    (digest,) = on_ranks(1, body)
    return digest


def test_shards_are_written_indexed_and_checked_in_a_bucket(shards):
    new = "s3://data/written"
    done = shards("write", *TASK, f"to={new}")
    assert (done.returncode, done.stdout) == (0, f"203 examples in 1 shard: {new}\n"), done.stderr
    again = shards("write", *TASK, f"to={new}")
    assert again.returncode == 2 and "must be empty, and has index.json" in again.stderr
    for words, said in [
        (("check", new), "1 shard, 0 differ from the index\n"),
        (("index", new), f"203 examples in 1 shard (mds): {new}/lockstep.index\n"),
        (("check", new), "1 shard, 0 differ from the index\n"),
    ]:
        done = shards(*words)
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_run_from_a_bucket_equals_that_from_a_folder_on_any_ranks_and_workers(tmp_path):
    folder = tmp_path / "rows"
    assert put(URL) == put(str(folder))
    words = ["task=on_shards", "task.options.cache_bytes=3000"]
    local = fit_on(1, tmp_path / "local", *words, f"task.options.url={folder}")
    for ranks, workers in ((1, 0), (3, 2)):
        more = [f"task.options.url={URL}", f"data.workers={workers}"]
        found = fit_on(ranks, tmp_path / str(ranks), *words, *more)
        assert found["seen"] == local["seen"]
        assert found["losses"] == local["losses"]
        for name, weight in local["weights"].items():
            assert torch.equal(found["weights"][name], weight)
        assert audit([str(found["directory"])]) == 0


WRONG = {"AWS_SECRET_ACCESS_KEY": "wrong"}
NO_SUCH = "The specified bucket does not exist"
NOBODY = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
LOGINS = "check the address, the credentials and the network"


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (("check", "s3://none/x"), {}, f"({NO_SUCH}); check the address, or write one"),
        (("index", "s3://none/x"), {}, f"cannot be listed: {NO_SUCH}; {LOGINS}"),
        (("write", *TASK, "to=s3://none/x"), {}, f"cannot be listed: {NO_SUCH}; {LOGINS}"),
        (("check", URL), WRONG, "signing method; check the credentials"),
        (("index", URL), WRONG, "the signature you provided"),
        (("check", URL), NOBODY, "Unable to locate credentials; check the credentials"),
        (("index", URL), NOBODY, f"Unable to locate credentials; {LOGINS}"),
        (("check", URL), {"AWS_PROFILE": "none"}, "The config profile (none) could not be found"),
    ],
)
def test_a_bucket_or_credentials_that_are_wrong_end_at_once_in_one_line(
    words, environment, said, shards, monkeypatch
):
    monkeypatch.setattr(download, "FIRST_DELAY_S", 100.0)  # of a second try
    done = shards(*words, **environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: s3://") and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_bucket_that_is_missing_is_not_made(shards, s3):
    assert shards("write", *TASK, "to=s3://fresh/x").returncode == 2
    assert NO_SUCH in shards("index", "s3://fresh/x").stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_a_server_that_stops_in_the_middle_ends_the_run_in_one_line(
    workers, command, tmp_path, monkeypatch
):
    monkeypatch.setattr(download, "DOWNLOAD_TRIES", 2)  # each takes s3fs 8 s
    with serving_s3(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        put(URL)
        options = [f"task.options.{word}" for word in (f"url={URL}", "cache_bytes=2000")]
        more = [*options, "task.options.pause_s=0.1", f"data.workers={workers}", "run.name=run"]
        run = command.start(*TASK, *more)
        record = tmp_path / "runs/on_shards/run/metrics.jsonl"
        wait_for(lambda: record.exists() and '"step": 3' in record.read_text())
        server.kill()
        _, err = run.communicate()
    assert run.returncode == 1
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "cannot be read after 2 tries: Could not connect" in lines[0], err
    assert "Traceback" not in err
