"""trainer.prove: equal commands are the same, and each planted mistake is named with its reason."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from harness import wait_for

from trainer.base.errors import ConfigError
from trainer.prove import runner
from trainer.prove.__main__ import as_dictionary, divide, main, prove
from trainer.prove.comparison import _is_amplified
from trainer.prove.merging import EvalPass, Merged
from trainer.prove.rank_reading import assign_batches, label_batches
from trainer.prove.reasons import _explain_evaluation
from trainer.prove.reasons.pass_reasons import explain_rates
from trainer.prove.rounding import Bounds, compare_tensors
from trainer.prove.runner import VARIABLE, Recording

HERE = Path(__file__).parent
RECORDER = Path(__file__).parents[2] / "trainer" / "prove" / "recorder"
SCRIPTS = HERE / "scripts"


def start(words: str, ranks: int = 1) -> str:
    """Return the command that starts a script of SCRIPTS on a number of ranks."""
    name, _, arguments = words.partition(" ")
    starter = f"{HERE / 'start_ranks.py'} {ranks} " if ranks else ""
    return f"{sys.executable} {starter}{SCRIPTS / name} {arguments}"


def found_of(*arguments: str) -> dict:
    found = as_dictionary(prove(["limit=300", *arguments]))
    return json.loads(json.dumps(found))


def reasons(found: dict) -> str:
    return "\n".join(f"{each['what']}; {each['reason']}" for each in found["differences"])


# Real scripts -------------------------------------------------------------------------------------

DDP = "ddp_image.py"
HALF = "--batch-size 6"
CORRECT = {
    "DDP on 2 ranks": (start(DDP), start(f"{DDP} {HALF}", 2)),
    "DDP on 3 ranks": (start(DDP), start(f"{DDP} --batch-size 4", 3)),
    "DDP with accumulation": (start(DDP), start(f"{DDP} --batch-size 3 --accumulation 2", 2)),
    "DDP on 2 and 3 ranks": (start(f"{DDP} {HALF}", 2), start(f"{DDP} --batch-size 4", 3)),
    "FSDP2 on 2 ranks": (start("fsdp_mlp.py 1"), start("fsdp_mlp.py 1", 2)),
    "FSDP2 on 3 ranks": (start("fsdp_mlp.py 1"), start("fsdp_mlp.py 2", 3)),
    "nanoGPT": (start("nanogpt_train.py", 0), start("nanogpt_train.py", 2)),
    "sums by hand": (start("styles.py plain_sum"), start("styles.py plain_sum --ranks 2", 0)),
    "added losses": (
        start("styles.py summed_losses"),
        start("styles.py summed_losses --ranks 3 --port 29619", 0),
    ),
    "a class that prefetches": (
        start("styles.py class"),
        start("styles.py class --ranks 2 --port 29621", 0),
    ),
    "a GAN": (start("styles.py gan"), start("styles.py gan --ranks 3 --port 29623", 0)),
    "masked tokens": (start("styles.py masked"), start("styles.py masked --ranks 2", 0)),
    "a contrastive loss": (start("contrastive.py"), start(f"contrastive.py {HALF}", 2)),
    "a teacher": (start("mean_teacher.py"), start("mean_teacher.py --batch-size 3 --acc 2", 2)),
    "a stream": (start("by_hand.py"), start(f"by_hand.py {HALF}", 2)),
    "Accelerate": (
        start("accelerate_nlp.py", 0),
        start("accelerate_nlp.py --batch-size 4", 2),
    ),
    "Accelerate with accumulation": (
        start("accelerate_nlp.py --size 60 --batch-size 12", 0),
        start("accelerate_nlp.py --size 60 --batch-size 4 --accumulation 3", 0),
    ),
    "Lightning": (start("lightning_fit.py", 0), start("lightning_fit.py --batch-size 4", 2)),
    "transformers": (
        start("hf_trainer.py --schedule constant", 0),
        start("hf_trainer.py --batch-size 4 --schedule constant", 2),
    ),
    "transformers with padding": (
        start("hf_trainer.py --ragged", 0),
        start("hf_trainer.py --ragged --batch-size 4", 2),
    ),
}
FAULTS = {
    "summed": "summed over the ranks instead of averaged",
    "no wrapper": "DistributedDataParallel does not wrap the model",
    "around the wrapper": "the model is called around its wrapper",
    "no_sync": "within no_sync",
    "no_sync in forward passes": "DDP reads require_backward_grad_sync in the forward pass",
    "fast schedule": "advances 2 times at once, once for each rank",
    "fast schedule of passes": "advances 2 times at once, once for each rank",
    "scaled rate": "multiplied by 2, the ratio of the numbers of ranks",
    "padded evaluation": "22 examples instead of 21 (1 twice)",
    "batchnorm": "BatchNorm2d normalises over the rows of a micro-batch (12 and 6)",
    "dropout": "Dropout draws other random numbers",
    "unseeded": "does not seed torch",
    "seed by rank": "other random numbers on each rank (seeds 5, 6)",
    "no sampler": "no sampler divides the dataset",
    "no set_epoch": "set_epoch is never called",
    "branch": "the layouts use other parts of the model",
    "sum loss": "or summed over fewer examples",
    "divided twice": "divided by the number of ranks",
    "times ranks": "the loss is multiplied by the number of ranks",
    "local clip": "clipped before they are averaged",
    "clip on one": "only A clips its gradients",
    "weight decay": "weight_decay is 0.01 and 0.005",
    "augmentation": "the dataset draws random numbers (augmentation)",
}


OTHERS = {
    "contrastive.py": {
        "local negatives": "it compares the examples of a micro-batch with each other (negatives)",
        "gather without gradient": "gradients are cut off (detach, a gather without gradient)",
    },
    DDP: {
        "skips a step": "rank 1 of B skips an optimizer step that other ranks make",
        "class weights": "CrossEntropyLoss divides by the sum of the class weights",
        "own class weights": "perhaps the class weights of CrossEntropyLoss",
    },
    "mean_teacher.py": {
        "split": "the dataset is split or ordered by random numbers that depend on rank or run",
        "mixup": "the loop draws random numbers beside the examples",
        "leaves early": "ranks of B began 3 and 4 steps",
        "average of rank 0": "not every rank updates them, as an EMA that rank 0 alone updates",
    },
    "by_hand.py": {
        "whole on each rank": "the iterable dataset does not divide its examples among the ranks",
        "clipped first": "clipped before they are averaged",
        "one is not averaged": "not averaged over its ranks for 2.bias",
    },
}


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def skip_without(command: str) -> None:
    for script, package in {"accelerate_nlp": "accelerate", "lightning_fit": "lightning"}.items():
        if script in command and not is_there(package):
            pytest.skip(f"needs {package}: pip install 'lockstep-trainer[bench]'")
    if "hf_trainer" in command and not (is_there("accelerate") and is_there("transformers")):
        pytest.skip("needs accelerate and transformers")


def test_a_command_is_the_same_as_itself():
    one = start("styles.py summed_losses", 0)
    found = found_of(one, one, "steps=4")
    assert found["is_same"] and found["steps"] == 4
    assert found["largest_difference"]["weights"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_correct_scripts_are_the_same(name):
    skip_without(CORRECT[name][0])
    found = found_of(*CORRECT[name])
    assert found["is_same"], reasons(found)
    assert found["steps"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_in_ddp_are_named(fault):
    option = f"--fault '{fault}'"
    found = found_of(start(f"{DDP} {option}"), start(f"{DDP} {HALF} {option}", 2))
    assert FAULTS[fault] in reasons(found)
    assert len(found["differences"]) == 1, reasons(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "fault"), [(script, fault) for script in OTHERS for fault in OTHERS[script]]
)
def test_mistakes_in_other_loops_are_named(script, fault):
    option = f"--fault '{fault}'"
    found = found_of(start(f"{script} {option}"), start(f"{script} {HALF} {option}", 2))
    assert OTHERS[script][fault] in reasons(found)


SHARED = {
    "no set_epoch": ("mean_teacher.py", "set_epoch is never called"),
    "scaled clip": (DDP, "B clips gradients before GradScaler.unscale_"),
    "own loss": ("mean_teacher.py", "rank 0 of B reads the loss of its own examples"),
    "whole in each worker": ("by_hand.py --workers 2", "each example comes 2 times in a pass of B"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", *SHARED])
def test_mistakes_that_change_no_comparison_are_notes(fault):
    script, note = SHARED.get(fault, ("mean_teacher.py", ""))
    words = f"{script} --fault '{fault}'"
    found = found_of(start(words), start(f"{words} {HALF}", 2))
    assert found["is_same"], reasons(found)
    assert note in "\n".join(found["notes"])
    assert fault or len(found["notes"]) == 1, found["notes"]


MORE = {
    "a teacher that follows micro-batches": (
        (
            start("mean_teacher.py --fault 'each micro-batch'"),
            start("mean_teacher.py --fault 'each micro-batch' --batch-size 3 --acc 2", 2),
        ),
        "so do tensors that no optimizer has",
    ),
    "a rank with fewer batches": (
        (start("by_hand.py --size 133"), start(f"by_hand.py --size 133 {HALF}", 2)),
        "rank 1 of B has fewer batches",
    ),
    "the batch is not divided": (
        (start(DDP), start(DDP, 2)),
        "the batch size of a rank was not divided",
    ),
    "losses of micro-batches are added": (
        (start(DDP), start(f"{DDP} --batch-size 3 --accumulation 4 --fault undivided")),
        "the losses of micro-batches are added",
    ),
    "a sampler fills up": (
        (
            start(f"{DDP} --size 101 --fault padding"),
            start(f"{DDP} --size 101 --fault padding {HALF}", 2),
        ),
        "B repeats 1 example in a pass",
    ),
    "FSDP2 sums": (
        (start("fsdp_mlp.py 1 summed"), start("fsdp_mlp.py 1 summed", 2)),
        "summed over the ranks",
    ),
    "FSDP2 clips shards": (
        (start("fsdp_mlp.py 1 'local clip'"), start("fsdp_mlp.py 1 'local clip'", 2)),
        "by a factor of its own",
    ),
    "nanoGPT seeds by rank": (
        (start("nanogpt_train.py --offsets=rank", 0), start("nanogpt_train.py --offsets=rank", 2)),
        "without a DataLoader, and they depend on the rank",
    ),
    "Accelerate's last window": (
        (
            start("accelerate_nlp.py --size 56 --batch-size 12", 0),
            start("accelerate_nlp.py --size 56 --batch-size 4 --accumulation 3", 0),
        ),
        "has 2 of 3 micro-batches",
    ),
    "Accelerate's schedule": (
        (
            start("accelerate_nlp.py --schedule", 0),
            start("accelerate_nlp.py --batch-size 4 --schedule", 2),
        ),
        "advances 2 times at once, once for each rank",
    ),
    "Accelerate's gather": (
        (
            start("accelerate_nlp.py --gather gather", 0),
            start("accelerate_nlp.py --batch-size 4 --gather gather", 2),
        ),
        "24 examples instead of 21 (3 twice)",
    ),
    "Lightning's evaluation": (
        (
            start("lightning_fit.py --validation 21", 0),
            start("lightning_fit.py --validation 21 --batch-size 4", 2),
        ),
        "22 examples instead of 21 (1 twice)",
    ),
    "Lightning's last window": (
        (
            start("lightning_fit.py --size 60 --batch-size 8", 0),
            start("lightning_fit.py --size 60 --batch-size 2 --accumulation 4", 0),
        ),
        "has 2 of 4 micro-batches",
    ),
    "transformers' dropout": (
        (
            start("hf_trainer.py --dropout 0.1", 0),
            start("hf_trainer.py --dropout 0.1 --batch-size 4", 2),
        ),
        "draws other random numbers",
    ),
    "transformers' mean of a rank": (
        (
            start("hf_trainer.py --ragged", 0),
            start("hf_trainer.py --ragged --batch-size 4 --per-rank-mean", 2),
        ),
        "count equally",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_mistakes_are_named(name):
    commands, reason = MORE[name]
    skip_without(commands[0])
    found = found_of(*commands)
    assert reason in reasons(found)


LOST = {
    "": "",
    "model": "no checkpoint was loaded",
    "a layer": "the weights at the resume is that after step 4; 5.weight, 5.bias are not restored",
    "epoch": "those of step 1, which is at the same position of another pass: the epoch",
    "optimizer": "the rate starts again",
    "moments": "the state of Adam is not restored",
    "schedule": "the rate starts again",
    "position": "the examples of 4 steps are used again",
    "random": "draws random numbers, whose state is not restored",
    "augmentation": "draws random numbers (augmentation), whose state is not restored",
    "average": "tensors that no optimizer has (an EMA, a frozen model, buffers) differ; they are",
    "order": "the parameters of Adam are in another order: load_state_dict goes by order",
}


@pytest.mark.slow
@pytest.mark.parametrize("lost", LOST)
def test_lost_state_of_a_resume_is_named(lost):
    command = start(f"resume_loop.py {{dir}} --lost '{lost}'", 0)
    found = found_of(command, "--resume", f"{command} --resume", "kill=7", "steps=14")
    assert found["is_same"] == (not lost), reasons(found)
    assert LOST[lost] in reasons(found)


@pytest.mark.slow
def test_native_arithmetic_is_the_same_up_to_measured_rounding():
    words = "--dtype=bfloat16"
    commands = (start(f"nanogpt_train.py {words}", 0), start(f"nanogpt_train.py {words}", 2))
    found = found_of(*commands, "dtype=native", "steps=12")
    assert found["is_same"], reasons(found)


def test_bad_words_are_refused():
    with pytest.raises(ConfigError, match="1 commands: give task=<name>, or two commands, each in"):
        main(["python train.py"])
    with pytest.raises(ConfigError, match="dtype=fp8: must be one of auto, fp64, native"):
        main(["a", "b", "dtype=fp8"])
    with pytest.raises(ConfigError, match=r"--jsn is not a flag: .*did you mean --json"):
        main(["a", "b", "--jsn"])
    with pytest.raises(ConfigError, match=r"stps is not a setting: .*did you mean steps"):
        main(["a", "b", "stps=3"])
    with pytest.raises(ConfigError, match="1 commands: give task=<name>, or two commands"):
        main(["a", ""])
    with pytest.raises(ConfigError, match="kill=70: must be below steps=20; give steps=140"):
        main(["a", "--resume", "b", "kill=70"])
    with pytest.raises(ConfigError, match="steps=0: must be an integer of at least 1"):
        main(["a", "b", "steps=0"])


def test_the_workflow_of_the_docs_has_words_that_are_taken():
    text = (HERE.parents[1] / "scripts/deploy/prove-workflow.yaml").read_text(encoding="utf-8")
    steps = yaml.safe_load(text)["jobs"]["prove"]["steps"]
    (line,) = [step["run"] for step in steps if step.get("name") == "prove"]
    program, verb, *words = shlex.split(line)
    assert (program, verb) == ("lockstep", "prove")
    settings, commands = divide(words)
    assert len(commands) == 2 and settings["steps"] == "20" and settings["out"] == "proof"


def test_a_command_that_fails_is_named_with_its_last_lines(capsys):
    with pytest.raises(
        ConfigError, match=r"^echo oh no; exit 3: failed with code 3; read its last"
    ):
        main(["echo oh no; exit 3", "true"])
    assert "oh no" in capsys.readouterr().err


def test_the_last_lines_are_the_scripts_own_and_not_the_report_of_torchrun(capsys):
    agent = "E1126 18:11:06.02 170 torch/distributed/elastic/multiprocessing/api.py:1002] failed"
    command = f"echo ValueError: the cause; echo '{agent}'; seq 30; exit 1"
    with pytest.raises(ConfigError, match="failed with code 1"):
        main([command, "true", "dtype=native"])
    shown = capsys.readouterr().err.splitlines()
    assert "ValueError: the cause" in shown and "30" not in shown


LAUNCHER = f"""
import json, os, pathlib, subprocess, sys, time
folder = pathlib.Path(json.loads(os.environ["{VARIABLE}"])["folder"])
rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
ranks = [subprocess.Popen([sys.executable, "-c", rank], start_new_session=True) for _ in "01"]
pathlib.Path(sys.argv[1]).write_text(" ".join(str(each.pid) for each in ranks))
print("the last line")
time.sleep(0.3)
for name in sys.argv[2:]:
    (folder / name).touch()
