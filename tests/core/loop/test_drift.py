"""Drift: copies of the state that differ between ranks, in each strategy."""

import pytest
import torch
from harness import on_ranks, slow_but
from harness.training import compose
from mesh_gpt import Meshed
from tiny import Tiny

from trainer import RunError
from trainer.core.trainer import active_run

STEPS = ["run.steps=6", "dist.drift_every_steps=3", "eval.every_epochs=null"]
TINY = ["task=tiny", *STEPS, "task.options.norm=true", "optim=adamw"]
MESHED = ["task=meshed", *STEPS, "optim=adamw"]
THREE = ["task.options.layers=3"]  # so that a stage has fewer tensors than the other


class Changing:
    """Task in which the last rank changes its own copy of `changed` before step 5."""

    changed = ""

    def augment(self, inputs, targets, random, train):
        if self.step == 4 and train and self.world.rank == self.world.world_size - 1:
            strategy = active_run(self).engine.strategy
            tensors = {**dict(self.model.named_buffers()), **strategy.tensors.parameters}
            with torch.no_grad():
                tensors[self.changed].view(-1)[:1] += 1e-3
        return super().augment(inputs, targets, random, train)


class Norm(Changing, Meshed):
    changed = "norm.weight"


class Block(Changing, Meshed):
    changed = "blocks.2.narrow.bias"


class Constant(Changing, Tiny):
    changed = "scale"

    def build_model(self):
        model = super().build_model()
        model.register_buffer("scale", torch.ones(1))
        return model


CASES = {
    "pp 2 x ddp 2": (4, ["strategy=pp", *THREE], Block, "blocks.2.narrow.bias on rank 3"),
    "fsdp 2": (2, ["strategy=fsdp"], Constant, "scale on rank 1"),
    "tp 2 x ddp 2": (4, ["strategy=tp"], Norm, "norm.weight on rank 3"),
    "cp 2": (2, ["strategy=cp"], Norm, "norm.weight on rank 1"),
}


@pytest.mark.parametrize("case", slow_but(CASES, "fsdp 2"))
def test_copy_of_a_part_that_drifts_is_named(case, tmp_path):
    ranks, words, task, named = CASES[case]
    words = [*(TINY if issubclass(task, Tiny) else MESHED), *words]
    compose(tmp_path, *words)

    def body():
        with pytest.raises(RunError) as told:
            task(compose(tmp_path, *words)).fit()
        return str(told.value)

    said = on_ranks(ranks, body)
    line = f"step 6: model.{named} differs from the other ranks; a rank changed only its own copy"
    assert len(set(said)) == 1 and said[0].startswith(line)
