"""OMP_NUM_THREADS: the user's number is kept under every launcher, a launcher's is not."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness.launch import TORCHRUN, environment_of_a_command
from harness.training import compose

from trainer.core.distributed import threads, world
from trainer.core.distributed.launchers import MARK
from trainer.core.distributed.world import World
from trainer.core.record import startup

# by one write: ranks share a pipe
SAY = """import os
from trainer.core.distributed.threads import is_chosen
os.write(1, f'chosen: {is_chosen()}\\n'.encode())"""
# an agent that sets the default as torchrun does, and starts a rank by way of a shell
AGENT = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
rank = {"RANK": "0", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/x/y/0/error.json"}
subprocess.run(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", sys.argv[1]],
               env={**os.environ, **rank})
"""


def said_by(words, **environment):
    own = environment_of_a_command()
    del own["OMP_NUM_THREADS"]
    done = subprocess.run(
        [sys.executable, *words], env=own | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"chosen: (\w+)", done.stdout)


@pytest.mark.parametrize("exported", [{}, {"OMP_NUM_THREADS": "1"}])
def test_ranks_of_torchrun_know_whether_the_user_exported_the_number(exported):
    """No test saw that an export was ignored: the harness exports 1, which is torchrun's value."""
    ranks = said_by([*TORCHRUN, "--no-python", sys.executable, "-c", SAY], **exported)
    assert ranks == [str(bool(exported))] * 2


@pytest.mark.parametrize(
    ("exported", "is_chosen"),
    [({}, False), ({"OMP_NUM_THREADS": "1"}, True), ({"OMP_NUM_THREADS": " "}, False)],
)
def test_a_rank_behind_a_shell_finds_the_agent(exported, is_chosen):
    assert said_by(["-c", AGENT, SAY], **exported) == [str(is_chosen)]


def test_without_a_launcher_and_under_our_own_a_number_is_the_users(monkeypatch):
    of_torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    assert threads.is_chosen({"OMP_NUM_THREADS": "1"})
    assert threads.is_chosen({"OMP_NUM_THREADS": "1", MARK: "elastic", **of_torchrun})
    assert not threads.is_chosen({}) and not threads.is_chosen(of_torchrun)
    # a platform without /proc: only torchrun's own value is doubtful
    monkeypatch.setattr(threads, "Path", lambda path: Path("/nowhere", path.lstrip("/")))
    assert threads.is_chosen({"OMP_NUM_THREADS": "3", **of_torchrun})
    assert not threads.is_chosen({"OMP_NUM_THREADS": "1", **of_torchrun})


def divided(monkeypatch, is_chosen):
    """Return the number of threads that are set on one of 2 ranks on 8 cores, if any."""
    monkeypatch.setattr(threads, "is_chosen", lambda: is_chosen)
    monkeypatch.setattr(world, "usable_cores", lambda: 8)
    calls = []
    monkeypatch.setattr(world.torch, "set_num_threads", calls.append)
    World(world_size=2, local_world_size=2).divide_threads()
    return calls


def test_an_exported_number_is_kept_and_a_default_is_divided(monkeypatch):
    assert divided(monkeypatch, is_chosen=True) == []
    assert divided(monkeypatch, is_chosen=False) == [4]


def test_no_advice_is_given_against_an_exported_number(monkeypatch, tmp_path):
    config = compose(tmp_path, "task=tiny")
    one = replace(World(), local_world_size=1)
    monkeypatch.setattr(startup, "explain_unseen_gpu", lambda: "")
    monkeypatch.setattr(world, "usable_cores", lambda: 4)
    cases = {
        (99.0, 4): "other processes use the cores (load 99.0); try OMP_NUM_THREADS=1",
        (0.0, 2): "a rank uses 2 of its 4 cores (limited by strategy=exact)",
        (0.0, 4): "",
        (99.0, 1): "",
    }
    for (load, number), line in cases.items():
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        monkeypatch.setattr(startup, "is_chosen", lambda: False)
        assert startup.slow_reasons(config, one, number) == line
        monkeypatch.setattr(startup, "is_chosen", lambda: True)
        assert startup.slow_reasons(config, one, number) == ""
