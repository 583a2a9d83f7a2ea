"""trainer.prove: the first reason for each planted mistake, and commands that misbehave."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_prove import SCRIPTS, found_of, reasons, start

from trainer.base.errors import ConfigError
from trainer.prove.__main__ import main, make_folder
from trainer.prove.comparison import _compare_rest
from trainer.prove.merging import CommandHistory, Merged, RankHistory, distance
from trainer.prove.rank_reading import find_records, read_rank
from trainer.prove.reasons import _explain_uneven, find_partly_restored
from trainer.prove.reasons.example_reasons import _explain_short_pass
from trainer.prove.reasons.gradient_reasons import _explain_missing
from trainer.prove.runner import ISOLATED, Recording, plain_path, run_command

STARTUP = Path(__file__).parents[2] / "trainer" / "prove" / "injected"
RANKS = ("--batch-size 6", 2)
MICRO = ("--batch-size 6 --acc 2", 0)
ALIKE = ("", 0)
UPDATE = "gradients and learning rates agree, so the update differs: "
UNEQUAL = "micro-batches with different numbers of "
CAUSES = {
    "undivided": (
        MICRO,
        f"{UNEQUAL}targets of cross_entropy (29, 26) count equally, and the losses of "
        "micro-batches in B are added, not divided by their number",
    ),
    "mean of means": (RANKS, f"{UNEQUAL}targets of cross_entropy (30, 25) count equally"),
    "mean of smooth means": (MICRO, f"{UNEQUAL}targets of cross_entropy (29, 26) count equally"),
    "smooth means by hand": (MICRO, f"{UNEQUAL}tokens (29, 26) count equally"),
    "padded": (MICRO, f"{UNEQUAL}positions with padding (42, 36) count equally"),
    "count of rank": (RANKS, f"{UNEQUAL}tokens (30, 25) count equally"),
    "class weights": (RANKS, "cross_entropy divides by the sum of the class weights"),
    "own class weights": (RANKS, "examples and weights agree, and the losses differ"),
    "the last counts more": (MICRO, "examples and weights agree, and the losses differ"),
    "smoothing": (MICRO, "label_smoothing of cross_entropy is 0.0 in A and 0.1 in B"),
    "smooth": (RANKS, "the loss is cross_entropy in A and no function of torch in B"),
    "eval on rank 0": (RANKS, "rank 0 of B calls drop (Dropout), the model (Model) in eval mode"),
    "eval of a part": (MICRO, "B calls drop (Dropout) in eval mode, A in training mode"),
    "stays in eval": (ALIKE, "B calls drop (Dropout), the model (Model) in eval mode"),
    "norm in eval on rank 0": (RANKS, "rank 0 of B calls drop (Dropout), norm (BatchNorm1d)"),
    "more dropout": (MICRO, "drop.p is 0.2 in A and 0.4 in B"),
    "norm momentum": (ALIKE, "norm.momentum is 0.1 in A and 0.5 in B"),
    "autocast": (MICRO, "low precision in one command only; fp64 switches autocast off"),
    "other autocast": (MICRO, "low precision in one command only; fp64 switches autocast off"),
    "frozen": (MICRO, "only A has gradients of body.bias: B freezes them (requires_grad is False)"),
    "freezes later": (MICRO, "only A has gradients of body.weight: B freezes them"),
    "no gradient in a part": (
        MICRO,
        "only A has gradients of embed.weight: B calls their modules without gradients",
    ),
    "freed after clipping": (
        RANKS,
        "only A has gradients of head.bias: B drops them after clipping",
    ),
    "zeroed after clipping": (
        MICRO,
        "only A has gradients of body.weight: B drops them after clipping",
    ),
    "freed before clipping": (
        MICRO,
        "only A has gradients of body.weight: B drops them after its backward passes",
    ),
    "scaled after clipping": (
        MICRO,
        "the gradients agree before clipping, and B changes those of body.weight after it",
    ),
    "clips a part": (MICRO, "B clips without the gradients of body.bias, body.weight, embed"),
    "other norm": (MICRO, "the gradients agree before clipping, by norms of type 2.0 and inf"),
    "clips micro-batches": (MICRO, "B clips its gradients after each micro-batch, not once"),
    "rank 1 clips more": (RANKS, "the ranks of B clip their gradients by other limits: 0.1 and"),
    "zero_grad in micro-batches": (
        MICRO,
        "B uses the gradients of the last 1 of 2 micro-batches only: zero_grad is called after",
    ),
    "keeps gradients": (MICRO, "B does not drop the gradients of the step before (zero_grad)"),
    "leaves out the last": (MICRO, "B takes 2 micro-batches in a step and trains on 1 only"),
    "two steps": (MICRO, "B steps its optimizer again, without a backward pass"),
    "schedule in micro-batches": (
        MICRO,
        "the schedule of B advances 2 times at once, once for each micro-batch",
    ),
    "other schedule": (MICRO, "the schedules advance equally often, so their lengths or other"),
    "membership": (
        MICRO,
        f"{UPDATE}weight_decay of head.weight is 0.1 and 0.0, as they are in other groups",
    ),
    "decay of a group": (RANKS, f"{UPDATE}weight_decay of body.bias, head.bias is 0.0 and 0.02"),
    "decays later": (MICRO, f"{UPDATE}weight_decay of embed.weight, body.weight, head.weight is"),
    "other betas": (MICRO, f"{UPDATE}betas is [0.9, 0.999] and [0.8, 0.999]"),
    "amsgrad": (MICRO, f"{UPDATE}amsgrad is False and True"),
    "forgets moments": (MICRO, f"{UPDATE}the optimizer's state differs"),
    "not in the optimizer": (MICRO, "only the optimizer of A has head.bias"),
    "decay by hand": (MICRO, "B changes body.bias, body.weight outside of the optimizer's step"),
    "clamps before the step": (MICRO, "B changes head.weight outside of the optimizer's step"),
    "no set_epoch": (RANKS, "each pass of B has the order of the first: set_epoch is never called"),
    "no shuffle": (
        RANKS,
        "shuffle of the sampler (DistributedSampler) is True in A and False in B",
    ),
    "seed of the sampler": (RANKS, "seed of the sampler (DistributedSampler) is 0 in A and 3 in B"),
    "average by micro-batches": (MICRO, "an EMA's decay, or how often it is updated, depends"),
    "not a number in one": (MICRO, "examples and weights agree, and the losses differ by inf: the"),
}
DROPPING = ("eval on rank 0", "eval of a part", "stays in eval", "more dropout")


def compare_causes(fault: str, layout: tuple[str, int], *words: str) -> dict:
    """Return the comparison of the right layout and of one with a fault."""
    given, ranks = layout
    about = f"causes.py --fault '{fault}' {'--dropout 0.2' if fault in DROPPING else ''}"
    one = start(about, 1 if ranks else 0)
    return found_of(one, start(f"{about} --planted {given}", ranks), "steps=12", *words)


@pytest.mark.slow
@pytest.mark.parametrize("fault", CAUSES)
def test_the_first_reason_for_a_mistake_is_its_cause(fault):
    layout, reason = CAUSES[fault]
    found = compare_causes(fault, layout)
    assert not found["is_same"]
    assert found["differences"][0]["reason"].startswith(reason), reasons(found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [RANKS, MICRO])
def test_texts_of_unequal_lengths_are_the_same_on_any_layout(layout):
    found = compare_causes("", layout)
    assert found["is_same"], reasons(found)
    assert len(found["notes"]) == 1, found["notes"]


@pytest.mark.slow
def test_numbers_that_are_not_finite_in_both_commands_are_equal_and_named():
    found = compare_causes("nan", MICRO)
    assert found["is_same"], reasons(found)
    assert "losses of A and B are not finite (nan or inf) in steps 4 to 12" in found["notes"]


@pytest.mark.slow
def test_autocast_in_both_commands_is_noted_as_not_judged():
    found = compare_causes("autocast in both", MICRO)
    assert found["is_same"], reasons(found)
    note = "fp64 switches autocast (bfloat16) off and does not judge its rounding"
    assert found["notes"][0] == f"{note}: dtype=native does"


@pytest.mark.slow
def test_the_second_command_does_not_find_a_snapshot_of_the_first(tmp_path):
    snapshot = tmp_path / "snapshot.pt"
    command = start(f"causes.py --snapshot {snapshot}", 0)
    found = found_of(command, command, "steps=40")
    assert found["is_same"], reasons(found)
    assert not snapshot.exists()


SMALLEST = start("smallest.py", 0)
QUICK = ("dtype=fp64", "steps=3", "limit=60")


@pytest.mark.slow
def test_steps_without_gradients_are_not_proved():
    command = f"{SMALLEST} 'no backward'"
    found = found_of(command, command, *QUICK)
    assert not found["is_same"]
    (difference,) = found["differences"]
    assert difference["what"] == "no parameter of A and B has a gradient at any step"
    assert difference["reason"].startswith("nothing is learned, so nothing is proved")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["cleared environment", "pipe and junk"])
def test_a_script_that_clears_its_environment_or_writes_beside_the_records_is_compared(trouble):
    found = found_of(SMALLEST, f"{SMALLEST} '{trouble}'", *QUICK)
    assert found["is_same"], reasons(found)


@pytest.mark.slow
def test_arguments_of_clipping_may_come_by_name():
    found = found_of(f"{SMALLEST} 'clips by name'", f"{SMALLEST} 'clips by name'", *QUICK)
    assert found["is_same"], reasons(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "what"),
    [
        ("deleted folder", "the records in .* are gone; the command may not delete that folder"),
        ("junk record", "rank0-1.jsonl: the record is damaged .*; no other program may write"),
        ("not unicode", "rank0-1.jsonl: the record is damaged .*; no other program may write"),
    ],
)
def test_records_that_a_command_destroys_are_refused_in_one_line(trouble, what):
    with pytest.raises(ConfigError, match=what) as error:
        main([f"{SMALLEST} '{trouble}'", "true", *QUICK])
    assert "\n" not in str(error.value)


def test_a_command_that_fails_after_its_steps_is_not_proved(capsys):
    with pytest.raises(ConfigError, match="'fails at its end': failed with code 1"):
        main([f"{SMALLEST} 'fails at its end'", "true", "dtype=native", "steps=9"])
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == "ValueError: the end was not written"


def test_a_failure_after_the_compared_steps_is_no_failure_of_the_command(tmp_path):
    recording = Recording(2, "native")
    done = run_command(f"{SMALLEST}; exit 1", tmp_path / "A", recording, 60, tmp_path / "work")
    assert done.code == 1 and done.is_complete and not done.has_failed


FAILS = """
import os, sys, threading, time
rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(0.5)
    raise ConnectionError("the peer is gone")
