"""Runs and how they differ from the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.compare.differences import Change, find_first, list_changes
from trainer.compare.sameness import MOST_NAMED, Sameness, judge, list_unknown
from trainer.config.schema import LAYOUT
from trainer.report.reading import RunFiles

Rows = list[list[str]]


@dataclass(frozen=True)
class Comparison:
    """Runs and how they differ from the first one.

    `verdicts` and the lines `firsts` are those of each of the others, `unknown` what it has too
    little in common to tell.
    """

    runs: Sequence[RunFiles]
    settings: list[Change]
    facts: list[Change]
    verdicts: list[Sameness]
    firsts: list[list[str]]
    unknown: list[list[str]]

    @classmethod
    def of(cls, runs: list[RunFiles]) -> Comparison:
        one, *others = runs
        found = [find_first(one, other) for other in others]
        unknown = [list_unknown(one, other) for other in others]
        verdicts = [
            judge(one, other, differences) for other, differences in zip(others, found, strict=True)
        ]
        settings, facts = (list_changes(runs, kind) for kind in ("settings", "facts"))
        firsts = [[str(each) for each in differences] for differences in found]
        return cls(runs, settings, facts, verdicts, firsts, unknown)

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.runs]

    @property
    def labels(self) -> list[str]:
        """Names for charts: the settings that tell a run from the others, or its own name."""
        own = [change for change in self.settings if not change.name.startswith(LAYOUT)]
        if not 0 < len(own) <= MOST_NAMED:
            return self.names
        pairs = [[f"{c.name}={c.values[number]}" for c in own] for number in range(len(self.runs))]
        labels = [", ".join(each) for each in pairs]
        are_apart = len(set(labels)) == len(labels)
        return labels if are_apart else [": ".join(p) for p in zip(self.names, labels, strict=True)]

    @property
    def is_same(self) -> bool:
        return all(verdict.is_same for verdict in self.verdicts)

    def lines(self, number: int) -> list[str]:
        """Return the first differences of a run from the first one, and what is unknown."""
        return self.firsts[number] + self.unknown[number]

    def results(self) -> Rows:
        """Return a row of RESULTS for each run."""
        rows = []
        for each in self.runs:
            best = "-"
            if each.best is not None:
                best = f"{each.best_metric} {each.best[1]:.6g} at step {each.best[0]:,}"
            ranks = str(each.manifest.world_size) if each.manifest else "-"
            end = str(each.exit.get("reason", "not ended"))
            strategy = str(each.settings["strategy.name"])
            seconds = f"{each.seconds:,.1f}"
            rows.append([each.name, f"{each.step:,}", best, seconds, strategy, ranks, end])
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, with one entry for each of the other runs."""
        others = zip(self.names[1:], self.verdicts, self.firsts, self.unknown, strict=True)
        return {
            "runs": [
                {"run": each.name, "path": each.path, "step": each.step, "best": each.best}
                for each in self.runs
            ],
            "verdicts": [
                {"run": name, **asdict(verdict), "first_differences": firsts, "unknown": unknown}
                for name, verdict, firsts, unknown in others
            ],
            "settings": {change.name: change.values for change in self.settings},
            "facts": {change.name: change.values for change in self.facts},
        }
