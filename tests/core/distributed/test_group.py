"""The rendezvous works by environment, address or file, under torchrun and by hand, and every
finished run exits with 0."""

import json
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import CONF, TORCHRUN, Beside, Command, ended, free_port, launch, on_ranks, wait_for

from trainer import ConfigError, World, load_config
from trainer.core.distributed.group import process_group
from trainer.core.distributed.rendezvous import check_init, choose_backend

TINY = ["--config-dir", CONF, "task=tiny", "run.steps=3", "dist.timeout_s=20"]


def by_hand(command: Command, *words: str, **environment: str) -> list[tuple[int, str, str]]:
    """Start two ranks as from two terminals, by environment variables."""
    told = [{"RANK": rank, "WORLD_SIZE": "2", **environment} for rank in "01"]
    started = [command.start(*TINY, *words, environment=each) for each in told]
    return [ended(process) for process in started]


def method(name: str, folder: Path) -> list[str]:
    settings = {
        "env": [],
        "tcp": [f"dist.address=127.0.0.1:{free_port()}"],
        "file": [f"dist.path={folder / 'meet'}"],
    }
    return [f"dist.init={name}", *settings[name]]


@pytest.mark.parametrize("name", ["env", "tcp", "file"])
def test_two_ranks_connect_by_hand(name, command, tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if name == "env" else {}
    for code, out, err in by_hand(command, *method(name, tmp_path), **address):
        assert code == 0, out + err
    assert len(list((tmp_path / "runs/tiny").iterdir())) == 1 and not (tmp_path / "meet").exists()


@pytest.mark.parametrize("name", ["tcp", "file"])
def test_two_ranks_of_an_agent_connect(name, command, tmp_path):
    code, out, err = command(*TINY, *method(name, tmp_path), ranks=2)
    assert code == 0 and "2 ranks on 1 node" in out, out + err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tcp", "file"])
def test_two_ranks_connect_under_torchrun(name, tmp_path):
    words = method(name, tmp_path)
    code, out, err = ended(launch(tmp_path, *TINY, *words, launcher=TORCHRUN))
    assert code == 0 and "2 ranks on 1 node" in out, out + err


@pytest.mark.parametrize("age_s", [-7200, 7200])
def test_file_that_an_earlier_run_left_is_used_again(age_s, command, tmp_path):
    """Clocks do not matter: a message in the file is trusted once its process has repeated it."""
    left = tmp_path / "meet"
    store = dist.PrefixStore("roll-call/1", dist.FileStore(str(left), 2))
    for number, rank in ((1, 0), (2, 1)):
        store.add("hellos", 1)
        store.set(f"hello/{number}", json.dumps([rank, 2, "gone", 1]))
        store.set(f"reply/{number}", json.dumps({"name": "old"}))
    text = left.read_bytes()
    del store  # which removes the file
    left.write_bytes(text)
    os.utime(left, (time.time() - age_s, time.time() - age_s))
    for code, out, err in by_hand(command, *method("file", tmp_path)):
        assert code == 0, out + err
    assert not left.exists()


@pytest.mark.slow
def test_file_of_a_killed_run_is_used_again(command, tmp_path):
    words = method("file", tmp_path)
    places = [{"RANK": rank, "WORLD_SIZE": "2"} for rank in "01"]
    long = [*TINY[:3], *words, "run.steps=1000000", "checkpoint.every_steps=5"]
    before = [command.start(*long, environment=each) for each in places]
    wait_for(lambda: [*tmp_path.glob("runs/tiny/*/checkpoints/step-*")])
    for rank in before:
        rank.kill()
    assert (tmp_path / "meet").exists()
    for code, out, err in by_hand(command, *words):
        assert code == 0, out + err


def test_host_that_is_not_known_is_one_line_on_every_rank(command):
    address = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}
    for code, _, err in by_hand(command, "dist.timeout_s=0.7", **address):
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2 and "no-such-host.invalid:29500" in line, err


def test_file_of_something_else_is_refused(command, tmp_path):
    (tmp_path / "meet").write_text("left over")
    for code, _, err in by_hand(command, *method("file", tmp_path)):
        assert code == 2 and "meet: must be a new file or FileStore; choose another" in err


def test_missing_peer_at_the_address_is_one_line_in_time(command):
    words = [*TINY, "dist.init=tcp", f"dist.address=127.0.0.1:{free_port()}", "dist.timeout_s=0.7"]
    beside = Beside(lambda: command(*TINY))
    began = time.monotonic()
    code, _, err = command(*words, environment={"RANK": "1", "WORLD_SIZE": "2"})
    seconds = time.monotonic() - began
    assert code == 2 and "error: rank 1: no rendezvous at 127.0.0.1:" in err
    assert "within dist.timeout_s=0.7" in err and "Traceback" not in err
    assert seconds < 5 * 0.7 + beside.allowance_s


REFUSED = {
    "dist.init=tcp": "dist.address is missing: dist.init=tcp needs it on every rank",
    "dist.init=file": "dist.path is missing: dist.init=file needs it on every rank",
    "dist.address=a:1": "dist.address=a:1: must be null with dist.init=env; or set dist.init=tcp",
    "dist.init=tcp dist.address=host": "dist.address=host: must be <host>:<port>",
    "dist.init=tcp dist.address=host:99999": "dist.address=host:99999: must be <host>:<port>",
    "dist.init=file dist.path=/nowhere/meet": "dist.path=/nowhere/meet: /nowhere is not a "
    "directory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_settings_without_a_possible_rendezvous_are_refused(words):
    with pytest.raises(ConfigError) as error:
        config = load_config(["task=tiny", *words.split()], [CONF])
        check_init(config.dist, World())
        choose_backend(config.dist, World())
    assert str(error.value).startswith(REFUSED[words])


def test_group_of_one_needs_no_address():
    def alone():
        with process_group(load_config(["task=tiny"], [CONF]).dist, World()) as group:
            return group.max(3.0), group.tell_all("x"), group.gather("y")

    assert on_ranks(1, alone) == [([3.0], "x", ["y"])]


@pytest.mark.slow
@pytest.mark.parametrize("ten", range(10))
def test_every_finished_run_exits_0(ten, tmp_path):
    started = (
        launch(tmp_path, *TINY, f"run.name={number}", launcher=TORCHRUN) for number in range(10)
    )
    codes = [ended(process)[0] for process in started]
    assert codes == [0] * 10
