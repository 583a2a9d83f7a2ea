"""Compare what stays the same in another layout: plain DDP script, Lightning, Accelerate, Hugging
Face's Trainer, Lockstep.

    pip install -e '.[bench,hf,metrics]'
    python scripts/compare/compare_peers.py [--only NAME ...] [--checks N ...] [--jobs N]
        [--out FILE]

Every contestant (scripts/compare/peers/) trains the same small model on the same data with the same
settings, in the way that its own documentation recommends, started by torchrun on 1, 2 and 3 ranks.
Kills, signals and hangs are real. The measurements come from one instrument at the loss, which
records the examples and per-example losses of each step, not from the output of a contestant.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from harness.launch import ranks_of
from peers.bench import CONTESTANTS, LIMIT_S, Bench, Done, read
from peers.problem import (
    BAD_EXAMPLE,
    BAD_RANK,
    HANGING_STEP,
    NUM_EVAL,
    STEPS,
    STEPS_PER_EPOCH,
    Points,
    build_model,
)

ROUNDING = 1e-9
SIGNAL_STEP = 6  # checkpoints are written after 5 and 10 steps, an epoch has 8


def short(value: float) -> str:
    return f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}"


def difference(one: dict[int, float], other: dict[int, float]) -> float:
    """Return the largest relative difference over the steps that both runs made."""
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one.keys() & other.keys())


# Checks -------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Result of a check: `figure` goes into the table, `seen` is the sentence for a "no"."""

    passed: bool
    figure: str
    seen: str


def same_on_two_ranks(bench: Bench) -> Result:
    """Training losses on 2 ranks equal those on 1, with dropout (fp64)"""
    # DDP: a seed, DistributedSampler, batch / world_size (imagenet/main.py). Lightning:
    # seed_everything(workers=True), deterministic=True ("Reproducibility"). Accelerate: set_seed,
    # split_batches=True, use_seedable_sampler=True ("DataLoaderConfiguration"). HF Trainer:
    # full_determinism=True and split_batches=True ("TrainingArguments").
    found = difference(bench.run(1).losses(), bench.run(2).losses())
    plain = difference(bench.run(1, dropout=0.0).losses(), bench.run(2, dropout=0.0).losses())
    return Result(
        found < ROUNDING,
        f"{short(found)}, without dropout {short(plain)}",
        f"The losses differ by up to {short(found)} (relative), without dropout by {short(plain)}.",
    )


def same_by_accumulation(bench: Bench) -> Result:
    """With dropout, 3 micro-batches a step give the losses of 1, in an epoch's last window too"""
    # DDP: no_sync() and loss / n (DDP's documentation). Lightning: accumulate_grad_batches=3.
    # Accelerate: gradient_accumulation_steps=3 and accumulate(model). HF Trainer: the same number,
    # and a loss divided by num_items_in_batch.
    # The last batch of an epoch is kept if that is configurable: 5 examples, in micro-batches of 4
    # and 1. Lockstep drops it; its micro-batches have 5, 5 and 2 examples.
    found = []
    for dropout in (0.2, 0.0):
        one = bench.run(1, dropout=dropout, drop_last=False).losses()
        other = bench.run(1, dropout=dropout, drop_last=False, accumulation=3).losses()
        found.append(difference(one, other))
    per_epoch = len(one) // 2
    first = {step: loss for step, loss in one.items() if step < per_epoch}
    full = difference(first, other)
    return Result(
        max(found) < ROUNDING and len(one) == len(other),
        f"{short(found[0])}, without dropout {short(full)} and {short(found[1])}",
        f"The losses differ by up to {short(found[0])}; without dropout by {short(full)} up to the"
        " first epoch's last window, which has 2 micro-batches instead of 3, and by up to"
        f" {short(found[1])} after it.",
    )


