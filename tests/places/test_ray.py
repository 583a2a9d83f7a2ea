"""`launch=ray` on clusters of several nodes on one machine: the run is that of torchrun's ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import CONF, ended, fit_on, free_port, newest, on_ranks, wait_for
from harness import launch as start
from harness.launch import SCRIPTS, TORCHRUN, environment_of_a_command
from harness.s3 import proxied, serving_s3
from harness.stored import check_same_bits, tensors_of

from trainer.places.bucket import Bucket
from trainer.places.listing import read_listing

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
pytestmark = needs_ray
LIMIT_S = 300.0
SLOW = ["--config-dir", CONF, "--config-dir", str(SCRIPTS / "faults/conf"), "task=slow"]
SLOW += ["strategy=exact", "run.name=a", "run.steps=20", "checkpoint.every_steps=2"]
SLOW += ["eval.every_epochs=null", "eval.every_steps=null"]
PAUSE = "task.options.pause_s=0.3"


# A cluster in a process of its own: Ray's threads would break the forks of later tests.
SERVE = """
import sys
from ray.cluster_utils import Cluster
first, *others = map(int, sys.argv[1:])
made = Cluster(initialize_head=True, head_node_args={"num_cpus": first})
for number in others:
    made.add_node(num_cpus=number)
print(made.address, flush=True)
for line in sys.stdin:
    if line == "add\\n":
        made.add_node(num_cpus=1)
    elif line == "remove\\n":
        made.remove_node(made.list_all_nodes()[-1], allow_graceful=False)
    print(made.list_all_nodes()[-1].node_id, flush=True)
made.shutdown()
"""


class Served:
    def __init__(self, process):
        self._process = process
        self.address = process.stdout.readline().strip()

    def ask(self, what):
        """Add a node of one CPU, or remove the last one; return the id of the last node."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextmanager
def cluster(*cpus):
    """Yield a cluster with nodes of so many CPUs; the first one is the head."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *map(str, cpus)],
        env=environment_of_a_command(RAY_AUTH_MODE="disabled"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Served(process)
    finally:
        process.communicate(timeout=60)


# A driver that looks for room earlier, so that a test need not train for a minute.
SOON = """
import sys
from trainer.places import ray_ranks
ray_ranks.GROWS_AFTER_S = 2.0
from trainer.cli import run
from trainer.train import describe, main
run(main, describe, has_json=False)
"""


def drive_soon(made, folder, *words):
    """Start such a driver; what it says goes to stderr.txt."""
    more = {"RAY_ADDRESS": made.address, "RAY_AUTH_MODE": "disabled"}
    words = ["--config-dir", CONF, "task=ends", "run.name=a", "launch=ray", *words]
    with (folder / "stderr.txt").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-c", SOON, *words],
            cwd=folder,
            env=environment_of_a_command(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


def drive(made, folder, *words):
    more = {"RAY_ADDRESS": made.address, "RAY_AUTH_MODE": "disabled"}
    return start(folder, *words, "launch=ray", **more)


def undisturbed(folder):
    folder.mkdir()
    code, out, err = ended(start(folder, *SLOW, launcher=TORCHRUN))
    assert code == 0, out + err
    return folder


def check_equal(one: Path, other: Path):
    check_same_bits(*(tensors_of(newest(each / "runs/slow/a")) for each in (one, other)))


def ranks(run):
    """Return rank to process id of the ranks that a run started on this machine."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (place / "environ").read_bytes().split(b"\0")
            words = (place / "cmdline").read_bytes()
            if b"LOCKSTEP_LAUNCH=ray" in told and (place / "cwd").readlink() == run:
                of = {int(each[5:]) for each in told if each.startswith(b"RANK=")}
                found |= {rank: int(place.name) for rank in of if b"watch" not in words}
    return found


def has_saved(folder, step):
    return lambda: (folder / f"runs/slow/a/checkpoints/step-{step:08}").exists()


