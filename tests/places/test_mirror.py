"""A run in a bucket: it goes on elsewhere, one process writes, and a store never holds the loop."""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from faults.common import Shape
from faults.mirror import FAULTS
from harness import CONF, check_equal_bits, check_parity, fit_on, on_ranks, wait_for
from harness.azure import serving_azure
from harness.fences import open_fence
from harness.s3 import proxied

from trainer import ConfigError, load_config
from trainer.base.errors import CheckpointError
from trainer.core.checkpoints.transaction import steps
from trainer.core.config.copies import copy_of, remove_copies
from trainer.core.config.stores import Events, StoreError, address_problem
from trainer.core.distributed import owner
from trainer.core.distributed.owner import Owner
from trainer.places import bucket, fence
from trainer.places.bucket import Bucket, _translated
from trainer.places.listing import folder_of, newest_lease, read_listing
from trainer.places.mirror import BucketMirror, Mirrored

RICH = [
    *("task=tiny", "task.options.norm=true", "task.options.dropout=0.2", "run.steps=30"),
    *("log.every_steps=5", "eval.every_steps=6", "strategy.precision=fp32"),
]
SHAPE = Shape(1, 1000)
LIST, CHECK = "trainer.list", "trainer.check"


def with_login(monkeypatch, s3, url=None):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    if url is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)


def keep(**others):
    config = load_config(["task=tiny", "checkpoint.keep_best=0"], [CONF])
    for name, value in others.items():
        setattr(config.checkpoint, name, value)
    return config.checkpoint


def mirror_of(address, directory, told, lost, **others):
    own = open_fence(address, 0, None)
    return BucketMirror(
        keep(mirror=address, **others),
        own,
        directory,
        Events(told.append, lambda step, facts: told.append(facts), lost.append),
    )


def newest(address):
    return max(read_listing(Bucket(address)).checkpoints(), default=0)


def folders(address):
    """Return the folders of all checkpoints that are there, whether they count or not."""
    return sorted({folder_of(name) for name in Bucket(address).sizes()} - {""})


def test_run_goes_on_from_a_bucket_on_an_empty_disk_with_the_same_bits(tmp_path):
    address = f"file://{tmp_path}/bucket/first"
    recipe = [*RICH, "checkpoint.every_steps=10"]
    mirrored = [*recipe, f"checkpoint.mirror={address}", "run.resume=auto"]
    straight = fit_on(1, tmp_path / "straight", *recipe)
    stopped = fit_on(1, tmp_path / "one", *mirrored, "task.options.signal_at=11")
    assert stopped["code"] == 75
    resumed = fit_on(1, tmp_path / "two", *mirrored)
    assert stopped["seen"] + resumed["seen"] == straight["seen"]
    check_equal_bits(straight, resumed)
    assert resumed["record"] == straight["record"]
    assert not [*(tmp_path / "two/tiny").glob(".lockstep-copy-*/*/checkpoints/*/*.safetensors")]
    kept = [int(path.name[5:]) for path in (tmp_path / "bucket").glob("first/*/checkpoints/*")]
    assert sorted(kept) == [*steps(resumed["directory"] / "checkpoints")]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


