"""The doctor reports nothing on sound ranks, and each planted fault by name and in time."""

import contextlib
import ctypes
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from harness import TORCHRUN, Beside, ended, free_port, launch, on_ranks
from harness.command import Process
from harness.s3 import proxied

import trainer as package
from trainer import ConfigError, World, load_config
from trainer.base.errors import counted
from trainer.check import doctor as group_checks
from trainer.check import rank_checks
from trainer.check.__main__ import _layout_of, _start, main
from trainer.core.distributed import accelerator
from trainer.core.record import fingerprint
from trainer.places import ray_cluster
from trainer.places.bucket import Bucket
from trainer.places.ray_cluster import TESTED

LIMIT_S = 0.7
ROWS = ["backend", "disk", "open files", "shared memory", "threads", "versions", "code", "settings"]
TOGETHER = ["rendezvous", "clocks", "run.dir"]
SUMS = ["all-reduce 1 KB", "all-reduce 64 KB", "all-reduce 1 MB", "all-reduce 16 MB"]


def examined(
    size: int, *words: str, plant: Callable[[int], None] = lambda rank: None
) -> list[tuple]:
    """Run the doctor on forked ranks; return, per rank, (exit code, rows by name, stderr, seconds
    since the rendezvous).

    `plant` is called with the rank before the doctor starts.
    """

    def body() -> tuple[int, dict[str, Any], str, float]:
        began = {}
        made = []

        class Timed(group_checks.Examination):
            def __init__(self, *parts):
                super().__init__(*parts)
                made.append(self)

            def _begin(self, stage: str) -> None:
                super()._begin(stage)
                began[stage] = self.since

        group_checks.Examination = Timed
        plant(int(os.environ["RANK"]))
        own = [word.format(rank=os.environ["RANK"]) for word in words]
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            code = main(own)
        rows = [asdict(check) for check in made[0].checks] if out.getvalue() else []
        return (
            code,
            {row["check"]: row for row in rows},
            err.getvalue(),
            time.monotonic() - began["rendezvous"],
        )

    return on_ranks(size, body)


def wrong(rows: dict[str, Any]) -> dict[str, str]:
    return {name: row["result"] for name, row in rows.items() if row["result"] != "ok"}


# Started as a user starts it ----------------------------------------------------------------------


@pytest.mark.slow
def test_one_process_prints_a_table_and_warnings_do_not_fail(tmp_path):
    threads = {
        "OMP_NUM_THREADS": "64",
        "MKL_DYNAMIC": "FALSE",
    }  # else MKL uses at most the cores of the machine
    code, out, err = ended(launch(tmp_path, verb="trainer.check", **threads))
    assert code == 0 and err == "", err
    lines = out.splitlines()
    assert lines[0].split() == ["check", "result", "found", "advice"]
    told = {line[1:18].strip(): line for line in lines[1:]}
    assert list(told) == ["rank 0", *ROWS, *SUMS]
    assert (
        " warn " in told["threads"]
        and "64 threads" in told["threads"]
        and "OMP_NUM_THREADS=1" in told["threads"]
    )
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_under_torchrun_are_one_json_object(is_real, command, tmp_path):
    if is_real:
        process = launch(tmp_path, "--json", verb="trainer.check", launcher=TORCHRUN)
        code, out, err = ended(process)
    else:
        code, out, err = command("--json", ranks=2, verb="trainer.check")
    assert code == 0, err
    told = json.loads(out)
    rows = {row["check"]: row for row in told["checks"]}
    assert list(rows) == ["rank 0", "rank 1", *ROWS, *TOGETHER, *SUMS]
    assert told["result"] in ("ok", "warn") and "fail" not in wrong(rows).values()
    assert (
        "local_rank 1, node 0, host " in rows["rank 1"]["found"]
        and "by torchrun" in rows["rank 1"]["found"]
    )
    assert re.match(r"2 ranks connected at (localhost|127.0.0.1):", rows["rendezvous"]["found"])
    assert all("exact in int64 and float64; " in rows[name]["found"] for name in SUMS)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_ranks_under_mpirun_are_examined(backend, tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    words = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "-m",
        "trainer.check",
    ]
    words += ["--json", f"dist.backend={backend}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    assert (
        list(rows) == ["rank 0", "rank 1", *ROWS, *TOGETHER, *SUMS]
        and "by mpirun" in rows["rank 1"]["found"]
    )


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("dist.backend=mpi", "dist.backend=mpi: needs mpirun or srun"),
        ("dist.timeout=3", "dist.timeout is not a setting; did you mean dist.timeout_s"),
        (
            "launch=elastic",
            "launch=elastic: check starts no ranks; run torchrun ... -m trainer.check",
        ),
        ("--jsn", "--jsn is not a flag"),
    ],
)
def test_bad_setting_is_refused(word, line):
    with pytest.raises(ConfigError) as error:
        main([word])
    assert str(error.value).startswith(line)