time.sleep(60)
"""


def is_running(pid: str) -> bool:
    """Return False also for a process that has ended, but that nobody has waited for."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("killed", ""),
        ("", "did not end within 2 s"),
        ("ended-1", "did nothing for 1 s after one of its ranks had ended,"),
    ],
)
def test_no_process_of_an_ended_command_is_left(tmp_path, monkeypatch, file, what):
    monkeypatch.setattr(runner, "GRACE_S", 0.5)
    monkeypatch.setattr(runner, "SILENCE_S", 1.0)
    place = tmp_path / "pids"
    command = shlex.join([sys.executable, "-c", LAUNCHER, str(place)]) + f" {file}"
    limit = 30.0 if file else 2.0
    recording = Recording(4, "native")
    done = runner.run_command(command, tmp_path / "A", recording, limit, tmp_path / "work")
    assert done.stopped == what and done.is_killed == (file == "killed")
    assert not any(map(is_running, place.read_text().split()))
    if what:
        with pytest.raises(ConfigError, match=f"{what} and made no step; read its last lines"):
            done.check()
    assert done.last_lines() == "the last line"


HANGS = f"""{sys.executable} -c "
import time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
print('waits')
time.sleep(60)"
"""


@pytest.mark.slow
def test_a_command_that_hangs_is_named_with_its_time(capsys):
    found = found_of(HANGS.replace("time.sleep(60)", "optimizer.step()"), HANGS, "limit=20")
    (reason,) = [each["reason"] for each in found["differences"] if each["kind"] == "steps"]
    assert reason.startswith("B did not end within 20 s and was ended")
    assert "B did not end within 20 s and was ended" in found["notes"]
    assert "waits\nB did not end" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"20 s before 7 steps were made; give"):
        prove([HANGS, "--resume", HANGS, "limit=20"])
    assert "waits" in capsys.readouterr().err


