"""torch.compile: what is compiled, and how often."""

from __future__ import annotations

from collections import Counter

from trainer import ResidentDataset
from trainer.tasks.text import Text

from .probe import Own, Probe
from .runs import Here, check_learned, distance, losses

MOST_GRAPHS = 2  # of a function: for training, and for evaluation
OF_DRAWS = "trainer/core/rng/"  # fused functions, which rehearsals call too


def compiled(here: Here) -> str:
    """Check torch.compile on a user-defined module and on a bare nn.Sequential; each must really
    be compiled."""
    from torch._dynamo.utils import counters

    notes = []
    for task in (Own, Probe):
        counters.clear()
        _, plain = here.fit(f"plain-{task.__name__}", "strategy.precision=fp32", task=task)
        _, run = here.fit(
            f"compiled-{task.__name__}", "strategy.precision=fp32", "run.compile=true", task=task
        )
        check_learned(losses(run.directory), "compiled")
        off, graphs = distance(plain.directory, run.directory), counters["stats"]["unique_graphs"]
        notes.append(
            f"{'nn.Sequential' if task is Probe else 'own module'}: {graphs} graphs, off by "
            f"{off:.1e}"
        )
        assert off < 1e-3, f"compiled and plain differ: {'; '.join(notes)}"
        assert graphs, f"nothing was compiled: {'; '.join(notes)}"
    return "; ".join(notes)


class Even(Text):
    """Text whose evaluation has whole micro-batches only: a smaller one is a graph more."""

    def build_dataset(self, split):
        dataset = super().build_dataset(split)
        return ResidentDataset(*(tensor[:64] for tensor in dataset.tensors))


def compiled_text(here: Here) -> str:
    """Check that a GPT with torch's dropout is compiled in one graph for training and one for
    evaluation."""
    return check_graphs(here, "run.dropout=torch")


def compiled_draws(here: Here) -> str:
    """Check the same with dropout that is keyed by example, the default."""
    return check_graphs(here, "run.dropout=example")


def check_graphs(here: Here, word: str) -> str:
    from torch._dynamo.utils import counters, get_compilation_metrics

    counters.clear()
    already = len(get_compilation_metrics())
    words = ["run.compile=true", word, "run.steps=12", "task.options.layers=2", "log.every_steps=1"]
    words += ["data.global_batch=16", "eval.every_steps=6", "eval.micro_batch=16"]
    _, run = here.fit("compiled", *words, task=Even, recipe="text")
    check_learned(losses(run.directory), word)
    breaks = {reason.partition("\n")[0]: count for reason, count in counters["graph_break"].items()}
    compiled: Counter[str] = Counter(
        f"{metrics.co_name} ({metrics.co_filename}:{metrics.co_firstlineno})"
        for metrics in get_compilation_metrics()[already:]
        if metrics.co_name and not metrics.fail_type and OF_DRAWS not in metrics.co_filename
    )
    name, graphs = compiled.most_common(1)[0] if compiled else ("nothing", 0)
    unique = counters["stats"]["unique_graphs"]
    note = f"{word}: {unique} graphs of {len(compiled)} functions"
    assert not breaks, f"{note}, {sum(breaks.values())} graph breaks: {breaks}"
    assert 1 <= graphs <= MOST_GRAPHS, f"{note}, {graphs} of {name}"
    return f"{note}, no graph break"
