"""Parts of `launch=ray` that need no cluster: places of ranks, their number, its address."""

import os
import signal
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from harness import CONF, on_ranks, wait_for
from harness.launch import environment_of_a_command

from trainer import ConfigError, load_config
from trainer.core.setup.early_checks import list_sizes
from trainer.places import ray_cluster, ray_ranks
from trainer.places.ray_cluster import RankCounts
from trainer.places.ray_ranks import Place


def read_all(place):
    """Return what a place has written, and the exit code of its rank."""
    lines = []

    def has_ended():
        more, code = place.read()
        lines.extend(more)
        return code if code is None else [code]

    (code,) = wait_for(has_ended, 20)
    return lines, code


@pytest.mark.parametrize(
    "error", [BlockingIOError(11, "Resource temporarily unavailable"), MemoryError()]
)
def test_rank_that_cannot_be_started_has_failed_and_says_why(error, monkeypatch):
    """Else the driver waits for it without end."""

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(ray_ranks.subprocess, "Popen", fail)
    place = Place()
    place.start(["-c", ""], {}, "")
    lines, code = read_all(place)
    ((is_error, line),) = lines
    assert code == 1 and is_error
    assert line.startswith(b"error: a rank cannot be started on ") and line.endswith(b"\n")
    assert (b"Resource temporarily unavailable" in line) is isinstance(error, OSError)


def test_signal_that_comes_before_the_process_of_a_rank_reaches_it(monkeypatch, tmp_path):
    """A start takes time, and the driver sends a signal once."""
    may_start = threading.Event()
    start = ray_ranks.subprocess.Popen

    def start_later(*arguments, **options):
        assert may_start.wait(20)
        return start(*arguments, **options)

    monkeypatch.setattr(ray_ranks.subprocess, "Popen", start_later)
    place = Place()
    place.send(signal.SIGTERM)
    place.start(["-c", "import time; time.sleep(60)"], {}, str(tmp_path))
    may_start.set()
    assert read_all(place) == ([], -signal.SIGTERM)
    place.send(signal.SIGTERM)  # its number may be another process's


def test_place_shows_what_its_rank_writes_and_its_exit_code(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MASTER_PORT", "1")
    code = "import os, sys; print(os.getcwd(), os.environ['RANK'], os.environ.get('MASTER_PORT'))"
    place = Place()
    place.start(["-c", f"{code}; sys.exit('bad')"], {"RANK": "3"}, str(tmp_path))
    lines, code = read_all(place)
    assert sorted(lines) == [(False, f"{tmp_path} 3 None\n".encode()), (True, b"bad\n")]
    assert code == 1


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["strategy=hsdp", "strategy.mesh.shard=2"], [2, 4, 6, 8]),
        (["strategy=tp", "strategy.mesh.tensor=4"], [4, 8]),
        (["data.global_batch=3"], [1, 2, 3]),
        (["run.norm_rows=4", "data.global_batch=12"], [1, 2, 3]),
        (["strategy=exact", "data.global_batch=8", "data.micro_batch=2"], [1, 2, 3, 4]),
        (["strategy=hsdp"], [1, 2, 4, 6, 8]),  # shard=node
        (["strategy=single"], [1]),
        (["strategy.comm_hook=bf16"], [*range(1, 9)]),  # this machine has no NCCL; nodes may
        ([], [*range(1, 9)]),
    ],
)
def test_only_numbers_of_ranks_that_the_layout_allows_are_started(words, sizes):
    """A run that grew or shrank to another number ended."""
    config = load_config(["task=tiny", *words], [CONF])
    assert list_sizes(config, 1, 8) == sizes
    assert list_sizes(config, 2, 8) == [size for size in sizes if size > 1] or sizes == [1]


def test_numbers_of_ranks_are_chosen_by_room_and_never_below_the_least():
    counts = RankCounts([8, 2, 4])
    assert (counts.least, counts.most) == (2, 8)
    assert [counts.largest_within(room) for room in (0, 1, 2, 3, 4, 7, 8, 9)] == [
        *(2, 2, 2, 2, 4, 4, 8, 8)
    ]
    assert counts.limited(5).most == 4