# Groups that do not form --------------------------------------------------------------------------


@pytest.mark.slow
def test_rank_whose_peer_is_missing_reports_what_it_knows(command, tmp_path):
    def start(rank: int) -> Process:
        given = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        words = [f"dist.timeout_s={LIMIT_S}"]
        return command.start(*words, verb="trainer.check", environment=given)

    for rank, process in enumerate([start(0), start(1)]):
        code, out, err = ended(process)
        told = {line[1:15].strip(): line for line in out.splitlines()}
        assert code == 1 and f"rank {rank}" in told and "shared memory" in told
        assert (
            " fail " in told["rendezvous"]
            and "start the ranks that are missing" in told["rendezvous"]
        )
        line = r"error: rank 1 \(.*, process \d+\): rendezvous: " if rank else "error: rendezvous: "
        found = re.findall(f"^{line}no rendezvous at 127.0.0.1:", err, re.MULTILINE)
        assert len(found) == 1, err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("init", ["env", pytest.param("file", marks=pytest.mark.slow)])
def test_missing_rank_is_named_in_time_on_every_rank(init, tmp_path):
    def plant(rank: int) -> None:
        os.environ |= {"RANK": "02"[rank], "WORLD_SIZE": "3"}

    meeting = [f"dist.path={tmp_path / 'meet'}"] if init == "file" else []
    words = [f"dist.timeout_s={LIMIT_S}", f"dist.init={init}", f"run.dir={tmp_path}", *meeting]
    ends = examined(2, *words, plant=plant)
    beside = Beside(lambda: examined(2, f"run.dir={tmp_path}"))
    for number, (code, rows, err, seconds) in enumerate(ends):
        assert code == 1 and seconds < 2 * LIMIT_S + beside.allowance_s
        assert "rank 1 did not connect; rank 0 is process " in err and len(err.splitlines()) == 1
        assert number or (rows["rendezvous"]["result"] == "fail" and rows["disk"]["result"] == "ok")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_all_reduce_that_hangs_is_given_up(tmp_path):
    def plant(rank: int) -> None:
        if rank == 1:
            dist.all_reduce = lambda *_: time.sleep(60)

    words = [f"dist.timeout_s={LIMIT_S}", f"run.dir={tmp_path}"]
    ends = examined(2, *words, plant=plant)
    beside = Beside(lambda: examined(2, f"run.dir={tmp_path}"))
    for code, rows, err, seconds in ends:
        assert (
            code == 1 and seconds < 2 * LIMIT_S + beside.allowance_s and "all-reduce 1 KB: " in err
        )
        assert not rows or (wrong(rows)["all-reduce 1 KB"] == "fail" and "rank 1" in rows)
    assert [*tmp_path.iterdir()] == []


# Planted faults -----------------------------------------------------------------------------------


def late_clock() -> None:
    real = time.time
    time.time = lambda: real() - 90


def few_files() -> None:
    rank_checks.resource.setrlimit(rank_checks.resource.RLIMIT_NOFILE, (1000, 20000))


def wrong_sum() -> None:
    real = dist.all_reduce

    def reduce(values, *arguments, **named):
        real(values, *arguments, **named)
        values[3:4] += 1

    dist.all_reduce = reduce


def other_code() -> None:
    fingerprint._package_digest = lambda: "other"


def other_version() -> None:
    package.__version__ = "0.0.9"


def other_backend() -> None:
    rank_checks.choose_backend = lambda *_: "nccl"


WARNED = {
    "clocks": (late_clock, " ms, on rank 1, measured to "),
    "open files": (few_files, "rank 1: at most 1,000"),
}
FAILED = {
    "all-reduce 1 MB": (wrong_sum, " sums are wrong, on rank 1"),
    "code": (other_code, "and other on rank 1"),
    "versions": (other_version, f"trainer is {package.__version__} on rank 0 and 0.0.9 on rank 1"),
}
UNMET = {
    "backends": (
        other_backend,
        "dist.backend is gloo on rank 0 and nccl on rank 1: must be the same",
    )
}