@pytest.fixture
def one_node():
    with cluster(2) as made:
        yield made


@pytest.mark.slow
def test_ranks_on_a_cluster_have_the_bits_of_others(one_node, tmp_path):
    words = ["task=tiny", "strategy=exact", "run.steps=4", "run.name=a", "eval.every_epochs=null"]
    words += ["log.trackers=[]"]  # no import of TensorBoard
    reference = fit_on(2, tmp_path / "reference", *words)["directory"]
    words += ["--config-dir", CONF, "launch.ranks=2"]
    code, out, err = ended(drive(one_node, tmp_path, *words), LIMIT_S)
    assert code == 0, out + err
    assert "2 ranks on 1 node" in out, out
    check_same_bits(*(tensors_of(newest(run)) for run in (tmp_path / "runs/tiny/a", reference)))


@contextmanager
def head(folder):
    """Yield the environment of users of a cluster with a dashboard, which takes jobs."""
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets are short
    ports = [free_port() for _ in range(4)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"RAY_TMPDIR": place, "RAY_AUTH_MODE": "disabled", "PATH": path}
    own["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ports[1]}"
    environment = environment_of_a_command(**own)
    words = ["ray", "start", "--head", "--block", "--num-cpus=4", "--dashboard-host=127.0.0.1"]
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    words += [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            yield environment
        finally:
            process.terminate()  # it ends what it started
            process.wait(60)
            shutil.rmtree(place, ignore_errors=True)


@pytest.mark.slow
def test_a_new_project_is_a_job_of_ray_that_resumes_from_the_bucket(tmp_path):
    """The cluster gets a copy of the project, and loses it: the bucket has the run."""
    pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed")
    bucket = tmp_path / "bucket/first"
    first = []
    with head(tmp_path) as environment:
        options = {"env": environment, "capture_output": True, "text": True}
        words = [sys.executable, "-m", "trainer.new", "points", "--recipe=gan", "--cluster=ray"]
        subprocess.run(words, cwd=tmp_path, check=True, **options)

        def submit(*words):
            line = ["bash", "ray.sh", *words, "strategy.precision=fp32"]
            environment["BUCKET"] = f"file://{bucket}"
            return subprocess.run(line, cwd=tmp_path / "points", timeout=LIMIT_S, **options)

        def starts():
            done = submit("run.steps=20", "checkpoint.every_steps=10", "run.dir=runs-one")
            return done if "submitted successfully" in done.stdout + done.stderr else None

        wait_for(lambda: (done := starts()) and first.append(done) is None, LIMIT_S)
        second = submit("run.steps=30", "run.dir=runs-two")
    said = first[0].stdout + first[0].stderr
    assert first[0].returncode == 0 and "ranks on 1 node" in said, said
    assert "has step 20" in said and len([*bucket.glob("*/config.json")]) == 2, said
    said = second.stdout + second.stderr
    assert second.returncode == 0 and "resumed at step 20" in said, said


@pytest.mark.slow
def test_ranks_on_two_nodes_have_the_bits_of_torchrun(tmp_path):
    reference = undisturbed(tmp_path / "reference")
    with cluster(1, 1) as made:
        words = [*SLOW, "launch.ranks=2", "launch.resources.memory=1e8"]
        code, out, err = ended(drive(made, tmp_path, *words), LIMIT_S)
    assert code == 0, out + err
    assert "2 ranks on 2 nodes" in out, out
    check_equal(tmp_path, reference)


@pytest.mark.slow
def test_a_killed_rank_and_a_lost_node_start_again_as_the_same_run(tmp_path):
    reference = undisturbed(tmp_path / "reference")
    with cluster(1, 1, 1) as made:
        words = ["launch.ranks=[1,3]", "launch.max_restarts=2", PAUSE]
        driver = drive(made, tmp_path, *SLOW, *words)
        wait_for(has_saved(tmp_path, 4), LIMIT_S)
        os.kill(ranks(tmp_path)[1], signal.SIGKILL)
        wait_for(has_saved(tmp_path, 10), LIMIT_S)
        made.ask("remove")
        code, out, err = ended(driver, LIMIT_S)
    assert code == 0, out + err
    assert "restart 1 of 2" in err and "restart 2 of 2" in err, err
    assert "3 ranks on 3 nodes" in out and "2 ranks on 2 nodes" in out, out
    check_equal(tmp_path, reference)


@pytest.mark.slow
def test_a_run_leaves_a_node_that_is_drained(tmp_path):
    reference = undisturbed(tmp_path / "reference")
    with cluster(1, 1) as made:
        driver = drive(made, tmp_path, *SLOW, "launch.ranks=[1,2]", PAUSE)
        wait_for(has_saved(tmp_path, 4), LIMIT_S)
        drained = made.ask("name")
        words = ["drain-node", "--address", made.address, "--node-id", drained]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        words += ["--deadline-remaining-seconds", "60"]
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        code, out, err = ended(driver, LIMIT_S)
    assert code == 0, out + err
    assert "1 of 2 nodes will end soon; the run is saved and goes on" in err, err
    assert "restart" not in err and "1 rank on 1 node" in out, out + err
    check_equal(tmp_path, reference)


@pytest.mark.slow
def test_a_run_grows_with_the_cluster(tmp_path):
    reference = undisturbed(tmp_path / "reference")
    with cluster(1) as made:
        words = [*SLOW, "launch.ranks=[1,2]", "task.options.pause_s=5"]
        driver = drive(made, tmp_path, *words)
        wait_for(has_saved(tmp_path, 2), LIMIT_S)
        made.ask("add")
        code, out, err = ended(driver, LIMIT_S)
    assert code == 0, out + err
    assert "there is room for more ranks; the run is saved and goes on" in err, err
    assert "restart" not in err and "2 ranks on 2 nodes" in out, out + err
    check_equal(tmp_path, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["strategy=hsdp", "strategy.mesh.shard=2", "launch.ranks=[2,4]"], [2, 4]),
        (["task.options.refused=[3]", "launch.ranks=[1,4]"], [2, 3, 2]),
    ],
)
def test_a_run_moves_only_to_numbers_of_ranks_that_allow_it_and_goes_back(words, sizes, tmp_path):
    """The layout is known before; what else refuses a number shows in a start with it.

    The second node comes when the first one was refused: a slow driver would see both at once.
    """
    refusal = "3 ranks refuse to start; the run goes back to 2"
    stderr = tmp_path / "stderr.txt"
    with cluster(2) as made:
        more = ["run.steps=60", "task.options.pause_s=0.5", "checkpoint.every_steps=4"]
        driver = drive_soon(made, tmp_path, *words, *more)
        for step in (4, 12):
            path = tmp_path / f"runs/ends/a/checkpoints/step-{step:08}"
            wait_for(path.exists, LIMIT_S)
            made.ask("add")
            if 3 in sizes:
                wait_for(lambda: refusal in stderr.read_text(), LIMIT_S)
        out, _ = driver.communicate(timeout=LIMIT_S)
    err = stderr.read_text()
    assert driver.returncode == 0, out + err
    moves = [
        int(line.split(" rank")[0].split()[-1]) for line in out.splitlines() if " node" in line
    ]
    assert moves == [size for size in sizes if size != 3], out + err
    assert (refusal in err) is (3 in sizes), err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["[0,1]", "[1]"])