def test_a_stopped_proof_ends_its_command(tmp_path):
    place = tmp_path / "out" / "files-A-fp64" / "pid"
    command = f"exec {shlex.join([sys.executable, '-c', LAUNCHER])} {{dir}}/pid"
    words = [command, "true", f"out={tmp_path / 'out'}"]
    environment = {**os.environ, "PYTHONPATH": str(RECORDER.parents[2])}
    proof = subprocess.Popen([sys.executable, "-m", "trainer.prove", *words], env=environment)
    try:
        wait_for(lambda: place.exists() and place.read_text().strip())
        proof.terminate()
        assert proof.wait(30) != 0
    finally:
        proof.kill()
    wait_for(lambda: not any(map(is_running, place.read_text().split())))


def of_rates(*rates: float) -> SimpleNamespace:
    of_steps = [{"w": rate} for rate in rates]
    steps = [
        SimpleNamespace(
            rates=each, ranks=[SimpleNamespace(rates=each, advances=[])], num_backwards=1
        )
        for each in of_steps
    ]
    return SimpleNamespace(name="A", size=1, steps=steps)


def test_a_rate_that_begins_with_0_is_explained():
    found = SimpleNamespace(one=of_rates(0.0, 1.0, 2.5), other=of_rates(0.0, 3.0, 7.5), num_steps=3)
    assert explain_rates(found, 1) == "the learning rate is multiplied by 3"
    found.other = of_rates(0.0, 3.0, 4.0)
    assert explain_rates(found, 1).startswith("the schedule depends on the layout")


