"""The same bits on any number of ranks: gradients are summed in one fixed binary tree (law 13).

A *leaf* is a micro-batch of fixed size. Every sum over a global batch is computed in one binary
tree over its leaves.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.data.order import BatchSplit, Leaves, split
from trainer.core.distributed import accelerator
from trainer.core.distributed.world import World
from trainer.core.hook_calls import call
from trainer.core.micro_batch import MicroBatch, MicroBatches
from trainer.core.state.sandbox import BufferCopies, keep_passes, sandbox
from trainer.core.strategy.base import ModelSpec, ObjectiveProtocol, Strategy
from trainer.core.strategy.cost import (
    AGREED,
    ESTIMATED,
    Cost,
    MemoryRow,
    Message,
    PlannedRank,
    size_of,
)


class Node(NamedTuple):
    """The sum of the leaves from number x 2**level to (number + 1) x 2**level - 1."""

    level: int
    number: int


class Tree:
    """Sum of nodes that are added from left to right; two siblings become their parent.

    It works as a binary counter, which stores at most log2(leaves) vectors.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[Node, torch.Tensor]] = []

    def add(self, node: Node, vector: torch.Tensor) -> None:
        """Add a node to the right of all previous ones; `vector` may be modified in place."""
        while node.number % 2 and self._nodes:
            before, left = self._nodes[-1]
            if before != (node.level, node.number - 1):
                break
            self._nodes.pop()
            vector = left.add_(vector)
            node = Node(node.level + 1, node.number // 2)
        self._nodes.append((node, vector))

    def nodes(self) -> list[Node]:
        return [node for node, _ in self._nodes]

    def vectors(self) -> list[torch.Tensor]:
        return [vector for _, vector in self._nodes]

    def root(self) -> torch.Tensor:
        """Return the total of all leaves; a node without a sibling stands for its parent."""
        while len(self._nodes) > 1:
            node, vector = self._nodes.pop()
            self.add(
                Node(node.level + 1, node.number // 2) if not node.number % 2 else node, vector
            )
        return self._nodes[0][1]


def nodes_of(first: int, last: int) -> list[Node]:
    """Return the largest nodes that make up the leaves from `first` up to, without, `last`."""
    nodes = []
    while first < last:
        level = 0
        while first % 2 ** (level + 1) == 0 and first + 2 ** (level + 1) <= last:
            level += 1
        nodes.append(Node(level, first >> level))
        first += 2**level
    return nodes


MOST_LEAVES = 8  # by default, if the global batch has such divisors: enough for 8 ranks


class TreeCost(Cost):
    """The cost of sums of the leaves in a tree."""

    @classmethod
    def messages(cls, rank: PlannedRank) -> list[Message]:
        size = rank.mesh.replicate
        leaves = rank.config.data.global_batch // rank.rows
        vectors = len(nodes_of(*split((0, leaves), size, 0)))
        length = sum(p.numel() for p in rank.trained) + AGREED + rank.num_statistics
        each = -(-length // size) * max(4, rank.itemsize) * (size - 1)
        return [
            Message("replicate", "all-to-all of gradients", 1, vectors * each),
            Message("replicate", "all-gather of gradients", 1, each),
        ]

    @classmethod
    def memory(cls, rank: PlannedRank) -> list[MemoryRow]:
        """Return the row of the vectors to sum, each with all gradients."""
        ranks = rank.mesh.data_size
        mine = -(-(rank.config.data.global_batch // rank.rows) // ranks)
        depth = math.ceil(math.log2(mine)) + 1 if mine > 1 else 1
        vectors = depth + 2 * len(nodes_of(0, mine)) * (ranks > 1)
        size = vectors * size_of(rank.trained)
        return [MemoryRow("sums of leaves", size, ESTIMATED, f"{vectors} vectors")]


class Exact(Strategy):
    """Gradients, weights of the batch and running statistics, summed in one fixed binary tree.

    The leaves are the run's micro-batches, on whichever rank they are computed. A rank adds up the
    subtrees whose leaves are all its own. An all-to-all exchanges these sums in equal parts, each
    rank adds its part in the tree's order, and an all-gather collects the result. With one subtree
    per rank it sends as many bytes as a ring all-reduce. Bit-exact elasticity is also the aim of
    EasyScale (Li et al., SC 2023), which uses virtual workers for it.
    """

    averages = False
    cost = TreeCost
    of_the_run = ("strategy.name", "data.micro_batch", "eval.micro_batch")

    @classmethod
    def batch_split(cls, config: Config) -> BatchSplit:
        rows = config.data.most_rows or _default_leaf(config)
        return BatchSplit(rows, rows, is_fixed=True)

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        block = config.strategy
        if block.comm_hook != "none":
            raise ConfigError(f"""strategy.comm_hook={block.comm_hook}:
                strategy=exact sums in its own order; use none, or ddp""")
        super().check(config, world)
        if config.data.micro_batch == "auto":
            raise ConfigError(f"""data.micro_batch=auto: belongs to the run under strategy=exact,
                so it cannot depend on the memory; set {_default_leaf(config)}""")
        rows = cls.batch_split(config).unit
        whole = config.data.global_batch
        if block.sync_batchnorm:
            raise ConfigError("""strategy.sync_batchnorm=true: has no fixed order of sums;
                set run.norm_rows under strategy=exact""")
        if block.devices_per_rank > 1:
            raise ConfigError(f"""strategy.devices_per_rank={block.devices_per_rank}:
                must be 1 under strategy=exact; use ddp""")
        if whole % rows:
            raise ConfigError(f"""data.micro_batch={rows}: must divide data.global_batch={whole}
                under strategy=exact; set {_default_leaf(config)}""")
        if whole // rows < world.world_size:
            raise ConfigError(f"""data.micro_batch={rows}:
                data.global_batch={whole} is {whole // rows} leaves,
                and {world.world_size} ranks need one each; make it smaller""")

    @classmethod
    def set_threads(cls, world: World) -> int:
        """Set one thread on a CPU, where the order of a kernel's sums depends on the threads.

        On other devices, turn on torch's deterministic algorithms. With warn_only the backward pass
        of fused attention would stay as it is, and only warn.
        """
        if accelerator.is_used(world.device):
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first cuBLAS
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            flag = "fill_uninitialized_memory"  # of each new tensor, which takes time
            setattr(torch.utils.deterministic, flag, False)
            return super().set_threads(world)
        torch.set_num_threads(1)
        return 1

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        config = spec.config
        self._leaf = self.batch_split(config).unit
        total = config.data.global_batch // self._leaf
        parts = [split((0, total), self.mesh.data_size, r) for r in range(self.mesh.data_size)]
        first, last = parts[self.mesh.data_rank]
        self.leaves = Leaves(first, last - first, total)
        self._nodes = [nodes_of(first, last) for first, last in parts]
        self._strides: list[tuple[int, ...]] = []

    def prepare(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        before = BufferCopies(self.module)
        with sandbox(keep_passes(self.module, before, has_large=False)):
            with _deterministic():
                self._dry_run(batch, objective)
            self.statistics.find(self.module, before, self._any_rank)
            self._check_reached(objective)
        self._strides = [parameter.stride() for parameter in self.tensors.trained]

    def forward_backward(self, batch: MicroBatches, objective: ObjectiveProtocol) -> torch.Tensor:
        assert self.leaves is not None
        tree = Tree()
        self.statistics.begin()
        for leaf_number, (inputs, targets) in enumerate(batch, self.leaves.first):
            self.statistics.rewind()
            with self.precision.autocast():
                total, carried = objective(call(self.module, inputs, self.rows), targets)
            part = self.statistics.part(targets, inputs)
            torch.autograd.backward(total, self.precision.root(total, objective.scale))
            self._check_reached(objective)
            tree.add(Node(0, leaf_number), self._pack(carried, part))
            self.tensors.drop_gradients()
        self.spec.reduce_begun(None)
        return self._unpack(self._reduce(tree))

    def list_remarks(self, is_resumed: bool) -> list[str]:
        assert self.leaves is not None
        leaves = f"{self.leaves.total} leaves of {self._leaf} rows"
        threads = ", each with one thread" if self.world.device.type == "cpu" else ""
        return [f"exact: {leaves} in one tree, the same bits on any number of ranks{threads}"]

    # Vectors ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _pack(self, carried: torch.Tensor, statistics: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack all values to sum over the leaves into one vector; gradients in memory order."""
        flat = [carried, *(buffer.reshape(-1) for buffer in statistics)]
        if self.config.find_unused_parameters:
            reached = [float(p.grad is not None) for p in self.tensors.trained]
            flat.append(torch.tensor(reached, device=carried.device))
        for parameter, strides in zip(self.tensors.trained, self._strides, strict=True):
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            if gradient.is_sparse:
                raise ConfigError("""strategy=exact: sparse gradients have no fixed order of sums;
                    set sparse=False""")
            if gradient.stride() != strides:
                gradient = gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)
            flat.append(gradient.as_strided((gradient.numel(),), (1,)))
        dtypes = {tensor.dtype for tensor in flat}
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        return torch.cat([tensor.to(wide) for tensor in flat])

    @torch.no_grad()
    def _unpack(self, vector: torch.Tensor) -> torch.Tensor:
        sizes = self.statistics.sizes
        offset = 2 + sum(sizes)
        self.statistics.write(vector[2:offset].split(sizes) if sizes else [])
        reached = [1.0] * len(self.tensors.trained)
        if self.config.find_unused_parameters:
            reached = vector[offset : offset + len(reached)].tolist()
            offset += len(reached)
        for index, parameter in enumerate(self.tensors.trained):
            if reached[index]:
                part = vector[offset : offset + parameter.numel()].to(parameter.dtype)
                parameter.grad = part.as_strided(parameter.shape, self._strides[index])
            offset += parameter.numel()
        return vector[:2].clone()

    def _reduce(self, tree: Tree) -> torch.Tensor:
        """Return the root of the tree on every rank. Collective: every rank must call it."""
        ranks = self.mesh.data_size
        if ranks == 1:
            return tree.root()
        vectors = tree.vectors()
        length = len(vectors[0])
        each = -(-length // ranks)
        sent = vectors[0].new_zeros(ranks, len(vectors), each)
        for index, vector in enumerate(vectors):
            padded = nn.functional.pad(vector, (0, each * ranks - length))
            sent[:, index] = padded.view(ranks, each)
        counts = [len(nodes) for nodes in self._nodes]
        received = sent.new_empty(sum(counts), each)
        sizes = [count * each for count in counts]
        own = [len(vectors) * each] * ranks
        dist.all_to_all_single(received.view(-1), sent.view(-1), sizes, own)
        joined = Tree()
        for node, part in zip(chain(*self._nodes), received, strict=True):
            joined.add(node, part)
        whole = received.new_empty(ranks * each)
        dist.all_gather(list(whole.view(ranks, each).unbind()), joined.root())
        return whole[:length]


@contextmanager
def _deterministic() -> Iterator[None]:
    """Raise ConfigError for an operation that has no deterministic kernel on this device."""
    try:
        yield
    except Exception as error:
        match = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if match is None:
            raise
        raise ConfigError(f"""strategy=exact: {match[1]} has no deterministic kernel on this device;
            choose another, or use ddp""") from error


def _default_leaf(config: Config) -> int:
    """Return the largest leaf that gives a global batch eight leaves, or else the smallest."""
    whole = config.data.global_batch
    unit = config.norm_rows or 1
    fitting = [rows for rows in range(unit, whole + 1, unit) if whole % rows == 0]
    return max((rows for rows in fitting if whole // rows >= MOST_LEAVES), default=fitting[0])


STRATEGY = Exact