@pytest.mark.parametrize(
    ("faults", "result"),
    [
        pytest.param(WARNED, "warn", id="warned", marks=pytest.mark.slow),
        pytest.param(FAILED, "fail", id="failed"),
        pytest.param(UNMET, "fail", id="unmet", marks=pytest.mark.slow),
    ],
)
def test_fault_of_one_rank_is_reported(faults, result, tmp_path):
    def plant(rank: int) -> None:
        for change, _ in faults.values() if rank else ():
            change()

    first, second = examined(2, f"run.dir={tmp_path}", plant=plant)
    assert first[0] == second[0] == int(result == "fail")
    for name, (_, found) in faults.items():
        row = first[1][name]
        assert row["result"] == result and found in row["found"] and row["advice"], row
    if faults is not UNMET:  # then each rank that was started by hand says what it knows
        assert second[1] == {}
    assert [*tmp_path.iterdir()] == []


def test_settings_that_differ_are_named(tmp_path):
    (code, rows, *_), _ = examined(2, f"run.dir={tmp_path}", "data.workers={rank}")
    assert code == 1 and rows["settings"]["found"] == "data.workers is 0 on rank 0 and 1 on rank 1"


def test_run_dir_that_cannot_be_written_fails():
    [(code, rows, *_)] = examined(1, "run.dir=/proc/runs")
    assert code == 1 and wrong(rows)["disk"] == "fail"
    assert rows["disk"]["found"].startswith("run.dir=/proc/runs: /proc cannot be written: ")


@pytest.fixture
def tmpfs(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "doctor", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root, to mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_fails(tmpfs):
    (tmpfs / "full").write_bytes(bytes(2**16))
    [(code, rows, *_)] = examined(1, f"run.dir={tmpfs}")
    assert (
        code == 1
        and "No space left on device" in rows["disk"]["found"]
        and "make room" in rows["disk"]["advice"]
    )
    assert [path.name for path in tmpfs.iterdir()] == ["full"]


def test_run_dir_that_a_rank_does_not_see_is_a_warning(tmpfs):
    def mount_over() -> None:
        assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS: a separate mount namespace
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "doctor", str(tmpfs)], check=True)

    (code, rows, *_), _ = examined(
        2, f"run.dir={tmpfs}", plant=lambda rank: mount_over() if rank else None
    )
    assert (
        code == 0
        and wrong(rows)["run.dir"] == "warn"
        and rows["run.dir"]["found"].endswith("all but rank 1")
    )
    assert [*tmpfs.iterdir()] == []


# The bucket ---------------------------------------------------------------------------------------


def with_login(monkeypatch, s3, **others):
    for name, value in {**s3.environment, **others}.items():
        monkeypatch.setenv(name, value)


def row_of(tmp_path, address, *words):
    [(code, rows, *_)] = examined(
        1, f"run.dir={tmp_path}/runs", f"checkpoint.mirror={address}", *words
    )
    assert code == int(rows["mirror"]["result"] == "fail")
    assert rows["mirror"]["found"].startswith(f"checkpoint.mirror={address}: ")
    return rows["mirror"]


def files_in(address):
    """Look in a fork: obstore's threads would break the forks of later tests."""
    [found] = on_ranks(1, lambda: Bucket(address).sizes())
    return found


def test_a_bucket_is_written_read_and_left_empty(tmp_path, monkeypatch, s3):
    with_login(monkeypatch, s3)
    for address in ("s3://data/checked", f"file://{tmp_path}/bucket/checked"):
        row = row_of(tmp_path, address)
        pattern = r": writes [\d,]+ MB/s, reads [\d,]+ MB/s, refuses a second conditional put"
        assert row["result"] == "ok" and re.search(f"{pattern}$", row["found"]), row
        if address.startswith("file:"):
            assert not (tmp_path / "bucket/checked").exists()
        else:
            assert files_in(address) == {}


def test_a_store_without_conditional_puts_fails(tmp_path, monkeypatch, s3):
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        proxy.begin(
            lambda number, method, path: "200" if method == "PUT" and "-data" not in path else ""
        )
        with_login(monkeypatch, s3, AWS_ENDPOINT_URL=proxy.url)
        row = row_of(tmp_path, "s3://data/unconditional")
        assert files_in("s3://data/unconditional") == {}
    assert "did not refuse the second conditional put of a file, so two runs could" in row["found"]
    assert row["advice"].startswith("use a store that supports If-None-Match, such as S3, ")