def test_evaluation_data_with_other_content_are_not_called_repeated():
    def history(rows: list[str]) -> SimpleNamespace:
        rank = SimpleNamespace(evaluations=[EvalPass(1, 4, len(rows), rows)], gathers=set())
        return SimpleNamespace(name="A", ranks=[rank])

    found = SimpleNamespace(one=history(["a", "b", "c"]), other=history(["a", "d", "d"]))
    assert _explain_evaluation(found, 4).startswith("the examples differ in content")


def test_rounding_that_adam_amplifies_is_no_difference():
    def step(gradient: float, weight: float, epsilon: float) -> SimpleNamespace:
        tensors = {"w": np.array([gradient])}, {"w": np.array([weight])}
        gradients, weights = (Merged(each, {}, {}) for each in tensors)
        ranks = [SimpleNamespace(epsilon=epsilon)]
        return SimpleNamespace(ranks=ranks, rates={"w": 1e-3}, gradients=gradients, weights=weights)

    one = step(1e-9, 1.0, 1e-8)
    assert _is_amplified(one, step(1e-9 + 1e-16, 1 + 5e-12, 1e-8), "w")
    assert not _is_amplified(one, step(1e-9 + 1e-16, 1 + 1e-9, 1e-8), "w")
    assert not _is_amplified(step(1e-9, 1.0, 0.0), step(1e-9 + 1e-16, 1 + 5e-12, 0.0), "w")