def logged_loss_is_the_mean(bench: Bench) -> Result:
    """The logged training loss is the mean over the global batch (2 ranks)"""
    # DDP: loss.item() of each rank (imagenet/main.py). Lightning: self.log(sync_dist=True).
    # Accelerate: gather(loss).mean(). HF Trainer: its log.
    run = bench.run(2)
    found = difference(run.losses(), run.logged("loss"))
    return Result(
        found < 1e-6,
        short(found),
        f"The printed loss is rank 0's, up to {found:.0%} from the mean over the global batch.",
    )


def evaluation_counts_once(bench: Bench) -> Result:
    """Evaluation counts each of 31 examples once, on 2 and 3 ranks"""
    # DDP: equal parts, and the rest on every rank (imagenet/main.py). Lightning: torchmetrics in
    # validation_step. Accelerate: gather_for_metrics, which removes repeated examples; HF Trainer
    # calls it, and compute_metrics.
    counts = []
    errors = []
    for ranks in (2, 3):
        run = bench.run(ranks)
        row = read(run.folder / "evaluation.jsonl")[0]
        counts.append(row["counted"])
        errors.append(abs(row["accuracy"] - true_accuracy(run)))
    counted = " and ".join(map(str, counts))
    return Result(
        counts == [NUM_EVAL] * 2 and max(errors) < 1e-6,
        counted if max(errors) < 1e-6 else f"{counted}, accuracy off by {short(max(errors))}",
        f"{counted} examples were counted, and the accuracy was wrong by up to"
        f" {100 * max(errors):.1f} points.",
    )


def true_accuracy(run: Done) -> float:
    """Return the accuracy of the final weights, computed in this process."""
    weights = run.weights()
    assert weights is not None
    model = build_model(0.0)
    model.load_state_dict(weights)
    data = Points("eval")
    return (model(data.features).argmax(1) == data.classes).double().mean().item()


def resume_takes_the_next_batch(bench: Bench) -> Result:
    """A resume in the middle of an epoch takes the next unseen batch"""
    # DDP: "epoch" in the checkpoint (imagenet/main.py). Lightning: ckpt_path="last" and a loader
    # with a state. Accelerate: load_state and skip_first_batches ("Checkpointing"). HF Trainer:
    # train(resume_from_checkpoint=).
    undisturbed = taken(bench.run(2))
    resumed = taken(bench.killed())
    repeated = (resumed - undisturbed).total()
    skipped = (undisturbed - resumed).total()
    step = bench.killed().resumed_at()
    assert step is not None, bench.killed().output
    at = f"after step {step}"
    why = (
        f"The run resumed {at} of {STEPS}; {repeated} examples of that epoch were taken again,"
        f" {skipped} never."
    )
    if step % STEPS_PER_EPOCH == 0:
        why = f"The run resumed {at}, at the start of the epoch: its first steps were lost."
    return Result(
        repeated == skipped == 0 and step % STEPS_PER_EPOCH > 0,
        at if repeated == skipped == 0 else f"{at}, {repeated} repeated, {skipped} skipped",
        why,
    )


def taken(run: Done) -> Counter[int]:
    """Count how often each example was trained on in the second epoch."""
    rows = (rows for step, rows in run.seen().items() if step >= STEPS_PER_EPOCH)
    return Counter(index for each in rows for index, _ in each)


def killed_run_ends_alike(bench: Bench) -> Result:
    """Killed (SIGKILL) in the middle and resumed, the final weights have the same bits"""
    # As above; Accelerate and HF Trainer keep the random number generators too.
    far = distance(bench.run(2), bench.killed())
    if far == 0.0:
        return Result(True, "0", "")
    plain = distance(bench.run(2, dropout=0.0), bench.killed(dropout=0.0))
    return Result(
        False,
        f"{short(far)}, without dropout {short(plain)}",
        f"The final weights differ by up to {short(far)} from those of the undisturbed run, without"
        f" dropout by {short(plain)}.",
    )