def test_numbers_that_ranks_refuse_are_left_out_and_above_a_good_one_all_larger_ones():
    counts = RankCounts([1, 2, 3, 4])
    grown = counts.without(3, former=2)
    assert [grown.largest_within(room) for room in (1, 2, 3, 4)] == [1, 2, 2, 2]
    shrunk = counts.without(3, former=4)
    assert [shrunk.largest_within(room) for room in (1, 2, 3, 4)] == [1, 2, 2, 4]


ENDS = """
import os, signal, sys
from trainer.places.ray_ranks import _end_reported
with _end_reported() as leave:
    {how}
print("after")
"""


@pytest.mark.parametrize(
    ("how", "is_reported"),
    [
        ("os._exit(1)", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("pass", False),
        ("sys.exit(3)", False),
        ("leave(); os._exit(130)", False),
    ],
)
def test_line_says_that_ray_has_ended_the_driver(how, is_reported):
    """It does so by C's _exit when the cluster's head is lost, which no handler sees."""
    words = [sys.executable, "-c", ENDS.format(how=how)]
    environment = environment_of_a_command()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stderr == ray_ranks.ENDED_BY_RAY) is is_reported, done
    assert is_reported or not done.stderr
    assert (done.stdout == "after\n") is (how == "pass")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("content", ["127.0.0.1:1", "junk", "", "x" * 10**6, b"\xff\xfe", "pipe"])
