"""trainer.prove: how commands end, what they print, and ranks that each train alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from test_prove import found_of, start
from test_prove_causes import SMALLEST

from trainer.base.errors import ConfigError
from trainer.prove import kept_output
from trainer.prove.__main__ import main, prove
from trainer.prove.comparison import _compare_lengths
from trainer.prove.runner import Recording, have_made_steps, run_command

ALONE = {
    "barrier": "no DistributedDataParallel wraps the model, and no collective sends its gradients",
    "log": "no DistributedDataParallel wraps the model, and no collective sends its gradients",
    "module": "the model is called around its wrapper (as model.module), which reduces nothing",
    "no_sync": "its wrapper never reduces gradients (no_sync)",
}
QUICK = ("dtype=fp64", "steps=4", "limit=120")


@pytest.mark.parametrize(
    "kind",
    [each if each == "barrier" else pytest.param(each, marks=pytest.mark.slow) for each in ALONE],
)
def test_ranks_that_send_no_gradients_and_use_the_same_examples_are_not_proved(kind):
    """No test saw it: the scripts of the tests divide their examples, and then weights differ."""
    found = found_of(start(f"alone.py {kind}"), start(f"alone.py {kind}", 2), *QUICK)
    assert not found["is_same"]
    (difference,) = found["differences"]
    assert difference["kind"] == "alone" and difference["reason"] == ALONE[kind]
    what = "2 of 2 ranks of B use the same examples and exchanged no gradients"
    assert difference["what"] == what


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "by hand"])
def test_ranks_that_reduce_gradients_of_the_same_examples_are_the_same(kind):
    words = f"alone.py '{kind}'"
    found = found_of(start(words), start(words, 2), *QUICK)
    assert found["is_same"], found
    assert "ranks of B use the same examples" in "".join(found["notes"])


def test_two_processes_of_one_rank_may_share_their_gradients_by_other_means():
    """Ranks of MPI, actors of Ray, Hogwild and ensembles were called different."""
    one = start("alone.py nothing", 0)
    what = r"^cannot tell: B trains 2 times as rank 0 at the same time, as .* no RANK of their own"
    with pytest.raises(ConfigError, match=what):
        prove([one, f"{one} & {one}; wait", *QUICK])


@pytest.mark.slow
def test_ranks_without_a_process_group_may_send_gradients_by_other_means():
    words = start("alone.py nothing", 2)
    what = r"^cannot tell: 2 of 2 ranks of .* WORLD_SIZE is 2, and the script starts no process gro"
    with pytest.raises(ConfigError, match=what):
        prove([words, words, *QUICK])


@pytest.mark.slow
def test_a_resumed_rank_without_the_others_has_that_reason_and_no_other():
    command = f"RANK=0 WORLD_SIZE=2 {start('resume_loop.py checkpoints', 0)}"
    what = r"^cannot tell: 1 of 2 ranks of resumed trained; .* WORLD_SIZE is 2, and 1 process trai"
    words = (f"mkdir -p checkpoints; {command}", "--resume", f"{command} --resume")
    with pytest.raises(ConfigError, match=what):
        prove([*words, "kill=7", "steps=10", "dtype=fp64", "limit=120"])


def test_small_weights_that_ranks_reduce_by_hand_are_the_same():
    """No module is called, so no examples are seen, and each tensor has few elements."""
    found = found_of(start("alone.py vector"), start("alone.py vector", 2), *QUICK)
    assert found["is_same"], found


@pytest.mark.slow
def test_a_rank_that_trains_twice_in_turn_is_the_same():
    one = start("alone.py nothing", 0)
    assert found_of(one, f"{one}; {one}", *QUICK)["is_same"]


@pytest.mark.slow
def test_fewer_processes_than_the_world_size_are_not_proved():
    one = start("alone.py nothing", 0)
    what = r"^cannot tell: 1 of 2 ranks of B trained; it .* WORLD_SIZE is 2, and 1 process trained"
    with pytest.raises(ConfigError, match=what):
        prove([one, f"RANK=0 WORLD_SIZE=2 {one}", *QUICK])


STAYS = """{python} -c "
import threading, time, torch, runpy, sys, os
model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range({steps}):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
{end}"
"""


def ends(steps: int, end: str) -> str:
    return STAYS.format(python=sys.executable, steps=steps, end=end).strip()


def ended(name: str, steps: int, is_whole: bool) -> SimpleNamespace:
    ranks = [SimpleNamespace(num_begun=steps)]
    note = f"{name} did not end within 9 s and was ended"
    steps = [None] * steps
    return SimpleNamespace(name=name, ranks=ranks, steps=steps, note=note, is_whole=is_whole)


def test_a_command_that_is_ended_differs_only_if_steps_are_missing():
    """A was taken as the reference, and B ended in the same way as another result."""
    for is_whole in (True, False):
        pair = {"one": ended("A", 4, True), "other": ended("B", 4, is_whole)}
        found = SimpleNamespace(**pair, num_steps=4)
        deviation = _compare_lengths(found)
        assert is_whole == (deviation is None)
    assert deviation.where == "B did not end within 9 s and was ended after 4 steps"
    steps = [SimpleNamespace(number=n) for n in (1, 2, 3)]
    rank, short = SimpleNamespace(steps=steps), SimpleNamespace(steps=steps[:2])
    assert have_made_steps([rank, rank], 3) and not have_made_steps([rank], 4)
    assert not have_made_steps([rank, short], 3)


STAYING = "threading.Thread(target=time.sleep, args=(60,)).start()"


@pytest.mark.slow
def test_commands_that_stay_alive_after_all_steps_are_the_same_with_a_note():
    one = ends(4, STAYING)
    found = found_of(one, one, "steps=4", "limit=20", "dtype=fp64")
    assert found["is_same"], found
    notes = [f"{name} did not end within 20 s and was ended" for name in "AB"]
    assert set(notes) <= set(found["notes"])


@pytest.mark.slow
def test_commands_that_hang_before_their_last_step_cannot_be_told_apart(capsys):
    one = ends(3, STAYING)
    with pytest.raises(
        ConfigError, match=r"^cannot tell: A did not end .*, B did .*, both after 3"
    ):
        prove([one, one, "steps=4", "limit=20", "dtype=fp64"])


def test_a_command_that_ends_abruptly_before_its_steps_are_made_is_refused():
    one = ends(2, "os._exit(0)")
    with pytest.raises(ConfigError, match=r"ended abruptly after 2 steps of 4, .*; give steps=2"):
        main([one, one, "steps=4", "dtype=fp64"])


@pytest.mark.slow
def test_an_abrupt_end_after_the_steps_is_the_same_and_so_is_an_early_normal_end():
    one = ends(2, "os._exit(0)")
    assert found_of(one, one, "steps=2", "dtype=fp64")["is_same"]
    one = ends(2, "pass")
    assert found_of(one, one, "steps=4", "dtype=fp64")["is_same"]


@pytest.mark.slow
def test_a_forked_process_of_multiprocessing_ends_normally():
    """It ends by os._exit, after the finalizers of multiprocessing and without atexit."""
    code = ends(2, "pass").split('"')[1].replace("\nmodel", "\ndef train():\n  model", 1)
    del code
    script = start("forked.py", 0)
    assert found_of(script, script, "steps=4", "dtype=fp64")["is_same"]


def test_steps_within_steps_and_compiled_functions_run_under_the_recorder():
    one = start("nested_steps.py", 0)
    found = found_of(one, one, "dtype=native", "steps=5")
    assert found["is_same"], found
    assert found["steps"] == 14  # five of two optimizers, four of the one whose second fails
    assert not [each for each in found["notes"] if "recorder itself" in each]


def test_a_long_output_is_kept_with_its_beginning_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_output, "HEAD", 1000)
    monkeypatch.setattr(kept_output, "TAIL", 1000)
    command = "echo first; yes 123456789 | head -n 100000; echo last"
    done = run_command(command, tmp_path / "A", Recording(2, "native"), 60, tmp_path / "work")
    text = (tmp_path / "A" / "output.txt").read_text()
    assert done.code == 0 and text.startswith("first\n123456789\n") and text.endswith("\nlast\n")
    total = len("first\nlast\n") + 1_000_000
    note = f"\n[{total - 2000:,} bytes of the output are left out here]\n"
    assert text[1000:-1000] == note


def test_a_short_output_is_kept_whole(tmp_path):
    done = run_command(
        "seq 1000; exit 3", tmp_path / "A", Recording(2, "native"), 60, tmp_path / "w"
    )
    text = (tmp_path / "A" / "output.txt").read_text()
    assert text.splitlines() == [str(n) for n in range(1, 1001)] and done.code == 3


def test_a_limit_of_file_sizes_is_named():
    """ulimit -f counts blocks of 512 or 1024 bytes."""
    limited = f"ulimit -f 1; {SMALLEST}"
    with pytest.raises(
        ConfigError, match=r"could not be written \(File too large\); free space in"
    ):
        main([limited, "true", "dtype=native", "steps=3"])
