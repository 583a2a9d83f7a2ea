"""The ranks meet by environment, address or file, under torchrun and by hand, and every finished run exits 0."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import CONF, on_ranks

from trainer import ConfigError, World, load_config
from trainer.distributed.group import choose_backend, process_group
from trainer.distributed.rendezvous import check_init

TINY = ["--config-dir", CONF, "task=tiny", "run.steps=3", "dist.timeout_s=20"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    folder: Path, environment: dict[str, str], *words: str, launcher: tuple[str, ...] = ()
) -> subprocess.Popen:
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    clean |= {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *launcher, "-m", "trainer", *TINY, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=clean, text=True, **pipes)


def by_hand(folder: Path, *words: str, **environment: str) -> list[tuple[int, str, str]]:
    """Two ranks as two terminals would start them."""
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "2", **environment} for rank in (0, 1)]
    started = [start(folder, rank, *words) for rank in ranks]
    ended = [process.communicate(timeout=60) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]


def under_torchrun(folder: Path, *words: str) -> tuple[int, str, str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    process = start(folder, {}, *words, launcher=launcher)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def method(name: str, folder: Path) -> list[str]:
    settings = {
        "env": [],
        "tcp": [f"dist.address=127.0.0.1:{free_port()}"],
        "file": [f"dist.path={folder / 'meet'}"],
    }
    return [f"dist.init={name}", *settings[name]]


@pytest.mark.parametrize(
    "name", ["env", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tcp", "file"))]
)
def test_two_ranks_meet_by_hand(name, tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if name == "env" else {}
    for code, out, err in by_hand(tmp_path, *method(name, tmp_path), **address):
        assert code == 0, out + err
    assert len(list((tmp_path / "runs/tiny").iterdir())) == 1 and not (tmp_path / "meet").exists()


@pytest.mark.parametrize("name", ["tcp", pytest.param("file", marks=pytest.mark.slow)])
def test_two_ranks_meet_under_torchrun(name, tmp_path):
    code, out, err = under_torchrun(tmp_path, *method(name, tmp_path))
    assert code == 0 and "2 ranks on 1 node" in out, out + err


def test_old_file_is_refused(tmp_path):
    left = tmp_path / "meet"
    left.write_bytes(b"left over")
    os.utime(left, (time.time() - 60, time.time() - 60))
    for code, _, err in by_hand(tmp_path, *method("file", tmp_path)):
        assert code == 2 and f"{left} was left by an earlier run; remove it" in err


def test_nobody_at_the_address_is_one_line_in_time(tmp_path):
    words = ["dist.init=tcp", f"dist.address=127.0.0.1:{free_port()}", "dist.timeout_s=2"]
    began = time.monotonic()
    process = start(tmp_path, {"RANK": "1", "WORLD_SIZE": "2"}, *words)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "error: rank 1: no group was found at 127.0.0.1:" in err
    assert (
        "within dist.timeout_s=2" in err
        and "Traceback" not in err
        and time.monotonic() - began < 25
    )


REFUSED = {
    "dist.init=tcp": "dist.address is missing: dist.init=tcp needs it on every rank",
    "dist.init=file": "dist.path is missing: dist.init=file needs it on every rank",
    "dist.address=a:1": "dist.address=a:1: is for dist.init=tcp, and dist.init is env",
    "dist.init=tcp dist.address=host": "dist.address=host: must be <host>:<port>",
    "dist.init=tcp dist.address=host:99999": "dist.address=host:99999: must be <host>:<port>",
    "dist.init=file dist.path=/nowhere/meet": "dist.path=/nowhere/meet: /nowhere is not a directory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_settings_that_bring_no_ranks_together_are_refused(words):
    with pytest.raises(ConfigError) as error:
        config = load_config(["task=tiny", *words.split()], [CONF])
        check_init(config.dist, World())
        choose_backend(config.dist, World())
    assert str(error.value).startswith(REFUSED[words])


def test_group_of_one_needs_no_address():
    def alone():
        with process_group(load_config(["task=tiny"], [CONF]).dist, World()) as group:
            return group.max(3.0), group.share_text("x"), group.gather_text("y")

    assert on_ranks(1, alone) == [([3.0], "x", ["y"])]


@pytest.mark.slow
def test_every_finished_run_exits_0(tmp_path):
    codes = [under_torchrun(tmp_path, f"run.name={number}")[0] for number in range(100)]
    assert codes == [0] * 100
