"""Each wrong task is named or refused, or learns the same, in each layout; no right one is."""

import pytest
import right_tasks
import wrong_tasks
from task_matrix import LAYOUTS, Ending, run_in
from test_proof import NOTE, tasks_of
from tiny import Tiny

ROUNDING = 1e-9  # relative, in fp64
ALONE = {"single", "exact on one rank"}
OTHERS = [layout for layout in LAYOUTS if layout not in ALONE]

# What a proof of one rank cannot see, and where else it shows.
SEEN_BY_OTHER_RANKS = {
    *("OwnData", "DataOfProcess", "DataOfReads", "LossOfTheRank", "ModelOfTheRank"),
    *("OptimizerOfTheRank", "OptimizerUnseeded"),
}
SEEN_BY_VERIFY = {  # the clock is seen by ddp's ranks too, which have other weights after a step
    *("RateOfTheLayout", "ScheduleOfTheRank", "ScheduleOfTheClock", "StepOfTheClock"),
    *("MetricsOfTheRank", "MetricsOfTheBatch"),
}
WITH_A_LINE_OF_ITS_OWN = {"Norm", "NormOfItsOwn", "PlainNorm"}
RIGHT_AFTER_ALL = {"DropsByFunction"}  # its draws are keyed by example
UNSEEN = (
    *(SEEN_BY_OTHER_RANKS | SEEN_BY_VERIFY),
    *(WITH_A_LINE_OF_ITS_OWN | RIGHT_AFTER_ALL),
)
PLAIN_NORM = "BatchNorm sees one micro-batch at a time"

# Right tasks that a layout cannot run, with a part of the line that says so.
OF_ALL_ROWS = "gather_rows: needs the whole global batch at once"
REFUSED = {
    ("GathersRows", "micro-batches"): OF_ALL_ROWS,
    ("GathersNoisyRows", "micro-batches"): OF_ALL_ROWS,
    ("GathersRows", "exact on one rank"): OF_ALL_ROWS,
    ("GathersNoisyRows", "exact on one rank"): OF_ALL_ROWS,
    ("QueueOfAllRows", "micro-batches"): OF_ALL_ROWS,
    ("QueueOfAllRows", "exact on one rank"): OF_ALL_ROWS,
    ("LazyLayers", "fsdp"): "0 is a LazyLinear; give its sizes, or use ddp",
    ("ClampsWeights", "fsdp"): "1.scale is written in the forward pass, which sharding undoes",
    ("EmaTeacher", "fsdp"): "a frozen part of the model for one that follows it",
    ("HookScales", "fsdp"): "a divided 0.weight would lose the hook on its gradient",
    ("ScriptedLayer", "fsdp"): "1 is TorchScript, which cannot be divided; leave torch.jit out",
}
LIMITS = {"ModelInBfloat16": 0.1}
STOPS = "StopsLater"  # asks for the end where a micro-batch has few rows


def silent_differences(layout: str, found: dict[str, Ending], reference: dict[str, Ending]) -> list:
    """Return the tasks that a layout trains although it learns something else."""
    known = SEEN_BY_VERIFY | (SEEN_BY_OTHER_RANKS if LAYOUTS[layout].ranks == 1 else set())
    limit = 0.0 if layout == "exact" else ROUNDING
    return [
        name
        for name, ending in found.items()
        if name not in known
        and not ending.error
        and not any(PLAIN_NORM in line for line in ending.lines)
        and not ending.distance(reference[name]) <= limit
    ]


def unclear_refusals(found: dict[str, Ending]) -> dict[str, list[str]]:
    """Return the errors that are not the same line of a user's mistake on all ranks."""
    return {
        name: ending.errors
        for name, ending in found.items()
        if ending.error
        and not (ending.error.startswith("ConfigError: ") and len({*ending.errors}) == 1)
    }


def false_alarms(layout: str, found: dict[str, Ending], reference: dict[str, Ending]) -> dict:
    """Return what is said against right tasks, or how far they are from the reference."""
    alarms: dict[str, object] = {}
    for name, ending in found.items():
        if expected := next(
            (text for (task, where), text in REFUSED.items() if task == name and where in layout),
            "",
        ):
            if expected not in ending.error:
                alarms[name] = ending.error or "not refused"
        elif ending.error or any(NOTE in line for line in ending.lines):
            alarms[name] = ending.error or [line for line in ending.lines if NOTE in line]
        elif name not in (*WITH_A_LINE_OF_ITS_OWN, STOPS) and not reference[name].error:
            limit = LIMITS.get(name, 0.0 if layout == "exact" else ROUNDING)
            if not ending.distance(reference[name]) <= limit:
                alarms[name] = ending.distance(reference[name])
    return alarms


@pytest.fixture(scope="module")
def endings():
    """Return the endings of all tasks of a module in a layout, which are trained once."""
    known: dict[tuple[str, str], dict[str, Ending]] = {}

    def find(module, layout):
        key = module.__name__, layout
        if key not in known:
            known[key] = run_in(layout, tasks_of(module))
        return known[key]

    return find


@pytest.mark.slow
def test_a_run_on_one_rank_names_what_would_differ(endings):
    found = endings(wrong_tasks, "single")
    named = {name for name, e in found.items() if any(NOTE in line for line in e.lines)}
    assert {*found} - named == {*UNSEEN} & {*found}
    assert not unclear_refusals(found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
def test_no_wrong_task_differs_in_silence(layout, endings):
    found = endings(wrong_tasks, layout)
    reference = endings(wrong_tasks, LAYOUTS[layout].reference)
    assert not silent_differences(layout, found, reference)
    assert not unclear_refusals(found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_right_task_is_refused_or_learns_something_else(layout, endings):
    found = endings(right_tasks, layout)
    assert not false_alarms(layout, found, endings(right_tasks, LAYOUTS[layout].reference))
    assert not unclear_refusals(found)


SAMPLE = ("ModelOfTheBatch", "QueueOfKeys", "OwnData", "CountedCalls", "SortedRows", "HeldTeacher")


def test_ranks_name_wrong_tasks_and_train_right_ones():
    tasks = {**tasks_of(wrong_tasks), **tasks_of(right_tasks)}
    tasks = {name: tasks[name] for name in SAMPLE}
    reference, found = run_in("single", tasks), run_in("ddp", tasks)
    assert not silent_differences("ddp", found, reference)
    assert not unclear_refusals(found)
    assert {name for name, ending in found.items() if ending.error} == {*SAMPLE[:3]}


def test_a_silent_difference_is_one_for_these_tests():
    tasks = {"LossOfTheBatch": wrong_tasks.LossOfTheBatch, "Calendar": right_tasks.Calendar}
    reference = run_in("single", tasks, "run.prove=false")
    found = run_in("micro-batches of 8", tasks, "run.prove=false")
    assert silent_differences("micro-batches of 8", found, reference) == ["LossOfTheBatch"]
    assert [*false_alarms("micro-batches of 8", found, reference)] == ["LossOfTheBatch"]


class RecomputesTwice(right_tasks.Recomputed):
    """Recomputes the same layer twice, by the old way."""

    def forward(self, x):
        return super().forward(super().forward(x))


class ReentrantTwice(Tiny):
    def build_model(self):
        return wrong_tasks.net(RecomputesTwice())


def test_a_gradient_that_comes_twice_is_one_line_on_all_ranks():
    (ending,) = run_in("ddp", {"ReentrantTwice": ReentrantTwice}).values()
    why = "gets a gradient twice in one backward pass, as reentrant recomputation gives; use"
    assert why in ending.error and not unclear_refusals({"": ending})
