"""A model over a mesh of ranks: sharded, tensor, context and pipeline parallel, and their mixes.

They are applied in this order: pipeline stages, tensor plan, recomputation, compilation of each
block, sharding. Optimizers, norm, moving average, digests and checkpoints use plain tensors: this
rank's parts of the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.distributed.rendezvous import choose_backend
from trainer.core.distributed.world import World
from trainer.core.hook_calls import call
from trainer.core.micro_batch import MicroBatch, MicroBatches, count_rows, take_rows
from trainer.core.state.sandbox import BufferCopies, keep_passes, sandbox
from trainer.core.strategy.base import ModelSpec, ObjectiveProtocol, Strategy
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.strategy.modules.batchnorm import FunctionalBatchNorm
from trainer.core.strategy.modules.dry_run import FlopCounter, eager
from trainer.core.strategy.single import SingleDevice
from trainer.core.strategy.structure import PROVED_BYTES
from trainer.mesh.assemble import PartitionedModel
from trainer.mesh.context_parallel import Context
from trainer.mesh.division_check import DivisionCheck, perturbed
from trainer.mesh.full_model import seeded
from trainer.mesh.gradient_sums import (
    DividedParameters,
    UnusedParameters,
    parts_named,
)
from trainer.mesh.loss_parallel import gathered
from trainer.mesh.mesh_cost import MeshCost
from trainer.mesh.mesh_tensors import DividedTensors, check_copies, check_shared
from trainer.mesh.p2p import order

PassResult = tuple[torch.Tensor | None, Any]  # a micro-batch's loss, and the passage of its stage


class MeshParallel(Strategy):
    """A model over `strategy.mesh`. Gradients are sums over the ranks, not means."""

    divides_gradients = True
    takes_mesh = True
    builds_on_rank_0 = True
    failures_named = staticmethod(parts_named)
    averages = False
    cost = MeshCost
    tensors: DividedTensors

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        block = config.strategy
        super().check(config, world)
        mesh = Mesh.of(block.mesh, world)
        if block.devices_per_rank > 1:
            raise ConfigError(f"""strategy.devices_per_rank={block.devices_per_rank}:
                must be 1 with a mesh that divides the model; use ddp""")
        if world.world_size > 1 and choose_backend(config.dist, world) == "mpi":
            raise ConfigError("dist.backend=mpi: cannot divide a model; use gloo or nccl")
        if mesh.divides_model and config.run.dropout == "torch":
            raise ConfigError(f"""run.dropout=torch:
                {mesh} cannot share the draws of torch's generator; use example""")
        if block.sequence and mesh.tensor == 1:
            raise ConfigError("strategy.sequence=true: strategy.mesh.tensor must be above 1")
        if block.sequence and mesh.context > 1:
            raise ConfigError("strategy.sequence=true: must be false with strategy.mesh.context")

    @classmethod
    def build(cls, spec: ModelSpec) -> Strategy:
        """Build the strategy; on one rank SingleDevice gives the same numbers."""
        return (SingleDevice if spec.world.world_size == 1 else cls)(spec)

    # Construction -------------------------------------------------------------------------------

    def _place(self, model: nn.Module) -> nn.Module:
        """Divide the model: it has values on rank 0, only shapes on others. A collective."""
        context = self.world.groups["context"]
        self._context = Context(context) if context.size > 1 else None
        self._division = PartitionedModel(self.spec, self.mesh, self._context)
        return model

    def _open_tensors(self) -> DividedTensors:
        """Return this rank's parts, and register them for the sums of gradients."""
        division = self._division
        tensors = DividedTensors(self.module, division, self.mesh, self.world)
        self._checked: set[str] = set()  # names of updates whose loss was watched for a step
        self._unused = UnusedParameters(tensors.trained, self.config.find_unused_parameters)
        if division.sharding is not None:
            division.sharding.fill_unused(lambda p: self._unused.note(tensors.local[p]))
        for name, parameter in tensors.parameters.items():
            if parameter.requires_grad:
                division.gradient_sums.add(name, tensors.wrapped[name], parameter)
        return tensors

    # Training -----------------------------------------------------------------------------------

    def prepare(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        before = BufferCopies(self.module)
        with sandbox(keep_passes(self.module, before)):
            watch = FunctionalBatchNorm.watch(self.tensors.structure, self.spec.config)
            watched = self.spec.draws.traces.watched("loss")
            checked = self._division.outputs_checked(self.module)
            with eager(self.spec.config), FlopCounter() as counter, watch, checked, watched:
                self._forward_backward([batch], objective)
            inputs, targets = batch
            own = counter.total / count_rows(targets, inputs)
            self.flops = self._division.partition.flops or own
            self.statistics.find(self.module, before, self._any_rank)
            self._check_reached(objective)
            check_copies(self.tensors, self._division.gradient_sums, self.world)
            check_shared(self.module, self._division.partition.shared, before, self.world)
        self.tensors.drop_gradients()
        if self._context is not None and not self._context.calls:
            raise ConfigError(f"""strategy.mesh.context={self.mesh.context}:
                the model never calls scaled_dot_product_attention; set 1""")
        prove = self.spec.config.run.prove
        if prove:
            self.finding = self.prove(batch, objective)
            if self.finding and prove != "warn":
                raise ConfigError(self.finding)
        self._compile(self._division.compiled)

    @property
    def _is_unproved(self) -> bool:
        size = sum(p.nbytes for p in self.tensors.structure.parameters())
        return self.mesh.divides_model and size > PROVED_BYTES

    def prove(self, batch: MicroBatch, objective: ObjectiveProtocol) -> str:
        """Return a line if a divided model has other outputs, gradients, or another loss.

        These mistakes cause no other error: a wrong tensor plan (columns instead of columns/3, or
        no positions), and a loss that compares positions, or that reads the model's parameters.
        """
        if not self.mesh.divides_model or self._is_unproved:
            return ""
        inputs, targets = take_rows(batch, 2 * (self.spec.config.norm_rows or 1))
        divided = self.module.eval()
        checked, self._checked = self._checked, set()  # this pass is watched, and counts as none
        with sandbox(keep_passes(self.module)), perturbed(self.tensors) as whole:
            check = DivisionCheck(whole.eval(), self.mesh, self.world, self.precision, objective)
            try:
                with torch.no_grad():
                    outputs = self.forward(inputs)
                    own = self._loss_sums(inputs, targets, objective)
                self.module = whole  # a loss may read the task's model
                line = check.compare_values(inputs, targets, outputs, own)
                if not line:
                    gradients = check.gradients(inputs, targets)
                    self.module = divided
                    with seeded(self.world.device):
                        self.forward_backward([(inputs, targets)], objective)
                    line = check.compare_gradients(self.tensors, gradients)
            finally:
                self.module = divided.train()
                self.tensors.drop_gradients()
                self._checked = checked
        return f"strategy.mesh: {self.mesh}: {line}" if line else ""

    def _loss_sums(self, inputs: Any, targets: Any, objective: ObjectiveProtocol) -> torch.Tensor:
        """Return `objective.sums` over the ranks that divide the rows' positions."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        inputs, targets = self._cut(inputs, targets)
        with self._modes(), self.precision.autocast():
            outputs = self._run(inputs)
            if self.mesh.has_loss:
                with seeded(self.world.device), self.precision.autocast():
                    sums = objective.sums(outputs, targets)
        self._wait_for_sent()
        if self.mesh.context > 1:
            self.world.groups["context"].all_reduce(sums)
        return sums

    def _reading(self, objective: ObjectiveProtocol) -> AbstractContextManager[Any]:
        """Check the parameters that a loss uses, in the dry run and in its first step."""
        if objective.name in self._checked:
            return nullcontext()
        named = self.module.named_parameters()
        divides = self._division.placements.divides
        return DividedParameters({p: name for name, p in named if divides(name, p)})

    def compute(self, inputs: Any, targets: Any, loss: Callable[[Any, Any], Any]) -> None:
        inputs, targets = self._cut(inputs, targets)
        with self._modes(), self.precision.autocast(), self._division.outputs_checked(self.module):
            outputs = self._run(inputs)
            if self.mesh.has_loss:
                loss(outputs, targets)
        self._wait_for_sent()

    def forward(self, inputs: Any) -> Any:
        inputs, _ = self._cut(inputs, ())
        with self._modes(), self.precision.autocast(), self._division.outputs_checked(self.module):
            outputs = self._run(inputs)
        self._wait_for_sent()
        if not self.mesh.has_loss:
            return None
        outputs = gathered(outputs)
        return outputs if self._context is None else self._context.join(outputs)

    def _run(self, inputs: Any) -> Any:
        root = self._division.root
        return root(inputs) if self._division.stage is not None else call(root, inputs)

    def _cut(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        return (inputs, targets) if self._context is None else self._context.cut(inputs, targets)

    def _modes(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._context is None else self._context

    def _wait_for_sent(self) -> None:
        if self._division.stage is not None:
            self._division.stage.p2p.wait()

    def forward_backward(self, batch: MicroBatches, objective: ObjectiveProtocol) -> torch.Tensor:
        self.tensors.note_replaced()
        self.statistics.begin()
        totals = self._forward_backward(batch, objective).to(torch.float64, copy=True)
        self._checked.add(objective.name)  # its loss, which a train_step may have changed
        self.spec.reduce_begun(None)
        reached = self._unused.flags()
        statistics = [part.detach().double().flatten() for part in self.statistics.read()]
        others = torch.cat([*reached, *statistics]) if reached or statistics else totals[:0]
        copies = self._division.gradient_sums.copies
        if copies.size == self.mesh.size:
            summed = torch.cat([totals, others])
            dist.all_reduce(summed)
            totals, others = summed[: len(totals)], summed[len(totals) :]
        else:
            dist.all_reduce(totals)
            if len(others) and copies.size > 1:
                dist.all_reduce(others, group=copies.group)
        for flags in reached:
            self._unused.fill(others[: len(flags)])
        for parameter in objective.others or ():
            parameter.grad = None  # on every rank, so that all sum the same ones
        self._check_reached(objective)
        self._division.gradient_sums.reduce()
        self._write_statistics(others[sum(map(len, reached)) :])
        return totals.to(self.precision.wide)

    def _forward_backward(self, batch: Any, objective: ObjectiveProtocol) -> torch.Tensor:
        """Accumulate this rank's part of the gradients; return the carried totals."""
        self._unused.begin()
        totals: torch.Tensor | None = None
        passed: dict[int, PassResult] = {}
        batches = iter(batch)
        mesh = self.mesh
        with self._modes():
            for is_forward, batch_number in order(
                self.config.schedule, mesh.pipeline, mesh["pipeline"], len(batch)
            ):
                if is_forward:
                    passed[batch_number], carried = self._pass(next(batches), objective)
                    totals = carried if totals is None else totals + carried
                    continue
                if mesh.pipeline > 1 and len(batch) > 1:
                    batch.repeat_draws(batch_number)  # a recomputation repeats its draws
                self._return(
                    *passed.pop(batch_number), batch_number == len(batch) - 1, objective.scale
                )
        self._wait_for_sent()
        assert totals is not None
        self.tensors.take_gradients()
        self._unused.drop(len(batch))
        return totals

    def _pass(
        self, batch: MicroBatch, objective: ObjectiveProtocol
    ) -> tuple[PassResult, torch.Tensor]:
        """Run a micro-batch forward; return (loss, passage of the stage) and the carried totals."""
        self.statistics.rewind()
        inputs, targets = self._cut(*batch)
        total: torch.Tensor | None = None
        with self.precision.autocast():
            outputs = self._run(inputs)
            if self.mesh.has_loss:
                with self._reading(objective):
                    total, carried = objective(outputs, targets)
            else:
                carried = objective.absent()
        self.statistics.note(targets, inputs)
        stage = self._division.stage
        return (total, stage.passage if stage else None), carried

    def _return(
        self, total: torch.Tensor | None, passage: Any, is_last: bool, scale: float
    ) -> None:
        """Run a micro-batch backward."""
        if self._division.sharding is not None:
            self._division.sharding.begin_backward(is_last)
        stage = self._division.stage
        if total is not None:
            torch.autograd.backward(total, self.precision.root(total, scale))
        else:
            assert stage
            gradients = stage.p2p.receive_gradients(passage.sent)
            roots = [tensor for tensor in passage.sent if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, gradients)
        if stage:
            stage.p2p.send_gradients(passage.received)

    @torch.no_grad()
    def _write_statistics(self, summed: torch.Tensor) -> None:
        if self.statistics.rows is None:  # torch's own: the mean over the ranks
            summed = summed / self.mesh.data_size
        summed = summed / self.mesh.context
        sizes = self.statistics.sizes
        self.statistics.write(summed.split(sizes) if sizes else [])

    def reduce(
        self, found_inf: torch.Tensor, wants_norm: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        values = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        values[0] = found_inf
        if wants_norm:
            values[1] = self._square()
        dist.all_reduce(values)
        found_inf_of_any = (values[0] > 0).to(found_inf.dtype)
        return found_inf_of_any, values[1].sqrt().to(self.precision.wide)

    def _square(self) -> torch.Tensor:
        """Return this rank's part of the square of the gradients' norm."""
        copies: dict[int, list[torch.Tensor]] = {}
        for name, parameter in self.tensors.parameters.items():
            if parameter.requires_grad and parameter.grad is not None:
                num_copies = self._division.placements.num_copies(name, self.tensors.wrapped[name])
                copies.setdefault(num_copies, []).append(parameter.grad)
        norms = {
            n: get_total_norm([g.float() if g.dtype.itemsize < 4 else g for g in gradients])
            for n, gradients in copies.items()
        }
        return sum((norm.double() ** 2 / n for n, norm in norms.items()), torch.zeros(()))

    def close(self) -> nn.Module | None:
        """Release the process groups that FSDP2's modules keep.

        At exit they could end the process with SIGABRT.
        """
        if self._division.sharding is not None:
            self._division.sharding.end()
        return None

    def list_remarks(self, is_resumed: bool) -> list[str]:
        tensors = self.tensors
        shards = [tensors.shard_of(p) for p in tensors.parameters.values()]
        total = sum(p.numel() for p in tensors.structure.parameters())
        own = sum(shard.tensor.numel() for shard in shards)
        size = sum(shard.tensor.nbytes for shard in shards)
        has = f"rank {self.world.rank} has {own:,} of {total:,} parameters, {size:,} bytes"
        batch = self.spec.config.data
        rows = -(-batch.global_batch // self.mesh.data_size)
        count = -(-rows // (batch.most_rows or rows))
        lines = [f"mesh: {self.mesh}; {has}", *self._division.list_remarks(count)]
        if self._is_unproved:
            lines.append("the outputs were not compared with the whole model's: it is too large")
        if self.finding:
            lines.append(f"warning: {self.finding}")
        return lines


STRATEGY = MeshParallel
