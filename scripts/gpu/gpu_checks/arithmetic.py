"""Arithmetic: precisions, the loss scale, TF32, and random bits that are equal on every device."""

from __future__ import annotations

import math

import torch
from harness import newest
from harness.stored import plain_of
from torch import nn

from trainer import ConfigError, Random
from trainer.core.rng.philox import Order

from .runs import Here, at_most, check_learned, distance, losses, relative, weights

MODELS = {
    "text": ["task.options.layers=2", "data.global_batch=8", "eval.every_steps=null"],
    "cifar": ["task.options.data=bundled", "data.global_batch=40", "eval.every_epochs=null"],
    "cifar-resnet18": [
        *["task.options.data=bundled", "data.global_batch=20", "eval.every_epochs=null"],
        *["task.options.model=resnet18", "optim=sgd"],
    ],
}
PRECISIONS = ("fp64", "fp32", "tf32", "amp_bf16", "amp_fp16", "bf16", "fp16")


def amp_fp16(here: Here) -> str:
    """Check that steps are skipped, the loss scale decreases and the run succeeds if the scaled
    gradient overflows."""
    overflow = ["strategy.precision=amp_fp16", "task.options.amplify=256", "optim.lr=0.001"]
    _, summary = here.fit("overflow", *overflow)
    state, found = plain_of(newest(summary.directory))["precision"], weights(summary.directory)
    scale = float(state["scale"])
    assert scale < 2**16, f"no step was skipped: the scale is still {scale:g}"
    assert all(bool(w.isfinite().all()) for w in found.values()), "a weight is not finite"
    check_learned(losses(summary.directory), "amp_fp16")
    return (
        f"{round(math.log2(2**16 / scale))} steps skipped, the scale went from 65,536 to "
        f"{scale:,.0f}"
    )


def tf32(here: Here) -> str:
    """Check that tf32 sets torch's two flags and rounds, and that fp32 clears them and does not."""
    errors = {}
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator).to(here.device) for _ in range(2))
    images = torch.randn(16, 64, 32, 32, generator=generator).to(here.device)
    filters = torch.randn(64, 64, 3, 3, generator=generator).to(here.device)
    convolve = nn.functional.conv2d
    for name in ("tf32", "fp32"):
        try:
            here.fit(name, f"strategy.precision={name}")
        except ConfigError as error:
            assert here.device.type == "cpu" and name == "tf32", error
            continue
        if here.device.type == "cuda":
            flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
            assert flags == (name == "tf32",) * 2, (
                f"{name}: allow_tf32 is {flags} for (matmul, cudnn)"
            )
        exact = a.double() @ b.double(), convolve(images.double(), filters.double())
        errors[name] = (
            relative(exact[0], (a @ b).double()),
            relative(exact[1], convolve(images, filters).double()),
        )
    assert max(errors["fp32"]) < 1e-5, (
        f"fp32 is not fp32: (matmul, convolution) off by {errors['fp32']}"
    )
    notes = [
        "{}: matmul off by {:.1e}, convolution by {:.1e}".format(name, *found)
        for name, found in errors.items()
    ]
    if "tf32" not in errors:
        return f"refused on the CPU; {notes[0]}"
    assert 1e-5 < errors["tf32"][0] < 1e-2 and errors["tf32"][1] < 1e-2, (
        f"tf32 is off by {errors['tf32']}"
    )
    return "; ".join(notes)


def bits(here: Here) -> str:
    """Check that counter-based draws are equal on both devices; normal numbers are rounded."""
    indices = torch.cat([torch.arange(5000), torch.tensor([2**31, 2**32 + 7, 2**40])])
    for epoch, per in ((0, "epoch"), (2**31, "epoch"), (3, "run")):
        ours, theirs = (
            Random(2**40 + 1, "train", epoch, where) for where in (indices, indices.to(here.device))
        )
        for name, arguments in (
            ("bits", (3, 5)),
            ("uniform", (7,)),
            ("integers", (-5, 2**31 - 5, 2)),
        ):
            wanted = getattr(ours, name)(name, *arguments, per=per)
            found = getattr(theirs, name)(name, *arguments, per=per)
            assert found.device.type == here.device.type and torch.equal(wanted, found.cpu()), (
                f"{name} differs"
            )
    assert torch.equal(
        Order(7, 1, 5003)(torch.arange(5003)),
        Order(7, 1, 5003)(indices[:5000].new_tensor(range(5003))),
    )
    off = float((ours.normal("noise", 8) - theirs.normal("noise", 8).cpu()).abs().max())
    assert off < 1e-5, f"normal differs by {off:.1e}"
    return f"bits, uniform, integers are equal; normal differs by at most {off:.1e}"


def as_on_cpu(here: Here) -> str:
    """Check that the tasks' models learn in fp64 what they learn on the CPU."""
    notes = []
    words = ["strategy.precision=fp64", "run.steps=4", "log.every_steps=1"]
    for name, more in MODELS.items():
        recipe = name.partition("-")[0]
        own, other = (
            here.launch(f"{name}-{place}", *words, *more, recipe=recipe, device=place)
            for place in (None, "cpu")
        )
        notes.append(at_most(distance(own, other), 1e-8, f"task={name} differs from the CPU"))
    return "; ".join(notes)


def precisions(here: Here) -> str:
    """Check that every precision trains, with clipping and an EMA, under SGD and Adam."""
    names = [name for name in PRECISIONS if here.device.type == "cuda" or name != "tf32"]
    problems = []
    for name in names:
        for optim in (
            ["optim=sgd", "optim.lr=0.3"],
            ["optim=adam", "optim.lr=0.02", "optim.eps=1e-4"],
        ):
            words = [f"strategy.precision={name}", "run.clip_norm=5", "run.ema_decay=0.9", *optim]
            try:
                _, run = here.fit(f"{name}-{optim[0][6:]}", *words)
                check_learned(losses(run.directory), name)
            except Exception as error:  # report the other precisions too
                problems.append(
                    f"{name}, {optim[0][6:]}: {type(error).__name__}: {error}".splitlines()[0]
                )
    assert not problems, "; ".join(problems)
    return f"{', '.join(names)}: each with SGD and Adam"
