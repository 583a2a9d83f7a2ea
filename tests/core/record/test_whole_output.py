"""All that a run says at its start, at a resume on other ranks, and at its end, as a whole."""

import re

import pytest
from harness import fit_on

WORDS = ["task=tiny", "task.options.norm=true", "run.steps=14", "data.global_batch=25"]
WORDS += ["run.ema_decay=0.9", "optim.lr=0.05", "run.freeze=[4.bias]", "log.every_steps=7"]
MEASURED = re.compile(r"\d+\.\d\d? s\b|[\d,]+ examples/s|\d\.\d{4}")

COMMON = """steps   {steps}; drops 3 examples per epoch, different ones each time
train   203 examples, ResidentDataset
eval    203 examples, ResidentDataset
model   Sequential, 163 parameters, 3 of them frozen
warning: BatchNorm sees one micro-batch at a time, so results change with the number of ranks; \
set run.norm_rows=5{more}
evaluation uses the moving average of the weights (run.ema_decay)
"""
SYNCHRONIZED = " or strategy.sync_batchnorm=true"  # which no micro-batches may meet
PROOF = """proof   apart from plain BatchNorm, data, random numbers and buffers do not depend on \
the layout (25 rows tried, *)
"""
END = """last evaluation: eval/accuracy *  eval/loss *; best eval/loss: * at step {step}
curves: tensorboard --logdir DIR/tiny/run/tensorboard
train longer with: {launcher} -m trainer run.resume=DIR/tiny/run task.trainer=tiny.Tiny {more}
"""
FIRST = (
    """tiny    DIR/tiny/run
layout  ddp, 1 rank on 1 node, CPU, fp64, 1 thread per rank
batch   25 examples = 1 rank x 3 micro-batches of 8 or 9
"""
    + COMMON.format(steps="14 = 1.75 of an epoch's 8", more="")
    + PROOF
    + """step 8/14  eval/accuracy *  eval/loss *
step 14/14  loss *  lr 0.05  *
step 14/14  eval/accuracy *  eval/loss *
done: 14 steps, in *, *
"""
    + END.format(step=14, launcher="python", more="run.steps=28")
)
SECOND = (
    """tiny    DIR/tiny/run
layout  ddp over gloo, 2 ranks on 1 node, CPU, fp64, 1 thread per rank
batch   25 examples = 2 ranks x 1 micro-batch of 12 or 13
"""
    + COMMON.format(steps="20 = 2.5 of an epoch's 8", more=SYNCHRONIZED)
    + """resumed at step 14 of 20
changed at this resume: run.steps: 14 -> 20
changed at this resume: data.micro_batch: 10 -> null
changed at this resume: optim.lr: 0.05 -> 0.1
learning rate: 0.1 in the next; the schedule is computed for the new length
"""
    + PROOF
    + """step 16/20  eval/accuracy *  eval/loss *
step 20/20  loss *  lr 0.1  *
step 20/20  eval/accuracy *  eval/loss *
done: 20 steps, 6 of them in *, *
"""
    + END.format(step=20, launcher="torchrun --nproc_per_node=2", more="run.steps=40")
)


def said(capfd, folder):
    """Return the lines of a run without what was measured, or depends on the machine."""
    text = MEASURED.sub("*", capfd.readouterr().out.replace(str(folder), "DIR"))
    lines = [re.sub(r" +\d:\d\d left$", "", line) for line in text.splitlines()]
    return [line for line in lines if not line.startswith("slower than necessary: ")]


@pytest.mark.companion("startup_checks")
def test_a_run_and_its_resume_on_more_ranks_say_this(tmp_path, capfd):
    fit_on(1, tmp_path, *WORDS, "data.micro_batch=10")
    assert said(capfd, tmp_path) == FIRST.splitlines()
    fit_on(2, tmp_path, *WORDS, "run.resume=auto", "run.steps=20", "optim.lr=0.1")
    assert said(capfd, tmp_path) == SECOND.splitlines()