def test_the_last_checkpoint_reaches_the_bucket_however_long_it_takes(ranks, tmp_path, monkeypatch):
    """The driver ended rank 0 30 s after the first rank had failed."""
    with serving_s3(tmp_path) as s3, proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        proxy.slow_s = 8.0
        proxy.begin(lambda number, method, path: "slow" if "/checkpoints/step-" in path else "")
        for name, value in (s3.environment | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)
        words = ["--config-dir", CONF, "task=ends", "run.name=a", "launch.ranks=2"]
        words += ["checkpoint.mirror=s3://data/first", f"task.options.ranks={ranks}"]
        with cluster(2) as made:  # its nodes have this environment
            code, out, err = ended(drive(made, tmp_path, *words), LIMIT_S)
        held = on_ranks(1, lambda: read_listing(Bucket("s3://data/first")).checkpoints())
    assert (code, held) == (1, [{5: "000001/checkpoints/step-00000005"}]), out + err


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_resumes_and_a_second_driver_is_refused(tmp_path):
    reference = undisturbed(tmp_path / "reference")
    with cluster(4) as made:
        words = [*SLOW, "run.resume=auto", "launch.ranks=2"]
        driver = drive(made, tmp_path, *words, "task.options.pause_s=2")
        wait_for(has_saved(tmp_path, 4), LIMIT_S)
        code, out, err = ended(drive(made, tmp_path, *words), LIMIT_S)
        assert code == 2 and "writes there" in err, out + err
        driver.send_signal(signal.SIGINT)
        code, out, err = ended(driver, LIMIT_S)
        assert code == 75 and "stopped by SIGINT" in out, out + err
        code, out, err = ended(drive(made, tmp_path, *words), LIMIT_S)
    assert code == 0, out + err
    check_equal(tmp_path, reference)