# Arithmetic ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sketches():
    """The recorder's module, which is loaded without its package."""
    spec = importlib.util.spec_from_file_location("digests", RECORDER / "digests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("shape", [(3,), (7, 5), (300, 500), (4, 40_000)])
def test_sketches_are_linear_and_shards_add_up(sketches, shape):
    one = torch.randn(shape, dtype=torch.float64)
    other = torch.randn(shape, dtype=torch.float64)
    whole = sketches.sketch(one)
    assert torch.allclose(sketches.sketch((one + other) / 2), (whole + sketches.sketch(other)) / 2)
    for dim in range(len(shape)):
        cut = shape[dim] // 3
        first, second = one.split([cut, shape[dim] - cut], dim)
        offset = [0] * len(shape)
        added = sketches.sketch_part(first, shape, offset)
        offset[dim] = cut
        added = added + sketches.sketch_part(second, shape, offset)
        assert torch.allclose(added, whole)


def test_the_norm_of_a_sketch_estimates_that_of_the_tensor(sketches):
    torch.manual_seed(0)
    for shape in ((64,), (1000,), (200_000,)):
        tensor = torch.randn(shape)
        assert 0.5 < sketches.sketch(tensor).norm() / tensor.norm() < 1.6


def batch(number: int, *marks: str) -> dict:
    return {"event": "batch", "number": 1, "rows": [str(number)], "marks": list(marks)}


def call(*marks: str) -> dict:
    return {"event": "forward", "training": True, "marks": list(marks)}


BACKWARD = {"event": "backward", "loss": 1.0}
STEP = {"event": "step"}


def assigned(events: list[dict]) -> list[int | None]:
    label_batches(events)
    owners = assign_batches(events)
    return [owners.get(place) for place, each in enumerate(events) if each["event"] == "batch"]


def test_batches_taken_ahead_belong_to_the_step_that_uses_them():
    loop = [call(), BACKWARD, STEP]
    events = [batch(0), batch(1), *loop, batch(2), *loop, batch(3), *loop]
    assert assigned([dict(each) for each in events]) == [0, 1, 2, None]


def test_skipped_batches_belong_to_no_step():
    events = [batch(0, "a"), batch(1, "b"), batch(2, "c"), call("c"), BACKWARD, STEP]
    events += [batch(3, "d"), call("d"), BACKWARD, STEP]
    assert assigned([dict(each) for each in events]) == [None, None, 0, 1]


def test_a_batch_that_looks_like_a_skipped_one_belongs_to_its_own_step():
    events = [batch(0, "a"), batch(1, "b"), call("b"), BACKWARD, STEP]
    events += [batch(2, "a"), call("a"), BACKWARD, STEP]
    assert assigned([dict(each) for each in events]) == [None, 0, 1]


def test_a_step_with_one_backward_pass_for_two_batches_uses_both():
    events = []
    for number in range(0, 12, 2):
        events += [batch(number), call(), batch(number + 1), call(), BACKWARD, STEP]
    assert assigned([dict(each) for each in events]) == [n // 2 for n in range(12)]


def test_rounding_grows_and_an_error_jumps():
    bounds = Bounds()
    assert bounds.of("weights", 0, 0.0) == 1e-9
    assert bounds.of("weights", 5, 1e-9) > 1e-8


def test_a_gradient_that_is_rounding_is_not_compared_by_its_own_size():
    one = Merged({"weight": np.full(16, 1.0), "bias": np.full(16, 1e-18)}, {}, {})
    other = Merged({"weight": np.full(16, 1.0), "bias": np.full(16, -1e-18)}, {}, {})
    assert compare_tensors(one, other, 1e-6)[0] < 1e-10
    assert compare_tensors(one, Merged({"weight": np.full(16, 2.0)}, {}, {}), 1e-6) == (1, "weight")
