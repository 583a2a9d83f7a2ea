"""A binary tree of sums: the same additions in the same order on any number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