BITS = "its SHA-256 differs from the manifest's, so bits have changed"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run whose bucket has steps 10 and 18."""
    place = tmp_path_factory.mktemp("stopped")
    recipe = [*RICH, "checkpoint.every_steps=10", "checkpoint.keep_best=0"]
    words = [*recipe, f"checkpoint.mirror=file://{place}/first", "task.options.signal_at=15"]
    assert fit_on(1, place / "runs", *words)["step"] == 18
    return place, recipe, fit_on(1, place / "straight", *recipe)


@pytest.mark.parametrize(
    ("ranks", "file", "damage", "why"),
    [
        (1, "model-r00000.safetensors", flip, BITS),
        (2, "optimizer-r00000.safetensors", lambda path: os.truncate(path, 100), "100 bytes, "),
        (1, "training.pt", Path.unlink, "is not there"),
        (1, "manifest.json", flip, ""),
    ],
)
def test_damaged_newest_checkpoint_of_a_bucket_is_skipped_and_the_older_one_used(
    ranks, file, damage, why, tmp_path, stopped, capfd
):
    place, recipe, straight = stopped
    shutil.copytree(place / "first", tmp_path / "first")
    (newest,) = tmp_path.glob("first/*/checkpoints/step-00000018")
    damage(newest / file)
    mirrored = [f"checkpoint.mirror=file://{tmp_path}/first", "run.resume=auto"]
    resumed = fit_on(ranks, tmp_path / "runs", *recipe, *mirrored)
    said = capfd.readouterr().out
    assert "skipped step-00000018: " in said
    if why:
        assert f"skipped step-00000018: file://{newest / file}: {why}" in said
    assert len(resumed["seen"]) == 20
    if ranks == 1:
        check_equal_bits(straight, resumed)
    assert not [*(tmp_path / "runs/tiny").glob(".lockstep-copy-*/*/checkpoints/*/*.safetensors")]
    assert newest_of(tmp_path / "first") == 30


def test_weights_come_from_a_run_in_a_bucket_as_from_its_directory(tmp_path, stopped):
    place, recipe, _ = stopped
    words = [*recipe, "run.steps=2"]
    near = fit_on(1, tmp_path / "near", *words, f"run.init_from={place}/runs/tiny/run")
    far = fit_on(2, tmp_path / "far", *words, f"run.init_from=file://{place}/first")
    shutil.copytree(place / "first", tmp_path / "first")
    for path in tmp_path.glob("first/*/checkpoints/*/optimizer-*"):
        path.unlink()  # it is not fetched
    one = fit_on(1, tmp_path / "one", *words, f"run.init_from=file://{tmp_path}/first")
    check_equal_bits(near, one)
    assert len(far["seen"]) == 2
    assert not [*tmp_path.rglob(".lockstep-copy-*/*/checkpoints/*/*.safetensors")]


def test_command_that_fails_leaves_no_copy_of_a_run_behind(tmp_path, stopped, command):
    place, *_ = stopped
    bucket = shutil.copytree(place / "first", tmp_path / f"only-{os.getpid()}")
    done = command(f"file://{bucket}", verb="trainer.use")
    assert "give task.trainer=tiny.Tiny if you trust it" in done.stderr
    assert done.returncode == 2
    assert not [*Path(tempfile.gettempdir()).glob(f".lockstep-copy-*/{bucket.name}")]


def test_place_of_weights_in_a_bucket_is_checked_before_the_run_begins(tmp_path, stopped):
    with pytest.raises(ConfigError) as raised:
        load_config(["task=tiny", "run.init_from=s3://bucket"], [CONF])
    why = "must have a prefix for the run, as in s3://bucket/first"
    assert str(raised.value) == f"run.init_from=s3://bucket: {why}"
    with pytest.raises(AssertionError) as raised:
        fit_on(1, tmp_path, "task=tiny", f"run.init_from=file://{tmp_path}/none")
    why = "no checkpoint there; give the checkpoint.mirror of a run"
    assert f"ConfigError: run.init_from=file://{tmp_path}/none: {why}" in str(raised.value)
    assert not [*tmp_path.glob("tiny/*")] and not (tmp_path / "none").exists()


def test_runs_in_a_bucket_are_listed_as_those_in_a_folder(stopped, command, tmp_path):
    place, *_ = stopped
    near = json.loads(command("runs", f"run.dir={place}/runs", "--json", verb=LIST).stdout)
    shutil.copytree(place / "first", tmp_path / "store/tiny/second")
    (tmp_path / "store/data/000001").mkdir(parents=True)
    for word in (f"file://{tmp_path}/store", f"run.dir=file://{tmp_path}/store/tiny/second/"):
        far = json.loads(command(word, "runs", "--json", verb=LIST).stdout)
        (row,) = near["runs"]
        name = f"file://{tmp_path}/store/tiny/second"
        assert far["runs"] == [{**row, "name": name}]
    assert command(f"file://{place}/straight", verb=LIST).stdout == "runs: none\n"
    absent = command(f"file://{tmp_path}/absent", verb=LIST)
    assert absent.returncode == 2 and not (tmp_path / "absent").exists()
    refused = command("ftp://store/first", verb=LIST)
    assert refused.stderr.startswith("error: ftp://store/first: must begin with one of s3://, gs:")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


def newest_of(place):
    return on_ranks(1, lambda: newest(f"file://{place}"))[0]


def test_two_writers_of_a_bucket_are_not_allowed_and_the_end_of_one_is_noticed(tmp_path):
    address = f"file://{tmp_path}/bucket/first"
    is_held, is_refused = tmp_path / "held", tmp_path / "refused"

    def body():
        if os.environ["RANK"] == "0":
            own = open_fence(address, 0, 0)
            is_held.touch()
            wait_for(is_refused.exists)
            own.release()
            return ""
        wait_for(is_held.exists)
        line = ""
        try:
            open_fence(address, 0, 0)
        except ConfigError as error:
            line = str(error)
        is_refused.touch()
        wait_for(lambda: suppressed(lambda: open_fence(address, 0, 0)))
        return line

    _, line = on_ranks(2, body)
    assert line.startswith(f"checkpoint.mirror={address}: process ")
    assert line.endswith(" writes there; wait until it ends, or give another prefix")


def test_lease_of_a_process_that_has_ended_is_free_though_its_number_is_in_use(tmp_path):
    store = Bucket(f"file://{tmp_path}/bucket/first", is_new=True)

    def body():
        unreaped = os.fork()
        if unreaped == 0:
            open_fence(store.address, 0, 0)
            os._exit(0)
        wait_for(lambda: f") Z {os.getpid()} " in Path(f"/proc/{unreaped}/stat").read_text())
        own = open_fence(store.address, 0, 0)
        facts = json.loads(store.get(f"{own.folder}/lease.json"))
        others = {**facts, "pid": os.getppid()}  # which began at another time
        store.put(f"{own.folder}/lease.json", json.dumps(others).encode())
        return [own.number, open_fence(store.address, 0, 0).number]

    assert on_ranks(1, body) == [[2, 3]]


@pytest.mark.parametrize("pid", [10**30, "x", None, 2**31 - 1])
def test_a_lease_with_a_number_of_no_process_is_free(pid):
    assert not Owner.of({"pid": pid}).is_running


def test_copy_of_a_killed_start_is_removed_by_the_next_one_and_no_other(tmp_path):
    address = f"file://{tmp_path}/bucket/first"
    (tmp_path / "bucket/first/000001").mkdir(parents=True)
    (tmp_path / "bucket/first/000001/config.json").write_text("{}")
    (tmp_path / "bucket/first/000001/lease.json").write_text('{"writers": [[1, 0]]}')

    def body():
        victim = os.fork()
        if victim == 0:
            copy_of(address, tmp_path / "runs")
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(victim, 0)
        (killed,) = (tmp_path / "runs").iterdir()
        first, second = (copy_of(address, tmp_path / "runs") for _ in range(2))
        return [killed.exists(), first.exists(), second.exists()]

    assert on_ranks(1, body) == [[False, True, True]]


def test_fork_that_ends_leaves_the_copy_to_its_parent(tmp_path, stopped):
    def body():
        copy = copy_of(f"file://{stopped[0]}/first", tmp_path / "copies")
        if not (pid := os.fork()):
            remove_copies()
            os._exit(0)
        os.waitpid(pid, 0)
        is_left = copy.exists()
        remove_copies()
        return is_left, copy.exists()

    assert on_ranks(1, body) == [(True, False)]


def test_writer_on_another_machine_is_known_by_its_renewals(tmp_path, monkeypatch):
    address = f"file://{tmp_path}/bucket/first"
    is_held, is_refused = tmp_path / "held", tmp_path / "refused"
    monkeypatch.setattr(fence, "RENEW_S", 0.2)
    monkeypatch.setattr(fence, "EXPIRY_S", 1.5)

    def body():
        monkeypatch.setattr(owner, "machine_id", lambda: f"machine {os.getpid()}")
        if os.environ["RANK"] == "0":
            lost = []
            own = open_fence(address, 0, 0)
            own.keep(lost.append)
            is_held.touch()
            wait_for(is_refused.exists)
            own.abandon()  # its node is lost
            return lost
        wait_for(is_held.exists)
        with pytest.raises(ConfigError, match="writes there; wait until it ends"):
            open_fence(address, 0, 0)
        is_refused.touch()
        begun = time.monotonic()
        found = []
        wait_for(lambda: found or suppressed(lambda: found.append(open_fence(address, 0, 0))))
        return [found[0].number, time.monotonic() - begun]

    lost, (number, seconds) = on_ranks(2, body)
    assert (lost, number) == ([], 2) and seconds < 10


def test_renewal_that_comes_late_does_not_take_back_the_release(tmp_path, monkeypatch):
    monkeypatch.setattr(fence, "RENEW_S", 0.05)

    def body():
        own = open_fence(f"file://{tmp_path}/bucket/first", 0, 0)
        is_renewing, is_released = threading.Event(), threading.Event()

        def check_late():
            is_renewing.set()
            assert is_released.wait(60)

        own.check = check_late
        own.keep(print)
        assert is_renewing.wait(60)
        own.release()
        is_released.set()
        time.sleep(0.2)
        return fence.read_lease(own.bucket, f"{own.folder}/lease.json")["released"]

    assert on_ranks(1, body) == [True]


def test_writer_on_another_machine_that_has_ended_is_not_waited_for(tmp_path, monkeypatch):
    """Each resume on another machine would wait until its lease expires."""
    address = f"file://{tmp_path}/bucket/first"

    def body():
        monkeypatch.setattr(owner, "machine_id", lambda: "one machine")
        open_fence(address, 0, 0).release()
        monkeypatch.setattr(owner, "machine_id", lambda: "another machine")
        begun = time.monotonic()
        number = open_fence(address, 0, 0).number
        return number, time.monotonic() - begun < fence.EXPIRY_S / 2

    assert on_ranks(1, body) == [(2, True)]


def suppressed(call):
    with suppress(ConfigError):
        return call()


def test_writer_that_lost_its_lease_publishes_nothing_that_counts(tmp_path, monkeypatch):
    """Not even between its look at the fence and its put, which no store can make one."""
    address = f"file://{tmp_path}/bucket/first"
    monkeypatch.setattr(fence, "EXPIRY_S", 0.0)
    for name in ("old", "new"):
        (tmp_path / name / "checkpoints").parent.mkdir()
    for step in (1, 2):
        SHAPE.save(tmp_path / "old/checkpoints", step)

    def body():
        monkeypatch.setattr(owner, "machine_id", lambda: "another machine")
        old = open_fence(address, 0, None)
        first = Mirrored(old, keep(), print)
        first.read()
        first.put_checkpoint(1, tmp_path / "old/checkpoints/step-00000001")
        open_fence(address, 1, 1)  # of a successor, which goes on from step 1
        with pytest.raises(CheckpointError, match="has taken over"):
            first.put_checkpoint(2, tmp_path / "old/checkpoints/step-00000002")
        assert newest(address) == 1
        monkeypatch.setattr(old, "check", lambda held=None: None)  # it was frozen right after it
        first.put_checkpoint(2, tmp_path / "old/checkpoints/step-00000002")
        assert newest(address) == 1
        third = Mirrored(open_fence(address, 1, 1), keep(), print)
        third.read()
        there = [newest(address), "000001/checkpoints/step-00000002" in folders(address)]
        third.put_checkpoint(2, tmp_path / "old/checkpoints/step-00000002")
        third.prune(frozenset())
        return [*there, folders(address)]

    places = ["000001/checkpoints/step-00000001", "000003/checkpoints/step-00000002"]
    assert on_ranks(1, body) == [[1, True, places]]


def test_writer_that_lost_its_lease_removes_nothing_of_its_successor(tmp_path, monkeypatch):
    """It is stopped between its look at the fence and the listing that it prunes by."""
    address = f"file://{tmp_path}/bucket/first"
    monkeypatch.setattr(fence, "EXPIRY_S", 0.0)
    (tmp_path / "config.json").write_text("{}")
    for step in (1, 2, 3):
        SHAPE.save(tmp_path / "checkpoints", step)

    def body():
        monkeypatch.setattr(owner, "machine_id", lambda: "another machine")
        writers, mirrored = [], []
        for steps_of_one in ((1, 2), (3,)):
            begun = steps_of_one[0] - 1
            writers.append(open_fence(address, begun, begun))
            mirrored.append(Mirrored(writers[-1], keep(keep_last=1), print))
            mirrored[-1].read()
            mirrored[-1].put_record(tmp_path)
            for step in steps_of_one:
                path = tmp_path / f"checkpoints/step-{step:08d}"
                mirrored[-1].put_checkpoint(step, path)
        Bucket(address).put("notes.txt", b"of the user")
        monkeypatch.setattr(writers[0], "check", lambda held=None: None)
        mirrored[0].prune(frozenset())
        held = read_listing(Bucket(address))
        return [held.home(), [*held.checkpoints()], "notes.txt" in held.sizes]

    assert on_ranks(1, body) == [["000002", [2, 3], True]]


def test_record_of_a_writer_counts_once_it_is_whole(tmp_path):
    """Else a run that is resumed from it has lost what it recorded before."""
    address = f"file://{tmp_path}/bucket/first"
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}")

    def body():
        first = open_fence(address, 0, 0)
        Mirrored(first, keep(), print).put_record(tmp_path)
        second = open_fence(address, 0, 0)
        (tmp_path / "bucket/first/000002/metrics.jsonl/unwritable").mkdir(parents=True)
        with pytest.raises(StoreError):
            Mirrored(second, keep(), print).put_record(tmp_path)
        return read_listing(Bucket(address)).home()

    assert on_ranks(1, body) == ["000001"]


def test_start_that_read_an_older_step_than_there_is_does_not_begin(tmp_path):
    address = f"file://{tmp_path}/bucket/first"
    SHAPE.save(tmp_path / "checkpoints", 5)

    def body():
        own = open_fence(address, 0, 0)
        there = Mirrored(own, keep(), print)
        there.put_checkpoint(5, tmp_path / "checkpoints/step-00000005")
        own.release()
        with pytest.raises(ConfigError, match="has reached step 5 since this start read step 3"):
            open_fence(address, 3, 3)
        return newest(address)

    assert on_ranks(1, body) == [5]


def test_place_of_a_mirror_is_an_address_and_of_a_run_a_folder():
    for place in ("s3://bucket/first", "gs://b/a/b", "az://b/a", "file:///mnt/first"):
        assert address_problem(place) == ""
    assert address_problem("s3://bucket/first?x=1").startswith("must have no login; give it by ")
    wrong = {
        "runs/first": "must begin with one of s3://, gs://, az://, file://, as in s3://bucket/first",
        "s3://bucket": "must have a prefix for the run, as in s3://bucket/first",
    }
    for place, line in wrong.items():
        with pytest.raises(ConfigError) as raised:
            load_config(["task=tiny", f"checkpoint.mirror={place}"], [CONF])
        assert str(raised.value) == f"checkpoint.mirror={place}: {line}"
    with pytest.raises(ConfigError) as raised:
        load_config(["task=tiny", "run.dir=s3://bucket/runs"], [CONF])
    assert str(raised.value) == (
        "run.dir=s3://bucket/runs: must be a folder here; keep the run in a bucket by "
        "checkpoint.mirror=s3://bucket/runs"
    )


def test_new_run_does_not_begin_in_the_bucket_of_another(tmp_path):
    address = f"file://{tmp_path}/bucket/first"
    words = [*RICH[:4], "run.steps=2", f"checkpoint.mirror={address}"]
    fit_on(1, tmp_path / "one", *words)
    with pytest.raises(AssertionError) as raised:
        fit_on(1, tmp_path / "two", *words)
    held = "holds a run that has reached step 2; give run.resume=auto to continue it"
    assert f"checkpoint.mirror={address}: {held}, or another prefix" in str(raised.value)


@pytest.mark.slow
def test_three_ranks_go_on_from_s3_where_two_stopped(tmp_path, s3, monkeypatch):
    words = ["task=tiny", "experiment=parity", "run.steps=24", "optim.lr=0.3", "strategy=fsdp"]
    mirrored = [*words, "checkpoint.mirror=s3://data/three", "run.resume=auto"]
    straight = fit_on(1, tmp_path / "straight", *words)
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        with_login(monkeypatch, s3, proxy.url)
        stopped = fit_on(2, tmp_path / "one", *mirrored, "task.options.signal_at=17")
        proxy.begin(lambda number, method, path: "")
        resumed = fit_on(3, tmp_path / "two", *mirrored)
    check_parity(straight, {**resumed, "seen": stopped["seen"] + resumed["seen"]})
    parts = [path for method, path in proxy.requests if method == "GET" and "safetensors" in path]
    assert len(parts) == len(set(parts)) == 4  # a rank of the node fetches, the others wait
    assert all(f"step-{stopped['step']:08d}" in path for path in parts)


def create_twice(address):
    return [Bucket(address).create("one", content) for content in (b"a", b"b")]


@pytest.mark.slow
def test_run_goes_on_from_azure_and_is_read_there(tmp_path, monkeypatch, command):
    address = "az://data/runs/first"
    recipe = [*RICH, "checkpoint.every_steps=10"]
    mirrored = [*recipe, f"checkpoint.mirror={address}", "run.resume=auto"]
    straight = fit_on(1, tmp_path / "straight", *recipe)
    (tmp_path / "azure").mkdir()
    with serving_azure(tmp_path / "azure") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        stopped = fit_on(1, tmp_path / "one", *mirrored, "task.options.signal_at=17")
        resumed = fit_on(1, tmp_path / "two", *mirrored)
        listed = json.loads(command("az://data/runs", "--json", verb=LIST).stdout)["runs"]
        made = on_ranks(1, lambda: create_twice("az://data/runs/x"))
    assert made == [[True, False]]
    assert stopped["code"] == 75 and stopped["seen"] + resumed["seen"] == straight["seen"]
    check_equal_bits(straight, resumed)
    assert [(row["name"], row["steps"], row["end"]) for row in listed] == [(address, "30", "done")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_store_that_fails_now_and_then_gets_everything(fault, tmp_path, s3, monkeypatch):
    monkeypatch.setattr(bucket, "REQUEST_S", 1.0)
    address = f"s3://data/{fault}"
    (tmp_path / "run").mkdir()
    for step in (1, 2, 3):
        SHAPE.save(tmp_path / "run/checkpoints", step)
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        with_login(monkeypatch, s3, proxy.url)
        proxy.begin(lambda number, method, path: fault if number % 3 == 0 else "")

        def body():
            told, lost = [], []
            copied = mirror_of(address, tmp_path / "run", told, lost, keep_last=2)
            copied.close()
            return told, lost, [*read_listing(Bucket(address)).checkpoints()]

        ((told, lost, there),) = on_ranks(1, body)
    assert (lost, there) == ([], [2, 3]), told
    assert told[-1] == f"mirrored: {address} has step 3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (CHECK, ()),
        ("trainer.prove", ("layouts=ranks-2", "steps=2", "run.norm_rows=11")),
        ("trainer.show", ("step=2",)),
    ],
)
def test_runs_that_only_examine_another_one_leave_its_bucket_alone(verb, words, stopped, command):
    place, recipe, _ = stopped
    before = {path: path.stat().st_mtime_ns for path in (place / "first").rglob("*")}
    settings = [*recipe, f"checkpoint.mirror=file://{place}/first"]
    if verb == "trainer.show":  # its settings are those of the run
        settings = [f"{place}/runs/tiny/run", "task.trainer=tiny.Tiny"]
    done = command(*settings, *words, f"--config-dir={CONF}", verb=verb)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in (place / "first").rglob("*")} == before


@pytest.mark.slow
def test_runs_and_weights_are_read_from_s3(tmp_path, s3, monkeypatch, command):
    with_login(monkeypatch, s3)
    for name in ("a", "b"):
        words = [*RICH, "run.steps=6", f"checkpoint.mirror=s3://data/listed/{name}"]
        fit_on(1, tmp_path / name, *words)
    assert fit_on(2, tmp_path / "c", *RICH, "run.init_from=s3://data/listed/a")["step"] == 30
    listed = json.loads(command("s3://data", "--json", verb=LIST).stdout)["runs"]
    rows = [(row["name"], row["steps"], row["end"]) for row in listed]
    names = [name for name, _, _ in rows if "/listed/" in name]
    assert names == ["s3://data/listed/b", "s3://data/listed/a"]
    assert {(steps, end) for name, steps, end in rows if name in names} == {("6", "done")}
    checked = command(
        "task=tiny", f"--config-dir={CONF}", "checkpoint.mirror=s3://none/x", verb=CHECK
    )
    assert checked.returncode == 1
    assert "checkpoint.mirror=s3://none/x: cannot be written" in checked.stdout.replace("\n", " ")
    missing = command("s3://none/x", verb=LIST)
    assert missing.returncode == 2 and len(missing.stderr.splitlines()) == 1
    assert missing.stderr.endswith("; check the address and the login\n")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["default", "other"])
def test_login_of_a_profile_is_used_and_a_missing_one_named(
    profile, tmp_path, s3, monkeypatch, command
):
    with_login(monkeypatch, s3)
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    lines = [f"{name.lower()}={s3.environment[name]}" for name in names]
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("\n".join([f"[{profile}]", *lines]))
    for name in names:
        monkeypatch.delenv(name)
    if profile != "default":
        monkeypatch.setenv("AWS_PROFILE", profile)
    found = command("s3://data/absent", verb=LIST, environment={"HOME": str(tmp_path)})
    assert (found.returncode, found.stdout) == (0, "runs: none\n"), found.stderr
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    refused = command("s3://data/absent", verb=LIST, environment={"HOME": f"{tmp_path}/none"})
    said = (
        "error: s3://data/absent: there is no login; give AWS_ACCESS_KEY_ID, AWS_PROFILE or ~/.aws"
    )
    assert refused.stderr == f"{said}; check the address and the login\n"


@pytest.mark.slow
def test_store_that_does_not_answer_is_no_reason_to_lose_steps(tmp_path, s3, monkeypatch):
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        with_login(monkeypatch, s3, proxy.url)
        words = [*RICH, "checkpoint.every_steps=10", "checkpoint.mirror=s3://data/busy"]
        fit_on(1, tmp_path / "one", *words, "task.options.signal_at=15")
        proxy.begin(lambda number, method, path: "503" if "step-00000018/model" in path else "")
        with pytest.raises(AssertionError) as raised:
            fit_on(1, tmp_path / "two", *words, "run.resume=auto")
        proxy.begin(lambda number, method, path: "")
        resumed = fit_on(1, tmp_path / "two", *words, "run.resume=auto")
    said = str(raised.value)
    assert "RunError: s3://data/busy/000001/checkpoints/step-00000018/model-r00000" in said
    assert "check the network and the disk, and start again" in said
    assert len(resumed["seen"]) == 12


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["torn", "drop"])
def test_request_whose_connection_breaks_is_repeated(fault, tmp_path, s3, monkeypatch):
    """obstore itself does not repeat all of them."""
    monkeypatch.setattr(bucket, "REQUEST_S", 1.0)
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        with_login(monkeypatch, s3, proxy.url)

        def body():
            own = Bucket(f"s3://data/broken-{fault}")
            made = own.create("000001/lease.json", b"{}")
            own.put("000001/config.json", b"{}")
            found = [own.get("000001/config.json"), newest_lease(own)[0], [*own.sizes()]]
            own.remove(["000001/config.json"])
            return [made, *found, [*own.sizes()]]

        proxy.begin(lambda number, method, path: fault if number % 2 else "")
        (found,) = on_ranks(1, body)
    names = ["000001/config.json", "000001/lease.json"]
    assert found == [True, b"{}", 1, names, names[1:]]


@pytest.mark.slow
def test_run_ends_in_order_without_its_store_and_says_what_is_missing(tmp_path, s3, monkeypatch):
    address = "s3://data/refused"
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        with_login(monkeypatch, s3, proxy.url)
        proxy.begin(lambda number, method, path: "503" if "safetensors" in path else "")
        words = [*RICH, f"checkpoint.mirror={address}", "checkpoint.mirror_timeout_s=2"]
        begun = time.monotonic()
        done = fit_on(1, tmp_path, *words, "checkpoint.every_steps=10")
        seconds = time.monotonic() - begun
        assert done["code"] == 0 and seconds < 60
    lines = (done["directory"] / "metrics.jsonl").read_text().splitlines()
    notes = [json.loads(line)["mirror"] for line in lines if '"mirror"' in line]
    assert notes[-1].startswith(f"checkpoint.mirror={address} has no checkpoint, not step 30")
    assert f"after 2 s: {address}/000001/checkpoints/step-" in notes[-1]
    for secret in (s3.environment["AWS_SECRET_ACCESS_KEY"], s3.environment["AWS_ACCESS_KEY_ID"]):
        for place in done["directory"].rglob("*"):
            assert not place.is_file() or secret.encode() not in place.read_bytes()


def test_answer_of_a_store_which_may_repeat_a_login_is_in_no_error():
    answer = "403 Forbidden: <?xml version='1.0'?><Key>AKIASECRET</Key>"
    with pytest.raises(StoreError) as raised, _translated("s3://bucket/first"):
        request = "Error performing PUT http://host/first in 2.3ms, after 5 retries - "
        raise RuntimeError(f"Generic S3 error: {request}{answer}")
    assert str(raised.value) == "s3://bucket/first: Generic S3 error: 403 Forbidden"
