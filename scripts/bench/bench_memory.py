"""Measure the memory of training per rank, and what it costs to save and load its state.

    python scripts/bench/bench_memory.py [--rounds 3] [--only memory checkpoints] [--json FILE]

memory: A GPT of task=text with 202 MB of parameters (width 1024, 4 blocks, fp32, AdamW) takes four
steps of one short sequence per rank, under ddp and fsdp, on 2 and 4 ranks. The peak is the resident
memory (VmHWM of /proc/self/status) of the rank that needs most, less what it had after a run with a
tiny model. The ideal is parameters, gradients and optimizer state, divided by the ranks under fsdp,
plus the parameters of the largest block. Beside fsdp stands a loop with torch's fully_shard alone.

checkpoints: The same GPT with 300 MB of parameters and optimizer state (width 720), divided over
two ranks, is saved in the middle of training and loaded again: by Lockstep, by torch's distributed
checkpoints (DCP, with and without async_save), and gathered by rank 0 for torch.save. `stall` is
how much longer the step with the save is than the median; `saved` ends when the files are on disk
(Lockstep syncs them and writes their SHA-256; the others do neither). Contestants take turns; the
table has medians over the rounds.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contest import answer, build_plain, launch, options, write

MB = 1e6
CASES = [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)]
SAVED_AFTER, STEPS = 6, 16
MODEL = [
    *("task=text", "task.options.dropout=0.0", "task.options.files=2", "task.options.context=16"),
    *("strategy.precision=fp32", "eval.every_steps=null", "log.every_steps=10"),
    "checkpoint.every_steps=null",
]


def read_status(key: str) -> float:
    """Return a figure of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * float(text.split(f"{key}:")[1].split()[0])


def forget_peak() -> None:
    """Let VmHWM begin again at the memory that is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def warm_up(words: list[str], folder: str) -> float:
    """Train a tiny model in the same way, which imports all that it needs; return the memory."""
    from trainer import load_config
    from trainer.tasks.text import Text

    small = [*MODEL, *words, "task.options.width=32", f"run.dir={folder}/small", "run.steps=2"]
    Text(load_config(small)).fit()
    forget_peak()
    return read_status("VmRSS")


def memory(words: list[str], folder: str) -> dict[str, Any]:
    """Train, and return the peaks of memory of this rank in bytes."""
    from trainer import load_config
    from trainer.tasks.text import Text

    base = warm_up(words, folder)
    peaks: dict[str, float] = {}

    class Watched(Text):
        def build_model(self) -> Any:
            model = super().build_model()
            values = list(model.parameters())
            blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
            peaks["parameters"] = sum(p.nbytes for p in values)
            peaks["block"] = max(blocks)
            return model

        def train_step(self, batch: Any) -> Any:
            peaks.setdefault("start", read_status("VmHWM"))
            outcome = super().train_step(batch)
            peaks["steps"] = read_status("VmHWM")
            return outcome

    config = load_config([*MODEL, *words, f"run.dir={folder}/run", "run.steps=4"])
    Watched(config).fit()
    peaks["end"] = read_status("VmHWM")
    return {k: v - base if k in ("start", "steps", "end") else v for k, v in peaks.items()}


def memory_plain(words: list[str], folder: str) -> dict[str, Any]:
    """Train with torch's fully_shard alone, and return the peaks of this rank in bytes."""
    base = warm_up(words, folder)
    peaks: dict[str, float] = {}
    for number, _ in enumerate(train_plain([*MODEL, *words], folder)):
        peaks["steps" if number else "start"] = read_status("VmHWM") - base
        if number == 4:
            break
    return {**peaks, "end": peaks["steps"]}