def test_a_wrong_login_is_one_line_without_it(tmp_path, monkeypatch, s3):
    with_login(monkeypatch, s3, AWS_ACCESS_KEY_ID="AKIASECRETNAME", AWS_SECRET_ACCESS_KEY="hidden")
    row = row_of(tmp_path, "s3://data/refused")
    assert ": cannot be written: s3://data/refused/" in row["found"] and "\n" not in row["found"]
    assert row["advice"] == "check the address, the login and the network"
    assert "SECRET" not in row["found"] and "hidden" not in row["found"]


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_given_up_in_time(tmp_path, monkeypatch, s3):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with_login(monkeypatch, s3, AWS_ENDPOINT_URL=url)
        row = row_of(tmp_path, "s3://data/silent", "dist.timeout_s=4")
    assert row["found"].endswith(": no answer to 8 MB within 2 s")
    assert row["advice"] == "check the address and the network, or set a larger dist.timeout_s"


def test_the_first_step_of_a_check_is_not_mirrored(tmp_path):
    words = ["task=text", "task.options.files=24", f"checkpoint.mirror=file://{tmp_path}/bucket/a"]
    assert on_ranks(1, lambda: _start(load_config(words))) == [0]
    assert [*(tmp_path / "bucket").rglob("*")] == []


# The Ray cluster ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "room", "version", "result", "text", "advice"),
    [
        (
            [2, 8],
            (4, 4),
            TESTED,
            "ok",
            "it: room for 4 ranks, 4 of them now; launch.ranks=[2,8]",
            "",
        ),
        (3, (4, 2), TESTED, "warn", "room for 4 ranks, 2 of them now", "other jobs have the rest"),
        (2, (4, 4), "2.99.0", "warn", "launch.ranks=2 fits", f"pip install ray=={TESTED}"),
        (8, (4, 4), TESTED, "fail", "launch.ranks=8: does not fit; it: ", "set launch.ranks=4, "),
        ([2, 8], (0, 0), TESTED, "fail", "launch.ranks=[2,8]: does not fit", "reserve less by"),
    ],
)
def test_ranks_that_do_not_fit_on_the_cluster_fail(ranks, room, version, result, text, advice):
    words = ["task=text", "launch=ray", f"launch.ranks={ranks}".replace(" ", "")]
    told = ray_cluster._judge(load_config(words).launch, version, "it", *room)
    assert told["result"] == result and text in told["found"]
    assert advice in told.get("advice", "")


def test_a_layout_of_several_ranks_is_checked_by_the_process_that_starts_them(capfd):
    words = ["task=text", "task.options.files=24", "launch=ray", "strategy=tp"]
    with pytest.raises(ConfigError, match="the product must divide the number of ranks"):
        group_checks.load([*words, "launch.ranks=1"], [])
    words += ["launch.ranks=[2,8]"]
    group_checks.load(words, [])
    assert _layout_of(load_config(words).launch) == {"ranks": "2", "local_ranks": "2"}
    assert on_ranks(1, lambda: _start(load_config(words))) == [0]
    assert "start   not tried: one rank is too few for this layout" in capfd.readouterr().out


def test_the_tested_version_of_ray_is_the_pinned_one():
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert f"\nray=={TESTED}\n" in pinned


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        ({"zone": "a"}, True),
        ({"zone": "b"}, False),
        ({"zone": "!b", "kind": "in(x, y)"}, True),
        ({"zone": "!in(a,b)"}, False),
        ({"other": "!a"}, True),
        ({}, True),
    ],
)
def test_nodes_without_the_labels_have_no_room(asked, has):
    assert ray_cluster._has_labels({"zone": "a", "kind": "y"}, asked) is has


def test_resources_and_labels_have_the_names_of_the_cluster():
    words = ["launch.resources.memory=1e9", "launch.labels={ray.io/accelerator-type: H100}"]
    launched = load_config(["task=text", "launch=ray", *words]).launch
    assert launched.resources == {"memory": 1e9}
    assert launched.labels == {"ray.io/accelerator-type": "H100"}
    given = ["launch.labels={a: b}", "launch.labels.c=d"]
    labels = load_config(["task=text", "launch=ray", *given]).launch.labels
    assert labels == {"a": "b", "c": "d"}


@pytest.mark.parametrize("number", ["0", "-1", "nan"])
def test_a_resource_of_which_a_rank_takes_none_is_refused(number):
    words = ["task=text", "launch=ray", f"launch.resources.CPU={number}"]
    with pytest.raises(ConfigError) as error:
        load_config(words)
    assert str(error.value) == f"launch.resources.CPU={number}: must be a number above 0"