def distance(one: Done, other: Done) -> float:
    """Return the largest difference between the final weights of two runs."""
    weights = one.weights()
    others = other.weights()
    if weights is None or others is None:
        raise SystemExit(f"no end:\n{other.output[-3000:]}")
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def schedule_has_the_same_length(bench: Bench) -> Result:
    """The learning-rate schedule has the same steps and rates on 1 and 2 ranks"""
    # DDP: by hand. Lightning: {"interval": "step"}. Accelerate: prepare(scheduler), which
    # steps once a step under split_batches=True. HF Trainer: lr_scheduler_type="linear".
    one = bench.run(1).logged("rate")
    other = bench.run(2).logged("rate")
    far = max(abs(one[step] - other[step]) for step in one.keys() & other.keys())
    found = f"{len(one)} and {len(other)}"
    if far >= ROUNDING:
        found += f", rates differ by {short(far)}"
    return Result(len(one) == len(other) and far < ROUNDING, found, f"Steps: {found}.")


def signal_stops_all_ranks(bench: Bench) -> Result:
    """SIGTERM to one of 2 ranks stops all at the same step, with a checkpoint of it"""
    # Lightning: its own handler, and ModelCheckpoint(save_on_exception=True). HF Trainer:
    # enable_jit_checkpoint=True, which waits 3 s. DDP and Accelerate document none.
    settings = bench.settings("signal", fault="pause")
    started = bench.start(2, settings)
    started.wait_for_step(SIGNAL_STEP)
    os.kill(ranks_of(started.process)[BAD_RANK], signal.SIGTERM)
    done = bench.finish(started, LIMIT_S)
    if done.code is None:
        return Result(False, "hang", f"{LIMIT_S} s after the signal the run had not ended.")
    last = [step + 1 for step in done.last_steps()]
    again = replace(settings, fault=None, resume=True)
    at = bench.finish(bench.start(2, again)).resumed_at()
    found = f"steps {last[0]} and {last[1]}"
    restart = "restart failed" if at is None else f"resumed after {at}"
    return Result(
        len(set(last)) == 1 and at == last[0] < STEPS,
        f"{found}, {restart}",
        f"The ranks ended in {found}; the {restart.replace('resumed', 'restart resumed')}.",
    )


def hang_is_named(bench: Bench) -> Result:
    """A rank that hangs is named within a minute, with its stack (all time limits at 20 s)"""
    # The timeout of the process group: init_process_group(timeout=), DDPStrategy(timeout=),
    # InitProcessGroupKwargs(timeout=), PartialState(timeout=).
    # TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's own aid, ended both ranks of DDP over gloo by SIGSEGV
    # (torch 2.13.0), so it is left out.
    started = bench.start(2, bench.settings("hang", fault="hang"))
    started.wait_for_step(HANGING_STEP)
    done = bench.finish(started, LIMIT_S)
    has_stack = "hang_here" in done.output
    is_named = re.search(rf"(progress|hang|hung|stuck|missing)\D*rank {BAD_RANK}\b", done.output)
    name = "named" if is_named else "not named"
    stack = ", with its stack" if is_named else ", stacks printed"
    stack = stack if has_stack else ""
    end = f"after {done.seconds:.0f} s" if done.code is not None else "no end"
    is_late = re.search("timed out|timeout", done.output, re.IGNORECASE)
    how = " by the time limit of a collective" if is_late else ""
    said = (
        "the ranks' stacks are printed, but none as that of the hung rank"
        if has_stack
        else f"the rank is {name}, without a stack"
    )
    ended = "did not end" if done.code is None else f"ended {end}"
    why = f"The run {ended}{how}; {said}."
    return Result(bool(is_named) and has_stack, f"{end}, {name}{stack}", why)


