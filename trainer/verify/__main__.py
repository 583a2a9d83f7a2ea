"""`python -m trainer.verify task=<name>`: train the user's own task in several layouts and prove that they agree."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.cli import load_task, run, split_arguments
from trainer.config.compose import load_config
from trainer.config.schema import Config
from trainer.distributed.launchers import CODES
from trainer.errors import ConfigError, RunError
from trainer.strategy.hooks import COMPRESSING

HELP = """usage: python -m trainer.verify task=<name> [layouts=ranks-2,ranks-3] [steps=10] [key=value ...]
       python -m trainer.verify --resume task=<name> [kills=3] [seed=0] ...

Trains the task for some steps on one rank and in each layout, in fp64 and in its own precision, by real processes, and
compares the examples taken, losses, first gradients, weights and evaluation. Where something differs it names the first
tensor that does and the likely reason. --resume kills a run at random steps and ranks and starts it again: the same
layout must end with the same bits, other numbers of ranks with the same run.

layouts: {layouts}
         ranks-<n> for any n; all of these by default
Exit codes: 0 proved, 1 something differs or nothing was shown, 2 bad configuration."""

# name -> ranks, overrides ({half}: half of the global batch)
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "ranks-2": (2, []),
    "ranks-3": (3, []),
    "accumulation": (1, ["data.micro_batch={half}"]),
    "workers": (2, ["data.workers=2", "data.path=streamed"]),
    "parameter-server": (2, ["strategy.comm_hook=parameter_server"]),
}
FP64 = "fp64"
LEAST_TO_RESUME = 5  # steps: one is saved after the second, so that a kill in the fourth or later leaves something
# (losses and metrics, gradients and weights): relative. Below fp64 the tensors are shown, not judged.
TOLERANCE = {FP64: (1e-8, 1e-6), "fp32": (1e-3, 1.0), "tf32": (1e-2, 1.0)}
COARSE = (1e-1, 1.0)
_FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (.+)')
_OURS = str(Path(__file__).parent)
LOST = "state kept outside of model, optimizer and step, or random numbers that are not seeded"


@dataclass
class Evidence:
    """What the ranks of one layout noted in one precision."""

    ranks: list[dict[str, Any]]

    @property
    def ids(self) -> list[list[int]]:
        """The examples of each step, ranks joined."""
        steps = zip(*(notes["ids"] for notes in self.ranks), strict=True)
        return [[index for part in parts for index in part] for parts in steps]

    @property
    def losses(self) -> dict[tuple[int, str], float]:
        """By step and name: a train_step of its own may log several."""
        named = [
            (entry["step"], k, v)
            for entry in self.record
            for k, v in entry.items()
            if k.startswith("train/")
        ]
        return {(step, name): value for step, name, value in named}

    @property
    def metrics(self) -> dict[str, float]:
        return {
            k: v
            for entry in self.record
            for k, v in entry.items()
            if k.startswith("eval/") and v is not None
        }

    @property
    def record(self) -> list[dict[str, Any]]:
        return self.ranks[0]["record"]

    @property
    def rows(self) -> dict[str, float]:
        return {place: digest for notes in self.ranks for place, digest in notes["rows"].items()}


@dataclass
class Finding:
    """One line of the table."""

    layout: str
    precision: str
    worst: dict[str, float]
    verdict: str
    where: str = ""
    reason: str = ""


def main(arguments: Sequence[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(HELP.format(layouts=", ".join(LAYOUTS)))
        return 0
    if any(os.environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        raise ConfigError(
            "trainer.verify starts its ranks itself: run it with python, not under a launcher"
        )
    words, config_dirs = split_arguments([a for a in arguments if a != "--resume"])
    is_resume = "--resume" in arguments
    known = ("steps", "kills", "seed") if is_resume else ("steps", "layouts")
    own = dict(word.split("=", 1) for word in words if word.split("=")[0] in known and "=" in word)
    if other := next(
        (w for w in words if w.split("=")[0] in {"layouts", "kills", "seed"} - {*known}), None
    ):
        raise ConfigError(
            f"{other}: is for trainer.verify {'without' if is_resume else 'with'} --resume; leave it out"
        )
    overrides = [word for word in words if word.split("=")[0] not in own]
    config = load_config(overrides, config_dirs)
    load_task(config)
    steps = _whole(own, "steps", 10)
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        stage = Stage(Path(folder), overrides, config_dirs, config, steps)
        if is_resume:
            findings = prove_resume(stage, _whole(own, "kills", 3), _whole(own, "seed", 0, least=0))
        else:
            findings = prove_layouts(stage, _chosen(own.get("layouts"), config))
    return tell(findings, steps)


def _whole(own: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    given = own.get(name, str(default))
    if not given.isdecimal() or int(given) < least:
        raise ConfigError(f"{name}={given}: must be a whole number of at least {least}")
    return int(given)


def _chosen(given: str | None, config: Config) -> dict[str, tuple[int, list[str]]]:
    half, chosen = -(-config.data.global_batch // 2), {}
    names = (
        list(LAYOUTS) if given is None else [name for name in given.strip("[]").split(",") if name]
    )
    for name in names:
        count = name.removeprefix("ranks-")
        if name not in LAYOUTS and not (
            name.startswith("ranks-") and count.isdecimal() and int(count)
        ):
            raise ConfigError(f"layouts={name}: must be of {', '.join(LAYOUTS)} or ranks-<n>")
        ranks, more = LAYOUTS.get(name, (int(count) if count.isdecimal() else 0, []))
        if given is None and (
            ranks > config.data.global_batch or (name == "accumulation" and half < 2)
        ):
            continue
        chosen[name] = (ranks, [override.format(half=half) for override in more])
    if not chosen:
        raise ConfigError(
            f"layouts={given}: names none; give some of {', '.join(LAYOUTS)}, ranks-<n>"
        )
    return chosen


class Stage:
    """Where layouts are run, and the precisions that they are run in."""

    def __init__(
        self, folder: Path, overrides: list[str], config_dirs: list[str], config: Config, steps: int
    ):
        self.folder, self.overrides, self.steps = folder, overrides, steps
        self.config_dirs = [str(Path(each).resolve()) for each in config_dirs]
        is_compressed = config.strategy.comm_hook in COMPRESSING  # such hooks take float32 alone
        self.precisions = {
            FP64: ["strategy.comm_hook=none"] * is_compressed,
            config.strategy.precision: [],
        }

    def train(
        self,
        name: str,
        ranks: int,
        more: Sequence[str],
        precisions: Collection[str],
        kill: Sequence[int] | None = None,
    ) -> dict[str, Evidence] | None:
        """The evidence by precision of `ranks` real processes; None where they were killed, as `kill` asks.

        Raises RunError with their last words where they fail.
        """
        fixed = [
            f"run.steps={self.steps}",
            "log.every_steps=1",
            f"run.dir={self.folder / 'runs'}",
            "run.compile=false",
        ]
        words = [*self.overrides, *fixed]
        runs = [
            (
                f"{name}-{p}",
                [
                    *words,
                    f"run.name={name}-{p}",
                    f"strategy.precision={p}",
                    *self.precisions[p],
                    *more,
                ],
            )
            for p in precisions
        ]
        spec = self.folder / f"{name}.json"
        plan = {
            "out": str(self.folder),
            "config_dirs": self.config_dirs,
            "runs": runs,
            "kill": kill,
        }
        spec.write_text(json.dumps(plan), encoding="utf-8")
        done = self.launch(spec, ranks)
        if kill is not None and (done.returncode == -signal.SIGKILL or "SIGKILL" in done.stderr):
            return None
        if done.returncode:
            codes = self.folder / "codes"  # torchrun makes 1 of them all
            is_bad = codes.exists() and "2" in codes.read_text().split()
            raise (ConfigError if is_bad else RunError)(f"{name}: {last_words(done.stderr)}")
        files = {
            p: [self.folder / f"{name}-{p}-{rank}.pt" for rank in range(ranks)] for p in precisions
        }
        return {
            p: Evidence([torch.load(file, weights_only=True) for file in found])
            for p, found in files.items()
        }

    def launch(self, spec: Path, ranks: int) -> subprocess.CompletedProcess[str]:
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            if ranks > 1
            else []
        )
        words = [sys.executable, *launcher, "-m", "trainer.verify.recording", str(spec)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", CODES: str(self.folder / "codes")}
        return subprocess.run(words, capture_output=True, text=True, env=environment)  # noqa: S603  # our own words


def last_words(said: str) -> str:
    """Of what ranks wrote as they failed: their error line, else the first exception, and where the task raised it."""
    lines = said.splitlines()
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if told and not told[0].startswith("another rank "):
        return told[0]
    frames: list[re.Match[str]] | None = None
    for line in lines:
        if line.startswith("Traceback "):
            frames = []
        elif frames is not None and (frame := _FRAME.match(line)):
            frames.append(frame)
        elif frames and not line.startswith(" "):
            theirs = [
                frame
                for frame in frames
                if not frame[1].startswith((_OURS, "<")) and "/site-packages/" not in frame[1]
            ]
            return "{} ({}:{}, in {})".format(line, *(theirs or frames)[-1].groups())
    return (told or lines[-1:] or ["failed"])[0]


def prove_layouts(stage: Stage, layouts: Mapping[str, tuple[int, list[str]]]) -> list[Finding]:
    once = ["checkpoint.every_epochs=null", "checkpoint.every_steps=null", "eval.every_epochs=null"]
    reference = stage.train("one-rank", 1, once, stage.precisions)
    assert reference is not None
    findings = [still("one rank", precision, evidence) for precision, evidence in reference.items()]
    for name, (ranks, more) in layouts.items():
        print(f"training in layout {name} ...", file=sys.stderr, flush=True)
        found = stage.train(name, ranks, [*once, *more], stage.precisions)
        assert found is not None
        differs = False
        for precision in stage.precisions:
            finding = compare(name, precision, reference[precision], found[precision])
            if precision != FP64 and not differs and finding.verdict == "DIFFERENT":
                finding.verdict, finding.reason = "rounding", rounding(reference[precision])
            differs = differs or finding.verdict == "DIFFERENT"
            findings.append(finding)
    return findings


def still(layout: str, precision: str, evidence: Evidence) -> Finding:
    """Of the run that others are compared with: whether it learned anything. Where not, agreement proves nothing."""
    notes, curves = evidence.ranks[0], dict[str, list[float]]()
    for (_, name), value in evidence.losses.items():
        curves.setdefault(name, []).extend([value] if value is not None else [])
    losses = max(
        curves.values(),
        key=lambda curve: max(curve, default=0.0) - min(curve, default=0.0),
        default=[],
    )
    have_moved = max(_distances(notes["begun"], notes["weights"]).values(), default=0.0) > 1e-9
    if have_moved and max(losses, default=0.0) - min(losses, default=0.0) > 1e-6 * max(
        map(abs, losses), default=1.0
    ):
        return Finding(
            layout, precision, {}, "reference", reason=f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        )
    return Finding(
        layout,
        precision,
        {},
        "PROVES NOTHING",
        reason="nothing was learned; raise steps or optim.lr",
    )


def compare(layout: str, precision: str, ours: Evidence, theirs: Evidence) -> Finding:
    scalars, tensors = TOLERANCE.get(precision, COARSE)
    named = ours.losses.items()
    losses = {
        f"{name} of step {step}": (value, theirs.losses.get((step, name)))
        for (step, name), value in named
    }
    metrics = {name: (value, theirs.metrics.get(name)) for name, value in ours.metrics.items()}
    taken = enumerate(zip(ours.ids, theirs.ids, strict=True), 1)
    groups: dict[str, dict[str, float]] = {
        "examples": {
            f"examples of step {step}": float(one != other) for step, (one, other) in taken
        },
        "gradients": _distances(ours.ranks[0]["gradients"], theirs.ranks[0]["gradients"]),
        "losses": {name: _apart(*pair) for name, pair in losses.items()},
        "weights": _distances(ours.ranks[0]["weights"], theirs.ranks[0]["weights"]),
        "metrics": {name: _apart(*pair) for name, pair in metrics.items()},
    }
    for rank, notes in enumerate(theirs.ranks[1:], 1):
        for name, tensor in notes["weights"].items():
            if not torch.equal(tensor, theirs.ranks[0]["weights"][name]):
                groups["weights"][f"{name} on rank {rank} and on rank 0"] = float("inf")
    worst = {group: max(found.values(), default=0.0) for group, found in groups.items()}
    for group, found in groups.items():
        limit = (
            0.0 if group == "examples" else scalars if group in ("losses", "metrics") else tensors
        )
        where = next((name for name, distance in found.items() if not distance <= limit), None)
        if where is not None:
            first = where if group in ("examples", "losses", "metrics") else f"{where} ({group})"
            return Finding(
                layout,
                precision,
                worst,
                "DIFFERENT",
                f"first: {first}",
                explain(ours, theirs, group, where),
            )
    return Finding(layout, precision, worst, "agrees")


def _apart(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / max(abs(one), 1e-12)


def _distances(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """norm(a - b) / norm(a) for each tensor, in fp64.

    Below a millionth of the norm of all, a tensor is measured against that: the gradient of a bias before BatchNorm is
    rounding and nothing else.
    """
    total = sum(float(tensor.double().square().sum()) for tensor in ours.values()) ** 0.5
    found = {}
    for name, tensor in ours.items():
        one, other = (
            tensor.double(),
            theirs[name].double() if name in theirs else torch.full((), float("inf")),
        )
        found[name] = float((one - other).norm()) / max(float(one.norm()), 1e-6 * total, 1e-300)
    return found


def explain(ours: Evidence, theirs: Evidence, group: str, where: str) -> str:
    """The likely reason, from what every rank saw when it looked at the same examples, and from what differs first."""
    probes = [notes["probe"] for notes in [*ours.ranks, *theirs.ranks]]
    first, ranks = probes[0], [notes["probe"] for notes in theirs.ranks]
    if any(p["indices"] != first["indices"] for p in probes):
        return "the data sets have other lengths: build_dataset must not depend on the rank"
    for number, p in enumerate(probes):
        for index, one, other in zip(first["indices"], first["data"], p["data"], strict=True):
            if not _close(one, other):
                who = (
                    f"rank {number - len(ours.ranks)}" if number >= len(ours.ranks) else "one rank"
                )
                why = "the data set, or augment, depends on the rank or draws from a source that is not seeded"
                return f"example {index} is another on {who}: {why}"
    for place, digest in ours.rows.items():
        if place in theirs.rows and not _close(digest, theirs.rows[place]):
            epoch, index = place.split("/")
            return f"example {index} of epoch {epoch} is another: augment draws from what is not its Random argument"
    if any(not _alike(p["first"], p["second"]) for p in probes):
        return "model or loss gave two results for one batch and seed: they draw random numbers that are not seeded"
    if any(not _alike(ranks[0]["first"], p["first"]) for p in [first, *ranks[1:]]):
        return "model or loss give another result on another rank for the same batch: they depend on the rank"
    if group == "metrics":
        return "training agrees and evaluation does not: metrics, summarize or the eval data depend on rank or batch size"
    if group in ("losses", "weights") and not where.endswith(" of step 1"):
        return "the first gradients agree, so the update does not: optimizer, schedule or train_step depend on the layout"
    return _mixing(ranks[0])


def _mixing(probe: Mapping[str, Any]) -> str:
    if probe["batchnorm"]:
        advice = "use strategy.sync_batchnorm=true, and no accumulation"
        return f"plain BatchNorm normalises over the rows of a micro-batch, whose number the layout changes; {advice}"
    if probe["mixed"]["outputs"]:
        return "the model mixes the rows of a micro-batch: what it gives for an example depends on the others"
    if probe["mixed"]["values"]:
        return "the loss mixes the rows of a micro-batch: its value for an example depends on the others"
    if probe["num_dropouts"] or probe["draws"]:
        advice = "give data.micro_batch=<m> so that all layouts have micro-batches of one size"
        return f"dropout draws depend on the size of the micro-batch; {advice}"
    return "not known: look at custom autograd functions, and at state that the model keeps outside of its buffers"


def rounding(evidence: Evidence) -> str:
    """Why a precision below fp64 differs where fp64 agrees."""
    probe = evidence.ranks[0]["probe"]
    adam = [name for name in probe["optimizers"] if "Adam" in name]
    known = (["max-pooling (its argmax flips)"] if probe["maxpool"] else []) + [
        f"{name} (near zero gradients)" for name in adam
    ]
    return "fp64 agrees, so this is rounding" + (
        f", which is amplified by {' and '.join(known)}" if known else ""
    )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-5 * (1 + abs(one))


def _alike(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(
        torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-6, equal_nan=True) for name in one
    )


# Interruption ---------------------------------------------------------------------------------------------------------


def prove_resume(stage: Stage, kills: int, seed: int) -> list[Finding]:
    """Kill a run on two ranks at random and start it again; on two ranks for bits, on one and three for parity."""
    chance, findings = random.Random(seed), []  # noqa: S311  # no secret
    if stage.steps < LEAST_TO_RESUME:
        raise ConfigError(
            f"steps={stage.steps}: --resume needs at least {LEAST_TO_RESUME}, to kill after a save"
        )
    saves = [
        "checkpoint.every_steps=2",
        "checkpoint.every_epochs=null",
        "checkpoint.background=false",
    ]
    for precision in stage.precisions:
        whole = stage.train("undisturbed", 2, saves, [precision])
        assert whole is not None
        findings.append(still("undisturbed, 2 ranks", precision, whole[precision]))
        ranks_after = [2] * kills + ([1, 3] if precision == FP64 else [])
        for number, ranks in enumerate(ranks_after):
            at = (chance.randrange(LEAST_TO_RESUME - 2, stage.steps), chance.randrange(2))
            name, where = (
                f"killed-{number}",
                f"rank {at[1]} killed in step {at[0] + 1}, resumed on {ranks}",
            )
            print(f"{where} ...", file=sys.stderr, flush=True)
            if stage.train(name, 2, saves, [precision], kill=at) is not None:
                raise RunError(f"{where}: the run ended before it was killed")
            resumed = stage.train(name, ranks, [*saves, "run.resume=auto"], [precision])
            assert resumed is not None
            findings.append(
                _compare_resumed(where, precision, whole[precision], resumed[precision], ranks == 2)
            )
    return findings


def _compare_resumed(
    layout: str, precision: str, whole: Evidence, resumed: Evidence, is_exact: bool
) -> Finding:
    """Examples, losses and gradients of the steps that the second process made, and all that stands at the end."""
    begun = len(whole.ids) - len(resumed.ids)
    if not begun:
        return Finding(
            layout, precision, {}, "PROVES NOTHING", reason="it began anew: there was no checkpoint"
        )
    part = Evidence(
        [{**notes, "ids": notes["ids"][begun:], "gradients": {}} for notes in whole.ranks]
    )
    other = Evidence([{**notes, "gradients": {}} for notes in resumed.ranks])
    finding = compare(layout, precision, part, other)
    if is_exact and finding.verdict == "agrees":
        weights = zip(
            part.ranks[0]["weights"].items(), other.ranks[0]["weights"].values(), strict=True
        )
        bits = [name for (name, one), two in weights if not torch.equal(one, two)]
        unlike = [
            f"{k[1]} of step {k[0]}"
            for k, value in part.losses.items()
            if other.losses.get(k) != value
        ]
        if bits or unlike:
            where = f"first: {[*unlike, *bits][0]}"
            return Finding(
                layout, precision, finding.worst, "DIFFERENT", where, f"not to the bit: {LOST}"
            )
        finding.verdict = "same bits"
    elif finding.verdict == "DIFFERENT":  # what its ranks saw, they saw with other weights
        finding.reason = LOST
    return finding


# The table ------------------------------------------------------------------------------------------------------------


def tell(findings: Sequence[Finding], steps: int) -> int:
    from rich.console import Console
    from rich.table import Table

    groups = ("examples", "losses", "gradients", "weights", "metrics")
    table = Table("layout", "precision", *groups, "verdict", box=None, header_style="bold")
    for f in findings:
        shown = ["" if not f.worst else _short(g, f.worst.get(g, 0.0)) for g in groups]
        table.add_row(f.layout, f.precision, *shown, f.verdict)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(f"{steps} steps; largest relative difference to the reference", table, sep="\n")
    for f in findings:
        if f.reason or f.where:
            told = "; ".join(part for part in (f.where, f.reason) if part)
            console.print(
                f"{f.layout}, {f.precision}: {f.verdict}: {told}", markup=False, soft_wrap=True
            )
    bad = [f for f in findings if f.verdict in ("DIFFERENT", "PROVES NOTHING")]
    console.print(
        "proved: what is learned did not change"
        if not bad
        else f"NOT proved: {len(bad)} of {len(findings)}"
    )
    return int(bool(bad))


def _short(group: str, value: float) -> str:
    if group == "examples":
        return "other" if value else "same"
    return "0" if value == 0 else f"{value:.0e}"


if __name__ == "__main__":
    run(main)