@pytest.mark.parametrize(
    ("word", "short", "key"),
    [
        ("launch.ranks=9", "1 CPU of 2", "launch.cpus_per_rank"),
        ("launch.gpus_per_rank=1.5", "1.5 GPU of 0", "launch.gpus_per_rank"),
        ("launch.resources.x=1", "1 x of 0", "launch.resources.x"),
        ("launch.resources.CPU=8", "8 CPU of 2", "launch.resources.CPU"),
    ],
)
def test_the_resource_that_is_short_and_its_setting_are_named(word, short, key):
    config = load_config(["task=text", "launch=ray", word]).launch
    has = {"CPU": 2.0}
    told = ray_cluster._shortage(config, ray_cluster._needs_of(config, has), has)
    advice = f"start a Ray cluster, or set a smaller {key}"
    assert told == f"each rank takes {short}, by {key}; {advice}"


MUST = "must be the host and port of the cluster's head, as in node0:6379;"


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("127.0.0.1:1", "no cluster answers there; start it, or leave RAY_ADDRESS out"),
        ("127.0.0.1:99999", "no cluster answers there;"),
        ("a..b:1", "no cluster answers there;"),
        *((address, MUST) for address in ("ray://head:10001", "garbage", "local ", "a:1:x")),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address, line):
    """Ray itself waits two minutes, and then ends the process."""
    with pytest.raises(ConfigError) as error:
        ray_cluster._check_answer(address)
    assert str(error.value).startswith(f"RAY_ADDRESS={address}: {line}")


# Values computed from the measurements ------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/", {}, None),
        (
            "4:memory:/x\n1:cpu,cpuacct:/x",
            {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("1:cpu:/gone", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ],
    ids=["v2", "no limit", "v1", "v1 in a container"],
)
def test_quota_of_the_cgroup_is_read(group, files, quota, tmp_path):
    for name, text in {
        "proc/self/cgroup": group,
        **{f"sys/fs/cgroup/{n}": t for n, t in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert rank_checks.cpu_quota(tmp_path) == quota


def test_facts_that_all_hosts_share_are_printed_once():
    same = {
        "launcher": "srun",
        "checks": [{"check": "open files", "result": "ok", "found": "no limit"}],
        "quota": None,
    }
    ranks = [
        {
            "who": f"{rank}\t0\t{rank}\tn{rank}\t1\tcpu",
            "threads": 4,
            "cores": [*range(8 if rank else 2)],
            **same,
        }
        for rank in range(40)
    ]
    rows = group_checks.list_checks(ranks)
    assert len(rows) == 16 + 1 + 1 + 2 and rows[8].check == "rank ... 24 more"
    assert rows[-1].found.startswith("n1, n2, ") and rows[-1].result == "ok"
    assert (
        rows[-2].found == f"n0: 1 rank with 4 threads on {counted(2, 'core')}"
        and rows[-2].result == "warn"
    )


def test_bandwidth_is_that_of_a_ring():
    row = group_checks.judge_sums("16 MB", 2**24, [{"wrong": 0, "seconds": 0.25}] * 4)
    assert (
        row.found.endswith("250.00 ms, 100.7 MB/s bus bandwidth on rank 0") and row.result == "ok"
    )
    assert (
        group_checks.judge_sums("16 MB", 2**24, [{"wrong": 0, "seconds": 0.26}] * 4).result
        == "warn"
    )


def test_small_shared_memory_is_reported_where_it_is_needed(monkeypatch):
    monkeypatch.setattr(
        rank_checks.shutil, "disk_usage", lambda _: SimpleNamespace(total=64e6, free=64e6)
    )
    for words, backend, result in (
        ([], "gloo", "ok"),
        (["data.workers=2"], "gloo", "warn"),
        ([], "nccl", "warn"),
    ):
        row = rank_checks.check_shared_memory(load_config(["task=text", *words]), backend)
        assert row.result == result and row.found.startswith("0.06 of 0.06 GB are free; ")


def test_gpus_that_torch_sees_are_reported(monkeypatch):
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    monkeypatch.setattr(accelerator, "describe", lambda _: "some GPU")
    world = World(world_size=2, local_world_size=2)
    row = rank_checks.check_backend(load_config(["task=text"]), world, "nccl")
    assert row.result == "ok" and "1 GPU for 2 local ranks" in row.found


def test_signal_of_the_launcher_does_not_lose_the_results(tmp_path):

    def plant(rank: int) -> None:
        os.environ["WORLD_SIZE"] = "2"
        group_checks.meet = lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))

    [(code, rows, err, seconds)] = examined(1, f"run.dir={tmp_path}", plant=plant)
    assert code == 1 and seconds < 5 and rows["disk"]["result"] == "ok"
    assert (
        err.startswith("error: rendezvous: ended by the launcher; ") and [*tmp_path.iterdir()] == []
    )