class Meter:
    """The time of each step, and the peak of memory from the save on."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.level = 0.0

    def step(self) -> None:
        """Note the end of a step. The step after the save ends SAVED_AFTER + 1."""
        self.times.append(time.perf_counter())
        if len(self.times) == SAVED_AFTER - 1:
            forget_peak()
            self.level = read_status("VmHWM")

    def result(self, saved_s: float, load: Callable[[], None]) -> dict[str, float]:
        """Load, and return the figures of this rank."""
        peak = read_status("VmHWM")
        steps = [after - before for before, after in itertools.pairwise(self.times)]
        typical = statistics.median(steps)
        stall = steps[SAVED_AFTER - 1] - typical  # this step began with the save
        forget_peak()
        level = read_status("VmHWM")
        begun = time.perf_counter()
        load()
        loaded_s = time.perf_counter() - begun
        return {
            "stall_s": stall,
            "saved_s": saved_s,
            "save_mb": (peak - self.level) / MB,
            "load_s": loaded_s,
            "load_mb": (read_status("VmHWM") - level) / MB,
        }


def lockstep(words: list[str], folder: str) -> dict[str, float]:
    """Save behind the loop and load, as a run does it."""
    import torch.distributed as dist

    from trainer import load_config
    from trainer.core.checkpoints.reading import read_on_all_ranks
    from trainer.core.checkpoints.transaction import final_path
    from trainer.core.trainer import active_run
    from trainer.tasks.text import Text

    meter = Meter()
    found: dict[str, float] = {}

    class Watched(Text):
        def train_step(self, batch: Any) -> Any:
            run = active_run(self)
            if len(meter.times) == SAVED_AFTER:
                found["begun"] = time.time()
                run.save()
            outcome = super().train_step(batch)
            meter.step()
            if len(meter.times) == STEPS:
                run.checkpoints.wait()
                dist.barrier()  # rank 0 publishes it
                path = final_path(run.directory / "checkpoints", SAVED_AFTER)
                saved_s = (path / "manifest.json").stat().st_mtime - found["begun"]

                def load() -> None:
                    restored, _ = read_on_all_ranks(run._ranks.group, lambda: ([path], True))
                    run.engine.state.load(restored.content.sources, restored.content.training)

                found.update(meter.result(saved_s, load))
            return outcome

    steps = [f"run.steps={STEPS}", "checkpoint.keep_last=2"]
    Watched(load_config([*words, f"run.dir={folder}", *steps])).fit()
    return {key: value for key, value in found.items() if key != "begun"}


def train_plain(words: list[str], folder: str) -> Iterator[Any]:
    """Train with torch's fully_shard alone; yield (model, optimizer) before each step."""
    import torch.distributed as dist

    task, data, model, optimizer = build_plain(words, folder)
    for number in range(STEPS):
        yield model, optimizer
        row = number % len(data)
        inputs, targets = task.split_batch([part[None] for part in data[row]])
        values, weights = task.loss(model(*inputs), targets)
        ((values * weights).sum() / weights.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model, optimizer
    dist.barrier()
    dist.destroy_process_group()


def dcp(words: list[str], folder: str, is_async: bool = False) -> dict[str, float]:
    """Save and load by torch.distributed.checkpoint."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    group = None
    meter = Meter()
    found: dict[str, float] = {}
    path = f"{folder}/saved"
    saving: Any = None
    for number, (model, optimizer) in enumerate(train_plain(words, folder)):
        if number:
            meter.step()
        if number == SAVED_AFTER:
            group = dist.new_group(backend="gloo")  # its thread has collectives of its own
            begun = time.time()
            weights, state = get_state_dict(model, optimizer)
            tree = {"model": weights, "optimizer": state}
            if is_async:
                saving = checkpoint.async_save(tree, checkpoint_id=path, process_group=group)
                saving.add_done_callback(lambda _, t=begun: found.update(saved_s=time.time() - t))
            else:
                checkpoint.save(tree, checkpoint_id=path)
                found["saved_s"] = time.time() - begun
        if number == STEPS:
            if saving is not None:
                saving.result()

            def load(model: Any = model, optimizer: Any = optimizer) -> None:
                weights, state = get_state_dict(model, optimizer)
                tree = {"model": weights, "optimizer": state}
                checkpoint.load(tree, checkpoint_id=path)
                set_state_dict(
                    model, optimizer, model_state_dict=weights, optim_state_dict=tree["optimizer"]
                )

            found.update(meter.result(found["saved_s"], load))
    return found


def dcp_async(words: list[str], folder: str) -> dict[str, float]:
    """Save by torch.distributed.checkpoint.async_save, behind the loop."""
    return dcp(words, folder, is_async=True)


def whole(words: list[str], folder: str) -> dict[str, float]:
    """Gather the state on rank 0 and save it by torch.save; load it there and send it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    meter = Meter()
    found: dict[str, float] = {}
    path = f"{folder}/saved.pt"
    for number, (model, optimizer) in enumerate(train_plain(words, folder)):
        if number:
            meter.step()
        if number == SAVED_AFTER:
            begun = time.time()
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights, state = get_state_dict(model, optimizer, options=options)
            if dist.get_rank() == 0:
                torch.save({"model": weights, "optimizer": state}, path)
            del weights, state
            dist.barrier()
            found["saved_s"] = time.time() - begun
        if number == STEPS:

            def load(model: Any = model, optimizer: Any = optimizer) -> None:
                tree = torch.load(path, weights_only=True, mmap=True)
                options = StateDictOptions(full_state_dict=True)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=tree["model"],
                    optim_state_dict=tree["optimizer"],
                    options=options,
                )

            found.update(meter.result(found["saved_s"], load))
    return found


