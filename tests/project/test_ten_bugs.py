"""The page of ten bugs: each command, run in examples/bugs, says what the page quotes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch import environment_of_a_command

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "bugs"
PAGE = (ROOT / "docs" / "ten-bugs.md").read_text(encoding="utf-8")
UNEVEN = "micro-batches with different numbers of targets of cross_entropy (15, 5, 14, 12)"
WHAT = "the indices agree, but not what the dataset returns for them"
SHAPES = "B packs 8 examples into 1 row of the model's inputs"
SAID = {
    "mean_of_means.py": f"{UNEVEN} count equally; weighted by these numbers the gradients agree",
    "bug=mean_of_means": "error: loss returned a scalar: must be a value per example; use "
    'reduction="none", and leave out .mean() and .item()',
    "divided_twice.py": "all gradients of B are 0.25 times those of A: the loss is divided by the "
    "number of micro-batches twice",
    "late_sync.py": "the gradients of B are not averaged over its ranks: DDP reads "
    "require_backward_grad_sync in the forward pass, and in the last one of the step it is False",
    "first_epoch_again.py": "the examples are those of step 3, which is at the same position of "
    "another pass: the epoch, which gives the order, is not restored",
    "shard_of_rank_0.py": "1.weight is not restored on rank 1: its part is not in the checkpoint, "
    "or is not loaded",
    "padded_evaluation.py": "B counts 22 examples instead of 21 (1 twice): the sampler repeats "
    "examples, so that each rank has the same number",
    "copied_generator.py": f"{WHAT}: the dataset draws random numbers (augmentation) that depend "
    "on rank or worker",
    "bug=copied_generator": "error: run.prove=true: example 70 has other values when it is read "
    "again: it depends on random of the data set, which reading changes",
    "uneven_ranks.py": "rank 1 of B has 10 batches in a pass, others 11: it leaves the loop, and "
    "they wait for its gradients",
    "fewer_workers.py": "the global batch is 16 examples in A and 8 in resumed: the batch size of "
    "a rank was not divided by the number of ranks",
    "forgotten_norm.py": "the gradients of B are not averaged over its ranks for 1.weight, 1.bias, "
    "but for other parameters they are",
    "layouts=": "proved: all runs learned the same",
    "steps=16": "proved: all runs learned the same",
    "leaking_packs.py": "examples and weights agree, and the losses differ by 8e-03: "
    f"{SHAPES}: attention, positions or shifted labels may cross their borders",
}
CHEAPEST = "divided_twice.py"
BLOCK = re.compile(r"^```sh\n(.*?)^```\n\n> (.*?)$", re.DOTALL | re.MULTILINE)
COMMANDS = {line: quote for lines, quote in BLOCK.findall(PAGE) for line in lines.splitlines()}


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a page in a folder, with torchrun on a free port."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = environment_of_a_command(PATH=path, PYTHONPATH=str(ROOT))
    words = ["bash", "-c", line.replace("torchrun --nproc", "torchrun --standalone --nproc")]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_page_quotes_what_each_command_says():
    assert len(COMMANDS) == len(SAID)
    for name, said in SAID.items():
        (quote,) = (quote for line, quote in COMMANDS.items() if name in line)
        assert quote == said
    assert all(path.name in PAGE for path in FOLDER.glob("*.py"))
    assert len(re.findall(r"^## \d+\. ", PAGE, re.MULTILINE)) == 10


def test_each_script_fits_on_a_screen():
    for path in {*FOLDER.glob("*.py")} - {FOLDER / "here.py"}:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40, path.name


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=([pytest.mark.slow] if each != CHEAPEST else [])) for each in SAID],
)
def test_a_command_of_the_page_says_what_it_quotes(name, tmp_path):
    (line,) = (line for line in COMMANDS if name in line)
    is_proved = SAID[name].startswith("proved")
    if not is_proved and "--config-dir" in line:
        line += f" run.dir={tmp_path}"
    done = run(line, FOLDER)
    assert SAID[name] in done.stdout + done.stderr
    assert (done.returncode == 0) == is_proved


@pytest.mark.slow
def test_prove_takes_a_command_of_lockstep():
    command = "python -m trainer --config-dir conf task=here run.dir={dir}"
    done = run(f"lockstep prove '{command}' '{command} data.micro_batch=4' steps=6", FOLDER)
    assert "proved: both commands learned the same" in done.stdout, done.stdout + done.stderr
    assert "the recorder itself failed" not in done.stdout


OF_TRAIN = {  # the commands that README and prove.md show, on a script train.py
    "lockstep prove 'python train.py --batch-size 64' "
    "'torchrun --nproc_per_node=2 train.py --batch-size 32' steps=20": (
        "step 1: the examples differ: 64 in A, 64 in B, 32 in both\n"
        "  likely reason: ranks of B use the same examples: no sampler divides the dataset among "
        "the ranks"
    ),
    "lockstep prove 'python train.py {dir}' --resume 'python train.py {dir} --resume' "
    "kill=7": "proved: both commands learned the same",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", OF_TRAIN)
def test_commands_on_a_script_that_other_pages_show_run_in_examples(line):
    assert line in (ROOT / "docs" / "prove.md").read_text(encoding="utf-8")
    done = run(line, ROOT / "examples")
    assert OF_TRAIN[line] in done.stdout, done.stdout + done.stderr