def nan_touches_no_weight(bench: Bench) -> Result:
    """One example is NaN: all ranks skip the step or stop at it, and no weight becomes NaN"""
    # Lightning: detect_anomaly=True, HF Trainer: debug="underflow_overflow" ("Debugging"). DDP and
    # Accelerate document nothing in fp64. A rank that stops in the forward has recorded no loss of
    # that step; the others cannot pass its all-reduce.
    done = bench.finish(bench.start(2, bench.settings("nan", fault="nan")))
    weights = done.weights()
    last = [step + 1 for step in done.last_steps()]
    is_named = re.search(rf"example[s ]*{BAD_EXAMPLE}\b", done.output)
    name = ", example named" if is_named else ""
    if weights is None:
        how = f"stopped in step {max(last)}"
        is_alike = done.code is not None and max(last) - min(last) <= 1
        return Result(is_alike, f"{how}{name}", f"The ranks {how}{name}.")
    is_finite = all(bool(tensor.isfinite().all()) for tensor in weights.values())
    how = "step skipped" if is_finite else "weights NaN"
    why = f"Weights became NaN, and the run continued to its end with exit code {done.code}."
    return Result(is_finite, f"{how}{name}", why)


def resumed_on_three_ranks(bench: Bench) -> Result:
    """With dropout, a run killed on 2 ranks and resumed on 3 equals the undisturbed one"""
    # As in checks 5 and 6. Equal: the same examples in each global batch; losses and weights up to
    # rounding.
    far, moved = changes(bench, dropout=0.2)
    lost = f", {moved} batches changed" if moved else ""
    plain, _ = changes(bench, dropout=0.0) if far >= ROUNDING else (far, moved)
    return Result(
        far < ROUNDING and moved == 0,
        f"{short(far)}, without dropout {short(plain)}{lost}",
        f"Losses and weights differ by up to {short(far)}, without dropout by {short(plain)};"
        f" {moved} of {STEPS} batches had other examples, or were not taken.",
    )


def changes(bench: Bench, dropout: float) -> tuple[float, int]:
    """Return (largest difference of losses or weights, number of batches with other examples)."""
    one = bench.run(2) if dropout == 0.2 else bench.run(2, dropout=dropout)
    other = bench.killed(3, dropout)
    far = max(difference(one.losses(), other.losses()), distance(one, other))
    batches, others = (
        {step: {index for index, _ in rows} for step, rows in run.seen().items()}
        for run in (one, other)
    )
    return far, sum(batches[step] != others.get(step) for step in batches)


def hostile_checkpoint_runs_no_code(bench: Bench) -> Result:
    """A checkpoint with a hostile pickle in place of one of its files runs no code at a resume"""
    # Each file in turn, with digests to match. DDP: torch.load(checkpoint) (imagenet/main.py).
    # Lightning: fit(ckpt_path="last"). Accelerate: load_state with a registered object
    # ("Checkpointing"). HF Trainer: train(resume_from_checkpoint=).
    ran = bench.hostile()
    names = " and ".join(name for name, is_run in ran.items() if is_run)
    figure = f"{names} ran" if names else f"none of {len(ran)}"
    return Result(bool(ran) and not names, figure, f"The code in {names} ran.")


CHECKS = [
    same_on_two_ranks,
    same_by_accumulation,
    logged_loss_is_the_mean,
    evaluation_counts_once,
    resume_takes_the_next_batch,
    killed_run_ends_alike,
    schedule_has_the_same_length,
    signal_stops_all_ranks,
    hang_is_named,
    nan_touches_no_weight,
    resumed_on_three_ranks,
    hostile_checkpoint_runs_no_code,
]


def title(check: Callable[[Bench], Result]) -> str:
    return (check.__doc__ or "").split("\n")[0]


# The document -------------------------------------------------------------------------------------

INTRODUCTION = """\
# What stays the same, by contestant

`{command}`, {date}, {cores} CPU cores, {system}, Python {python}, {versions}.

Each contestant trains the same model (a perceptron with two dropout layers, in fp64) on the same
101 examples with the same settings: batch 12, SGD with momentum, a linear schedule, 2 epochs. Each
is started by torchrun over gloo and written as its own documentation recommends; the files in
[scripts/compare/peers/](../scripts/compare/peers) cite the pages. Plain DDP is PyTorch's ImageNet
example. Kills, signals and hangs are real. The same recorder, called in the loss, notes each
example and loss, so no framework's own logging is trusted. Differences of losses are relative, and
the largest over all steps.
"""