SAVERS: dict[str, Callable[[list[str], str], dict[str, float]]] = {
    "lockstep": lockstep,
    "dcp": dcp,
    "dcp, async_save": dcp_async,
    "gathered, torch.save": whole,
}


def compare_memory(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for strategy, ranks in CASES:
        words = [f"strategy={strategy}", "task.options.width=1024", f"data.global_batch={ranks}"]
        taken = [launch(__file__, "memory", words, ranks) for _ in range(rounds)]
        peaks = find_peaks(taken)
        first = taken[0][0]  # rank 0 builds the model
        divisor = ranks if strategy == "fsdp" else 1
        ideal = 4 * first["parameters"] / divisor + first["block"]
        row = {"strategy": strategy, "ranks": ranks, "ideal_mb": ideal / MB}
        row |= {f"{phase}_mb": peak / MB for phase, peak in peaks.items()}
        row["ratio"] = max(peaks["start"], peaks["steps"]) / ideal
        text = "{strategy:5} {ranks} ranks  ideal {ideal_mb:4.0f} MB  start {start_mb:4.0f}  "
        text += "steps {steps_mb:4.0f}  with the last save {end_mb:4.0f}  x{ratio:.2f}"
        if strategy == "fsdp":
            plain = find_peaks(
                [launch(__file__, "memory_plain", words, ranks) for _ in range(rounds)]
            )
            row["plain_ratio"] = max(plain.values()) / ideal
            text += ", torch's fully_shard alone x{plain_ratio:.2f}"
        print(text.format(**row), flush=True)
        rows.append(row)
    return rows


def find_peaks(taken: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return the median of the rounds, of the rank that needed most."""
    return {
        phase: statistics.median(max(each[phase] for each in found) for found in taken)
        for phase in ("start", "steps", "end")
    }


def compare_checkpoints(rounds: int) -> list[dict[str, Any]]:
    words = [*MODEL, "strategy=fsdp", "task.options.width=720", "data.global_batch=2"]
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in SAVERS}
    for number in range(rounds):
        for name in list(SAVERS)[:: 1 if number % 2 == 0 else -1]:
            found = launch(__file__, name, words, 2)
            taken[name].append({key: max(each[key] for each in found) for key in found[0]})
    rows: list[dict[str, Any]] = []
    for name, results in taken.items():
        row = {key: statistics.median(each[key] for each in results) for key in results[0]}
        text = "{name:21} stall {stall_s:5.2f} s  saved after {saved_s:5.2f} s, +{save_mb:4.0f} MB"
        text += "  loaded in {load_s:5.2f} s, +{load_mb:4.0f} MB"
        print(text.format(name=name, **row), flush=True)
        rows.append({"name": name, **row})
    return rows


PARTS = {"memory": compare_memory, "checkpoints": compare_checkpoints}


def main() -> int:
    given = vars(options(__doc__, PARTS, rounds=3).parse_args())
    if name := given["as"]:
        worker = {"memory": memory, "memory_plain": memory_plain, **SAVERS}[name]
        answer(given["folder"], worker(given["words"], given["folder"]))
        return 0
    write(given["json"], {part: PARTS[part](given["rounds"]) for part in given["only"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
