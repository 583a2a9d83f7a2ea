"""Reasons: the likely cause of a difference, from the probes of all ranks."""

from __future__ import annotations

import torch

from trainer.verify.evidence import Evidence, Probe
from trainer.verify.rows import describe_difference


def explain(reference: Evidence, other: Evidence, group: str, where: str) -> str:
    """Return the likely reason, from the probes of all ranks and from the first difference."""
    return (
        _explain_data(reference, other)
        or next((notes.finding for notes in other.ranks if notes.finding), "")
        or _explain_augmentation(reference, other)
        or _explain_place(reference, other, group, where)
        or reference.ranks[0].finding
        or _explain_layers(other.probes[0])
    )


def rounding(reference: Evidence) -> str:
    """Return the reason why a precision below fp64 differs although fp64 agrees."""
    probe = reference.probes[0]
    amplifiers = ["max-pooling (its argmax flips)"] if probe.has_max_pooling else []
    amplifiers += [f"{name} (near zero gradients)" for name in probe.optimizers if "Adam" in name]
    amplified = f", amplified by {' and '.join(amplifiers)}" if amplifiers else ""
    return f"fp64 agrees, so this is rounding{amplified}"


def _explain_data(reference: Evidence, other: Evidence) -> str:
    named = [("one rank", probe) for probe in reference.probes]
    named += [(f"rank {rank}", probe) for rank, probe in enumerate(other.probes)]
    first = reference.probes[0]
    if any(probe.indices != first.indices for _, probe in named):
        return "the data sets differ in length: build_dataset must not depend on the rank"
    for name, probe in named:
        pairs = zip(first.digests, probe.digests, strict=True)
        number = next((n for n, pair in enumerate(pairs) if not _is_close(*pair)), None)
        if number is None:
            continue
        depends = "the data set, or augment, depends on the rank"
        why = f"{depends} or draws unseeded random numbers"
        if probe.changed_by_reading:
            changed = ", ".join(probe.changed_by_reading)
            why = f"it depends on {changed} of the data set, which reading changes"
        values = describe_difference(first.rows[number], probe.rows[number], "one rank")
        return _joined(f"example {first.indices[number]} differs on {name}: {why}", values)
    return ""


def _explain_augmentation(reference: Evidence, other: Evidence) -> str:
    digests = other.digests
    for key, digest in reference.digests.items():
        if key in digests and not _is_close(digest, digests[key]):
            epoch, index = key.split("/")
            why = "augment does not draw all random numbers from its Random argument"
            why += ", or collate pads rows to a length that depends on the others"
            rows = [each.rows.get(key, {}) for each in (reference, other)]
            values = describe_difference(rows[0], rows[1], "one rank")
            return _joined(f"example {index} of epoch {epoch} differs: {why}", values)
    return ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _explain_place(reference: Evidence, other: Evidence, group: str, where: str) -> str:
    if group == "metrics":
        why = "metrics, summarize or the eval data depend on rank or batch size"
        return f"training agrees and evaluation does not: {why}"
    if group not in ("losses", "weights") or where.endswith(" of step 1"):
        return ""
    agree = "the first gradients agree, so the update differs"
    rates = other.rates
    for step, rate in reference.rates.items():
        if step in rates and not _is_close(rate, rates[step]):
            why = f"the lr of step {step} is {rate:.6g} on one rank, {rates[step]:.6g} here"
            return (
                f"{agree}: {why}; build_optimizer, schedule or train_step depend on rank or clock"
            )
    notes = other.ranks
    for rank in notes[1:]:
        if any(not torch.equal(t, rank.last_weights[n]) for n, t in notes[0].last_weights.items()):
            why = "the ranks have different weights"
            return f"{agree}: {why}; optimizer or train_step depend on the rank or on chance"
    return f"{agree}: optimizer or train_step depend on the layout"


def _explain_layers(probe: Probe) -> str:
    if probe.has_batchnorm:
        why = "normalises over the rows of a micro-batch, whose number the layout changes"
        advice = "give run.norm_rows=<rows>, strategy.sync_batchnorm=true or strategy=exact"
        return f"plain BatchNorm {why}; {advice}"
    if probe.is_torchs_dropout:
        advice = "leave it out, or keep the size of the micro-batch"
        return f"run.dropout=torch draws per micro-batch, whose size the layout changes; {advice}"
    state = "state that the model keeps outside of its buffers"
    return f"unknown; check custom autograd functions, and {state}"


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-5 * (1 + abs(one))