LIMITS = """\
## How to read it

- torch draws dropout from one generator per rank, by rows of the micro-batch. Another layout draws
  other masks; the figures without dropout show the remaining difference. With `run.dropout=torch`
  Lockstep does the same.
- All contestants drop the last, smaller batch of an epoch, except in check 2. Lockstep always drops
  it, with other examples in each epoch; the others can keep it.
- The plain script writes a checkpoint at the end of each epoch, as the ImageNet example does; the
  others write one every 5 steps, and an epoch has 8.
- Lightning recommends testing on one device (`Trainer(devices=1)`), because its sampler repeats
  examples on several devices. Check 4 is about the validation within `fit`.
- For check 10 Lightning has `detect_anomaly=True` and HF Trainer `debug="underflow_overflow"`,
  debugging aids. With DDP and Accelerate the script must check the loss before the step.
- With Accelerate and DDP the script must handle signals. Accelerate has `set_trigger` and
  `check_trigger` to build on. HF Trainer has `enable_jit_checkpoint`, for a signal to all ranks.
- For check 12 Accelerate has no setting: it loads registered objects with `weights_only=False`.
- All runs used gloo on a CPU. NCCL has its own aid for check 9, the flight recorder.
"""


def write(results: dict[str, dict[int, Result]], command: str) -> str:
    packages = [p for name in results for p in CONTESTANTS[name].packages]
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    parts = [
        INTRODUCTION.format(
            command=command,
            date=time.strftime("%Y-%m-%d"),
            cores=os.cpu_count(),
            system=platform.system(),
            python=platform.python_version(),
            versions=", ".join(versions),
        )
    ]
    titles = [CONTESTANTS[name].title for name in results]
    parts.append("| | check | " + " | ".join(titles) + " |\n" + "|---" * (len(titles) + 2) + "|")
    numbers = sorted(next(iter(results.values())))
    for number in numbers:
        cells = [cell(found[number]) for found in results.values()]
        row = [str(number), title(CHECKS[number - 1]), *cells]
        parts.append("| " + " | ".join(row) + " |")
    parts.append('\n## What was seen for each "no"\n')
    for name, found in results.items():
        misses = [f"- {n}: {found[n].seen}" for n in numbers if not found[n].passed]
        parts.append("\n".join([f"{CONTESTANTS[name].title}:\n", *(misses or ["- nothing"]), ""]))
    return "\n".join([*parts, LIMITS])


def cell(result: Result) -> str:
    return f"{'**yes**' if result.passed else 'no'}: {result.figure}"


def compare(name: str, numbers: list[int], folder: Path) -> dict[int, Result]:
    bench = Bench(name, folder / name)
    results = {}
    for number in numbers:
        results[number] = CHECKS[number - 1](bench)
        said = f"{number}. {title(CHECKS[number - 1])}: {cell(results[number])}"
        print(f"{CONTESTANTS[name].title}, {said}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = list(range(1, len(CHECKS) + 1))
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    parser.add_argument("--checks", nargs="+", type=int, choices=everything, default=everything)
    parser.add_argument("--jobs", type=int, default=1, help="number of contestants at a time")
    parser.add_argument("--out", type=Path, help="write the document (see docs/evidence.md)")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-peers-") as folder,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        jobs = {name: pool.submit(compare, name, given.checks, Path(folder)) for name in given.only}
        results = {name: job.result() for name, job in jobs.items()}
    document = write(
        results, " ".join(["python", "scripts/compare/compare_peers.py", *sys.argv[1:]])
    )
    print(document)
    if given.out is not None:
        given.out.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