def test_address_of_a_cluster_that_is_gone_is_not_used(content, tmp_path, monkeypatch):
    """Ray waits two minutes for it; it keeps the address in a file after its head has gone."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    path = tmp_path / "ray/ray_current_cluster"
    path.parent.mkdir()
    if content == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def body():
        from ray._private import services

        told = []
        monkeypatch.setattr(ray_cluster, "say", told.append)
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: set())
        return ray_cluster._find_current(), told

    line = f"{path} has no cluster that answers; it is not used"
    assert on_ranks(1, body) == [("", [line])]


def test_port_that_answers_and_is_no_cluster_is_refused_soon(monkeypatch):
    monkeypatch.setattr(ray_cluster, "PROBE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="no cluster answers there; start it"):
            ray_cluster._check_answer(address)


class FakePlace:
    """An actor on a node; its methods answer at once, and it keeps the variables of its rank."""

    def __init__(self, node):
        self.describe = SimpleNamespace(remote=lambda: (f"10.0.0.{node}", f"node {node}"))
        self.serve = SimpleNamespace(remote=lambda: 29500)
        self.start = SimpleNamespace(remote=self.keep)

    def keep(self, words, variables, folder):
        self.variables = variables


def test_ranks_of_a_node_are_adjacent_and_have_its_devices():
    cluster = SimpleNamespace(ray=SimpleNamespace(get=lambda answers: answers))
    places = [FakePlace(node) for node in (1, 2, 1, 2, 2)]
    attempt = ray_ranks.Attempt(cluster, ["-m", "trainer"], {"MARK": "ray"}, 1.0)
    attempt._begin(places)
    found = [place.variables for place in attempt._places]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [[int(each[name]) for name in names] for each in found] == [
        *([rank, rank, 2, 0] for rank in range(2)),
        *([rank, rank - 2, 3, 1] for rank in range(2, 5)),
    ]
    same = {"WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MARK": "ray"}
    assert all(same.items() <= each.items() for each in found)
    nodes = [place.describe.remote()[1] for place in attempt._places]
    assert nodes == ["node 1"] * 2 + ["node 2"] * 3


class Scripted:
    """Attempts that end as a test says: their numbers of ranks, exit codes and moves."""

    def __init__(self, *ends):
        self._ends = [*ends]
        self.refused = []
        self.restarts = []

    def __call__(self, cluster, words, variables, others_s):
        self.restarts.append(variables["TORCHELASTIC_RESTART_COUNT"])
        return self

    def run(self, asked):
        self.size, codes, *moves = self._ends.pop(0)
        self.codes = dict(enumerate(codes))
        self.moves = moves[0] if moves else ""

    describe_failure = ray_ranks.Attempt.describe_failure
    _ended_late = frozenset()

    def refuse(self, size, former):
        self.refused.append((size, former))


def test_the_rank_that_was_killed_is_named_and_not_those_that_were_ended_for_it():
    attempt = ray_ranks.Attempt(SimpleNamespace(ray=None), [], {}, 1.0)
    attempt.codes = {2: 0, 0: 1, 1: -9, 3: ray_ranks.LOST_CODE}
    attempt._ended_late = {3}
    assert attempt.describe_failure() == "rank 1 was lost"
    attempt.codes[1] = 1
    assert attempt.describe_failure() == "rank 0 ended with code 1"


MOVES = "there is room for more ranks"


@pytest.mark.parametrize(
    ("ends", "code", "refused", "said"),
    [
        ([(2, [0, 0])], 0, [], []),
        ([(2, [75, 75])], 75, [], []),
        ([(2, [1, 2])], 2, [], []),
        ([(2, [75, 75], MOVES), (3, [0] * 3)], 0, [], [f"{MOVES}; the run is saved and goes on"]),
        (
            [(2, [75, 75], MOVES), (3, [1, 2, 1]), (2, [0, 0])],
            0,
            [(3, 2)],
            [
                f"{MOVES}; the run is saved and goes on",
                "3 ranks refuse to start; the run goes back to 2",
            ],
        ),
        (
            [(3, [1, -9, 0]), (2, [2, 2]), (3, [0] * 3)],
            0,
            [(2, 3)],
            [
                "rank 1 was lost; restart 1 of 1",
                "2 ranks refuse to start; the run goes back to 3",
            ],
        ),
        ([(2, [0, -9]), (2, [2, 2])], 2, [], ["rank 1 was lost; restart 1 of 1"]),
        (
            [(2, [0, -9]), (2, [-9, 1])],
            1,
            [],
            ["rank 1 was lost; restart 1 of 1", "rank 0 was lost"],
        ),
        ([(2, [1, 1]), (2, [1, 1])], 1, [], ["rank 0 ended with code 1; restart 1 of 1"]),
    ],
)
def test_what_follows_the_end_of_an_attempt(ends, code, refused, said, monkeypatch):
    attempts = Scripted(*ends)
    lines = []
    monkeypatch.setattr(ray_ranks, "Attempt", attempts)
    monkeypatch.setattr(ray_ranks, "say", lines.append)
    config = load_config(["task=tiny", "launch=ray", "launch.max_restarts=1"], [CONF]).launch
    arguments = (attempts, config, [], [], 30.0)
    assert ray_ranks._attempt_until_the_end(*arguments) == code
    assert (attempts.refused, lines) == (refused, said)
    assert attempts.restarts == [str(number) for number in range(len(ends))]


@pytest.mark.parametrize(
    ("words", "others_s"),
    [
        ([], 30.0),
        (["checkpoint.mirror=s3://data/first", "checkpoint.mirror_timeout_s=300"], 330.0),
    ],
)
def test_driver_waits_for_ranks_that_may_copy_after_the_first_failure(words, others_s, monkeypatch):
    class NoCluster:
        def __init__(self, config, sizes):
            self.sizes = sizes
            self.ray = self

        def shutdown(self): ...

    calls = []
    monkeypatch.setattr(ray_ranks, "Cluster", NoCluster)
    monkeypatch.setattr(
        ray_ranks,
        "_attempt_until_the_end",
        lambda cluster, *given: calls.append((cluster.sizes, given[-1])) or 0,
    )
    config = load_config(["task=tiny", "launch=ray", "launch.ranks=[2,3]", *words], [CONF])
    assert ray_ranks.launch(config, ["x"]) == 0
    assert calls == [([2, 3], others_s)]


@pytest.mark.parametrize(
    ("size", "room", "is_larger"), [(2, 1, False), (2, 2, True), (4, 9, False), (2, 0, False)]
)
def test_run_moves_for_room_only_if_it_makes_a_number_that_the_layout_allows(size, room, is_larger):
    cluster = SimpleNamespace(_counts=RankCounts([2, 4]), room=lambda: room)
    assert ray_cluster.Cluster.has_room_for_more(cluster, size) is is_larger


def test_run_that_was_asked_to_stop_does_not_go_back_to_its_former_number_of_ranks(monkeypatch):
    attempts = Scripted((2, [75, 75], MOVES), (3, [2, 2, 2]))
    asked = []
    run = attempts.run

    def run_and_stop(given):
        run(given)
        if attempts.size == 3:
            asked.append(signal.SIGTERM)

    monkeypatch.setattr(attempts, "run", run_and_stop)
    monkeypatch.setattr(ray_ranks, "Attempt", attempts)
    config = load_config(["task=tiny", "launch=ray"], [CONF]).launch
    assert ray_ranks._attempt_until_the_end(attempts, config, [], asked, 30.0) == 2


@pytest.mark.parametrize(
    ("word", "zones"),
    [
        ("a", ["a"]),
        ("!a", ["b", "c", None]),
        ("in(a, b)", ["a", "b"]),
        ("!in(a,b)", ["c", None]),
    ],
)
def test_nodes_are_chosen_by_their_labels(word, zones):
    nodes = {
        zone: {"kind": "gpu"} | ({"zone": zone} if zone else {}) for zone in ("a", "b", "c", None)
    }
    asked = {"zone": word, "kind": "gpu"}
    assert [z for z, has in nodes.items() if ray_cluster._has_labels(has, asked)] == zones
    assert not any(ray_cluster._has_labels(has, asked | {"kind": "cpu"}) for has in nodes.values())


def test_room_of_a_node_that_ends_soon_does_not_count(monkeypatch):
    free = {"one": {"CPU": 3.0}, "two": {"CPU": 2.0}, "leaving": {"CPU": 8.0}}
    monkeypatch.setattr(ray_cluster, "_free_by_node", lambda ray, labels: free)
    cluster = ray_cluster.Cluster.__new__(ray_cluster.Cluster)
    cluster.ray, cluster.needs = None, {"CPU": 2.0}
    cluster._config = SimpleNamespace(labels={})
    cluster.draining = lambda: {"leaving"}
    assert cluster.room() == 2
    cluster.draining = set
    assert cluster.room() == 6


@pytest.mark.parametrize(
    ("room", "free", "result"), [(1, 1, "fail"), (2, 1, "warn"), (2, 2, "ok"), (3, 3, "ok")]
)
def test_a_cluster_with_just_enough_room_is_right(room, free, result):
    config = load_config(["task=tiny", "launch=ray", "launch.ranks=[2,4]"], [CONF]).launch
    made = ray_cluster._judge(config, ray_cluster.TESTED, "Ray", room, free)
    assert made["result"] == result


def test_a_rank_on_ray_has_the_users_number_and_not_that_of_the_actor(monkeypatch, tmp_path):
    """Ray sets it within the actor; the driver passes on what the user exported there."""
    say = ["-c", "import os; print(os.environ.get('OMP_NUM_THREADS'))"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # after this process was started
    monkeypatch.setattr(ray_ranks, "environment_at_start", dict)
    assert said_on_ray(say, {}, tmp_path) == "None"
    assert said_on_ray(say, {"OMP_NUM_THREADS": "3"}, tmp_path) == "3"
    monkeypatch.setattr(ray_ranks, "environment_at_start", lambda: {"OMP_NUM_THREADS": "7"})
    assert said_on_ray(say, {}, tmp_path) == "7"
    assert "OMP_NUM_THREADS" in ray_ranks.PASSED_ON


def said_on_ray(words, variables, folder):
    place = ray_ranks.Place()
    place.start(words, variables, str(folder))
    lines, code = [], None
    while code is None:
        more, code = place.read()
        lines += more
    place._process.stdout.close()
    place._process.stderr.close()
    return b"".join(line for _, line in lines).decode().strip()