raise ValueError("the cause of it")
"""


@pytest.mark.slow
def test_the_last_lines_are_the_traceback_of_the_first_rank_that_failed(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    launcher = shlex.join([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"])
    with pytest.raises(ConfigError, match="failed with code 1; read its last lines above"):
        main([f"{launcher} {script}", "true", "dtype=native"])
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == "ValueError: the cause of it"
    assert f'  File "{script}", line 7, in <module>' in shown


@pytest.mark.parametrize("flags", ["-I", "-S", "-X utf8 -EB"])
def test_an_isolated_python_is_named(flags):
    command = f"{sys.executable} {flags} -c 'print(1)'"
    with pytest.raises(ConfigError, match="python -I, -E and -S load no recorder; run it without"):
        main([command, "true"])


@pytest.mark.parametrize("words", ["train.py -S", "-u train.py -E", "-m train -I", "-c 'x' -I"])
def test_a_flag_of_the_script_is_not_taken_for_one_of_python(words):
    assert not ISOLATED.search(f"python3.11 {words}")
    assert ISOLATED.search(f"torchrun --no-python python3.11 -W error -uI {words}")


def test_a_python_without_the_recorder_is_named():
    command = f"env -u PYTHONPATH {sys.executable} -c 1"
    with pytest.raises(ConfigError, match="no Python process of it loaded the recorder: a Python"):
        main([command, "true"])


@pytest.mark.parametrize("form", ["{dir}", "'{dir}'", '"{dir}"', "sh -c 'touch {dir}/b'; : {dir}"])
def test_the_shell_does_not_interpret_the_path_of_the_folder(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "a; touch stray; $(touch stray) ' \" x"
    place.mkdir()
    command = f"for f in {form}; do touch $f/made; done" if "sh" not in form else form
    done = run_command(command, place / "A", Recording(2, "native"), 60, place / "work")
    assert done.code == 0, done.last_lines()
    assert [each.name for each in (place / "work").iterdir()] in (["made"], ["b"])
    assert [each.name for each in tmp_path.iterdir()] == [place.name]


def test_a_plain_path_is_taken_as_it_is(tmp_path):
    with plain_path(Path("/tmp/a-b_c.d")) as place:
        assert place == "/tmp/a-b_c.d"
    with plain_path(tmp_path / "a b") as place:
        assert " " not in place and Path(place).readlink() == tmp_path / "a b"
    assert not Path(place).parent.exists()


@pytest.mark.parametrize("out", ["/proc/x", "/dev/null/x", "x" * 300, "a\0b"])
def test_a_folder_that_cannot_be_made_is_refused(out):
    with pytest.raises(ConfigError, match=r"out=.*: no folder can be made there \(.*\); name one"):
        make_folder(out)


def test_a_folder_for_records_that_exists_is_refused(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for given in (tmp_path, tmp_path / "link"):
        with pytest.raises(ConfigError, match="exists; name a new folder"):
            make_folder(str(given))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"TMPDIR=.*: no folder can be made there"):
        make_folder("")


def test_files_that_are_no_records_are_passed_by(tmp_path):
    (tmp_path / "rank0-1.jsonl").write_text("")
    (tmp_path / "rank0-old.jsonl").write_text("junk")
    (tmp_path / "rank2-1.jsonl").mkdir()
    os.mkfifo(tmp_path / "rank3-1.jsonl")
    assert [each.name for each in find_records(tmp_path)] == ["rank0-1.jsonl"]


@pytest.mark.parametrize("text", ["", "[]\n", "1\n", '{"event": "step"}\n', '{"event": "start"}\n'])
def test_a_damaged_record_is_refused(tmp_path, text):
    path = tmp_path / "rank0-1.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rank0-1.jsonl: the record is damaged \(.*\); no other"):
        read_rank(path)


def recorded_in(folder, dtype="native"):
    """Return the environment of a script whose records come into a folder."""
    settings = {"folder": str(folder), "steps": 99, "dtype": dtype, "kill": None}
    own = {"LOCKSTEP_PROVE": json.dumps(settings), "PYTHONPATH": str(STARTUP)}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("dtype", ["native", pytest.param("fp64", marks=pytest.mark.slow)])
def test_each_watched_function_takes_its_arguments_as_the_original(tmp_path, dtype):
    words = [sys.executable, "-W", "ignore", str(SCRIPTS / "wrapped_calls.py")]
    environment = recorded_in(tmp_path, dtype)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_tensors_that_are_not_finite_in_the_same_places_are_equal():
    one = np.array([np.nan, 1.0, np.inf])
    assert distance(one, np.array([np.nan, 1.0 + 1e-16, -np.inf])) < 1e-15
    assert distance(one, np.array([0.0, 1.0, np.inf])) == np.inf
    assert not Merged({"w": one}, {}, {}).is_zero and Merged({"w": 0 * one[1:2]}, {}, {}).is_zero


# Rank 0 steps no optimizer, as one that serves data: it has no records and is in no list.


def trained_on_ranks_1_and_2(rank_steps=()):
    """Return a command of 3 ranks, with the steps that ranks 1 and 2 made."""
    steps = [SimpleNamespace(ranks=each) for each in rank_steps]
    return CommandHistory("B", "b", [RankHistory(1, 3), RankHistory(2, 3)], steps, {}, 3)


def test_a_rank_with_fewer_batches_is_named_by_its_number():
    history = trained_on_ranks_1_and_2()
    for rank, num_batches in zip(history.ranks, (5, 3), strict=True):
        rank.orders, rank.passes = {0: [], 1: []}, {0: {"batches": num_batches}}
    assert _explain_uneven(history).startswith("rank 2 of B has 3 batches in a pass, others 5")
    batches = [SimpleNamespace(number=pass_number) for pass_number in (0, 1)]
    step = SimpleNamespace(ranks=[SimpleNamespace(batches=[each]) for each in batches])
    assert _explain_short_pass(history, step).startswith("rank 2 of B has fewer batches")


def test_a_rank_without_a_gradient_is_named_by_its_number():
    tensors = {"w": np.zeros(16)}
    step = SimpleNamespace(gradients=Merged(tensors, {"w": 0.0}, {"w": [1]}))
    reason = _explain_missing(trained_on_ranks_1_and_2(), step)
    assert reason == "w has no gradient on rank 2 of B, and has one on others"


def test_a_rank_whose_weights_are_not_restored_is_named_by_its_number():
    weights = [np.full(16, value) for value in (1.0, 2.0)]
    step = [SimpleNamespace(weights={"w": each}) for each in weights]
    resumed = trained_on_ranks_1_and_2()
    for rank, value in zip(resumed.ranks, (weights[0], 0 * weights[1]), strict=True):
        text = base64.b64encode(value.tobytes()).decode()
        rank.optimizers[0] = {"names": ["w"], "weights": [text]}
    deviation = find_partly_restored(trained_on_ranks_1_and_2([step]), resumed, 1, 1e-6)
    assert deviation.reason.startswith("w is not restored on rank 2: its part is not in")


def test_tensors_without_an_optimizer_are_compared_though_rank_0_has_no_records():
    """With BatchNorm only the first ranks are compared; they were looked for as rank 0."""

    def made_by(name, last):
        rests = [np.ones(16), np.full(16, last)]
        steps = [
            SimpleNamespace(ranks=[SimpleNamespace(rest=rest)] * 2, num_backwards=1)
            for rest in rests
        ]
        ranks = [RankHistory(1, 3, num_rest=1), RankHistory(2, 3, num_rest=1)]
        for rank in ranks:
            rank.optimizers[0] = {"norms": ["BatchNorm1d"], "number": 0}
        return CommandHistory(name, name, ranks, steps, {}, 3)

    bounds = SimpleNamespace(noise=0.0, least=1e-9)
    for last, deviates in ((1.0, False), (2.0, True)):
        pair = SimpleNamespace(
            one=made_by("A", 1.0),
            other=made_by("B", last),
            bounds=bounds,
            num_steps=2,
            worst={"weights": 0.0},
        )
        deviation = _compare_rest(pair)
        assert (deviation is not None) is deviates
    assert deviation.where.endswith("from those of rank 1 of A")