@pytest.mark.slow
def test_check_tells_the_cluster_and_whether_the_ranks_fit(tmp_path):
    more = {"RAY_AUTH_MODE": "disabled", "verb": "trainer.check"}
    rows = []
    with cluster(1, 1) as made:
        for ranks in (2, 3):
            words = ["--json", "launch=ray", f"launch.ranks={ranks}", "dist.timeout_s=120"]
            done = start(tmp_path, *words, RAY_ADDRESS=made.address, **more)
            code, out, _ = ended(done, LIMIT_S)
            told = {row["check"]: row for row in json.loads(out)["checks"]}
            rows.append((code, told["ray"]["result"], told["ray"]["found"]))
    facts = f"cluster: 2 nodes at {made.address}, 2 CPUs and 0 GPUs; a rank takes 1 CPU: room for 2"
    assert facts in rows[0][2] and facts in rows[1][2]
    assert [row[:2] for row in rows] == [(0, "ok"), (1, "fail")]


@pytest.mark.slow
def test_a_bad_setting_ends_at_once_with_its_line(tmp_path):
    with cluster(2) as made:
        words = [*SLOW, "data.global_batch=1000", "launch.ranks=2", "launch.max_restarts=3"]
        code, out, err = ended(drive(made, tmp_path, *words), LIMIT_S)
    assert code == 2, out + err
    assert err.startswith("error: data.global_batch=1000: must be at most"), err
    assert "restart" not in err


def raylet_of(place):
    """Return the address of the cluster with this folder that a process on this machine runs."""
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = each.read_bytes().decode().split("\0")
            given = [word for word in words if word.startswith("--gcs-address=")]
            if given and any(str(place) in word for word in words):
                return given[0].partition("=")[2]
    return None


