"""Experiments: more passes over the same rows, to tell possible reasons of a difference apart.

State that passes change, chance, draws that fall on other rows and rows that are mixed look alike
in the results. Each of them ends if one thing is held still.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch
from torch import nn

from trainer.base.same import CLOSE, find_odd_rank
from trainer.base.same.distance import digest_rows
from trainer.core.rng import global_rngs
from trainer.core.state import keep_attributes, sandbox
from trainer.core.state.outside import LIBRARY, is_own, of_outside
from trainer.startup_checks.mismatch import (
    Circumstances,
    compare,
    explain,
    explain_buffers,
    explain_written,
    find_written,
    list_changed,
)
from trainer.startup_checks.passes import PassResult, SlicedPasses
from trainer.startup_checks.rank_agreement import RowReader
from trainer.startup_checks.trace import Call, describe, find_module
from trainer.startup_checks.unsaved import (
    AttributeSnapshot,
    of_dataset,
    of_model,
    of_task,
)

GLOBAL_RNGS = "numpy's or Python's generator"
UNSEEDED, CLOCK, THREADS, FILES = "unseeded", "clock", "threads", "files"
# By how much they tell: code may well read the clock or a file without using it.
OF_A_MODEL = {
    UNSEEDED: "draws unseeded random numbers in {}; use torch.rand",
    THREADS: "depends on threads, which it starts in {}: their order is left to chance; take none",
    CLOCK: "depends on the clock, which it reads in {}; use self.step",
    FILES: "depends on a file, which it opens in {}; read it once, in build_model or prepare",
}
OF_DATA = {
    UNSEEDED: "{} draws unseeded random numbers",
    CLOCK: "{} reads the clock",
}
_CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "thread_time"}
_KINDS_BY_CALL = {
    "urandom": UNSEEDED,
    "Generator.seed": UNSEEDED,  # torch's
    "start_new_thread": THREADS,
    "start_joinable_thread": THREADS,
    "datetime.now": CLOCK,
    "datetime.utcnow": CLOCK,
}
_BEGINS = {str(Path(__file__).with_name(name)) for name in ("passes.py", "rank_agreement.py")}
_PACKAGES = (Path(torch.__file__).parent, Path(numpy.__file__).parent, Path(__file__).parents[1])
_BETWEEN = ("<frozen", *(str(folder) + os.sep for folder in _PACKAGES))


@dataclass(frozen=True)
class ChanceCall:
    """A call of `kind` at a place, within a module of the model or, as None, in the loss."""

    kind: str
    place: str
    module: nn.Module | None


class ChanceCalls:
    """A context that notes the sources of chance in passes of a model, of this thread.

    `watches_global_rngs` costs two copies of generators at each call of a function.
    """

    def __init__(self, model: nn.Module | None, watches_global_rngs: bool = False):
        self._found: list[ChanceCall] = []
        self._modules = {id(each) for each in model.modules()} if model is not None else set()
        self._global_rngs = global_rngs() if watches_global_rngs else None
        self._before: Any = None

    def __enter__(self) -> ChanceCalls:
        self._before = sys.getprofile()
        sys.setprofile(self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def describe_chance(self, module: nn.Module | None, texts: Mapping[str, str]) -> str:
        """Return what a module of the model, or other code, does by chance, and where."""
        for kind, text in texts.items():
            if location := self.find_place(kind, module):
                return text.format(location)
        return ""

    def find_unseeded(self) -> str:
        """Return the first place that draws unseeded random numbers, in whatever module."""
        return next((call.place for call in self._found if call.kind == UNSEEDED), "")

    def find_place(self, kind: str, module: nn.Module | None) -> str:
        """Return where a module, or the loss, is the source of `kind`, else an empty string."""
        inside = {id(each) for each in module.modules()} if module is not None else {id(None)}
        sources = (s for s in self._found if s.kind == kind and id(s.module) in inside)
        return next((source.place for source in sources), "")

    def _notice(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if kind := _kind_of(arg, frame):
                self._add(kind, frame)
        elif self._global_rngs is not None and event in ("call", "return"):
            rng_states = global_rngs()
            if rng_states != self._global_rngs:
                self._global_rngs = rng_states
                ran = frame.f_back if event == "call" else frame
                if ran is not None:
                    self._add(GLOBAL_RNGS, ran)

    def _add(self, kind: str, frame: FrameType) -> None:
        """Note a source, with the function that calls for it outside of Python's own library."""
        location = ""
        module = None
        is_in_pass = False
        for each in _outwards(frame):
            file = each.f_code.co_filename
            if file in _BEGINS:
                is_in_pass = True
                break
            if not location and not _is_between(file):
                location = f"{each.f_code.co_name} ({Path(file).name}:{each.f_lineno})"
            owner = each.f_locals.get("self")
            if module is None and id(owner) in self._modules:
                module = owner
        if is_in_pass and location:
            self._found.append(ChanceCall(kind, location, module))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_between(file: str) -> bool:
    """Return True for code of Python, numpy, torch or Lockstep, which others call."""
    is_of_python = file.startswith(LIBRARY) and "-packages" not in file
    return is_of_python or file.startswith(_BETWEEN)