@pytest.fixture
def own_folder():
    """Yield the environment of a driver that starts its own cluster, with a folder for it."""
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets are short
    yield {"RAY_TMPDIR": place, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.slow
def test_a_killed_rank_starts_again_on_as_many_ranks_as_the_layout_allows(own_folder, tmp_path):
    """There is room for three, and a mesh with shards of two."""
    words = ["task=ends", "--config-dir", CONF, "run.name=a", "launch=ray", "launch.ranks=[1,3]"]
    words += ["launch.cpus_per_rank=0.3", "launch.max_restarts=1"]
    words += ["strategy=hsdp", "strategy.mesh.shard=2"]
    words += ["task.options.how=kill", "task.options.ranks=[1]"]
    code, out, err = ended(start(tmp_path, *words, **own_folder), LIMIT_S)
    assert code == 0, out + err
    assert out.count("2 ranks on 1 node") == 2 and "resumed at step 5 of 8" in out, out
    assert "rank 1 was lost; restart 1 of 1\n" in err, err
    assert json.loads((tmp_path / "runs/ends/a/exit.json").read_text())["reason"] == "done"


@pytest.mark.slow
def test_sigterm_while_ray_starts_ends_the_run_with_one_line(own_folder, tmp_path):
    driver = start(tmp_path, *SLOW, "launch=ray", **own_folder)
    place = own_folder["RAY_TMPDIR"]
    wait_for(lambda: [*Path(place).glob("ray/session_2*/logs/gcs_server.out")], LIMIT_S)
    driver.terminate()
    code, out, err = ended(driver, LIMIT_S)
    assert (code, out, err) == (130, "", "interrupted; nothing was saved\n")


@pytest.mark.slow
def test_a_second_run_has_a_cluster_of_its_own_and_outlives_that_of_the_first(own_folder, tmp_path):
    words = [*SLOW, PAUSE, "run.steps=40", "launch=ray", "launch.cpus_per_rank=0.1"]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first = start(folders[0], *words, **own_folder)
    place = own_folder["RAY_TMPDIR"]
    address = wait_for(lambda: raylet_of(place), LIMIT_S)
    Path(place, "ray/ray_current_cluster").write_text(address)  # of all that other tests have
    wait_for(has_saved(folders[0], 2), LIMIT_S)
    second = start(folders[1], *words, **own_folder | {"RAY_ADDRESS": ""})
    codes = [ended(each, LIMIT_S) for each in (first, second)]
    assert [code for code, *_ in codes] == [0, 0], codes
    assert "restart" not in codes[1][2], codes


def process_of(place, words):
    """Return a process of the cluster with this folder."""
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (each / "cmdline").read_bytes().replace(b"\0", b" ")
            if words in told and place.encode() in told + (each / "environ").read_bytes():
                return int(each.name)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (b"ray::Place", "ray     rank {} was lost"),
        (b"raylet/raylet", "ray     rank {} was lost"),
        (b"gcs_server", "error: launch=ray: Ray has ended this process, as it does when it loses"),
    ],
)
def test_the_loss_of_a_process_of_ray_is_one_line_and_in_exit_json(
    words, line, own_folder, tmp_path
):
    """Ray ends the driver by itself without its head, and kills the group of its own process."""
    more = ["run.steps=5000", "task.options.pause_s=0.2", "launch.cpus_per_rank=0.3"]
    more += ["--config-dir", CONF, "task=ends", "run.name=a", "launch=ray", "launch.ranks=2"]
    driver = start(tmp_path, *more, **own_folder)
    run = tmp_path / "runs/ends/a"
    wait_for((run / "checkpoints/step-00000005").exists, LIMIT_S)
    os.kill(process_of(own_folder["RAY_TMPDIR"], words), signal.SIGKILL)
    code, out, err = ended(driver, LIMIT_S)
    assert code == 1 and any(line.format(rank) in err for rank in (0, 1)), out + err
    wait_for((run / "exit.json").exists)
    assert "it was killed" in json.loads((run / "exit.json").read_text())["reason"]
    while (left := process_of(own_folder["RAY_TMPDIR"], b"ray::")) is not None:
        with suppress(ProcessLookupError):  # agents of Ray, which outlive their raylet for a while
            os.kill(left, signal.SIGKILL)


@pytest.mark.slow
def test_a_folder_that_ray_cannot_use_is_one_line(tmp_path):
    place = tmp_path / ("x" * 100)
    place.mkdir()
    more = {"RAY_TMPDIR": str(place), "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled"}
    code, out, err = ended(start(tmp_path, *SLOW, "launch=ray", **more), LIMIT_S)
    begin = "error: launch=ray: Ray cannot start a cluster on this machine: "
    assert (code, out, len(err.splitlines())) == (2, "", 1) and err.startswith(begin), err
    assert err.endswith("; set RAY_TMPDIR to a folder with a short path, such as /tmp\n")