def _kind_of(function: Any, frame: FrameType) -> str:
    """Return the kind of source that a function written in C is, or an empty string."""
    name = getattr(function, "__qualname__", "")
    if name in _KINDS_BY_CALL:
        return _KINDS_BY_CALL[name]
    module = getattr(function, "__module__", None)
    if module == "time" and name.removesuffix("_ns") in _CLOCKS:
        return CLOCK
    if module == "io" and name == "open":
        return FILES
    if name == "Random.seed" and frame.f_locals.get("a", 0) is None:
        return UNSEEDED  # random.Random()
    return ""


Named = tuple[str, str]  # a line, and among what it shows: "ranks", "micro-batches" or both
STATE = "which it changes and no buffer holds; make it a buffer, or a function of self.step"


def name_difference(passes: SlicedPasses, cuts: Sequence[int], limit: float) -> Named:
    """Return a line about a difference, by a few more passes with traces."""
    subject = passes.subject
    rows = (0, cuts[-1])
    first = passes.run(rows, is_traced=True)
    changed, initial, second = _keep_state(passes, rows, rows)
    again = passes.run(rows, is_traced=True)
    if compare(first, again, limit) is not None:  # although a pass leaves no state
        return _explain_chance(passes, first, again, changed, limit), ""
    if compare(initial, second, limit) is not None:
        is_state = changed or find_written(initial, second, limit)
        if not is_state:  # chance that the first two passes did not show
            return _explain_chance(passes, initial, second, changed, limit), ""
        return _explain_state(_place(initial, second, limit), initial, second, changed, limit), ""
    if not subject.rewinds:
        rewound = compare(first, passes.run(cuts, rewinds=True), limit)
        names = list_changed(subject.module, first)
        if rewound is None and names:
            return explain_buffers(names, can_rewind=True), "micro-batches"
        if rewound is not None and rewound.kind == "buffer":
            return explain_buffers(names, can_rewind=False), ""
    parts = passes.run(cuts, is_traced=True)
    mismatch = compare(first, parts, limit)
    if mismatch is None and changed:
        why = f"depend on {', '.join(changed[:3])}, which a first pass sets and no buffer holds"
        return f"model or loss {why}; make it a buffer, or a function of self.step", ""
    if mismatch is None:
        why = "model or loss give other results from time to time"
        return f"{why}; look for rare draws, threads and files", ""
    circumstances = Circumstances(
        late=_find_late(passes, cuts, first, parts, limit),
        place=_find_global_draws(passes, first, parts, limit),
        is_of_order=_is_of_order(passes, cuts, first, limit),
    )
    if changed and not circumstances.late:
        _, whole, again = _keep_state(passes, rows, cuts)
        if compare(whole, again, limit) is None:
            why = f"depends on {', '.join(changed[:3])}, which its first micro-batch sets"
            return f"{_place(first, parts, limit)} {why}; set it in build_model or prepare", ""
    return explain(mismatch, first, parts, limit, circumstances), ""


def _explain_chance(
    passes: SlicedPasses, first: PassResult, again: PassResult, changed: Sequence[str], limit: float
) -> str:
    """Return why the same rows give other results, from what one more pass does by chance."""
    rows = (0, sum(trace.rows for trace in first.traces))
    call = _find_call(first, again, limit)
    where = _place(first, again, limit)
    module = None if call is None else call[1].module
    with ChanceCalls(passes.subject.module) as calls:
        passes.run(rows)
    if source := calls.describe_chance(module, OF_A_MODEL):
        return f"{where} {source}"
    if location := calls.find_unseeded():  # another module draws what this one uses
        return f"{where} depends on unseeded random numbers, drawn in {location}; use torch.rand"
    return _explain_state(where, first, again, changed, limit)


def _explain_state(
    where: str, one: PassResult, other: PassResult, changed: Sequence[str], limit: float
) -> str:
    if name := find_written(one, other, limit):
        if name in other.written:
            return explain_written(name)
        why = "is written in the forward pass of the first micro-batch, from its rows"
        return f"the parameter {name} {why}; set it in build_model or prepare"
    if changed:
        return f"{where} depends on {', '.join(changed[:3])}, {STATE}"
    why = "gives other results each time, by chance or by state outside of task and model"
    return f"{where} {why}; look for id(), hash(), threads and libraries with state of their own"


def _keep_state(
    passes: SlicedPasses, rows: Sequence[int], cuts: Sequence[int]
) -> tuple[list[str], PassResult, PassResult]:
    """Return what a pass over rows changes, it, and one over cuts that goes on from its state."""
    subject = passes.subject
    with sandbox(keep_attributes(subject.module, subject.hooks)):
        snapshot = AttributeSnapshot(state_of(subject.module, subject.hooks))
        initial = passes.run(rows, is_traced=True, keeps_state=True)
        changed = snapshot.changed(state_of(subject.module, subject.hooks))
        second = passes.run(cuts, is_traced=True, keeps_state=True)
    return list(dict.fromkeys(changed)), initial, second


def state_of(model: nn.Module, task: Any) -> list[tuple[str, Any]]:
    """Return what forward passes and losses may change besides buffers, by name."""
    return [*of_model(model, has_private=True), *of_task(task), *of_outside(model, task)]


def _place(one: PassResult, other: PassResult, limit: float) -> str:
    keyed_call = _find_call(one, other, limit)
    return "the loss" if keyed_call is None else describe(*keyed_call)


def _find_call(
    one: PassResult, other: PassResult, limit: float
) -> tuple[tuple[str, int], Call] | None:
    if not (one.traces and other.traces):
        return None
    return find_module(one.traces[0], other.traces, limit)


def _find_global_draws(
    passes: SlicedPasses, first: PassResult, parts: PassResult, limit: float
) -> str:
    """Return the place that draws from numpy's or Python's generator, if the found module does."""
    keyed_call = find_module(first.traces[0], parts.traces, limit)
    if keyed_call is not None and not keyed_call[1].has_global_draws:
        return ""
    with ChanceCalls(passes.subject.module, watches_global_rngs=True) as calls:
        passes.run((0, first.traces[0].rows))
    return calls.find_place(GLOBAL_RNGS, None if keyed_call is None else keyed_call[1].module)


def _find_late(
    passes: SlicedPasses, cuts: Sequence[int], first: PassResult, parts: PassResult, limit: float
) -> str:
    """Return a draw of the found module, or of the loss, that no dry run saw: it begins late."""
    if passes.subject.draws.traces.used.get(passes.subject.name):
        return ""
    keyed_call = find_module(first.traces[0], parts.traces, limit)
    traces = [*passes.run((0, cuts[-1]), True, drawing="noted").traces]
    traces += passes.run(cuts, True, drawing="noted").traces
    if keyed_call is None:
        drawn = [name for trace in traces for name, _ in trace.drawn]
    else:
        calls = [trace.calls[keyed_call[0]] for trace in traces if keyed_call[0] in trace.calls]
        drawn = [name for call in calls for name, _ in call.drawn]
    return drawn[0] if drawn else ""


def _is_of_order(
    passes: SlicedPasses, cuts: Sequence[int], first: PassResult, limit: float
) -> bool:
    """Return True if nothing differs once all rows draw the same numbers."""
    if not first.has_drawn:
        return False
    whole, parts = (passes.run(each, drawing="alike") for each in ((0, cuts[-1]), cuts))
    return compare(whole, parts, limit) is None


ADVICE_ON_DRAWS = "draw from augment's Random argument"


def held_by(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a data set and of its class."""
    kinds = [vars(kind) for kind in reversed(type(dataset).__mro__) if is_own(kind)]
    held = {key: value for kind in kinds for key, value in kind.items() if not callable(value)}
    return {k: v for k, v in held.items() if not k.startswith("__")} | dict(of_dataset(dataset))


def explain_reading(reader: RowReader, indices: torch.Tensor, dataset: Any, task: Any) -> str:
    """Return why examples have other values each time they are read, "" if that is not found."""

    def named() -> list[tuple[str, Any]]:
        of_data = [(f"{key} of the data set", value) for key, value in held_by(dataset).items()]
        return [*of_data, *of_task(task)]

    snapshot = AttributeSnapshot(named())
    first = digest_rows(reader.prepare(indices))
    changed = list(dict.fromkeys(snapshot.changed(named())))
    with ChanceCalls(None) as calls:
        again = digest_rows(reader.prepare(indices))
    difference = find_odd_rank([first, again], CLOSE)
    if difference is None:
        return ""
    what = f"example {int(indices[difference[1]])} differs each time it is read"
    if chance := calls.describe_chance(None, OF_DATA):
        return f"{what}: {chance}; {ADVICE_ON_DRAWS}"
    if changed:
        why = f"it depends on {', '.join(changed[:3])}, which reading changes"
        return f"{what}: {why}; {ADVICE_ON_DRAWS}, and change copies only"
    return ""
